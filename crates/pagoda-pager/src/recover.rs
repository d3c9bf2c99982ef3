//! The page table of a VM from what survives the daemon: the RAM files, the swap file, the open intents.
//!
//! The rule: data in the RAM file is the page, unless an intent names it; else the frame that its entry in the table of shared
//! pages names; else what the pool has, if the far tier's map says that it has it; else data in the swap file; else it is zero.
//! Nothing else is needed, and nothing else is trusted.

use pagoda_core::bits::PageSet;
use pagoda_core::fault::Pages;
use pagoda_core::units::{CHUNK_PAGES, CHUNK_SIZE, ChunkIdx, PAGE_SIZE};
use pagoda_sys::Errno;
use pagoda_sys::socket::SharedMap;
use pagoda_sys::swapfile::SwapFile;

use crate::far::{Far, FarMap};
use crate::share::Member;
use crate::space::Space;

/// Threads that look where pages are: more of them wait for one another in the kernel.
const LOOK_THREADS_MAX: usize = 8;
/// Chunks that are worth a thread: 64 take a millisecond.
const LOOK_CHUNKS_MIN: usize = 64;

/// Per chunk: the pages in RAM, the pages with a swap block, the shared pages.
pub type Found = Vec<(PageSet, PageSet, PageSet)>;

/// Why the page table could not be built. The VM waits; nothing is lost.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct RecoverError {
    what: &'static str,
    source: Errno,
}

fn os(what: &'static str) -> impl FnOnce(Errno) -> RecoverError {
    move |source| RecoverError { what, source }
}

/// Settles what open intents name, and closes them: the pages leave the RAM files, or get their content from their frame or
/// from swap where the kernel cannot take a folio apart and only zeroes it.
pub fn settle_intents(
    space: &Space,
    swap: &SwapFile,
    mut far: Option<&mut Far>,
    member: Option<&Member>,
    shared: &SharedMap,
) -> Result<u64, RecoverError> {
    let mut settled = 0;
    for intent in &shared.intents {
        let Some((chunk, words)) = intent.read() else { continue };
        // The VMM can write here: a chunk that does not exist is its own mischief and names nothing.
        if chunk < space.chunks().0 {
            settle(space, swap, far.as_deref_mut(), member, ChunkIdx(chunk), PageSet::from_words(words))?;
            settled += 1;
        }
        intent.withdraw();
    }
    Ok(settled)
}

fn settle(
    space: &Space,
    swap: &SwapFile,
    mut far: Option<&mut Far>,
    member: Option<&Member>,
    chunk: ChunkIdx,
    pages: PageSet,
) -> Result<(), RecoverError> {
    for run in pages.runs() {
        let place = space.place(Pages { chunk, run });
        place.region.ram.punch(place.offset, place.len).map_err(os("punch an interrupted page-in or page-out"))?;
    }
    for page in still_there(space, chunk, pages)?.iter() {
        let place = space.place_chunk(chunk);
        let at = place.pages().start + u64::from(page);
        let mut frame = [0; PAGE_SIZE as usize];
        if member.is_some_and(|member| member.read(chunk.page(page), &mut frame)) {
            place.region.view.write_page(at, &frame);
            continue;
        }
        if let Some(far) = far.as_deref_mut().filter(|far| far.map().of(chunk).contains(page)) {
            far.read_now(chunk.page(page), &mut frame).map_err(|error| {
                tracing::error!(
                    page = chunk.page(page).0,
                    "an interrupted page-out cannot be had from the pool: {error}"
                );
                os("read an interrupted page-out back from the pool")(Errno::IO)
            })?;
            place.region.view.write_page(at, &frame);
            continue;
        }
        let content = swap.read_page(chunk.page(page).0).map_err(os("read an interrupted page-out back"))?;
        place.region.view.write_page(at, content.bytes());
    }
    Ok(())
}

/// Which of these pages the RAM file has after a punch.
pub fn still_there(space: &Space, chunk: ChunkIdx, pages: PageSet) -> Result<PageSet, RecoverError> {
    let mut there = PageSet::EMPTY;
    for run in pages.runs() {
        let place = space.place(Pages { chunk, run });
        let mut at = place.offset;
        while at < place.offset + place.len {
            match place.region.ram.next_data(at).map_err(os("look at RAM"))? {
                Some(data) if data < place.offset + place.len => {
                    there.set((u64::from(run.start) + (data - place.offset) / PAGE_SIZE) as u8);
                    at = data + PAGE_SIZE;
                }
                _ => break,
            }
        }
    }
    Ok(there)
}

/// Looks where every page is, when no intent is open.
pub fn find(
    space: &Space,
    swap: &SwapFile,
    far: Option<&FarMap>,
    member: Option<&Member>,
) -> Result<Found, RecoverError> {
    let mut found = vec![(PageSet::EMPTY, PageSet::EMPTY, PageSet::EMPTY); space.chunks().as_usize()];
    // mincore(2) is the quick answer, but says no for a page that the kernel itself swapped out: with swap on the host, only
    // the file's own map of data and holes will do.
    if pagoda_sys::host::swap_is_on().unwrap_or(true) {
        for (start, region) in space.regions() {
            for run in region.ram.data_runs() {
                let run = run.map_err(os("look at RAM"))?;
                each_chunk(start + run.start, run.end - run.start, |chunk, pages| found[chunk].0 |= pages);
            }
        }
    } else {
        look_at_ram(space, &mut found)?;
    }
    let end = space.bytes().0;
    let mut mark = |offset: u64, len: u64| {
        each_chunk(offset.min(end), len.min(end - offset.min(end)), |chunk, pages| found[chunk].1 |= pages);
    };
    swap.data_extents(&mut mark).map_err(os("look at swap"))?;
    if let Some(far) = far {
        look_at_far(swap, far, &mut found)?;
    }
    if let Some(member) = member {
        look_at_table(member, &mut found)?;
    }
    Ok(found)
}

/// A page that the pool has may have an older block in the swap file, which was about to be dropped: should the pool's go one
/// day, it would come back as the page.
fn look_at_far(swap: &SwapFile, far: &FarMap, found: &mut Found) -> Result<(), RecoverError> {
    for (chunk, (_, in_swap, _)) in (0..).map(ChunkIdx).zip(found) {
        let there = far.of(chunk);
        for run in (there & *in_swap).runs() {
            let first = Pages { chunk, run }.first();
            swap.punch(first.offset().0, u64::from(run.len) * PAGE_SIZE).map_err(os("drop an outdated swap block"))?;
        }
        *in_swap |= there;
    }
    Ok(())
}

/// A page that is both in RAM and in the table was on its way, and RAM has the truth: its entry goes. In the one direction
/// the page had been copied back and its entry was about to be cleared, in the other it was to be taken out of RAM next.
fn look_at_table(member: &Member, found: &mut Found) -> Result<(), RecoverError> {
    for (chunk, pages) in member.entries().map_err(os("read the table of shared pages"))? {
        let Some((in_ram, _, shared)) = found.get_mut(chunk.as_usize()) else { continue };
        member.forget(chunk, pages & *in_ram);
        *shared = pages - *in_ram;
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
fn look_at_part(space: &Space, found: &mut [(PageSet, PageSet, PageSet)], first: u32) -> Result<(), RecoverError> {
    let mut core = [0_u8; CHUNK_PAGES as usize];
    for (chunk, (in_ram, ..)) in (first..).map(ChunkIdx).zip(found) {
        let place = space.place_chunk(chunk);
        place.region.ram.resident(&place.region.view, place.pages().start, &mut core).map_err(os("look at RAM"))?;
        *in_ram = (0..=u8::MAX).filter(|index| core[usize::from(*index)] & 1 != 0).collect();
    }
    Ok(())
}

/// Splits a byte range by chunks; a page counts as soon as a byte of it is in the range.
fn each_chunk(offset: u64, len: u64, mut found: impl FnMut(usize, PageSet)) {
    let (mut at, end) = (offset / PAGE_SIZE * PAGE_SIZE, offset + len);
    while at < end {
        let stop = end.min((at / CHUNK_SIZE + 1) * CHUNK_SIZE);
        let pages = PageSet::range((at % CHUNK_SIZE / PAGE_SIZE) as u8, (stop - at).div_ceil(PAGE_SIZE) as u16);
        found((at / CHUNK_SIZE) as usize, pages);
        at = stop;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_split_by_chunks_and_rounded_to_pages() {
        let mut pieces = Vec::new();
        each_chunk(CHUNK_SIZE - 4097, 8192, |chunk, pages| pieces.push((chunk, pages)));
        assert_eq!(pieces, [(0, PageSet::range(254, 2)), (1, PageSet::range(0, 1))]);
    }
}
