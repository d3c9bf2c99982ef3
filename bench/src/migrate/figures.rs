//! The rows of the report, and the bars.

use testkit::results::report::{Bar, NO_VALUE, Report};

use super::case::{Case, Of, Rows};
use super::leg::{Cases, Leg};
use super::options::{Setting, Speed};
use super::qemu::Way;
use crate::svg;

/// Times of ours against peers.
const OF_IDEAL_MAX: f64 = 1.02;
const OF_BARE_MAX: f64 = 1.05;
const OF_QEMU_MAX: f64 = 0.8;
/// "At least 1.3x faster than naive, 1.62x at the largest."
const OF_NAIVE_MAX: f64 = 1.0 / 1.3;
const OF_NAIVE_LARGEST_MAX: f64 = 1.0 / 1.62;
const LARGEST_MIB: u64 = 2048;
const WRITTEN_OF_IDLE_MAX: f64 = 1.4;
const WRITTEN_OF_IDEAL_MAX: f64 = 1.03;
const WRITTEN_OF_NAIVE_MAX: f64 = 1.0 / 1.58;
const SWAPPED_OF_IDEAL_MAX: f64 = 1.05;
const SWAPPED_OF_NAIVE_MAX: f64 = 1.0 / 3.0;
const READ_OF_DIRECT_MIN: f64 = 0.9;
const BOTH_OF_SLOWEST_MAX: f64 = 1.1;
/// How long a guest stands still.
const STILL_MS_MAX: f64 = 40.0;
const STILL_ABOVE_IDEAL_MS_MAX: f64 = 5.0;
const STILL_WRITTEN_ABOVE_IDEAL_MS_MAX: f64 = 11.0;
const STILL_OF_NAIVE_MAX: f64 = 0.2;
const STILL_POSTCOPY_MS_MAX: f64 = 20.0;
const FAULT_OF_READ_MAX: f64 = 1.6;
/// Pages that a move takes from swap or into it.
const PAGED_MAX: f64 = 0.0;

const NAIVE: &str = "QEMU's own, kernel swap in a cgroup of half";
const BARE: &str = "one encrypted stream of as many bytes";

const MS: Of = |moved| moved.ms;
const COPIED: Of = |moved| moved.copied_ms;
const STILL: Of = |moved| moved.downtime_ms;
const SENT_MIB: Of = |moved| moved.link_bytes as f64 / f64::from(1 << 20);
const WHOLE: Of = |moved| moved.whole_ms;
const FAULT_US: Of = |moved| moved.fault_p50_us;
const PAGED: Of = |moved| moved.paged as f64;
const PAGED_THERE: Of = |moved| moved.paged_there as f64;
const READ_MIB_PER_S: Of = |moved| moved.read_bytes_per_s / f64::from(1 << 20);

/// What was measured of one size over one link, round by round.
#[derive(Default)]
pub struct Measured {
    pub ours: Cases,
    /// QEMU alone. "Half" is a cgroup.
    pub peer: Cases,
    /// As many bytes as the leg had on the link, by one encrypted stream.
    pub bare_ideal_ms: Vec<f64>,
    pub both: Vec<Bare>,
    /// What plain direct I/O reads of what was in swap, MiB/s.
    pub direct_mib_per_s: Vec<f64>,
    /// A page read of `bench rmap`.
    pub page_read_us: Vec<f64>,
    /// QEMU's settings, and what a move took with each.
    pub ways: Vec<(Way, Option<f64>)>,
}

/// What bounds a move from half to half, each by itself, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct Bare {
    pub source_ms: f64,
    pub link_ms: f64,
    pub destination_ms: f64,
}

impl Bare {
    pub const UNKNOWN: Bare = Bare { source_ms: NO_VALUE, link_ms: NO_VALUE, destination_ms: NO_VALUE };

    fn slowest(self) -> f64 {
        self.source_ms.max(self.link_ms).max(self.destination_ms)
    }
}

/// Adds the rows of one setting. A leg that was not asked for has none.
pub fn add(report: &mut Report, setting: &Setting, measured: &Measured) {
    let name = |what: &str| format!("{}, {what}", setting.name());
    for (way, ms) in &measured.ways {
        let name = name(&format!("idle, QEMU's own by {}", way.text()));
        report.peer_only(&name, "ms", &[ms.unwrap_or(NO_VALUE)]);
    }
    let mut rows = Rows { report, name: name("idle") };
    idle(&mut rows, setting.size.memory_mib >= LARGEST_MIB, measured);
    rows.name = name("half rewritten meanwhile");
    written(&mut rows, measured);
    rows.name = name("out of half the DRAM and swap");
    swapped(&mut rows, setting.link, measured);
    rows.name = name("out of half the DRAM and swap, into the same");
    both(&mut rows, measured);
    rows.name = name("post-copy, read at random meanwhile");
    postcopy(&mut rows, measured);
}

fn idle(rows: &mut Rows<'_>, is_largest: bool, measured: &Measured) {
    let (ours, ideal) = (measured.ours.of(Leg::Half), measured.ours.of(Leg::Ideal));
    let (naive, qemu) = (measured.peer.of(Leg::Half), measured.peer.of(Leg::Ideal));
    let naive_max = if is_largest { OF_NAIVE_LARGEST_MAX } else { OF_NAIVE_MAX };
    rows.pair("time into half the DRAM: into all DRAM", "ms", (ours, MS), (ideal, MS), Bar::AtMost(OF_IDEAL_MAX));
    rows.pair(&format!("time into half the DRAM: {NAIVE}"), "ms", (ours, MS), (naive, MS), Bar::AtMost(naive_max));
    let bare = &measured.bare_ideal_ms;
    rows.against(&format!("time into all DRAM: {BARE}"), "ms", (ideal, MS), bare, Bar::AtMost(OF_BARE_MAX));
    let copied = format!("the same without what is before the first page: {BARE}");
    rows.against(&copied, "ms", (ideal, COPIED), bare, Bar::None);
    rows.pair("time into all DRAM: QEMU's own", "ms", (ideal, MS), (qemu, MS), Bar::AtMost(OF_QEMU_MAX));
    rows.pair("sent: QEMU's own", "MiB", (ideal, SENT_MIB), (qemu, SENT_MIB), Bar::None);
    rows.pair("pause into all DRAM: QEMU's own", "ms", (ideal, STILL), (qemu, STILL), Bar::None);
    rows.single("pause into half the DRAM", "ms", (ours, STILL), Bar::AtMost(STILL_MS_MAX));
    let above = "pause into half, beyond all DRAM to all DRAM";
    rows.above(above, "ms", STILL, (ours, ideal), STILL_ABOVE_IDEAL_MS_MAX);
    pause_of_naive(rows, ours, naive);
}

fn written(rows: &mut Rows<'_>, measured: &Measured) {
    let (ours, ideal) = (measured.ours.of(Leg::WrittenHalf), measured.ours.of(Leg::WrittenIdeal));
    let (naive, qemu) = (measured.peer.of(Leg::WrittenHalf), measured.peer.of(Leg::WrittenIdeal));
    if ours.is_empty() {
        return;
    }
    let idle = measured.ours.of(Leg::Half);
    for (peer, case, max) in [
        ("idle", idle, WRITTEN_OF_IDLE_MAX),
        ("into all DRAM", ideal, WRITTEN_OF_IDEAL_MAX),
        (NAIVE, naive, WRITTEN_OF_NAIVE_MAX),
    ] {
        let what = format!("time into half the DRAM: {peer}");
        rows.pair(&what, "ms", (ours, MS), (case, MS), Bar::AtMost(max));
    }
    rows.pair("time into all DRAM: QEMU's own", "ms", (ideal, MS), (qemu, MS), Bar::None);
    rows.pair("sent: idle", "MiB", (ours, SENT_MIB), (idle, SENT_MIB), Bar::None);
    rows.pair("sent: QEMU's own", "MiB", (ours, SENT_MIB), (naive, SENT_MIB), Bar::None);
    let above = "pause into half, beyond all DRAM to all DRAM";
    rows.above(above, "ms", STILL, (ours, ideal), STILL_WRITTEN_ABOVE_IDEAL_MS_MAX);
    pause_of_naive(rows, ours, naive);
}

fn swapped(rows: &mut Rows<'_>, link: Speed, measured: &Measured) {
    let (ours, naive) = (measured.ours.of(Leg::Out), measured.peer.of(Leg::Out));
    if ours.is_empty() {
        return;
    }
    let ideal = measured.ours.of(Leg::Ideal);
    let bar = Bar::AtMost(SWAPPED_OF_IDEAL_MAX);
    rows.pair("time into all DRAM: out of all DRAM", "ms", (ours, MS), (ideal, MS), bar);
    let bar = Bar::AtMost(SWAPPED_OF_NAIVE_MAX);
    rows.pair(&format!("time into all DRAM: {NAIVE}"), "ms", (ours, MS), (naive, MS), bar);
    rows.above("pause, beyond all DRAM to all DRAM", "ms", STILL, (ours, ideal), STILL_ABOVE_IDEAL_MS_MAX);
    rows.single("pages in and out at the source meanwhile", "pages", (ours, PAGED), Bar::AtMost(PAGED_MAX));
    if link == Speed::Unlimited {
        // Elsewhere the link says how fast swap is read.
        let what = "swap read: plain direct I/O, 4 blocks of 1 MiB in flight";
        let direct = &measured.direct_mib_per_s;
        rows.against(what, "MiB/s", (ours, READ_MIB_PER_S), direct, Bar::AtLeast(READ_OF_DIRECT_MIN));
    }
}

fn both(rows: &mut Rows<'_>, measured: &Measured) {
    let (ours, naive) = (measured.ours.of(Leg::Both), measured.peer.of(Leg::Both));
    if ours.is_empty() {
        return;
    }
    let slowest: Vec<f64> = measured.both.iter().map(|bare| bare.slowest()).collect();
    let what = "time: the slowest of source disk, link, destination disk, each alone";
    rows.against(what, "ms", (ours, MS), &slowest, Bar::AtMost(BOTH_OF_SLOWEST_MAX));
    let copied = "the same without what is before the first page";
    rows.against(copied, "ms", (ours, COPIED), &slowest, Bar::None);
    let of = |part: fn(&Bare) -> f64| -> Vec<f64> { measured.both.iter().map(part).collect() };
    for (what, ms) in [
        ("source disk alone", of(|bare| bare.source_ms)),
        ("link alone", of(|bare| bare.link_ms)),
        ("destination disk alone", of(|bare| bare.destination_ms)),
    ] {
        rows.report.peer_only(&format!("{}, {what}", rows.name), "ms", &ms);
    }
    rows.pair(&format!("time: {NAIVE}"), "ms", (ours, MS), (naive, MS), Bar::None);
    rows.pair(&format!("pause: {NAIVE}"), "ms", (ours, STILL), (naive, STILL), Bar::None);
    rows.single("pages in and out at the source meanwhile", "pages", (ours, PAGED), Bar::AtMost(PAGED_MAX));
    let there = "pages in and out at the destination, up to when the guest ran";
    rows.single(there, "pages", (ours, PAGED_THERE), Bar::AtMost(PAGED_MAX));
}

fn postcopy(rows: &mut Rows<'_>, measured: &Measured) {
    let (ours, qemu) = (measured.ours.of(Leg::Postcopy), measured.peer.of(Leg::Postcopy));
    if ours.is_empty() {
        return;
    }
    rows.single("pause", "ms", (ours, STILL), Bar::AtMost(STILL_POSTCOPY_MS_MAX));
    rows.pair("pause: QEMU's own post-copy", "ms", (ours, STILL), (qemu, STILL), Bar::None);
    let what = "fault over the link, p50: a page read of bench rmap";
    rows.against(what, "us", (ours, FAULT_US), &measured.page_read_us, Bar::AtMost(FAULT_OF_READ_MAX));
    rows.pair("time until it runs there: QEMU's own post-copy", "ms", (ours, MS), (qemu, MS), Bar::None);
    rows.pair("time until all is there: QEMU's own post-copy", "ms", (ours, WHOLE), (qemu, WHOLE), Bar::None);
}

fn pause_of_naive(rows: &mut Rows<'_>, ours: &Case, naive: &Case) {
    let what = format!("pause into half the DRAM: {NAIVE}");
    rows.pair(&what, "ms", (ours, STILL), (naive, STILL), Bar::AtMost(STILL_OF_NAIVE_MAX));
}

pub fn plot(all: &[(Setting, Measured)]) -> String {
    let groups = all.iter().flat_map(|(setting, measured)| {
        let Measured { ours, peer, .. } = measured;
        let group = |load: &str, sides: [Option<&Case>; 4]| {
            let values = sides.map(|side| side.map_or(Vec::new(), |case| case.values(MS)));
            let name = format!("{}, {load}", setting.name());
            (name, values.iter().map(|values| svg::Bar::of(values)).collect())
        };
        let of = |leg: Leg| Some(ours.of(leg));
        let naive = |leg: Leg| Some(peer.of(leg));
        [
            group("idle", [of(Leg::Ideal), of(Leg::Half), naive(Leg::Ideal), naive(Leg::Half)]),
            group(
                "written",
                [of(Leg::WrittenIdeal), of(Leg::WrittenHalf), naive(Leg::WrittenIdeal), naive(Leg::WrittenHalf)],
            ),
            group("out of swap", [of(Leg::Out), of(Leg::Both), naive(Leg::Out), naive(Leg::Both)]),
        ]
    });
    svg::bar_chart(&svg::BarChart {
        title: "A VM moves to another host".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Linear,
        series: ["all DRAM", "half the DRAM", "QEMU's own", "the same with kernel swap"].map(str::to_owned).to_vec(),
        groups: groups.collect(),
    })
}
