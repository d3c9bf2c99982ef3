//! What the engine reports of its VM: to those who ask, a status; to the daemon, what it has to act on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::fault::Stall;
use pagoda_core::stats::{FAULT_CAUSES, Metric};

use super::paging::Paging;
use super::sampler::Sampler;
use super::sharer::Sharer;
use super::stall::stall_text;
use crate::handle::{Notice, Status};
use crate::latency::Histogram;

/// Hears what an engine says on its own.
pub type Notify = Box<dyn Fn(Notice) + Send>;

/// What only reports know: how long faults took, and what was said before.
pub struct Reporter {
    /// The VM's name, for messages.
    vm: Arc<str>,
    notify: Notify,
    /// How long faults took, by cause, in the order of `FAULT_CAUSES`.
    latency: Vec<Histogram>,
    /// Fault messages read while armed.
    messages: u64,
    /// Pages of a tier are late, and that was said.
    waits_for_tier: bool,
    /// Why the VM is never evicted.
    pinned: Option<String>,
    published: Instant,
}

impl Reporter {
    /// `pinned`: why the VM is never evicted, if it is not.
    pub fn new(vm: Arc<str>, notify: Notify, pinned: Option<String>) -> Reporter {
        let latency = vec![Histogram::default(); FAULT_CAUSES.len()];
        Reporter { vm, notify, latency, messages: 0, waits_for_tier: false, pinned, published: Instant::now() }
    }

    /// Gives the daemon a notice.
    pub fn notify(&self, notice: Notice) {
        (self.notify)(notice);
    }

    /// The engine ends; its memory and files go before anybody hears of it.
    pub fn into_notify(self) -> Notify {
        self.notify
    }

    /// The VM cannot go on until its owner does something.
    pub fn report_stall(&self, stall: Stall, paging: &Paging) {
        let text = text_of(stall, paging);
        tracing::error!(vm = %self.vm, "{text}");
        self.notify(Notice::Stalled(text));
    }

    /// The VM is halted.
    pub fn report_halt(&self, text: String) {
        tracing::error!(vm = %self.vm, "{text}");
        self.notify(Notice::Stalled(text));
    }

    /// The VM is never evicted from now on. The first reason is kept.
    pub fn note_pin(&mut self, reason: String) {
        if self.pinned.is_none() {
            tracing::warn!(vm = %self.vm, "never evicted from now on: {reason}");
            self.pinned = Some(reason);
        }
    }

    pub fn is_pinned(&self) -> bool {
        self.pinned.is_some()
    }

    /// Counts a fault message.
    pub fn note_message(&mut self, paging: &Paging) {
        self.messages += u64::from(paging.machine().is_armed() && !paging.is_halted());
    }

    /// Counts how long a fault waited.
    pub fn note_latency(&mut self, cause: Metric, took: Duration) {
        if let Some(index) = FAULT_CAUSES.iter().position(|other| *other == cause) {
            self.latency[index].record(took);
        }
    }

    /// When a status was made last.
    pub fn published(&self) -> Instant {
        self.published
    }

    /// How the VM is now, its images apart. Looks at its sample, and at what its tiers wait for.
    pub fn status(&mut self, paging: &mut Paging, sampler: &mut Sampler, sharer: &Sharer, has_agent: bool) -> Status {
        self.published = Instant::now();
        let stall = paging.machine().stall();
        let since = stall.map_or(0, |(_, ms)| paging.now_ms() - ms);
        let mut stats = paging.machine().stats();
        stats.set(Metric::Messages, self.messages);
        // What the VMM says of itself: any number.
        stats.set(Metric::PagesDiscarded, stats.get(Metric::PagesDiscarded).wrapping_add(paging.punched()));
        let (sample, curve) = (sampler.look_at_sample(paging), sampler.current_curve(paging));
        sampler.add_to(&mut stats);
        sharer.add_to(&mut stats);
        paging.tiers().add_to(&mut stats);
        let waits = self.look_at_waits(paging).or_else(|| paging.busy_text());
        let tiers = paging.tiers().reports();
        let machine = paging.machine();
        let stalled = || stall.map(|(stall, _)| text_of(stall, paging));
        Status {
            stats,
            armed: machine.is_armed(),
            ram_bytes: paging.space().allocated(),
            swap_bytes: tiers.last().map_or(0, |swap| swap.counts.disk_bytes),
            stalled: paging.halted().map(str::to_owned).or_else(stalled),
            stalled_for: Duration::from_millis(since),
            waits,
            table_bytes: machine.table_bytes() + tiers.iter().map(|tier| tier.counts.memory_bytes).sum::<u64>(),
            remote: paging.remote(),
            agent: has_agent,
            pinned: self.pinned.clone(),
            latency: self.latency.clone(),
            sample,
            tiers,
            sample_period: sampler.period(),
            curve,
            image: None,
            whole_image: None,
            generation: 0,
        }
    }

    /// What the VM waits for, if pages of a tier do not come in time. That is no stall: nothing is lost, and it goes on
    /// by itself.
    fn look_at_waits(&mut self, paging: &mut Paging) -> Option<String> {
        let whom = paging.tier_waits();
        if whom.is_some() != std::mem::replace(&mut self.waits_for_tier, whom.is_some()) {
            match &whom {
                Some(whom) => tracing::warn!(vm = %self.vm, "it waits for {whom}"),
                None => tracing::info!(vm = %self.vm, "its pages come again"),
            }
        }
        whom
    }
}

fn text_of(stall: Stall, paging: &Paging) -> String {
    stall_text(stall, paging.tiers().swap_path(), paging.tiers().trouble().as_deref())
}
