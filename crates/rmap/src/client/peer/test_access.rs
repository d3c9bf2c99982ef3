//! What tests look at in a session, and how they make it as they need it.

use std::collections::VecDeque;
use std::time::Duration;

use super::Peer;
use crate::client::exchange::ExchangeId;

impl Peer {
    /// Answers took so long, often enough that nothing else counts.
    pub fn usually_takes(&mut self, trip: Duration) {
        (0..50).for_each(|_| self.trip.sample(trip));
    }

    pub fn in_flight(&self) -> &VecDeque<ExchangeId> {
        &self.in_flight
    }

    /// Requests that are to be sent, or to be sent again.
    pub fn waiting(&self) -> (usize, usize) {
        (self.queues.iter().map(VecDeque::len).sum(), self.resends.len())
    }

    pub fn pinged_at(&self) -> crate::units::Time {
        self.pinged_at
    }

    pub fn ping(&mut self) {
        self.ping_due = true;
    }

    pub fn set_zone(&mut self, zone: u32) {
        self.info.zone = zone;
    }

    pub fn set_write_credits(&mut self, credits: u16) {
        self.write_credits = credits;
    }
}
