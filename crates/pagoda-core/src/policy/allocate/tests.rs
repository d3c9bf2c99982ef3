//! The exact solution against the paper's process, and what must follow from it.

use proptest::prelude::*;

use super::super::settings::PerMille;
use super::*;

fn tax(per_mille: u16) -> TaxRate {
    TaxRate::new(PerMille(per_mille)).unwrap()
}

fn claim(shares: u32, min: u64, ceiling: u64, working_set: u64) -> Claim {
    Claim {
        shares: Shares::new(shares).unwrap(),
        min: PageCount(min),
        ceiling: PageCount(ceiling),
        working_set: PageCount(working_set),
    }
}

fn pages(claims: &[Claim], rate: TaxRate, pool: u64) -> Vec<u64> {
    allocate(claims, rate, PageCount(pool)).pages.iter().map(|pages| pages.0).collect()
}

/// Revocation as the paper words it: one page after the other, from the client with the fewest shares per page.
fn revoke_page_by_page(claims: &[Claim], rate: TaxRate, pool: u64) -> Vec<u64> {
    // rho by the formula, as a fraction: S * (1000 - t) / (P * (f * (1000 - t) + 1000 * (1 - f))), f = min(P, W) / P.
    let rho = |claim: &Claim, pages: u64| {
        let keep = 1000 - u128::from(rate.per_mille().0);
        let active = u128::from(pages.min(claim.working_set.0));
        let idle = u128::from(pages) - active;
        (u128::from(claim.shares.get()) * keep, active * keep + 1000 * idle)
    };
    let mut had: Vec<u64> = claims.iter().map(|claim| claim.ceiling.0).collect();
    while had.iter().sum::<u64>() > pool {
        let mut victim: Option<usize> = None;
        for (index, claim) in claims.iter().enumerate().filter(|(index, claim)| had[*index] > claim.min.0) {
            let lower = victim.is_none_or(|best| {
                let (num, den) = rho(claim, had[index]);
                let (best_num, best_den) = rho(&claims[best], had[best]);
                num * best_den <= best_num * den
            });
            if lower {
                victim = Some(index);
            }
        }
        let Some(victim) = victim else { break };
        had[victim] -= 1;
    }
    had
}

#[test]
fn tables() {
    // There is enough for all ceilings.
    assert_eq!(pages(&[claim(1, 0, 10, 0), claim(1, 0, 20, 0)], tax(750), 30), [10, 20]);
    // There is not even enough for the mins.
    let mins = [claim(1, 10, 10, 0), claim(1, 20, 30, 0)];
    assert_eq!(allocate(&mins, tax(0), PageCount(25)).shortfall, PageCount(5));
    assert_eq!(pages(&mins, tax(0), 25), [10, 20]);
    // Without a tax, shares alone decide.
    let two = [claim(1000, 0, 256, 20), claim(1000, 0, 256, 256)];
    assert_eq!(pages(&two, tax(0), 358), [179, 179]);
    assert_eq!(pages(&[claim(2, 0, 100, 0), claim(1, 0, 100, 0)], tax(0), 90), [60, 30]);
    // Bounded by a min or a ceiling, the rest is divided among the others.
    assert_eq!(pages(&[claim(8, 0, 30, 0), claim(1, 0, 99, 0), claim(1, 25, 99, 0)], tax(0), 75), [30, 20, 25]);
    // The paper's two VMs under 75 %: 20 + 4 * (P - 20) = 358 - P, or VM 2 at its ceiling.
    assert_eq!(pages(&two, tax(750), 300), [72, 228]);
    assert_eq!(pages(&two, tax(750), 358), [102, 256]);
    // Under the highest tax an idle VM keeps little more than its working set.
    assert_eq!(pages(&[claim(1, 0, 400, 20), claim(1, 0, 400, 400)], tax(999), 358), [20, 338]);
    // Where there is no VM, nobody gets anything.
    assert_eq!(pages(&[], tax(750), 100), [0; 0]);
}

#[test]
fn the_price_is_the_papers() {
    // S / (P * (f + k * (1 - f))) with P = 1 GiB, f = 1/4, k = 4: 1000 / 3.25.
    let gib = Bytes::from_gib(1).pages_floor().0;
    let quarter = claim(1000, 0, gib, gib / 4);
    let per_gib = price(&quarter, tax(750), PageCount(gib)).shares_per_gib();
    assert!((per_gib - 1000.0 / 3.25).abs() < 1e-9, "{per_gib}");
    assert!(price(&quarter, tax(750), PageCount(1)) > price(&quarter, tax(750), PageCount(2)));
    assert!(price(&quarter, tax(0), PageCount(0)).shares_per_gib().is_infinite());
}

#[test]
fn the_largest_numbers_do_not_overflow() {
    let huge = MEMORY_MAX.0;
    for rate in [0, 1, 750, 999] {
        let claims: Vec<Claim> = (0..VMS_MAX as u64)
            .map(|vm| claim(if vm % 2 == 0 { 1_000_000 } else { 1 }, 0, huge, huge / (vm + 1)))
            .collect();
        let got = allocate(&claims, tax(rate), POOL_MAX);
        assert_eq!(got.pages.iter().copied().sum::<PageCount>(), POOL_MAX);
        assert_eq!(got.shortfall, PageCount::ZERO);
    }
}

fn any_claim(ceiling_max: u64) -> impl Strategy<Value = Claim> {
    let shares = prop_oneof![Just(1u32), 1..20u32, 900..1100u32, Just(1_000_000u32)];
    (shares, 0..=ceiling_max, 0..=1000u64, 0..=1000u64).prop_map(|(shares, ceiling, min, set)| {
        claim(shares, ceiling * min.saturating_sub(600) / 1000, ceiling, ceiling * set / 800)
    })
}

fn any_claims() -> impl Strategy<Value = Vec<Claim>> {
    proptest::collection::vec(any_claim(300), 0..9)
}

fn any_rate() -> impl Strategy<Value = u16> {
    prop_oneof![Just(0u16), Just(750u16), Just(999u16), 0..1000u16]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_sweep_ends_where_revocation_ends(claims in any_claims(), rate in any_rate(), pool in 0..2000u64) {
        let rate = tax(rate);
        prop_assert_eq!(pages(&claims, rate, pool), revoke_page_by_page(&claims, rate, pool));
    }

    #[test]
    fn targets_keep_their_bounds(
        claims in proptest::collection::vec(any_claim(1 << 30), 0..40), rate in any_rate(), pool in 0..1u64 << 34,
    ) {
        let got = allocate(&claims, tax(rate), PageCount(pool));
        for (claim, pages) in claims.iter().zip(&got.pages) {
            prop_assert!(claim.min <= *pages && *pages <= claim.ceiling);
        }
        let sum: PageCount = got.pages.iter().copied().sum();
        let ceilings: PageCount = claims.iter().map(|claim| claim.ceiling).sum();
        prop_assert_eq!(sum, PageCount(pool).min(ceilings) + got.shortfall);
    }

    #[test]
    fn more_shares_never_mean_less(
        claims in proptest::collection::vec(any_claim(5000), 1..9), rate in any_rate(), pool in 0..30_000u64,
        which in any::<prop::sample::Index>(), more in 1..2000u32,
    ) {
        let which = which.index(claims.len());
        let before = pages(&claims, tax(rate), pool);
        let mut richer = claims;
        richer[which].shares = Shares::new((richer[which].shares.get() + more).min(1_000_000)).unwrap();
        let after = pages(&richer, tax(rate), pool);
        prop_assert!(after[which] >= before[which]);
        for other in (0..richer.len()).filter(|&other| other != which) {
            prop_assert!(after[other] <= before[other]);
        }
    }

    #[test]
    fn a_larger_pool_never_means_less(claims in any_claims(), rate in any_rate(), pool in 0..2000u64, more in 0..50u64) {
        let (small, large) = (pages(&claims, tax(rate), pool), pages(&claims, tax(rate), pool + more));
        prop_assert!(small.iter().zip(&large).all(|(small, large)| small <= large));
    }

    #[test]
    fn tax_takes_from_the_idle(
        mut claims in proptest::collection::vec(any_claim(5000), 2..9), low in any_rate(), more in 0..1000u16,
        pool in 0..30_000u64,
    ) {
        claims[0].working_set = claims[0].ceiling;
        claims[1].working_set = PageCount::ZERO;
        let high = (low + more).min(999);
        let (before, after) = (pages(&claims, tax(low), pool), pages(&claims, tax(high), pool));
        prop_assert!(after[0] >= before[0], "a VM without idle pages pays no tax");
        prop_assert!(after[1] <= before[1], "a VM with nothing but idle pages gains nothing by it");
    }

    #[test]
    fn a_larger_working_set_never_means_less(
        claims in proptest::collection::vec(any_claim(5000), 1..9), rate in any_rate(), pool in 0..30_000u64, more in 0..3000u64,
    ) {
        let before = pages(&claims, tax(rate), pool);
        let mut busier = claims;
        busier[0].working_set += PageCount(more);
        prop_assert!(pages(&busier, tax(rate), pool)[0] >= before[0]);
    }

    #[test]
    fn nobody_above_its_min_pays_less_than_somebody_below_its_ceiling(
        claims in proptest::collection::vec(any_claim(1 << 20), 2..30), rate in any_rate(), pool in 0..1u64 << 24,
    ) {
        let rate = tax(rate);
        let got = allocate(&claims, rate, PageCount(pool)).pages;
        let both = || claims.iter().zip(&got);
        let last_kept = both().filter(|(claim, had)| **had > claim.min).map(|(claim, had)| price(claim, rate, *had)).min();
        let next_wanted = both()
            .filter(|(claim, had)| **had < claim.ceiling)
            .map(|(claim, had)| price(claim, rate, *had + PageCount(1)))
            .max();
        if let (Some(kept), Some(wanted)) = (last_kept, next_wanted) {
            prop_assert!(kept >= wanted, "{kept:?} was kept, {wanted:?} was not served");
        }
    }
}
