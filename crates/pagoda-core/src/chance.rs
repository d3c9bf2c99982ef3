//! Chance from a seed: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
//!
//! It is good for samples and simulations, and not for secrets, because the numbers can be guessed. The same seed gives
//! the same numbers on every machine, so what is printed as a seed can be run again.

/// A stream of numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chance(u64);

/// What a stream's state grows by in each step: the odd number nearest to 2^64 divided by the golden ratio.
pub const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Chance {
    /// The stream of `seed`.
    pub const fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    /// Any number, each as likely as every other.
    pub const fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mix(self.0)
    }

    /// `0 .. limit`, or 0 where the limit is 0. The bias is below `limit` / 2^64.
    pub const fn below(&mut self, limit: u64) -> u64 {
        ((self.draw() as u128 * limit as u128) >> 64) as u64
    }

    /// Draws a number in `low ..= high`. Panics if the range is empty, or has every `u64`.
    pub const fn within(&mut self, low: u64, high: u64) -> u64 {
        assert!(low <= high && high - low < u64::MAX, "an empty or unbounded range");
        low + self.below(high - low + 1)
    }

    /// True in `chance` of 1000 draws.
    pub const fn per_mille(&mut self, chance: u64) -> bool {
        self.below(1000) < chance
    }
}

/// SplitMix64's finisher: every bit of the result depends on every bit of `x`. One to one.
pub const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_the_published_one() {
        // First numbers of the reference implementation for the seed 1234567.
        let mut chance = Chance::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!([chance.draw(), chance.draw(), chance.draw()], expected);
    }

    #[test]
    fn ranges_are_kept_and_filled() {
        let mut chance = Chance::new(7);
        let mut seen = [0u32; 6];
        for _ in 0..6000 {
            seen[chance.within(2, 5) as usize] += 1;
        }
        assert_eq!(seen[..2], [0, 0]);
        assert!(seen[2..].iter().all(|&count| (1350..1650).contains(&count)), "{seen:?}");
        assert_eq!(chance.below(0), 0);
    }
}
