//! The rounds of all outboxes of a host: everything between what their processes say and the space that each is to have.
//!
//! 1. The caller hands over what an outbox's process says, whenever it says it ([`Sizing::heard`]).
//! 2. [`Sizing::round`] ends an outbox's period when it is due: profile, estimate, the size that it should have. Then
//!    it divides what there is among those whose size follows an SLO, and returns the sizes that change.
//! 3. The caller has the processes keep to these, the smaller ones first.
//!
//! Sizes change at the ends of periods. In between they only shrink: when the host is short ([`super::pressure`]).
//! Pure: time comes with each call.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::policy::explain::Line;
use crate::policy::{Shares, VmId};
use crate::units::Bytes;

use super::control::{Decision, Reason, SelfTuning, Sizer};
use super::estimate::Verdict;
use super::explain::explain;
use super::orchestrate::{Allotment, Cause, Claim, Division, divide};
use super::pressure::Yielded;
use super::profile::{Counters, JOBS_MAX, Job, Profiler, Window};
use super::settings::{InvalidSpace, MIN_MIN, SpaceSettings};
use super::slo::{Slo, WINDOWS_KEPT};
use super::units::Rate;

/// Windows of which it is known whether they kept the SLO.
const WINDOWS_SHOWN: usize = 30;
/// The min of an outbox for which none was set: four writes of virtio-fs.
pub const MIN_DEFAULT: Bytes = Bytes::from_mib(4);

/// Number of an outbox. The caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OutboxId(pub u64);

/// What is set for an outbox whose size follows an SLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Auto {
    pub slo: Slo,
    pub min: Bytes,
    /// `None`: as much as there is for outboxes.
    pub max: Option<Bytes>,
    pub weight: Shares,
}

impl Auto {
    /// With what the host has for outboxes.
    fn settings(&self, capacity: Bytes, period: Duration) -> SpaceSettings {
        let max = self.max.unwrap_or(capacity).max(self.min);
        SpaceSettings { slo: self.slo, min: self.min, max, window: period }
    }

    /// Whether a host that has `capacity` for outboxes, with the mins of others, can keep this.
    ///
    /// # Errors
    /// It cannot, or it contradicts itself.
    pub fn check(&self, capacity: Bytes, other_mins: Bytes, period: Duration) -> Result<(), InvalidSpace> {
        let max = self.max.unwrap_or(capacity.max(self.min));
        SpaceSettings { slo: self.slo, min: self.min, max, window: period }.check(capacity, other_mins)
    }
}

/// An outbox at a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    pub id: OutboxId,
    /// `None`: its size is set by hand.
    pub auto: Option<Auto>,
    /// What it is to have, what the pool keeps for it, and what it holds.
    pub space: Bytes,
    pub charged: Bytes,
    pub used: Bytes,
    /// It can be told another size: its process has come and has not ended, and so has its VM.
    pub is_live: bool,
}

/// What the host has for outboxes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostShare {
    /// All that they may have beside what VMs were promised.
    pub capacity: Bytes,
    /// Free memory that nobody needs now.
    pub spare: Bytes,
    /// What the host's shortage leaves to those whose size follows an SLO; `None` before the first round of the memory policy.
    pub yielded: Option<Yielded>,
}

/// Another size for an outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    pub id: OutboxId,
    pub space: Bytes,
}

/// What is known of an outbox.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    pub periods: usize,
    /// All periods that are kept, and the last one.
    pub window: Window,
    pub last: Window,
    pub drain: Option<Rate>,
    pub compute_mean_s: Option<f64>,
    pub output_mean: Option<Bytes>,
    /// Jobs whose times cannot be.
    pub rejected: u64,
    pub decision: Option<Decision>,
    pub cause: Option<Cause>,
    /// Of the windows with jobs, those within the SLO, and all.
    pub windows_kept: (u64, u64),
}

#[derive(Clone, Debug)]
struct Sized {
    profile: Profiler,
    counters: Counters,
    jobs: Vec<Job>,
    closed_ms: u64,
    /// Something was heard since the last period ended.
    is_news: bool,
    /// Of one whose size follows an SLO: with which settings, and by what.
    auto: Option<(Auto, SelfTuning)>,
    settings: Option<SpaceSettings>,
    decision: Option<Decision>,
    allotment: Option<Allotment>,
    kept: VecDeque<bool>,
}

/// The sizing remembers each outbox between rounds, and decides its size.
#[derive(Clone, Debug)]
pub struct Sizing {
    period: Duration,
    outboxes: BTreeMap<OutboxId, Sized>,
    yielded: Option<Yielded>,
}

impl Sizing {
    /// Knows nothing yet. A period is a window of SLOs.
    pub fn new(period: Duration) -> Sizing {
        Sizing { period, outboxes: BTreeMap::new(), yielded: None }
    }

    pub fn period(&self) -> Duration {
        self.period
    }

    /// What an outbox's process has counted, and the jobs that ended since it was heard last. Of the first time only the counts.
    pub fn heard(&mut self, id: OutboxId, now_ms: u64, counters: Counters, jobs: &[Job]) {
        let Some(sized) = self.outboxes.get_mut(&id) else {
            self.outboxes.insert(id, Sized::new(now_ms, counters));
            return;
        };
        (sized.counters, sized.is_news) = (counters, true);
        let room = JOBS_MAX.saturating_sub(sized.jobs.len());
        sized.jobs.extend(jobs.iter().take(room));
    }

    /// A round. Who is not in `seen` is forgotten.
    pub fn round(&mut self, now_ms: u64, share: &HostShare, seen: &[Seen]) -> Vec<Order> {
        self.outboxes.retain(|id, _| seen.iter().any(|seen| seen.id == *id));
        self.yielded = share.yielded;
        let autos: Vec<&Seen> = seen.iter().filter(|seen| seen.is_live && seen.auto.is_some()).collect();
        let of_others: Bytes =
            seen.iter().filter(|seen| !(seen.is_live && seen.auto.is_some())).map(|s| s.charged).sum();
        let capacity = share.capacity.saturating_sub(of_others);
        let mut has_ended = false;
        for seen in seen {
            if let Some(sized) = self.outboxes.get_mut(&seen.id) {
                has_ended |= sized.end_period(now_ms, self.period, seen, capacity);
            }
        }
        let spaces: Bytes = autos.iter().map(|seen| seen.space).sum();
        let pool = share.yielded.map_or(capacity, |yielded| yielded.pool.min(capacity)).min(spaces + share.spare);
        if !has_ended && pool >= spaces {
            return Vec::new();
        }
        let division = divide(pool, &self.claims(&autos, capacity));
        self.take(&autos, &division)
    }

    fn claims(&self, autos: &[&Seen], capacity: Bytes) -> Vec<Claim> {
        let claim = |(nth, seen): (usize, &&Seen)| {
            let sized = self.outboxes.get(&seen.id);
            let auto = seen.auto?;
            let settings = auto.settings(capacity, self.period);
            let decision = sized.and_then(|sized| sized.decision.as_ref());
            let curve = decision.and_then(|decision| decision.estimate.as_ref());
            Some(Claim {
                id: VmId(nth as u32),
                weight: auto.weight,
                min: settings.min,
                max: settings.max,
                wanted: decision.map_or(seen.space, |decision| decision.space),
                has: seen.space,
                used: seen.used,
                curve: curve.map(|estimate| (estimate.curve.clone(), auto.slo.limit_s())),
            })
        };
        autos.iter().enumerate().filter_map(claim).collect()
    }

    /// Keeps what was divided, and says who gets another size: those that shrink first.
    fn take(&mut self, autos: &[&Seen], division: &Division) -> Vec<Order> {
        let mut orders = Vec::new();
        for (seen, allotment) in autos.iter().zip(&division.allotments) {
            if let Some(sized) = self.outboxes.get_mut(&seen.id) {
                sized.allotment = Some(*allotment);
            }
            // A part of a min may be less than any outbox has.
            let space = allotment.space.max(MIN_MIN);
            if space != seen.space {
                orders.push((space > seen.space, Order { id: seen.id, space }));
            }
        }
        orders.sort_by_key(|(grows, _)| *grows);
        orders.into_iter().map(|(_, order)| order).collect()
    }

    /// What is known of an outbox; `None` if nothing was heard of it.
    pub fn view(&self, id: OutboxId) -> Option<View> {
        let sized = self.outboxes.get(&id)?;
        let jobs: Vec<&Job> = sized.profile.jobs().collect();
        let mean = |of: fn(&Job) -> f64| {
            let sum: f64 = jobs.iter().map(|job| of(job)).sum();
            (!jobs.is_empty()).then(|| sum / jobs.len() as f64)
        };
        Some(View {
            periods: sized.profile.periods().count(),
            window: sized.profile.window(usize::MAX),
            last: sized.profile.window(1),
            drain: sized.profile.drain(),
            compute_mean_s: mean(Job::busy_s),
            output_mean: mean(|job| job.output.0 as f64).map(|mean| Bytes(mean as u64)),
            rejected: sized.profile.rejected(),
            decision: sized.decision.clone(),
            cause: sized.allotment.map(|allotment| allotment.cause),
            windows_kept: (sized.kept.iter().filter(|kept| **kept).count() as u64, sized.kept.len() as u64),
        })
    }

    /// Why an outbox has the size that it has; nothing if its size is set by hand, or nothing was decided yet.
    pub fn explain(&self, seen: &Seen) -> Vec<Line> {
        let Some(sized) = self.outboxes.get(&seen.id) else { return Vec::new() };
        let (Some(settings), Some(decision)) = (&sized.settings, &sized.decision) else { return Vec::new() };
        let allotment = Allotment {
            space: seen.space,
            draining: seen.used.saturating_sub(seen.space),
            ..sized.allotment.unwrap_or(Allotment {
                id: VmId(0),
                space: seen.space,
                cause: Cause::Wanted,
                draining: Bytes::ZERO,
            })
        };
        let calm = Yielded { pool: seen.space, withheld: Bytes::ZERO, left: Bytes::ZERO, is_stuck: false };
        let mut lines = explain(settings, decision, &allotment, &self.yielded.unwrap_or(calm));
        if let (kept, all @ 1..) = self.view(seen.id).map_or((0, 0), |view| view.windows_kept) {
            let goal = WINDOWS_KEPT * 100.0;
            let text =
                format!("{kept} of the last {all} windows with jobs were within the SLO; the goal is {goal:.0} %");
            lines.push(Line { term: "kept", pages: None, is_loss: false, text });
        }
        lines
    }
}

impl Sized {
    fn new(now_ms: u64, counters: Counters) -> Sized {
        Sized {
            profile: Profiler::new(now_ms, counters),
            counters,
            jobs: Vec::new(),
            closed_ms: now_ms,
            is_news: false,
            auto: None,
            settings: None,
            decision: None,
            allotment: None,
            kept: VecDeque::new(),
        }
    }

    /// Ends its period if it is due. Whether it was.
    fn end_period(&mut self, now_ms: u64, period: Duration, seen: &Seen, capacity: Bytes) -> bool {
        let is_due = now_ms.saturating_sub(self.closed_ms) >= period.as_millis() as u64;
        if !is_due || !self.is_news {
            return false;
        }
        let jobs = std::mem::take(&mut self.jobs);
        self.profile.close_period(now_ms, seen.space, self.counters, &jobs);
        (self.closed_ms, self.is_news) = (now_ms, false);
        self.decide(period, seen, capacity);
        true
    }

    fn decide(&mut self, period: Duration, seen: &Seen, capacity: Bytes) {
        let Some(auto) = seen.auto else {
            (self.auto, self.settings, self.decision, self.allotment) = (None, None, None, None);
            self.kept.clear();
            return;
        };
        let settings = auto.settings(capacity, period);
        match &mut self.auto {
            // What was learnt stays; what was kept of another promise says nothing of this one.
            Some((before, tuning)) => {
                tuning.set(settings);
                if before.slo != auto.slo {
                    self.kept.clear();
                }
                *before = auto;
            }
            None => self.auto = Some((auto, SelfTuning::closed(settings))),
        }
        self.settings = Some(settings);
        self.count_window(&auto.slo);
        if let Some((_, tuning)) = &mut self.auto {
            self.decision = Some(tuning.size(&self.profile, seen.space));
        }
    }

    fn count_window(&mut self, slo: &Slo) {
        let Some(last) = self.profile.periods().next_back() else { return };
        let mut responses: Vec<f64> = last.jobs.iter().map(Job::response_s).collect();
        let Some(value) = slo.statistic.of(&mut responses) else { return };
        self.kept.push_back(value <= slo.limit_s());
        if self.kept.len() > WINDOWS_SHOWN {
            self.kept.pop_front();
        }
    }
}

/// One word for whether the SLO can be kept.
pub fn word(decision: Option<&Decision>) -> &'static str {
    let Some(Decision { estimate: Some(estimate), reason, .. }) = decision else { return "learning" };
    match estimate.verdict {
        Verdict::Infeasible(_) if *reason == Reason::NotKnown => "learning",
        Verdict::Infeasible(_) => "infeasible",
        Verdict::Marginal { .. } => "marginal",
        Verdict::Kept => "feasible",
    }
}

#[cfg(test)]
mod tests;
