//! Reads of pages that only silent servers have wait here, not among the operations under way: a server that is away for
//! hours must not fill their places, or pages of all others would wait with it.
//!
//! A parked read has asked nobody and begins anew when its slab is looked at again: a server is back, the map has changed, the
//! slab is lost, its servers have been silent for too long. What it returns then is as right as at first: the version is the one
//! that is known at that time.

use std::collections::VecDeque;

use super::ops::Operation;
use super::slab::Phase;
use super::{Client, Failure, Token};
use crate::units::{Class, PageNo, SlabNo, SlabSize, Time};

/// Reads that wait so at a time; more keep their places among the operations. A VM asks for some two thousand at most.
pub const PARKED_MAX: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Parked {
    space: usize,
    page: PageNo,
    class: Class,
    token: Token,
    since: Time,
}

#[derive(Debug)]
pub struct Parking {
    all: VecDeque<Parked>,
    /// Some could begin, and there was no place for them.
    is_short: bool,
}

impl Default for Parking {
    fn default() -> Parking {
        Parking { all: VecDeque::with_capacity(PARKED_MAX), is_short: false }
    }
}

impl Parking {
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn any_in(&self, space: usize) -> bool {
        self.all.iter().any(|parked| parked.space == space)
    }

    pub fn any_of(&self, space: usize, slab: SlabNo, size: SlabSize) -> bool {
        self.all.iter().any(|parked| parked.space == space && size.slab(parked.page) == Some(slab))
    }
}

impl Client {
    /// Takes a read out of the operations, with all that it has asked. `false` if it has to stay there.
    pub(super) fn park(&mut self, op: usize) -> bool {
        if self.ops.peek(op).is_own {
            self.put_back(op);
            return true;
        }
        let Operation { space, page, .. } = *self.ops.peek(op);
        if self.slab_of(page).is_some_and(|slab| self.is_out_of_reach(space, slab)) {
            self.fail_op(op, Failure::Silent);
            return true;
        }
        if self.parking.all.len() >= PARKED_MAX {
            return false;
        }
        self.drop_exchanges(op);
        let Operation { class, token, since, .. } = *self.ops.get(op);
        self.ops.leave(op);
        self.parking.all.push_back(Parked { space, page, class, token, since });
        true
    }

    /// Has the slabs looked at that reads wait for.
    pub(super) fn mark_parked(&mut self) {
        for at in 0..self.parking.all.len() {
            let Parked { space, page, .. } = self.parking.all[at];
            self.slab_of(page).into_iter().for_each(|slab| self.mark(space, slab));
        }
    }

    /// Begins the reads of a slab that can end now.
    pub(super) fn unpark(&mut self, space: usize, slab: usize) {
        self.unpark_where(|client, parked| parked.space == space && client.slab_of(parked.page) == Some(slab));
    }

    /// Another owner has the space.
    pub(super) fn unpark_space(&mut self, space: usize) {
        self.unpark_where(|_, parked| parked.space == space);
    }

    /// There is a place again.
    pub(super) fn unpark_waiting(&mut self) {
        if self.parking.is_short && self.ops.has_room() {
            self.parking.is_short = false;
            self.unpark_where(|_, _| true);
        }
    }

    fn unpark_where(&mut self, fits: impl Fn(&Client, &Parked) -> bool) {
        for _ in 0..self.parking.all.len() {
            let Some(parked) = self.parking.all.pop_front() else { return };
            let ready = fits(self, &parked) && self.is_answerable(&parked);
            let Parked { space, page, class, token, since } = parked;
            if !ready {
                self.parking.all.push_back(parked);
            } else if !self.begin_again(space, page, class, (token, since)) {
                // Nor is there a place for any other one.
                self.parking.is_short = true;
                return self.parking.all.push_front(parked);
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
