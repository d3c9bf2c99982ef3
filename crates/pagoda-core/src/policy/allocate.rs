//! Targets by shares with the idle memory tax (ESX sections 5.1 and 5.2), solved exactly.
//!
//! A VM with S shares and P pages, of which a fraction f is active, pays for each page
//!
//! ```text
//! rho = S / (P * (f + k * (1 - f)))        k = 1 / (1 - tax)
//! ```
//!
//! and min-funding revocation takes the next page from the VM that pays least. The active pages are the working set W, as
//! far as it fits: f = min(P, W) / P. So the divisor is `min(P, W) + k * (P - W)` where P is above W: an idle page costs k
//! times what an active one costs. It grows with P, rho falls, and the end of all revocation is one price for all: those
//! pages are kept that are paid best, each VM's n-th page at rho(n). A VM is never below its min or above its ceiling.
//!
//! [`allocate`] finds that end without taking page by page. With x = 1 / rho as the level, each VM's pages are a line in x
//! between its min and its ceiling, with a bend at W: water-filling. The level where the sum is the pool is found by a
//! sweep over the 3 n ends and bends in order, O(n log n). All numbers are whole, multiplied by the tax's denominators, so
//! the result is that of the page-by-page process to the page, ties included (`tests.rs` holds it to that).
//!
//! What follows from it, and is tested: targets sum to at most the pool; more shares never mean less; a higher tax never
//! takes from a VM without idle pages, and never gives to a VM with nothing but.
//!
//! **Bounds.** Pages are below 2^36 and shares below 2^20 ([`super::settings`]), VMs at most 2^12: the largest product is
//! below 2^100.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::settings::{MEMORY_MAX, POOL_MAX, Shares, TaxRate, VMS_MAX};
use crate::units::{Bytes, PageCount};

#[cfg(test)]
mod tests;

/// What one VM brings into the allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Its shares are its weight against the other VMs.
    pub shares: Shares,
    /// It gets no less.
    pub min: PageCount,
    /// It gets no more. At least the min.
    pub ceiling: PageCount,
    /// Pages in active use.
    pub working_set: PageCount,
}

/// An allocation says how many pages each VM gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// In the order of the claims.
    pub pages: Vec<PageCount>,
    /// What the mins lack: above 0, everyone has its min and the pool is overdrawn by this.
    pub shortfall: PageCount,
    /// The price that all pay who are neither at their min nor at their ceiling.
    pub clearing: Clearing,
}

/// What a page costs under an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clearing {
    /// Nothing: there is enough for all.
    Free,
    /// The inverse of the price, as a fraction.
    At { num: u128, den: u128 },
    /// More than anybody pays: there is nothing above the mins.
    Nothing,
}

/// What a VM pays for its pages: adjusted shares per page. Compared exactly.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    shares: u64,
    /// `P * (f + k * (1 - f))`, times `1000 - tax`.
    cost: u64,
    active_weight: u64,
}

impl Price {
    /// For people: adjusted shares per GiB. Of no pages it is infinite.
    pub fn shares_per_gib(self) -> f64 {
        let pages_per_gib = Bytes::from_gib(1).pages_floor().0 as f64;
        self.shares as f64 * pages_per_gib * self.active_weight as f64 / self.cost as f64
    }

    fn key(self) -> Level {
        Level { num: self.cost, den: self.shares }
    }
}

impl PartialEq for Price {
    fn eq(&self, other: &Price) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Price {}
impl PartialOrd for Price {
    fn partial_cmp(&self, other: &Price) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
/// Prices are comparable only under the same tax.
impl Ord for Price {
    fn cmp(&self, other: &Price) -> Ordering {
        other.key().cmp(&self.key())
    }
}

/// The water's level, the inverse of a price: `num / den`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Level {
    num: u64,
    den: u64,
}

impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Level) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Level {
    fn cmp(&self, other: &Level) -> Ordering {
        let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
        product(self.num, other.den).cmp(&product(other.num, self.den))
    }
}

/// The denominator of the tax: thousandths.
const WHOLE: u64 = 1000;

/// The tax as weights of pages: an active page costs `active`, an idle one [`WHOLE`], which is k times as much.
#[derive(Clone, Copy)]
struct Weights {
    active: u64,
}

impl Weights {
    fn new(tax: TaxRate) -> Weights {
        Weights { active: WHOLE - u64::from(tax.per_mille().0) }
    }

    /// What `pages` cost a VM with this claim.
    fn cost(self, claim: &Claim, pages: u64) -> u64 {
        let active = pages.min(claim.working_set.0);
        self.active * active + WHOLE * (pages - active)
    }

    /// The pages that can be had for `cost`.
    fn pages_floor(self, claim: &Claim, cost: u128) -> u64 {
        let active_cost = u128::from(self.active) * u128::from(claim.working_set.0);
        let pages = match cost.checked_sub(active_cost) {
            None => cost / u128::from(self.active),
            Some(idle_cost) => u128::from(claim.working_set.0) + idle_cost / u128::from(WHOLE),
        };
        u64::try_from(pages).unwrap_or(u64::MAX)
    }

    fn level(self, claim: &Claim, pages: u64) -> Level {
        Level { num: self.cost(claim, pages), den: u64::from(claim.shares.get()) }
    }

    /// Times this, pages are whole numbers of every line's terms.
    fn scale(self) -> i128 {
        i128::from(WHOLE * self.active)
    }

    /// Pages as a line in the level while they are active ones.
    fn active_line(self, claim: &Claim) -> Line {
        Line { at_zero: 0, slope: i128::from(WHOLE) * i128::from(claim.shares.get()) }
    }

    /// Pages as a line in the level once all active ones are had: W + (level * S - active * W) / WHOLE.
    fn idle_line(self, claim: &Claim) -> Line {
        let at_zero = i128::from(claim.working_set.0) * i128::from(self.active) * i128::from(WHOLE - self.active);
        Line { at_zero, slope: i128::from(self.active) * i128::from(claim.shares.get()) }
    }

    fn constant(self, pages: PageCount) -> Line {
        Line { at_zero: i128::from(pages.0) * self.scale(), slope: 0 }
    }
}

/// Pages times [`Weights::scale`], as a function of the level.
#[derive(Clone, Copy)]
struct Line {
    at_zero: i128,
    slope: i128,
}

impl Line {
    fn replace(&mut self, old: Line, new: Line) {
        self.at_zero += new.at_zero - old.at_zero;
        self.slope += new.slope - old.slope;
    }

    fn reaches(self, scaled_pages: i128, level: Level) -> bool {
        let den = i128::from(level.den);
        self.at_zero * den + self.slope * i128::from(level.num) >= scaled_pages * den
    }
}

/// Where a VM's line changes.
struct Bend {
    level: Level,
    old: Line,
    new: Line,
}

/// What a VM pays for `pages`: the paper's rho.
pub fn price(claim: &Claim, tax: TaxRate, pages: PageCount) -> Price {
    let weights = Weights::new(tax);
    let cost = weights.cost(claim, pages.0);
    Price { shares: u64::from(claim.shares.get()), cost, active_weight: weights.active }
}

/// Divides `pool` by min-funding revocation: every VM at its ceiling if the pool holds that, else revoked from where rho is
/// lowest. Equal prices are revoked from the later claim first.
///
/// # Panics
/// A claim has a ceiling below its min or beyond the limits of [`super::settings`]: they are checked where they are
/// set.
pub fn allocate(claims: &[Claim], tax: TaxRate, pool: PageCount) -> Allocation {
    assert!(claims.len() <= VMS_MAX && pool <= POOL_MAX, "beyond the limits of the settings");
    let sane = |claim: &Claim| claim.min <= claim.ceiling && claim.ceiling <= MEMORY_MAX;
    assert!(claims.iter().all(sane), "a claim whose ceiling is below its min or too high");
    let mins: PageCount = claims.iter().map(|claim| claim.min).sum();
    let ceilings: PageCount = claims.iter().map(|claim| claim.ceiling).sum();
    if ceilings <= pool {
        let pages = claims.iter().map(|claim| claim.ceiling).collect();
        return Allocation { pages, shortfall: PageCount::ZERO, clearing: Clearing::Free };
    }
    if mins >= pool {
        let pages = claims.iter().map(|claim| claim.min).collect();
        return Allocation { pages, shortfall: mins - pool, clearing: Clearing::Nothing };
    }
    let weights = Weights::new(tax);
    let (num, den) = find_level(claims, weights, pool);
    let clearing = Clearing::At { num, den };
    let mut pages: Vec<PageCount> = claims.iter().map(|claim| pages_at(claim, tax, clearing)).collect();
    let left = pool - pages.iter().copied().sum();
    hand_out(claims, weights, &mut pages, left);
    Allocation { pages, shortfall: PageCount::ZERO, clearing }
}

/// What a claim is worth at a price that others made: whole pages between its min and its ceiling.
pub fn pages_at(claim: &Claim, tax: TaxRate, clearing: Clearing) -> PageCount {
    match clearing {
        Clearing::Free => claim.ceiling,
        Clearing::Nothing => claim.min,
        Clearing::At { num, den } => {
            let cost = num * u128::from(claim.shares.get()) / den;
            PageCount(Weights::new(tax).pages_floor(claim, cost).clamp(claim.min.0, claim.ceiling.0))
        }
    }
}

/// The level at which the sum of all pages is the pool, as a fraction.
fn find_level(claims: &[Claim], weights: Weights, pool: PageCount) -> (u128, u128) {
    let target = i128::from(pool.0) * weights.scale();
    let mut total = Line { at_zero: 0, slope: 0 };
    let mut bends = Vec::with_capacity(3 * claims.len());
    for claim in claims {
        let min = weights.constant(claim.min);
        total.replace(Line { at_zero: 0, slope: 0 }, min);
        if claim.min == claim.ceiling {
            continue;
        }
        let bend = |pages: PageCount, old, new| Bend { level: weights.level(claim, pages.0), old, new };
        let (active, idle) = (weights.active_line(claim), weights.idle_line(claim));
        let (first, last) = match claim.working_set {
            set if set <= claim.min => (idle, idle),
            set if set >= claim.ceiling => (active, active),
            set => {
                bends.push(bend(set, active, idle));
                (active, idle)
            }
        };
        bends.push(bend(claim.min, min, first));
        bends.push(bend(claim.ceiling, last, weights.constant(claim.ceiling)));
    }
    bends.sort_by_key(|bend| bend.level);
    for bend in bends {
        if total.reaches(target, bend.level) {
            break;
        }
        total.replace(bend.old, bend.new);
    }
    // The sum of the ceilings is above the pool, so the loop ends in front of a bend that the sum reaches by rising.
    assert!(total.slope > 0 && total.at_zero <= target, "the sum rises to the pool");
    ((target - total.at_zero) as u128, total.slope as u128)
}

/// Gives the pages that rounding left, fewer than there are VMs, to whoever would pay most for the next one.
fn hand_out(claims: &[Claim], weights: Weights, pages: &mut [PageCount], left: PageCount) {
    let next = |index: usize, had: PageCount| {
        let claim = &claims[index];
        (had < claim.ceiling).then(|| Reverse((weights.level(claim, had.0 + 1), index)))
    };
    if left == PageCount::ZERO {
        return;
    }
    let mut bidders: BinaryHeap<_> = pages.iter().enumerate().filter_map(|(index, &had)| next(index, had)).collect();
    for _ in 0..left.0 {
        let Some(Reverse((_, index))) = bidders.pop() else { return };
        pages[index] += PageCount(1);
        bidders.extend(next(index, pages[index]));
    }
}
