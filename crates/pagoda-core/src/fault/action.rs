//! What the machine is told and what it asks for.
//!
//! # What the machine relies on
//!
//! * The actions of one event are executed in order and before the next event is applied; only [`Event::PunchDone`],
//!   [`Event::ShareDone`] and [`Event::Fenced`] may be applied in between. Reads, writes, zaps and owns are *started*
//!   in order; all other actions are complete when they return.
//! * [`Now::oldest_io`] is read after the event was received. A value from before a zap misses a direct I/O that began
//!   between the two and pinned a page.
//! * While [`super::Machine::is_pin_blocked`], the pager sends a [`Event::Tick`] every few milliseconds: the end of a direct
//!   I/O is no event. Else once a second is enough.
//! * A page's entry in the table of shared pages counts where the RAM file has no data, or an intent names the page; then
//!   swap, then zero. A frame does not change while an entry names it.
//! * From `Arm` to `Disarm` nobody but the pager makes holes in the RAM file; the pager waits for others before it looks.
//! * A block that an image refers to stays what it is: `WriteOut` writes elsewhere, and `SwapPunch` and `Disarm` only end
//!   that it is the page's block.
//! * `SwapPunch`, `RamPunch` and the punches of zero pages do not fail silently: a block that stays comes back as old
//!   content after a restart. What cannot be punched is tried again or ends the VM.
//! * No page is in the RAM file without its content but those of a declared intent: `Copy`, `Store` and `Zero` bring
//!   each page in atomically (`UFFDIO_COPY`; a write to a hole of a file with large folios would zero its neighbours).
//! * The template has every page of a chunk that is borrowed, the same for ever, and what swap holds of it equals that: swap
//!   and the template are of one image. No page of a borrowed chunk is zapped.
//! * A cap is at least the pages that one instruction and one request of a device need at once; a cap of 0 stops the VM.
//!
//! # Restart
//!
//! All I/O of the dead daemon has ended, for its writes could land on newer blocks. The new daemon does this:
//!
//! * Pages in declared intents are punched from the RAM file. Where a hole cannot be had, their content is read from
//!   swap. The intents are withdrawn after that.
//! * Entries of pages that the RAM file has are cleared: the copy back was done but for that.
//! * An `Own` that was ordered has been done by then, or never is.
//! * Pages that the RAM file has of chunks that are still borrowed are punched. These chunks are protected as a whole,
//!   and *then* looked at for private pages: a page that the dead daemon let be written may be written later.
//! * Then, if the VM's memory is registered, [`super::Machine::armed`] is called on a new machine. `SetLimit`, `Pin`
//!   and the discards that were not answered follow, and a wake-up of the whole space.
//!
//! A zap that the dead daemon asked for may still come: it does no harm.

use crate::bits::{PageSet, Run};
pub use crate::pattern::Access;
use crate::stats::Metric;
use crate::units::{ChunkIdx, PageCount, PageIdx};

/// Names an operation under way; the pager hands it back with the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u16);

/// Why the page could not be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Not mapped (`MISSING` and `MINOR` alike: the message may be stale, the state knows).
    Unmapped,
    /// The page is mapped, but write-protected, and it was written.
    WriteProtected,
}

/// What an I/O can fail with, as far as decisions differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoError {
    /// The file system is full (`ENOSPC`, `EDQUOT`).
    NoSpace,
    /// Another machine had it, and it is gone.
    Lost,
    /// The image that the VM was made of has it, damaged or not readable.
    Image,
    /// Anything else; the number is the errno.
    Failed(i32),
}

/// Why a VM does not go on until [`Event::Continue`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// Page-out failed: the pages stay in DRAM.
    Write(IoError),
    /// Page-in failed: whoever needs the page waits.
    Read(IoError),
}

/// What the machine may know of the world at an event.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Milliseconds of any steady clock.
    pub ms: u64,
    /// Start epoch of the oldest direct I/O in flight in the VMM; `u64::MAX`: none, 0: cannot be told.
    pub oldest_io: u64,
}

/// The pager tells the machine what has happened, or what is wanted of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the variants say it
pub enum Event {
    /// The kernel reported that a thread faulted on this page.
    Fault { page: PageIdx, access: Access, kind: FaultKind },
    /// A `ReadPage`, `ReadSpan`, `ReadChunk` or `Keep` ended.
    ReadDone { op: OpId, result: Result<(), IoError> },
    /// A `WriteOut` ended. `zero`: pages found all zero, not written, whose swap blocks are now holes. Of a failed one
    /// nothing is believed.
    WriteDone { op: OpId, zero: PageSet, result: Result<(), IoError> },
    /// A `PunchOut` ended, right after it was asked for: this is the next event, or follows the other actions of the list.
    /// `left`: pages that could not be taken out of the RAM file; their content was read back from swap.
    PunchDone { op: OpId, left: PageSet },
    /// A `Zap` ended; the epoch after it, or `None` when it could not be done. The machine asks again at once, so while the
    /// VMM's agent is away the answer has to wait for it.
    ZapDone { op: OpId, epoch: Option<u64> },
    /// A `ZapPages` ended. `done`: the pages are unmapped.
    PagesZapped { ticket: u32, done: bool },
    /// The guest gave pages back: they become zero. `token` comes back in `DiscardDone`; until then nobody touches the
    /// pages, and no I/O on them is in flight.
    Discard { token: u64, first: PageIdx, count: PageCount },
    /// Whoever asked for a `Discard` has gone without an answer, and may use its pages: what is left of it is not done.
    Abandon { token: u64 },
    /// New hard cap. A cap below the VM's size arms it.
    SetLimit { limit: PageCount },
    /// What the VM is guaranteed: page-out stops there, unless a fault waits for room.
    SetMin { min: PageCount },
    /// The VM may never be evicted from now on (DMA we cannot see).
    Pin,
    /// The user says the cause of a stall is gone.
    Continue,
    /// Time has passed, so the machine looks at its periodic work.
    Tick,
    /// A `Share` ended. Pages leave RAM only with this as the very next event; before it others may come, for the chunk is
    /// busy as long as it takes.
    ShareDone { op: OpId, found: Found },
    /// There is processor time to look for equal pages.
    Scan,
    /// An image is to begin soon: the VM is armed and stays so, and each of these events protects a few pages that may be
    /// mapped writable. Sent again while there is time, until [`super::Machine::sweeps`] says that all have been protected
    /// often enough. It ends with `on: false`, or when an image begins.
    Prepare { on: bool },
    /// It is to be known soon which chunks are hot, of a VM of which nothing is known because it has room for all of its memory: each
    /// chunk is zapped once. Ends with `Prepare { on: false }`.
    LearnHeat,
    /// The newest image of the VM begins here: every page is frozen. From before this event until its answer, which is in
    /// the actions of this very event ([`Action::BeginImage`] or [`Action::RefuseImage`]), the VM is stopped and nobody
    /// writes its memory. `has_parent`: the image has the one before it, in the life of this machine, as its parent, which
    /// has all pages and is whole. Then what is known to be the same is not copied.
    Freeze { has_parent: bool },
    /// A `Protect` could not be done: its pages may be mapped writable as before. It comes behind the other actions of the
    /// list, and before any event but [`Event::PunchDone`] and [`Event::ShareDone`].
    ProtectFailed { pages: Pages },
    /// There is no image any more that lacks pages: none is frozen, and none known to be the same as in an image. Also when a
    /// `BeginImage` or a `Preserve` could not be done; then it comes as `ProtectFailed` does.
    Thaw,
    /// No later image will have the newest one as its parent.
    Forget,
    /// There is time to copy some of what the newest image lacks.
    Fill,
    /// A move wants to know which pages may have been written since the last look: [`super::Machine::take_written`]. No image
    /// lacks pages, and [`super::Machine::can_look`]. What was known to be the same as in an image is not any more.
    Look,
    /// A move wants copies of what these pages hold.
    CopyOut { pages: Pages },
    /// Another page of the share group has got a frame with what this page held when it was looked at.
    LookAgain { page: PageIdx },
    /// Nobody else refers to this page's frame.
    TakeBack { page: PageIdx },
    /// What this VM's part of its frames comes to, newly counted.
    Charge { pages: PageCount },
    /// A `Fence` ended, right after it was asked for: this is the next event, or follows the other actions of the list. The
    /// epoch behind the protection, or `None` when it could not be done.
    Fenced { op: OpId, epoch: Option<u64> },
    /// An `Own` ended. `kept`: the pages that the RAM file has now. `None`: nothing was moved, and the RAM file has no page
    /// of the chunk.
    OwnDone { op: OpId, kept: Option<PageSet> },
    /// Direct I/O that nobody sees may write into the VM's private pages for ever: no borrowed chunk becomes the VM's own any
    /// more. What the guest gives back of one keeps its content.
    KeepBorrowed,
    /// The template is needed no longer: every borrowed chunk becomes the VM's own, as soon as that can be done.
    OwnAll,
    /// Blocks of pages have come from another host: they can be read as quickly as any other.
    Came { chunk: ChunkIdx, pages: PageSet },
}

/// How a fault was answered, or what it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Its cause, one of [`crate::stats::FAULT_CAUSES`].
    pub cause: Metric,
    /// It was the first touch of a chunk that had been read ahead.
    pub read_ahead: bool,
}

/// What became of the pages of a `Share`. Pages in none of the sets stay as they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Now frames of the share group.
    pub shared: PageSet,
    /// All zero: holes now, in RAM and in swap.
    pub zero: PageSet,
    /// All zero, and holes in swap, but a pin keeps them in the RAM file.
    pub zero_left: PageSet,
    /// Frames made for them, which count as this VM's until the next [`Event::Charge`].
    pub frames: u16,
}

/// Why no image can begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The VM is not armed, or its last `Arm` or `Disarm` was not answered: first writes would go unseen.
    Unarmed,
    /// Its memory may be written unseen for ever ([`Event::Pin`]).
    Pinned,
    /// Direct I/O is in flight, which writes past any protection.
    DirectIo,
    /// Chunks are borrowed, which only [`Event::Prepare`] makes the VM's own.
    Borrowed,
}

/// Where the content is that an image takes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The content is in the RAM file.
    Ram,
    /// The content is in the buffer of this read, which has ended.
    Buffer(OpId),
    /// The content is in frames of the share group.
    Frame,
    /// Nowhere: the pages are zero.
    Zero,
    /// The content is in the image's parent, whose pages they still are.
    Parent,
}

/// Pages of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// The pages are all in this chunk.
    pub chunk: ChunkIdx,
    /// The run counts them from the start of the chunk.
    pub run: Run,
}

impl Pages {
    /// Index of the first page in the VM's space.
    pub fn first(&self) -> PageIdx {
        self.chunk.page(self.run.start)
    }
}

/// What to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Map pages that are in the RAM file (`UFFDIO_CONTINUE`) and wake their faulters. Pages already mapped (`EEXIST`, one by
    /// one) keep their entry, and are woken. A hole among them is a broken invariant.
    Map { pages: Pages, protect: bool },
    /// End write-protection and wake.
    Unprotect { pages: Pages },
    /// Write-protect pages that may be mapped writable. Some of the run may be protected already, or not mapped; these stay so.
    Protect { pages: Pages },
    /// The newest image takes over what these pages hold, before that changes. `from` says where it is when this is
    /// executed; the machine's table says already what is to come. It is noted for the next daemon when this returns.
    /// What cannot be kept ends the image, never the VM; that is noted before this returns, for the page changes next.
    Preserve { pages: Pages, from: Source },
    /// The newest image is what the VM holds now. All of its pages are protected. If a `Protect` before it in this list has
    /// failed, or this fails, there is no such image, and each `Preserve` until the machine has heard of it is void.
    BeginImage,
    /// No image begins, and nothing has changed.
    RefuseImage { why: Refusal },
    /// From now on the VM's memory is written unseen: the images that lack pages are lost, and have to be said so.
    LoseImages,
    /// Wake the faulters of these pages; they try again.
    Wake { pages: Pages },
    /// Fill absent pages with zeros, map them, wake. A page that is there (left by a punch that could only zero it) is mapped.
    Zero { pages: Pages },
    /// As `Zero` for a chunk that is wholly absent: by one large folio.
    ZeroChunk { chunk: ChunkIdx },
    /// Read one page from swap into the operation's buffer.
    ReadPage { op: OpId, page: PageIdx, demand: bool },
    /// Read a part of a chunk from swap into the operation's buffer. Only `wanted` has to arrive: blocks in between may be holes,
    /// outdated or about to be written.
    ReadSpan { op: OpId, span: Pages, wanted: PageSet, demand: bool },
    /// Read pages from swap into the operation's buffer, which is that of a chunk, for the newest image or a move alone. Unlike any
    /// other read it holds up nothing: meanwhile such a page may come in and change, and its block be written again or
    /// dropped. What arrives of it then is not used. Nobody waits for it as for a page-in.
    Keep { op: OpId, chunk: ChunkIdx, pages: PageSet },
    /// Copy what these pages hold for a move. `from` says where it is when this is executed.
    CopyOut { pages: Pages, from: Source },
    /// These pages cannot be copied now: ask again.
    CopyLater { pages: Pages },
    /// These pages cannot be read.
    CopyFailed { pages: Pages, error: IoError },
    /// Declare the intent and read a wholly absent chunk from swap straight into the RAM file.
    ReadChunk { op: OpId, chunk: ChunkIdx, demand: bool },
    /// The chunk's content is complete: withdraw the intent.
    ChunkComplete { op: OpId },
    /// Reading the chunk failed: punch what is there, all of it, then withdraw the intent.
    ChunkAbandon { op: OpId, chunk: ChunkIdx },
    /// Put pages from the operation's buffer into the RAM file and map them (`UFFDIO_COPY`), wake.
    Copy { op: OpId, pages: Pages, protect: bool },
    /// Put pages from the operation's buffer into the RAM file without mapping them.
    Store { op: OpId, pages: Pages },
    /// The operation's buffer is free.
    Release { op: OpId },
    /// Unmap chunks in the VMM. Which: [`super::Machine::zap_chunks`].
    Zap { op: OpId },
    /// Unmap single pages in the VMM, to see when they are used next. Which: [`super::Machine::watch_zaps`].
    ZapPages { ticket: u32 },
    /// Write these pages to swap, except the zero ones, whose blocks become holes. The guest may write them meanwhile.
    WriteOut { op: OpId, chunk: ChunkIdx, pages: PageSet },
    /// Declare the intent, take pages out of the RAM file, read back from swap what was only zeroed (until it succeeds: the
    /// VM's data is in swap alone), withdraw. `alone`: no other page of the chunk is in it, so the span may go in one call.
    PunchOut { op: OpId, chunk: ChunkIdx, pages: PageSet, alone: bool },
    /// Look for frames of the share group that equal these pages, which are in the RAM file and cannot change. For each one
    /// found: take a reference, write the page's entry; make the swap blocks of zero ones holes. Then declare the intent,
    /// take the pages out of the RAM file, give those that were only zeroed their content back, withdraw the intent, and
    /// only then clear the entries of these.
    Share { op: OpId, chunk: ChunkIdx, pages: PageSet },
    /// Write-protect all pages of a borrowed chunk, *then* move the clock of direct I/O on.
    Fence { op: OpId, chunk: ChunkIdx },
    /// Make a borrowed chunk the VM's own. It is protected and cannot change. The pages of it that differ from the template go
    /// into the RAM file; then the RAM file is mapped in the template's place, in one step and registered. Nobody else maps
    /// pages there, and no page of it is mapped when that is done.
    Own { op: OpId, chunk: ChunkIdx },
    /// Copy shared pages into the RAM file, map them writable, wake (`UFFDIO_COPY`); then clear their entries; then drop
    /// the references. While host memory is short it is tried again.
    CopyBack { pages: Pages },
    /// Clear the entries of shared pages, which become zero; then drop the references. Their swap blocks are holes by then.
    DropShared { pages: Pages },
    /// Make swap blocks holes.
    SwapPunch { pages: Pages },
    /// Take pages out of the RAM file whose content does not matter any more; they may also stay, unmapped and as zeros.
    RamPunch { pages: Pages },
    /// All of a discard is done.
    DiscardDone { token: u64 },
    /// Register the VM's memory, *then* look what is in the files and tell the machine ([`super::Machine::armed`]), before any
    /// fault: faults of an unarmed VM are dropped.
    Arm,
    /// Empty the swap file, unregister (which wakes all), tell the machine ([`super::Machine::disarmed`]) before any other
    /// event, collapse into huge pages.
    Disarm,
    /// The VM has to be stopped and its owner told.
    Stalled { stall: Stall },
}

/// The list the pager executes; reused, so that the page path does not allocate.
pub type Actions = Vec<Action>;
