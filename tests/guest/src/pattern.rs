//! What a page carries: 512 words computed from (seed, page number, version), so that a page that was lost (zeros),
//! is stale (an older version), belongs elsewhere or is torn differs from what is expected in every word checked.

use std::io::{self, Write};

use crate::rng::{GOLDEN, mix};
use crate::{DISK_VERSION, PAGE_SIZE, WORDS_PER_PAGE};

/// The version of a page never written: all zeros.
pub const UNWRITTEN: u32 = 0;

/// How far back a wrong page is searched for, to call it stale; more versions than any page has in flight.
const STALE_VERSIONS_SEARCHED: u32 = 64;

#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    seed: u64,
}

/// The words of one page in one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageContent {
    /// 0 for a page never written; no written page has it, see `Pattern::content`.
    key: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    pub word: usize,
    pub expected: u64,
    pub got: u64,
}

impl Pattern {
    pub fn new(seed: u64) -> Self {
        Self { seed: mix(seed.wrapping_add(GOLDEN)) }
    }

    pub fn content(&self, page: u64, version: u32) -> PageContent {
        if version == UNWRITTEN {
            return PageContent { key: 0 };
        }
        let key = mix(self.seed ^ mix(page.wrapping_mul(GOLDEN) ^ u64::from(version)));
        // Odd, so never 0.
        PageContent { key: key | 1 }
    }

    /// What a wrong word most likely is, to tell lost pages from late ones in a report.
    pub fn diagnose(&self, page: u64, version: u32, mismatch: Mismatch) -> &'static str {
        if mismatch.got == 0 {
            return "zero";
        }
        let oldest = version.saturating_sub(STALE_VERSIONS_SEARCHED).max(UNWRITTEN + 1);
        let stale = (oldest..version).any(|old| self.content(page, old).word(mismatch.word) == mismatch.got);
        if stale { "stale" } else { "foreign" }
    }
}

impl PageContent {
    fn word(self, index: usize) -> u64 {
        // Multiplication by the odd constant keeps the words of one page distinct; no word is 0 because the
        // key is odd and the added part even.
        if self.key == 0 { 0 } else { self.key.wrapping_add((index as u64).wrapping_mul(GOLDEN) << 1) }
    }

    pub fn fill(self, page: &mut [u64]) {
        for (index, word) in page.iter_mut().enumerate() {
            *word = self.word(index);
        }
    }

    pub fn fill_bytes(self, page: &mut [u8]) {
        for (index, word) in page.chunks_exact_mut(size_of::<u64>()).enumerate() {
            word.copy_from_slice(&self.word(index).to_le_bytes());
        }
    }

    fn check_word(self, page: &[u64], word: usize) -> Option<Mismatch> {
        let (expected, got) = (self.word(word), page[word]);
        (expected != got).then_some(Mismatch { word, expected, got })
    }

    /// The first, middle and last words (a torn page differs between them) and one chosen by `salt`.
    pub fn check_sample(self, page: &[u64], salt: u64) -> Option<Mismatch> {
        [0, WORDS_PER_PAGE / 2 - 1, WORDS_PER_PAGE - 1, salt as usize % WORDS_PER_PAGE]
            .into_iter()
            .find_map(|word| self.check_word(page, word))
    }

    pub fn check_all(self, page: &[u64]) -> Option<Mismatch> {
        (0..page.len()).find_map(|word| self.check_word(page, word))
    }

    pub fn check_bytes(self, page: &[u8]) -> Option<Mismatch> {
        debug_assert_eq!(page.len(), PAGE_SIZE);
        page.chunks_exact(size_of::<u64>()).enumerate().find_map(|(word, bytes)| {
            let got = u64::from_le_bytes(bytes.try_into().expect("chunks of a word"));
            let expected = self.word(word);
            (expected != got).then_some(Mismatch { word, expected, got })
        })
    }
}

/// Writes a disk image of whole pages that a guest with the same `pagoda.disk_seed` finds right.
pub fn write_disk_pattern(mut out: impl Write, bytes: u64, seed: u64) -> io::Result<()> {
    let pattern = Pattern::new(seed);
    let mut content = [0; PAGE_SIZE];
    for page in 0..bytes / PAGE_SIZE as u64 {
        pattern.content(page, DISK_VERSION).fill_bytes(&mut content);
        out.write_all(&content)?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_other_pages_versions_and_seeds_differs() {
        let expected = Pattern::new(1).content(7, 3);
        for other in [
            Pattern::new(1).content(8, 3),
            Pattern::new(1).content(7, 2),
            Pattern::new(2).content(7, 3),
            Pattern::new(1).content(7, UNWRITTEN),
        ] {
            let mut page = vec![0; WORDS_PER_PAGE];
            other.fill(&mut page);
            for word in 0..WORDS_PER_PAGE {
                assert!(expected.check_word(&page, word).is_some(), "word {word}");
            }
        }
    }

    #[test]
    fn one_wrong_word_is_found_and_named() {
        let content = Pattern::new(1).content(7, 3);
        for wrong in [0, 1, 255, 300, 511] {
            let mut page = vec![0; WORDS_PER_PAGE];
            content.fill(&mut page);
            assert_eq!(content.check_all(&page), None);
            assert_eq!(content.check_sample(&page, wrong as u64), None);
            page[wrong] ^= 1;
            assert_eq!(content.check_all(&page).map(|mismatch| mismatch.word), Some(wrong));
            assert_eq!(content.check_sample(&page, wrong as u64).map(|mismatch| mismatch.word), Some(wrong));
        }
    }

    #[test]
    fn bytes_and_words_agree() {
        let content = Pattern::new(5).content(1, 1);
        let (mut words, mut bytes) = (vec![0u64; WORDS_PER_PAGE], vec![0u8; PAGE_SIZE]);
        content.fill(&mut words);
        content.fill_bytes(&mut bytes);
        assert_eq!(words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>(), bytes);
        assert_eq!(content.check_bytes(&bytes), None);
        bytes[4095] ^= 0x80;
        assert_eq!(content.check_bytes(&bytes).map(|mismatch| mismatch.word), Some(511));
    }

    #[test]
    fn wrong_pages_are_diagnosed() {
        let pattern = Pattern::new(1);
        let check = |held: PageContent, expected| {
            let mut page = vec![0; WORDS_PER_PAGE];
            held.fill(&mut page);
            let mismatch = pattern.content(7, 3).check_all(&page).expect("differs");
            assert_eq!(pattern.diagnose(7, 3, mismatch), expected);
        };
        check(pattern.content(7, UNWRITTEN), "zero");
        check(pattern.content(7, 2), "stale");
        check(pattern.content(9, 3), "foreign");
    }

    #[test]
    fn every_disk_page_has_its_own_content() {
        let (mut disk, bytes) = (Vec::new(), 1 << 20);
        write_disk_pattern(&mut disk, bytes, 3).expect("write to memory");
        assert_eq!(disk.len() as u64, bytes);
        for (page, bytes) in (0..).zip(disk.chunks(PAGE_SIZE)) {
            assert_eq!(Pattern::new(3).content(page, DISK_VERSION).check_bytes(bytes), None);
        }
    }
}
