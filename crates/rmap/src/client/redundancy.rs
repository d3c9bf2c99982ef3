//! Whether every slab has the copies that it should: copies in the making, looks at all pages, slabs that nobody needs, room that
//! servers keep.
//!
//! Each part has its own state and is polled with a [`Context`](super::context::Context). `redundancy/apply.rs` does what they
//! return.

mod apply;
mod pass_on;

use super::copies::Copies;
use super::repair::Repairs;
use super::reserve::Reservations;
use super::scrub::Scrub;
use super::vacate::Vacating;

#[derive(Debug)]
pub struct Redundancy {
    pub copies: Copies,
    pub repairs: Repairs,
    pub reservations: Reservations,
    pub scrub: Scrub,
    pub vacating: Vacating,
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

    /// For so many slabs.
    pub fn make_room(&mut self, slabs: usize) {
        self.repairs.make_room(slabs);
        self.copies.make_room(slabs);
        self.vacating.make_room(slabs);
    }
}
