//! What an outbox's process tells of its guest's jobs, checked and on the daemon's clock.
//!
//! A process of an older version does not know the question and breaks the connection. After [`MISSES_MAX`] of that it is not asked
//! again: nothing is known of its jobs, and all else goes on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use pagoda_abi::attach::{OutboxCounts, OutboxJob};
use pagoda_core::outbox::profile::{Counters, Job};
use pagoda_core::units::Bytes;

use super::line::{ANSWER_WAIT, Line};

/// Questions without an answer, one after the other and before any answer, after which a process is taken to know no jobs.
const MISSES_MAX: u32 = 3;
/// Packets that are asked for at a time: more than any guest ends in a second, unless it writes nothing.
const PACKETS_MAX: usize = 16;
/// How many of the last jobs are shown.
const RECENT_MAX: usize = 10;

/// What was heard of one outbox.
#[derive(Debug, Default)]
pub struct Hearing {
    misses: u32,
    /// The last job that was heard of; `None` before the first answer.
    cursor: Option<u64>,
    counts: Option<OutboxCounts>,
    /// The last jobs, the newest first.
    recent: VecDeque<OutboxJob>,
    /// Jobs that were forgotten before they were asked for.
    lost: u64,
}

/// What came at one time.
#[derive(Debug, Default)]
pub struct Heard {
    pub counters: Counters,
    pub jobs: Vec<Job>,
}

impl Hearing {
    /// Whether it is worth asking.
    pub fn is_worth_it(&self) -> bool {
        self.cursor.is_some() || self.misses < MISSES_MAX
    }

    pub fn counts(&self) -> Option<&OutboxCounts> {
        self.counts.as_ref()
    }

    pub fn recent(&self) -> impl Iterator<Item = &OutboxJob> {
        self.recent.iter()
    }

    pub fn lost(&self) -> u64 {
        self.lost
    }

    pub fn cursor(&self) -> Option<u64> {
        self.cursor
    }

    pub fn miss(&mut self) {
        self.misses = self.misses.saturating_add(1);
    }

    /// Takes answers in, at `now_ms` of the daemon's clock.
    pub fn take(&mut self, now_ms: u64, answers: Vec<(OutboxCounts, Vec<OutboxJob>)>) -> Option<Heard> {
        let counts = answers.last()?.0;
        self.counts = Some(counts);
        let mut heard = Heard { counters: counters(&counts), jobs: Vec::new() };
        let Some(mut cursor) = self.cursor else {
            // What ended before is of no period.
            self.cursor = Some(counts.last);
            return Some(heard);
        };
        for (told, jobs) in &answers {
            for job in jobs {
                self.lost += job.number.saturating_sub(cursor + 1);
                cursor = job.number;
                heard.jobs.push(on_clock(now_ms, told, job));
                self.recent.push_front(*job);
                self.recent.truncate(RECENT_MAX);
            }
        }
        self.cursor = Some(cursor);
        Some(heard)
    }
}

fn counters(counts: &OutboxCounts) -> Counters {
    Counters {
        produced: Bytes(counts.written),
        acknowledged: Bytes(counts.acknowledged),
        sending: Duration::from_micros(counts.sending_us),
        blocked: Duration::from_micros(counts.blocked_us),
        arrivals: counts.began,
    }
}

/// A job's times as ages before now: the two clocks have nothing else in common.
fn on_clock(now_ms: u64, told: &OutboxCounts, job: &OutboxJob) -> Job {
    let ended_ms = now_ms.saturating_sub(told.now_ms.saturating_sub(job.ended_ms));
    let began_ms = ended_ms.saturating_sub(job.ended_ms.saturating_sub(job.began_ms));
    Job {
        arrived_ms: began_ms,
        began_ms,
        ended_ms,
        compute: Duration::ZERO,
        blocked: Duration::from_micros(job.blocked_us),
        output: Bytes(job.output),
        backlog: Bytes(job.backlog),
    }
}

/// Asks for all jobs behind `cursor`, or for counts alone.
///
/// # Errors
/// No answer, or what cannot be.
pub fn ask(line: &mut Line, cursor: Option<u64>) -> Result<Vec<(OutboxCounts, Vec<OutboxJob>)>> {
    let mut answers = Vec::new();
    let mut after = cursor.unwrap_or(u64::MAX);
    let begun = Instant::now();
    for _ in 0..PACKETS_MAX {
        let (counts, jobs) = line.ask_jobs(after)?;
        let jobs = jobs.as_slice().to_vec();
        check(&counts, &jobs, cursor.map(|_| after))?;
        let Some(last) = jobs.last() else {
            answers.push((counts, jobs));
            break;
        };
        after = last.number;
        answers.push((counts, jobs));
        // The rest is asked for the next time: others wait for this connection.
        if after >= counts.last || begun.elapsed() >= ANSWER_WAIT {
            break;
        }
    }
    Ok(answers)
}

fn check(counts: &OutboxCounts, jobs: &[OutboxJob], after: Option<u64>) -> Result<()> {
    let Some(mut before) = after else {
        ensure!(jobs.is_empty(), "it tells of jobs that it was not asked for");
        return Ok(());
    };
    for job in jobs {
        ensure!(job.number > before && job.number <= counts.last, "its jobs are not in their order");
        ensure!(job.began_ms <= job.ended_ms && job.ended_ms <= counts.now_ms, "it tells of a job of another time");
        before = job.number;
    }
    Ok(())
}

/// A label that a guest has chosen, as it may be shown anywhere.
pub fn printable(label: &[u8]) -> String {
    let end = label.iter().position(|byte| *byte == 0).unwrap_or(label.len());
    label[..end].iter().map(|byte| if byte.is_ascii_graphic() { char::from(*byte) } else { '?' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(number: u64, began_ms: u64, ended_ms: u64) -> OutboxJob {
        OutboxJob { number, began_ms, ended_ms, output: 10, ..OutboxJob::default() }
    }

    fn counts(now_ms: u64, last: u64) -> OutboxCounts {
        OutboxCounts { now_ms, last, oldest: 1, began: last, ..OutboxCounts::default() }
    }

    #[test]
    fn jobs_are_taken_once_and_on_the_daemons_clock() {
        let mut hearing = Hearing::default();
        let first = hearing.take(1 << 40, vec![(counts(5000, 7), vec![])]).unwrap();
        assert_eq!((first.jobs.len(), first.counters.arrivals, hearing.cursor()), (0, 7, Some(7)));
        let told = vec![
            (counts(9000, 12), vec![job(9, 6000, 7000), job(10, 8000, 8500)]),
            (counts(9001, 12), vec![job(11, 0, 1), job(12, 9001, 9001)]),
        ];
        let heard = hearing.take((1 << 40) + 4000, told).unwrap();
        let times = |job: &Job| ((1 << 40) + 4000 - job.began_ms, (1 << 40) + 4000 - job.ended_ms);
        assert_eq!(heard.jobs.iter().map(times).collect::<Vec<_>>(), [(3000, 2000), (1000, 500), (9001, 9000), (0, 0)]);
        assert_eq!((hearing.cursor(), hearing.lost(), hearing.recent().next().unwrap().number), (Some(12), 1, 12));
    }

    #[test]
    fn a_process_that_knows_no_jobs_is_not_asked_for_ever() {
        let mut hearing = Hearing::default();
        for _ in 0..MISSES_MAX {
            assert!(hearing.is_worth_it());
            hearing.miss();
        }
        assert!(!hearing.is_worth_it());
        hearing.take(0, vec![(counts(1, 0), vec![])]);
        hearing.miss();
        assert!(hearing.is_worth_it(), "it has answered before");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |jobs: &[OutboxJob], after| check(&counts(100, 5), jobs, after).is_err();
        assert!(!refused(&[job(2, 1, 2), job(5, 1, 100)], Some(1)));
        assert!(refused(&[job(2, 1, 2)], Some(2)) && refused(&[job(3, 1, 2), job(3, 1, 2)], Some(2)));
        assert!(refused(&[job(6, 1, 2)], Some(2)), "beyond the last");
        assert!(refused(&[job(3, 2, 1)], Some(2)) && refused(&[job(3, 1, 101)], Some(2)));
        assert!(refused(&[job(3, 1, 2)], None));
    }

    #[test]
    fn labels_can_be_shown() {
        assert_eq!(printable(b"enc-1\0\0rest"), "enc-1");
        assert_eq!(printable(b"\x1b[2J \xff\n"), "?[2J???");
        assert_eq!(printable(&[b'x'; 32]).len(), 32);
    }
}
