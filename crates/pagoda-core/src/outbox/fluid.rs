//! One job against a finite space, as a fluid; and the closed form of the queue where it is exact.
//!
//! A job computes for `c` seconds and writes `D` bytes evenly while it computes. The space holds `B` bytes and drains at
//! `r`. A job that finds the space full waits for it, and does not compute meanwhile. With a backlog `q0` at its start:
//!
//! ```text
//! S(B) = max(c, (q0 + D - B) / r)                                    service time
//! R    = E[S] + lambda E[S^2] / (2 (1 - lambda E[S]))                Pollaczek-Khinchine, M/G/1, in order of arrival
//! ```
//!
//! Space does not make a job faster than `c`: it removes blocking. The closed form wants service times that do not depend
//! on each other. That is so at both ends: with no space (`S = max(c, D/r)`), and with space without end (`S = c`). In
//! between, jobs inherit a backlog, and [`super::stream`] computes the queue job by job.

/// One job, as the model counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JobSize {
    pub compute_s: f64,
    pub output: f64,
}

/// The end of one job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// From its start to its end.
    pub service_s: f64,
    /// Bytes in the space at its end.
    pub backlog: f64,
}

/// One job in a space of `space` bytes that has `backlog` of them in use and drains `drain` bytes a second.
pub fn serve(job: JobSize, backlog: f64, space: f64, drain: f64) -> Served {
    // A space that was made smaller takes nothing until it has drained to its new size.
    let wait_s = (backlog - space).max(0.0) / drain;
    let start = backlog.min(space);
    let run_s = job.compute_s.max((start + job.output - space) / drain);
    Served { service_s: wait_s + run_s, backlog: (start + job.output - drain * run_s).max(0.0) }
}

/// The first two moments of a service time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    pub mean_s: f64,
    pub mean_square_s2: f64,
}

impl Moments {
    /// Of values; zero of none.
    pub fn of(values: impl Iterator<Item = f64>) -> Moments {
        let (mut sum, mut squares, mut count) = (0.0, 0.0, 0.0);
        for value in values {
            (sum, squares, count) = (sum + value, squares + value * value, count + 1.0);
        }
        let count = f64::max(count, 1.0);
        Moments { mean_s: sum / count, mean_square_s2: squares / count }
    }
}

/// The mean response time of an M/G/1 queue in order of arrival; `None` if it is overloaded.
pub fn pollaczek_khinchine(arrivals_per_s: f64, service: Moments) -> Option<f64> {
    let load = arrivals_per_s * service.mean_s;
    (load < 1.0).then(|| service.mean_s + arrivals_per_s * service.mean_square_s2 / (2.0 * (1.0 - load)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    /// The same job in steps of a tenth of a millisecond.
    fn naive(job: JobSize, mut used: f64, space: f64, drain: f64) -> Served {
        let step_s = 1e-4;
        let (mut done, mut time_s) = (0.0, 0.0);
        let pace = job.output / job.compute_s;
        while done < job.output {
            used = f64::max(used - drain * step_s, 0.0);
            let written = (pace * step_s).min((space - used).max(0.0)).min(job.output - done);
            (done, used, time_s) = (done + written, used + written, time_s + step_s);
        }
        Served { service_s: time_s, backlog: used }
    }

    #[test]
    fn a_job_takes_what_a_naive_simulation_of_it_takes() {
        let check = |compute_s: f64, output: f64, backlog: f64, space: f64, drain: f64| {
            let job = JobSize { compute_s, output: output * MB };
            let ours = serve(job, backlog * MB, space * MB, drain * MB);
            let theirs = naive(job, backlog * MB, space * MB, drain * MB);
            assert!((ours.service_s / theirs.service_s - 1.0).abs() < 0.01, "{job:?}: {ours:?} {theirs:?}");
            assert!((ours.backlog - theirs.backlog).abs() < 0.3 * MB, "{job:?}: {ours:?} {theirs:?}");
        };
        check(2.0, 100.0, 0.0, 1000.0, 40.0); // never full
        check(2.0, 100.0, 0.0, 20.0, 40.0); // full midway
        check(2.0, 100.0, 20.0, 20.0, 40.0); // full at its start
        check(2.0, 100.0, 60.0, 20.0, 40.0); // shrunk below its backlog
        check(2.0, 40.0, 30.0, 50.0, 28.0); // slower than the drain: the backlog falls
        check(2.0, 40.0, 3.0, 50.0, 28.0); // and is gone before the end
        check(2.0, 40.0, 80.0, 50.0, 28.0); // shrunk, and slower than the drain
        // Measured with a virtio-fs server under TCG, 2 CPUs, 2026-11: 134.2 MB at 20 MB/s through 8.4 MB took 6.28 s.
        let measured = serve(JobSize { compute_s: 0.55, output: 134.2 * MB }, 0.0, 8.4 * MB, 20.0 * MB);
        assert!((measured.service_s * 1000.0 - 6280.0).abs() < 20.0, "{measured:?}");
    }

    #[test]
    fn the_closed_form_is_that_of_known_queues() {
        // M/M/1: R = 1 / (mu - lambda). M/D/1: half of its waiting.
        let exponential = Moments { mean_s: 0.5, mean_square_s2: 0.5 };
        let constant = Moments { mean_s: 0.5, mean_square_s2: 0.25 };
        assert!((pollaczek_khinchine(1.5, exponential).unwrap() - 2.0).abs() < 1e-12);
        assert!((pollaczek_khinchine(1.5, constant).unwrap() - 1.25).abs() < 1e-12);
        assert_eq!(pollaczek_khinchine(2.0, constant), None);
        assert_eq!(Moments::of([1.0, 3.0].into_iter()), Moments { mean_s: 2.0, mean_square_s2: 5.0 });
    }
}
