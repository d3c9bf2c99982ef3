//! Tables, and what must hold for any claims.

use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn mib(mib: u64) -> Bytes {
    Bytes::from_mib(mib)
}

/// A claim whose response falls in straight lines through `points` (MiB, seconds), with an SLO of 1 s.
fn claim(id: u32, weight: u32, wanted: u64, points: &[(u64, f64)]) -> Claim {
    let curve = Curve::new(points.iter().map(|&(size, response)| (mib(size), response)).collect());
    Claim {
        id: VmId(id),
        weight: Shares::new(weight).unwrap(),
        min: mib(4),
        max: mib(4096),
        wanted: mib(wanted),
        has: Bytes::ZERO,
        used: Bytes::ZERO,
        curve: Some((curve, 1.0)),
    }
}

const STEEP: &[(u64, f64)] = &[(4, 5.0), (204, 1.0)];

#[test]
fn a_pool_is_divided() {
    let check = |pool: u64, claims: &[Claim], expected: &[u64]| {
        let division = divide(mib(pool), claims);
        for (allotment, expected) in division.allotments.iter().zip(expected) {
            assert!(allotment.space.0.abs_diff(expected * MIB) <= MIB, "{pool} MiB: {division:#?}");
        }
        division
    };
    let pair = |weight| [claim(1, 1000, 204, STEEP), claim(2, weight, 204, STEEP)];
    check(1000, &pair(1000), &[204, 204]);
    // Equal weights miss alike: half of the way each.
    let division = check(208, &pair(1000), &[104, 104]);
    assert!(matches!(division.allotments[0].cause, Cause::Shared { excess } if (excess - 2.0).abs() < 0.02));
    // The heavier one keeps its SLO until the lighter is at twice its own.
    check(368, &pair(2000), &[164, 204]);
    check(358, &pair(2000), &[154, 204]);
    check(308, &pair(2000), &[129, 179]);
    // Nobody is below its min, and the mins are divided if they do not fit.
    check(8, &pair(1_000_000), &[4, 4]);
    let division = check(4, &pair(1_000_000), &[2, 2]);
    assert_eq!((division.shortfall, division.allotments[0].cause), (mib(4), Cause::PartOfMin));
    // One that nothing is known of is taken to need what it wants.
    let unknown = Claim { curve: None, ..claim(3, 1000, 104, STEEP) };
    check(500, &[unknown.clone(), claim(1, 1000, 204, STEEP)], &[104, 204]);
    check(208, &[unknown, claim(1, 1000, 204, STEEP)], &[37, 171]);
    check(100, &[], &[]);
}

#[test]
fn what_others_hold_is_not_given_away() {
    let full = Claim { has: mib(300), used: mib(300), ..claim(1, 1000, 100, STEEP) };
    let grows = Claim { has: mib(50), used: mib(50), ..claim(2, 1000, 204, STEEP) };
    let division = divide(mib(400), &[full.clone(), grows.clone()]);
    assert_eq!((division.allotments[0].space, division.allotments[0].draining), (mib(100), mib(200)));
    assert_eq!((division.allotments[1].space, division.allotments[1].cause), (mib(100), Cause::WaitsForDrain));
    // A new VM has its min at once.
    let new = Claim { has: Bytes::ZERO, used: Bytes::ZERO, ..grows };
    let division = divide(mib(300), &[full, new]);
    assert_eq!(division.allotments[1].space, mib(4));
}

prop_compose! {
    fn any_claim()(
        weight in prop_oneof![Just(1000u32), 1u32..5000],
        min in 1u64..64,
        span in 0u64..2048,
        wanted in 0u64..3000,
        held in 0u64..600,
        limit in 0.1f64..20.0,
        points in prop::collection::vec((1u64..2048, 0.01f64..100.0), 0..8),
    ) -> Claim {
        let curve = (!points.is_empty())
            .then(|| (Curve::new(points.iter().map(|&(size, response)| (mib(size), response)).collect()), limit));
        Claim {
            id: VmId(0),
            weight: Shares::new(weight).unwrap(),
            min: mib(min),
            max: mib(min + span),
            wanted: mib(wanted),
            has: mib(held),
            used: mib(held / 2),
            curve,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_pool_is_kept_and_nobody_starves(claims in prop::collection::vec(any_claim(), 0..12), pool in 0u64..4096) {
        let division = divide(mib(pool), &claims);
        let sum: u64 = division.allotments.iter().map(|allotment| allotment.space.0).sum();
        prop_assert!(sum <= pool * MIB);
        let mins: u64 = claims.iter().map(|claim| claim.min.0).sum();
        for (allotment, claim) in division.allotments.iter().zip(&claims) {
            prop_assert!(allotment.space <= claim.max);
            prop_assert_eq!(allotment.draining, claim.used.saturating_sub(allotment.space));
            if mins <= pool * MIB {
                prop_assert!(allotment.space >= claim.min, "{:?} {:?}", allotment, claim);
            } else {
                prop_assert!(pool == 0 || allotment.space > Bytes::ZERO);
            }
        }
        // Nobody misses while memory is left that it could use and may have.
        let misses = division.allotments.iter().any(|allotment| matches!(allotment.cause, Cause::Shared { .. } | Cause::Min));
        if mins <= pool * MIB && misses && division.allotments.iter().all(|allotment| allotment.cause != Cause::WaitsForDrain) {
            let wanted: u64 = claims.iter().map(|claim| claim.wanted.clamp(claim.min, claim.max).0).sum();
            prop_assert!(wanted > pool * MIB);
            prop_assert!(pool * MIB - sum <= 4096 * claims.len() as u64, "{} of {} given", sum, pool * MIB);
        }
    }

    #[test]
    fn a_larger_weight_never_gets_less(
        claims in prop::collection::vec(any_claim(), 1..8),
        pool in 0u64..2048,
        which in any::<prop::sample::Index>(),
        more in 1u32..5000,
    ) {
        // Growth that waits for others' drain is shared by how much each grows, whatever its weight.
        let claims: Vec<Claim> = claims.into_iter().map(|claim| Claim { has: Bytes::ZERO, used: Bytes::ZERO, ..claim }).collect();
        let which = which.index(claims.len());
        let before = divide(mib(pool), &claims).allotments[which].space;
        let mut raised = claims.clone();
        raised[which].weight = Shares::new(claims[which].weight.get() + more).unwrap();
        let after = divide(mib(pool), &raised).allotments[which].space;
        prop_assert!(after.0 + PAGE_SIZE * claims.len() as u64 >= before.0, "{before} became {after}");
    }

    /// Claims alike but for their weights are served in the order of these.
    #[test]
    fn of_two_alike_the_heavier_has_more(claim in any_claim(), others in prop::collection::vec(any_claim(), 0..5), pool in 0u64..2048) {
        let light = Claim { has: Bytes::ZERO, used: Bytes::ZERO, ..claim };
        let heavy = Claim { weight: Shares::new(light.weight.get() + 500).unwrap(), ..light.clone() };
        let others = others.into_iter().map(|claim| Claim { has: Bytes::ZERO, used: Bytes::ZERO, ..claim });
        let claims: Vec<Claim> = [light, heavy].into_iter().chain(others).collect();
        let division = divide(mib(pool), &claims);
        prop_assert!(division.allotments[1].space.0 + PAGE_SIZE >= division.allotments[0].space.0, "{division:?}");
    }
}
