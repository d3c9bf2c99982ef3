//! The demo as text: a frame for a terminal, a line for a log, the summary. Made from the model and nothing else.

use std::time::Duration;

use pagoda_api::{VmInfo, counter};

use super::model::{Cause, HISTORY_LEN, Kind, Model, Phase, Step, SwapRate};

const MIB: u64 = 1 << 20;
const BAR_LEN: usize = 17;
const WIDE_BAR_LEN: usize = 44;

/// How a piece of text looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Plain,
    Bold,
    Dim,
    Good,
    Bad,
    /// Memory that is in DRAM.
    Near,
    /// Memory that is in swap.
    Far,
}

/// One line: pieces of text with their styles.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Row(pub Vec<(Style, String)>);

impl Row {
    pub fn with(mut self, style: Style, text: impl Into<String>) -> Self {
        self.0.push((style, text.into()));
        self
    }

    pub fn of(style: Style, text: impl Into<String>) -> Self {
        Self::default().with(style, text)
    }
}

/// Characters for bars and marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Glyphs {
    full: &'static str,
    half: &'static str,
    empty: &'static str,
    done: &'static str,
    running: &'static str,
    waiting: &'static str,
    dot: &'static str,
    sparks: &'static [&'static str],
}

pub const UNICODE: Glyphs = Glyphs {
    full: "█",
    half: "▓",
    empty: "░",
    done: "✓",
    running: "▸",
    waiting: "·",
    dot: "·",
    sparks: &["▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"],
};

pub const ASCII: Glyphs = Glyphs {
    full: "#",
    half: "=",
    empty: ".",
    done: "+",
    running: ">",
    waiting: "-",
    dot: "|",
    sparks: &["_", ".", "-", "=", "+", "*", "%", "#"],
};

/// A frame that fits a terminal of 24 lines.
pub fn frame(model: &Model, accelerator: &str, now: Duration, glyphs: Glyphs) -> Vec<Row> {
    let plan = &model.plan;
    let title = format!("  an unmodified Debian VM of {} MiB in {} MiB of DRAM", plan.memory_mib, plan.dram_mib);
    let clock = format!("   {} s {} {accelerator}", now.as_secs(), glyphs.dot);
    let mut rows =
        vec![Row::of(Style::Bold, " Pagoda").with(Style::Plain, title).with(Style::Dim, clock), Row::default()];
    rows.extend(model.steps().map(|(step, phase)| phase_row(model, step, phase, now, glyphs)));
    rows.push(Row::default());
    match model.vm() {
        Some(vm) => rows.extend(memory_rows(model, vm, glyphs)),
        None => rows.push(Row::of(Style::Dim, " waiting for QEMU to attach")),
    }
    rows.push(Row::default());
    rows.extend(cause_rows(&model.causes()));
    rows
}

fn phase_row(model: &Model, step: Step, phase: &Phase, now: Duration, glyphs: Glyphs) -> Row {
    let name = format!("{:<7}", step.name);
    if phase.began.is_none() {
        return Row::of(Style::Dim, format!(" {} {name} {}", glyphs.waiting, step.does));
    }
    let (mark, name_style) = match (phase.ended, phase.bad) {
        (Some(_), 0) => ((Style::Good, glyphs.done), Style::Plain),
        (Some(_), _) => ((Style::Bad, "!"), Style::Bad),
        (None, _) => ((Style::Near, glyphs.running), Style::Bold),
    };
    let (full, empty) = bar(share_done(model, step, phase, now), BAR_LEN, glyphs);
    let bar_style = if phase.ended.is_some() { Style::Good } else { Style::Near };
    let mut row = Row::of(mark.0, format!(" {} ", mark.1))
        .with(name_style, format!("{name} "))
        .with(bar_style, full)
        .with(Style::Dim, empty)
        .with(Style::Plain, format!(" {:>5.1} s", phase.time(now).as_secs_f64()));
    if let Some(rate) = phase.ops_per_s(now) {
        row = row.with(Style::Plain, format!("  {:>7} pages/s", grouped(rate as u64)));
    }
    if step.kind == Kind::Boot {
        let kernel = model.guest_kernel.as_ref().map_or(step.does.to_owned(), |kernel| format!("Linux {kernel}"));
        row = row.with(Style::Dim, format!("  {kernel}"));
    } else if phase.bad > 0 {
        row = row.with(Style::Bad, format!("  {} WRONG", phase.bad));
    } else if phase.ended.is_some() {
        row = row.with(Style::Dim, "  all right");
    } else {
        row = row.with(Style::Dim, format!("  {}", step.does));
    }
    row
}

/// From 0 to 1.
fn share_done(model: &Model, step: Step, phase: &Phase, now: Duration) -> f64 {
    /// A guest boots in about this under TCG; only the bar depends on it.
    const BOOT_S: f64 = 8.0;
    if phase.ended.is_some() {
        return 1.0;
    }
    let seconds = phase.time(now).as_secs_f64();
    let share = match step.kind {
        Kind::Boot => seconds / BOOT_S,
        Kind::Timed => seconds / model.plan.seconds as f64,
        Kind::Sweep => phase.mib_done as f64 / model.plan.work_mib as f64,
    };
    share.min(0.99)
}

fn memory_rows(model: &Model, vm: &VmInfo, glyphs: Glyphs) -> Vec<Row> {
    let label = |text: &str| Row::of(Style::Plain, format!(" {text:<9} "));
    let over = model.resident_bytes_max > vm.dram_limit_bytes;
    let (full, empty) = bar(vm.resident_bytes as f64 / vm.dram_limit_bytes.max(1) as f64, WIDE_BAR_LEN, glyphs);
    let dram = label("DRAM")
        .with(Style::Near, full)
        .with(Style::Dim, empty)
        .with(Style::Bold, format!(" {}", mib(vm.resident_bytes)))
        .with(Style::Plain, format!(" of {} MiB", mib(vm.dram_limit_bytes)))
        .with(if over { Style::Bad } else { Style::Dim }, format!("  peak {}", mib(model.resident_bytes_max)));

    let cells = |bytes: u64| (bytes as f64 / vm.memory_bytes.max(1) as f64 * WIDE_BAR_LEN as f64).round() as usize;
    let resident = cells(vm.resident_bytes);
    let swapped = cells(vm.swapped_bytes).min(WIDE_BAR_LEN.saturating_sub(resident));
    let zero = WIDE_BAR_LEN.saturating_sub(resident + swapped);
    let memory = label("memory")
        .with(Style::Near, glyphs.full.repeat(resident))
        .with(Style::Far, glyphs.half.repeat(swapped))
        .with(Style::Dim, glyphs.empty.repeat(zero))
        .with(Style::Far, format!(" {} swapped", mib(vm.swapped_bytes)))
        .with(Style::Dim, format!("  {} zero", mib(vm.zero_bytes)));

    let rate = model.swap_rate();
    // At least 1 MiB/s, or a trickle would fill the scale.
    let most = model.history.iter().fold(1.0_f64, |most, rate| most.max(rate.in_mib).max(rate.out_mib));
    let spark = |of: fn(&SwapRate) -> f64| {
        let text: String =
            model.history.iter().map(|rate| glyphs.sparks[level(of(rate) / most, glyphs.sparks.len())]).collect();
        format!("{text:<HISTORY_LEN$}")
    };
    let swap = label("swap")
        .with(Style::Plain, "in ")
        .with(Style::Bold, format!("{:>6.1}", rate.in_mib))
        .with(Style::Far, format!(" {}", spark(|rate| rate.in_mib)))
        .with(Style::Plain, "  out ")
        .with(Style::Bold, format!("{:>6.1}", rate.out_mib))
        .with(Style::Far, format!(" {}", spark(|rate| rate.out_mib)))
        .with(Style::Dim, "  MiB/s");
    vec![dram, memory, swap]
}

fn cause_rows(causes: &[Cause]) -> Vec<Row> {
    let heading = format!(" {:<16} {:>10} {:>12} {:>10} {:>10}", "FAULTS", "per s", "total", "p50 us", "p99 us");
    let mut rows = vec![Row::of(Style::Dim, heading)];
    rows.extend(causes.iter().map(|cause| {
        let style = if cause.faults_per_s >= 1.0 { Style::Plain } else { Style::Dim };
        Row::of(
            style,
            format!(
                " {:<16} {:>10} {:>12} {:>10} {:>10}",
                cause.name,
                grouped(cause.faults_per_s as u64),
                grouped(cause.faults),
                micros(cause.p50_us),
                micros(cause.p99_us)
            ),
        )
    }));
    rows
}

/// One line a second, for logs.
pub fn line(model: &Model, now: Duration) -> String {
    let mut text = format!("{:>4} s", now.as_secs());
    match model.current() {
        Some((step, phase)) => {
            let percent = share_done(model, step, phase, now) * 100.0;
            text += &format!("  {:<6} {percent:>3.0} %", step.name);
        }
        None => text += "  end         ",
    }
    let Some(vm) = model.vm() else { return text };
    let rate = model.swap_rate();
    let causes = model.causes();
    text += &format!(
        "  resident {} of {} MiB, swapped {}, zero {}  in {:.1} out {:.1} MiB/s  wrong {}",
        mib(vm.resident_bytes),
        mib(vm.dram_limit_bytes),
        mib(vm.swapped_bytes),
        mib(vm.zero_bytes),
        rate.in_mib,
        rate.out_mib,
        model.bad
    );
    let total: f64 = causes.iter().map(|cause| cause.faults_per_s).sum();
    text += &format!("  faults/s {total:.0}");
    let busy: Vec<String> = causes
        .iter()
        .filter(|cause| cause.faults_per_s >= 1.0)
        .map(|cause| {
            let (p50, p99) = (micros(cause.p50_us), micros(cause.p99_us));
            format!("{} {:.0} ({p50}/{p99} us)", cause.name, cause.faults_per_s)
        })
        .collect();
    if !busy.is_empty() {
        text += &format!(": {}", busy.join(", "));
    }
    text
}

/// What each phase did, and all together. The faults by cause are already there under a frame.
pub fn summary(model: &Model, now: Duration, with_causes: bool) -> Vec<Row> {
    let columns = |cells: [&str; 7]| {
        let [name, time, ops, rate, read, written, peak] = cells;
        format!(" {name:<7} {time:>8} {ops:>10} {rate:>10} {read:>9} {written:>9} {peak:>10}")
    };
    let heading = columns(["PHASE", "time", "pages", "pages/s", "in MiB", "out MiB", "peak DRAM"]);
    let mut rows = vec![Row::default(), Row::of(Style::Dim, heading)];
    for (step, phase) in model.steps().filter(|(_, phase)| phase.began.is_some()) {
        let text = columns([
            step.name,
            &format!("{:.1} s", phase.time(now).as_secs_f64()),
            &if step.kind == Kind::Boot { "-".to_owned() } else { grouped(phase.ops) },
            &phase.ops_per_s(now).map_or("-".to_owned(), |rate| grouped(rate as u64)),
            &pages_mib(phase.pages_in()),
            &pages_mib(phase.pages_out()),
            &mib(phase.resident_bytes_max),
        ]);
        rows.push(Row::of(if phase.bad > 0 { Style::Bad } else { Style::Plain }, text));
    }
    let ops: u64 = model.steps().map(|(_, phase)| phase.ops).sum();
    let (pages_in, pages_out) = model.pages_in_out();
    let total = columns([
        "all",
        &format!("{:.1} s", now.as_secs_f64()),
        &grouped(ops),
        "",
        &pages_mib(pages_in),
        &pages_mib(pages_out),
        &mib(model.resident_bytes_max),
    ]);
    rows.push(Row::of(Style::Bold, total));
    if with_causes {
        rows.push(Row::default());
        rows.extend(cause_rows(&model.causes()));
    }
    rows
}

fn bar(share: f64, len: usize, glyphs: Glyphs) -> (String, String) {
    let full = ((share.clamp(0.0, 1.0) * len as f64).round() as usize).min(len);
    (glyphs.full.repeat(full), glyphs.empty.repeat(len - full))
}

/// Which of `levels` a share from 0 to 1 is on.
fn level(share: f64, levels: usize) -> usize {
    ((share * levels as f64) as usize).min(levels.saturating_sub(1))
}

/// Whole MiB, rounded up: a peak must not look smaller than it was.
pub fn mib(bytes: u64) -> String {
    bytes.div_ceil(MIB).to_string()
}

pub fn pages_mib(pages: u64) -> String {
    grouped(pages * counter::PAGE_BYTES / MIB)
}

fn micros(us: Option<f64>) -> String {
    us.map_or("-".to_owned(), |us| if us < 99.95 { format!("{us:.1}") } else { grouped(us.round() as u64) })
}

/// Digits in groups of three.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
