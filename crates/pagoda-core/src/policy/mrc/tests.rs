//! Distances against a list, and the sampled curve against an exact replay of the same trace.

use proptest::prelude::*;

use super::ghost::Ghosts;
use super::workloads::{WORKLOADS, Workload};
use super::*;

/// Misses of an LRU cache of `size` pages, counted by running one.
fn lru_misses(trace: &[PageIdx], size: usize) -> usize {
    let mut cache: Vec<PageIdx> = Vec::new();
    let mut misses = 0;
    for page in trace {
        match cache.iter().position(|cached| cached == page) {
            Some(at) => _ = cache.remove(at),
            None => misses += 1,
        }
        cache.insert(0, *page);
        cache.truncate(size);
    }
    misses
}

fn curve_of(trace: &[PageIdx], memory: u64, watched_max: usize, seed: u64) -> Curve {
    let mut mrc = Mrc::new(PageCount(memory), watched_max, seed);
    trace.iter().for_each(|page| mrc.access(*page));
    mrc.curve()
}

/// Mean and largest difference over all sizes.
fn errors(exact: &Curve, sampled: &Curve) -> (f64, f64) {
    let differences: Vec<f64> =
        exact.points().zip(sampled.points()).map(|((_, exact), (_, sampled))| (exact - sampled).abs()).collect();
    let largest = differences.iter().copied().fold(0.0, f64::max);
    (differences.iter().sum::<f64>() / differences.len() as f64, largest)
}

#[test]
fn sampling_agrees_with_the_replay() {
    const PAGES: u64 = 60_000;
    for workload in WORKLOADS {
        let trace = workload.trace(PAGES, 400_000, 11);
        let exact = curve_of(&trace, PAGES, usize::MAX, 0);
        for seed in 0..3 {
            let (mean, _) = errors(&exact, &curve_of(&trace, PAGES, 4096, seed));
            assert!(mean < 0.05, "{} with seed {seed}: {mean}", workload.name());
        }
    }
}

#[test]
fn no_more_pages_are_watched_than_allowed() {
    let mut mrc = Mrc::new(PageCount(100_000), 500, 3);
    for page in Workload::Scan.trace(100_000, 150_000, 0) {
        mrc.access(page);
        assert!(mrc.stack.len() <= 500 && mrc.by_hash.len() == mrc.stack.len());
    }
    assert!((0.003..0.008).contains(&mrc.rate()), "{}", mrc.rate());
    let watched = (0..100_000).filter(|page| mrc.watches(PageIdx(*page))).count();
    assert_eq!(watched, mrc.stack.len(), "who is watched is known without a list");
}

#[test]
fn shapes() {
    // A scan over 100 pages: everything misses below 100 pages, nothing but first uses from there on.
    let curve = curve_of(&Workload::Scan.trace(100, 1000, 0), 200, usize::MAX, 0);
    assert_eq!(curve.miss_ratio(PageCount(99)), 1.0);
    assert_eq!(curve.miss_ratio(PageCount(100)), 0.1);
    assert_eq!((curve.misses(PageCount(100)), curve.misses(PageCount(0))), (0.0, 900.0));
    assert_eq!((curve.cold(), curve.accesses()), (100.0, 1000.0));
    assert_eq!(curve.size_for(0.01), PageCount(100));
    let nothing = Mrc::new(PageCount(100), 10, 0).curve();
    assert_eq!((nothing.miss_ratio(PageCount(5)), nothing.size_for(0.1)), (0.0, PageCount(0)));
}

#[test]
fn refaults_tell_what_more_memory_would_save() {
    // An LRU of 300 pages under a mixed load: the ghosts know the distances of all that missed.
    const MEMORY: u64 = 1000;
    let trace = Workload::Mixed.trace(MEMORY, 60_000, 5);
    let (mut cache, mut ghosts, mut gone) =
        (Vec::new(), Ghosts::new(PageCount(MEMORY)), std::collections::HashMap::new());
    let mut mrc = Mrc::new(PageCount(MEMORY), usize::MAX, 0);
    for page in &trace {
        match cache.iter().position(|cached| cached == page) {
            Some(at) => _ = cache.remove(at),
            None => {
                if let Some(ghost) = gone.remove(page) {
                    mrc.refault(*page, ghosts.refault(ghost, PageCount(cache.len() as u64)));
                }
            }
        }
        cache.insert(0, *page);
        if cache.len() > 300 {
            gone.insert(cache.pop().unwrap(), ghosts.evict());
        }
    }
    let predicted = mrc.curve();
    let exact = curve_of(&trace, MEMORY, usize::MAX, 0);
    for size in [300, 400, 500, 700] {
        let (predicted, exact) = (predicted.misses(PageCount(size)), exact.misses(PageCount(size)));
        assert!(
            (predicted - exact).abs() <= 0.05 * exact + 100.0,
            "at {size}: {predicted} predicted, {exact} in a replay"
        );
    }
}

#[test]
fn the_past_fades() {
    let mut mrc = Mrc::new(PageCount(1000), usize::MAX, 0);
    Workload::Scan.trace(800, 8000, 0).into_iter().for_each(|page| mrc.access(page));
    let before = mrc.curve().miss_ratio(PageCount(100));
    for _ in 0..8 {
        mrc.decay();
        Workload::Scan.trace(50, 2000, 0).into_iter().for_each(|page| mrc.access(page));
    }
    let after = mrc.curve().miss_ratio(PageCount(100));
    assert!(before > 0.9 && after < 0.05, "{before} then {after}");
}

proptest! {
    #[test]
    fn without_sampling_the_curve_is_exact(
        trace in proptest::collection::vec(0..40u64, 1..300), sizes in proptest::collection::vec(0..60usize, 4),
    ) {
        let trace: Vec<PageIdx> = trace.into_iter().map(PageIdx).collect();
        let curve = curve_of(&trace, 50, usize::MAX, 9);
        for size in sizes {
            let expected = lru_misses(&trace, size) as f64 / trace.len() as f64;
            prop_assert!((curve.miss_ratio(PageCount(size as u64)) - expected).abs() < 1e-9, "at {}", size);
        }
    }

    #[test]
    fn distances_are_those_of_a_list(ops in proptest::collection::vec((0..30u64, any::<bool>()), 1..4000)) {
        let (mut stack, mut list) = (Stack::default(), Vec::new());
        for (page, forget) in ops {
            let at = list.iter().position(|listed| *listed == page);
            at.into_iter().for_each(|at| _ = list.remove(at));
            if forget && page % 7 == 0 {
                stack.forget(PageIdx(page));
            } else {
                prop_assert_eq!(stack.touch(PageIdx(page)), at.map(|at| at as u64));
                list.insert(0, page);
            }
            prop_assert_eq!(stack.len(), list.len());
        }
    }

    #[test]
    fn a_larger_size_never_misses_more(trace in proptest::collection::vec(0..5000u64, 1..2000), seed in any::<u64>()) {
        let trace: Vec<PageIdx> = trace.into_iter().map(PageIdx).collect();
        let ratios: Vec<f64> = curve_of(&trace, 5000, 200, seed).points().map(|(_, ratio)| ratio).collect();
        prop_assert!(ratios.windows(2).all(|pair| pair[0] >= pair[1] - 1e-9));
        prop_assert!(ratios.iter().all(|ratio| (0.0..=1.0).contains(ratio)));
    }
}
