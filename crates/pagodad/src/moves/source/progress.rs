//! How far a move from this host is, for users.

use std::time::{Duration, SystemTime};

use pagoda_api::types::MoveArbiter;
use pagoda_core::units::Bytes;
use pagoda_move::owner::End;
use pagoda_move::units::{AttemptId, Rate};

/// How much of disks is copied.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copied {
    pub done: Bytes,
    pub total: Bytes,
}

/// A move that is under way, or how far it came.
#[derive(Clone, Debug)]
pub struct Progress {
    pub vm: String,
    /// The name of the destination, or its key if it is not trusted any more.
    pub to: String,
    pub attempt: AttemptId,
    pub phase: &'static str,
    /// Bytes of pages on the link, repeated pages counted each time.
    pub sent: Bytes,
    /// Bytes of pages that were named instead of sent.
    pub spared: Bytes,
    /// Bytes of pages that went into the VM's remote tier instead, to be handed over with it.
    pub placed: Bytes,
    /// Bytes by which compression has made what was sent smaller.
    pub saved: Bytes,
    /// Bytes that are to be sent, as far as is known now.
    pub left: Bytes,
    /// The size of the VM's memory.
    pub total: Bytes,
    pub round: u32,
    pub rate: Option<Rate>,
    /// What the guest writes.
    pub written_rate: Rate,
    pub elapsed: Duration,
    /// Until nothing is left, if writes go on like this. None: never, or not known.
    pub eta: Option<Duration>,
    /// If the VM were stopped now.
    pub expected_downtime: Option<Duration>,
    /// What each first write of the guest to a page waits. Zero: its writers are not slowed.
    pub write_delay: Duration,
    /// Its disks, if they are copied, and their files.
    pub disks: Copied,
    pub disk_files: Vec<String>,
    /// Disks were being copied.
    pub has_begun: bool,
    /// Why it is not further than it is.
    pub waits: Option<String>,
    /// How long the VM stood still, until this host knew that it runs at its destination.
    pub downtime: Option<Duration>,
    /// Whether an arbiter decides, and what it says.
    pub arbiter: Option<MoveArbiter>,
}

impl Progress {
    /// The progress of a move that begins.
    pub fn new(vm: &str, to: &str, attempt: AttemptId, total: Bytes) -> Progress {
        Progress {
            vm: vm.to_owned(),
            to: to.to_owned(),
            attempt,
            phase: "greeting",
            sent: Bytes::ZERO,
            spared: Bytes::ZERO,
            placed: Bytes::ZERO,
            saved: Bytes::ZERO,
            left: total,
            total,
            round: 0,
            rate: None,
            written_rate: Rate(0),
            elapsed: Duration::ZERO,
            eta: None,
            expected_downtime: None,
            write_delay: Duration::ZERO,
            disks: Copied::default(),
            disk_files: Vec::new(),
            has_begun: false,
            waits: None,
            downtime: None,
            arbiter: None,
        }
    }
}

/// A move that is over.
#[derive(Clone, Debug)]
pub struct Ended {
    pub progress: Progress,
    pub end: End,
    /// Why the VM is not at its destination.
    pub why: Option<String>,
    pub at: SystemTime,
}
