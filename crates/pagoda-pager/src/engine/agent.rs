//! The connections to the shim: its agent, which does what only the VMM's own process can, and the VMM's calls.
//!
//! An agent that goes away takes no promise with it: zaps that were not answered are sent again to the next one, for
//! zapping twice is harmless.

mod talk;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pagoda_core::fault::OpId;
use pagoda_core::units::PageIdx;
use pagoda_sys::socket::Connection;

/// Collapsing is asked for in pieces, so that a zap never waits long behind one: 8 ms a GiB (throughput.md C).
const COLLAPSE_PIECE: u64 = 64 << 20;

/// How long the next call is waited for without sleeping: the VMM asks again within some 10 us while its guest gives pages up.
const LINGER: Duration = Duration::from_micros(50);

/// A zap under way.
#[derive(Clone, Debug)]
pub enum Asked {
    /// Of chunks, for an operation of the machine.
    Chunks(OpId),
    /// Of pages that the machine watches.
    Watch {
        /// Names the zap.
        ticket: u32,
        /// When it was asked for.
        at: Instant,
    },
    /// Of pages of an unarmed VM.
    Peek {
        /// What it belongs to.
        round: u32,
        /// Which of the period's pages.
        pages: std::ops::Range<usize>,
        /// When it was asked for.
        at: Instant,
    },
    /// Of pages of an unarmed VM whose ages are looked at.
    Age {
        /// Which.
        pages: Vec<PageIdx>,
        /// When it was asked for.
        at: Instant,
    },
}

/// The agent's connection and what it owes.
#[derive(Debug, Default)]
pub struct Agent {
    connection: Option<Connection>,
    generation: u32,
    seq: u64,
    /// Zaps under way, by their number.
    zaps: HashMap<u64, Asked>,
    clock_asked: bool,
    /// What was last said of large folios.
    large_folios: Option<bool>,
}

/// A connection on which the VMM's threads call.
pub struct Call {
    id: u32,
    connection: Connection,
    /// What was read last is not answered yet.
    is_under_way: bool,
    /// The discard that it is.
    discard: Option<u64>,
    /// It was answered since the connection was read last.
    was_answered: bool,
}

impl Agent {
    pub fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// While a balloon is inflated.
    pub fn wants_small_folios(&self) -> bool {
        self.large_folios == Some(false)
    }
}
