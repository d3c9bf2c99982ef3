//! Takes the slabs of the agenda one by one, and has the client look at each until nothing more follows.

use crate::client::Client;
use crate::client::index::SpaceIndex;
use crate::client::map::Map;
use crate::units::{SlabNo, Time};

impl Client {
    /// Looks at every slab that something happened to, until nothing more follows.
    pub(in crate::client) fn settle(&mut self, now: Time) {
        self.pool.now = now;
        self.pages.resume_waiting(&mut self.pool, &mut self.parity);
        loop {
            while let Some((space, slab)) = self.next_slab() {
                self.pool.map.agenda.begin((space, slab), &mut self.pool.map.spaces[space].slabs[slab].marks);
                self.advance(now, space, slab);
                self.pool.map.agenda.end();
                self.parity.wake_ledger(&self.pool, space, slab);
                if !self.pages.read_queue.is_empty() {
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
        let due = self.pool.map.agenda.next_due().or_else(|| self.redundancy.copies.next_waiting());
        due.or_else(|| self.next_with_room())
    }

    /// A slab that can ask now what it could not: for itself, or for its pages.
    fn next_with_room(&mut self) -> Option<(SpaceIndex, SlabNo)> {
        let (space, slab) =
            if self.pool.sessions.exchanges.has_room() { self.pool.map.agenda.next_waiting()? } else { return None };
        self.pool.map.spaces[space].slabs[slab].marks.has_room();
        if !self.pool.map.spaces[space].is_taken && !self.pool.map.spaces[space].is_stale {
            self.pages.map_settled(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
        Some((space, slab))
    }
}

impl Map {
    /// Something happened to a slab.
    pub(in crate::client) fn mark(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.agenda.mark((space, slab), &mut self.spaces[space].slabs[slab].marks);
    }

    /// A slab is looked at when that time has come, whatever happens.
    pub(in crate::client) fn mark_at(&mut self, time: Time, space: SpaceIndex, slab: SlabNo) {
        self.agenda.add_timed(time, (space, slab));
    }

    /// Slabs are looked at whose time has come.
    pub(in crate::client) fn mark_timed(&mut self, now: Time) {
        while let Some((space, slab)) = self.agenda.poll(now) {
            self.mark(space, slab);
        }
    }

    /// What is asked about a page found no room: its slab waits for some, and so does the one that is being looked at.
    pub(in crate::client) fn wait_for_room(&mut self, space: SpaceIndex, slab: Option<SlabNo>) {
        for (space, slab) in slab.map(|slab| (space, slab)).into_iter().chain(self.agenda.current()) {
            // What an earlier owner left may be of no slab of today.
            if let Some(state) = self.spaces[space].slabs.get_mut(slab) {
                self.agenda.wait_for_room((space, slab), &mut state.marks);
            }
        }
    }
}
