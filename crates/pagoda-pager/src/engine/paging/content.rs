//! Copies of what pages hold, for an image. Nothing here changes a page, or makes one where there is none.

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{OpId, Pages};
use pagoda_core::units::{CHUNK_PAGES, PAGE_SIZE, PageIdx};
use pagoda_sys::ring::Ring;

use super::Paging;

const PAGE: usize = PAGE_SIZE as usize;

impl Paging {
    /// Copies pages that are in the RAM file. `out` is as long as they are.
    ///
    /// # Errors
    /// One of them is not there, or the machine has lost it: in words.
    pub fn copy_ram(&self, pages: Pages, out: &mut [u8]) -> Result<(), String> {
        let location = self.space.locate(pages);
        let view = &location.region.view;
        let failed = |what: &str, errno| format!("memory of page {}: {what}: {errno}", pages.first().0);
        // To read a hole through the view would make a page of it.
        let mut core = [0; CHUNK_PAGES as usize];
        let core = &mut core[..usize::from(pages.run.len)];
        let ram = &location.region.ram;
        ram.resident(view, location.pages().start, core).map_err(|errno| failed("look for it", errno))?;
        for (page, _) in location.pages().zip(core).filter(|(_, core)| **core & 1 == 0) {
            // The kernel itself may have swapped it out.
            let at = page * PAGE_SIZE;
            if ram.next_data(at).map_err(|errno| failed("look for it", errno))? != Some(at) {
                return Err(format!("page {} should be in memory, and is not", pages.first().0));
            }
        }
        // Whoever touches a page that the machine has lost is killed.
        view.make_readable(location.pages()).map_err(|errno| failed("read it", errno))?;
        for (page, out) in location.pages().zip(out.chunks_exact_mut(PAGE)) {
            view.read_page(page, out);
        }
        Ok(())
    }

    /// Copies pages that are in frames.
    ///
    /// # Errors
    /// One of them is not: in words.
    pub fn copy_frames(&self, pages: Pages, out: &mut [u8]) -> Result<(), String> {
        let member = self.frames().ok_or("a shared page of a VM that is in no share group")?;
        let (out, _) = out.as_chunks_mut::<PAGE>();
        for (page, out) in (pages.first().0..).map(PageIdx).zip(out) {
            if !member.read(page, out) {
                return Err(format!("the shared page {} has no frame", page.0));
            }
        }
        Ok(())
    }

    /// Copies pages that only tiers have, and waits for them. Nothing else is under way any more.
    ///
    /// # Errors
    /// One of them cannot be read: in words.
    pub fn copy_blocks(&mut self, pages: Pages, out: &mut [u8]) -> Result<(), String> {
        let (out, _) = out.as_chunks_mut::<PAGE>();
        for (page, out) in (pages.first().0..).map(PageIdx).zip(out) {
            let read = self.tiers.read_now(page, out);
            read.map_err(|errno| format!("page {} could not be read from its tier: {errno}", page.0))?;
        }
        Ok(())
    }

    /// What a read has brought of these pages; `None` if they are not in its buffer.
    pub fn brought<'a>(&self, ring: &'a Ring, op: OpId, pages: Pages) -> Option<&'a [u8]> {
        let (id, first) = self.buffer_of(op)?;
        let start = pages.first().0.checked_sub(first.0)? as usize * PAGE;
        ring.buffer(id)?.get(start..start + usize::from(pages.run.len) * PAGE)
    }
}

/// The parts of a run of at most so many pages.
pub fn pieces(run: Run, len_max: u16) -> impl Iterator<Item = Run> {
    let starts = (0..run.len).step_by(usize::from(len_max));
    starts.map(move |at| Run { start: run.start + at as u8, len: len_max.min(run.len - at) })
}

/// The runs of a set, none longer than so many pages.
pub fn short_runs(pages: PageSet, len_max: u16) -> impl Iterator<Item = Run> {
    pages.runs().flat_map(move |run| pieces(run, len_max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_of_a_run() {
        let check = |run, expected: &[(u8, u16)]| {
            let found: Vec<_> = pieces(run, 64).map(|run| (run.start, run.len)).collect();
            assert_eq!(found, expected, "{run:?}");
        };
        check(Run { start: 0, len: 256 }, &[(0, 64), (64, 64), (128, 64), (192, 64)]);
        check(Run { start: 200, len: 56 }, &[(200, 56)]);
        check(Run { start: 100, len: 130 }, &[(100, 64), (164, 64), (228, 2)]);
        let set = PageSet::range(3, 2) | PageSet::range(100, 65);
        let runs: Vec<_> = short_runs(set, 64).map(|run| (run.start, run.len)).collect();
        assert_eq!(runs, [(3, 2), (100, 64), (164, 1)]);
    }
}
