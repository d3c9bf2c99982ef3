//! Messages of the control stream.
//!
//! Messages about who owns the VM state a fact, and may arrive twice or late: whoever gets one compares its attempt and generation.

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, ChunkIdx};

use super::offer::{Hello, Reason, Room, Welcome};
use crate::map::PageRun;
use crate::units::{AttemptId, ConnectionNo, Generation, RoundNo};

/// What makes a grant final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The grant itself: the source cannot take it back.
    Grant,
    /// The arbiter's register: the destination owns the VM when that says so.
    Arbiter,
}

/// How an attempt ended, by its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The source owns the VM.
    Mine,
    /// The destination does, and the source has nothing of it any more.
    Yours,
}

/// How far a destination is that has not got the grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    Filling,
    /// All is there that the VM needs to run.
    Ready,
}

/// Some chunks of a map of pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapPart {
    pub chunks: Vec<(ChunkIdx, PageSet)>,
    pub last: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    // Before the first page. The source asks, the destination answers.
    Hello(Hello),
    Welcome(Welcome),
    Refuse {
        attempt: AttemptId,
        reasons: Vec<Reason>,
    },
    Reserve {
        attempt: AttemptId,
        room: Room,
        /// What makes the VM and starts it, as JSON. The daemons know what is in it; here it is a text with a limit.
        specification: String,
    },
    Reserved {
        attempt: AttemptId,
    },
    /// From a source that is only asking, after its welcome by a host that has [`super::offer::Capabilities::DISKS`]: whether a VM of this
    /// specification would be let in. Nothing is made for it.
    Check {
        attempt: AttemptId,
        specification: String,
    },
    /// It would be, now.
    Possible {
        attempt: AttemptId,
    },
    NoRoom {
        attempt: AttemptId,
        needed: Room,
        free: Room,
    },
    /// From the source, first on a later connection of the attempt.
    Resume {
        attempt: AttemptId,
        connection: ConnectionNo,
    },
    /// From the destination: it knows nothing of the attempt, and has never got its grant.
    Forgotten {
        attempt: AttemptId,
    },

    // While the VM's pages and its device state are sent.
    /// From the destination: all pages of the round, and of those before, have arrived and are in their places.
    RoundKept {
        attempt: AttemptId,
        round: RoundNo,
    },
    /// From the source: a part of the device state, in order.
    State {
        attempt: AttemptId,
        offset: Bytes,
        bytes: Vec<u8>,
    },
    /// From the source: the device state is whole, and so long. With all rounds until this one, with the map of what is missing
    /// and with the state the VM can run.
    StateEnd {
        attempt: AttemptId,
        total: Bytes,
        round: RoundNo,
    },
    /// Pages that the destination lacks. From the source before the grant, from the destination on each later connection.
    Missing {
        attempt: AttemptId,
        part: MapPart,
    },
    /// From the source, before the state: pages that are in the VM's remote tier, which is handed over. Their content is there,
    /// whatever has come of them before.
    RemoteMap {
        attempt: AttemptId,
        part: MapPart,
    },

    // Who owns the VM.
    /// From the destination: what it has.
    Holds {
        attempt: AttemptId,
        holding: Holding,
    },
    /// From the source, after its note is durable.
    Grant {
        attempt: AttemptId,
        generation: Generation,
        by: DecidedBy,
    },
    /// From the destination: it owns the VM, which it has a durable note of.
    Started {
        attempt: AttemptId,
        generation: Generation,
    },
    /// From the destination: it has not run the VM at this generation and never will, which it has a durable note of.
    Refusal {
        attempt: AttemptId,
        generation: Generation,
    },
    /// From the source: it would like to have the grant back.
    Withdraw {
        attempt: AttemptId,
        generation: Generation,
    },
    /// From the destination: it does not reach the arbiter, and asks for a grant that needs none.
    NoArbiter {
        attempt: AttemptId,
        generation: Generation,
    },
    /// From the source: it has no note of the attempt any more.
    Settled {
        attempt: AttemptId,
        generation: Generation,
        verdict: Verdict,
    },

    // The tail of a post-copy.
    /// From the destination: pages that a thread of the guest waits for.
    Demand {
        attempt: AttemptId,
        runs: Vec<PageRun>,
    },
    /// From the destination: pages that it has for good. The source may forget them.
    Kept {
        attempt: AttemptId,
        runs: Vec<PageRun>,
    },
    /// From the destination: it has every page for good.
    Whole {
        attempt: AttemptId,
    },
}

impl Control {
    /// The attempt that the message is about.
    pub const fn attempt(&self) -> AttemptId {
        match self {
            Control::Hello(hello) => hello.attempt,
            Control::Welcome(welcome) => welcome.attempt,
            Control::Refuse { attempt, .. }
            | Control::Reserve { attempt, .. }
            | Control::Reserved { attempt }
            | Control::Check { attempt, .. }
            | Control::Possible { attempt }
            | Control::NoRoom { attempt, .. }
            | Control::Resume { attempt, .. }
            | Control::Forgotten { attempt }
            | Control::RoundKept { attempt, .. }
            | Control::State { attempt, .. }
            | Control::StateEnd { attempt, .. }
            | Control::Missing { attempt, .. }
            | Control::RemoteMap { attempt, .. }
            | Control::Holds { attempt, .. }
            | Control::Grant { attempt, .. }
            | Control::Started { attempt, .. }
            | Control::Refusal { attempt, .. }
            | Control::Withdraw { attempt, .. }
            | Control::NoArbiter { attempt, .. }
            | Control::Settled { attempt, .. }
            | Control::Demand { attempt, .. }
            | Control::Kept { attempt, .. }
            | Control::Whole { attempt } => *attempt,
        }
    }
}
