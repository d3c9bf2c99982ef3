//! The rows of the report, and the bars.

use testkit::results::report::{Bar, Report};

use super::guest::{Moved, Size};
use crate::svg;

/// Times of ours against peers.
const OF_IDEAL_MAX: f64 = 1.02;
const OF_BARE_MAX: f64 = 1.05;
const OF_QEMU_MAX: f64 = 0.8;
const OF_NAIVE_MAX: f64 = 1.0 / 1.3;
const WRITTEN_OF_IDLE_MAX: f64 = 1.4;
const WRITTEN_OF_IDEAL_MAX: f64 = 1.03;
const WRITTEN_OF_NAIVE_MAX: f64 = 1.0 / 1.58;
const SWAPPED_OF_IDEAL_MAX: f64 = 1.05;
const SWAPPED_OF_NAIVE_MAX: f64 = 1.0 / 3.0;
/// How long a guest stands still.
const STILL_MS_MAX: f64 = 40.0;
const STILL_ABOVE_IDEAL_MS_MAX: f64 = 5.0;
const STILL_WRITTEN_ABOVE_IDEAL_MS_MAX: f64 = 11.0;
const STILL_OF_NAIVE_MAX: f64 = 0.2;
/// Pages that a move takes from swap or into it.
const PAGED_MAX: f64 = 0.0;

/// What was measured of one kind of move, by round.
#[derive(Default)]
pub struct Case {
    ms: Vec<f64>,
    copied_ms: Vec<f64>,
    still_ms: Vec<f64>,
    /// On the link.
    sent_mib: Vec<f64>,
    paged: Vec<f64>,
}

impl Case {
    pub fn add(&mut self, name: &str, moved: &Moved) {
        moved.show(name);
        self.ms.push(moved.ms);
        self.copied_ms.push(moved.copied_ms);
        self.still_ms.push(moved.downtime_ms);
        self.sent_mib.push(moved.link_bytes as f64 / f64::from(1 << 20));
        self.paged.push(moved.paged as f64);
    }
}

/// One load, by side.
#[derive(Default)]
pub struct Load {
    /// Ours, into as much DRAM as the VM has memory.
    pub ideal: Case,
    /// Ours, into half of it.
    pub ours: Case,
    /// QEMU alone, into a cgroup of half of it.
    pub naive: Case,
}

/// All of one size.
#[derive(Default)]
pub struct Measured {
    pub idle: Load,
    pub written: Load,
    /// Ours, out of half the DRAM and the swap into all DRAM, and the same of QEMU alone.
    pub swapped: Case,
    pub swapped_naive: Case,
    /// QEMU alone, into all DRAM.
    pub qemu: Case,
    pub bare_ms: Vec<f64>,
}

/// Adds the rows of one size. A case that was not asked for has none.
pub fn add(report: &mut Report, size: Size, measured: &Measured) {
    add_idle(report, size, measured);
    let name = |what: &str| format!("{} MiB, 1 Gbit/s, {what}", size.memory_mib);
    if !measured.written.ours.ms.is_empty() {
        add_written(report, &name("half rewritten meanwhile"), measured);
    }
    if !measured.swapped.ms.is_empty() {
        add_swapped(report, &name("out of half the DRAM and swap"), measured);
    }
}

fn add_idle(report: &mut Report, size: Size, measured: &Measured) {
    let Measured { idle: Load { ideal, ours, naive }, qemu, bare_ms, .. } = measured;
    let name = format!("{} MiB, 1 Gbit/s, idle", size.memory_mib);
    let time = format!("{name}, time");
    let mut pair = |what: &str, unit: &str, ours: &[f64], peer: &[f64], bar: Bar| {
        report.pair(&format!("{name}, {what}"), unit, ours, peer, bar);
    };
    pair("time into half the DRAM: into all DRAM", "ms", &ours.ms, &ideal.ms, Bar::AtMost(OF_IDEAL_MAX));
    let bare = "one encrypted stream of as many bytes";
    pair(&format!("time into all DRAM: {bare}"), "ms", &ideal.ms, bare_ms, Bar::AtMost(OF_BARE_MAX));
    pair(
        &format!("the same without what is before the first page: {bare}"),
        "ms",
        &ideal.copied_ms,
        bare_ms,
        Bar::None,
    );
    pair("time into all DRAM: QEMU's own", "ms", &ideal.ms, &qemu.ms, Bar::AtMost(OF_QEMU_MAX));
    pair("sent: QEMU's own", "MiB", &ideal.sent_mib, &qemu.sent_mib, Bar::None);
    pair("pause into all DRAM: QEMU's own", "ms", &ideal.still_ms, &qemu.still_ms, Bar::None);
    report.pair(&format!("{time} into half the DRAM: {NAIVE}"), "ms", &ours.ms, &naive.ms, Bar::AtMost(OF_NAIVE_MAX));
    report.single(&format!("{name}, pause into half the DRAM"), "ms", &ours.still_ms, Bar::AtMost(STILL_MS_MAX));
    add_above(report, &format!("{name}, pause into half"), (&ours.still_ms, &ideal.still_ms), STILL_ABOVE_IDEAL_MS_MAX);
    add_pause_of_naive(report, &name, ours, naive);
}

const NAIVE: &str = "QEMU's own, kernel swap in a cgroup of half";

fn add_written(report: &mut Report, name: &str, measured: &Measured) {
    let Load { ideal, ours, naive } = &measured.written;
    let time = format!("{name}, time into half the DRAM");
    let mut pair = |peer: &str, peer_ms: &[f64], max: f64| {
        report.pair(&format!("{time}: {peer}"), "ms", &ours.ms, peer_ms, Bar::AtMost(max));
    };
    pair("idle", &measured.idle.ours.ms, WRITTEN_OF_IDLE_MAX);
    pair("into all DRAM", &ideal.ms, WRITTEN_OF_IDEAL_MAX);
    pair(NAIVE, &naive.ms, WRITTEN_OF_NAIVE_MAX);
    report.pair(&format!("{name}, sent: idle"), "MiB", &ours.sent_mib, &measured.idle.ours.sent_mib, Bar::None);
    let still = (&ours.still_ms[..], &ideal.still_ms[..]);
    add_above(report, &format!("{name}, pause into half"), still, STILL_WRITTEN_ABOVE_IDEAL_MS_MAX);
    add_pause_of_naive(report, name, ours, naive);
}

fn add_swapped(report: &mut Report, name: &str, measured: &Measured) {
    let Measured { swapped, swapped_naive, idle: Load { ideal, .. }, .. } = measured;
    let time = format!("{name}, time into all DRAM");
    let bar = Bar::AtMost(SWAPPED_OF_IDEAL_MAX);
    report.pair(&format!("{time}: out of all DRAM"), "ms", &swapped.ms, &ideal.ms, bar);
    let bar = Bar::AtMost(SWAPPED_OF_NAIVE_MAX);
    report.pair(&format!("{time}: {NAIVE}"), "ms", &swapped.ms, &swapped_naive.ms, bar);
    let still = (&swapped.still_ms[..], &ideal.still_ms[..]);
    add_above(report, &format!("{name}, pause"), still, STILL_ABOVE_IDEAL_MS_MAX);
    let paged = format!("{name}, pages in and out at the source meanwhile");
    report.single(&paged, "pages", &swapped.paged, Bar::AtMost(PAGED_MAX));
}

/// How much longer a guest stands still than in the ideal case of the same round.
fn add_above(report: &mut Report, name: &str, (ours, ideal): (&[f64], &[f64]), max: f64) {
    let above: Vec<f64> = ours.iter().zip(ideal).map(|(ours, ideal)| ours - ideal).collect();
    report.single(&format!("{name}, beyond all DRAM to all DRAM"), "ms", &above, Bar::AtMost(max));
}

fn add_pause_of_naive(report: &mut Report, name: &str, ours: &Case, naive: &Case) {
    let row = format!("{name}, pause into half the DRAM: {NAIVE}");
    report.pair(&row, "ms", &ours.still_ms, &naive.still_ms, Bar::AtMost(STILL_OF_NAIVE_MAX));
}

pub fn plot(all: &[(Size, Measured)]) -> String {
    let group = |size: &Size, load: &str, sides: [&[f64]; 4]| {
        (format!("{} MiB, {load}", size.memory_mib), sides.map(svg::Bar::of).to_vec())
    };
    let groups = all.iter().flat_map(|(size, Measured { idle, written, swapped, swapped_naive, qemu, .. })| {
        [
            group(size, "idle", [&idle.ideal.ms, &idle.ours.ms, &qemu.ms, &idle.naive.ms]),
            group(size, "written", [&written.ideal.ms, &written.ours.ms, &[], &written.naive.ms]),
            group(size, "out of swap", [&[], &swapped.ms, &[], &swapped_naive.ms]),
        ]
    });
    svg::bar_chart(&svg::BarChart {
        title: "A VM moves over 1 Gbit/s".to_owned(),
        y_label: "ms".to_owned(),
        y_scale: svg::Scale::Linear,
        series: ["all DRAM", "half the DRAM", "QEMU's own", "the same with kernel swap"].map(str::to_owned).to_vec(),
        groups: groups.collect(),
    })
}
