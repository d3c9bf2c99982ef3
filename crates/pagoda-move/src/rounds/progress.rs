//! What a user sees of a move that is under way.

use std::time::Duration;

use pagoda_core::units::{Bytes, PageCount};

use super::settings::Handover;
use super::slowing::Slowing;
use crate::units::{Rate, RoundNo};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The VM runs, and pages are sent.
    Rounds,
    /// The VM is being stopped.
    Stopping(Handover),
    /// It is stopped, and the last pages are sent.
    Last(Handover),
    /// Nothing more is sent before the grant.
    Done,
}

/// Why a move is not further than it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    Nothing,
    /// The cap on bandwidth is reached.
    Bandwidth,
    /// The destination has not acknowledged an earlier round.
    Acknowledgement,
    /// A direct I/O in flight began before these pages were protected.
    DirectIo {
        pages: PageCount,
    },
    /// The guest writes as fast as the link sends.
    Writers,
}

#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub phase: Phase,
    pub round: RoundNo,
    /// Bytes of pages on the link, repeated pages counted each time.
    pub sent: Bytes,
    /// Bytes of pages that were named instead of sent, such as zeros.
    pub spared: Bytes,
    /// Bytes by which compression has made what was sent smaller.
    pub saved: Bytes,
    /// Pages that are to be sent, as far as is known now.
    pub left: PageCount,
    pub rate: Option<Rate>,
    pub written_rate: Rate,
    /// What first writes to pages wait, for a move that has not ended in its time.
    pub slowing: Slowing,
    pub elapsed: Duration,
    /// Until nothing is left, if writes go on like this. None: never, or not known.
    pub remaining: Option<Duration>,
    /// If the VM were stopped now.
    pub expected_downtime: Option<Duration>,
    pub waits: Waits,
}
