//! A finished curve.

use crate::units::PageCount;

/// Misses by size.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    bucket: PageCount,
    /// `misses[i]`: at `i * bucket` pages. The last: at all memory or more.
    misses: Vec<f64>,
    accesses: f64,
    cold: f64,
}

impl Curve {
    /// From hits by distance in steps of `bucket`, the last being everything beyond, and first uses.
    pub(super) fn new(bucket: PageCount, histogram: &[f64], cold: f64) -> Curve {
        let mut left = histogram.iter().sum::<f64>();
        let accesses = left + cold;
        let mut misses = Vec::with_capacity(histogram.len());
        for count in histogram {
            misses.push(left.max(0.0));
            left -= count;
        }
        Curve { bucket, misses, accesses, cold }
    }

    /// Accesses that the curve stands on.
    pub fn accesses(&self) -> f64 {
        self.accesses
    }

    /// First uses, which miss at every size but cost no read from swap.
    pub fn cold(&self) -> f64 {
        self.cold
    }

    /// Accesses that would miss with so many pages, first uses left out: reads from swap over the time observed.
    pub fn misses(&self, size: PageCount) -> f64 {
        let last = self.misses.len() - 1;
        let (index, rest) = ((size.0 / self.bucket.0) as usize, size.0 % self.bucket.0);
        if index >= last {
            return self.misses[last];
        }
        let part = rest as f64 / self.bucket.0 as f64;
        self.misses[index] + (self.misses[index + 1] - self.misses[index]) * part
    }

    /// The part of accesses that would miss with so many pages, first uses included. 0 where nothing was accessed.
    pub fn miss_ratio(&self, size: PageCount) -> f64 {
        if self.accesses <= 0.0 { 0.0 } else { ((self.misses(size) + self.cold) / self.accesses).clamp(0.0, 1.0) }
    }

    /// The curve's points: size and miss ratio.
    pub fn points(&self) -> impl Iterator<Item = (PageCount, f64)> + '_ {
        (0..self.misses.len()).map(|index| {
            let size = PageCount(index as u64 * self.bucket.0);
            (size, self.miss_ratio(size))
        })
    }

    /// The smallest size whose miss ratio is at most `ratio` beyond that of all memory.
    pub fn size_for(&self, ratio: f64) -> PageCount {
        let least = self.points().last().map_or(0.0, |(_, ratio)| ratio);
        let found = self.points().find(|(_, at)| *at <= least + ratio);
        found.map_or(PageCount::ZERO, |(size, _)| size)
    }
}
