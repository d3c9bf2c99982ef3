//! The page table of a VM from what survives the daemon: the RAM files, what the tiers keep, and the open intents.
//!
//! The rule: data in the RAM file is the page, unless an intent names it; else the page is what the tiers say ([`Stack`]); else it
//! is zero. Nothing else is needed, and nothing else is trusted.

use pagoda_abi::shared::NO_CHUNK;
use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Located, Pages};
use pagoda_core::units::{CHUNK_PAGES, ChunkIdx, PAGE_SIZE};
use pagoda_sys::Errno;
use pagoda_sys::socket::SharedMap;

use crate::share::Member;
use crate::space::Space;
use crate::tier::swap::each_chunk;
use crate::tier::{BlocksError, Stack};

/// Threads that look where pages are: more of them wait for one another in the kernel.
const LOOK_THREADS_MAX: usize = 8;
/// Chunks that are worth a thread: 64 take a millisecond.
const LOOK_CHUNKS_MIN: usize = 64;

/// Where the pages of every chunk are.
pub type Found = Vec<Located>;

/// Why the page table could not be built. The VM waits; nothing is lost.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// The kernel refuses something.
    #[error("{what}: {source}")]
    Os {
        /// What was tried, as a verb.
        what: &'static str,
        /// The error that the kernel returned.
        source: Errno,
    },
    /// The tiers do not say which pages they have.
    #[error("look at swap: {0}")]
    Blocks(#[from] BlocksError),
}

fn os(what: &'static str) -> impl FnOnce(Errno) -> RecoverError {
    move |source| RecoverError::Os { what, source }
}

/// Settles what open intents name, and closes them: the pages leave the RAM files, or get their content back from their tier
/// where the kernel cannot take a folio apart and only zeroes it.
pub fn settle_intents(space: &Space, tiers: &mut Stack, shared: &SharedMap) -> Result<u64, RecoverError> {
    let mut settled = 0;
    for intent in &shared.intents {
        let Some((chunk, words)) = intent.read() else { continue };
        // No pages, but an image that is lost: that is settled elsewhere.
        if chunk == NO_CHUNK {
            continue;
        }
        // The VMM can write here: a chunk that does not exist is its own mischief and names nothing.
        if chunk < space.chunks().0 {
            settle(space, tiers, ChunkIdx(chunk), PageSet::from_words(words))?;
            settled += 1;
        }
        intent.withdraw();
    }
    Ok(settled)
}

fn settle(space: &Space, tiers: &mut Stack, chunk: ChunkIdx, pages: PageSet) -> Result<(), RecoverError> {
    for run in pages.runs() {
        let location = space.locate(Pages { chunk, run });
        location
            .region
            .ram
            .punch(location.offset, location.len)
            .map_err(os("punch an interrupted page-in or page-out"))?;
    }
    for page in still_there(space, chunk, pages)?.iter() {
        let location = space.locate_chunk(chunk);
        let mut content = [0; PAGE_SIZE as usize];
        tiers.read_now(chunk.page(page), &mut content).map_err(os("read an interrupted page-out back"))?;
        location.region.view.write_page(location.pages().start + u64::from(page), &content);
    }
    Ok(())
}

/// Which of these pages the RAM file has after a punch.
pub fn still_there(space: &Space, chunk: ChunkIdx, pages: PageSet) -> Result<PageSet, RecoverError> {
    let mut there = PageSet::EMPTY;
    for run in pages.runs() {
        let location = space.locate(Pages { chunk, run });
        let mut at = location.offset;
        while at < location.offset + location.len {
            match location.region.ram.next_data(at).map_err(os("look at RAM"))? {
                Some(data) if data < location.offset + location.len => {
                    there.set((u64::from(run.start) + (data - location.offset) / PAGE_SIZE) as u8);
                    at = data + PAGE_SIZE;
                }
                _ => break,
            }
        }
    }
    Ok(there)
}

/// Looks where every page is, when no intent is open. `frozen`: pages that the newest image has no copy of.
pub fn find(space: &Space, tiers: &mut Stack, frozen: impl Fn(ChunkIdx) -> PageSet) -> Result<Found, RecoverError> {
    let mut found = vec![Located::default(); space.chunks().as_usize()];
    find_in_ram(space, &mut found)?;
    let in_dram: Vec<PageSet> = found.iter().map(|located| located.ram).collect();
    let blocks = tiers.recover(&in_dram)?;
    for (chunk, (located, blocks)) in (0..).map(ChunkIdx).zip(found.iter_mut().zip(blocks)) {
        (located.swap, located.missing) = (blocks, tiers.missing(chunk));
    }
    if let Some(member) = tiers.frames() {
        look_at_table(member, &mut found)?;
    }
    for (chunk, located) in (0..).map(ChunkIdx).zip(&mut found) {
        located.frozen = frozen(chunk);
    }
    Ok(found)
}

/// Which pages the RAM files have. mincore(2) is the quick answer, but says no for a page that the kernel itself swapped out: with
/// swap on the host, only the file's own map of data and holes will do.
fn find_in_ram(space: &Space, found: &mut Found) -> Result<(), RecoverError> {
    if !may_swap() {
        look_at_ram(space, found)?;
        // Swap may have been switched on meanwhile. The files count a page that was swapped out.
        let pages: u64 = found.iter().map(|located| u64::from(located.ram.count())).sum();
        let held: Result<u64, Errno> = space.regions().map(|(_, region)| region.ram.allocated()).sum();
        if !may_swap() && held.map_err(os("look at RAM"))? <= pages * PAGE_SIZE {
            return Ok(());
        }
    }
    for (start, region) in space.regions() {
        for run in region.ram.data_runs() {
            let run = run.map_err(os("look at RAM"))?;
            each_chunk(start + run.start, run.end - run.start, &mut |chunk, pages| {
                found[chunk.as_usize()].ram |= pages
            });
        }
    }
    keep_clean_pages(space, found)
}

/// Whether the kernel may have swapped out a part of the RAM files.
fn may_swap() -> bool {
    pagoda_sys::host::swap_is_on().unwrap_or(true)
}

/// A page that was only ever read is clean, and a kernel that swaps may drop it: what was found would be a hole later. A page
/// that is written to, with what it holds, stays.
fn keep_clean_pages(space: &Space, found: &Found) -> Result<(), RecoverError> {
    let mut resident = vec![Located::default(); found.len()];
    look_at_ram(space, &mut resident)?;
    for (chunk, (found, now)) in (0..).map(ChunkIdx).zip(found.iter().zip(&resident)) {
        for run in (found.ram & now.ram).runs() {
            let location = space.locate(Pages { chunk, run });
            let view = &location.region.small;
            view.populate(location.pages()).map_err(os("keep pages of RAM"))?;
            // The view needs none of them yet, and a page that nobody else maps is cheaper to punch.
            view.zap(location.pages()).map_err(os("unmap pages of RAM"))?;
        }
    }
    Ok(())
}

/// A page that is both in RAM and in the table was on its way, and RAM has the truth: its entry goes. In the one direction
/// the page had been copied back and its entry was about to be cleared, in the other it was to be taken out of RAM next.
fn look_at_table(member: &Member, found: &mut Found) -> Result<(), RecoverError> {
    for (chunk, pages) in member.entries().map_err(os("read the table of shared pages"))? {
        let Some(located) = found.get_mut(chunk.as_usize()) else { continue };
        member.forget(chunk, pages & located.ram);
        located.shared = pages - located.ram;
    }
    Ok(())
}

/// Asks mincore(2) for every chunk. That takes 80 ns a page (measured), and the VM stands still meanwhile, so its CPUs help.
fn look_at_ram(space: &Space, found: &mut Found) -> Result<(), RecoverError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(LOOK_THREADS_MAX);
    let part = found.len().div_ceil(threads).max(LOOK_CHUNKS_MIN);
    std::thread::scope(|scope| {
        let parts = found.chunks_mut(part).zip((0..).step_by(part));
        let parts: Vec<_> = parts.map(|(part, first)| scope.spawn(move || look_at_part(space, part, first))).collect();
        // A thread that panics takes the daemon with it.
        parts.into_iter().try_for_each(|part| part.join().unwrap_or(Err(os("look at RAM")(Errno::IO))))
    })
}

/// The chunks from `first` on, as many as `found` has places for.
fn look_at_part(space: &Space, found: &mut [Located], first: u32) -> Result<(), RecoverError> {
    let mut core = [0_u8; CHUNK_PAGES as usize];
    for (chunk, located) in (first..).map(ChunkIdx).zip(found) {
        let location = space.locate_chunk(chunk);
        location
            .region
            .ram
            .resident(&location.region.view, location.pages().start, &mut core)
            .map_err(os("look at RAM"))?;
        located.ram = (0..=u8::MAX).filter(|index| core[usize::from(*index)] & 1 != 0).collect();
    }
    Ok(())
}
