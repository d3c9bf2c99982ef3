//! The image tier: pages of a VM that was made of an image (a snapshot). It reads them where they are, when they are needed.
//!
//! * A page counts while its bit is set ([`map`]). Bits are only ever cleared: by a page-out that brought the page to another
//!   tier, or when the page has become zero. The file has it before the call returns, and so before the page may leave DRAM.
//!   So a page that changed never comes back from the image, for this daemon or the next.
//! * An image does not change, and any number of VMs may read it at a time. It is not removed while one does; the daemon sees
//!   to that.
//! * [`readers`] read and compare each page with its checksum. What does not match, or cannot be read, stops the VM
//!   ([`IoError::Image`]); [`Tier::trouble`] says which page of which image. It is never taken for zeros.
//! * What a VM needs right after it was made is noted ([`record`]), and the next VM of the image gets that before it asks.
//! * The engine waits for the image's disk in [`Tier::read_now`] only, and there for [`READ_PATIENCE`] at most. A disk that does
//!   not answer keeps those who need a page of it waiting, and nobody else: not the VM's other pages, nor its end.

mod map;
mod queue;
mod readers;
mod record;
mod recorder;
mod replay;

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::IoError;
use pagoda_core::units::{ChunkCount, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_image::Image;
use pagoda_sys::Errno;

pub use map::ImageTierError;
pub use record::RECORD_FOR;

use self::queue::{Asker, Done, Failure, JOB_PAGES, Job};
use self::readers::Readers;
use self::record::Record;
use super::kept::Kept;
use super::page_map::PageMap;
use super::{Begun, Content, Counts, Ended, Io, Outcome, Read, Takes, Tier, Write};
use crate::space::Space;

/// How long the engine waits for a page that it cannot go on without: Linux's SCSI layer gives a command up after 30 s.
const READ_PATIENCE: Duration = Duration::from_secs(35);
/// A page that was asked for so long ago is waited for, and that is said.
const WAIT_REPORTED: Duration = Duration::from_secs(1);

/// A job whose pages are being handed over.
#[derive(Debug)]
struct Handover {
    done: Done,
    rest: PageSet,
    /// Pages that were handed over.
    count: usize,
}

/// The image tier of one VM.
pub struct ImageTier {
    /// The image, for messages.
    label: String,
    chunks: ChunkCount,
    map: PageMap,
    readers: Readers,
    /// Jobs that are done and not handed over.
    done: VecDeque<Done>,
    handover: Option<Handover>,
    kept: Kept,
    /// The page that could not be read last.
    failure: Option<Failure>,
    pages_in: u64,
    /// What the VM needs first, while that is noted.
    record: Option<Box<Record>>,
    /// What is to be prefetched, until the engine has it.
    prefetch: Vec<(ChunkIdx, PageSet)>,
}

impl std::fmt::Debug for ImageTier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let pages = self.map.count();
        f.debug_struct("ImageTier").field("image", &self.label).field("pages", &pages).finish_non_exhaustive()
    }
}

impl ImageTier {
    /// For a new VM, with as many chunks as the image. Makes the file `map`, whose name without its ending is the VM's; what was
    /// there is gone. Reads the image's whole map.
    ///
    /// # Errors
    /// The image lacks a page, or its map is damaged; the file or the threads cannot be made.
    pub fn create(image: Arc<Image>, map: &Path) -> Result<ImageTier, ImageTierError> {
        let pages = map::create(&image, map)?;
        ImageTier::new(image, map, pages)
    }

    /// For a VM that runs, after a restart of the daemon.
    ///
    /// # Errors
    /// The file is not there, or of another VM or image; the threads cannot be made.
    pub fn open(image: Arc<Image>, map: &Path) -> Result<ImageTier, ImageTierError> {
        let pages = map::open(&image, map)?;
        ImageTier::new(image, map, pages)
    }

    fn new(image: Arc<Image>, path: &Path, map: PageMap) -> Result<ImageTier, ImageTierError> {
        let vm = path.file_stem().unwrap_or_default().to_string_lossy();
        let manifest = image.manifest();
        let label = format!("{}/{} ({})", manifest.vm, manifest.name, manifest.id);
        let chunks = image.chunks();
        let readers = Readers::start(image, &vm).map_err(ImageTierError::Threads)?;
        Ok(ImageTier {
            label,
            chunks,
            map,
            readers,
            done: VecDeque::new(),
            handover: None,
            kept: Kept::new(),
            failure: None,
            pages_in: 0,
            record: None,
            prefetch: Vec::new(),
        })
    }

    /// A new VM gets what the one before needed first, and what it needs itself is noted for the next one. It waits for the
    /// disk.
    #[must_use]
    pub fn with_prefetch(mut self, image: Arc<Image>, vm: &str) -> ImageTier {
        let record = Record::begin(Arc::clone(&image), vm, &self.label);
        let place = |page| image.place_of(page).unwrap_or_default();
        self.prefetch = replay::order(record.known(), |chunk| self.map.of(chunk), place);
        self.record = Some(Box::new(record));
        self
    }

    /// Chunks of the image, and so of the VM.
    pub fn chunks(&self) -> ChunkCount {
        self.chunks
    }

    fn note_failure(&mut self, failure: Failure) {
        if self.failure.as_ref() != Some(&failure) {
            tracing::error!(image = %self.label, page = failure.page.0, "a page cannot be read: {}", failure.why);
            self.failure = Some(failure);
        }
    }

    /// The next job whose pages are to be handed over.
    fn next_handover(&mut self) -> Option<Handover> {
        let mut done = self.done.pop_front()?;
        if let Some(failure) = done.failure.take() {
            self.note_failure(failure);
        }
        Some(Handover { rest: done.job.pages, done, count: 0 })
    }
}

impl Tier for ImageTier {
    fn name(&self) -> &'static str {
        "image"
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.readers.fd())
    }

    fn holds(&self, chunk: ChunkIdx) -> PageSet {
        self.map.of(chunk)
    }

    fn takes(&self, _: bool) -> Takes {
        Takes::No
    }

    fn read(&mut self, _: &mut Io<'_>, read: &Read) -> Begun {
        let Read { op, chunk, pages, target, demand, .. } = *read;
        let (asker, asked) = (Asker::Op { op, target, demand }, Instant::now());
        let jobs = jobs_of(pages).map(|pages| Job { asker, chunk, pages, asked });
        if !self.readers.ask(usize::from(pages.count().div_ceil(JOB_PAGES)), jobs) {
            // The machine has fewer operations than there is room for.
            return Begun { error: Some(IoError::Failed(Errno::AGAIN.raw_os_error())), ..Begun::default() };
        }
        if demand && let Some(record) = &mut self.record {
            record.note(chunk, pages);
        }
        let parts = pages.count();
        Begun { parts, bytes: u64::from(parts) * PAGE_SIZE, ..Begun::default() }
    }

    fn write(&mut self, _: &mut Io<'_>, write: &Write) -> Begun {
        Begun { declined: write.pages, ..Begun::default() }
    }

    fn turn(&mut self) -> io::Result<()> {
        self.readers.take_done(&mut self.done);
        Ok(())
    }

    fn next_ended(&mut self, io: &mut Io<'_>) -> Option<Ended> {
        let mut handover = match self.handover.take() {
            Some(handover) => handover,
            None => self.next_handover()?,
        };
        let Job { asker, chunk, .. } = handover.done.job;
        let Asker::Op { op, target, .. } = asker else { unreachable!("its caller takes its answer") };
        let index = handover.rest.first_set().expect("a job that is over is not kept");
        let page = chunk.page(index);
        let outcome = if handover.done.failed.contains(index) {
            Outcome::Failed(IoError::Image)
        } else if io.deliver(target, page, handover.done.page(handover.count)) {
            self.pages_in += 1;
            Outcome::Read
        } else {
            Outcome::Undelivered
        };
        handover.rest.clear(index);
        handover.count += 1;
        if handover.rest.is_empty() {
            self.readers.give(handover.done.content);
        } else {
            self.handover = Some(handover);
        }
        Some(Ended { op, page, outcome })
    }

    /// It gains nothing, for it takes nothing.
    fn settle(&mut self, chunk: ChunkIdx, gained: PageSet, lost: PageSet) -> Result<(), Errno> {
        if gained.is_empty() { self.drop_pages(chunk, lost) } else { Err(Errno::INVAL) }
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        let pages = self.map.of(chunk) - pages;
        self.map.set(chunk, pages).map_err(errno_of)
    }

    fn clear(&mut self) -> Result<(), Errno> {
        self.chunks.iter().try_for_each(|chunk| self.map.set(chunk, PageSet::EMPTY)).map_err(errno_of)
    }

    /// The image's disk is not waited for while pages leave DRAM: those that a pin leaves behind get back what is copied here.
    fn keep(&mut self, space: &Space, chunk: ChunkIdx, pages: PageSet) {
        self.kept.keep(space, chunk, pages);
    }

    fn read_back(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.kept.read_back(page, out)
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.readers.read_now(page, out, READ_PATIENCE).map_err(|why| {
            self.note_failure(Failure { page, why });
            Errno::IO
        })
    }

    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        let all = (0..).map(ChunkIdx).zip(self.map.chunks());
        all.filter(|(_, pages)| !pages.is_empty()).for_each(|(chunk, pages)| found(chunk, *pages));
        Ok(())
    }

    fn counts(&self) -> Counts {
        let record_bytes = self.record.as_ref().map_or(0, |record| record.memory_bytes());
        let memory_bytes = self.readers.memory_bytes() + record_bytes;
        Counts { pages: self.map.count(), memory_bytes, pages_in: self.pages_in, ..Counts::default() }
    }

    fn take_prefetch(&mut self) -> Vec<(ChunkIdx, PageSet)> {
        std::mem::take(&mut self.prefetch)
    }

    fn note_hit(&mut self, chunk: ChunkIdx) {
        if let Some(record) = &mut self.record {
            record.note(chunk, self.map.of(chunk));
        }
    }

    fn note_let_run(&mut self) {
        if let Some(record) = &mut self.record {
            record.note_let_run();
        }
    }

    fn maintain(&mut self, _: &mut dyn Iterator<Item = ChunkIdx>) {
        if let Some(record) = self.record.take_if(|record| record.is_over()) {
            record.end();
        }
    }

    fn end(&mut self) {
        if let Some(record) = self.record.take() {
            record.end();
        }
    }

    fn waits(&mut self) -> Option<String> {
        let (pages, since) = self.readers.late(WAIT_REPORTED)?;
        Some(format!(
            "{pages} pages of the snapshot {} for {} s: its disk does not answer",
            self.label,
            since.as_secs()
        ))
    }

    fn trouble(&self) -> Option<String> {
        let Failure { page, why } = self.failure.as_ref()?;
        Some(format!("page {page} cannot be read from the snapshot {}: {why}", self.label))
    }
}

/// The parts of a set that are read together.
fn jobs_of(pages: PageSet) -> impl Iterator<Item = PageSet> {
    let mut rest = pages;
    std::iter::from_fn(move || {
        let job: PageSet = rest.iter().take(usize::from(JOB_PAGES)).collect();
        rest -= job;
        (!job.is_empty()).then_some(job)
    })
}

fn errno_of(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}
