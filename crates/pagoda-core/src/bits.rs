//! A set of pages of one chunk: 256 bits, one a page, in four words.
//!
//! The page table keeps one such set per chunk and state, and the engine plans its I/O from the runs in
//! them. Ranges are (first page, number of pages); the number is a `u16` because a full chunk has 256.

use std::fmt;
use std::ops::{BitAnd, BitAndAssign, BitOr, BitOrAssign, Not, Sub, SubAssign};

use crate::units::CHUNK_PAGES;

const WORDS: usize = 4;
const WORD_BITS: u16 = 64;
const PAGES: u16 = CHUNK_PAGES as u16;
const _: () = assert!(WORDS as u16 * WORD_BITS == PAGES);

/// Pages of a chunk, by their index in it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PageSet([u64; WORDS]);

/// Consecutive pages of a chunk. Never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub start: u8,
    /// The run has 1 to 256 pages.
    pub len: u16,
}

impl Run {
    /// The index after the run's last page, up to 256.
    pub const fn end(self) -> u16 {
        self.start as u16 + self.len
    }

    pub const fn contains(self, index: u8) -> bool {
        self.start <= index && (index as u16) < self.end()
    }
}

impl PageSet {
    pub const EMPTY: PageSet = PageSet([0; WORDS]);
    pub const FULL: PageSet = PageSet([u64::MAX; WORDS]);

    /// The set as four words, the first page in the lowest bit of the first: its form in shared memory.
    pub const fn words(self) -> [u64; WORDS] {
        self.0
    }

    /// Makes the set that [`PageSet::words`] gave these words for.
    pub const fn from_words(words: [u64; WORDS]) -> PageSet {
        PageSet(words)
    }

    pub const fn single(index: u8) -> PageSet {
        let mut words = [0; WORDS];
        words[(index / 64) as usize] = 1 << (index % 64);
        PageSet(words)
    }

    /// The pages `start .. start + len`. Panics if the range leaves the chunk.
    pub fn range(start: u8, len: u16) -> PageSet {
        let (start, end) = (u16::from(start), u16::from(start) + len);
        assert!(end <= PAGES, "pages {start}..{end} leave the chunk");
        PageSet(std::array::from_fn(|word| {
            let base = word as u16 * WORD_BITS;
            below(end.saturating_sub(base)) & !below(start.saturating_sub(base))
        }))
    }

    pub const fn contains(&self, index: u8) -> bool {
        self.0[(index / 64) as usize] & (1 << (index % 64)) != 0
    }

    /// Whether every page of the range is in the set. True for an empty range.
    pub fn contains_range(&self, start: u8, len: u16) -> bool {
        self.contains_all(PageSet::range(start, len))
    }

    pub fn contains_all(&self, other: PageSet) -> bool {
        (other - *self).is_empty()
    }

    pub fn intersects(&self, other: PageSet) -> bool {
        !(*self & other).is_empty()
    }

    pub const fn set(&mut self, index: u8) {
        self.0[(index / 64) as usize] |= 1 << (index % 64);
    }

    pub const fn clear(&mut self, index: u8) {
        self.0[(index / 64) as usize] &= !(1 << (index % 64));
    }

    pub fn set_range(&mut self, start: u8, len: u16) {
        *self |= PageSet::range(start, len);
    }

    pub fn clear_range(&mut self, start: u8, len: u16) {
        *self -= PageSet::range(start, len);
    }

    /// The number of pages in the set, 0 to 256.
    pub const fn count(&self) -> u16 {
        let [a, b, c, d] = self.0;
        (a.count_ones() + b.count_ones() + c.count_ones() + d.count_ones()) as u16
    }

    pub const fn is_empty(&self) -> bool {
        let [a, b, c, d] = self.0;
        a | b | c | d == 0
    }

    pub const fn is_full(&self) -> bool {
        let [a, b, c, d] = self.0;
        a & b & c & d == u64::MAX
    }

    pub fn first_set(&self) -> Option<u8> {
        u8::try_from(self.next_set(0)).ok()
    }

    pub fn last_set(&self) -> Option<u8> {
        let word = self.0.iter().rposition(|&bits| bits != 0)?;
        Some((word as u16 * WORD_BITS + 63 - self.0[word].leading_zeros() as u16) as u8)
    }

    /// The pages in the set, in order.
    pub fn iter(&self) -> impl Iterator<Item = u8> + use<> {
        let set = *self;
        std::iter::successors(set.first_set(), move |&index| u8::try_from(set.next_set(u16::from(index) + 1)).ok())
    }

    /// The maximal runs of the set, in order.
    pub fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        let set = *self;
        let mut from = 0;
        std::iter::from_fn(move || {
            let start = u8::try_from(set.next_set(from)).ok()?;
            from = (!set).next_set(u16::from(start));
            Some(Run { start, len: from - u16::from(start) })
        })
    }

    /// The maximal run that holds `index`, if the set does.
    pub fn run_around(&self, index: u8) -> Option<Run> {
        if !self.contains(index) {
            return None;
        }
        let gaps = !*self;
        let end = gaps.next_set(u16::from(index));
        let gap_before = (gaps & PageSet::range(0, u16::from(index))).last_set();
        let start = gap_before.map_or(0, |gap| gap + 1);
        Some(Run { start, len: end - u16::from(start) })
    }

    /// The first page of the set at or after `from`, 256 if there is none.
    pub(crate) fn next_set(&self, from: u16) -> u16 {
        if from >= PAGES {
            return PAGES;
        }
        let first_word = from / WORD_BITS;
        let mut bits = self.0[first_word as usize] & !below(from % WORD_BITS);
        for word in first_word..WORDS as u16 {
            if word > first_word {
                bits = self.0[word as usize];
            }
            if bits != 0 {
                return word * WORD_BITS + bits.trailing_zeros() as u16;
            }
        }
        PAGES
    }
}

/// A word with the lowest `bits` bits set, all of them from 64 on.
const fn below(bits: u16) -> u64 {
    if bits >= WORD_BITS { u64::MAX } else { (1 << bits) - 1 }
}

impl BitOr for PageSet {
    type Output = PageSet;
    fn bitor(self, other: PageSet) -> PageSet {
        PageSet(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }
}

impl BitAnd for PageSet {
    type Output = PageSet;
    fn bitand(self, other: PageSet) -> PageSet {
        PageSet(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }
}

/// The pages that are in `self` and not in `other`.
impl Sub for PageSet {
    type Output = PageSet;
    fn sub(self, other: PageSet) -> PageSet {
        PageSet(std::array::from_fn(|word| self.0[word] & !other.0[word]))
    }
}

impl Not for PageSet {
    type Output = PageSet;
    fn not(self) -> PageSet {
        PageSet(self.0.map(|word| !word))
    }
}

impl BitOrAssign for PageSet {
    fn bitor_assign(&mut self, other: PageSet) {
        *self = *self | other;
    }
}

impl BitAndAssign for PageSet {
    fn bitand_assign(&mut self, other: PageSet) {
        *self = *self & other;
    }
}

impl SubAssign for PageSet {
    fn sub_assign(&mut self, other: PageSet) {
        *self = *self - other;
    }
}

impl FromIterator<u8> for PageSet {
    fn from_iter<I: IntoIterator<Item = u8>>(pages: I) -> PageSet {
        pages.into_iter().fold(PageSet::EMPTY, |set, index| set | PageSet::single(index))
    }
}

/// As runs: `{0-63, 65, 128-255}`.
impl fmt::Debug for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (nth, run) in self.runs().enumerate() {
            let separator = if nth == 0 { "" } else { ", " };
            match run.len {
                1 => write!(f, "{separator}{}", run.start)?,
                _ => write!(f, "{separator}{}-{}", run.start, run.end() - 1)?,
            }
        }
        f.write_str("}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Naive = [bool; 256];

    fn naive_of(set: PageSet) -> Naive {
        std::array::from_fn(|index| set.contains(index as u8))
    }

    fn naive_runs(pages: &Naive) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (index, _) in pages.iter().enumerate().filter(|&(_, &set)| set) {
            match runs.last_mut() {
                Some(run) if usize::from(run.end()) == index => run.len += 1,
                _ => runs.push(Run { start: index as u8, len: 1 }),
            }
        }
        runs
    }

    /// Sets as they occur: mostly long runs, with edges at the word boundaries, and single pages.
    fn any_set() -> impl Strategy<Value = PageSet> {
        let edge = prop_oneof![any::<u8>(), prop::sample::select(vec![0, 1, 63, 64, 65, 127, 128, 191, 192, 254, 255])];
        let runs = prop::collection::vec((edge.clone(), edge, any::<bool>()), 0..12);
        (any::<bool>(), runs).prop_map(|(full, runs)| {
            let mut set = if full { PageSet::FULL } else { PageSet::EMPTY };
            for (a, b, add) in runs {
                let (start, len) = (a.min(b), u16::from(a.abs_diff(b)) + 1);
                if add { set.set_range(start, len) } else { set.clear_range(start, len) }
            }
            set
        })
    }

    proptest! {
        #[test]
        fn changes_agree_with_an_array(set in any_set(), start in any::<u8>(), len in 0..=256u16) {
            let len = len.min(256 - u16::from(start));
            let range = usize::from(start)..usize::from(start) + usize::from(len);
            let naive = naive_of(set);

            let (mut expected, mut actual) = (naive, set);
            expected[range.clone()].fill(true);
            actual.set_range(start, len);
            prop_assert_eq!(naive_of(actual), expected);

            let (mut expected, mut actual) = (naive, set);
            expected[range.clone()].fill(false);
            actual.clear_range(start, len);
            prop_assert_eq!(naive_of(actual), expected);
            prop_assert_eq!(set.contains_range(start, len), naive[range].iter().all(|&set| set));

            let (mut expected, mut actual) = (naive, set);
            expected[usize::from(start)] = !naive[usize::from(start)];
            if naive[usize::from(start)] { actual.clear(start) } else { actual.set(start) }
            prop_assert_eq!(naive_of(actual), expected);
        }

        #[test]
        fn questions_agree_with_an_array(set in any_set(), index in any::<u8>()) {
            let naive = naive_of(set);
            let runs = naive_runs(&naive);
            prop_assert_eq!(usize::from(set.count()), naive.iter().filter(|&&set| set).count());
            prop_assert_eq!(set.is_empty(), runs.is_empty());
            prop_assert_eq!(set.is_full(), naive == [true; 256]);
            prop_assert_eq!(set.first_set().map(usize::from), naive.iter().position(|&set| set));
            prop_assert_eq!(set.last_set().map(usize::from), naive.iter().rposition(|&set| set));
            prop_assert_eq!(set.run_around(index), runs.iter().copied().find(|run| run.contains(index)));
            prop_assert_eq!(set.runs().collect::<Vec<_>>(), runs);
            prop_assert_eq!(set.iter().collect::<PageSet>(), set);
            prop_assert!(set.iter().is_sorted());
        }

        #[test]
        fn algebra_agrees_with_arrays(a in any_set(), b in any_set()) {
            let (left, right) = (naive_of(a), naive_of(b));
            let zip = |op: fn(bool, bool) -> bool| -> Naive { std::array::from_fn(|i| op(left[i], right[i])) };
            prop_assert_eq!(naive_of(a | b), zip(|x, y| x | y));
            prop_assert_eq!(naive_of(a & b), zip(|x, y| x & y));
            prop_assert_eq!(naive_of(a - b), zip(|x, y| x & !y));
            prop_assert_eq!(naive_of(!a), zip(|x, _| !x));
            prop_assert_eq!(a.intersects(b), zip(|x, y| x & y).contains(&true));
            prop_assert_eq!(a.contains_all(b), !zip(|x, y| y & !x).contains(&true));
        }
    }

    #[test]
    fn debug_prints_runs() {
        let set = PageSet::range(0, 64) | PageSet::single(65) | PageSet::range(128, 128);
        assert_eq!(format!("{set:?}"), "{0-63, 65, 128-255}");
        assert_eq!(format!("{:?}", PageSet::EMPTY), "{}");
    }

    #[test]
    #[should_panic(expected = "leave the chunk")]
    fn a_range_may_not_leave_the_chunk() {
        PageSet::range(255, 2);
    }
}
