//! A page from a server of cluster memory against a bare datagram echo of the same sizes, without encryption, and against
//! memcached and nbdkit. All servers are in a network namespace of their own, and every page crosses the same veth link with
//! an MTU of 1500; both sides that use datagrams use segmentation offload.

pub mod echo;
mod pool;
mod ports;
mod tcp;
mod workers;

use std::time::Duration;

use anyhow::Result;
use testkit::link::Ethernet;
use testkit::results::report::{Bar, Report};

use super::{Setup, svg};

use pool::Pool;

/// What a page of 4 KiB takes on the wire: Ethernet's 1500 bytes without the IP and UDP headers.
const DATAGRAM: usize = 1472;
/// Page reads measured one by one, per round and way of waiting.
const READS: usize = 20_000;
/// Pages under way at a time when throughput is measured.
const WINDOW: usize = 32;

/// Issue 4: a page within 1.6 times of the echo.
const READ_RATIO_MAX: f64 = 1.6;
/// Issue 4: of a page from nbdkit's memory plugin or memcached.
const TCP_RATIO_MAX: f64 = 0.8;
/// Issue 4: pages of one server core.
const PAGES_PER_SECOND_MIN: f64 = 200_000.0;
/// Issue 4: of what bare datagrams reach without encryption.
const THROUGHPUT_RATIO_MIN: f64 = 0.6;

/// What one side reached, one value a round.
#[derive(Debug, Default)]
struct Side {
    spin_us: Vec<f64>,
    block_us: Vec<f64>,
    pages_per_second: Vec<f64>,
}

/// Runs this bench, and returns its figures and their plot as SVG.
///
/// # Errors
/// Not root; a socket cannot be made; a page was wrong or did not come.
pub fn run(setup: &Setup) -> Result<(Report, String)> {
    let (mut ours, mut peer) = (Side::default(), Side::default());
    let reads = if setup.quick { READS / 4 } else { READS };
    let (mut memcached, mut nbdkit) = (Vec::new(), Vec::new());
    let mut batched = Vec::new();
    let (mut one_worker, mut two_workers) = (Vec::new(), Vec::new());
    let span = Duration::from_secs_f64(setup.seconds(2.0));
    let link = Ethernet::new()?;
    for _ in 0..setup.rounds {
        for spin in [true, false] {
            peer.latency(spin).push(echo::latency_us(&link, spin, reads)?);
            if setup.ours {
                ours.latency(spin).push(Pool::start(&link, spin)?.latency_us(reads)?);
            }
        }
        memcached.extend(tcp::memcached_us(&link, reads)?);
        nbdkit.extend(tcp::nbdkit_us(&link, reads)?);
        peer.pages_per_second.push(echo::pages_per_second(&link, WINDOW, false, span)?);
        batched.push(echo::pages_per_second(&link, WINDOW, true, span)?);
        if setup.ours {
            ours.pages_per_second.push(Pool::start(&link, true)?.pages_per_second(WINDOW as u64, span)?);
            one_worker.push(workers::pages_per_second(1)?);
            two_workers.push(workers::pages_per_second(2)?);
        }
    }
    let mut report = setup.report("rmap");
    report.pair("page read, p50, spinning", "us", &ours.spin_us, &peer.spin_us, Bar::AtMost(READ_RATIO_MAX));
    report.pair("page read, p50, blocking", "us", &ours.block_us, &peer.block_us, Bar::AtMost(READ_RATIO_MAX));
    for (name, times) in [("memcached get", &memcached), ("nbdkit memory read", &nbdkit)] {
        if !times.is_empty() {
            // As they come: `pool serve` and `disk export` look for work before they sleep, these two have no such way.
            let (title, bar) = (format!("page read against {name}"), Bar::AtMost(TCP_RATIO_MAX));
            report.pair(&format!("{title}, spinning"), "us", &ours.spin_us, times, bar);
            report.pair(&format!("{title}, blocking"), "us", &ours.block_us, times, bar);
        }
    }
    let (ours_rate, peer_rate) = (&ours.pages_per_second, &peer.pages_per_second);
    // Our server joins replies into batches, so the echo that does so too is what the kernel can carry.
    let bar = Bar::AtLeast(THROUGHPUT_RATIO_MIN);
    report.pair("pages of one server core: echo in batches", "1/s", ours_rate, &batched, bar);
    report.pair("pages of one server core: echo, a page a call", "1/s", ours_rate, peer_rate, Bar::None);
    if setup.ours {
        report.single("pages of one server core", "1/s", ours_rate, Bar::AtLeast(PAGES_PER_SECOND_MIN));
        report.pair("pages of two lanes against one, without the network", "1/s", &two_workers, &one_worker, Bar::None);
    }
    let group =
        |name: &str, ours: &[f64], peer: &[f64]| (name.to_owned(), vec![svg::Bar::of(ours), svg::Bar::of(peer)]);
    let chart = svg::BarChart {
        title: "A page of another namespace's memory, over a veth link of MTU 1500".to_owned(),
        y_label: "us".to_owned(),
        y_scale: svg::Scale::Linear,
        series: vec!["rmap, encrypted".to_owned(), "bare echo".to_owned()],
        groups: vec![
            group("spinning", &ours.spin_us, &peer.spin_us),
            group("blocking", &ours.block_us, &peer.block_us),
        ],
    };
    Ok((report, svg::bar_chart(&chart)))
}

/// What a page read takes, spinning, p50 in microseconds: other benches compare with it.
///
/// # Errors
/// Not root; a page was wrong or did not come.
pub fn read_us(setup: &Setup) -> Result<f64> {
    let reads = if setup.quick { READS / 4 } else { READS };
    Pool::start(&Ethernet::new()?, true)?.latency_us(reads)
}

impl Side {
    fn latency(&mut self, spin: bool) -> &mut Vec<f64> {
        if spin { &mut self.spin_us } else { &mut self.block_us }
    }
}

/// The middle of the latencies, in microseconds.
fn p50_us(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e6)
}
