//! The pages of a VM that runs here before all of them are here: shared by its tier, and by the threads that bring pages.
//!
//! * A page comes once. Its content is written to its place in the file, then its bit in the map of what is *here*, and from then
//!   on it stays here over a daemon's death. A second copy is dropped: the guest may have written the page since.
//! * Who waits for a page gets its content before it is written. Until it is, the page is missing as before: the source keeps it,
//!   and whatever happens to what was handed over, it can be asked for again.
//! * The engine's thread never waits for a thread that brings pages: those hold a chunk's lock while they write, and what the
//!   engine needs is behind a lock of its own, under which no I/O happens. What it changes itself is the map of pages that the tier
//!   *holds*, which nobody else writes.
//! * It outlives engines: one that ends leaves it to the next one of this daemon, and its files to the next daemon.

mod engine;

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::Pages;
use pagoda_core::units::{CHUNK_SIZE, ChunkCount, ChunkIdx, PAGE_SIZE, PageCount};
use pagoda_sys::Errno;
use pagoda_sys::process::Wake;
use pagoda_sys::swapfile::{DirectBuffer, SwapFile};

use super::files::{ArrivalFiles, ArrivalsError, Opened};
use super::state::State;
use crate::tier::Content;
use crate::tier::page_map::PageMap;
use crate::tier::swap::each_chunk;

const PAGE: usize = PAGE_SIZE as usize;

type Listener = Box<dyn Fn() + Send + Sync>;

/// The pages that a VM still has to get from its source, and those that came.
pub struct Arrivals {
    files: ArrivalFiles,
    content: SwapFile,
    /// Whoever writes pages of a chunk has its lock, so a page is written by one thread at a time.
    writing: Vec<Mutex<()>>,
    /// Written by threads that bring pages, each with its chunk's lock.
    here: Mutex<PageMap>,
    /// Pages that the tier holds, which the engine alone changes.
    held: Mutex<PageMap>,
    state: Mutex<State>,
    /// Pages have come: for [`Arrivals::read_now`].
    came: Condvar,
    /// Something has come that the engine is to take in.
    wake: Wake,
    listener: Mutex<Option<Listener>>,
    /// Of those that write to the file, when they do not.
    buffers: Mutex<Vec<DirectBuffer>>,
    /// It has had pages, or an earlier daemon has made it.
    has_begun: AtomicBool,
    /// A thread makes holes of what is of no use any more.
    is_cleaning: AtomicBool,
    is_removed: AtomicBool,
}

impl std::fmt::Debug for Arrivals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let missing = self.missing_count();
        f.debug_struct("Arrivals").field("files", &self.files).field("missing", &missing).finish_non_exhaustive()
    }
}

/// What threads need that bring pages.
impl Arrivals {
    /// For a VM that is made now. It has no pages until it begins.
    ///
    /// # Errors
    /// The files cannot be made, or not where they are to be.
    pub fn create(files: ArrivalFiles, chunks: ChunkCount) -> Result<Arc<Arrivals>, ArrivalsError> {
        let opened = files.create(chunks)?;
        Arrivals::new(files, opened, false).map(Arc::new)
    }

    /// For a VM that an earlier daemon has served: [`ArrivalFiles::exist`].
    ///
    /// # Errors
    /// The files are not there or of another VM.
    pub fn open(files: ArrivalFiles, chunks: ChunkCount) -> Result<Arc<Arrivals>, ArrivalsError> {
        let opened = files.open(chunks)?;
        make_holes_of_leftovers(&opened)
            .map_err(|source| ArrivalsError::Leftovers { path: files.content.clone(), source })?;
        Arrivals::new(files, opened, true).map(Arc::new)
    }

    fn new(files: ArrivalFiles, opened: Opened, has_begun: bool) -> Result<Arrivals, ArrivalsError> {
        let Opened { content, here, held } = opened;
        let missing: Vec<PageSet> = held.chunks().iter().zip(here.chunks()).map(|(held, here)| *held - *here).collect();
        Ok(Arrivals {
            files,
            content,
            writing: missing.iter().map(|_| Mutex::default()).collect(),
            here: Mutex::new(here),
            held: Mutex::new(held),
            state: Mutex::new(State::new(missing)),
            came: Condvar::new(),
            wake: Wake::new().map_err(ArrivalsError::Wake)?,
            listener: Mutex::default(),
            buffers: Mutex::default(),
            has_begun: AtomicBool::new(has_begun),
            is_cleaning: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
        })
    }

    /// Pages have come, 4096 bytes each. Returns those that are here for good now and were missing before.
    ///
    /// # Errors
    /// `InvalidInput`: they are not this VM's, or the content is of another length. Any other: of the disk. Then none of them is
    /// here, and they have to come again.
    pub fn put(&self, pages: Pages, content: &[u8]) -> io::Result<PageSet> {
        let set = self.check(pages)?;
        if content.len() != usize::from(pages.run.len) * PAGE {
            return Err(invalid(format!("{} bytes for {} pages", content.len(), pages.run.len)));
        }
        let bytes_of =
            |run: Run| &content[usize::from(run.start - pages.run.start) * PAGE..][..usize::from(run.len) * PAGE];
        let page_of = |index| -> Box<Content> {
            let mut page = Box::new([0; PAGE]);
            page.copy_from_slice(bytes_of(Run { start: index, len: 1 }));
            page
        };
        self.store(pages.chunk, set, page_of, |new| {
            let is_zero = |index: &u8| is_zero(bytes_of(Run { start: *index, len: 1 }));
            let zeros: PageSet = new.iter().filter(is_zero).collect();
            let written = (new - zeros).runs().try_for_each(|run| {
                let pages = Pages { chunk: pages.chunk, run };
                self.write(pages, bytes_of(run))
            });
            // What was written of it must not be read as zeros' content: of a page that has not come there is nothing.
            written.inspect_err(|_| self.punch(pages.chunk, new - zeros))
        })
    }

    /// The same of pages of zeros.
    ///
    /// # Errors
    /// As [`Arrivals::put`].
    pub fn put_zeros(&self, pages: Pages) -> io::Result<PageSet> {
        let set = self.check(pages)?;
        // Nothing was written there, so the file has a hole.
        self.store(pages.chunk, set, |_| Box::new([0; PAGE]), |_| Ok(()))
    }

    /// What the source is to be asked for, in the order in which threads began to wait for it. Each page is asked for once, until
    /// [`Arrivals::forget_demands`].
    pub fn take_demands(&self) -> Vec<Pages> {
        self.state().take_demands()
    }

    /// The link was lost, and with it what was asked for: what is still waited for is to be asked for again.
    pub fn forget_demands(&self) {
        self.state().forget_demands();
    }

    /// Pages that the VM needs no more although they have not come. Each is given once.
    pub fn take_dropped(&self) -> Vec<Pages> {
        self.state().take_dropped()
    }

    /// What has still to come: by chunk, in order, and no set is empty. Nothing before the VM has begun.
    pub fn missing(&self) -> Vec<(ChunkIdx, PageSet)> {
        self.state().missing()
    }

    /// How many pages have still to come.
    pub fn missing_count(&self) -> PageCount {
        PageCount(self.state().count())
    }

    /// Nothing has still to come. Of a VM that has not begun this is true as well.
    pub fn is_whole(&self) -> bool {
        self.missing_count() == PageCount(0)
    }

    /// Who hears when there is something to ask the source for, when pages were dropped, and when nothing is missing any more. It is
    /// called at once, and then by threads that must not wait; it must not call [`Arrivals::set_listener`].
    pub fn set_listener(&self, listener: Option<Listener>) {
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = listener;
        self.notify();
    }

    fn check(&self, pages: Pages) -> io::Result<PageSet> {
        let Pages { chunk, run: Run { start, len } } = pages;
        let chunks = self.writing.len();
        if chunk.as_usize() >= chunks || len == 0 || u32::from(start) + u32::from(len) > 256 {
            return Err(invalid(format!("{len} pages from page {start} of chunk {} of {chunks}", chunk.0)));
        }
        Ok(PageSet::range(start, len))
    }

    /// `page_of` gives the content of a page, `write` brings pages to their places in the file.
    fn store(
        &self,
        chunk: ChunkIdx,
        pages: PageSet,
        page_of: impl Fn(u8) -> Box<Content>,
        write: impl FnOnce(PageSet) -> io::Result<()>,
    ) -> io::Result<PageSet> {
        let _writing = self.writing[chunk.as_usize()].lock().unwrap_or_else(PoisonError::into_inner);
        let new = {
            let mut state = self.state();
            let new = pages & state.missing_of(chunk);
            if state.deliver(chunk, new, &page_of) {
                self.wake.wake();
            }
            new
        };
        if new.is_empty() {
            return Ok(new);
        }
        write(new)?;
        {
            let mut here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
            let all = here.of(chunk) | new;
            here.set(chunk, all)?;
        }
        let (came, is_whole) = {
            let mut state = self.state();
            // Reads that have begun to wait since get the pages, too.
            state.deliver(chunk, new, &page_of);
            (state.came(chunk, new), state.count() == 0)
        };
        self.came.notify_all();
        self.wake.wake();
        if is_whole {
            self.buffers().clear();
            self.notify();
        }
        Ok(came)
    }

    fn write(&self, pages: Pages, content: &[u8]) -> io::Result<()> {
        let mut buffer = self.buffers().pop().unwrap_or_else(|| DirectBuffer::new(CHUNK_SIZE as usize));
        buffer[..content.len()].copy_from_slice(content);
        let written = self.content.write_pages(pages.first().0, &buffer[..content.len()]);
        self.buffers().push(buffer);
        written.map_err(Into::into)
    }

    /// Gives space back. What fails costs space and nothing else.
    fn punch(&self, chunk: ChunkIdx, pages: PageSet) {
        for run in pages.runs() {
            let at = Pages { chunk, run }.first().offset().0;
            if let Err(errno) = self.content.punch(at, u64::from(run.len) * PAGE_SIZE) {
                tracing::debug!(path = %self.content.path().display(), "make a hole: {errno}");
            }
        }
    }

    fn notify(&self) {
        if let Some(listener) = &*self.listener.lock().unwrap_or_else(PoisonError::into_inner) {
            listener();
        }
    }

    /// No I/O happens, and nothing of the caller's runs, while this is held.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<DirectBuffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A daemon that was killed may have left content of pages that are not here, or that the tier does not have any more. What is not
/// here has to be a hole.
fn make_holes_of_leftovers(opened: &Opened) -> Result<(), Errno> {
    let Opened { content, here, held } = opened;
    let mut data = vec![PageSet::EMPTY; held.chunks().len()];
    content.data_extents(&mut |offset, len| {
        let end = content.len();
        let offset = offset.min(end);
        each_chunk(offset, len.min(end - offset), &mut |chunk, pages| data[chunk.as_usize()] |= pages);
    })?;
    for (chunk, data) in (0..).map(ChunkIdx).zip(data) {
        for run in (data - (held.of(chunk) & here.of(chunk))).runs() {
            content.punch(Pages { chunk, run }.first().offset().0, u64::from(run.len) * PAGE_SIZE)?;
        }
    }
    Ok(())
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn is_zero(page: &[u8]) -> bool {
    page.chunks(64).all(|line| line.iter().fold(0, |any, byte| any | byte) == 0)
}
