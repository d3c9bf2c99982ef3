//! Where a page is: in the VMM's address space, and in a RAM file.
//!
//! A VM's space is its regions, one after the other. Regions are multiples of 2 MiB, so no chunk lies in two.

use std::ops::Range;

use pagoda_core::fault::Pages;
use pagoda_core::units::{Bytes, CHUNK_SIZE, ChunkCount, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::ram::{RamFile, RamView};
use pagoda_sys::uffd::Uffd;

/// One RAM file, mapped by the VMM and by us.
#[derive(Debug)]
pub struct Region {
    /// Address in the VMM.
    pub addr: u64,
    /// The memfd that holds the region's pages.
    pub ram: RamFile,
    /// Our own mapping of it, which may fill a hole with a folio of a whole chunk.
    pub view: RamView,
    /// Another one, which fills a hole with single pages only: for pages that come one by one. A folio would put zeros where
    /// pages are that have not come yet.
    pub small: RamView,
}

/// A range of the VMM's address space and the userfaultfd that covers it.
#[derive(Debug)]
pub struct Shard {
    /// First address of the range in the VMM.
    pub addr: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// The userfaultfd that reports the range's faults.
    pub uffd: Uffd,
}

impl Shard {
    /// It has the faults at this address.
    pub fn covers(&self, addr: u64) -> bool {
        addr >= self.addr && addr - self.addr < self.len
    }
}

/// All of a VM's RAM.
#[derive(Debug)]
pub struct Space {
    regions: Vec<(u64, Region)>,
    shards: Vec<Shard>,
    len: u64,
}

/// A page range as seen from one region.
#[derive(Debug)]
pub struct Location<'a> {
    /// The region that the pages are in.
    pub region: &'a Region,
    /// First byte in the RAM file.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// First address in the VMM.
    pub addr: u64,
}

impl Location<'_> {
    /// The pages of the RAM file.
    pub fn pages(&self) -> Range<u64> {
        self.offset / PAGE_SIZE..(self.offset + self.len) / PAGE_SIZE
    }
}

/// Why regions and shards do not make a space.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SpaceError {
    /// A region's length or address is not a multiple of what the page table needs.
    #[error(
        "region at {addr:#x} with {len} bytes is not aligned: its address must be a multiple of 4 KiB, its length of 2 MiB"
    )]
    Alignment {
        /// The region's first address in the VMM.
        addr: u64,
        /// The region's length in bytes.
        len: u64,
    },
    /// Shards do not cover each region exactly once.
    #[error("userfaultfds cover {covered} bytes of RAM, not {len}")]
    Coverage {
        /// Bytes of RAM that the userfaultfds cover.
        covered: u64,
        /// Bytes of RAM that the regions have.
        len: u64,
    },
}

impl Space {
    /// Puts regions in order behind one another.
    ///
    /// # Errors
    /// [`SpaceError`]: what the shim said makes no sense.
    pub fn new(regions: Vec<Region>, shards: Vec<Shard>) -> Result<Space, SpaceError> {
        let mut located = Vec::with_capacity(regions.len());
        let mut len = 0;
        for region in regions {
            let (addr, bytes) = (region.addr, region.ram.len());
            if addr % PAGE_SIZE != 0
                || bytes == 0
                || bytes % pagoda_abi::REGION_ALIGN != 0
                || addr.checked_add(bytes).is_none()
            {
                return Err(SpaceError::Alignment { addr, len: bytes });
            }
            located.push((len, region));
            len += bytes;
        }
        let space = Space { regions: located, shards, len };
        space.check_coverage()?;
        Ok(space)
    }

    fn check_coverage(&self) -> Result<(), SpaceError> {
        let mut ranges: Vec<_> = self.shards.iter().map(|shard| (shard.addr, shard.len)).collect();
        ranges.sort_unstable();
        let mut covered = 0;
        for (_, region) in &self.regions {
            let mut at = region.addr;
            for (addr, len) in &ranges {
                if *addr == at {
                    at = at.saturating_add(*len);
                }
            }
            covered += at - region.addr;
            if at != region.addr + region.ram.len() {
                return Err(SpaceError::Coverage { covered, len: self.len });
            }
        }
        match ranges.iter().map(|(_, len)| len).sum::<u64>() {
            sum if sum == self.len => Ok(()),
            covered => Err(SpaceError::Coverage { covered, len: self.len }),
        }
    }

    /// Size of the VM's RAM in bytes.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.len)
    }

    /// Size of the VM's RAM in chunks.
    pub fn chunks(&self) -> ChunkCount {
        ChunkCount((self.len / CHUNK_SIZE) as u32)
    }

    /// The ranges of the VMM that userfaultfds cover.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The regions in order, each with the offset of its first byte in the space.
    pub fn regions(&self) -> impl Iterator<Item = (u64, &Region)> {
        self.regions.iter().map(|(start, region)| (*start, region))
    }

    /// Where these pages are.
    pub fn locate(&self, pages: Pages) -> Location<'_> {
        self.locate_range(pages.first(), u64::from(pages.run.len) * PAGE_SIZE)
    }

    /// Where this chunk is.
    pub fn locate_chunk(&self, chunk: ChunkIdx) -> Location<'_> {
        self.locate_range(chunk.first_page(), CHUNK_SIZE)
    }

    /// Where this page is.
    pub fn locate_page(&self, page: PageIdx) -> Location<'_> {
        self.locate_range(page, PAGE_SIZE)
    }

    fn locate_range(&self, first: PageIdx, len: u64) -> Location<'_> {
        let at = first.offset().0;
        let next = self.regions.partition_point(|(start, _)| *start <= at);
        let (start, region) = &self.regions[next - 1];
        let offset = at - start;
        Location { region, offset, len, addr: region.addr + offset }
    }

    /// The userfaultfd of an address.
    pub fn uffd(&self, addr: u64) -> &Uffd {
        let shard = self.shards.iter().find(|shard| shard.covers(addr));
        &shard.expect("addresses come from the regions, which the shards cover").uffd
    }

    /// The page at an address of the VMM; `None` if it is not RAM.
    pub fn page_at(&self, addr: u64) -> Option<PageIdx> {
        self.regions.iter().find_map(|(start, region)| {
            let offset = addr.checked_sub(region.addr).filter(|offset| *offset < region.ram.len())?;
            Some(PageIdx((start + offset) / PAGE_SIZE))
        })
    }

    /// The page at an offset of a region; `None` if the range is not whole pages inside it.
    pub fn page_in_region(&self, region: u32, offset: u64, len: u64) -> Option<PageIdx> {
        let (start, region) = self.regions.get(region as usize)?;
        let inside = offset.checked_add(len).is_some_and(|end| end <= region.ram.len());
        (inside && len > 0 && offset.is_multiple_of(PAGE_SIZE) && len.is_multiple_of(PAGE_SIZE))
            .then(|| PageIdx((start + offset) / PAGE_SIZE))
    }

    /// Bytes that the RAM files hold.
    pub fn allocated(&self) -> u64 {
        self.regions.iter().map(|(_, region)| region.ram.allocated().unwrap_or(0)).sum()
    }
}
