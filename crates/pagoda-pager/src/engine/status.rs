//! What the engine says of its VM.

use std::time::{Duration, Instant};

use pagoda_core::stats::Metric;

use super::Engine;
use super::stall::stall_text;
use crate::handle::Status;

impl Engine {
    /// Lets others see how the VM is.
    pub(super) fn publish(&mut self) {
        self.published = Instant::now();
        let stall = self.paging.machine().stall();
        let since = stall.map_or(0, |(_, ms)| self.paging.now_ms() - ms);
        let mut stats = self.paging.machine().stats();
        stats.set(Metric::Messages, self.messages);
        // What the VMM says of itself: any number.
        let punched = self.paging.punched();
        stats.set(Metric::PagesDiscarded, stats.get(Metric::PagesDiscarded).wrapping_add(punched));
        let (sample, curve) = (self.sampler.look_at_sample(&self.paging), self.sampler.current_curve(&self.paging));
        self.sampler.add_to(&mut stats);
        self.sharer.add_to(&mut stats);
        self.paging.tiers().add_to(&mut stats);
        let waits = self.look_at_waits().or_else(|| self.paging.busy_text());
        let tiers = self.paging.tiers().reports();
        self.inbox.publish(Status {
            stats,
            armed: self.paging.machine().is_armed(),
            ram_bytes: self.paging.space().allocated(),
            swap_bytes: tiers.last().map_or(0, |swap| swap.counts.disk_bytes),
            stalled: self
                .paging
                .frozen()
                .map(str::to_owned)
                .or_else(|| stall.map(|(stall, _)| stall_text(stall, self.paging.tiers().swap_path()))),
            stalled_for: Duration::from_millis(since),
            waits,
            remote: self.paging.remote(),
            agent: self.link.agent.is_connected(),
            pinned: self.pinned.clone(),
            latency: self.latency.clone(),
            table_bytes: self.paging.machine().table_bytes()
                + tiers.iter().map(|tier| tier.counts.memory_bytes).sum::<u64>(),
            sample,
            tiers,
            sample_period: self.sampler.period(),
            curve,
            generation: 0,
        });
    }
}

impl Engine {
    /// What the VM waits for, if pages of a tier do not come in time. That is no stall: nothing is lost, and it goes on by itself.
    fn look_at_waits(&mut self) -> Option<String> {
        let whom = self.paging.tier_waits();
        if whom.is_some() != std::mem::replace(&mut self.waits_for_tier, whom.is_some()) {
            match &whom {
                Some(whom) => tracing::warn!(vm = %self.name, "it waits for {whom}"),
                None => tracing::info!(vm = %self.name, "the pool brings its pages again"),
            }
        }
        whom
    }
}
