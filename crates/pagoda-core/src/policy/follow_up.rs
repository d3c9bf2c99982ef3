//! Whether plans come true: how far a VM is from what the rounds before wanted of it.
//!
//! A plan takes a while to come true: page-out has to write, and a guest gives memory up as it can. So a distance counts as
//! a deviation only when it has not become smaller for [`GRACE_MS`].

use crate::units::PageCount;

/// A distance that does not become smaller for so long is reported. Page-out of a GiB takes less on any disk, and a balloon
/// that moves at all moves in less.
pub const GRACE_MS: u64 = 15_000;
/// Up to this part of the VM's memory a distance is none: the headroom of page-out, and what a balloon driver rounds.
const TOLERANCE_PART: u64 = 16;
/// A distance that has become smaller by this part starts anew.
const PROGRESS_PART: u64 = 8;

/// What the rounds before wanted of a VM, and what it has now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// What the guest sees.
    pub memory: PageCount,
    /// The limit that its engine enforces.
    pub limit: PageCount,
    /// Its pages in DRAM, as that limit counts them.
    pub resident: PageCount,
    /// What its balloon should hold, and what it holds; `None` for a VM without one.
    pub balloon: Option<(PageCount, PageCount)>,
    /// It should be stopped, and it is.
    pub suspended: (bool, bool),
}

/// A plan that has not come true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deviation {
    /// It says in what the VM deviates from its plan.
    pub of: DeviationOf,
    /// Milliseconds since it last became smaller.
    pub for_ms: u64,
}

/// What a plan is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviationOf {
    /// The VM has more pages in DRAM than its limit.
    Limit {
        /// The limit allows so many pages.
        wanted: PageCount,
        /// The VM has so many pages.
        found: PageCount,
    },
    /// Its balloon holds less, or more, than the guest was asked for.
    Balloon {
        /// The balloon should hold so many pages.
        wanted: PageCount,
        /// The balloon holds so many pages.
        found: PageCount,
    },
    /// It runs although it should be stopped.
    Runs,
    /// It is stopped although it may run.
    Suspended,
}

#[derive(Clone, Copy, Debug)]
struct Lag {
    distance: u64,
    since_ms: u64,
}

/// What is remembered of one VM between two looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct FollowUp {
    limit: Option<Lag>,
    balloon: Option<Lag>,
    run: Option<Lag>,
}

impl FollowUp {
    /// Compares once a round. Gives what is off and has been for [`GRACE_MS`].
    pub fn compare(&mut self, now_ms: u64, comparison: &Comparison) -> Vec<Deviation> {
        let Comparison { memory, limit, resident, balloon, suspended } = *comparison;
        let tolerance = memory.0 / TOLERANCE_PART;
        let above = resident.0.saturating_sub(limit.0);
        let (wanted, found) = balloon.unwrap_or_default();
        let is_off = suspended.0 != suspended.1;
        let for_ms = [
            lag(&mut self.limit, now_ms, above, tolerance),
            lag(&mut self.balloon, now_ms, wanted.0.abs_diff(found.0), tolerance),
            lag(&mut self.run, now_ms, u64::from(is_off), 0),
        ];
        let run = if suspended.0 { DeviationOf::Runs } else { DeviationOf::Suspended };
        let of = [DeviationOf::Limit { wanted: limit, found: resident }, DeviationOf::Balloon { wanted, found }, run];
        let deviations = of.into_iter().zip(for_ms).filter_map(|(of, for_ms)| Some(Deviation { of, for_ms: for_ms? }));
        deviations.collect()
    }
}

/// Since when a distance has not become smaller, if that is long enough to be reported.
fn lag(lag: &mut Option<Lag>, now_ms: u64, distance: u64, tolerance: u64) -> Option<u64> {
    if distance <= tolerance {
        *lag = None;
        return None;
    }
    let has_come_closer = |before: &Lag| distance * PROGRESS_PART <= before.distance * (PROGRESS_PART - 1);
    // A distance that grows again keeps its start: who goes to and fro makes no progress.
    if lag.as_ref().is_none_or(has_come_closer) {
        *lag = Some(Lag { distance, since_ms: now_ms });
    }
    let for_ms = now_ms.saturating_sub((*lag)?.since_ms);
    (for_ms >= GRACE_MS).then_some(for_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FINE: Comparison = Comparison {
        memory: PageCount(1600),
        limit: PageCount(800),
        resident: PageCount(790),
        balloon: Some((PageCount(400), PageCount(400))),
        suspended: (false, false),
    };

    fn compare(steps: &[(u64, Comparison)]) -> Vec<Vec<Deviation>> {
        let mut follow_up = FollowUp::default();
        steps.iter().map(|(now_ms, comparison)| follow_up.compare(*now_ms, comparison)).collect()
    }

    #[test]
    fn what_comes_true_in_time_is_no_deviation() {
        let with = |resident| Comparison { resident: PageCount(resident), ..FINE };
        let steps: Vec<_> = (0..8).map(|step| (step * 5000, with(1600 - step * 100))).collect();
        assert!(compare(&steps).iter().all(Vec::is_empty), "page-out gets on");
        let near = (0..20).map(|step| (step * 5000, with(900))).collect::<Vec<_>>();
        assert!(compare(&near).iter().all(Vec::is_empty), "a sixteenth of the memory is none");
    }

    #[test]
    fn what_stands_still_is_reported_until_it_moves() {
        let off = Comparison { balloon: Some((PageCount(400), PageCount(100))), ..FINE };
        let better = Comparison { balloon: Some((PageCount(400), PageCount(200))), ..FINE };
        let found =
            compare(&[(0, off), (14_999, off), (15_000, off), (16_000, better), (31_000, better), (32_000, FINE)]);
        let deviation = |found, for_ms| {
            let of = DeviationOf::Balloon { wanted: PageCount(400), found: PageCount(found) };
            vec![Deviation { of, for_ms }]
        };
        let none = Vec::new();
        let expected = [none.clone(), none.clone(), deviation(100, 15_000), none.clone(), deviation(200, 15_000), none];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_vm_that_runs_or_stands_against_its_plan_is_reported() {
        for (suspended, of) in [((true, false), DeviationOf::Runs), ((false, true), DeviationOf::Suspended)] {
            let off = Comparison { suspended, ..FINE };
            let found = compare(&[(0, off), (10_000, off), (20_000, off)]);
            assert_eq!(found[2], [Deviation { of, for_ms: 20_000 }]);
            assert!(found[1].is_empty());
        }
    }

    #[test]
    fn to_and_fro_is_no_progress() {
        let with = |resident| Comparison { resident: PageCount(resident), ..FINE };
        let found = compare(&[(0, with(1200)), (5000, with(1300)), (10_000, with(1190)), (15_000, with(1300))]);
        assert!(matches!(found[3][..], [Deviation { of: DeviationOf::Limit { .. }, for_ms: 15_000 }]), "{found:?}");
    }
}
