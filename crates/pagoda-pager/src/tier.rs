//! Where the pages of a VM are that are not in DRAM: an ordered [`Stack`] of tiers.
//!
//! * [`stack`]: which tier has a page's content, and the only way to read, write and drop it.
//! * [`swap`]: the VM's swap file, always the last tier.
//! * [`remote`]: memory of other machines.
//! * [`image`]: the image that the VM was made of, which is only read.
//! * [`source`]: pages of a VM that runs before all of them have come from another host.
//! * [`compressed`]: compressed pages in this machine's memory.
//! * [`frames`]: frames of a share group, above all others. Pages come to it by comparison, never by page-out.
//!
//! The fault machine knows that a page has a block in *some* tier; it does not know in which. A new tier is an implementation of
//! [`Tier`] and one more entry in the list from which a stack is made.
//!
//! # What holds in every tier
//!
//! * A page has a block in one tier at most, except while it is written out: then DRAM has the page, and whatever a tier holds
//!   of it is outdated. [`Stack::settle`] ends that state before the page leaves DRAM.
//! * What a tier holds survives the daemon. The next one learns it by [`Tier::recover`], while nothing is under way.
//! * No call waits for another machine or for the disk, except the repairs: [`Tier::read_back`] (the swap file's disk) and
//!   [`Tier::read_now`] (both), which serve one page after the kernel could not take it out of DRAM.
//! * A tier that cannot bring a page says so by an [`IoError`]. It never answers with zeros instead.

pub mod block_map;
pub mod compressed;
pub mod frames;
pub mod image;
mod kept;
mod page_map;
pub mod remote;
mod report;
pub mod source;
pub mod stack;
pub mod swap;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{IoError, OpId};
use pagoda_core::stats::Stats;
use pagoda_core::units::{CHUNK_PAGES, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::{BufferId, BufferSlice, Ring, RingError};

pub use report::Report;
pub use stack::{BlocksError, Stack, Wanted};

use crate::space::Space;

/// Content of a page.
pub type Content = [u8; PAGE_SIZE as usize];

/// Tiers of one VM at most, the frames not counted.
pub const TIERS_MAX: usize = 4;

/// Runs of adjacent pages that are written between two looks at the faults: some 2 us each, so a fault waits 20 us at most.
pub const STEP_RUNS: usize = 8;
/// The same while pages come in one by one and there is time.
const PACED_RUNS: usize = 4;

/// A set of pages of one chunk for each tier, in the order of the stack.
pub type ByTier = [PageSet; TIERS_MAX];

/// A tier's position in its stack: lower ones are asked first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TierIdx(pub u8);

impl TierIdx {
    pub(crate) fn as_usize(self) -> usize {
        usize::from(self.0)
    }
}

/// Where the pages of a read go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Into a buffer of the ring, whose first byte is that of page `first`.
    Buffer {
        /// The buffer of the ring that the pages are read into.
        id: BufferId,
        /// The page of its first byte.
        first: PageIdx,
    },
    /// Into the RAM file, under an intent.
    Ram,
}

/// Pages to be read from one tier.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// The machine's operation that the read belongs to.
    pub op: OpId,
    /// The chunk that all of the pages are in.
    pub chunk: ChunkIdx,
    /// The pages whose content is wanted, all of which the tier has.
    pub pages: PageSet,
    /// Pages that may be read with them, for a tier to which one long request is cheaper than several. Their place in the target
    /// is nobody else's, and what arrives there is not used.
    pub around: PageSet,
    /// Where the content of the pages goes.
    pub target: Target,
    /// A fault waits for them.
    pub demand: bool,
}

/// Pages to be written to one tier. The guest may change them meanwhile: then the operation is cancelled, and nothing that was
/// written counts.
#[derive(Clone, Copy, Debug)]
pub struct Write {
    /// The machine's operation that the write belongs to.
    pub op: OpId,
    /// The chunk that all of the pages are in.
    pub chunk: ChunkIdx,
    /// The pages, none of which is all zero.
    pub pages: PageSet,
}

/// What a tier has begun.
#[derive(Clone, Copy, Debug, Default)]
pub struct Begun {
    /// Ends that will follow: requests to the ring, and [`Ended`]s.
    pub parts: u16,
    /// Bytes that these ends will account for.
    pub bytes: u64,
    /// Of a write: the pages whose block in this tier is overwritten from now on, or has been.
    pub overwritten: PageSet,
    /// Of a write: the pages that the tier does not take. The next tier is asked.
    pub declined: PageSet,
    /// What went wrong at once, if anything did.
    pub error: Option<IoError>,
}

/// How a part ended that did not go through the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The page was read into its target.
    Read,
    /// The tier holds the page that was written, durably as far as it promises that.
    Written,
    /// The tier does not take the page: the next one is asked.
    Declined,
    /// The page cannot be read.
    Failed(IoError),
    /// The page was read, and its target is gone: a broken invariant.
    Undelivered,
}

/// The end of one page's part of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The operation that the page was read or written for.
    pub op: OpId,
    /// The page that this is about.
    pub page: PageIdx,
    /// How the page's part of the operation ended.
    pub outcome: Outcome,
}

/// As many pages as a tier takes between two looks at the faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Runs of adjacent pages at most.
    pub runs: usize,
    /// How many pages it takes at most.
    pub pages: u16,
}

impl Step {
    /// A step of a tier to which a long run costs no more than a short one.
    pub fn of_runs(has_time: bool) -> Step {
        Step { runs: if has_time { PACED_RUNS } else { STEP_RUNS }, pages: CHUNK_PAGES as u16 }
    }

    /// As many of these pages as the step takes, from the first on.
    pub fn of(self, pages: PageSet) -> PageSet {
        let runs = pages.runs().take(self.runs).map(|run| PageSet::range(run.start, run.len));
        let step = runs.fold(PageSet::EMPTY, |step, run| step | run);
        if step.count() <= self.pages { step } else { step.iter().take(usize::from(self.pages)).collect() }
    }
}

/// Whether a tier takes pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// It takes so many at once.
    Now(Step),
    /// Later: as much as it can bear is under way.
    Later,
    /// No: ask the next tier.
    No,
}

/// Whether a tier takes copies for whoever the VM moves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    /// It takes some copies now.
    Now,
    /// Later: as much as it can bear is under way.
    Later,
    /// No: they go another way.
    No,
}

/// What became of a copy for whoever the VM moves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The page that was copied.
    pub page: PageIdx,
    /// The tier that is handed over has what it held, in as many copies as it keeps. Else nothing is known.
    pub is_there: bool,
}

/// How much a tier holds and has moved, since the engine began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages that it holds.
    pub pages: u64,
    /// Bytes of this machine's memory that it takes.
    pub memory_bytes: u64,
    /// Bytes of the disk that it takes.
    pub disk_bytes: u64,
    /// Pages read from it.
    pub pages_in: u64,
    /// Pages written to it.
    pub pages_out: u64,
    /// Pages that it did not take.
    pub declined: u64,
}

/// What of the engine a tier may use while it is called.
pub struct Io<'a> {
    /// The ring through which the engine reads and writes files.
    pub ring: &'a mut Ring,
    /// The VM's RAM, by region.
    pub space: &'a Space,
    /// The tier's own position in the stack.
    pub tier: TierIdx,
}

impl std::fmt::Debug for Io<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Io").field("tier", &self.tier).finish_non_exhaustive()
    }
}

impl Io<'_> {
    /// Puts a page that was read where it is wanted. False: the target is gone, which is a broken invariant.
    #[must_use]
    pub fn deliver(&mut self, target: Target, page: PageIdx, content: &[u8]) -> bool {
        match target {
            Target::Buffer { id, first } => {
                let offset = ((page.0 - first.0) * PAGE_SIZE) as u32;
                self.ring.fill(BufferSlice { id, offset, len: PAGE_SIZE as u32 }, content)
            }
            Target::Ram => {
                let location = self.space.locate_page(page);
                location.region.view.write_page(location.pages().start, content);
                true
            }
        }
    }

    /// Copies what the page holds in DRAM now.
    pub fn take_content(&self, page: PageIdx, out: &mut [u8]) {
        let location = self.space.locate_page(page);
        location.region.view.read_page(location.pages().start, out);
    }
}

/// One tier of one VM. Its engine's thread alone calls it. See the module for what every tier keeps to.
pub trait Tier: Send + std::fmt::Debug {
    /// What users call it: the value of the metrics' label `tier`.
    fn name(&self) -> &'static str;

    /// Makes itself known to the ring of the engine that begins.
    ///
    /// # Errors
    /// The ring is full, or the kernel refuses.
    fn attach(&mut self, ring: &mut Ring) -> Result<(), RingError> {
        let _ = ring;
        Ok(())
    }

    /// Becomes readable when there is something for [`Tier::turn`].
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The pages of the chunk that it holds. The last tier of a stack need not know: it has all blocks that no other has.
    fn holds(&self, chunk: ChunkIdx) -> PageSet;

    /// Whether pages may be written to it now. `has_time`: no fault waits for DRAM that this page-out makes free.
    fn takes(&self, has_time: bool) -> Takes;

    /// Begins to read; the parts end one by one.
    fn read(&mut self, io: &mut Io<'_>, read: &Read) -> Begun;

    /// Begins to write; the parts end one by one.
    fn write(&mut self, io: &mut Io<'_>, write: &Write) -> Begun;

    /// A request of a write that it gave to the ring has ended.
    fn ring_write_ended(&mut self) {}

    /// Sends what waits to be sent. How long nothing is to be done after that.
    fn begin(&mut self, io: &mut Io<'_>) -> Duration {
        let _ = io;
        Duration::MAX
    }

    /// Takes in what its descriptor has.
    ///
    /// # Errors
    /// The descriptor is broken.
    fn turn(&mut self) -> std::io::Result<()> {
        Ok(())
    }

    /// The next part that has ended outside the ring. A page that was read is in its target by then.
    fn next_ended(&mut self, io: &mut Io<'_>) -> Option<Ended> {
        let _ = io;
        None
    }

    /// A page-out has ended: the tier holds `gained`, and holds `lost` no more. DRAM has all these pages.
    ///
    /// # Errors
    /// It could not be noted for the next daemon.
    fn settle(&mut self, chunk: ChunkIdx, gained: PageSet, lost: PageSet) -> Result<(), Errno>;

    /// These pages, which it holds, have no content any more.
    ///
    /// # Errors
    /// The next daemon would find them.
    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno>;

    /// It holds nothing any more.
    ///
    /// # Errors
    /// The next daemon would find something.
    fn clear(&mut self) -> Result<(), Errno>;

    /// These pages, which it holds, are about to leave DRAM: it makes sure that [`Tier::read_back`] can bring them.
    fn keep(&mut self, space: &Space, chunk: ChunkIdx, pages: PageSet) {
        let _ = (space, chunk, pages);
    }

    /// Brings a page back that it kept, without waiting for another machine.
    ///
    /// # Errors
    /// Of the disk.
    fn read_back(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.read_now(page, out)
    }

    /// Brings a page while nothing else is under way, and waits for it.
    ///
    /// # Errors
    /// Of the disk or the network; the page is lost.
    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno>;

    /// Tells which pages it holds, chunk by chunk in ascending order, from what the last daemon left. It may name a page more than
    /// once.
    ///
    /// # Errors
    /// That cannot be read.
    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno>;

    /// The pages of the chunk that it holds for whoever the VM moves to: nothing in it changes any more, so that none of them has to
    /// be sent.
    fn handed_over(&self, chunk: ChunkIdx) -> PageSet {
        let _ = chunk;
        PageSet::EMPTY
    }

    /// Whether [`Tier::place`] takes pages now.
    fn places(&self) -> Places {
        Places::No
    }

    /// Begins to write what pages of one chunk held at some moment, for whoever the VM moves to. They are not this VM's in the tier,
    /// and the block that the tier has of any of them, if it has one, does not count.
    fn place(&mut self, first: PageIdx, content: Vec<u8>) {
        unreachable!("{} takes no copies: {} bytes of page {}", self.name(), content.len(), first.0);
    }

    /// What became of a page that was placed. Each is given once.
    fn next_placed(&mut self) -> Option<Placed> {
        None
    }

    /// Nobody waits for pages that are being placed any more.
    fn forget_placing(&mut self) {}

    /// Of the pages of the chunk that it holds, those that have not come to this host yet.
    fn missing(&self, chunk: ChunkIdx) -> PageSet {
        let _ = chunk;
        PageSet::EMPTY
    }

    /// The VM begins, and these pages, by chunk, have not come yet: from now on the tier holds them. False: it is not the one that
    /// does.
    ///
    /// # Errors
    /// The next daemon would not find them.
    fn expect(&mut self, missing: &[PageSet]) -> Result<bool, Errno> {
        let _ = missing;
        Ok(false)
    }

    /// Pages that were missing and have come. Each is given once.
    fn take_came(&mut self) -> Option<(ChunkIdx, PageSet)> {
        None
    }

    /// Once a second: does what is due now and then. `written` are the chunks that are being written out.
    fn maintain(&mut self, written: &mut dyn Iterator<Item = ChunkIdx>) {
        let _ = written;
    }

    /// What the VM is expected to need soon, in the order in which it is to come in. Given out once.
    fn take_prefetch(&mut self) -> Vec<(ChunkIdx, PageSet)> {
        Vec::new()
    }

    /// What was read ahead of this chunk is used.
    fn note_hit(&mut self, chunk: ChunkIdx) {
        let _ = chunk;
    }

    /// The guest of a restored VM was let run, now or before.
    fn note_let_run(&mut self) {}

    /// The VM has ended.
    fn end(&mut self) {}

    /// How much it holds, and has moved since the engine began.
    fn counts(&self) -> Counts;

    /// Adds metrics of its own.
    fn add_to(&self, stats: &mut Stats) {
        let _ = stats;
    }

    /// What the VM waits for, if pages do not come in time. That is no stall: it goes on by itself.
    fn waits(&mut self) -> Option<String> {
        None
    }

    /// What of it could not be read last, in words, if that is not the swap file's text: for [`IoError::Image`].
    fn trouble(&self) -> Option<String> {
        None
    }

    /// More of a tier in other machines' memory.
    fn remote(&mut self) -> Option<remote::RemoteNumbers> {
        None
    }
}
