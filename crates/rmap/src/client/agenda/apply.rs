//! Takes the slabs of the agenda one by one, and has the client look at each until nothing more follows.

use crate::client::Client;
use crate::client::index::SpaceIndex;
use crate::units::{SlabNo, Time};

impl Client {
    /// Looks at every slab that something happened to, until nothing more follows.
    pub(in crate::client) fn settle(&mut self, now: Time) {
        self.pool.now = now;
        self.pages.resume_waiting(&mut self.pool, &mut self.parity);
        loop {
            while let Some((space, slab)) = self.next_slab() {
                self.pool.map.begin_look(space, slab);
                self.advance(now, space, slab);
                self.pool.map.end_look();
                self.parity.wake_ledger(&self.pool, space, slab);
                if self.pages.queued() > 0 {
                    self.pages.resume_slab(&mut self.pool, &mut self.parity, space, slab);
                }
            }
            if !(self.parity.maintain_parity(&mut self.pool, &mut self.pages, &mut self.redundancy)
                | self.pages.report_more(&mut self.pool))
            {
                break;
            }
        }
        self.pool.send_looks();
        self.pool.send_returns();
    }

    fn next_slab(&mut self) -> Option<(SpaceIndex, SlabNo)> {
        let due = self.pool.map.next_due().or_else(|| self.redundancy.copies.next_waiting());
        due.or_else(|| self.next_with_room())
    }

    /// A slab that can ask now what it could not: for itself, or for its pages.
    fn next_with_room(&mut self) -> Option<(SpaceIndex, SlabNo)> {
        let (space, slab) =
            if self.pool.sessions.exchanges.has_room() { self.pool.map.next_with_room()? } else { return None };
        if !self.pool.map.spaces[space].is_taken && !self.pool.map.spaces[space].is_stale {
            self.pages.map_settled(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
        Some((space, slab))
    }
}
