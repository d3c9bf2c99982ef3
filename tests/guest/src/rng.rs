//! Seeded pseudo-random numbers: the same seed gives the same accesses, on the host and in the guest.

/// SplitMix64's increment, 2^64 divided by the golden ratio (Steele, Lea, Flood: Fast Splittable PRNGs, 2014).
pub const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finalizer: every input bit changes about half of the output's bits.
#[inline]
pub fn mix(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// A number below `bound`, which must not be 0; the bias of `bound / 2^64` does not matter here.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn percent(&mut self, percent: u32) -> bool {
        self.below(100) < u64::from(percent)
    }
}

/// Ranks 0..n, rank k with a probability in proportion to (k + 1)^-exponent, by rejection-inversion (Hörmann and
/// Derflinger, 1996): no table, no sum over n.
#[derive(Debug, Clone)]
pub struct Zipf {
    exponent: f64,
    ranks: f64,
    integral_first: f64,
    integral_last: f64,
    accept: f64,
}

impl Zipf {
    /// `exponent` must not be 1, where the integral has another form.
    pub fn new(ranks: u64, exponent: f64) -> Self {
        let mut zipf = Self { exponent, ranks: ranks as f64, integral_first: 0.0, integral_last: 0.0, accept: 0.0 };
        zipf.integral_first = zipf.integral(1.5) - 1.0;
        zipf.integral_last = zipf.integral(zipf.ranks + 0.5);
        zipf.accept = 2.0 - zipf.integral_inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    pub fn rank(&self, rng: &mut Rng) -> u64 {
        loop {
            let area = self.integral_last + rng.unit() * (self.integral_first - self.integral_last);
            let x = self.integral_inverse(area);
            let k = x.round().clamp(1.0, self.ranks);
            if k - x <= self.accept || area >= self.integral(k + 0.5) - self.weight(k) {
                return k as u64 - 1;
            }
        }
    }

    fn weight(&self, x: f64) -> f64 {
        x.powf(-self.exponent)
    }

    fn integral(&self, x: f64) -> f64 {
        (x.powf(1.0 - self.exponent) - 1.0) / (1.0 - self.exponent)
    }

    fn integral_inverse(&self, area: f64) -> f64 {
        (1.0 + area * (1.0 - self.exponent)).powf(1.0 / (1.0 - self.exponent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_numbers_within_bounds() {
        let (mut a, mut b) = (Rng::new(7), Rng::new(7));
        for bound in 1..1000 {
            let number = a.below(bound);
            assert!(number < bound);
            assert_eq!(number, b.below(bound));
        }
        assert_ne!(Rng::new(7).next_u64(), Rng::new(8).next_u64());
    }

    #[test]
    fn zipf_follows_its_law() {
        let (ranks, draws) = (1000, 200_000);
        let zipf = Zipf::new(ranks, 0.99);
        let mut rng = Rng::new(1);
        let mut counts = vec![0u64; ranks as usize];
        for _ in 0..draws {
            counts[zipf.rank(&mut rng) as usize] += 1;
        }
        let total: f64 = (1..=ranks).map(|k| (k as f64).powf(-0.99)).sum();
        for rank in [0usize, 1, 9, 99] {
            let expected = draws as f64 * ((rank + 1) as f64).powf(-0.99) / total;
            let error = (counts[rank] as f64 - expected).abs();
            assert!(error < 5.0 * expected.sqrt(), "rank {rank}: {} draws, expected {expected:.0}", counts[rank]);
        }
    }
}
