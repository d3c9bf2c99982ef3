//! A recording in numbers: a table for people, JSON for programs.

use std::fmt::Write;

use pagoda_core::policy::state::STATES;
use pagoda_core::simulate::Recording;
use pagoda_core::simulate::record::{HostPoint, VmPoint, VmRecord};
use pagoda_core::units::PageCount;
use serde::Serialize;

use crate::output::{Side, Table};
use crate::units::format_size;

#[derive(Debug, Serialize)]
pub struct Report {
    pub title: String,
    pub duration_s: u64,
    pub pool_bytes: u64,
    /// Part of the time in each state.
    pub states: States,
    pub vms: Vec<Vm>,
    /// VMs that were not admitted.
    pub refused: Vec<String>,
    pub violations: Violations,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host: Vec<Host>,
}

#[derive(Debug, Serialize)]
pub struct States {
    pub high: f64,
    pub soft: f64,
    pub hard: f64,
    pub low: f64,
}

/// Promises that were broken, each counted; all 0 in a sound policy.
#[derive(Debug, Serialize)]
pub struct Violations {
    pub below_min: u64,
    pub capped_below_min: u64,
    pub targets_beyond_pool: u64,
    pub pool_overdrawn: u64,
    pub lost_pages: u64,
}

#[derive(Debug, Serialize)]
pub struct Vm {
    pub name: String,
    pub memory_bytes: u64,
    pub resident_bytes_mean: Option<f64>,
    pub resident_bytes_last: Option<u64>,
    pub target_bytes_last: Option<u64>,
    pub swap_read_bytes: u64,
    pub swap_write_bytes: u64,
    pub zero_dropped_bytes: u64,
    /// Work done of what it would have done without a fault.
    pub speed_mean: Option<f64>,
    pub blocked_s: u64,
    pub short_s: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<Point>,
}

#[derive(Debug, Serialize)]
pub struct Point {
    pub at_s: u64,
    pub resident_bytes: u64,
    pub target_bytes: u64,
    pub working_set_bytes: u64,
    pub active_bytes: u64,
    pub balloon_bytes: u64,
    pub swapped_bytes: u64,
    pub zero_bytes: u64,
    pub speed: f64,
    pub runs: bool,
}

#[derive(Debug, Serialize)]
pub struct Host {
    pub at_s: u64,
    pub state: &'static str,
    pub free_bytes: u64,
    pub resident_bytes: u64,
    pub active_bytes: u64,
    pub balloon_bytes: u64,
    pub swapped_bytes: u64,
    pub zero_bytes: u64,
}

fn bytes(pages: PageCount) -> u64 {
    pages.bytes().0
}

impl Report {
    pub fn new(recording: &Recording, with_points: bool) -> Self {
        let [high, soft, hard, low] = STATES.map(|state| recording.state_ratio(state));
        let broken = &recording.violations;
        Self {
            title: recording.title.clone(),
            duration_s: recording.duration_s,
            pool_bytes: bytes(recording.pool),
            states: States { high, soft, hard, low },
            vms: recording.vms.iter().map(|vm| Vm::new(vm, with_points)).collect(),
            refused: recording.refused.clone(),
            violations: Violations {
                below_min: broken.below_min,
                capped_below_min: broken.capped_below_min,
                targets_beyond_pool: broken.targets_beyond_pool,
                pool_overdrawn: broken.pool_overdrawn,
                lost_pages: broken.lost_pages,
            },
            host: if with_points { recording.host.iter().map(Host::new).collect() } else { Vec::new() },
        }
    }
}

impl Vm {
    fn new(vm: &VmRecord, with_points: bool) -> Self {
        let last = vm.points.last();
        let totals = &vm.totals;
        Self {
            name: vm.name.clone(),
            memory_bytes: bytes(vm.memory),
            resident_bytes_mean: vm.mean(0, u64::MAX, |point| bytes(point.resident) as f64),
            resident_bytes_last: last.map(|point| bytes(point.resident)),
            target_bytes_last: last.map(|point| bytes(point.target)),
            swap_read_bytes: bytes(PageCount(totals.pages_in)),
            swap_write_bytes: bytes(PageCount(totals.pages_out)),
            zero_dropped_bytes: bytes(PageCount(totals.zero_dropped)),
            speed_mean: (totals.busy_ms > 0).then(|| totals.work_s * 1000.0 / totals.busy_ms as f64),
            blocked_s: totals.blocked_ms / 1000,
            short_s: totals.short_ms / 1000,
            points: if with_points { vm.points.iter().map(Point::new).collect() } else { Vec::new() },
        }
    }
}

impl Point {
    fn new(point: &VmPoint) -> Self {
        Self {
            at_s: point.at_s,
            resident_bytes: bytes(point.resident),
            target_bytes: bytes(point.target),
            working_set_bytes: bytes(point.working_set),
            active_bytes: bytes(point.active),
            balloon_bytes: bytes(point.balloon),
            swapped_bytes: bytes(point.swapped),
            zero_bytes: bytes(point.zero),
            speed: point.speed,
            runs: point.runs,
        }
    }
}

impl Host {
    fn new(point: &HostPoint) -> Self {
        Self {
            at_s: point.at_s,
            state: point.state.name(),
            free_bytes: bytes(point.free),
            resident_bytes: bytes(point.resident),
            active_bytes: bytes(point.active),
            balloon_bytes: bytes(point.balloon),
            swapped_bytes: bytes(point.swapped),
            zero_bytes: bytes(point.zero),
        }
    }
}

pub fn text(recording: &Recording) -> String {
    let report = Report::new(recording, false);
    let mut table = Table::new(&[
        ("NAME", Side::Left),
        ("MEMSZ", Side::Right),
        ("GRANT", Side::Right),
        ("MEAN", Side::Right),
        ("TGT", Side::Right),
        ("SWR", Side::Right),
        ("SWW", Side::Right),
        ("ZERO", Side::Right),
        ("SPEED", Side::Right),
        ("BLOCKED", Side::Right),
    ]);
    let size = |bytes: Option<u64>| bytes.map_or("-".into(), format_size);
    for vm in &report.vms {
        table.row(vec![
            vm.name.clone(),
            format_size(vm.memory_bytes),
            size(vm.resident_bytes_last),
            size(vm.resident_bytes_mean.map(|bytes| bytes as u64)),
            size(vm.target_bytes_last),
            format_size(vm.swap_read_bytes),
            format_size(vm.swap_write_bytes),
            format_size(vm.zero_dropped_bytes),
            vm.speed_mean.map_or("-".into(), |speed| format!("{:.0} %", speed * 100.0)),
            format!("{} s", vm.blocked_s),
        ]);
    }
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let States { high, soft, hard, low } = report.states;
    let mut text = format!(
        "{}\n{} s, pool {}; high {}, soft {}, hard {}, low {}\n\n{}",
        report.title,
        report.duration_s,
        format_size(report.pool_bytes),
        percent(high),
        percent(soft),
        percent(hard),
        percent(low),
        table.render()
    );
    for name in &report.refused {
        let _ = writeln!(text, "not admitted: {name}");
    }
    if recording.violations != Default::default() {
        let _ = writeln!(text, "broken promises: {:?}", recording.violations);
    }
    text
}
