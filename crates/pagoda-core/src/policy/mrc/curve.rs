//! A finished curve says how many accesses miss at each size, and what a pager that works by chunks makes of that.

use crate::units::PageCount;

/// A curve gives the misses at each size.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    bucket: PageCount,
    /// `misses[i]`: at `i * bucket` pages. The last: at all memory or more.
    misses: Vec<f64>,
    accesses: f64,
    cold: f64,
    seconds: f64,
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
        Curve { bucket, misses, accesses, cold, seconds: 0.0 }
    }

    /// The same, observed in so many seconds.
    pub fn over(self, seconds: f64) -> Curve {
        Curve { seconds, ..self }
    }

    /// What a pager makes of it that takes pages out in chunks, and keeps so many pages free below each size.
    ///
    /// Let F(t) be the number of different pages used in t. Under LRU F' = misses(F), in pages by the time observed (Denning
    /// and Schwartz, "Properties of the working-set model", 1972), so this curve tells F. Where pages in use are scattered
    /// over all chunks, one chunk is as old as another: each is emptied once in T, fills up with what is used of it, and is
    /// emptied again. Then DRAM holds the mean of F over T, and F(T) pages are read in each T. Nothing is fitted.
    ///
    /// A sweep goes through chunks one by one; LRU tells them apart, and this is too low for it near the size at which it fits.
    pub fn of_chunks(&self, kept_free: impl Fn(PageCount) -> f64) -> Curve {
        let misses = self.emptied_in_turn();
        let misses = (0..self.misses.len() as u64).map(|index| {
            let size = PageCount(index * self.bucket.0);
            at(&misses, (size.0 as f64 - kept_free(size)).max(0.0))
        });
        Curve { misses: misses.collect(), ..*self }
    }

    /// Sizes and misses if DRAM is emptied as a whole, part after part in turn. Both ends are those of LRU.
    fn emptied_in_turn(&self) -> Vec<(f64, f64)> {
        let width = self.bucket.0 as f64;
        let mut points = vec![(0.0, self.misses[0])];
        // F(T), T as a part of the time observed, and the integral of F up to T.
        let (mut used, mut time, mut area) = (0.0, 0.0, 0.0);
        for pair in self.misses.windows(2) {
            let rate = (pair[0] + pair[1]) / 2.0 + self.cold;
            if rate <= 0.0 {
                break;
            }
            let step = width / rate;
            area += step * (used + width / 2.0);
            time += step;
            used += width;
            points.push((area / time, used / time - self.cold));
        }
        // From here on T only grows, which is a straight line to where everything fits.
        points.push((used, self.misses[(used / width) as usize]));
        points
    }

    /// Accesses that the curve stands on.
    pub fn accesses(&self) -> f64 {
        self.accesses
    }

    /// How long it was observed, old times fading as uses do; 0 if nobody knows.
    pub fn seconds(&self) -> f64 {
        self.seconds
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

/// Between points that go down; flat beyond the last.
fn at(points: &[(f64, f64)], size: f64) -> f64 {
    let next = points.partition_point(|(at, _)| *at <= size);
    let (Some(below), Some(above)) = (points.get(next.wrapping_sub(1)), points.get(next)) else {
        return points.last().map_or(0.0, |(_, misses)| *misses);
    };
    below.1 + (above.1 - below.1) * (size - below.0) / (above.0 - below.0)
}
