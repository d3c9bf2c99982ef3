//! The source tier: pages of a VM that moved here and runs before all of them have come. The host that it moved from has them.
//!
//! * It takes no pages. It holds what the VM lacked when it began to run here, and only ever loses pages: by a page-out that brought
//!   them to another tier, or when they become zero. The file has it before the call returns, as with the image tier.
//! * What has come is in a file ([`Arrivals`]), and is read by the ring like the swap file. What has not come is *missing*: a read of
//!   it waits until the page comes, and the source is asked for it. The engine's thread never waits for the network, except in
//!   [`Tier::read_now`]: for a page that a killed daemon left half brought in, where the kernel could not take it out again. If such
//!   a page does not come in time the engine does not start, and its VM waits as before.
//! * A missing page is never taken for zeros, nor for lost. If its source is away, the threads that need it wait.
//! * Other pages than those that the VM waits for come unasked; as far as there is room they come into DRAM.

mod arrivals;
mod files;
mod state;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{IoError, OpId, Pages};
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::{FileId, Ring, RingError};

pub use arrivals::Arrivals;
pub use files::{ArrivalFiles, ArrivalsError};

use self::state::Delivery;
use super::kept::Kept;
use super::swap::{memory_of, requests};
use super::{Begun, Content, Counts, Ended, Io, Outcome, Read, Takes, Target, Tier, Write};
use crate::source::Source;
use crate::space::Space;

/// How long a new daemon waits for a page that it needs before it can serve the VM: many times what a link needs that works.
const READ_PATIENCE: Duration = Duration::from_secs(10);
/// A page that was asked for so long ago is waited for, and that is said.
const WAIT_REPORTED: Duration = Duration::from_secs(1);

/// A read of a page that has not come.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    target: Target,
    since: Instant,
}

/// The source tier of one VM.
#[derive(Debug)]
pub struct SourceTier {
    arrivals: Arc<Arrivals>,
    /// The file's number in the ring.
    id: Option<FileId>,
    /// Reads that wait, by page and operation.
    waiting: BTreeMap<(PageIdx, u16), Waiting>,
    /// What has come for them.
    deliveries: VecDeque<Delivery>,
    /// Reads whose page is held no more.
    cancelled: VecDeque<(PageIdx, OpId)>,
    came: VecDeque<(ChunkIdx, PageSet)>,
    kept: Kept,
    pages_in: u64,
}

impl SourceTier {
    /// The tier of a new engine. The one before has ended.
    pub fn new(arrivals: Arc<Arrivals>) -> SourceTier {
        arrivals.forget_engine();
        SourceTier {
            arrivals,
            id: None,
            waiting: BTreeMap::new(),
            deliveries: VecDeque::new(),
            cancelled: VecDeque::new(),
            came: VecDeque::new(),
            kept: Kept::new(),
            pages_in: 0,
        }
    }

    /// Reads what is here by the ring.
    fn read_file(&self, io: &mut Io<'_>, read: &Read, pages: PageSet, begun: &mut Begun) {
        let key = Source::Io { tier: io.tier, op: read.op }.key();
        for run in pages.runs() {
            let start = Pages { chunk: read.chunk, run }.first().offset().0;
            for (at, len) in requests(run) {
                let into = memory_of(io, read.target, start + at, len);
                match self.id.map(|file| io.ring.read(file, start + at, into, key)) {
                    Some(Ok(())) => {
                        begun.parts += 1;
                        begun.bytes += len;
                    }
                    // The operation fails and the machine tries again.
                    Some(Err(_)) | None => begun.error = Some(IoError::Failed(Errno::AGAIN.raw_os_error())),
                }
            }
        }
    }

    /// A read that waits for this page.
    fn take_waiting(&mut self, page: PageIdx) -> Option<(OpId, Waiting)> {
        let (&(page, op), _) = self.waiting.range((page, 0)..=(page, u16::MAX)).next()?;
        self.waiting.remove(&(page, op)).map(|waiting| (OpId(op), waiting))
    }

    /// Reads of pages that the tier holds no more end without them. Whoever has them read knows that they count no more.
    fn cancel(&mut self, chunk: ChunkIdx, pages: PageSet) {
        for page in pages.iter().map(|index| chunk.page(index)) {
            while let Some((op, _)) = self.take_waiting(page) {
                self.cancelled.push_back((page, op));
            }
        }
    }
}

impl Tier for SourceTier {
    fn name(&self) -> &'static str {
        "source"
    }

    fn attach(&mut self, ring: &mut Ring) -> Result<(), RingError> {
        self.id = Some(ring.add_file(self.arrivals.content().as_fd())?);
        Ok(())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.arrivals.fd())
    }

    fn holds(&self, chunk: ChunkIdx) -> PageSet {
        self.arrivals.holds(chunk)
    }

    fn takes(&self, _: bool) -> Takes {
        Takes::No
    }

    fn read(&mut self, io: &mut Io<'_>, read: &Read) -> Begun {
        let mut begun = Begun::default();
        let missing = self.arrivals.want(read.chunk, read.pages);
        let (target, since) = (read.target, Instant::now());
        for index in missing.iter() {
            self.waiting.insert((read.chunk.page(index), read.op.0), Waiting { target, since });
        }
        begun.parts = missing.count();
        begun.bytes = u64::from(begun.parts) * PAGE_SIZE;
        let here = read.pages - missing;
        self.pages_in += u64::from(here.count());
        self.read_file(io, read, here, &mut begun);
        begun
    }

    fn write(&mut self, _: &mut Io<'_>, write: &Write) -> Begun {
        Begun { declined: write.pages, ..Begun::default() }
    }

    fn turn(&mut self) -> io::Result<()> {
        self.came.append(&mut self.arrivals.take_in(&mut self.deliveries));
        Ok(())
    }

    fn next_ended(&mut self, io: &mut Io<'_>) -> Option<Ended> {
        if let Some((page, op)) = self.cancelled.pop_front() {
            let error = IoError::Failed(Errno::CANCELED.raw_os_error());
            return Some(Ended { op, page, outcome: Outcome::Failed(error) });
        }
        loop {
            let page = self.deliveries.front()?.page;
            // More than one operation may read it.
            let Some((op, Waiting { target, .. })) = self.take_waiting(page) else {
                self.deliveries.pop_front();
                continue;
            };
            let delivered = io.deliver(target, page, &self.deliveries.front()?.content[..]);
            self.pages_in += 1;
            return Some(Ended { op, page, outcome: if delivered { Outcome::Read } else { Outcome::Undelivered } });
        }
    }

    /// It gains nothing, for it takes nothing.
    fn settle(&mut self, chunk: ChunkIdx, gained: PageSet, lost: PageSet) -> Result<(), Errno> {
        if gained.is_empty() { self.drop_pages(chunk, lost) } else { Err(Errno::INVAL) }
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        self.arrivals.drop_pages(chunk, pages).map_err(errno_of)?;
        self.cancel(chunk, pages);
        Ok(())
    }

    fn clear(&mut self) -> Result<(), Errno> {
        self.arrivals.clear().map_err(errno_of)?;
        let waiting: Vec<PageIdx> = self.waiting.keys().map(|(page, _)| *page).collect();
        waiting.iter().for_each(|page| self.cancel(page.chunk(), PageSet::single(page.index_in_chunk())));
        Ok(())
    }

    /// A page may be missing, although DRAM had it: what was handed over is not here for good before it is written. So those that a
    /// pin leaves behind get back what is copied here.
    fn keep(&mut self, space: &Space, chunk: ChunkIdx, pages: PageSet) {
        self.kept.keep(space, chunk, pages);
    }

    fn read_back(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.kept.read_back(page, out)
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.arrivals.read_now(page, out, READ_PATIENCE).inspect_err(|errno| {
            tracing::error!(page = page.0, "a page that is still at the VM's source does not come: {errno}");
        })
    }

    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        self.arrivals.each_held(found);
        Ok(())
    }

    fn missing(&self, chunk: ChunkIdx) -> PageSet {
        self.arrivals.missing_of(chunk)
    }

    fn expect(&mut self, missing: &[PageSet]) -> Result<bool, Errno> {
        self.arrivals.begin(missing).map_err(errno_of)?;
        Ok(true)
    }

    fn take_came(&mut self) -> Option<(ChunkIdx, PageSet)> {
        self.came.pop_front()
    }

    fn maintain(&mut self, _: &mut dyn Iterator<Item = ChunkIdx>) {
        self.arrivals.clean();
    }

    fn counts(&self) -> Counts {
        let disk_bytes = self.arrivals.content().allocated().unwrap_or(0);
        let memory_bytes = self.arrivals.memory_bytes() + self.deliveries.len() as u64 * PAGE_SIZE;
        let (pages, pages_in) = (self.arrivals.held_count(), self.pages_in);
        Counts { pages, memory_bytes, disk_bytes, pages_in, ..Counts::default() }
    }

    fn waits(&mut self) -> Option<String> {
        let now = Instant::now();
        let late = self.waiting.values().map(|waiting| now - waiting.since).filter(|waited| *waited >= WAIT_REPORTED);
        let (count, longest) = late.fold((0, Duration::ZERO), |(count, most), waited| (count + 1, most.max(waited)));
        (count > 0).then(|| format!("{count} pages of the move's source for {} s", longest.as_secs()))
    }
}

fn errno_of(error: io::Error) -> Errno {
    // What cannot begin is no error of the kernel's.
    Errno::from_io_error(&error).unwrap_or(Errno::INVAL)
}
