//! The orchestrator: divides what the pool has for outboxes among the VMs.
//!
//! Who fits gets what it wants. Else the VMs' response times rise together, as water fills basins: at the level `m`, a VM may
//! exceed its SLO by the part
//!
//! ```text
//! max(0, m - (w / w_least - 1))            w: its weight, w_least: the least weight of all
//! ```
//!
//! and gets the smallest space with which it does not, by its own curve. Equal weights miss by the same part. A VM of
//! twice the least weight begins to miss when the lightest are at twice their SLO. The level is the smallest at which all
//! fits.
//!
//! What always holds: the sum is at most the pool; nobody is below its min while the mins fit, and each has its part of them
//! else; a larger weight never gets less. A VM that is made smaller than what it holds takes no new bytes until it has
//! drained, and what it still holds is given to nobody but for the min of another.

use crate::policy::{Shares, VmId};
use crate::units::{Bytes, PAGE_SIZE};

use super::curve::Curve;
use super::units::{RESPONSE_MAX_S, bytes_floor};

/// Steps of the search for the level: each halves the interval, to less than a byte.
const LEVEL_STEPS: u32 = 80;
/// What a VM without a curve is taken to lose when it has its min alone: as much time again.
const UNKNOWN_EXCESS: f64 = 2.0;

/// What one VM asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    pub id: VmId,
    pub weight: Shares,
    pub min: Bytes,
    pub max: Bytes,
    /// By its controller, or set by hand.
    pub wanted: Bytes,
    /// Its space now, and what is in it.
    pub has: Bytes,
    pub used: Bytes,
    /// What windows do not exceed by size, and the SLO's limit in seconds; `None` if either is not known.
    pub curve: Option<(Curve, f64)>,
}

/// Why a VM gets what it gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// It gets all that it wants.
    Wanted,
    /// The pool is too small: by the model its response times exceed the SLO, or the best it could have, by this part.
    Shared { excess: f64 },
    /// The pool is too small for more than its min.
    Min,
    /// The pool is too small for all mins: a part of its min.
    PartOfMin,
    /// It grows when others have drained.
    WaitsForDrain,
}

/// What one VM gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allotment {
    pub id: VmId,
    pub space: Bytes,
    pub cause: Cause,
    /// It holds so much more: no new bytes until that has drained.
    pub draining: Bytes,
}

/// A division says what each claim gets of the pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Division {
    pub pool: Bytes,
    /// In the order of the claims.
    pub allotments: Vec<Allotment>,
    /// The level of the water: 0 if all have what they want.
    pub level: f64,
    /// What the mins are above the pool.
    pub shortfall: Bytes,
}

/// A claim as the search sees it.
struct Basin {
    least: Bytes,
    most: Bytes,
    curve: Curve,
    goal_s: f64,
    /// By how much the level has to rise before this VM misses.
    grace: f64,
}

impl Basin {
    fn new(claim: &Claim, weight_least: f64) -> Basin {
        let (least, most) = (claim.min, claim.wanted.clamp(claim.min, claim.max));
        let (curve, goal_s) = match &claim.curve {
            Some((curve, limit_s)) => (with_min(curve, least), curve.at(most).max(*limit_s)),
            None => (Curve::new(vec![(least, UNKNOWN_EXCESS), (most, 1.0)]), 1.0),
        };
        Basin { least, most, curve, goal_s, grace: f64::from(claim.weight.get()) / weight_least - 1.0 }
    }

    /// The smallest space with which it does not exceed what the level allows, in whole pages.
    fn size_at(&self, level: f64) -> Bytes {
        let allowed = (level - self.grace).max(0.0);
        let size = self.curve.smallest_within(self.goal_s * (1.0 + allowed)).unwrap_or(self.most);
        pages_floor(size).clamp(self.least, self.most)
    }

    fn excess(&self, space: Bytes) -> f64 {
        (self.curve.at(space) / self.goal_s - 1.0).max(0.0)
    }
}

/// The curve down to the min: at the latest when nothing else helps, a VM has that alone.
fn with_min(curve: &Curve, least: Bytes) -> Curve {
    let begins = curve.points().first().map_or(least, |point| point.0);
    let below = (begins > least).then_some((least, RESPONSE_MAX_S));
    Curve::new(below.into_iter().chain(curve.points().iter().copied()).collect())
}

fn pages_floor(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 / PAGE_SIZE * PAGE_SIZE)
}

/// Divides `pool`.
///
/// # Panics
/// A claim's min is above its max: that is refused where they are set.
pub fn divide(pool: Bytes, claims: &[Claim]) -> Division {
    assert!(claims.iter().all(|claim| claim.min <= claim.max), "a min above its max");
    let mins: Bytes = claims.iter().map(|claim| claim.min).sum();
    if mins > pool {
        return divide_mins(pool, mins, claims);
    }
    let least = claims.iter().map(|claim| claim.weight.get()).min().unwrap_or(1);
    let basins: Vec<Basin> = claims.iter().map(|claim| Basin::new(claim, f64::from(least))).collect();
    let (level, spaces) = fill(pool, claims, &basins);
    let allotments = claims.iter().zip(&basins).zip(spaces).map(|((claim, basin), space)| {
        let cause = match space {
            space if space >= basin.most => Cause::Wanted,
            space if space <= basin.least => Cause::Min,
            space => Cause::Shared { excess: basin.excess(space) },
        };
        Allotment { id: claim.id, space, cause, draining: claim.used.saturating_sub(space) }
    });
    let mut division = Division { pool, allotments: allotments.collect(), level, shortfall: Bytes::ZERO };
    wait_for_drain(&mut division, claims);
    division
}

/// The mins do not fit: each VM gets the same part of its own.
fn divide_mins(pool: Bytes, mins: Bytes, claims: &[Claim]) -> Division {
    let part = |claim: &Claim| Bytes((u128::from(claim.min.0) * u128::from(pool.0) / u128::from(mins.0)) as u64);
    let allotment = |claim: &Claim| {
        let space = part(claim);
        Allotment { id: claim.id, space, cause: Cause::PartOfMin, draining: claim.used.saturating_sub(space) }
    };
    Division { pool, allotments: claims.iter().map(allotment).collect(), level: f64::INFINITY, shortfall: mins - pool }
}

/// The smallest level at which all fits, and the sizes there.
fn fill(pool: Bytes, claims: &[Claim], basins: &[Basin]) -> (f64, Vec<Bytes>) {
    let sizes = |level: f64| -> Vec<Bytes> { basins.iter().map(|basin| basin.size_at(level)).collect() };
    let fits = |sizes: &[Bytes]| sizes.iter().map(|size| u128::from(size.0)).sum::<u128>() <= u128::from(pool.0);
    let all: Vec<Bytes> = basins.iter().map(|basin| basin.most).collect();
    if fits(&all) {
        return (0.0, all);
    }
    let mut spaces = sizes(0.0);
    if fits(&spaces) {
        // Their curves say that less would do; what they want may still be on its way down.
        hand_out(pool, claims, &all, &mut spaces);
        return (0.0, spaces);
    }
    let (mut low, mut high) = (0.0, 1.0);
    while !fits(&sizes(high)) && high < f64::MAX / 4.0 {
        (low, high) = (high, high * 2.0);
    }
    for _ in 0..LEVEL_STEPS {
        let middle = f64::midpoint(low, high);
        if fits(&sizes(middle)) { high = middle } else { low = middle }
    }
    spaces = sizes(high);
    hand_out(pool, claims, &sizes(low), &mut spaces);
    (high, spaces)
}

/// Where a curve is level, a size jumps from one end to the other, and the sum jumps over the pool. What is left then goes
/// to those who would have it just below the level, the larger weights first.
fn hand_out(pool: Bytes, claims: &[Claim], above: &[Bytes], spaces: &mut [Bytes]) {
    let mut left = pool.saturating_sub(spaces.iter().copied().sum());
    let mut order: Vec<usize> = (0..claims.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(claims[index].weight), index));
    for index in order {
        let more = pages_floor(above[index].saturating_sub(spaces[index]).min(left));
        spaces[index] += more;
        left = left.saturating_sub(more);
    }
}

/// Takes back what VMs would grow by beyond their min as long as others hold what they have to give.
fn wait_for_drain(division: &mut Division, claims: &[Claim]) {
    let pairs = || division.allotments.iter().zip(claims);
    let held: u128 = pairs().map(|(allotment, claim)| u128::from(allotment.space.max(claim.used).0)).sum();
    let Some(over) = held.checked_sub(u128::from(division.pool.0)).filter(|over| *over > 0) else { return };
    let growth =
        |allotment: &Allotment, claim: &Claim| allotment.space.saturating_sub(claim.has.max(claim.used).max(claim.min));
    let total: u128 = pairs().map(|(allotment, claim)| u128::from(growth(allotment, claim).0)).sum();
    if total == 0 {
        return;
    }
    let kept = total.saturating_sub(over) as f64 / total as f64;
    for (allotment, claim) in division.allotments.iter_mut().zip(claims) {
        let growth = growth(allotment, claim);
        if growth > Bytes::ZERO {
            let taken = growth.saturating_sub(pages_floor(bytes_floor(growth.0 as f64 * kept)));
            allotment.space = allotment.space.saturating_sub(taken);
            allotment.cause = Cause::WaitsForDrain;
        }
    }
}

#[cfg(test)]
mod tests;
