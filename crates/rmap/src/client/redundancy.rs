//! Whether every slab has the copies that it should: copies in the making, looks at all pages, slabs that nobody needs, room that
//! servers keep.
//!
//! Owns copies on their way through the client ([`Copies`]), which slabs get a copy now ([`Repairs`]), what servers are to keep free
//! ([`Reservations`]), how far the look at all pages has come ([`Scrub`]), and slabs that are about to go back ([`Vacating`]). The last
//! three are polled with a [`Context`](super::context::Context), and `redundancy/apply.rs` does what they return. A copy in the making
//! belongs to its slab; each that is begun ends once, joined or given up.

mod apply;
mod lost;
mod pass_on;
mod place;
mod restore;

use super::copies::Copies;
use super::repair::Repairs;
use super::reserve::{Reservations, Reserved};
use super::scrub::Scrub;
use super::vacate::Vacating;
use crate::client::index::SpaceIndex;
use crate::client::peers::Peers;
use crate::client::pool::Pool;
use crate::units::Time;

#[derive(Debug)]
pub struct Redundancy {
    pub copies: Copies,
    pub repairs: Repairs,
    reservations: Reservations,
    scrub: Scrub,
    vacating: Vacating,
}

impl Redundancy {
    pub fn new() -> Redundancy {
        Redundancy {
            copies: Copies::new(),
            repairs: Repairs::default(),
            reservations: Reservations::default(),
            scrub: Scrub::default(),
            vacating: Vacating::default(),
        }
    }

    /// When something of it is to be polled.
    pub fn due(&self, pool: &Pool) -> Option<Time> {
        let due = [self.scrub_due(pool), self.reservations.due(), self.vacating.due(), self.repairs.due()];
        due.into_iter().flatten().min()
    }

    /// Servers are to keep room for so many slabs of a space.
    pub fn reserve(&mut self, space: SpaceIndex, slabs: usize, copies: usize) {
        self.reservations.add(space, slabs, copies);
    }

    /// Servers are to keep no room for a space any more.
    pub fn unreserve(&mut self, space: SpaceIndex) {
        self.reservations.end(space);
    }

    /// What is kept for a space by servers that answer.
    pub fn reserved(&self, space: SpaceIndex, peers: &Peers) -> Reserved {
        self.reservations.view(space, peers)
    }

    /// A server knows the owner of a space now, or takes it for none: what it is to keep is looked at soon.
    pub fn owner_was_told(&mut self, space: SpaceIndex) {
        self.reservations.poll_soon(space);
    }

    /// For so many slabs.
    pub fn make_room(&mut self, slabs: usize) {
        self.repairs.make_room(slabs);
        self.copies.make_room(slabs);
        self.vacating.make_room(slabs);
    }
}
