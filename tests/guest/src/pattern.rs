//! What a page carries: 512 words computed from (seed, page number, version), so that a page that was lost (zeros),
//! is stale (an older version), belongs elsewhere or is torn differs from what is expected in every word checked.
//!
//! A pattern with a corpus has in most pages what real programs have there, between words of its own.

use std::io::{self, Write};

use crate::rng::{GOLDEN, mix};
use crate::{DISK_VERSION, PAGE_SIZE, WORDS_PER_PAGE};

/// The version of a page never written: all zeros.
pub const UNWRITTEN: u32 = 0;

/// How far back a wrong page is searched for, to call it stale; more versions than any page has in flight.
const STALE_VERSIONS_SEARCHED: u32 = 64;

/// Of pages of a pattern with a corpus, one in so many is without it: what was compressed or encrypted before.
const WITHOUT_CORPUS_ONE_IN: u64 = 4;

/// In a page with a corpus each word whose number is this, modulo [`OWN_WORDS_EVERY`], tells the page from all others. So do the
/// words that are always checked.
const OWN_WORD: usize = 32;
const OWN_WORDS_EVERY: usize = 64;

/// A page's next version has the corpus's page so much further on: it is another one.
const CORPUS_STEP: u64 = 61;

#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    seed: u64,
    /// Whole pages; none: no corpus.
    corpus: &'static [u64],
}

/// The words of one page in one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageContent {
    /// 0 for a page never written; no written page has it, see `Pattern::content`.
    key: u64,
    /// What it has between its own words; nothing if all are its own.
    corpus: &'static [u64],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mismatch {
    pub word: usize,
    pub expected: u64,
    pub got: u64,
}

impl Pattern {
    pub fn new(seed: u64) -> Self {
        Self { seed: mix(seed.wrapping_add(GOLDEN)), corpus: &[] }
    }

    /// The same with pages of this corpus in most of its pages, in their order. What is no whole page is left out.
    #[must_use]
    pub fn with_corpus(self, corpus: &'static [u64]) -> Self {
        Self { corpus: &corpus[..corpus.len() / WORDS_PER_PAGE * WORDS_PER_PAGE], ..self }
    }

    pub fn content(&self, page: u64, version: u32) -> PageContent {
        if version == UNWRITTEN {
            return PageContent { key: 0, corpus: &[] };
        }
        let key = mix(self.seed ^ mix(page.wrapping_mul(GOLDEN) ^ u64::from(version)));
        // Odd, so never 0.
        PageContent { key: key | 1, corpus: self.corpus_of(page, version) }
    }

    fn corpus_of(&self, page: u64, version: u32) -> &'static [u64] {
        let pages = (self.corpus.len() / WORDS_PER_PAGE) as u64;
        if pages == 0 || mix(page).is_multiple_of(WITHOUT_CORPUS_ONE_IN) {
            return &[];
        }
        let number = page.wrapping_add(CORPUS_STEP.wrapping_mul(u64::from(version))) % pages;
        &self.corpus[number as usize * WORDS_PER_PAGE..][..WORDS_PER_PAGE]
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

/// Words of a page that each check looks at.
const CHECKED_WORDS: [usize; 3] = [0, WORDS_PER_PAGE / 2 - 1, WORDS_PER_PAGE - 1];

/// Whether a page with a corpus has a word of its own here.
fn is_own(index: usize) -> bool {
    index % OWN_WORDS_EVERY == OWN_WORD || CHECKED_WORDS.contains(&index)
}

impl PageContent {
    fn word(self, index: usize) -> u64 {
        // Multiplication by the odd constant keeps the words of one page distinct; no word is 0 because the
        // key is odd and the added part even.
        if self.key == 0 {
            0
        } else if self.corpus.is_empty() || is_own(index) {
            self.key.wrapping_add((index as u64).wrapping_mul(GOLDEN) << 1)
        } else {
            self.corpus[index]
        }
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
        let [first, middle, last] = CHECKED_WORDS;
        [first, middle, last, salt as usize % WORDS_PER_PAGE].into_iter().find_map(|word| self.check_word(page, word))
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
    fn pages_with_a_corpus_have_it_between_their_own_words() {
        let corpus: &'static [u64] = vec![7; 3 * WORDS_PER_PAGE + 1].leak();
        let pattern = Pattern::new(1).with_corpus(corpus);
        let page = (0..).find(|page| !pattern.content(*page, 1).corpus.is_empty()).expect("most have it");
        let mut words = vec![0; WORDS_PER_PAGE];
        pattern.content(page, 3).fill(&mut words);
        assert_eq!((0..WORDS_PER_PAGE).filter(|word| words[*word] != 7).count(), WORDS_PER_PAGE / OWN_WORDS_EVERY + 3);
        assert_eq!(pattern.content(page, 3).check_all(&words), None);
        for (page, version) in [(page, 2), (page, 4), (page + 1, 3)] {
            assert!(pattern.content(page, version).check_sample(&words, 1).is_some(), "{page} {version}");
        }
        let with = (0..1000).filter(|page| !pattern.content(*page, 1).corpus.is_empty()).count();
        assert!((700..800).contains(&with), "{with}");
        assert_eq!(pattern.content(page, UNWRITTEN).check_all(&[0; WORDS_PER_PAGE]), None);
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
