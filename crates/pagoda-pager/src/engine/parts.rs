//! What an engine is made of, and why it may not start.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use pagoda_abi::attach::Packet;
use pagoda_core::fault::{PageInPolicy, Replacement, Sharing};
use pagoda_core::units::{ChunkIdx, PageCount};
use pagoda_image::Ledger;
use pagoda_sys::ring::RingError;
use pagoda_sys::socket::{Connection, SharedMap};

use crate::loan::Loan;
use crate::mapper::NewMapper;
use crate::recover::RecoverError;
use crate::space::Space;
use crate::tier::Stack;

/// Everything of a VM that an engine needs, as the attach gave it.
#[derive(Debug)]
pub struct Parts {
    /// The VM's name, for messages and names of threads.
    pub name: String,
    /// The VM's RAM files and its userfaultfds.
    pub space: Space,
    /// Where its pages are that are not in DRAM.
    pub tiers: Stack,
    /// Memory shared with the shim.
    pub shared: SharedMap,
    /// The connection to the shim's agent.
    pub agent: Connection,
    /// What the agent is told when the engine is ready.
    pub welcome: Packet,
    /// The VMM's process id.
    pub pid: u32,
    /// Becomes readable when the VMM ends.
    pub pidfd: OwnedFd,
    /// The most pages that the VM may have in DRAM to begin with.
    pub limit: PageCount,
    /// The fewest pages that page-out leaves in DRAM.
    pub min: PageCount,
    /// The kernel gives large folios for whole chunks.
    pub direct: bool,
    /// Pages can be mapped write-protected.
    pub protect: bool,
    /// How much comes in for a fault.
    pub page_in: PageInPolicy,
    /// Which chunk leaves DRAM next.
    pub replacement: Replacement,
    /// How long the end of a page-in is polled for before the engine sleeps.
    pub busy_poll: Duration,
    /// Why the VM is never evicted, if it is not.
    pub pinned: Option<String>,
    /// Where its pages are when the engine starts.
    pub origin: Origin,
    /// An image that is not filled, which a daemon before this one began: the VM holds what it lacks.
    pub image: Option<Arc<Ledger>>,
    /// Whether equal pages are looked for when nothing has to leave, too.
    pub sharing: Sharing,
    /// What it borrows of its snapshot.
    pub loan: Option<Loan>,
    /// Processes that map its memory beside the VMM.
    pub mappers: Vec<NewMapper>,
}

/// Where a VM's pages are when its engine starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nowhere: it is new, and all of them are zero.
    New,
    /// In its tiers, and none in DRAM: it is new, and was made of an image.
    InTiers,
    /// Wherever an earlier daemon left them: it runs.
    TakenOver,
    /// Nowhere yet: it comes from another host. Its memory is the kernel's until [`crate::handle::Command::Arrived`], and its guest
    /// does not run before.
    Arriving,
}

impl Origin {
    /// It may have been served before, by an earlier daemon.
    pub fn is_taken_over(self) -> bool {
        self == Origin::TakenOver
    }
}

/// Why an engine could not start. The VM waits or, if it was new, does not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The kernel gives no io_uring, or it cannot be set up.
    #[error("set up the disk ring: {0}")]
    Ring(#[from] RingError),
    /// The page table could not be rebuilt from the VM's files.
    #[error("rebuild the page table: {0}")]
    Recover(#[from] RecoverError),
    /// A range of the VMM could not be registered with its userfaultfd.
    #[error("register memory: {errno}")]
    Register { errno: pagoda_sys::Errno, registered: usize },
    /// The pages that have arrived are not those that the files have.
    #[error("the files have other pages of {chunk:?} than those that have arrived")]
    Misplaced {
        /// The first such chunk.
        chunk: ChunkIdx,
    },
    /// A process that maps its memory does not say what.
    #[error("a process that maps its memory beside the VMM: {0}")]
    Mapper(String),
    /// What the VM borrows of its snapshot cannot be found out.
    #[error("look at what it borrows of its snapshot: {0}")]
    Loan(std::io::Error),
    /// The table of shared pages.
    #[error("read the table of shared pages: {0}")]
    Shared(pagoda_sys::Errno),
    /// The engine's thread could not be started.
    #[error("start the engine: {0}")]
    Thread(std::io::Error),
}
