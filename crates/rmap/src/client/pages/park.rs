//! Lets reads wait, and begins them again when they can be answered.

use crate::client::index::{OpIndex, SpaceIndex};
use crate::client::ops::Operation;
use crate::client::parked::Parked;
use crate::client::slab::Phase;
use crate::client::{Client, Failure};
use crate::units::SlabNo;

impl Client {
    /// Takes a read out of the operations, with all that it has asked. `false` if it has to stay there.
    pub(in crate::client) fn park(&mut self, op: OpIndex) -> bool {
        if self.ops.peek(op).is_own {
            self.put_back(op);
            return true;
        }
        let Operation { space, page, .. } = *self.ops.peek(op);
        if self.slab_of(page).is_some_and(|slab| self.is_out_of_reach(space, slab)) {
            self.fail_op(op, Failure::Silent);
            return true;
        }
        if self.parking.is_full() {
            return false;
        }
        self.drop_exchanges(op);
        let Operation { class, token, since, .. } = *self.ops.get(op);
        self.ops.leave(op);
        self.parking.push(Parked { space, page, class, token, since });
        true
    }

    /// Has the slabs looked at that reads wait for.
    pub(in crate::client) fn mark_parked(&mut self) {
        for at in 0..self.parking.len() {
            let Some(Parked { space, page, .. }) = self.parking.get(at) else { return };
            self.slab_of(page).into_iter().for_each(|slab| self.mark(space, slab));
        }
    }

    /// Begins the reads of a slab that can end now.
    pub(in crate::client) fn unpark(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.unpark_where(|client, parked| parked.space == space && client.slab_of(parked.page) == Some(slab));
    }

    /// Another owner has the space.
    pub(in crate::client) fn unpark_space(&mut self, space: SpaceIndex) {
        self.unpark_where(|_, parked| parked.space == space);
    }

    /// There is a place again.
    pub(in crate::client) fn unpark_waiting(&mut self) {
        if self.parking.has_place(self.ops.has_room()) {
            self.unpark_where(|_, _| true);
        }
    }

    fn unpark_where(&mut self, fits: impl Fn(&Client, &Parked) -> bool) {
        for _ in 0..self.parking.len() {
            let Some(parked) = self.parking.next() else { return };
            let ready = fits(self, &parked) && self.is_answerable(&parked);
            let Parked { space, page, class, token, since } = parked;
            if !ready {
                self.parking.push(parked);
            } else if !self.begin_again(space, page, class, (token, since)) {
                // Nor is there a place for any other one.
                return self.parking.wait_for_place(parked);
            }
        }
    }

    /// Whether a server can be asked for the page, or it is known without one what became of it.
    fn is_answerable(&self, parked: &Parked) -> bool {
        let Some(slab) = self.slab_of(parked.page) else { return true };
        let state = &self.spaces[parked.space].slabs[slab];
        let open = matches!(state.phase, Phase::Open | Phase::Followed);
        let silent = if open && self.is_grouped(parked.space, slab) {
            !self.has_source(parked.space, slab)
        } else {
            let copies = self.sound_copies(parked.space, slab);
            !copies.is_empty() && copies.iter().all(|peer| self.peers[peer].is_down())
        };
        let fails = self.spaces[parked.space].is_taken || self.is_out_of_reach(parked.space, slab);
        fails || !open || !silent
    }
}
