//! What a map says of the slabs of a space, for callers that only look at the map.

use std::collections::HashMap;

use crate::client::index::{GroupIndex, ListIndex};
use crate::client::parity::layout::{LEDGER_COPIES, Layout};
use crate::client::slab::SPACE_SLABS_MAX;
use crate::control::MapEntry;
use crate::units::{SlabNo, SlabSize};

/// How a slab is that some server has, or had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabStatus {
    Whole,
    /// It has fewer copies than it should, or its group lacks a slab, which is read by the others and may be made anew.
    Short,
    /// The map says that its pages are gone for good.
    Lost,
}

/// What the map says of each slab that is held, those of parity and of the ledger among them, and whether there is parity at all.
pub fn slab_statuses(
    pages: u64,
    copies: usize,
    size: SlabSize,
    map: &[(SlabNo, MapEntry)],
) -> (Vec<(SlabNo, SlabStatus)>, bool) {
    let layout = Layout::new(pages.clamp(1, (SPACE_SLABS_MAX * size.pages()) as u64), size);
    let entries: HashMap<SlabNo, &MapEntry> = map.iter().map(|(slab, entry)| (*slab, entry)).collect();
    let entry = |slab: SlabNo| entries.get(&slab).copied();
    let is_held = |entry: &MapEntry| entry.lost || !entry.replicas.is_empty();
    let gone =
        |group: GroupIndex| layout.columns(group).filter(|slab| entry(*slab).is_some_and(|entry| entry.lost)).count();
    let has_parity = |group: GroupIndex| entry(layout.parity(group)).is_some_and(is_held);
    let status = |slab: SlabNo, entry: &MapEntry| {
        let few = |wanted| if entry.replicas.len() < wanted { SlabStatus::Short } else { SlabStatus::Whole };
        match layout.group(slab).filter(|group| has_parity(*group)).map(gone) {
            Some(0) => SlabStatus::Whole,
            Some(1) => SlabStatus::Short,
            Some(_) if entry.lost => SlabStatus::Lost,
            Some(_) => SlabStatus::Short,
            None if layout.is_ledger(slab) => few(LEDGER_COPIES),
            None if entry.lost => SlabStatus::Lost,
            None => few(copies),
        }
    };
    let held = map.iter().filter(|(slab, entry)| is_held(entry) && slab.to_usize() < layout.total());
    let all = held.map(|(slab, entry)| (*slab, status(*slab, entry))).collect();
    (all, layout.groups().any(has_parity))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::Replica;
    use crate::units::{ServerId, Version};

    #[test]
    fn a_group_lacks_what_one_of_it_lacks() {
        use SlabStatus::{Lost, Short, Whole};
        let size = SlabSize::new(8).unwrap();
        let copy = |server| Replica { server: ServerId(server), grant: Version::from_bits(2) };
        // Five slabs: two groups, and parity for the first one alone.
        let check = |servers: &[(u32, u32)], expected: &[SlabStatus]| {
            let map: Vec<(SlabNo, MapEntry)> = servers
                .iter()
                .map(|(slab, copies)| {
                    let replicas = (0..*copies).map(copy).collect();
                    (SlabNo(*slab), MapEntry { revision: 1, replicas, lost: *copies == 0, empty: false })
                })
                .collect();
            let (found, has_parity) = slab_statuses(40, 2, size, &map);
            assert_eq!(found.iter().map(|(_, status)| *status).collect::<Vec<_>>(), expected, "{servers:?}");
            has_parity
        };
        assert!(check(&[(0, 1), (1, 1), (4, 2), (8, 1), (10, 2)], &[Whole; 5]));
        assert!(check(&[(0, 1), (1, 0), (4, 1), (8, 1), (10, 1)], &[Short; 5]));
        assert!(check(&[(0, 1), (1, 0), (4, 2), (8, 0), (10, 2)], &[Short, Lost, Whole, Lost, Whole]));
        assert!(!check(&[(0, 1), (1, 0), (4, 2)], &[Short, Lost, Whole]));
    }
}
