//! Single accesses that each fault for the same cause, timed by the thread that faults.
//!
//! Ours and the peers run this same code over the same layout, so that latencies compare.

use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use pagoda_sys::toy::process;
use pagoda_sys::toy::ram::{Advice, Ram, RamPart, WORDS_PER_PAGE};
use serde::{Deserialize, Serialize};

use super::histogram::LatencyHistogram;
use super::pattern::mix;
use super::workload::Chance;
use super::{Latency, PAGES_PER_MIB};

/// What a touch does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Access {
    Load,
    Store,
}

/// Words of a `touch` line. The range is cut into one part for each thread, like the RAM.
#[derive(Debug, Clone, Args)]
pub struct TouchArgs {
    /// MiB before the range
    #[arg(long, default_value_t = 0)]
    pub from_mib: usize,
    /// MiB of the range
    #[arg(long)]
    pub mib: usize,
    /// Touch every so manieth page of the range
    #[arg(long, default_value_t = 1)]
    pub stride: usize,
    /// Load or store the first word of a page
    #[arg(long, value_enum, default_value_t = Access::Store)]
    pub access: Access,
    /// After the timed store write the rest of the page too, with what does not compress
    #[arg(long)]
    pub whole: bool,
    /// Ascending order instead of a random one
    #[arg(long)]
    pub in_order: bool,
    /// Drop the range's page-table entries before
    #[arg(long)]
    pub drop_entries: bool,
    /// Do it so many times
    #[arg(long, default_value_t = 1)]
    pub repeat: u32,
}

/// What the toy says after it has touched a range.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Touched {
    /// Number of accesses that were timed.
    pub touches: u64,
    /// Wall time of all accesses, in seconds.
    pub seconds: f64,
    /// User and system time of the process.
    pub cpu_s: f64,
    /// Accesses that found a wrong word.
    pub bad_pages: u64,
    /// Latency of the single accesses.
    pub latency: Latency,
}

#[derive(Debug, Default)]
struct Part {
    latency: LatencyHistogram,
    bad: u64,
}

/// What a touched page begins with.
fn mark(page: usize) -> u64 {
    mix(page as u64) | 1
}

/// Touches pages; `stored` has a non-zero entry for each page that was written.
///
/// # Errors
/// The range is not in the RAM; the kernel refuses to drop entries.
pub fn touch(ram: &mut Ram, threads: usize, stored: &mut [u32], args: &TouchArgs) -> Result<Touched> {
    let (first, count) = (args.from_mib * PAGES_PER_MIB / threads, args.mib * PAGES_PER_MIB / threads);
    let part_pages = ram.pages() / threads;
    if count == 0 || args.stride == 0 || first + count > part_pages {
        bail!("--from-mib {} --mib {}: not in a RAM of {} MiB", args.from_mib, args.mib, ram.pages() / PAGES_PER_MIB);
    }
    let (mut total, mut touches, mut seconds, mut cpu_s) = (Part::default(), 0, 0.0, 0.0);
    for turn in 0..args.repeat {
        if args.drop_entries {
            for thread in 0..threads {
                let start = ram.pages() * thread / threads + first;
                ram.advise(start, count, Advice::Drop).context("drop page-table entries")?;
            }
        }
        let mut rest = &mut *stored;
        let mut workers = Vec::new();
        for (thread, part) in ram.split(threads).into_iter().enumerate() {
            let (mine, others) = std::mem::take(&mut rest).split_at_mut(part.pages());
            rest = others;
            let mut order: Vec<usize> = (first..first + count).step_by(args.stride).collect();
            if !args.in_order {
                shuffle(&mut order, Chance::new(u64::from(turn) << 8 | thread as u64));
            }
            touches += order.len() as u64;
            workers.push((part, mine, order));
        }
        let (parts, elapsed_s, cpu) = run(workers, args);
        (seconds, cpu_s) = (seconds + elapsed_s, cpu_s + cpu);
        for part in parts {
            total.latency.merge(&part.latency);
            total.bad += part.bad;
        }
    }
    let latency = Latency::of(&total.latency);
    Ok(Touched { touches, seconds, cpu_s, bad_pages: total.bad, latency })
}

type Worker<'run> = (RamPart<'run>, &'run mut [u32], Vec<usize>);

/// One worker right here, several on threads of their own.
fn run(mut workers: Vec<Worker<'_>>, args: &TouchArgs) -> (Vec<Part>, f64, f64) {
    let cpu = process::cpu_time();
    if workers.len() == 1
        && let Some(worker) = workers.pop()
    {
        let start = Instant::now();
        let part = touch_part(worker, args);
        return (vec![part], start.elapsed().as_secs_f64(), (process::cpu_time() - cpu).as_secs_f64());
    }
    let barrier = &Barrier::new(workers.len() + 1);
    std::thread::scope(|scope| {
        let spawn = |worker| {
            scope.spawn(move || {
                barrier.wait();
                touch_part(worker, args)
            })
        };
        let handles: Vec<_> = workers.into_iter().map(spawn).collect();
        barrier.wait();
        let start = Instant::now();
        // A worker that panics has printed why.
        let parts = handles.into_iter().map(|handle| handle.join().unwrap_or_default()).collect();
        (parts, start.elapsed().as_secs_f64(), (process::cpu_time() - cpu).as_secs_f64())
    })
}

fn touch_part((mut part, stored, order): Worker<'_>, args: &TouchArgs) -> Part {
    let mut result = Part::default();
    for local in order {
        let mark = mark(part.first_page() + local);
        let expected = if stored[local] == 0 { 0 } else { mark };
        let start = Instant::now();
        let found = match args.access {
            Access::Load => part.load(local, 0),
            Access::Store => {
                part.store(local, 0, mark);
                mark
            }
        };
        let ns = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        result.latency.record(ns);
        match args.access {
            Access::Load => result.bad += u64::from(found != expected),
            Access::Store => {
                stored[local] = 1;
                if args.whole {
                    (1..WORDS_PER_PAGE).for_each(|word| part.store(local, word, mix(mark ^ word as u64)));
                }
            }
        }
    }
    result
}

fn shuffle(order: &mut [usize], mut chance: Chance) {
    for left in (1..order.len()).rev() {
        order.swap(left, chance.below(left as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use pagoda_sys::toy::ram::{HugePages, RamSource};

    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct Line {
        #[command(flatten)]
        touch: TouchArgs,
    }

    fn args(line: &str) -> TouchArgs {
        Line::try_parse_from(line.split_whitespace()).unwrap().touch
    }

    #[test]
    fn every_page_of_the_stride_is_touched_once_and_found_again() {
        let mut ram = Ram::map(RamSource::Shmem(4 << 20), HugePages::Refuse).unwrap();
        let mut stored = vec![0; ram.pages()];
        for threads in [1, 2] {
            let done = touch(&mut ram, threads, &mut stored, &args("--mib 2 --stride 2")).unwrap();
            assert_eq!((done.touches, done.bad_pages), (256, 0));
        }
        let line = "--mib 4 --access load --drop-entries --repeat 3";
        let done = touch(&mut ram, 2, &mut stored, &args(line)).unwrap();
        assert_eq!((done.touches, done.bad_pages), (3072, 0));
        ram.split(1)[0].store(0, 0, 77);
        assert_eq!(touch(&mut ram, 1, &mut stored, &args(line)).unwrap().bad_pages, 3);
    }

    #[test]
    fn a_range_outside_the_ram_is_refused() {
        let mut ram = Ram::map(RamSource::Shmem(2 << 20), HugePages::Refuse).unwrap();
        for line in ["--mib 3", "--mib 1 --from-mib 2", "--mib 0", "--mib 1 --stride 0"] {
            assert!(touch(&mut ram, 1, &mut [0; 512], &args(line)).is_err(), "{line}");
        }
    }
}
