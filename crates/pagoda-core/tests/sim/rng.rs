//! Chance, from a printed seed.

use pagoda_core::chance::{Chance, STEP};

#[derive(Clone, Debug)]
pub struct Rng(Chance);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        // As ever: what was printed as a seed begins the same stream.
        Rng(Chance::new(seed.wrapping_mul(STEP) ^ 0x5851_f42d_4c95_7f2d))
    }

    pub fn next(&mut self) -> u64 {
        self.0.draw()
    }

    /// Draws a number in `0 .. n`, or 0 if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// Draws a number in `low ..= high`.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub fn per_mille(&mut self, chance: usize) -> bool {
        self.below(1000) < chance
    }

    pub fn coin(&mut self) -> bool {
        self.per_mille(500)
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }
}
