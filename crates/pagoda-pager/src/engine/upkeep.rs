//! What the loop does beside answering: what is due by the clock, and the search for equal pages.

use std::time::Instant;

use pagoda_core::fault::Event;
use pagoda_core::units::PageCount;

use super::{Engine, TICK_BUSY, TICK_IDLE};
use crate::handle::Notice;

impl Engine {
    pub(super) fn tick(&mut self) {
        let now = Instant::now();
        if self.paging.machine().is_pin_blocked() {
            // Completions of libaio and io_uring are seen when the agent looks at their rings.
            self.ask_clocks();
            self.apply(Event::Tick);
        } else if self.paging.machine().is_owning_paused()
            || self.paging.machine().is_copying_back()
            || now - self.ticked >= TICK_BUSY
        {
            self.ticked = now;
            self.apply(Event::Tick);
        }
        // By a clock of its own: who asks for a status all the time must not put it off.
        if now - self.maintained >= TICK_IDLE {
            self.maintained = now;
            self.charge_frames();
            let (sampler, mut context) = self.sampling();
            let turned = sampler.turn_ages(now, &mut context);
            self.or_halt(turned);
            self.paging.maintain_tiers();
            // An answer may have been lost with the connection before this one.
            self.repeat_move();
        }
        self.turn_mappers();
        if self.paging.may_be_free() {
            let armed = self.begin_to_arm();
            self.or_halt(armed);
        }
        if now - self.reporter.published() >= TICK_IDLE {
            self.publish();
        }
        if self.sampler.is_newly_near_limit(&self.paging) {
            self.reporter.notify(Notice::NearLimit);
        }
    }

    /// Counts the VM's part of its frames; where that is more than the cap can bear, pages become its own again.
    fn charge_frames(&mut self) {
        let Some((pages, sole)) = self.sharer.charge_frames(&mut self.paging) else { return };
        self.apply(Event::Charge { pages });
        if self.paging.machine().is_overcharged() {
            sole.into_iter().for_each(|page| self.apply(Event::TakeBack { page }));
        }
    }

    /// Looks for equal pages, if there is time for it.
    pub(super) fn scan(&mut self) {
        if self.end.is_some() {
            return;
        }
        let Some(begun) = self.sharer.begin_scan(&mut self.paging) else { return };
        self.apply(Event::Scan);
        self.sharer.end_scan(begun);
        if self.paging.machine().is_scan_blocked() {
            self.ask_clocks();
        }
    }

    /// Has the VMM and mappers look which direct I/O has completed.
    pub(super) fn ask_clocks(&mut self) {
        self.link.agent.ask_clock(&mut self.ring);
        self.link.mappers.ask_clock(&mut self.ring);
    }

    /// Lets others see how the VM is.
    pub(super) fn publish(&mut self) {
        let has_agent = self.link.agent.is_connected();
        let mut status = self.reporter.status(&mut self.paging, &mut self.sampler, &self.sharer, has_agent);
        self.mover.slowed().add_to(&mut status.stats);
        status.waits = status.waits.take().or_else(|| self.link.mappers.waits());
        status.image = self.imager.status(&self.paging);
        status.whole_image = self.imager.whole().map(|id| (id, PageCount(self.paging.machine().same())));
        self.inbox.publish(status);
    }
}
