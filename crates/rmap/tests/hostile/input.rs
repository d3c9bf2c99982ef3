//! An input: bytes that are used up by decisions.

use pagoda_core::chance::Chance;
use rmap::crypto::Entropy;
use rmap::units::{PAGE_SIZE, Page};

/// The bytes that are left. What is asked beyond the end is zero.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.byte()) % end
    }

    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// One of those that may mean something, or any number at all.
    pub fn number(&mut self, likely: &[u64]) -> u64 {
        match self.below(likely.len() + likely.len() / 4 + 1) {
            at if at < likely.len() => likely[at],
            _ => self.word(),
        }
    }
}

/// Numbers that follow from a seed.
#[derive(Debug)]
pub struct Noise(Chance);

impl Noise {
    pub fn new(seed: u64) -> Noise {
        Noise(Chance::new(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.draw()
    }

    pub fn bytes(&mut self, max: u64) -> Vec<u8> {
        (0..self.next() % max).map(|_| self.next() as u8).collect()
    }
}

impl Entropy for Noise {
    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.iter_mut().for_each(|byte| *byte = self.next() as u8);
    }
}

/// A page that says whose it is.
pub fn page_of(page: u64, value: u8) -> Page {
    let mut content = [value; PAGE_SIZE];
    content[..8].copy_from_slice(&page.to_le_bytes());
    content
}
