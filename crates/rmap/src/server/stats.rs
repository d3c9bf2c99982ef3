//! What a server counts.

use crate::wire::message::Status;

/// What became of datagrams, each counted once, and of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerStats {
    /// Fragments that were taken in.
    pub fragments: u64,
    /// Hellos by which a session began.
    pub accepted: u64,
    /// Hellos that had been answered before, and were again.
    pub repeated: u64,
    /// No version of the protocol produces them.
    pub malformed: u64,
    /// For sessions that do not exist (any more).
    pub unknown_session: u64,
    pub not_authentic: u64,
    pub replayed: u64,
    /// Hellos without the pool's key.
    pub strangers: u64,
    /// Hellos with the pool's key from nodes that are not admitted.
    pub not_admitted: u64,
    /// Hellos beyond what one second may bring, or beyond the sessions there are.
    pub throttled: u64,
    /// Hellos in versions that are not spoken here.
    pub refused: u64,
    /// Requests by what was answered.
    pub answered: [u64; Status::ALL.len()],
    /// Pages that were read, and pages that were written or trimmed.
    pub pages_read: u64,
    pub pages_written: u64,
}

impl ServerStats {
    pub(super) fn add(&mut self, other: &ServerStats) {
        let ServerStats {
            fragments,
            accepted,
            repeated,
            malformed,
            unknown_session,
            not_authentic,
            replayed,
            strangers,
            not_admitted,
            throttled,
            refused,
            answered,
            pages_read,
            pages_written,
        } = other;
        self.fragments += fragments;
        self.accepted += accepted;
        self.repeated += repeated;
        self.malformed += malformed;
        self.unknown_session += unknown_session;
        self.not_authentic += not_authentic;
        self.replayed += replayed;
        self.strangers += strangers;
        self.not_admitted += not_admitted;
        self.throttled += throttled;
        self.refused += refused;
        self.answered.iter_mut().zip(answered).for_each(|(sum, count)| *sum += count);
        self.pages_read += pages_read;
        self.pages_written += pages_written;
    }
}
