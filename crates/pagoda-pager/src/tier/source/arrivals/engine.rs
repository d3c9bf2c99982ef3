//! What the tier needs of [`Arrivals`], on the engine's thread: nothing here waits for a thread that brings pages, except for
//! [`Arrivals::read_now`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::swapfile::SwapFile;

use super::{Arrivals, invalid};
use crate::tier::Content;
use crate::tier::page_map::PageMap;
use crate::tier::source::state::Delivery;

impl Arrivals {
    fn held(&self) -> MutexGuard<'_, PageMap> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of content, for a ring.
    pub(in crate::tier::source) fn content(&self) -> &SwapFile {
        &self.content
    }

    /// Becomes readable when something has come.
    pub(in crate::tier::source) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Another engine begins: nothing of the one before is waited for.
    pub(in crate::tier::source) fn forget_engine(&self) {
        self.state().forget_engine();
    }

    /// The VM begins, and lacks these pages.
    ///
    /// # Errors
    /// `InvalidInput`: it has begun before, or has another number of chunks. Any other: it cannot be noted.
    pub(in crate::tier::source) fn begin(&self, missing: &[PageSet]) -> io::Result<()> {
        let has_come = self.here.lock().unwrap_or_else(PoisonError::into_inner).count() > 0;
        let is_removed = self.is_removed.load(Ordering::Acquire);
        if is_removed && missing.iter().all(PageSet::is_empty) {
            return Ok(());
        }
        if has_come || is_removed || missing.len() != self.writing.len() {
            return Err(invalid("a VM that has begun cannot begin again".to_owned()));
        }
        // The map is written before any page may come.
        self.held().set_all(missing.to_vec())?;
        self.state().begin(missing.to_vec());
        self.has_begun.store(true, Ordering::Release);
        self.notify();
        Ok(())
    }

    pub(in crate::tier::source) fn holds(&self, chunk: ChunkIdx) -> PageSet {
        self.held().of(chunk)
    }

    pub(in crate::tier::source) fn held_count(&self) -> u64 {
        self.held().count()
    }

    /// Every chunk of which it has something.
    pub(in crate::tier::source) fn each_held(&self, found: &mut dyn FnMut(ChunkIdx, PageSet)) {
        let held = self.held();
        let all = (0..).map(ChunkIdx).zip(held.chunks());
        all.filter(|(_, pages)| !pages.is_empty()).for_each(|(chunk, pages)| found(chunk, *pages));
    }

    pub(in crate::tier::source) fn missing_of(&self, chunk: ChunkIdx) -> PageSet {
        self.state().missing_of(chunk)
    }

    /// A read wants these pages. Returns those that are missing: each of them comes by [`Arrivals::take_deliveries`].
    pub(in crate::tier::source) fn want(&self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let (missing, has_demands) = {
            let mut state = self.state();
            (state.want(chunk, pages), state.has_demands())
        };
        if has_demands && !missing.is_empty() {
            self.notify();
        }
        missing
    }

    /// Takes in what reads wait for, and which pages have come.
    pub(in crate::tier::source) fn take_in(
        &self,
        deliveries: &mut VecDeque<Delivery>,
    ) -> VecDeque<(ChunkIdx, PageSet)> {
        // First: what comes after the look makes it readable again.
        self.wake.clear();
        let mut state = self.state();
        state.take_deliveries(deliveries);
        state.take_came()
    }

    /// The tier does not have these pages any more. Nothing is changed if that cannot be noted.
    ///
    /// # Errors
    /// Of the map's file.
    pub(in crate::tier::source) fn drop_pages(&self, chunk: ChunkIdx, pages: PageSet) -> io::Result<()> {
        {
            let mut held = self.held();
            let left = held.of(chunk) - pages;
            held.set(chunk, left)?;
        }
        let has_dropped = self.state().drop_pages(chunk, pages);
        if has_dropped {
            self.came.notify_all();
            self.notify();
        }
        Ok(())
    }

    /// The tier has no pages any more.
    ///
    /// # Errors
    /// Of the map's file.
    pub(in crate::tier::source) fn clear(&self) -> io::Result<()> {
        let before: Vec<PageSet> = self.held().chunks().to_vec();
        if before.iter().all(PageSet::is_empty) {
            return Ok(());
        }
        self.held().set_all(vec![PageSet::EMPTY; before.len()])?;
        let has_dropped = {
            let mut state = self.state();
            for (chunk, pages) in (0..).map(ChunkIdx).zip(before) {
                state.drop_pages(chunk, pages);
            }
            state.has_dropped()
        };
        if has_dropped {
            self.notify();
        }
        Ok(())
    }

    /// Reads a page, and waits for it if it is missing: `patience` at most.
    ///
    /// # Errors
    /// It does not come in time, and is asked for as before; or of the disk.
    pub(in crate::tier::source) fn read_now(
        &self,
        page: PageIdx,
        out: &mut Content,
        patience: Duration,
    ) -> Result<(), Errno> {
        let (chunk, single) = (page.chunk(), PageSet::single(page.index_in_chunk()));
        let deadline = Instant::now() + patience;
        while !self.want(chunk, single).is_empty() {
            let state = self.state();
            if state.missing_of(chunk).intersects(single) {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Errno::TIMEDOUT);
                }
                drop(self.came.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner));
            }
        }
        out.copy_from_slice(self.content.read_page(page.0)?.bytes());
        Ok(())
    }

    /// Bytes of this machine's memory that it takes.
    pub(in crate::tier::source) fn memory_bytes(&self) -> u64 {
        self.state().delivery_bytes() + self.buffers().len() as u64 * CHUNK_SIZE
    }

    /// Now and then: gives space back, and removes the files when the tier has nothing any more. A thread makes the holes, for that waits
    /// for the disk, and for writes under way. It removes nothing by name: the VM may have ended by then, and another one have that name.
    pub(in crate::tier::source) fn clean(self: &Arc<Self>) {
        if self.is_removed.load(Ordering::Acquire) || self.is_cleaning.swap(true, Ordering::AcqRel) {
            return;
        }
        let is_over = self.has_begun.load(Ordering::Acquire) && self.held_count() == 0;
        let unused = self.state().take_unused();
        if is_over {
            // As long as its engine runs, what has the VM's name is the VM's. They are open, so no space is given back here.
            self.is_removed.store(true, Ordering::Release);
            if let Err(error) = self.files.remove() {
                // They are empty, and go with the VM.
                tracing::warn!("remove files of pages that came from another host: {error}");
            }
        } else if unused.is_empty() {
            self.is_cleaning.store(false, Ordering::Release);
            return;
        }
        let own = Arc::clone(self);
        let make_holes = move || {
            if is_over {
                own.punch_all();
            } else {
                unused.iter().for_each(|(chunk, pages)| own.punch(*chunk, *pages));
            }
            own.is_cleaning.store(false, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("arrival".into()).spawn(make_holes) {
            // What is not given back now goes with the VM.
            tracing::debug!("start a thread that gives space back: {error}");
            self.is_cleaning.store(false, Ordering::Release);
        }
    }

    fn punch_all(&self) {
        if let Err(errno) = self.content.punch(0, self.content.len()) {
            tracing::debug!("give the space of pages that came from another host back: {errno}");
        }
    }
}
