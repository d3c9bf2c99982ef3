//! The order in which a thread touches the pages of its part.

use clap::ValueEnum;

use super::pattern::mix;

/// Skew of the zipfian workload, YCSB's default.
const ZIPF_THETA: f64 = 0.99;
/// A phase's hot set is this fraction of the RAM: it fits DRAM at 2x and at 4x.
const PHASE_HOT_FRACTION: f64 = 0.2;
/// Of 16 accesses in a phase, this many go to the hot set.
const PHASE_HOT_OF_16: u64 = 15;
/// Hot sets that a run goes through, one after another.
const PHASES: u64 = 4;

/// In which order pages are accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// One page after another, round and round.
    Seq,
    /// Every page equally likely.
    Random,
    /// Zipf(0.99), popular pages scattered.
    Zipf,
    /// A hot set that moves four times in a run.
    Phase,
    /// In turns the next page of a sweep over the first half and a random page of the second.
    Mixed,
}

impl Workload {
    pub fn name(self) -> &'static str {
        match self {
            Self::Seq => "seq",
            Self::Random => "random",
            Self::Zipf => "zipf",
            Self::Phase => "phase",
            Self::Mixed => "mixed",
        }
    }
}

/// xorshift64*: two instructions' worth of chance (Vigna 2016).
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed) | 1)
    }

    /// The next number of 64 bits, which is never 0.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, each as likely as the others.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(limit)) >> 64) as u64
    }

    /// A number from 0 to below 1, each as likely as the others.
    #[inline]
    fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Zipfian ranks by inversion (Gray et al., SIGMOD 1994, as YCSB does it).
#[derive(Debug, Clone)]
struct Zipf {
    items: u64,
    alpha: f64,
    zeta_n: f64,
    eta: f64,
}

impl Zipf {
    fn new(items: u64) -> Self {
        let zeta = |n: u64| (1..=n).map(|rank| (rank as f64).powf(-ZIPF_THETA)).sum::<f64>();
        let zeta_n = zeta(items);
        let eta = (1.0 - (2.0 / items as f64).powf(1.0 - ZIPF_THETA)) / (1.0 - zeta(2) / zeta_n);
        Self { items, alpha: 1.0 / (1.0 - ZIPF_THETA), zeta_n, eta }
    }

    fn rank(&self, chance: &mut Chance) -> u64 {
        let u = chance.unit();
        let scaled = u * self.zeta_n;
        if scaled < 1.0 {
            return 0;
        }
        if scaled < 1.0 + 0.5_f64.powf(ZIPF_THETA) {
            return 1.min(self.items - 1);
        }
        let rank = self.items as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha);
        (rank as u64).min(self.items - 1)
    }
}

/// FNV-1a over the eight bytes of a rank: what YCSB scatters popular items with.
fn fnv1a(value: u64) -> u64 {
    value
        .to_le_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Chooses a thread's next page.
#[derive(Debug, Clone)]
pub struct Chooser {
    workload: Workload,
    pages: u64,
    next_in_order: u64,
    chance: Chance,
    zipf: Option<Zipf>,
}

impl Chooser {
    pub fn new(workload: Workload, pages: usize, seed: u64) -> Self {
        let pages = pages as u64;
        Self {
            workload,
            pages,
            next_in_order: 0,
            chance: Chance::new(seed),
            zipf: (workload == Workload::Zipf).then(|| Zipf::new(pages)),
        }
    }

    /// The next page; `progress` (0 to 1) is how much of the run is over.
    #[inline]
    pub fn next(&mut self, progress: impl FnOnce() -> f64) -> usize {
        let page = match (self.workload, &self.zipf) {
            (Workload::Zipf, Some(zipf)) => fnv1a(zipf.rank(&mut self.chance)) % self.pages,
            (Workload::Random | Workload::Zipf, _) => self.chance.below(self.pages),
            (Workload::Seq, _) => {
                let page = self.next_in_order;
                self.next_in_order = (page + 1) % self.pages;
                page
            }
            (Workload::Phase, _) => self.phase_page(progress()),
            (Workload::Mixed, _) => self.mixed_page(),
        };
        page as usize
    }

    fn mixed_page(&mut self) -> u64 {
        let turn = self.next_in_order;
        self.next_in_order = turn.wrapping_add(1);
        let half = self.pages.div_ceil(2);
        if turn.is_multiple_of(2) { turn / 2 % half } else { (half + self.chance.below(half)).min(self.pages - 1) }
    }

    fn phase_page(&mut self, progress: f64) -> u64 {
        if self.chance.below(16) >= PHASE_HOT_OF_16 {
            return self.chance.below(self.pages);
        }
        let phase = ((progress * PHASES as f64) as u64).min(PHASES - 1);
        let hot = ((self.pages as f64 * PHASE_HOT_FRACTION) as u64).max(1);
        (self.pages * phase / PHASES + self.chance.below(hot)) % self.pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(workload: Workload, pages: usize, draws: usize, progress: f64) -> Vec<u32> {
        let mut chooser = Chooser::new(workload, pages, 42);
        let mut counts = vec![0; pages];
        (0..draws).for_each(|_| counts[chooser.next(|| progress)] += 1);
        counts
    }

    #[test]
    fn sequential_visits_in_order_and_wraps() {
        let mut chooser = Chooser::new(Workload::Seq, 3, 1);
        let got: Vec<_> = (0..5).map(|_| chooser.next(|| 0.0)).collect();
        assert_eq!(got, [0, 1, 2, 0, 1]);
    }

    #[test]
    fn uniform_is_even() {
        let counts = counts(Workload::Random, 100, 100_000, 0.0);
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn zipf_has_its_popularity() {
        // P(rank 1) = 1 / zeta(1000, 0.99) = 0.128; the first 100 of 1000 ranks get 67 %.
        let mut sorted = counts(Workload::Zipf, 1000, 200_000, 0.0);
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let share = |first: usize| f64::from(sorted[..first].iter().sum::<u32>()) / 200_000.0;
        assert!((0.11..0.16).contains(&share(1)), "{}", share(1));
        assert!((0.60..0.75).contains(&share(100)), "{}", share(100));
    }

    #[test]
    fn the_hot_set_moves() {
        let hot_quarter = |progress| {
            let counts = counts(Workload::Phase, 1000, 50_000, progress);
            (0..4).max_by_key(|q| counts[q * 250..(q + 1) * 250].iter().sum::<u32>())
        };
        assert_eq!([0.1, 0.3, 0.6, 1.0].map(hot_quarter), [0, 1, 2, 3].map(Some));
    }

    #[test]
    fn mixed_sweeps_one_half_and_jumps_in_the_other() {
        let mut chooser = Chooser::new(Workload::Mixed, 8, 1);
        let got: Vec<_> = (0..12).map(|_| chooser.next(|| 0.0)).collect();
        let sweep: Vec<_> = got.iter().copied().step_by(2).collect();
        assert_eq!(sweep, [0, 1, 2, 3, 0, 1]);
        assert!(got.iter().skip(1).step_by(2).all(|page| (4..8).contains(page)), "{got:?}");
    }

    #[test]
    fn one_page_is_enough_for_all() {
        for workload in [Workload::Seq, Workload::Random, Workload::Zipf, Workload::Phase, Workload::Mixed] {
            assert_eq!(Chooser::new(workload, 1, 3).next(|| 1.0), 0);
        }
    }
}
