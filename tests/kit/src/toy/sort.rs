//! Quicksort of the whole RAM: the program of the MemX paper's table 2.

use std::time::Instant;

use pagoda_sys::toy::process;
use pagoda_sys::toy::ram::{Ram, RamPart, WORDS_PER_PAGE};
use serde::{Deserialize, Serialize};

use super::pattern::mix;

/// Shorter runs of words are sorted by insertion.
const INSERTION_MAX: usize = 16;

/// What the toy says after a sort.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Sorted {
    /// Words that were sorted.
    pub words: u64,
    /// Wall time of the sort alone.
    pub seconds: f64,
    /// User and system time of the process meanwhile.
    pub cpu_s: f64,
    /// Words out of order, and one if they are not those that there were.
    pub bad_words: u64,
}

/// The RAM as one array.
struct Words<'ram> {
    part: RamPart<'ram>,
}

impl Words<'_> {
    fn len(&self) -> usize {
        self.part.pages() * WORDS_PER_PAGE
    }

    fn get(&self, index: usize) -> u64 {
        self.part.load(index / WORDS_PER_PAGE, index % WORDS_PER_PAGE)
    }

    fn set(&mut self, index: usize, value: u64) {
        self.part.store(index / WORDS_PER_PAGE, index % WORDS_PER_PAGE, value);
    }

    fn swap(&mut self, one: usize, other: usize) {
        let (a, b) = (self.get(one), self.get(other));
        self.set(one, b);
        self.set(other, a);
    }

    /// Changes with any word, not with their order.
    fn sums(&self) -> (u64, u64) {
        let add = |(sum, mixed): (u64, u64), word: u64| (sum.wrapping_add(word), mixed.wrapping_add(mix(word)));
        (0..self.len()).map(|index| self.get(index)).fold((0, 0), add)
    }
}

/// Fills the RAM with numbers that `seed` says, and sorts them.
pub fn sort(ram: &mut Ram, seed: u64) -> Option<Sorted> {
    let mut words = Words { part: ram.split(1).pop()? };
    (0..words.len()).for_each(|index| words.set(index, mix(seed ^ index as u64)));
    let before = words.sums();
    let (start, cpu) = (Instant::now(), process::cpu_time());
    quicksort(&mut words);
    let seconds = start.elapsed().as_secs_f64();
    let cpu_s = (process::cpu_time() - cpu).as_secs_f64();
    let disorder = (1..words.len()).filter(|index| words.get(index - 1) > words.get(*index)).count();
    let bad_words = disorder as u64 + u64::from(words.sums() != before);
    Some(Sorted { words: words.len() as u64, seconds, cpu_s, bad_words })
}

fn quicksort(words: &mut Words<'_>) {
    // The smaller part is done first, so there are never more than 64.
    let mut left = vec![(0, words.len())];
    while let Some((start, end)) = left.pop() {
        if end - start <= INSERTION_MAX {
            insert(words, start, end);
            continue;
        }
        let middle = partition(words, start, end);
        let (lower, upper) = ((start, middle), (middle, end));
        if middle - start < end - middle { left.extend([upper, lower]) } else { left.extend([lower, upper]) }
    }
}

/// Hoare's partition around the median of three: no word before the place it gives is greater than any behind it, and
/// neither side is empty.
fn partition(words: &mut Words<'_>, start: usize, end: usize) -> usize {
    let mut three = [words.get(start), words.get(start + (end - start) / 2), words.get(end - 1)];
    three.sort_unstable();
    let pivot = three[1];
    let (mut low, mut high) = (start, end - 1);
    loop {
        while words.get(low) < pivot {
            low += 1;
        }
        while words.get(high) > pivot {
            high -= 1;
        }
        if low >= high {
            return low.max(start + 1);
        }
        words.swap(low, high);
        low += 1;
        high -= 1;
    }
}

fn insert(words: &mut Words<'_>, start: usize, end: usize) {
    for next in start + 1..end {
        let word = words.get(next);
        let mut position = next;
        while position > start && words.get(position - 1) > word {
            words.set(position, words.get(position - 1));
            position -= 1;
        }
        words.set(position, word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_sys::toy::ram::{HugePages, PAGE_BYTES, RamSource};

    fn sorts(make: impl Fn(usize) -> u64) {
        let mut ram = Ram::map(RamSource::Anonymous(40 * PAGE_BYTES), HugePages::Refuse).unwrap();
        let mut words = Words { part: ram.split(1).pop().unwrap() };
        (0..words.len()).for_each(|index| words.set(index, make(index)));
        let mut expected: Vec<u64> = (0..words.len()).map(&make).collect();
        expected.sort_unstable();
        quicksort(&mut words);
        let found: Vec<u64> = (0..words.len()).map(|index| words.get(index)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn any_order_is_sorted() {
        sorts(|index| mix(index as u64));
        sorts(|index| index as u64);
        sorts(|index| u64::MAX - index as u64);
        sorts(|index| mix(index as u64) % 3);
        sorts(|_| 7);
    }

    #[test]
    fn what_is_wrong_is_counted() {
        let mut ram = Ram::map(RamSource::Anonymous(4 * PAGE_BYTES), HugePages::Refuse).unwrap();
        assert_eq!(sort(&mut ram, 1).unwrap().bad_words, 0);
        let mut words = Words { part: ram.split(1).pop().unwrap() };
        let before = words.sums();
        words.set(100, words.get(101) + 1);
        assert_ne!(words.sums(), before);
    }
}
