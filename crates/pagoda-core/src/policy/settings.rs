//! What an operator may set, and what is refused before anything is changed (ESX section 6.1).
//!
//! All amounts are pages; rates are per mille, so that every comparison of the policy is exact. A value of these types is
//! valid by itself; [`admission`](super::admission) looks at what all VMs together were promised.

use std::fmt;
use std::str::FromStr;

use crate::units::{Bytes, PAGE_SIZE, PageCount, SPACE_SIZE_MAX};

/// Shares of a VM of which nothing is said. Proxmox's default; only ratios matter.
pub const SHARES_DEFAULT: Shares = Shares(1000);
/// ESX's limit. With it and [`VMS_MAX`], no product of the exact allocation leaves 128 bits.
pub const SHARES_MAX: u32 = 1_000_000;
/// VMs on one host: four times what vSphere allows, and a plan of them is still made in well under a second.
pub const VMS_MAX: usize = 4096;
/// The largest memory of a VM, in pages.
pub const MEMORY_MAX: PageCount = PageCount(SPACE_SIZE_MAX.0 / PAGE_SIZE);
/// The largest pool. As for a VM: no host has more than four-level paging reaches.
pub const POOL_MAX: PageCount = MEMORY_MAX;
/// "defaults to 75%" (ESX section 5.2).
pub const TAX_DEFAULT: TaxRate = TaxRate(750);
/// At a rate of 1 an idle page would cost infinitely much (k = 1/(1 - tax)); the paper demands a rate below 1.
const TAX_PER_MILLE_MAX: u16 = 999;
/// "100 pages for each 30 second period" (ESX section 5.3).
pub const SAMPLING_DEFAULT: Sampling = Sampling { pages: 100, period_s: 30 };
/// A sampled page costs a zap and a fault: more would be a scan, which is the known trap (EPT flushes).
pub const SAMPLE_PAGES_MAX: u32 = 4096;
/// A longer period says nothing of now.
pub const SAMPLE_PERIOD_S_MAX: u32 = 3600;
/// The default of ESX (`sched.mem.maxmemctl`): a guest squeezed further runs out of memory for itself.
pub const BALLOON_MAX_DEFAULT: PerMille = PerMille(650);
/// As for the names of VMs.
const SHARE_GROUP_LEN_MAX: usize = 64;
/// More than half of the pool kept free is a mistake.
const FREE_GOAL_MAX: u16 = 500;

/// A part is counted in thousandths, so 1000 is the whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PerMille(pub u16);

impl PerMille {
    /// That part of `pages`, rounded up.
    pub const fn of_ceil(self, pages: PageCount) -> PageCount {
        PageCount((pages.0 as u128 * self.0 as u128).div_ceil(1000) as u64)
    }

    /// That part of `pages`, rounded down.
    pub const fn of_floor(self, pages: PageCount) -> PageCount {
        PageCount((pages.0 as u128 * self.0 as u128 / 1000) as u64)
    }
}

/// A part is written as `75 %` or `7.5 %`.
impl fmt::Display for PerMille {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 / 10, self.0 % 10) {
            (whole, 0) => f.pad(&format!("{whole} %")),
            (whole, tenth) => f.pad(&format!("{whole}.{tenth} %")),
        }
    }
}

/// Reads `75%`, `7.5 %`, `0.75`, `1`.
impl FromStr for PerMille {
    type Err = InvalidSettings;

    fn from_str(text: &str) -> Result<PerMille, InvalidSettings> {
        let unreadable = || InvalidSettings::NotAFraction { text: text.to_owned() };
        let (number, places) = match text.trim().strip_suffix('%') {
            Some(percent) => (percent.trim_end(), 1),
            None => (text.trim(), 3),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        // More places than thousandths would be rounded behind the operator's back.
        let fraction = fraction.trim_end_matches('0');
        if !digits(whole) || !(fraction.is_empty() || digits(fraction)) || fraction.len() > places {
            return Err(unreadable());
        }
        let value: u32 = format!("{whole}{fraction:0<places$}").parse().map_err(|_| unreadable())?;
        if value > 1000 {
            return Err(unreadable());
        }
        Ok(PerMille(value as u16))
    }
}

/// The idle memory tax: the greatest part of its idle pages a VM may lose (ESX section 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaxRate(u16);

impl TaxRate {
    /// No tax: shares alone count.
    pub const NONE: TaxRate = TaxRate(0);

    /// A rate of 0 to 999 thousandths.
    ///
    /// # Errors
    /// It is 1 or more.
    pub const fn new(rate: PerMille) -> Result<TaxRate, InvalidSettings> {
        if rate.0 > TAX_PER_MILLE_MAX { Err(InvalidSettings::TaxTooHigh { rate }) } else { Ok(TaxRate(rate.0)) }
    }

    /// The rate as a number.
    pub const fn per_mille(self) -> PerMille {
        PerMille(self.0)
    }
}

/// A VM's weight against the other VMs' (ESX section 5.1): 1 to [`SHARES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shares(u32);

impl Shares {
    /// A number of shares.
    ///
    /// # Errors
    /// It is 0 or beyond [`SHARES_MAX`].
    pub const fn new(shares: u32) -> Result<Shares, InvalidSettings> {
        match shares {
            0 => Err(InvalidSettings::ZeroShares),
            shares if shares > SHARES_MAX => Err(InvalidSettings::TooManyShares { shares }),
            shares => Ok(Shares(shares)),
        }
    }

    /// Gives the number of shares.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// VMs that may share pages with one another. Without a group a VM shares only with itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShareGroup(String);

impl ShareGroup {
    /// A group by its name.
    ///
    /// # Errors
    /// The name is empty, too long, or has other characters than letters, digits, `-`, `_` and `.`.
    pub fn new(name: &str) -> Result<ShareGroup, InvalidSettings> {
        let fits = (1..=SHARE_GROUP_LEN_MAX).contains(&name.len());
        if fits && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
            Ok(ShareGroup(name.to_owned()))
        } else {
            Err(InvalidSettings::BadShareGroup { name: name.to_owned() })
        }
    }

    /// Gives the group's name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// How the working set of a VM is sampled (ESX section 5.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling {
    /// So many pages are sampled in each period.
    pub pages: u32,
    /// A period takes so many seconds.
    pub period_s: u32,
}

/// Free memory at which the reclamation states begin, of the pool (ESX section 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Above it nothing is reclaimed.
    pub high: PerMille,
    /// Below it, balloons reclaim memory.
    pub soft: PerMille,
    /// Below it, page-out reclaims memory too.
    pub hard: PerMille,
    /// Below it VMs above their target are blocked, too.
    pub low: PerMille,
    /// By how much a threshold must be exceeded to leave the state below it.
    pub hysteresis: PerMille,
}

/// "which default to 6%, 4%, 2%, and 1%"; "significantly exceeding" is half a percent of the pool here, half of the
/// smallest gap between two thresholds.
pub const THRESHOLDS_DEFAULT: Thresholds = Thresholds {
    high: PerMille(60),
    soft: PerMille(40),
    hard: PerMille(20),
    low: PerMille(10),
    hysteresis: PerMille(5),
};

impl Thresholds {
    /// Free memory that reclamation drives at, of the pool. Beyond what ends the state `soft`, so that it does end.
    pub const fn free_goal(&self) -> PerMille {
        PerMille(self.high.0 + 2 * self.hysteresis.0)
    }

    const fn check(&self) -> Result<(), InvalidSettings> {
        let ordered = self.high.0 > self.soft.0 && self.soft.0 > self.hard.0 && self.hard.0 > self.low.0;
        if !ordered || self.low.0 == 0 || self.hysteresis.0 == 0 {
            return Err(InvalidSettings::ThresholdsOutOfOrder { thresholds: *self });
        }
        if self.high.0 as u32 + 2 * self.hysteresis.0 as u32 > FREE_GOAL_MAX as u32 {
            return Err(InvalidSettings::ThresholdsTooHigh { thresholds: *self });
        }
        Ok(())
    }
}

/// How fast targets are approached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    /// Pages a second that page-out may take from one VM. Not heeded in the state `low`.
    pub page_out: PageCount,
    /// Pages a second that one balloon's target may grow.
    pub balloon: PageCount,
}

/// Page-out: what a queue of 1 MiB writes does on one NVMe disk without starving page-in (about 512 MiB/s of 2-3 GiB/s).
/// Balloon: 256 MiB/s; the device takes page by page, and a guest that has to reclaim needs time for it.
pub const RATES_DEFAULT: Rates = Rates { page_out: PageCount(131_072), balloon: PageCount(65_536) };

/// What is set for the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSettings {
    /// DRAM for VMs and what they cost beside their memory.
    pub pool: PageCount,
    /// Idle pages are taxed at this rate.
    pub tax: TaxRate,
    /// The reclamation states begin at these parts of the pool.
    pub thresholds: Thresholds,
    /// Page-out and balloons go no faster than this.
    pub rates: Rates,
}

impl HostSettings {
    /// A pool, and the papers' defaults.
    pub const fn new(pool: PageCount) -> HostSettings {
        HostSettings { pool, tax: TAX_DEFAULT, thresholds: THRESHOLDS_DEFAULT, rates: RATES_DEFAULT }
    }

    /// Whether the settings can be used.
    ///
    /// # Errors
    /// The first that cannot.
    pub const fn check(&self) -> Result<(), InvalidSettings> {
        if self.pool.0 == 0 || self.pool.0 > POOL_MAX.0 {
            return Err(InvalidSettings::PoolSize { pool: self.pool });
        }
        if self.rates.page_out.0 == 0 || self.rates.balloon.0 == 0 {
            return Err(InvalidSettings::ZeroRate);
        }
        self.thresholds.check()
    }

    /// What of the pool is kept free.
    pub const fn free_goal(&self) -> PageCount {
        self.thresholds.free_goal().of_ceil(self.pool)
    }
}

/// What is set for a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSettings {
    /// `--memory`, the paper's max: what the guest sees.
    pub memory: PageCount,
    /// `--dram`: a hard cap, at most `memory`.
    pub cap: PageCount,
    /// `--min` is what it is guaranteed in DRAM.
    pub min: PageCount,
    /// `--shares` is its weight against the other VMs.
    pub shares: Shares,
    /// `--share-group` names the VMs that it may share pages with; `None` is itself alone.
    pub share_group: Option<ShareGroup>,
    /// Its working set is sampled like this.
    pub sampling: Sampling,
    /// The largest balloon, of its memory.
    pub balloon_max: PerMille,
    /// `--reserve-swap`: its swap file is allocated up front.
    pub reserve_swap: bool,
}

impl VmSettings {
    /// A VM of this memory without a guarantee or a cap, and defaults for the rest.
    pub const fn new(memory: PageCount) -> VmSettings {
        VmSettings {
            memory,
            cap: memory,
            min: PageCount::ZERO,
            shares: SHARES_DEFAULT,
            share_group: None,
            sampling: SAMPLING_DEFAULT,
            balloon_max: BALLOON_MAX_DEFAULT,
            reserve_swap: false,
        }
    }

    /// Whether the settings can be used.
    ///
    /// # Errors
    /// The first that cannot.
    pub fn check(&self) -> Result<(), InvalidSettings> {
        let Sampling { pages, period_s } = self.sampling;
        if self.memory == PageCount::ZERO || self.memory > MEMORY_MAX {
            return Err(InvalidSettings::MemorySize { memory: self.memory });
        }
        if self.cap == PageCount::ZERO || self.cap > self.memory {
            return Err(InvalidSettings::CapBeyondMemory { cap: self.cap, memory: self.memory });
        }
        if self.min > self.cap {
            return Err(InvalidSettings::MinBeyondCap { min: self.min, cap: self.cap });
        }
        if !(1..=SAMPLE_PAGES_MAX).contains(&pages) || !(1..=SAMPLE_PERIOD_S_MAX).contains(&period_s) {
            return Err(InvalidSettings::Sampling { sampling: self.sampling });
        }
        if self.balloon_max.0 >= 1000 {
            return Err(InvalidSettings::BalloonTakesAll { balloon_max: self.balloon_max });
        }
        Ok(())
    }
}

/// For messages: an amount that is refused may be too many pages to count their bytes.
fn size(pages: PageCount) -> Bytes {
    Bytes(pages.0.saturating_mul(PAGE_SIZE))
}

/// Why no VM or host can have these settings. The messages are for the operator who made them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSettings {
    #[error("{text:?} is not a part of a whole; write it like 75% or 0.75, in steps of a thousandth")]
    NotAFraction { text: String },
    #[error("an idle tax of {rate} would make idle memory worthless; give less than 100 %")]
    TaxTooHigh { rate: PerMille },
    #[error("a VM without shares would lose all memory above its min; give 1 to {SHARES_MAX}")]
    ZeroShares,
    #[error("{shares} shares are too many; give 1 to {SHARES_MAX}: only the ratio to the other VMs' counts")]
    TooManyShares { shares: u32 },
    #[error(
        "{name:?} is not a name of a share group; take up to {SHARE_GROUP_LEN_MAX} letters, digits, '-', '_' and '.'"
    )]
    BadShareGroup { name: String },
    #[error(
        "thresholds of {}, {}, {} and {} with a hysteresis of {} are out of order; give high > soft > hard > low > 0 and a hysteresis above 0",
        thresholds.high, thresholds.soft, thresholds.hard, thresholds.low, thresholds.hysteresis
    )]
    ThresholdsOutOfOrder { thresholds: Thresholds },
    #[error(
        "a threshold high of {} with a hysteresis of {} would keep more than half of the pool free; lower one of them",
        thresholds.high, thresholds.hysteresis
    )]
    ThresholdsTooHigh { thresholds: Thresholds },
    #[error("a pool of {} is no pool; give more than nothing and at most {}", size(*pool), POOL_MAX.bytes())]
    PoolSize { pool: PageCount },
    #[error("with a rate of 0 nothing would ever be reclaimed; give at least one page a second")]
    ZeroRate,
    #[error("a memory of {} is not possible; give more than nothing and at most {}", size(*memory), MEMORY_MAX.bytes())]
    MemorySize { memory: PageCount },
    #[error("a DRAM cap of {} does not lie within the VM's memory of {}; lower the cap", size(*cap), size(*memory))]
    CapBeyondMemory { cap: PageCount, memory: PageCount },
    #[error("a min of {} is more than the VM may have, {}; lower the min or raise the cap", size(*min), size(*cap))]
    MinBeyondCap { min: PageCount, cap: PageCount },
    #[error(
        "{} pages in {} s is no sampling rate; give 1 to {SAMPLE_PAGES_MAX} pages and 1 to {SAMPLE_PERIOD_S_MAX} s",
        sampling.pages, sampling.period_s
    )]
    Sampling { sampling: Sampling },
    #[error("a balloon of {balloon_max} would leave the guest nothing; give less than 100 %")]
    BalloonTakesAll { balloon_max: PerMille },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mib(mib: u64) -> PageCount {
        Bytes::from_mib(mib).pages_floor()
    }

    #[test]
    fn parts_are_read_and_printed() {
        let check =
            |text: &str, expected: Option<u16>| assert_eq!(text.parse().ok(), expected.map(PerMille), "{text:?}");
        check("75%", Some(750));
        check(" 7.5 % ", Some(75));
        check("0.75", Some(750));
        check("0.005", Some(5));
        check("1", Some(1000));
        check("100.0%", Some(1000));
        check("0", Some(0));
        for text in ["", "%", "-1%", "0.0005", "7.55%", "101%", "1.001", "x", ".5", "1.2.3", "9999999999999"] {
            check(text, None);
        }
        assert_eq!((PerMille(750).to_string(), PerMille(75).to_string()), ("75 %".into(), "7.5 %".into()));
    }

    #[test]
    fn parts_of_the_largest_pool_do_not_overflow() {
        assert_eq!(PerMille(1000).of_ceil(POOL_MAX), POOL_MAX);
        assert_eq!(
            (PerMille(1).of_ceil(PageCount(1)), PerMille(1).of_floor(PageCount(1))),
            (PageCount(1), PageCount(0))
        );
    }

    #[test]
    fn bad_settings_are_refused_by_name() {
        let check = |spoil: fn(&mut VmSettings), expected: &str| {
            let mut settings = VmSettings::new(mib(256));
            assert_eq!(settings.check(), Ok(()));
            spoil(&mut settings);
            let message = settings.check().expect_err(expected).to_string();
            assert!(message.contains(expected), "{message}");
        };
        check(|s| s.memory = PageCount(0), "memory of 0 B");
        check(|s| s.memory = PageCount(u64::MAX >> 12), "is not possible");
        check(|s| s.cap = PageCount(65537), "lower the cap");
        check(|s| s.cap = PageCount(0), "cap of 0 B");
        check(|s| (s.cap, s.min) = (mib(100), mib(101)), "min of 101 MiB is more than the VM may have, 100 MiB");
        check(|s| s.sampling.pages = 0, "no sampling rate");
        check(|s| s.sampling.period_s = 3601, "no sampling rate");
        check(|s| s.balloon_max = PerMille(1000), "leave the guest nothing");
        assert!(Shares::new(0).unwrap_err().to_string().contains("without shares"));
        assert!(Shares::new(u32::MAX).unwrap_err().to_string().contains("too many"));
        assert!(TaxRate::new(PerMille(1000)).unwrap_err().to_string().contains("less than 100 %"));
        for name in ["", "a b", "ü", &"x".repeat(65)] {
            assert!(ShareGroup::new(name).is_err(), "{name:?}");
        }
        assert_eq!(ShareGroup::new("tenant-1.a_B").unwrap().name(), "tenant-1.a_B");
    }

    #[test]
    fn bad_host_settings_are_refused_by_name() {
        let check = |spoil: fn(&mut HostSettings), expected: &str| {
            let mut host = HostSettings::new(mib(1024));
            assert_eq!(host.check(), Ok(()));
            spoil(&mut host);
            let message = host.check().expect_err(expected).to_string();
            assert!(message.contains(expected), "{message}");
        };
        check(|h| h.pool = PageCount(0), "no pool");
        check(|h| h.pool = PageCount(u64::MAX), "no pool");
        check(|h| h.thresholds.soft = PerMille(60), "out of order");
        check(|h| h.thresholds.low = PerMille(0), "out of order");
        check(|h| h.thresholds.hysteresis = PerMille(0), "out of order");
        check(|h| h.thresholds.high = PerMille(491), "more than half");
        check(|h| h.thresholds.hysteresis = PerMille(u16::MAX), "more than half");
        check(|h| h.rates.balloon = PageCount(0), "rate of 0");
    }
}
