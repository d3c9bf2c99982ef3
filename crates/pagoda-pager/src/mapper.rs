//! Processes that map a VM's RAM beside its VMM, such as the one of its outbox.
//!
//! A page may leave DRAM only if no page-table entry leads to it: neither in the VMM nor in a mapper. So a mapper has a userfaultfd
//! too, and unmaps what the VMM unmaps. [`Table`] says which addresses of a mapper are which pages.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use pagoda_core::units::{PAGE_SIZE, PageIdx};

/// A mapper that the engine is to know.
#[derive(Debug)]
pub struct NewMapper {
    /// Its number in the memory that the VMM keeps (`pagoda_abi::shared::Shared::mappers`).
    pub slot: usize,
    /// The process's id, which messages name.
    pub pid: u32,
    /// Becomes readable when it ends.
    pub pidfd: OwnedFd,
    /// The socket that it listens on.
    pub socket: PathBuf,
    /// A daemon before this one has let it map RAM.
    pub has_maps: bool,
}

/// A part of the VM's RAM as a mapper maps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The first page of it in the VM's space.
    pub first: PageIdx,
    /// How many pages follow one another here.
    pub pages: u64,
    /// Address of the first in the mapper.
    pub addr: u64,
}

impl Mapped {
    fn len(&self) -> u64 {
        self.pages * PAGE_SIZE
    }

    fn overlaps(&self, other: &Mapped) -> bool {
        self.addr < other.addr + other.len() && other.addr < self.addr + self.len()
    }
}

/// All that a mapper maps. A page may be there several times: vhost-user replaces its table of memory by the next one.
#[derive(Debug, Default)]
pub struct Table(Vec<Mapped>);

impl Table {
    /// From now on this is mapped, and nothing else at these addresses.
    pub fn insert(&mut self, new: Mapped) {
        self.0.retain(|old| !old.overlaps(&new));
        self.0.push(new);
    }

    /// What begins at this address is unmapped.
    pub fn remove(&mut self, addr: u64) {
        self.0.retain(|mapped| mapped.addr != addr);
    }

    /// Forgets every mapping of the mapper.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many mappings there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Each mapping's address and length in bytes.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(|mapped| (mapped.addr, mapped.len()))
    }

    /// The page at an address.
    pub fn page_at(&self, addr: u64) -> Option<PageIdx> {
        let found = self.0.iter().find(|mapped| addr >= mapped.addr && addr - mapped.addr < mapped.len())?;
        Some(PageIdx(found.first.0 + (addr - found.addr) / PAGE_SIZE))
    }

    /// Where these pages are mapped: addresses and lengths in bytes, none of which leaves its mapping.
    pub fn pieces(&self, first: PageIdx, count: u64) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().filter_map(move |mapped| {
            let from = first.0.max(mapped.first.0);
            let to = (first.0 + count).min(mapped.first.0 + mapped.pages);
            (from < to).then(|| (mapped.addr + (from - mapped.first.0) * PAGE_SIZE, (to - from) * PAGE_SIZE))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: u64 = 0x7f00_0000_0000;

    fn mapped(first: u64, pages: u64, at: u64) -> Mapped {
        Mapped { first: PageIdx(first), pages, addr: BASE + at * PAGE_SIZE }
    }

    #[test]
    fn a_guests_memory_below_and_above_a_hole() {
        let mut table = Table::default();
        table.insert(mapped(0, 160, 0));
        table.insert(mapped(192, 832, 1000));
        let pieces: Vec<_> = table.pieces(PageIdx(150), 106).collect();
        assert_eq!(pieces, [(BASE + 150 * PAGE_SIZE, 10 * PAGE_SIZE), (BASE + 1000 * PAGE_SIZE, 64 * PAGE_SIZE)]);
        assert_eq!(table.page_at(BASE + 1001 * PAGE_SIZE), Some(PageIdx(193)));
        assert_eq!(table.page_at(BASE + 500 * PAGE_SIZE), None);
    }

    proptest! {
        /// Against a list of addresses.
        #[test]
        fn it_says_what_a_list_says(steps in proptest::collection::vec((0..40u64, 1..12u64, 0..40u64, any::<bool>()), 1..40)) {
            let (mut table, mut list) = (Table::default(), Vec::<Option<(u64, u64)>>::new());
            list.resize(64, None);
            for (first, pages, at, is_insert) in steps {
                if is_insert {
                    // What it meets goes as a whole.
                    let met: Vec<u64> = list[at as usize..(at + pages) as usize].iter().flatten().map(|(begin, _)| *begin).collect();
                    list.iter_mut().for_each(|slot| if slot.is_some_and(|(begin, _)| met.contains(&begin)) { *slot = None });
                    table.insert(mapped(first, pages, at));
                    (0..pages).for_each(|page| list[(at + page) as usize] = Some((at, first + page)));
                } else {
                    list.iter_mut().for_each(|slot| if slot.is_some_and(|(begin, _)| begin == at) { *slot = None });
                    table.remove(BASE + at * PAGE_SIZE);
                }
                for (index, slot) in list.iter().enumerate() {
                    let page = table.page_at(BASE + index as u64 * PAGE_SIZE);
                    prop_assert_eq!(page, slot.map(|(_, page)| PageIdx(page)));
                }
                for page in 0..64 {
                    let mut at: Vec<u64> = table.pieces(PageIdx(page), 1).map(|(addr, len)| { assert_eq!(len, PAGE_SIZE); (addr - BASE) / PAGE_SIZE }).collect();
                    at.sort_unstable();
                    let expected: Vec<u64> = (0..64).filter(|index| list[*index as usize].is_some_and(|(_, other)| other == page)).collect();
                    prop_assert_eq!(at, expected);
                }
            }
        }
    }
}
