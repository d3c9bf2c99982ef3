//! What a page holds, so that any wrong, stale, torn or foreign page is noticed.
//!
//! Words 0 and 1 depend on the page's number and version, word 511 is made of both, and the body
//! depends on the page's number alone. Every word is the output of a mixing function: the page
//! does not compress, so neither zram nor a compressing disk gets it for free.

use std::fmt;

use pagoda_guest::rng::{self, GOLDEN};
use pagoda_sys::toy::ram::{RamPart, WORDS_PER_PAGE};

const LAST_WORD: usize = WORDS_PER_PAGE - 1;
const BODY_FIRST: usize = 2;
const BODY_WORDS: usize = WORDS_PER_PAGE - 3;

/// A page that did not hold what was last written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrongPage {
    page: usize,
    version: u32,
    word: usize,
    expected: u64,
    found: u64,
}

impl fmt::Display for WrongPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { page, version, word, expected, found } = self;
        write!(f, "page {page} version {version} word {word}: expected {expected:#018x}, found {found:#018x}")
    }
}

/// Makes and checks pages of one seed.
#[derive(Debug, Clone, Copy)]
pub struct Pattern {
    seed: u64,
}

impl Pattern {
    pub fn new(seed: u64) -> Self {
        Self { seed: mix(seed) }
    }

    /// Writes all of a page (`local` counts in the part) as version 0.
    pub fn fill(self, part: &mut RamPart<'_>, local: usize) {
        let page = part.first_page() + local;
        for word in BODY_FIRST..LAST_WORD {
            part.store(local, word, self.body(page, word));
        }
        self.write(part, local, 0);
    }

    /// Writes the words that tell the version.
    #[inline]
    pub fn write(self, part: &mut RamPart<'_>, local: usize, version: u32) {
        let [first, second, last] = self.head(part.first_page() + local, version);
        part.store(local, 0, first);
        part.store(local, 1, second);
        part.store(local, LAST_WORD, last);
    }

    /// Checks the version's words and one word of the body, another one each time.
    #[inline]
    pub fn check(self, part: &RamPart<'_>, local: usize, version: u32, turn: u64) -> Result<(), WrongPage> {
        let page = part.first_page() + local;
        let [first, second, last] = self.head(page, version);
        let body_word = BODY_FIRST + turn as usize % BODY_WORDS;
        let body = self.body(page, body_word);
        for (word, expected) in [(0, first), (LAST_WORD, last), (1, second), (body_word, body)] {
            let found = part.load(local, word);
            if found != expected {
                return Err(WrongPage { page, version, word, expected, found });
            }
        }
        Ok(())
    }

    #[inline]
    fn head(self, page: usize, version: u32) -> [u64; 3] {
        let first = mix(self.seed ^ (page as u64) << 32 ^ u64::from(version));
        let second = mix(first);
        [first, second, first ^ second.rotate_left(17) ^ self.seed]
    }

    #[inline]
    fn body(self, page: usize, word: usize) -> u64 {
        mix(self.seed.wrapping_add((page * WORDS_PER_PAGE + word) as u64))
    }
}

/// One step of SplitMix64 from this state.
#[inline]
pub fn mix(value: u64) -> u64 {
    rng::mix(value.wrapping_add(GOLDEN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_sys::toy::ram::{HugePages, PAGE_BYTES, Ram, RamSource};

    #[test]
    fn any_changed_word_is_noticed() {
        let mut ram = Ram::map(RamSource::Anonymous(4 * PAGE_BYTES), HugePages::Refuse).unwrap();
        let pattern = Pattern::new(7);
        let mut parts = ram.split(1);
        let part = &mut parts[0];
        (0..4).for_each(|page| pattern.fill(part, page));
        pattern.write(part, 2, 5);
        assert_eq!(pattern.check(part, 2, 5, 0), Ok(()));
        assert!(pattern.check(part, 2, 4, 0).is_err(), "a stale page");
        for word in 0..WORDS_PER_PAGE {
            let right = part.load(2, word);
            part.store(2, word, right ^ 1);
            let seen = (0..BODY_WORDS as u64).any(|turn| pattern.check(part, 2, 5, turn).is_err());
            assert!(seen, "word {word}");
            part.store(2, word, right);
        }
        // A page in another's place.
        for word in 0..WORDS_PER_PAGE {
            let foreign = part.load(1, word);
            part.store(3, word, foreign);
        }
        assert!(pattern.check(part, 3, 0, 0).is_err());
    }
}
