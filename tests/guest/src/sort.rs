//! Quicksort of an array of numbers: the program of the MemX paper's table 2, in a guest.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use pagoda_guest::rng::mix;
use pagoda_guest::{PAGE_SIZE, PAGES_PER_MIB};

use crate::report::Report;

/// Sorts `mib` MiB and checks that the same numbers are there, in order. Only the sort is timed.
pub fn run(mib: Option<usize>, seed: u64, report: &Report) -> Result<()> {
    let mib = mib.context("sort: set pagoda.mib")?;
    ensure!(mib > 0, "sort: pagoda.mib is 0");
    let words = (mib * PAGES_PER_MIB * PAGE_SIZE / size_of::<u64>()) as u64;
    let mut numbers: Vec<u64> = (0..words).map(|index| mix(seed ^ index)).collect();
    let before = sums(&numbers);
    let start = Instant::now();
    // A quicksort, of the standard library's kind.
    numbers.sort_unstable();
    let took = start.elapsed();
    let disorder = numbers.windows(2).filter(|pair| pair[0] > pair[1]).count() as u64;
    let bad = disorder + u64::from(sums(&numbers) != before);
    report.add_bad_pages(bad);
    let pages = mib * PAGES_PER_MIB;
    report.line(format_args!("done phase=sort pages={pages} ops={words} bad={bad} us={}", took.as_micros()));
    Ok(())
}

/// Changes with any number, not with their order.
fn sums(numbers: &[u64]) -> (u64, u64) {
    let add = |(sum, mixed): (u64, u64), number: &u64| (sum.wrapping_add(*number), mixed.wrapping_add(mix(*number)));
    numbers.iter().fold((0, 0), add)
}
