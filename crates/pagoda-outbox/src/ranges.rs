//! A set of byte ranges that neither touch nor overlap.

use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// The start of each range leads to its end.
    ends: BTreeMap<u64, u64>,
}

impl RangeSet {
    /// The ranges, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ends.iter().map(|(start, end)| *start..*end)
    }

    /// Counts the ranges of the set.
    pub fn pieces(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn first(&self) -> Option<Range<u64>> {
        self.iter().next()
    }

    pub fn bytes(&self) -> u64 {
        self.ends.iter().map(|(start, end)| end - start).sum()
    }

    /// The parts of `range` that are in the set, in order.
    pub fn overlaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let before = self.ends.range(..range.start).next_back();
        let within = self.ends.range(range.start..range.end.max(range.start));
        let cut = |(start, end): (&u64, &u64)| (*start).max(range.start)..(*end).min(range.end);
        before.into_iter().chain(within).map(cut).filter(|part| part.start < part.end).collect()
    }

    pub fn bytes_within(&self, range: &Range<u64>) -> u64 {
        self.overlaps(range).iter().map(|part| part.end - part.start).sum()
    }

    pub fn insert(&mut self, range: Range<u64>) {
        if range.start >= range.end {
            return;
        }
        let Range { mut start, mut end } = range;
        if let Some((&first, &last)) = self.ends.range(..=start).next_back()
            && last >= start
        {
            start = first;
            end = end.max(last);
        }
        while let Some((&first, &last)) = self.ends.range(start..=end).next() {
            self.ends.remove(&first);
            end = end.max(last);
        }
        self.ends.insert(start, end);
    }

    pub fn remove(&mut self, range: &Range<u64>) {
        if self.is_empty() {
            return;
        }
        for part in self.overlaps(range) {
            let (&start, &end) =
                self.ends.range(..=part.start).next_back().expect("a part of the set is in a range of it");
            self.ends.remove(&start);
            if start < part.start {
                self.ends.insert(start, part.start);
            }
            if part.end < end {
                self.ends.insert(part.end, end);
            }
        }
    }

    /// How many pieces there would be with `range` in it.
    pub fn pieces_with(&self, range: &Range<u64>) -> usize {
        let touching_before = self.ends.range(..range.start).next_back().is_some_and(|(_, end)| *end >= range.start);
        let swallowed = self.ends.range(range.start..=range.end).count();
        self.pieces() + 1 - swallowed - usize::from(touching_before)
    }

    /// How many pieces there would be without `range`, which is not empty.
    pub fn pieces_without(&self, range: &Range<u64>) -> usize {
        let before = self.ends.range(..range.start).next_back().filter(|(_, end)| **end > range.start);
        let within = self.ends.range(range.start..range.end.max(range.start));
        let left = |(start, end): (&u64, &u64)| usize::from(*start < range.start) + usize::from(*end > range.end);
        let (touched, left) =
            before.into_iter().chain(within).fold((0, 0), |(touched, all), piece| (touched + 1, all + left(piece)));
        self.pieces() + left - touched
    }

    /// The end of what is in the set from 0 on without a hole.
    pub fn prefix(&self) -> u64 {
        self.ends.get(&0).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set_of(ranges: &[(u64, u64)]) -> RangeSet {
        let mut set = RangeSet::default();
        ranges.iter().for_each(|(start, end)| set.insert(*start..*end));
        set
    }

    #[test]
    fn touching_ranges_are_one() {
        assert_eq!(set_of(&[(0, 4), (4, 8)]), set_of(&[(0, 8)]));
        assert_eq!(set_of(&[(4, 8), (0, 4), (2, 6)]).pieces(), 1);
        assert_eq!(set_of(&[(0, 4), (5, 8)]).prefix(), 4);
        assert_eq!(set_of(&[(1, 4)]).prefix(), 0);
        assert_eq!(set_of(&[(3, 3)]).pieces(), 0);
    }

    proptest! {
        #[test]
        fn like_a_table_of_bytes(steps in prop::collection::vec((any::<bool>(), 0_u64..64, 0_u64..16), 1..40), probe in (0_u64..64, 0_u64..20)) {
            let mut set = RangeSet::default();
            let mut table = [false; 96];
            for (adds, start, length) in steps {
                let range = start..start + length;
                if adds {
                    let expected = set.pieces_with(&range);
                    set.insert(range.clone());
                    prop_assert!(length == 0 || set.pieces() == expected);
                } else {
                    let expected = set.pieces_without(&range);
                    set.remove(&range);
                    prop_assert!(length == 0 || set.pieces() == expected);
                }
                range.for_each(|at| table[at as usize] = adds);
                prop_assert_eq!(set.bytes(), table.iter().filter(|there| **there).count() as u64);
                let runs = (0..96).filter(|at| table[*at] && (*at == 0 || !table[*at - 1])).count();
                prop_assert_eq!(set.pieces(), runs);
                prop_assert_eq!(set.prefix(), table.iter().take_while(|there| **there).count() as u64);
            }
            let probe = probe.0..probe.0 + probe.1;
            let there = probe.clone().filter(|at| table[*at as usize]).count() as u64;
            prop_assert_eq!(set.bytes_within(&probe), there);
        }
    }
}
