//! The chunk queues against 8-bit histories that are scanned for every decision, from 1 GiB to
//! 1 TiB of emulated memory (VMemDirect, section 5.5, figure 9). No memory is mapped: only the
//! bookkeeping is that large.
//!
//! The caches are swept before every batch of decisions. In the daemon, page-out I/O lies between
//! two batches; with warm caches the small memory would be measured in L1 and the large one not.

mod scan_peer;

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use pagoda_core::queues::{ChunkQueues, Heat};
use pagoda_core::units::{ChunkCount, ChunkIdx};
use testkit::results::report::{Bar, Report};
use testkit::toy::workload::Chance;

use self::scan_peer::Histories;
use super::{Setup, svg};

/// 2^0 to 2^10 GiB, every second power.
const SIZES_GIB: [u32; 6] = [1, 4, 16, 64, 256, 1024];
const CHUNKS_PER_GIB: u32 = 1024;
/// Victims chosen at a time: one page-out batch of the pager.
const DECISIONS_PER_BATCH: usize = 16;
const BATCHES: usize = 64;
const UPDATES: usize = 4096;
const AGINGS_BEFORE: usize = 12;
/// Larger than the caches that two chunks of a batch could share.
const SWEEP_WORDS: usize = (64 << 20) / 8;

/// The scanning peer repeats a decision of up to a millisecond less often.
const PEER_BATCHES: usize = 8;

const GROWTH_MAX: f64 = 2.0;
const PEER_RATIO_MIN: f64 = 100.0;

/// Nanoseconds; one entry per round.
#[derive(Debug, Default, Clone)]
struct Times {
    decision: Vec<f64>,
    division: Vec<f64>,
    update: Vec<f64>,
    aging: Vec<f64>,
}

#[derive(Debug, Default, Clone)]
struct SizeResult {
    gib: u32,
    ours: Times,
    peer: Times,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// The queues ran empty, which they must not.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let mut results: Vec<SizeResult> =
        SIZES_GIB.iter().map(|gib| SizeResult { gib: *gib, ..SizeResult::default() }).collect();
    let mut sweep = vec![0_u64; SWEEP_WORDS];
    for round in 0..setup.rounds {
        for result in &mut results {
            let chunks = ChunkCount(result.gib * CHUNKS_PER_GIB);
            let seed = (round as u64) << 32 | u64::from(result.gib);
            measure_ours(chunks, seed, &mut sweep, &mut result.ours)?;
            measure_peer(chunks, seed, &mut sweep, &mut result.peer)?;
        }
    }
    let mut report = setup.report("queues");
    add_figures(&mut report, &results);
    Ok((report, plot(&results)))
}

fn sweep_caches(sweep: &mut [u64]) {
    // One word of every cache line.
    for word in sweep.iter_mut().step_by(8) {
        *word = word.wrapping_add(1);
    }
    black_box(sweep);
}

fn random_chunk(chance: &mut Chance, chunks: ChunkCount) -> ChunkIdx {
    ChunkIdx(u32::try_from(chance.below(u64::from(chunks.0))).unwrap_or(0))
}

fn ns_since(start: Instant, operations: usize) -> f64 {
    start.elapsed().as_nanos() as f64 / operations as f64
}

fn measure_ours(chunks: ChunkCount, seed: u64, sweep: &mut [u64], times: &mut Times) -> Result<()> {
    let mut chance = Chance::new(seed);
    let mut queues = ChunkQueues::new(chunks);
    chunks.iter().for_each(|chunk| queues.insert_first(chunk));
    for _ in 0..AGINGS_BEFORE {
        for _ in 0..chunks.0 / 4 {
            queues.touch(random_chunk(&mut chance, chunks));
        }
        queues.age();
    }
    let mut total_ns = 0.0;
    for _ in 0..BATCHES {
        sweep_caches(sweep);
        let start = Instant::now();
        let mut out = [ChunkIdx(0); DECISIONS_PER_BATCH];
        for slot in &mut out {
            let victim = queues.victim().context("the queues are empty")?;
            queues.remove(victim);
            *slot = victim;
        }
        total_ns += ns_since(start, DECISIONS_PER_BATCH);
        out.iter().for_each(|chunk| queues.insert_tail_last(*chunk));
    }
    times.decision.push(total_ns / BATCHES as f64);

    let touched: Vec<ChunkIdx> = (0..UPDATES).map(|_| random_chunk(&mut chance, chunks)).collect();
    sweep_caches(sweep);
    let start = Instant::now();
    for chunk in &touched {
        queues.touch(*chunk);
    }
    times.update.push(ns_since(start, UPDATES));

    sweep_caches(sweep);
    let start = Instant::now();
    let hot = queues.divide(ChunkCount(chunks.0 / 2)).filter(|(_, heat)| *heat == Heat::Hot);
    black_box(hot.count());
    times.division.push(ns_since(start, 1));

    sweep_caches(sweep);
    let start = Instant::now();
    queues.age();
    times.aging.push(ns_since(start, 1));
    Ok(())
}

fn measure_peer(chunks: ChunkCount, seed: u64, sweep: &mut [u64], times: &mut Times) -> Result<()> {
    let mut chance = Chance::new(seed);
    let mut histories = Histories::new(chunks);
    for _ in 0..AGINGS_BEFORE {
        for _ in 0..chunks.0 / 4 {
            histories.touch(random_chunk(&mut chance, chunks));
        }
        histories.age();
    }
    let mut total_ns = 0.0;
    for _ in 0..PEER_BATCHES {
        sweep_caches(sweep);
        let start = Instant::now();
        let mut out = [ChunkIdx(0); DECISIONS_PER_BATCH];
        for slot in &mut out {
            let victim = histories.victim().context("no chunk is resident")?;
            histories.remove(victim);
            *slot = victim;
        }
        total_ns += ns_since(start, DECISIONS_PER_BATCH);
        out.iter().for_each(|chunk| histories.insert(*chunk));
    }
    times.decision.push(total_ns / PEER_BATCHES as f64);

    let touched: Vec<ChunkIdx> = (0..UPDATES).map(|_| random_chunk(&mut chance, chunks)).collect();
    sweep_caches(sweep);
    let start = Instant::now();
    for chunk in &touched {
        histories.touch(*chunk);
    }
    black_box(&histories);
    times.update.push(ns_since(start, UPDATES));

    sweep_caches(sweep);
    let start = Instant::now();
    let hot = histories.divide(ChunkCount(chunks.0 / 2)).filter(|(_, heat)| *heat == Heat::Hot);
    black_box(hot.count());
    times.division.push(ns_since(start, 1));

    sweep_caches(sweep);
    let start = Instant::now();
    histories.age();
    black_box(&histories);
    times.aging.push(ns_since(start, 1));
    Ok(())
}

fn add_figures(report: &mut Report, results: &[SizeResult]) {
    let (Some(small), Some(large)) = (results.first(), results.last()) else { return };
    report.pair(
        &format!("page-out decision: {} GiB against {} GiB", large.gib, small.gib),
        "ns",
        &large.ours.decision,
        &small.ours.decision,
        Bar::AtMost(GROWTH_MAX),
    );
    let per_second = |ns: &[f64]| -> Vec<f64> { ns.iter().map(|ns| 1e9 / ns).collect() };
    report.pair(
        &format!("page-out decisions at {} GiB against scanned histories", large.gib),
        "1/s",
        &per_second(&large.ours.decision),
        &per_second(&large.peer.decision),
        Bar::AtLeast(PEER_RATIO_MIN),
    );
    type Pick = fn(&Times) -> &Vec<f64>;
    let picks: [(&str, Pick); 4] = [
        ("page-out decision", |times| &times.decision),
        ("division into hot and cold", |times| &times.division),
        ("update for a touch", |times| &times.update),
        ("update for a period's end", |times| &times.aging),
    ];
    for (name, pick) in picks {
        for result in results {
            let (ours, peer) = (pick(&result.ours), pick(&result.peer));
            report.pair(&format!("{name}, {} GiB", result.gib), "ns", ours, peer, Bar::None);
        }
    }
}

fn plot(results: &[SizeResult]) -> String {
    let line = |name: &str, pick: &dyn Fn(&SizeResult) -> &Vec<f64>| {
        let point = |result: &SizeResult| {
            let median = testkit::results::report::median(pick(result)).unwrap_or(0.0);
            [f64::from(result.gib), median / 1000.0]
        };
        (name.to_owned(), results.iter().map(point).collect())
    };
    svg::line_chart(&svg::LineChart {
        title: "Chunk queues against scanned 8-bit histories".to_owned(),
        x_label: "emulated memory, GiB".to_owned(),
        y_label: "time, us".to_owned(),
        x_scale: svg::Scale::Log,
        y_scale: svg::Scale::Log,
        series: vec![
            line("decision", &|r| &r.ours.decision),
            line("decision, scanned", &|r| &r.peer.decision),
            line("division", &|r| &r.ours.division),
            line("division, scanned", &|r| &r.peer.division),
            line("touch", &|r| &r.ours.update),
            line("touch, history", &|r| &r.peer.update),
        ],
    })
}
