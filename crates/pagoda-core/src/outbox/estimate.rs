//! The estimator of one VM: what its jobs' response times would be with every size of its space.
//!
//! * *Feed-forward*: the queue of [`super::stream`], fed with what the profiler measured.
//! * *Feedback*: two factors by recursive least squares, on what the model gets wrong. One is on the computing time: what
//!   passes while a job neither waits nor, by its samples, computes (interference, steal). One is on the response time of
//!   the jobs that ended, replayed through the model; it is used once chance does not explain it.
//! * *Limits*: by the closed form at both ends ([`super::fluid`]) it says in which interval of sizes memory helps at all,
//!   and when no size keeps the SLO, how much more bandwidth or computing speed would.

use std::collections::VecDeque;

use crate::units::Bytes;

use super::curve::Curve;
use super::fluid::{JobSize, Moments, pollaczek_khinchine, serve};
use super::profile::{Job, Period, Profiler};
use super::rls::Rls;
use super::settings::SpaceSettings;
use super::stream::{Arrivals, Inputs, Responses, Stream};
use super::units::{RESPONSE_MAX_S, Rate};

/// Fewer jobs say nothing.
pub const JOBS_MIN: usize = 10;
/// Sizes at which the model is computed, each larger than the one before by the same factor.
const SIZES: usize = 16;
/// Of the residual of response times, one pair a period: "forgetting 0.97" is accepted practice for such loops.
const RESPONSE_FORGETTING: f64 = 0.97;
/// Of computing times, one pair a job: half of the weight is on the last 14 jobs, so that a step is followed in two
/// periods of a dozen jobs.
const COMPUTE_FORGETTING: f64 = 0.95;
/// What jobs compute beyond their samples, at most and at least.
const COMPUTE_FACTOR: [f64; 2] = [0.5, 4.0];
/// How far the residual may correct the model: by 60 %. A model that is further off is the wrong one.
const RESPONSE_FACTOR: [f64; 2] = [0.4, 1.6];
/// A response within this factor of the best is as good, where memory does not keep the SLO by itself.
const NEARLY_BEST: f64 = 1.05;
/// The same where the SLO is out of reach: memory is not hoarded for it.
const NEARLY_BEST_INFEASIBLE: f64 = 1.25;
/// A hundredth of the response's range: less is no help.
const HELP_MIN: f64 = 0.01;
/// Periods over which prediction and measurement are compared.
pub const PERIODS_COMPARED: usize = 10;
/// Steps of a search for the bandwidth or the computing speed that would do: each halves the interval.
const SEARCH_STEPS: u32 = 14;
/// Times the present bandwidth, or computing speed, beyond which nothing is proposed.
const HELP_MAX: f64 = 16.0;

/// What more memory cannot do, and what would.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Help {
    /// Jobs write more than the network takes, so that any space fills up.
    pub is_overloaded: bool,
    /// This bandwidth alone would do.
    pub bandwidth: Option<Rate>,
    /// Computing this many times as fast would do, alone.
    pub compute_speed: Option<f64>,
}

/// Whether memory keeps the SLO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Enough windows are within it.
    Kept,
    /// All jobs together are within it, but chance takes this part of the windows above, whatever the space.
    Marginal { windows_above: f64 },
    /// No space keeps it.
    Infeasible(Help),
}

/// What the model was fed with, and what it says of its own errors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    pub jobs: usize,
    pub arrivals_per_s: f64,
    pub drain: Rate,
    /// A job computes this long on average, its samples corrected by `compute_factor`.
    pub compute_mean_s: f64,
    pub output_mean: Bytes,
    pub compute_factor: f64,
    pub response_factor: f64,
    /// The part of the time in which a job computes; from 1 on, jobs come faster than they are done.
    pub compute_load: f64,
    /// What jobs write, of what the network takes.
    pub network_load: f64,
}

/// Sizes between which memory helps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Mean response without a space, and with one without end.
    pub none_s: f64,
    pub endless_s: f64,
    /// Less than `from` is as bad as nothing, more than `to` no better; `None` if no size matters.
    pub sizes: Option<(Bytes, Bytes)>,
}

/// What the estimator says.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// For the present size: all jobs' mean, the SLO's statistic, and what windows do not exceed.
    pub now: Responses,
    /// How far predicted means were from measured ones, over [`PERIODS_COMPARED`] periods.
    pub error: Option<f64>,
    pub interval: Interval,
    pub verdict: Verdict,
    /// The size that the SLO needs; where no size keeps it, the smallest that is nearly the best.
    pub needed: Bytes,
    /// What the windows that control aims at do not exceed, by size.
    pub curve: Curve,
    pub terms: Terms,
}

/// The source says how jobs come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// They arrive whether others have ended or not, and it is said when.
    Open,
    /// Nobody says when they arrive. A job is taken to be submitted when it begins, after others have ended, unless the profile says
    /// that jobs queue ([`Profiler::is_queue`]).
    Closed,
}

/// The estimator of one VM.
#[derive(Clone, Debug)]
pub struct Estimator {
    settings: SpaceSettings,
    source: Source,
    stream: Stream,
    compute_factor: Rls,
    response_factor: Rls,
    /// Predicted mean, measured mean, jobs.
    compared: VecDeque<(f64, f64, f64)>,
    predicted_s: Option<f64>,
}

impl Estimator {
    /// Nothing is known yet.
    pub fn new(settings: SpaceSettings, source: Source) -> Estimator {
        Estimator {
            settings,
            source,
            stream: Stream::new(),
            compute_factor: Rls::new(COMPUTE_FORGETTING, COMPUTE_FACTOR[0], COMPUTE_FACTOR[1]),
            response_factor: Rls::new(RESPONSE_FORGETTING, RESPONSE_FACTOR[0], RESPONSE_FACTOR[1]),
            compared: VecDeque::new(),
            predicted_s: None,
        }
    }

    /// Other settings; what was learnt stays.
    pub fn set(&mut self, settings: SpaceSettings) {
        self.settings = settings;
    }

    /// Takes in the last period, and says what follows for a VM that has `space`. `None` as long as too little is known.
    pub fn update(&mut self, profile: &Profiler, space: Bytes) -> Option<Estimate> {
        let last = profile.periods().next_back()?;
        self.compare(last);
        for job in &last.jobs {
            self.compute_factor.update(job.compute.as_secs_f64(), job.busy_s());
        }
        let inputs = self.inputs(profile)?;
        self.learn_response(last, &inputs);
        let arrivals = profile.window(usize::MAX).arrivals;
        let estimate = self.estimate(&inputs, arrivals, space);
        self.predicted_s = Some(estimate.now.mean_s);
        Some(estimate)
    }

    fn compare(&mut self, last: &Period) {
        let Some(predicted_s) = self.predicted_s else { return };
        if last.jobs.is_empty() {
            return;
        }
        let jobs = last.jobs.len() as f64;
        self.compared.push_back((predicted_s, mean_response_s(&last.jobs), jobs));
        if self.compared.len() > PERIODS_COMPARED {
            self.compared.pop_front();
        }
    }

    fn error(&self) -> Option<f64> {
        let sum = |pick: fn(&(f64, f64, f64)) -> f64| self.compared.iter().map(|row| pick(row) * row.2).sum::<f64>();
        let (predicted, measured) = (sum(|row| row.0), sum(|row| row.1));
        (self.compared.len() == PERIODS_COMPARED).then(|| (predicted / measured - 1.0).abs())
    }

    /// A job without a computing time of its own has computed while it did not wait.
    fn size_of(&self, job: &Job) -> JobSize {
        let compute_s = match job.compute.is_zero() {
            true => job.busy_s(),
            false => job.compute.as_secs_f64() * self.compute_factor.factor(),
        };
        JobSize { compute_s, output: job.output.0 as f64 }
    }

    /// The queue's input, by what was measured.
    fn inputs(&self, profile: &Profiler) -> Option<Inputs> {
        let jobs: Vec<JobSize> = profile.jobs().map(|job| self.size_of(job)).collect();
        let window = profile.window(usize::MAX);
        let drain = profile.drain()?.0 as f64;
        let is_enough = jobs.len() >= JOBS_MIN && window.arrivals > 0 && drain > 0.0;
        let (arrivals, parallel) = match self.source {
            Source::Open => (Arrivals::Told, 1.0),
            Source::Closed if profile.is_queue() => (Arrivals::Hidden, 1.0),
            Source::Closed => (follow(profile.thinks_s()), profile.parallel()),
        };
        let (arrivals_per_s, window) = (window.arrivals_per_s, self.settings.window);
        is_enough.then_some(Inputs { arrivals_per_s, jobs, drain, window, arrivals, parallel })
    }

    /// The jobs of a period once more, by the model: what it says of just these is not blurred by chance.
    fn learn_response(&mut self, period: &Period, inputs: &Inputs) {
        let Some(first) = period.jobs.first() else { return };
        if inputs.is_from_start() {
            return self.learn_service(period, inputs);
        }
        let drain = inputs.drain;
        let (mut free_s, mut backlog) = (first.began_ms as f64 / 1000.0, first.backlog.0 as f64);
        let mut sum_s = 0.0;
        for job in &period.jobs {
            let arrived_s = job.arrived_ms as f64 / 1000.0;
            let starts_s = free_s.max(arrived_s);
            backlog = f64::max(backlog - drain * (starts_s - free_s), 0.0);
            let served = serve(self.size_of(job), backlog, period.space.0 as f64, drain);
            (free_s, backlog) = (starts_s + served.service_s, served.backlog);
            sum_s += free_s - arrived_s;
        }
        self.response_factor.update(sum_s / period.jobs.len() as f64, mean_response_s(&period.jobs));
    }

    /// The same where jobs do not wait for each other.
    fn learn_service(&mut self, period: &Period, inputs: &Inputs) {
        let (space, drain) = (period.space.0 as f64 / inputs.parallel, inputs.drain_of_one());
        let of = |job: &Job| serve(self.size_of(job), job.backlog.0 as f64 / inputs.parallel, space, drain).service_s;
        let predicted_s = period.jobs.iter().map(of).sum::<f64>() / period.jobs.len() as f64;
        self.response_factor.update(predicted_s, mean_response_s(&period.jobs));
    }

    fn estimate(&self, inputs: &Inputs, arrivals: u64, space: Bytes) -> Estimate {
        let slo = &self.settings.slo;
        let factor = self.response_factor.significant();
        let at = |size: Bytes| scaled(self.stream.responses(inputs, size.0 as f64, slo), factor);
        let grid: Vec<(Bytes, Responses)> = self.sizes().map(|size| (size, at(size))).collect();
        let curve_of =
            |pick: fn(&Responses) -> f64| Curve::new(grid.iter().map(|(size, r)| (*size, pick(r))).collect());
        let curve = curve_of(|r| r.window_s);
        let terms = self.terms(inputs, factor);
        let all = curve_of(|r| r.statistic_s);
        let nearly = |part: f64| all.smallest_within(all.best() * part).unwrap_or(self.settings.max);
        let (verdict, needed) = if let Some(help) = self.infeasible(inputs, arrivals, factor) {
            // Without end they would fill any space; jobs that follow each other slow down instead.
            let is_hopeless = help.is_overloaded && !inputs.is_from_start();
            let size = if is_hopeless { self.settings.min } else { nearly(NEARLY_BEST_INFEASIBLE) };
            (Verdict::Infeasible(help), size)
        } else if let Some(size) = curve.smallest_within(slo.limit_s()) {
            (Verdict::Kept, size)
        } else {
            let windows_above = grid.last().map_or(1.0, |(_, best)| best.windows_above);
            (Verdict::Marginal { windows_above }, nearly(NEARLY_BEST))
        };
        let interval = interval(inputs, &curve_of(|r| r.mean_s), factor);
        Estimate { now: at(space), error: self.error(), interval, verdict, needed, curve, terms }
    }

    /// What would help, if no size keeps the SLO. Chance is given the benefit of the doubt: jobs arrive one standard error
    /// less often than was seen.
    fn infeasible(&self, inputs: &Inputs, arrivals: u64, factor: f64) -> Option<Help> {
        let doubt = 1.0 - 1.0 / (arrivals.max(1) as f64).sqrt();
        let least = Inputs { arrivals_per_s: inputs.arrivals_per_s * doubt, ..inputs.clone() };
        let loads = self.terms(&least, factor);
        let is_overloaded = loads.network_load >= 1.0 || (loads.compute_load >= 1.0 && !inputs.is_from_start());
        let best = || self.stream.responses(&least, self.settings.max.0 as f64, &self.settings.slo);
        let is_infeasible =
            (is_overloaded && !inputs.is_from_start()) || best().statistic_s * factor > self.settings.slo.limit_s();
        is_infeasible.then(|| self.help(inputs, is_overloaded, factor))
    }

    fn sizes(&self) -> impl Iterator<Item = Bytes> {
        let min = self.settings.min.0.max(1) as f64;
        let ratio = (self.settings.max.0 as f64 / min).max(1.0);
        (0..SIZES).map(move |nth| Bytes((min * ratio.powf(nth as f64 / (SIZES - 1) as f64)).round() as u64))
    }

    fn terms(&self, inputs: &Inputs, response_factor: f64) -> Terms {
        let count = inputs.jobs.len() as f64;
        let compute_mean_s = inputs.jobs.iter().map(|job| job.compute_s).sum::<f64>() / count;
        let output = inputs.jobs.iter().map(|job| job.output).sum::<f64>() / count;
        // What jobs would write if none of them waited.
        let written_per_s = match &inputs.arrivals {
            Arrivals::Follow(thinks_s) => {
                let think_s = thinks_s.iter().sum::<f64>() / thinks_s.len().max(1) as f64;
                output / (compute_mean_s + think_s).max(f64::MIN_POSITIVE) * inputs.parallel
            }
            Arrivals::Told | Arrivals::Hidden => inputs.arrivals_per_s * output,
        };
        Terms {
            jobs: inputs.jobs.len(),
            arrivals_per_s: inputs.arrivals_per_s,
            drain: Rate::from_model(inputs.drain),
            compute_mean_s,
            output_mean: Bytes(output as u64),
            compute_factor: self.compute_factor.factor(),
            response_factor,
            compute_load: inputs.arrivals_per_s * compute_mean_s / inputs.parallel,
            network_load: written_per_s / inputs.drain,
        }
    }

    /// What would do in memory's place: the least that does.
    fn help(&self, inputs: &Inputs, is_overloaded: bool, factor: f64) -> Help {
        let slo = &self.settings.slo;
        let max = self.settings.max.0 as f64;
        let keeps = |with: &Inputs| self.stream.responses(with, max, slo).statistic_s * factor <= slo.limit_s();
        let faster = |times: f64| Inputs { drain: inputs.drain * times, ..inputs.clone() };
        let computing = |times: f64| {
            let sooner = |job: &JobSize| JobSize { compute_s: job.compute_s / times, ..*job };
            Inputs { jobs: inputs.jobs.iter().map(sooner).collect(), ..inputs.clone() }
        };
        Help {
            is_overloaded,
            bandwidth: least_times(|times| keeps(&faster(times))).map(|times| Rate::from_model(inputs.drain * times)),
            compute_speed: least_times(|times| keeps(&computing(times))),
        }
    }
}

/// Jobs that follow each other; before two have, as if they were told of.
fn follow(thinks_s: Vec<f64>) -> Arrivals {
    if thinks_s.is_empty() { Arrivals::Told } else { Arrivals::Follow(thinks_s) }
}

/// The least factor of 1 to [`HELP_MAX`] that does.
fn least_times(does: impl Fn(f64) -> bool) -> Option<f64> {
    if !does(HELP_MAX) {
        return None;
    }
    let (mut low, mut high) = (1.0, HELP_MAX);
    for _ in 0..SEARCH_STEPS {
        let middle = f64::midpoint(low, high);
        if does(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

fn scaled(responses: Responses, factor: f64) -> Responses {
    let Responses { mean_s, statistic_s, window_s, windows_above } = responses;
    Responses { mean_s: mean_s * factor, statistic_s: statistic_s * factor, window_s: window_s * factor, windows_above }
}

fn mean_response_s(jobs: &[Job]) -> f64 {
    jobs.iter().map(Job::response_s).sum::<f64>() / jobs.len().max(1) as f64
}

/// Where memory helps: between the sizes at which all but a hundredth of its effect is still to come, and is there.
fn interval(inputs: &Inputs, means: &Curve, factor: f64) -> Interval {
    let mean_of = |service: &dyn Fn(&JobSize) -> f64| {
        let moments = Moments::of(inputs.jobs.iter().map(service));
        if inputs.is_from_start() {
            return moments.mean_s * factor;
        }
        pollaczek_khinchine(inputs.arrivals_per_s, moments).map_or(RESPONSE_MAX_S, |response| response * factor)
    };
    let endless_s = mean_of(&|job| job.compute_s);
    let none_s = mean_of(&|job| job.compute_s.max(job.output / inputs.drain_of_one()));
    let (first, best) = (means.points().first().map_or(RESPONSE_MAX_S, |point| point.1), means.best());
    let range = first - best;
    let matters = range > HELP_MIN * best;
    let from = means.smallest_within(first - HELP_MIN * range);
    let to = means.smallest_within(best + HELP_MIN * range);
    Interval { none_s, endless_s, sizes: if matters { from.zip(to) } else { None } }
}

#[cfg(test)]
mod tests;
