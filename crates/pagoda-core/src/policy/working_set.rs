//! How much of its memory a VM is using: statistical sampling (ESX section 5.3).
//!
//! At the start of each period a few pages of the VM are chosen at random and unmapped; of n pages, the t that are touched
//! until its end give the active fraction t / n of *all* its memory: pages in swap or never touched count, too, for a
//! touch of those is a fault as well. Three averages are kept and the largest is the estimate, so that it rises at once and
//! falls slowly:
//!
//! * *slow* and *fast*: exponentially weighted over whole periods, with the gains below;
//! * *current*: the fast average as it would be if the period ended now, so that a burst shows before its period ends.
//!
//! **Choice of pages.** The paper draws them uniformly from the whole VM. Here each is drawn uniformly from its own n-th of
//! the VM: every page is as likely as before, and the estimate has never a larger variance, and a smaller one where
//! neighbours are used together. With n = 100 and half of the memory in use, one period is off by 5 % of the memory or less
//! in two cases of three; the moving averages halve that.
//!
//! **Before the first period ends** nothing is known, and all memory counts as active: nobody is taxed unheard.

use super::settings::Sampling;
use crate::chance::Chance;
use crate::units::{PageCount, PageIdx};

/// A fraction, in billionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fraction(u32);

const BILLION: u64 = 1_000_000_000;

impl Fraction {
    /// This is the whole: a billion billionths.
    pub const ONE: Fraction = Fraction(BILLION as u32);

    /// `part` of `whole`, at most all of it.
    fn of(part: u32, whole: u32) -> Fraction {
        let billionths = u64::from(part.min(whole)) * BILLION / u64::from(whole.max(1));
        Fraction(billionths as u32)
    }

    /// That part of `pages`, rounded up: a page that may be used is one.
    pub fn of_ceil(self, pages: PageCount) -> PageCount {
        PageCount((u128::from(pages.0) * u128::from(self.0)).div_ceil(u128::from(BILLION)) as u64)
    }

    /// This much of the way from here to `value`.
    fn toward(self, value: Fraction, gain: Gain) -> Fraction {
        let (old, new) = (u64::from(self.0), u64::from(value.0));
        Fraction(((old * (GAIN_ONE - gain.0) + new * gain.0) / GAIN_ONE) as u32)
    }

    /// Gives the fraction in percent, for people to read.
    pub fn as_percent(self) -> f64 {
        f64::from(self.0) / 1e7
    }
}

/// Weight of the newest period in a moving average, in sixteenths.
#[derive(Clone, Copy)]
struct Gain(u64);

const GAIN_ONE: u64 = 16;
/// 1/8: half of an old working set is forgotten after 5 periods, 2.5 minutes (the slow decay of ESX figure 6).
const SLOW: Gain = Gain(2);
/// 3/4: after two periods 94 % of a step is seen; the paper gives no gains, and the bar is 90 % after two.
const FAST: Gain = Gain(12);

/// The three averages and what follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Estimate {
    /// This average goes over many periods.
    pub slow: Fraction,
    /// This average goes over the last few periods.
    pub fast: Fraction,
    /// The fast one with what this period has shown so far.
    pub current: Fraction,
    /// The largest of them, of the VM's memory.
    pub working_set: PageCount,
    /// Whether a period has ended at all.
    pub known: bool,
}

/// What became of the sampled pages so far in this period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleCount {
    /// Pages that were unmapped and are watched; fewer than asked for where some cannot be.
    pub watched: u32,
    /// So many of these were touched since.
    pub touched: u32,
}

/// The estimator of one VM.
#[derive(Clone, Debug)]
pub struct Estimator {
    memory: PageCount,
    sampling: Sampling,
    averages: Option<(Fraction, Fraction)>,
    count: SampleCount,
}

impl Estimator {
    /// Of a VM of this size.
    pub fn new(memory: PageCount, sampling: Sampling) -> Estimator {
        Estimator { memory, sampling, averages: None, count: SampleCount::default() }
    }

    /// Another rate, from the next period on.
    pub fn set_sampling(&mut self, sampling: Sampling) {
        self.sampling = sampling;
    }

    /// Ends the period and starts the next: the pages to unmap, in ascending order. A period in which nothing could be
    /// watched says nothing and is dropped.
    pub fn start_period(&mut self, chance: &mut Chance) -> Vec<PageIdx> {
        let SampleCount { watched, touched } = std::mem::take(&mut self.count);
        if watched > 0 {
            let seen = Fraction::of(touched, watched);
            let (slow, fast) = self.averages.unwrap_or((seen, seen));
            self.averages = Some((slow.toward(seen, SLOW), fast.toward(seen, FAST)));
        }
        choose(self.memory, self.sampling.pages, chance)
    }

    /// What became of the period's pages until now.
    pub fn observe(&mut self, count: SampleCount) {
        self.count = SampleCount { watched: count.watched, touched: count.touched.min(count.watched) };
    }

    /// The estimate as of now.
    pub fn estimate(&self) -> Estimate {
        let Some((slow, fast)) = self.averages else {
            let all = Fraction::ONE;
            return Estimate { slow: all, fast: all, current: all, working_set: self.memory, known: false };
        };
        let current = match self.count.watched {
            0 => fast,
            watched => fast.toward(Fraction::of(self.count.touched, watched), FAST),
        };
        let working_set = slow.max(fast).max(current).of_ceil(self.memory);
        Estimate { slow, fast, current, working_set, known: true }
    }
}

/// One page from each `count`-th of the memory; all of a memory that has no more pages.
fn choose(memory: PageCount, count: u32, chance: &mut Chance) -> Vec<PageIdx> {
    let count = u64::from(count).min(memory.0);
    let border = |nth: u64| (u128::from(memory.0) * u128::from(nth) / u128::from(count)) as u64;
    (0..count).map(|nth| PageIdx(border(nth) + chance.below(border(nth + 1) - border(nth)))).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::settings::SAMPLING_DEFAULT;

    const MEMORY: PageCount = PageCount(100_000);

    /// An estimator fed with one exact fraction, in percent, per period.
    fn fed(percents: &[u32]) -> Estimator {
        let mut estimator = Estimator::new(MEMORY, SAMPLING_DEFAULT);
        let mut chance = Chance::new(1);
        for &touched in percents {
            assert_eq!(estimator.start_period(&mut chance).len(), 100);
            estimator.observe(SampleCount { watched: 100, touched });
        }
        estimator.start_period(&mut chance);
        estimator
    }

    fn percent(estimator: &Estimator) -> u64 {
        estimator.estimate().working_set.0 / 1000
    }

    #[test]
    fn the_largest_average_counts() {
        let check = |percents: &[u32], expected: u64| assert_eq!(percent(&fed(percents)), expected, "{percents:?}");
        check(&[], 100);
        check(&[20], 20);
        // Up by the fast one: 20 -> 80 -> 95; 94 % of the step after two periods.
        check(&[20, 100], 80);
        check(&[20, 100, 100], 95);
        // Down by the slow one: an eighth of the way each period.
        check(&[80, 0], 70);
        check(&[80, 0, 0], 61);
    }

    #[test]
    fn a_burst_shows_before_its_period_ends() {
        let mut estimator = fed(&[20, 20]);
        estimator.observe(SampleCount { watched: 100, touched: 0 });
        assert_eq!(percent(&estimator), 20, "a period that has just begun takes nothing away");
        estimator.observe(SampleCount { watched: 100, touched: 60 });
        assert_eq!(percent(&estimator), 50);
        estimator.observe(SampleCount { watched: 100, touched: 100 });
        assert_eq!(percent(&estimator), 80);
    }

    #[test]
    fn a_period_without_a_watched_page_says_nothing() {
        let mut estimator = fed(&[40]);
        estimator.start_period(&mut Chance::new(2));
        assert_eq!(percent(&estimator), 40);
        estimator.observe(SampleCount { watched: 10, touched: 4000 });
        estimator.start_period(&mut Chance::new(2));
        assert_eq!(percent(&estimator), 85, "more touched than watched counts as all");
    }

    #[test]
    fn decay_is_monotone() {
        let mut estimator = fed(&[90]);
        let mut chance = Chance::new(3);
        let mut before = estimator.estimate().working_set;
        for _ in 0..60 {
            estimator.observe(SampleCount { watched: 100, touched: 10 });
            estimator.start_period(&mut chance);
            let now = estimator.estimate().working_set;
            assert!(now <= before);
            before = now;
        }
        assert!((9_900..10_200).contains(&before.0), "{before}");
    }

    #[test]
    fn every_page_is_as_likely() {
        const PAGES: usize = 1000;
        let mut chance = Chance::new(4);
        let mut drawn = [0u32; PAGES];
        for _ in 0..20_000 {
            choose(PageCount(PAGES as u64), 30, &mut chance).iter().for_each(|page| drawn[page.0 as usize] += 1);
        }
        // 600 each; strata of 33 and 34 pages differ by 3 %, chance by 4 % at one standard deviation.
        assert!(drawn.iter().all(|count| (450..750).contains(count)));
    }

    proptest! {
        #[test]
        fn chosen_pages_differ_and_exist(memory in 1..1u64 << 36, count in 1..4096u32, seed in any::<u64>()) {
            let pages = choose(PageCount(memory), count, &mut Chance::new(seed));
            prop_assert_eq!(pages.len() as u64, u64::from(count).min(memory));
            prop_assert!(pages.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(pages.last().unwrap().0 < memory);
        }

        #[test]
        fn estimates_lie_between_the_extremes(percents in proptest::collection::vec(0..=100u32, 1..20)) {
            let set = fed(&percents).estimate().working_set.0;
            let (low, high) = (percents.iter().min().unwrap(), percents.iter().max().unwrap());
            prop_assert!(u64::from(*low) * 999 <= set && set <= u64::from(*high) * 1000);
        }
    }
}
