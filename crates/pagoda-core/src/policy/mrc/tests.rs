//! Distances against a list, and the sampled curve against an exact replay of the same trace.

use proptest::prelude::*;

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
fn pages_used_before_anybody_looked_are_no_first_uses() {
    let mut mrc = Mrc::new(PageCount(100), usize::MAX, 0);
    for page in [7, 8, 9, 7] {
        mrc.used_again(PageIdx(page));
    }
    mrc.sampled(PageIdx(80));
    mrc.forget(PageIdx(7));
    mrc.sampled(PageIdx(7));
    let curve = mrc.curve();
    assert_eq!((curve.accesses(), curve.cold()), (6.0, 2.0));
    assert_eq!([0, 1, 2, 3].map(|size| curve.misses(PageCount(size))), [4.0, 3.0, 2.0, 0.0]);
    assert_eq!(mrc.stack.len(), mrc.by_hash.len());
}

/// Misses of a cache whose chunks, a page of each `chunks`-th, are emptied in turn.
fn misses_in_turn(trace: &[PageIdx], pages: usize, chunks: usize, size: usize) -> Vec<usize> {
    let (mut resident, mut count, mut next) = (vec![false; pages], 0, 0);
    let miss = |page: &PageIdx| {
        if std::mem::replace(&mut resident[page.0 as usize], true) {
            return 0;
        }
        count += 1;
        while count > size {
            let chunk = resident.iter_mut().skip(next % chunks).step_by(chunks);
            chunk.for_each(|resident| count -= usize::from(std::mem::take(resident)));
            next += 1;
        }
        1
    };
    trace.iter().map(miss).collect()
}

#[test]
fn chunks_that_leave_whole_miss_as_the_model_says() {
    const PAGES: u64 = 4000;
    let mut chance = crate::chance::Chance::new(3);
    let zipf = |_| {
        let rank = (PAGES as f64).powf(chance.below(1 << 32) as f64 / (1u64 << 32) as f64) as u64 - 1;
        // By a prime that does not divide it, each rank has a page of its own.
        PageIdx(rank * 0x9e37_79b1 % PAGES)
    };
    let trace: Vec<PageIdx> = (0..400_000).map(zipf).collect();
    let (first, last) = trace.split_at(200_000);
    let mut mrc = Mrc::new(PageCount(PAGES), usize::MAX, 0);
    first.iter().for_each(|page| mrc.access(*page));
    let before = mrc.curve();
    last.iter().for_each(|page| mrc.access(*page));
    let (lru, before) = (mrc.curve(), before.of_chunks(|_| 0.0));
    let model = lru.of_chunks(|_| 0.0);
    for size in [1000, 2000, 3000] {
        let counted: usize = misses_in_turn(&trace, PAGES as usize, 50, size)[200_000..].iter().sum();
        let said = model.misses(PageCount(size as u64)) - before.misses(PageCount(size as u64));
        let error = said / counted as f64 - 1.0;
        assert!(error.abs() < 0.05, "at {size}: {said} by the model, {counted} counted");
    }
    let ends = [PageCount::ZERO, PageCount(PAGES)];
    assert_eq!(ends.map(|size| model.misses(size)), ends.map(|size| lru.misses(size)));
    assert_eq!(model.accesses(), lru.accesses());
    let kept_free = lru.of_chunks(|size| if size.0 < PAGES { 100.0 } else { 0.0 });
    assert!((kept_free.misses(PageCount(1100)) - model.misses(PageCount(1000))).abs() < 1.0);
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
        let curve = curve_of(&trace, 5000, 200, seed);
        for curve in [curve.of_chunks(|_| 7.0), curve] {
            let ratios: Vec<f64> = curve.points().map(|(_, ratio)| ratio).collect();
            prop_assert!(ratios.windows(2).all(|pair| pair[0] >= pair[1] - 1e-9));
            prop_assert!(ratios.iter().all(|ratio| (0.0..=1.0).contains(ratio)));
        }
    }
}
