//! The miss-ratio curve of a VM that has no faults, from how long pages stay unused.
//!
//! Pages with content are chosen at random, unmapped, and looked at from time to time until they are mapped again: used. Let
//! F(t) be the number of different pages used in a time t, on average over all times of that length. Of pages chosen so, the
//! part that is used within t is F(t) over all pages with content. F is the average size of the working set of window t, and
//! its slope the rate at which that set is missed (Denning and Schwartz, "Properties of the working-set model", 1972); LRU
//! with F(t) pages misses as often, nearly. So ages alone make a curve, at the price of one fault a chosen page.
//!
//! A page that is still unused tells of the time up to its last look, and nothing of what follows: the estimate is that of a
//! life table (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958), in which it is no bias to
//! stop following some pages by chance. Half of them are let go at each power of two from [`THINNED_FROM_S`] on, so each
//! octave of ages has about as many pages as the one before, and few are followed at a time.
//!
//! **Limits.** Uses within the first second are one distance, "small": below F(1 s) the curve is flat and too low. Pages have to be
//! mapped one by one: of a huge mapping all 2 MiB are used at once, and rates come out many times too high.

use super::{BUCKETS, Curve};
use crate::chance::Chance;
use crate::units::PageCount;

/// Looks at a page: at 1, 2, 3, 4 s, then four an octave, up to 512 s.
pub const LOOKS: usize = 32;
/// Pages are let go by chance from this age on.
pub const THINNED_FROM_S: u64 = 16;
/// Old looks count half after so long; a younger curve fades each time its age has doubled from the second on.
const DECAY_S: f64 = 300.0;
const YOUNG_S: f64 = 30.0;
/// Pages looked at once before there is a curve: chance makes 10 % of the memory of fewer.
const PAGES_MIN: f64 = 100.0;

/// Age of a page at its n-th look, counted from 0, in seconds.
pub const fn age_s(look: usize) -> u64 {
    match look.checked_sub(4) {
        None => look as u64 + 1,
        Some(beyond) => (5 + beyond as u64 % 4) << (beyond / 4),
    }
}

/// A page that is unmapped and looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Age {
    /// The page was looked at so many times.
    looks: usize,
    used: bool,
}

impl Age {
    /// Whether a page that was unmapped so long ago is to be looked at.
    pub const fn is_due(self, age: u64) -> bool {
        age >= age_s(self.looks)
    }

    /// It was used. That counts when it is due.
    pub const fn note_use(&mut self) {
        self.used = true;
    }

    /// Says whether the page was used since it was unmapped.
    pub const fn is_used(self) -> bool {
        self.used
    }
}

/// One step of the life table.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    /// Pages that came to it unused.
    seen: f64,
    /// Of these, used in it.
    used: f64,
}

/// What is known of one VM.
#[derive(Clone, Debug)]
pub struct Footprint {
    memory: PageCount,
    steps: [Step; LOOKS],
    observed_s: f64,
    age_s: f64,
    decay_s: f64,
    chance: Chance,
}

impl Footprint {
    /// For a VM of this size.
    pub fn new(memory: PageCount, seed: u64) -> Footprint {
        let steps = [Step::default(); LOOKS];
        Footprint { memory, steps, observed_s: 0.0, age_s: 0.0, decay_s: YOUNG_S, chance: Chance::new(seed) }
    }

    /// Time goes on, and pages are followed. What was seen fades, so that the curve follows the VM.
    pub fn pass(&mut self, seconds: f64) {
        self.observed_s += seconds;
        self.age_s += seconds;
        if self.age_s >= self.decay_s {
            self.decay_s = self.age_s + self.age_s.clamp(YOUNG_S, DECAY_S);
            self.observed_s /= 2.0;
            self.steps.iter_mut().for_each(|step| (step.seen, step.used) = (step.seen / 2.0, step.used / 2.0));
        }
    }

    /// A page is due, `age` seconds after it was unmapped. Whether it is to be followed further.
    pub fn look(&mut self, page: &mut Age, age: u64) -> bool {
        let used = page.used;
        // A late look tells of all steps up to it; a use may have been in any, and counts in the last.
        let first = page.looks;
        while page.looks < LOOKS && page.is_due(age) {
            self.steps[page.looks].seen += 1.0;
            page.looks += 1;
        }
        if used && page.looks > first {
            self.steps[page.looks - 1].used += 1.0;
        }
        let let_go = (first..page.looks).map(age_s).filter(|at| *at >= THINNED_FROM_S && at.is_power_of_two());
        let let_go = let_go.fold(false, |gone, _| self.chance.below(2) == 0 || gone);
        !used && !let_go && page.looks < LOOKS
    }

    /// The curve under LRU, if `content` pages have content; `None` until enough was seen.
    pub fn curve(&self, content: PageCount) -> Option<Curve> {
        if self.steps[0].seen < PAGES_MIN || self.observed_s <= 0.0 {
            return None;
        }
        let slopes = falling(&self.slopes(content.0 as f64));
        let bucket = PageCount(self.memory.0.div_ceil(BUCKETS).max(1));
        let buckets = self.memory.0.div_ceil(bucket.0) + 1;
        let mut misses: Vec<f64> =
            (0..buckets).map(|index| rate_at(&slopes, content.0 as f64, index * bucket.0)).collect();
        misses.iter_mut().for_each(|rate| *rate *= self.observed_s);
        let hits: Vec<f64> =
            misses.iter().zip(misses.iter().skip(1).chain([&0.0])).map(|(here, next)| here - next).collect();
        Some(Curve::new(bucket, &hits, 0.0).over(self.observed_s))
    }

    /// Steps of F: how many pages are new in each, in how many seconds.
    fn slopes(&self, content: f64) -> Vec<Slope> {
        let (mut unused, mut from) = (1.0, 0);
        let known = self.steps.iter().enumerate().take_while(|(_, step)| step.seen > 0.0);
        known
            .map(|(look, step)| {
                let used = unused * step.used / step.seen;
                let seconds = (age_s(look) - from) as f64;
                (unused, from) = (unused - used, age_s(look));
                Slope { pages: content * used, seconds }
            })
            .collect()
    }
}

/// A straight piece of F.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Slope {
    pages: f64,
    seconds: f64,
}

impl Slope {
    fn rate(self) -> f64 {
        self.pages / self.seconds
    }
}

/// F is concave: what chance makes steeper than what is before it is joined with it ("pool adjacent violators", Ayer and
/// others, 1955).
fn falling(slopes: &[Slope]) -> Vec<Slope> {
    let mut joined: Vec<Slope> = Vec::with_capacity(slopes.len());
    for slope in slopes {
        let mut slope = *slope;
        while let Some(before) = joined.pop_if(|before| before.rate() <= slope.rate()) {
            slope = Slope { pages: before.pages + slope.pages, seconds: before.seconds + slope.seconds };
        }
        joined.push(slope);
    }
    joined
}

/// Misses a second with `size` pages: the slope of F where F is `size`. What was not used as long as anybody looked is used
/// less often than all else, the less the more of it is there.
fn rate_at(slopes: &[Slope], content: f64, size: u64) -> f64 {
    let (size, mut used) = (size as f64, 0.0);
    for slope in slopes {
        used += slope.pages;
        if size < used {
            return slope.rate();
        }
    }
    let least = slopes.last().map_or(0.0, |slope| slope.rate());
    if size < content { least * (content - size) / (content - used) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::super::Mrc;
    use super::super::workloads::Workload;
    use super::*;
    use crate::units::PageIdx;

    #[test]
    fn looks() {
        let ages: Vec<u64> = (0..LOOKS).map(age_s).collect();
        assert_eq!(ages[..13], [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]);
        assert_eq!(ages[LOOKS - 1], 512);
        assert!(ages.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn a_life_table() {
        let mut footprint = Footprint::new(PageCount(1000), 0);
        footprint.pass(10.0);
        // Of 200 pages half are used in the first second; of the others none in the second.
        for nth in 0..200 {
            let mut page = Age::default();
            assert!(page.is_due(1) && !page.is_due(0));
            if nth % 2 == 0 {
                page.note_use();
                assert!(!footprint.look(&mut page, 1));
            } else {
                assert!(footprint.look(&mut page, 1) && !page.is_due(1));
                assert!(footprint.look(&mut page, 2));
            }
        }
        let curve = footprint.curve(PageCount(800)).expect("200 pages are enough");
        // 400 pages are used a second, and none of the other 400.
        assert_eq!((curve.seconds(), curve.accesses()), (10.0, 4000.0));
        assert_eq!([0, 399, 400, 800].map(|size| curve.misses(PageCount(size))), [4000.0, 4000.0, 0.0, 0.0]);
    }

    #[test]
    fn late_looks() {
        let mut footprint = Footprint::new(PageCount(1000), 0);
        let mut page = Age::default();
        page.note_use();
        assert!(!footprint.look(&mut page, 1), "it was used");
        assert_eq!(footprint.steps[0].used, 1.0);
        // Nobody looked for three seconds.
        let mut page = Age::default();
        page.note_use();
        assert!(!footprint.look(&mut page, 3));
        let steps = footprint.steps.map(|step| (step.seen, step.used));
        assert_eq!(steps[..4], [(2.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]);
    }

    #[test]
    fn few_pages_say_nothing() {
        let mut footprint = Footprint::new(PageCount(1000), 0);
        footprint.pass(1.0);
        for _ in 0..99 {
            footprint.look(&mut Age::default(), 1);
        }
        assert_eq!(footprint.curve(PageCount(1000)), None);
    }

    #[test]
    fn chance_makes_nothing_steeper() {
        let slope = |pages, seconds| Slope { pages, seconds };
        let joined = falling(&[slope(9.0, 1.0), slope(2.0, 1.0), slope(6.0, 1.0), slope(1.0, 2.0)]);
        assert_eq!(joined, [slope(9.0, 1.0), slope(8.0, 2.0), slope(1.0, 2.0)]);
    }

    /// Follows pages through a trace as a daemon would, eight a second.
    fn follow(trace: &[PageIdx], pages: u64, per_second: usize, seed: u64) -> Footprint {
        let mut footprint = Footprint::new(PageCount(pages), seed);
        let mut chance = Chance::new(seed);
        // When each page is used next.
        let mut uses = vec![Vec::new(); pages as usize];
        for (at, page) in trace.iter().enumerate() {
            uses[page.0 as usize].push(at / per_second);
        }
        let mut followed: Vec<(PageIdx, u64, Age)> = Vec::new();
        for second in 0..(trace.len() / per_second) as u64 {
            let used = |page: PageIdx, since: u64| {
                let uses = &uses[page.0 as usize];
                uses.get(uses.partition_point(|at| (*at as u64) < since)).is_some_and(|at| (*at as u64) < second)
            };
            followed.retain_mut(|(page, since, age)| {
                let old = second - *since;
                if used(*page, *since) {
                    age.note_use();
                }
                !age.is_due(old) || footprint.look(age, old)
            });
            followed.extend((0..8).map(|_| (PageIdx(chance.below(pages)), second, Age::default())));
            footprint.pass(1.0);
        }
        assert!(followed.len() < 500, "{} pages are followed", followed.len());
        footprint
    }

    #[test]
    fn rates_agree_with_an_exact_replay() {
        const PAGES: u64 = 30_000;
        const SECONDS: usize = 1200;
        for (workload, per_second) in [(Workload::Zipf, 1500), (Workload::Mixed, 1500), (Workload::Scan, 300)] {
            let trace = workload.trace(PAGES, SECONDS * per_second, 5);
            let mut exact = Mrc::new(PageCount(PAGES), usize::MAX, 0);
            trace.iter().for_each(|page| exact.access(*page));
            let exact = exact.curve();
            for seed in 0..3 {
                let curve = follow(&trace, PAGES, per_second, seed).curve(PageCount(PAGES)).expect("enough was seen");
                // From what is used in some seconds on, in parts of the accesses. Here all pages have content at first. Chance moves
                // the cliff of a scan by some percent of the memory.
                let errors: Vec<f64> = (PAGES / 10..PAGES * 9 / 10)
                    .step_by(100)
                    .map(PageCount)
                    .map(|size| {
                        let expected = (exact.misses(size) + exact.cold()) / SECONDS as f64;
                        (curve.misses(size) / curve.seconds() - expected).abs() / per_second as f64
                    })
                    .collect();
                assert!(
                    curve.misses(PageCount(PAGES)) < curve.misses(PageCount(PAGES / 2)) / 10.0,
                    "all pages are enough"
                );
                let mean = errors.iter().sum::<f64>() / errors.len() as f64;
                assert!(mean < 0.05, "{} with seed {seed}: {mean}", workload.name());
            }
        }
    }
}
