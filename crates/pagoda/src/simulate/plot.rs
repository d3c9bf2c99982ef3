//! A recording as SVG: the host's state and sums, as in figure 8 (a) and (b) of the ESX paper, and a panel per VM, as in
//! figures 6, 7 and 8 (c), (d).

use std::fmt::Write;

use pagoda_core::policy::ReclaimState;
use pagoda_core::simulate::Recording;
use pagoda_core::simulate::record::{HostPoint, VmPoint, VmRecord};
use pagoda_core::units::PageCount;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TITLE: f64 = 40.0;
const STATES: f64 = 64.0;
const PANEL: f64 = 190.0;
/// Between panels: a heading, and the numbers of the axis.
const GAP: f64 = 58.0;
/// More could not be read; the first of the file are drawn.
const PANELS_MAX: usize = 6;
/// Okabe and Ito's palette, told apart by every kind of eye.
const BLUE: &str = "#0072b2";
const ORANGE: &str = "#e69f00";
const GREEN: &str = "#009e73";
const PURPLE: &str = "#cc79a7";
const SKY: &str = "#56b4e9";
const RED: &str = "#d55e00";
const GREY: &str = "#777777";
const STATE_NAMES: [&str; 4] = ["low", "hard", "soft", "high"];

/// A line of a panel: name, colour, dashes, and its points in seconds and MiB.
struct Series {
    name: &'static str,
    colour: &'static str,
    dashes: &'static str,
    points: Vec<(f64, f64)>,
}

fn mib(pages: PageCount) -> f64 {
    pages.bytes().0 as f64 / f64::from(1 << 20)
}

fn series<P>(
    name: &'static str,
    colour: &'static str,
    dashes: &'static str,
    points: &[P],
    pick: impl Fn(&P) -> (u64, PageCount),
) -> Series {
    let point = |point: &P| {
        let (at_s, pages) = pick(point);
        (at_s as f64, mib(pages))
    };
    Series { name, colour, dashes, points: points.iter().map(point).collect() }
}

/// Draws the whole recording as one SVG document.
pub fn draw(recording: &Recording) -> String {
    let vms: Vec<&VmRecord> = recording.vms.iter().filter(|vm| !vm.points.is_empty()).take(PANELS_MAX).collect();
    let height = TITLE + STATES + GAP + (PANEL + GAP) * (1 + vms.len()) as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\" fill=\"#222\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{}</text>\n",
        escape(&recording.title)
    );
    let time = Time::new(recording.duration_s);
    states(&mut svg, &recording.host, &time, TITLE);
    let mut top = TITLE + STATES + GAP;
    panel(&mut svg, "all VMs", &host_series(recording), &time, top);
    for vm in vms {
        top += PANEL + GAP;
        panel(&mut svg, &vm.name, &vm_series(&vm.points), &time, top);
    }
    svg + "</svg>\n"
}

fn host_series(recording: &Recording) -> Vec<Series> {
    let points = &recording.host;
    let pick = |pick: fn(&HostPoint) -> PageCount| move |point: &HostPoint| (point.at_s, pick(point));
    vec![
        series("pool", GREY, "2 4", points, |point| (point.at_s, recording.pool)),
        series("in DRAM", BLUE, "", points, pick(|point| point.resident)),
        series("active", ORANGE, "6 3", points, pick(|point| point.active)),
        series("ballooned", GREEN, "", points, pick(|point| point.balloon)),
        series("swapped", RED, "", points, pick(|point| point.swapped)),
        series("zero pages dropped", PURPLE, "6 3", points, pick(|point| point.zero)),
    ]
}

fn vm_series(points: &[VmPoint]) -> Vec<Series> {
    let pick = |pick: fn(&VmPoint) -> PageCount| move |point: &VmPoint| (point.at_s, pick(point));
    vec![
        series("in DRAM", BLUE, "", points, pick(|point| point.resident)),
        series("target", SKY, "2 3", points, pick(|point| point.target)),
        series("active, estimated", ORANGE, "6 3", points, pick(|point| point.working_set)),
        series("active", GREY, "2 4", points, pick(|point| point.active)),
        series("ballooned", GREEN, "", points, pick(|point| point.balloon)),
        series("swapped", RED, "", points, pick(|point| point.swapped)),
    ]
}

/// The horizontal axis, in the unit that suits its length.
struct Time {
    end_s: f64,
    unit_s: f64,
    unit: &'static str,
}

impl Time {
    fn new(duration_s: u64) -> Self {
        let (unit_s, unit) = match duration_s {
            0..=300 => (1.0, "s"),
            301..=21_600 => (60.0, "min"),
            _ => (3600.0, "h"),
        };
        Self { end_s: duration_s.max(1) as f64, unit_s, unit }
    }

    fn at(&self, second: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (second / self.end_s).clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        let step = tick_step(self.end_s / self.unit_s, 8.0);
        steps(self.end_s / self.unit_s, step)
    }
}

/// 1, 2 or 5 times a power of ten, so that there are about `count`.
fn tick_step(range: f64, count: f64) -> f64 {
    let rough = (range / count).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough * 0.999);
    step.unwrap_or(10.0) * power
}

fn steps(range: f64, step: f64) -> Vec<f64> {
    (0..=(range / step + 1e-9).floor() as u32).map(|nth| f64::from(nth) * step).collect()
}

fn states(svg: &mut String, points: &[HostPoint], time: &Time, top: f64) {
    let level = |state: ReclaimState| top + STATES * (state as u8 as f64 + 0.5) / 4.0;
    for (nth, name) in STATE_NAMES.iter().rev().enumerate() {
        let y = top + STATES * (nth as f64 + 0.5) / 4.0;
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#eee\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0
        );
    }
    // Only where it changes: the state is a staircase.
    let mut path = String::new();
    for (nth, point) in points.iter().enumerate() {
        let (x, y) = (time.at(point.at_s as f64), level(point.state));
        let _ = if nth == 0 { write!(path, "M{x:.1} {y:.1}") } else { write!(path, "H{x:.1}V{y:.1}") };
    }
    let _ = writeln!(
        svg,
        "<path d=\"{path}\" fill=\"none\" stroke=\"{RED}\" stroke-width=\"1.5\"><title>state</title></path>"
    );
}

fn panel(svg: &mut String, heading: &str, lines: &[Series], time: &Time, top: f64) {
    let most = lines.iter().flat_map(|line| &line.points).map(|(_, value)| *value).fold(1.0, f64::max);
    let step = tick_step(most, 4.0);
    let most = (most / step).ceil() * step;
    let bottom = top + PANEL;
    let at = |value: f64| bottom - PANEL * (value / most).clamp(0.0, 1.0);
    for value in steps(most, step) {
        let y = at(value);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            y + 4.0
        );
    }
    for tick in time.ticks() {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{tick}</text>",
            time.at(tick * time.unit_s),
            bottom + 16.0
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
         <text x=\"{LEFT}\" y=\"{:.1}\"><tspan font-weight=\"bold\">{}</tspan>, MiB</text>",
        WIDTH - RIGHT,
        bottom + 30.0,
        time.unit,
        top - 8.0,
        escape(heading)
    );
    legend(svg, lines, top - 12.0);
    for line in lines {
        let at_point = |(second, value): &(f64, f64)| format!("{:.1},{:.1}", time.at(*second), at(*value));
        let points: Vec<String> = line.points.iter().map(at_point).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\" stroke-dasharray=\"{}\"><title>{}</title></polyline>",
            points.join(" "),
            line.colour,
            line.dashes,
            line.name
        );
    }
}

fn legend(svg: &mut String, lines: &[Series], y: f64) {
    let mut x = LEFT + 170.0;
    for line in lines {
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.0} {y:.1}h22\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{}\"/><text x=\"{:.0}\" y=\"{:.1}\">{}</text>",
            line.colour,
            line.dashes,
            x + 26.0,
            y + 4.0,
            line.name
        );
        x += 46.0 + 6.4 * line.name.len() as f64;
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
