//! Which numbers the slabs of a space with parity have.
//!
//! | slabs | |
//! |---|---|
//! | 0..n | the space's pages; four that follow one another, beginning at a multiple of four, are a *group* |
//! | from n, rounded up to a multiple of four | one of parity for each group |
//! | from there | the *ledger*: which version each page has, 8 bytes a page |

use crate::control::MapEntry;
use crate::units::{PAGE_SIZE, PageNo, SlabNo, SlabSize};

/// Slabs of a group: with one of parity for four, 1.25 times the memory.
pub const MEMBERS: usize = 4;
/// These and their parity.
pub const COLUMNS: usize = MEMBERS + 1;
/// A version of the ledger, in bytes.
pub const VERSION_SIZE: usize = 8;
pub const VERSIONS_A_PAGE: usize = PAGE_SIZE / VERSION_SIZE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Slabs with pages of the space.
    pub data: usize,
    pub groups: usize,
    /// Pages of the ledger for each of them.
    pub table_pages: usize,
    size: SlabSize,
}

impl Layout {
    pub fn new(pages: u64, size: SlabSize) -> Layout {
        let data = pages.div_ceil(size.pages() as u64) as usize;
        Layout { data, groups: data.div_ceil(MEMBERS), table_pages: size.pages().div_ceil(VERSIONS_A_PAGE), size }
    }

    pub fn parity(self, group: usize) -> usize {
        MEMBERS * self.groups + group
    }

    fn ledger(self) -> usize {
        self.parity(self.groups)
    }

    /// All slabs, those between the last page and the first parity counted.
    pub fn total(self) -> usize {
        self.ledger() + (self.data * self.table_pages).div_ceil(self.size.pages())
    }

    /// The group that a slab belongs to, as a member or as its parity.
    pub fn group(self, slab: usize) -> Option<usize> {
        if slab < self.data { Some(slab / MEMBERS) } else { self.is_parity(slab).then(|| slab - self.parity(0)) }
    }

    pub fn is_parity(self, slab: usize) -> bool {
        (self.parity(0)..self.ledger()).contains(&slab)
    }

    pub fn is_ledger(self, slab: usize) -> bool {
        (self.ledger()..self.total()).contains(&slab)
    }

    pub fn members(self, group: usize) -> std::ops::Range<usize> {
        group * MEMBERS..(group * MEMBERS + MEMBERS).min(self.data)
    }

    /// The members of a group, and its parity.
    pub fn columns(self, group: usize) -> impl Iterator<Item = usize> {
        self.members(group).chain([self.parity(group)])
    }

    /// Groups with versions in a slab of the ledger.
    pub fn groups_in(self, ledger: usize) -> std::ops::RangeInclusive<usize> {
        let of_page = |page: usize| (page / self.table_pages).min(self.data - 1) / MEMBERS;
        let first = (ledger - self.ledger()) * self.size.pages();
        of_page(first)..=of_page(first + self.size.pages() - 1)
    }

    /// Where a part of a slab's versions is.
    pub fn table_page(self, slab: usize, part: usize) -> PageNo {
        let first = self.size.page(SlabNo(self.ledger() as u32), 0);
        PageNo(first.0 + (slab * self.table_pages + part) as u64)
    }
}

/// What a layout of a space needs, where the map has entries beyond its pages.
pub fn slabs_needed(layout: Layout, map: &[(SlabNo, MapEntry)]) -> usize {
    let beyond = map.iter().any(|(slab, _)| slab.0 as usize >= layout.data);
    if beyond { layout.total() } else { layout.data }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slab_has_one_duty() {
        for (pages, slab_pages) in [(1, 8), (20, 8), (33, 8), (257, 8), (16_384 * 9, 16_384), (1024 * 700, 1024)] {
            let size = SlabSize::new(slab_pages).unwrap();
            let layout = Layout::new(pages, size);
            for slab in 0..layout.total() {
                let duties = [slab < layout.data, layout.is_parity(slab), layout.is_ledger(slab)];
                let gap = (layout.data..layout.parity(0)).contains(&slab);
                assert_eq!(duties.iter().filter(|duty| **duty).count(), usize::from(!gap), "{slab} of {layout:?}");
                assert_eq!(layout.group(slab).is_some(), duties[0] || duties[1]);
                if let Some(group) = layout.group(slab) {
                    assert_eq!(layout.columns(group).filter(|column| *column == slab).count(), 1);
                }
            }
            for slab in 0..layout.data {
                for part in [0, layout.table_pages - 1] {
                    let ledger = size.slab(layout.table_page(slab, part)).unwrap().0 as usize;
                    assert!(layout.groups_in(ledger).contains(&(slab / MEMBERS)), "{slab} of {layout:?}");
                }
            }
            let last = layout.table_page(layout.data - 1, layout.table_pages - 1);
            assert!(layout.is_ledger(size.slab(layout.table_page(0, 0)).unwrap().0 as usize));
            assert_eq!(size.slab(last).unwrap().0 as usize, layout.total() - 1);
        }
        let layout = Layout::new(16_384 * 9, SlabSize::default());
        assert_eq!((layout.groups, layout.parity(2), layout.total(), layout.table_pages), (3, 14, 16, 32));
    }
}
