//! The sizes of outboxes that follow an SLO: [`pagoda_core::outbox::round`] decides, this hands over what is known and carries out.
//!
//! One thread, `outbox-sizes`, makes a round a second, and nobody else does. If it hangs, sizes stay as they are. A process that does
//! not answer keeps the size that it had, and what it may have heard of stays charged ([`super::Changing::carry_out`]).

use std::sync::Arc;
use std::time::Duration;

use pagoda_api::types::{OutboxExplanation, OutboxInfo, OutboxJob, OutboxProfile, OutboxTerm};
use pagoda_core::outbox::round::{self, Auto, OutboxId as Id, Seen, View};
use pagoda_core::policy::round::Elastic;
use pagoda_core::units::{Bytes, PageCount};

use super::hearing::{Heard, Hearing, printable};
use super::{Outbox, Outboxes, lock, settings};
use crate::registry::Registry;

/// Between two rounds: as often as figures are asked for.
const ROUND: Duration = Duration::from_secs(1);
/// The clock of profiles begins here, so that a job that began before this daemon has a time, too.
const CLOCK_BEGIN_MS: u64 = 1 << 40;

/// Makes rounds for as long as the daemon runs.
pub fn run(registry: &Arc<Registry>) {
    loop {
        std::thread::sleep(ROUND);
        make(registry);
    }
}

/// Makes one round: plans the sizes, and changes those that are to change.
fn make(registry: &Registry) {
    let outboxes = &registry.outboxes;
    let seen: Vec<Seen> = outboxes.all().iter().map(|outbox| outbox.seen()).collect();
    let share = registry.outbox_share();
    let orders = lock(&outboxes.sizing).round(outboxes.now_ms(), &share, &seen);
    for order in orders {
        let Some(outbox) = outboxes.all().into_iter().find(|outbox| outbox.id.0 == order.id.0) else { continue };
        match registry.resize_outbox(&outbox, order.space) {
            Ok(()) => tracing::debug!(vm = %outbox.vm, "its outbox has {} now", order.space),
            // It is tried again at the end of the next period.
            Err(error) => tracing::info!(vm = %outbox.vm, "its outbox is not given {}: {error}", order.space),
        }
    }
}

impl Outbox {
    /// The outbox as a round of the sizes sees it.
    pub fn seen(&self) -> Seen {
        let charged = self.charged();
        let state = lock(&self.state);
        Seen {
            id: Id(self.id.0),
            auto: state.auto,
            space: state.charge.space(),
            charged: charged.charged.bytes(),
            used: state.held,
            is_live: state.is_live(),
        }
    }

    /// What its size follows; nothing if it is set by hand.
    pub fn auto(&self) -> Option<Auto> {
        lock(&self.state).auto
    }

    /// Its VM has ended, or has not.
    pub fn set_lingering(&self, lingers: bool) {
        lock(&self.state).lingers = lingers;
    }
}

impl Outboxes {
    /// The clock of profiles, in milliseconds.
    pub fn now_ms(&self) -> u64 {
        CLOCK_BEGIN_MS + self.started.elapsed().as_millis() as u64
    }

    pub fn period(&self) -> Duration {
        lock(&self.sizing).period()
    }

    /// Takes in what an outbox's process told of jobs.
    pub fn heard(&self, outbox: &Outbox, heard: &Heard) {
        lock(&self.sizing).heard(Id(outbox.id.0), self.now_ms(), heard.counters, &heard.jobs);
    }

    /// Those that give memory when the host is short, together.
    pub fn elastic(&self) -> Elastic {
        let autos = self.all().into_iter().map(|outbox| outbox.seen()).filter(|seen| seen.is_live);
        autos.filter_map(|seen| Some((seen, seen.auto?))).fold(Elastic::default(), |sum, (seen, auto)| Elastic {
            spaces: sum.spaces + seen.space.pages_ceil(),
            mins: sum.mins + auto.min.pages_ceil(),
            charged: sum.charged + seen.charged.pages_ceil(),
        })
    }

    /// What of the pool other outboxes than `but` keep for themselves: sizes set by hand, and mins.
    pub fn of_others(&self, but: &Outbox) -> (PageCount, Bytes) {
        let others = self.all().into_iter().filter(|outbox| outbox.id != but.id).map(|outbox| outbox.seen());
        others.fold((PageCount::ZERO, Bytes::ZERO), |(fixed, mins), seen| match seen.auto.filter(|_| seen.is_live) {
            Some(auto) => (fixed, mins + auto.min),
            None => (fixed + seen.charged.pages_ceil(), mins),
        })
    }

    /// The outbox as it is shown, with what its jobs do.
    pub fn info(&self, outbox: &Outbox, has_vm: bool) -> OutboxInfo {
        let view = lock(&self.sizing).view(Id(outbox.id.0));
        let period = self.period();
        let mut info = outbox.info(has_vm);
        let state = lock(&outbox.state);
        info.auto = state.auto.as_ref().map(settings::shown);
        info.profile = view.and_then(|view| profile(&view, &state.hearing, period, state.auto.is_some())).map(Box::new);
        info
    }

    /// Why an outbox has the size that it has.
    pub fn explain(&self, outbox: &Outbox) -> OutboxExplanation {
        let seen = outbox.seen();
        let lines = lock(&self.sizing).explain(&seen);
        let mut terms: Vec<OutboxTerm> = lines
            .into_iter()
            .map(|line| OutboxTerm {
                term: line.term.to_owned(),
                bytes: line.pages.map(|pages| pages.bytes().0),
                text: line.text,
            })
            .collect();
        if terms.is_empty() {
            let text = match seen.auto {
                None => "set by hand; `pagoda outbox set --space auto --slo SLO` has it follow an SLO".to_owned(),
                Some(auto) => format!("kept as it is until more is known of what {} needs", auto.slo),
            };
            terms.push(OutboxTerm { term: "space".to_owned(), bytes: Some(seen.space.0), text });
        }
        OutboxExplanation { vm: outbox.vm.clone(), terms }
    }
}

fn profile(view: &View, hearing: &Hearing, period: Duration, is_auto: bool) -> Option<OutboxProfile> {
    let counts = hearing.counts()?;
    let goodput = counts.acknowledged.checked_mul(1_000_000).and_then(|bytes| bytes.checked_div(counts.reading_us));
    let recent = |job: &pagoda_abi::attach::OutboxJob| OutboxJob {
        number: job.number,
        took_ms: job.ended_ms.saturating_sub(job.began_ms),
        blocked_ms: job.blocked_us / 1000,
        output_bytes: job.output,
        backlog_bytes: job.backlog,
        on_close: job.is_on_close,
        priority: job.priority,
        id: printable(&job.id),
        destination: printable(&job.destination),
    };
    Some(OutboxProfile {
        period_s: period.as_secs_f64(),
        periods: view.periods as u64,
        jobs: view.window.jobs,
        arrivals_per_s: view.window.arrivals_per_s,
        compute_mean_s: view.compute_mean_s,
        output_mean_bytes: view.output_mean.map(|mean| mean.0),
        response_mean_s: view.window.response_mean_s,
        response_p90_s: view.window.response_p90_s,
        blocked_share: view.last.blocked_share,
        goodput_bytes_per_s: view.last.goodput.0,
        drain_bytes_per_s: view.drain.map(|drain| drain.0),
        reader_goodput_bytes_per_s: goodput,
        windows_kept: view.windows_kept.0,
        windows: view.windows_kept.1,
        verdict: is_auto.then(|| round::word(view.decision.as_ref()).to_owned()),
        wanted_bytes: view.decision.as_ref().filter(|_| is_auto).map(|decision| decision.space.0),
        jobs_begun: counts.began,
        jobs_ended: counts.last,
        jobs_given_up: counts.given_up,
        jobs_lost: hearing.lost() + view.rejected,
        refused_writes: counts.refused,
        sending_ms: counts.sending_us / 1000,
        blocked_ms: counts.blocked_us / 1000,
        reading_ms: counts.reading_us / 1000,
        recent: hearing.recent().map(recent).collect(),
    })
}
