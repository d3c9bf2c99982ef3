//! Pages of a VM that comes from another host, on their way to their places, before an engine serves it.
//!
//! Threads store pages here as streams bring them. A chunk always comes by the same stream, so its lock is hardly ever waited for;
//! no other lock is held over I/O. A page that comes again stays where it is; a new one goes to DRAM while there is room for it, and
//! else to swap. A page of zeros is a hole in both files. [`Arriving::finish`] says where each page is, for
//! [`crate::handle::Command::Arrived`].
//!
//! The VM's QEMU has the RAM files mapped, and may touch pages while its guest does not run yet. A page that it makes in a hole means
//! nothing: the map here says where the content of every page is, and `finish` makes holes there again.
//!
//! If anything fails, the VM does not come: nothing is stored from then on, and `finish` refuses. Its guest still runs at the
//! other host.

mod error;
mod region;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{Located, Pages};
use pagoda_core::units::{CHUNK_SIZE, ChunkIdx, PAGE_SIZE, PageCount};
use pagoda_sys::ram::RamFile;
use pagoda_sys::swapfile::{DirectBuffer, SwapFile};

pub use self::error::ArriveError;
use self::error::of_swap;
use self::region::Region;

/// Where the pages of a chunk are. No page is in both.
#[derive(Debug, Clone, Copy, Default)]
struct Places {
    ram: PageSet,
    swap: PageSet,
}

/// Stores a VM's pages as they come from another host, and knows where each is.
#[derive(Debug)]
pub struct Arriving {
    regions: Vec<Region>,
    swap: SwapFile,
    chunks: Vec<Mutex<Places>>,
    dram_max: u64,
    /// Pages that are in DRAM or may be put there by who reserved room for them.
    dram: AtomicU64,
    swapped: AtomicU64,
    /// Changed and looked at under the lock of a chunk, as is the next one.
    failed: AtomicBool,
    finished: AtomicBool,
    /// Of those that write to swap, when they do not.
    buffers: Mutex<Vec<DirectBuffer>>,
}

impl Arriving {
    /// At most `dram` pages go to the RAM files. `ram` are duplicates of what QEMU gets, in the order of the VM's regions;
    /// `swap` is one of the VM's swap file, in which nothing is yet. It stays locked while any duplicate of it is open.
    ///
    /// # Errors
    /// [`ArriveError::Files`]: their lengths do not fit together, or something is in swap.
    pub fn new(ram: Vec<RamFile>, swap: SwapFile, dram: PageCount) -> Result<Arriving, ArriveError> {
        let wrong = |what: String| Err(ArriveError::Files { what });
        let (mut regions, mut chunks) = (Vec::with_capacity(ram.len()), 0);
        for ram in ram {
            let len = ram.len();
            if len == 0 || !len.is_multiple_of(CHUNK_SIZE) {
                return wrong(format!("a RAM file of {len} bytes"));
            }
            regions.push(Region { number: regions.len(), first: chunks as usize, ram });
            chunks += len / CHUNK_SIZE;
        }
        if chunks * CHUNK_SIZE != swap.len() {
            return wrong(format!("{chunks} MiB of RAM and a swap file of {} bytes", swap.len()));
        }
        let mut in_swap = 0;
        swap.data_extents(&mut |_, len| in_swap += len).map_err(|source| of_swap(&swap, "look into", source))?;
        if in_swap > 0 {
            return wrong(format!("{} has {in_swap} bytes already", swap.path().display()));
        }
        Ok(Arriving {
            regions,
            swap,
            chunks: (0..chunks).map(|_| Mutex::default()).collect(),
            dram_max: dram.0,
            dram: AtomicU64::new(0),
            swapped: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            buffers: Mutex::default(),
        })
    }

    /// Stores pages, 4096 bytes each.
    ///
    /// # Errors
    /// See [`ArriveError`]. From the first error of a file on every call fails.
    pub fn store(&self, pages: Pages, content: &[u8]) -> Result<(), ArriveError> {
        let whole = self.whole(pages)?;
        if content.len() as u64 != u64::from(pages.run.len) * PAGE_SIZE {
            return Err(ArriveError::Length { bytes: content.len(), pages: pages.run.len });
        }
        let each = (pages.run.start..=u8::MAX).zip(content.chunks_exact(PAGE_SIZE as usize));
        let zeros = each.filter(|(_, page)| is_zero(page)).map(|(index, _)| index).collect();
        self.change(pages.chunk, |places| self.put(places, pages, whole - zeros, zeros, content))
    }

    /// These pages are zeros.
    ///
    /// # Errors
    /// As [`Arriving::store`].
    pub fn zero(&self, pages: Pages) -> Result<(), ArriveError> {
        let whole = self.whole(pages)?;
        self.change(pages.chunk, |places| self.clear(places, pages.chunk, whole))
    }

    /// How many pages are in DRAM, and how many in swap.
    pub fn counts(&self) -> (PageCount, PageCount) {
        let now = |count: &AtomicU64| PageCount(count.load(Ordering::Relaxed));
        (now(&self.dram), now(&self.swapped))
    }

    /// Nothing comes any more. Where each page is: no page is in both files, and what is in neither is zeros. No other page of the RAM
    /// files exists when this returns.
    ///
    /// # Errors
    /// A page could not be stored before; or see [`ArriveError::Io`] and [`ArriveError::Changed`].
    pub fn finish(&self) -> Result<Vec<Located>, ArriveError> {
        self.finish_without(&[])
    }

    /// The same of a VM that lacks some pages, by chunk, each of them once. What has come of them is outdated, and is in no file when
    /// this returns.
    ///
    /// # Errors
    /// As [`Arriving::finish`]; or the VM has no such chunk.
    pub fn finish_without(&self, missing: &[(ChunkIdx, PageSet)]) -> Result<Vec<Located>, ArriveError> {
        // Whoever locks a chunk after this has locked it sees that.
        self.finished.store(true, Ordering::SeqCst);
        let place = |chunk: &Mutex<Places>| {
            let Places { ram, swap } = *chunk.lock().map_err(|_| ArriveError::Failed)?;
            assert!(!ram.intersects(swap), "a page is in one file");
            Ok(Located { ram, swap, ..Located::default() })
        };
        let mut found = self.chunks.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        self.leave_out(missing, &mut found)?;
        if self.failed.load(Ordering::SeqCst) {
            return Err(ArriveError::Failed);
        }
        for region in &self.regions {
            region.leave_only(&found[region.chunks()])?;
        }
        Ok(found)
    }

    /// Drops what is outdated, except for pages in the RAM files.
    fn leave_out(&self, missing: &[(ChunkIdx, PageSet)], found: &mut [Located]) -> Result<(), ArriveError> {
        let chunks = found.len();
        for (chunk, pages) in missing {
            let located = found.get_mut(chunk.as_usize());
            let located =
                located.ok_or(ArriveError::Outside { chunk: chunk.0, start: 0, len: pages.count(), chunks })?;
            located.ram -= *pages;
            self.punch_swap(*chunk, located.swap & *pages)?;
            located.swap -= *pages;
            located.missing |= *pages;
        }
        Ok(())
    }

    fn punch_swap(&self, chunk: ChunkIdx, pages: PageSet) -> Result<(), ArriveError> {
        for run in pages.runs() {
            let punched = self.swap.punch(Pages { chunk, run }.first().offset().0, u64::from(run.len) * PAGE_SIZE);
            punched.map_err(|source| of_swap(&self.swap, "make a hole in", source))?;
        }
        Ok(())
    }

    /// The set of these pages, which a peer has named.
    fn whole(&self, pages: Pages) -> Result<PageSet, ArriveError> {
        let (Pages { chunk, run: Run { start, len } }, chunks) = (pages, self.chunks.len());
        if chunk.as_usize() >= chunks || len == 0 || u32::from(start) + u32::from(len) > 256 {
            return Err(ArriveError::Outside { chunk: chunk.0, start, len, chunks });
        }
        Ok(PageSet::range(start, len))
    }

    fn change(
        &self,
        chunk: ChunkIdx,
        change: impl FnOnce(&mut Places) -> Result<(), ArriveError>,
    ) -> Result<(), ArriveError> {
        let mut places = self.chunks[chunk.as_usize()].lock().map_err(|_| ArriveError::Failed)?;
        if self.failed.load(Ordering::SeqCst) {
            return Err(ArriveError::Failed);
        }
        if self.finished.load(Ordering::SeqCst) {
            return Err(ArriveError::Finished);
        }
        let changed = change(&mut places);
        if changed.is_err() {
            self.failed.store(true, Ordering::SeqCst);
        }
        changed
    }

    fn put(
        &self,
        places: &mut Places,
        of: Pages,
        full: PageSet,
        zeros: PageSet,
        content: &[u8],
    ) -> Result<(), ArriveError> {
        self.clear(places, of.chunk, zeros)?;
        let new = full - places.ram - places.swap;
        let to_dram = self.reserve(new);
        let to_swap = new - to_dram;
        self.swapped.fetch_add(u64::from(to_swap.count()), Ordering::Relaxed);
        places.ram |= to_dram;
        places.swap |= to_swap;
        let bytes_of = |run: Run| {
            let at = usize::from(run.start - of.run.start) * PAGE_SIZE as usize;
            &content[at..][..usize::from(run.len) * PAGE_SIZE as usize]
        };
        for run in (full & places.ram).runs() {
            self.region(of.chunk).write(Pages { chunk: of.chunk, run }, bytes_of(run))?;
        }
        for run in (full & places.swap).runs() {
            self.write_to_swap(Pages { chunk: of.chunk, run }, bytes_of(run))?;
        }
        Ok(())
    }

    /// Room in DRAM, for the first of these pages if not for all.
    fn reserve(&self, new: PageSet) -> PageSet {
        let wanted = u64::from(new.count());
        let free = |dram: u64| self.dram_max.saturating_sub(dram).min(wanted);
        let before = self.dram.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |dram| Some(dram + free(dram)));
        match free(before.unwrap_or(self.dram_max)) {
            room if room == wanted => new,
            room => new.iter().take(room as usize).collect(),
        }
    }

    fn write_to_swap(&self, pages: Pages, content: &[u8]) -> Result<(), ArriveError> {
        let mut buffer = self.buffers().pop().unwrap_or_else(|| DirectBuffer::new(CHUNK_SIZE as usize));
        buffer[..content.len()].copy_from_slice(content);
        let written = self.swap.write_pages(pages.first().0, &buffer[..content.len()]);
        self.buffers().push(buffer);
        written.map_err(|source| of_swap(&self.swap, "write to", source))
    }

    /// Pages become holes, wherever they were.
    fn clear(&self, places: &mut Places, chunk: ChunkIdx, zeros: PageSet) -> Result<(), ArriveError> {
        let (ram, swap) = (places.ram & zeros, places.swap & zeros);
        for run in ram.runs() {
            self.region(chunk).clear(Pages { chunk, run })?;
        }
        self.punch_swap(chunk, swap)?;
        places.ram -= ram;
        places.swap -= swap;
        self.dram.fetch_sub(u64::from(ram.count()), Ordering::Relaxed);
        self.swapped.fetch_sub(u64::from(swap.count()), Ordering::Relaxed);
        Ok(())
    }

    fn region(&self, chunk: ChunkIdx) -> &Region {
        &self.regions[self.regions.partition_point(|region| region.first <= chunk.as_usize()) - 1]
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<DirectBuffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Pages of guests that have something in them show it early, as a rule.
fn is_zero(page: &[u8]) -> bool {
    page.chunks(64).all(|line| line.iter().fold(0, |any, byte| any | byte) == 0)
}
