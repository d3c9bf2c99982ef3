//! One RAM file of a VM that comes.

use std::ops::Range;

use pagoda_core::fault::{Located, Pages};
use pagoda_core::units::{CHUNK_SIZE, PAGE_SIZE};
use pagoda_sys::Errno;
use pagoda_sys::ram::RamFile;

use super::error::{ArriveError, of_ram};

/// How often holes are made: a large folio that somebody else just looks at cannot be split in that moment.
const TRIES: u32 = 4;

#[derive(Debug)]
pub struct Region {
    /// The region's number among the VM's, from 0 on.
    pub number: usize,
    /// The number of the region's first chunk in the VM.
    pub first: usize,
    pub ram: RamFile,
}

impl Region {
    /// The numbers of the region's chunks in the VM.
    pub fn chunks(&self) -> Range<usize> {
        self.first..self.first + (self.ram.len() / CHUNK_SIZE) as usize
    }

    /// Gives these pages this content.
    pub fn write(&self, pages: Pages, content: &[u8]) -> Result<(), ArriveError> {
        self.ram.write(self.offset(pages), content).map_err(|source| self.failed("write to", source))
    }

    /// Makes holes of these pages.
    pub fn clear(&self, pages: Pages) -> Result<(), ArriveError> {
        let punched = self.ram.punch(self.offset(pages), u64::from(pages.run.len) * PAGE_SIZE);
        punched.map_err(|source| self.failed("make a hole in", source))
    }

    /// Every page that is not in `ram` of its chunk becomes a hole, whatever it holds: the content of every page is known to be
    /// elsewhere, or zeros. Where there is a hole already, the kernel is asked no more than that.
    pub fn leave_only(&self, chunks: &[Located]) -> Result<(), ArriveError> {
        let expected = chunks.iter().map(|chunk| u64::from(chunk.ram.count())).sum::<u64>() * PAGE_SIZE;
        let gaps = gaps(chunks);
        let mut found = 0;
        for _ in 0..TRIES {
            for gap in &gaps {
                match self.ram.next_data(gap.start).map_err(|source| self.failed("look for pages in", source))? {
                    // The file has no more data, neither in this gap nor behind it.
                    None => break,
                    Some(data) if data >= gap.end => {}
                    Some(_) => {
                        let punched = self.ram.punch(gap.start, gap.end - gap.start);
                        punched.map_err(|source| self.failed("make a hole in", source))?;
                    }
                }
            }
            // No page more, and none that has come is gone.
            found = self.ram.allocated().map_err(|source| self.failed("look at the size of", source))?;
            if found == expected {
                return Ok(());
            }
        }
        Err(ArriveError::Changed { region: self.number, found, expected })
    }

    fn offset(&self, pages: Pages) -> u64 {
        pages.first().offset().0 - self.first as u64 * CHUNK_SIZE
    }

    fn failed(&self, what: &'static str, source: Errno) -> ArriveError {
        of_ram(self.number, what, source)
    }
}

/// The runs of pages that are not in `ram`, in bytes, also across the borders of chunks.
fn gaps(chunks: &[Located]) -> Vec<Range<u64>> {
    let mut gaps: Vec<Range<u64>> = Vec::new();
    for (start, chunk) in (0..).step_by(CHUNK_SIZE as usize).zip(chunks) {
        for run in (!chunk.ram).runs() {
            let from = start + u64::from(run.start) * PAGE_SIZE;
            let end = start + u64::from(run.end()) * PAGE_SIZE;
            match gaps.last_mut() {
                Some(last) if last.end == from => last.end = end,
                _ => gaps.push(from..end),
            }
        }
    }
    gaps
}
