//! Which numbers the slabs of a space with parity have.
//!
//! | slabs | |
//! |---|---|
//! | 0..n | the space's pages; four that follow one another, beginning at a multiple of four, are a *group* |
//! | from n, rounded up to a multiple of four | one of parity for each group |
//! | from there | the *ledger*: which version each page has, 8 bytes a page |

use smallvec::SmallVec;

use crate::client::index::{GroupIndex, ListIndex};
use crate::control::MapEntry;
use crate::units::{PAGE_SIZE, PageNo, SlabNo, SlabSize};

/// Slabs of a group: with one of parity for four, 1.25 times the memory.
pub const MEMBERS: usize = 4;
/// Slabs of a group, in place: an owner has no memory to ask for while it serves.
pub type Members = SmallVec<[SlabNo; MEMBERS]>;
/// Copies of the ledger: without it, nothing that was lost can be made anew.
pub const LEDGER_COPIES: usize = 2;
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

    /// The parity slab of a group.
    pub fn parity(self, group: GroupIndex) -> SlabNo {
        SlabNo::from_usize(self.first_parity() + group.0)
    }

    fn first_parity(self) -> usize {
        MEMBERS * self.groups
    }

    fn ledger(self) -> usize {
        self.first_parity() + self.groups
    }

    pub fn groups(self) -> impl Iterator<Item = GroupIndex> {
        (0..self.groups).map(GroupIndex)
    }

    /// Whether a slab has pages of the space.
    pub fn is_data(self, slab: SlabNo) -> bool {
        slab.to_usize() < self.data
    }

    /// All slabs, those between the last page and the first parity counted.
    pub fn total(self) -> usize {
        self.ledger() + (self.data * self.table_pages).div_ceil(self.size.pages())
    }

    /// The group that a slab belongs to, as a member or as its parity.
    pub fn group(self, slab: SlabNo) -> Option<GroupIndex> {
        let at = slab.to_usize();
        let member = self.is_data(slab).then_some(at / MEMBERS);
        member.or_else(|| self.is_parity(slab).then(|| at - self.first_parity())).map(GroupIndex)
    }

    pub fn is_parity(self, slab: SlabNo) -> bool {
        (self.first_parity()..self.ledger()).contains(&slab.to_usize())
    }

    pub fn is_ledger(self, slab: SlabNo) -> bool {
        (self.ledger()..self.total()).contains(&slab.to_usize())
    }

    pub fn members(self, group: GroupIndex) -> impl Iterator<Item = SlabNo> + Clone {
        let first = group.0 * MEMBERS;
        (first..(first + MEMBERS).min(self.data)).map(SlabNo::from_usize)
    }

    /// The members of a group, and its parity.
    pub fn columns(self, group: GroupIndex) -> impl Iterator<Item = SlabNo> {
        self.members(group).chain([self.parity(group)])
    }

    /// Groups with versions in a slab of the ledger.
    pub fn groups_in(self, ledger: SlabNo) -> impl Iterator<Item = GroupIndex> {
        let of_page = |page: usize| (page / self.table_pages).min(self.data - 1) / MEMBERS;
        let first = (ledger.to_usize() - self.ledger()) * self.size.pages();
        (of_page(first)..=of_page(first + self.size.pages() - 1)).map(GroupIndex)
    }

    /// Where a part of a slab's versions is.
    pub fn table_page(self, slab: SlabNo, part: usize) -> PageNo {
        let first = self.size.page(SlabNo::from_usize(self.ledger()), 0);
        PageNo(first.0 + (slab.to_usize() * self.table_pages + part) as u64)
    }

    /// The first and the last page of the ledger with versions of a group.
    pub fn table_pages_of(self, group: GroupIndex) -> [PageNo; 2] {
        let first = group.0 * MEMBERS;
        let last = (first + MEMBERS).min(self.data) - 1;
        [(first, 0), (last, self.table_pages - 1)].map(|(slab, part)| self.table_page(SlabNo::from_usize(slab), part))
    }
}

/// What a layout of a space needs, where the map has entries beyond its pages.
pub fn slabs_needed(layout: Layout, map: &[(SlabNo, MapEntry)]) -> usize {
    let beyond = map.iter().any(|(slab, _)| !layout.is_data(*slab));
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
            for slab in (0..layout.total()).map(SlabNo::from_usize) {
                let duties = [layout.is_data(slab), layout.is_parity(slab), layout.is_ledger(slab)];
                let gap = (layout.data..layout.first_parity()).contains(&slab.to_usize());
                assert_eq!(duties.iter().filter(|duty| **duty).count(), usize::from(!gap), "{slab:?} of {layout:?}");
                assert_eq!(layout.group(slab).is_some(), duties[0] || duties[1]);
                if let Some(group) = layout.group(slab) {
                    assert_eq!(layout.columns(group).filter(|column| *column == slab).count(), 1);
                }
            }
            for slab in (0..layout.data).map(SlabNo::from_usize) {
                for part in [0, layout.table_pages - 1] {
                    let ledger = size.slab(layout.table_page(slab, part)).unwrap();
                    let group = layout.group(slab).unwrap();
                    assert!(layout.groups_in(ledger).any(|of| of == group), "{slab:?} of {layout:?}");
                }
            }
            let last = layout.table_page(SlabNo::from_usize(layout.data - 1), layout.table_pages - 1);
            assert!(layout.is_ledger(size.slab(layout.table_page(SlabNo(0), 0)).unwrap()));
            assert_eq!(size.slab(last).unwrap().0 as usize, layout.total() - 1);
        }
        let layout = Layout::new(16_384 * 9, SlabSize::default());
        let parity = layout.parity(GroupIndex(2));
        assert_eq!((layout.groups, parity, layout.total(), layout.table_pages), (3, SlabNo(14), 16, 32));
    }
}
