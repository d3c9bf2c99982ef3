//! Plots as SVG: bars with whiskers, and lines. Small, light, readable without colour vision.

use std::fmt::Write as _;

use testkit::results::report::number;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 84.0;
/// Okabe and Ito's palette, told apart by every kind of eye.
const COLOURS: [&str; 6] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];
/// Roughly so many grid lines.
const TICKS: f64 = 5.0;

/// How an axis maps values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// In proportion, from zero on.
    Linear,
    /// By powers of ten.
    Log,
}

/// One bar: median, smallest and greatest.
#[derive(Debug, Clone, Copy)]
pub struct Bar {
    /// Height of the bar.
    pub median: f64,
    /// Ends of the whisker.
    pub range: [f64; 2],
}

impl Bar {
    /// Of a list of rounds; nothing when it is empty.
    pub fn of(values: &[f64]) -> Option<Bar> {
        let median = testkit::results::report::median(values)?;
        Some(Bar { median, range: testkit::results::report::spread(values)? })
    }
}

/// Groups of bars: in every group one bar for each series, in the same order.
#[derive(Debug, Clone)]
pub struct BarChart {
    /// The title, which stands above the plot.
    pub title: String,
    /// Unit, beside the axis.
    pub y_label: String,
    /// How the axis runs.
    pub y_scale: Scale,
    /// Names of the series.
    pub series: Vec<String>,
    /// Name of each group and its bars.
    pub groups: Vec<(String, Vec<Option<Bar>>)>,
}

/// A chart in which each series is a line through its points.
#[derive(Debug, Clone)]
pub struct LineChart {
    /// The title, which stands above the plot.
    pub title: String,
    /// What the horizontal axis shows; it stands below it.
    pub x_label: String,
    /// What the vertical axis shows; it stands beside it.
    pub y_label: String,
    /// How the horizontal axis runs.
    pub x_scale: Scale,
    /// How the vertical axis runs.
    pub y_scale: Scale,
    /// Name of each line and its points.
    pub series: Vec<(String, Vec<[f64; 2]>)>,
}

struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn new(scale: Scale, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let usable = values.filter(|v| v.is_finite() && (scale == Scale::Linear || *v > 0.0));
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in usable {
            low = low.min(value);
            high = high.max(value);
        }
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        match scale {
            Scale::Linear => {
                low = low.min(0.0);
                let step = tick_step(high - low);
                high = (high / step).ceil() * step;
            }
            Scale::Log => {
                low = 10_f64.powf(low.log10().floor());
                high = 10_f64.powf(high.log10().ceil());
            }
        }
        if high <= low {
            high = if scale == Scale::Log { low * 10.0 } else { low + 1.0 };
        }
        Self { scale, low, high, from, to }
    }

    fn at(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value.max(self.low) / self.low).log10() / (self.high / self.low).log10(),
        };
        self.from + (self.to - self.from) * share.clamp(0.0, 1.0)
    }

    fn ticks(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => {
                let step = tick_step(self.high - self.low);
                let count = ((self.high - self.low) / step).round() as usize;
                (0..=count).map(|index| self.low + step * index as f64).collect()
            }
            Scale::Log => {
                let decades = (self.high / self.low).log10().round() as i32;
                let every = (decades / 8 + 1).max(1);
                (0..=decades).step_by(every as usize).map(|d| self.low * 10_f64.powi(d)).collect()
            }
        }
    }
}

/// 1, 2 or 5 times a power of ten.
fn tick_step(range: f64) -> f64 {
    let rough = (range / TICKS).max(f64::MIN_POSITIVE);
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|step| step * power >= rough);
    step.unwrap_or(10.0) * power
}

fn tick_text(value: f64) -> String {
    match value.abs() {
        v if v >= 1e9 => format!("{}G", number(value / 1e9)),
        v if v >= 1e6 => format!("{}M", number(value / 1e6)),
        v if v >= 1e4 => format!("{}k", number(value / 1e3)),
        _ => {
            let text = number(value);
            if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').into() } else { text }
        }
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

struct Drawing {
    text: String,
}

impl Drawing {
    fn new(title: &str, y_label: &str, y: &Axis) -> Self {
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#fff\"/>\n\
             <text x=\"{LEFT}\" y=\"22\" font-size=\"15\" font-weight=\"bold\">{}</text>\n\
             <text transform=\"translate(16 {:.0}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
            escape(title),
            (TOP + HEIGHT - BOTTOM) / 2.0,
            escape(y_label)
        );
        for tick in y.ticks() {
            let at = y.at(tick);
            let _ = writeln!(
                text,
                "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0,
                tick_text(tick)
            );
        }
        Self { text }
    }

    fn legend<'n>(&mut self, names: impl Iterator<Item = &'n str>) {
        let mut x = LEFT;
        for (index, name) in names.enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let _ = writeln!(
                self.text,
                "<rect x=\"{x:.0}\" y=\"34\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
                 <text x=\"{:.0}\" y=\"45\">{}</text>",
                x + 17.0,
                escape(name)
            );
            x += 40.0 + 6.6 * name.len() as f64;
        }
    }

    fn finish(mut self) -> String {
        let bottom = HEIGHT - BOTTOM;
        let _ = writeln!(
            self.text,
            "<path d=\"M{LEFT} {TOP}V{bottom}H{:.1}\" fill=\"none\" stroke=\"#444\"/>\n</svg>",
            WIDTH - RIGHT
        );
        self.text
    }
}

/// Draws groups of bars.
pub fn bar_chart(chart: &BarChart) -> String {
    let bars = || chart.groups.iter().flat_map(|(_, bars)| bars.iter().flatten());
    let values = bars().flat_map(|bar| [bar.median, bar.range[0], bar.range[1]]);
    let y = Axis::new(chart.y_scale, values, HEIGHT - BOTTOM, TOP);
    let mut drawing = Drawing::new(&chart.title, &chart.y_label, &y);
    drawing.legend(chart.series.iter().map(String::as_str));
    let group_width = (WIDTH - LEFT - RIGHT) / chart.groups.len().max(1) as f64;
    let bar_width = (group_width * 0.8 / chart.series.len().max(1) as f64).min(60.0);
    // Names that would run into each other are set at a slant.
    let longest = chart.groups.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let slant = longest as f64 * 6.6 > group_width;
    for (index, (name, bars)) in chart.groups.iter().enumerate() {
        let middle = LEFT + group_width * (index as f64 + 0.5);
        let first = middle - bar_width * chart.series.len() as f64 / 2.0;
        for (series, bar) in bars.iter().enumerate() {
            let Some(bar) = bar else { continue };
            let (x, top) = (first + bar_width * series as f64, y.at(bar.median));
            let whisker = x + bar_width * 0.46;
            let _ = writeln!(
                drawing.text,
                "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\">\
                 <title>{}: {}</title></rect>\
                 <path d=\"M{whisker:.1} {:.1}V{:.1}\" stroke=\"#222\" stroke-width=\"1.5\"/>",
                bar_width * 0.92,
                (HEIGHT - BOTTOM - top).max(0.0),
                COLOURS[series % COLOURS.len()],
                escape(&chart.series[series]),
                number(bar.median),
                y.at(bar.range[0]),
                y.at(bar.range[1])
            );
        }
        let below = HEIGHT - BOTTOM + 18.0;
        let placed = if slant {
            format!("transform=\"translate({middle:.1} {below:.1}) rotate(-24)\" text-anchor=\"end\"")
        } else {
            format!("x=\"{middle:.1}\" y=\"{below:.1}\" text-anchor=\"middle\"")
        };
        let _ = writeln!(drawing.text, "<text {placed}>{}</text>", escape(name));
    }
    drawing.finish()
}

/// Draws a line chart, as the text of an SVG file.
pub fn line_chart(chart: &LineChart) -> String {
    let points = || chart.series.iter().flat_map(|(_, points)| points.iter());
    let x = Axis::new(chart.x_scale, points().map(|p| p[0]), LEFT, WIDTH - RIGHT);
    let y = Axis::new(chart.y_scale, points().map(|p| p[1]), HEIGHT - BOTTOM, TOP);
    let mut drawing = Drawing::new(&chart.title, &chart.y_label, &y);
    drawing.legend(chart.series.iter().map(|(name, _)| name.as_str()));
    for tick in x.ticks() {
        let _ = writeln!(
            drawing.text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x.at(tick),
            HEIGHT - BOTTOM + 18.0,
            tick_text(tick)
        );
    }
    let _ = writeln!(
        drawing.text,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        HEIGHT - BOTTOM + 40.0,
        escape(&chart.x_label)
    );
    for (index, (name, points)) in chart.series.iter().enumerate() {
        let at_point = |p: &[f64; 2]| format!("{:.1},{:.1}", x.at(p[0]), y.at(p[1]));
        let path: Vec<String> = points.iter().map(at_point).collect();
        let colour = COLOURS[index % COLOURS.len()];
        let _ = writeln!(
            drawing.text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\">\
             <title>{}</title></polyline>",
            path.join(" "),
            escape(name)
        );
        // Markers only where they can be told apart.
        if points.len() <= 40 {
            for point in points {
                let _ = writeln!(
                    drawing.text,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>",
                    x.at(point[0]),
                    y.at(point[1])
                );
            }
        }
    }
    drawing.finish()
}

/// Charts one below the other, as one drawing.
pub fn stack(charts: &[String]) -> String {
    let height = HEIGHT * charts.len() as f64;
    let mut text = format!("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\">\n");
    for (index, chart) in charts.iter().enumerate() {
        let y = HEIGHT * index as f64;
        text.push_str(&chart.replacen("<svg ", &format!("<svg y=\"{y}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" "), 1));
    }
    text.push_str("</svg>\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_ends() {
        for (scale, values, low, high) in [
            (Scale::Linear, vec![3.0, 87.0], 0.0, 100.0),
            (Scale::Linear, vec![0.0], 0.0, 1.0),
            (Scale::Linear, vec![], 0.0, 1.0),
            (Scale::Log, vec![0.3, 450.0], 0.1, 1000.0),
        ] {
            let axis = Axis::new(scale, values.iter().copied(), 0.0, 1.0);
            assert!((axis.low - low).abs() < 1e-9 && (axis.high - high).abs() < 1e-9, "{values:?}");
            assert_eq!((axis.at(axis.low), axis.at(axis.high)), (0.0, 1.0));
            assert!(axis.ticks().len() >= 2);
        }
    }

    #[test]
    fn charts_are_closed_and_escaped() {
        let bar = Bar::of(&[1.0, 2.0, 4.0]);
        let svg = bar_chart(&BarChart {
            title: "a < b".into(),
            y_label: "MiB/s".into(),
            y_scale: Scale::Linear,
            series: vec!["ours".into(), "peer".into()],
            groups: vec![("seq".into(), vec![bar, None])],
        });
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && svg.contains("a &lt; b"));
        assert_eq!(svg.matches("<title>").count(), 1);
        let svg = line_chart(&LineChart {
            title: String::new(),
            x_label: "GiB".into(),
            y_label: "us".into(),
            x_scale: Scale::Log,
            y_scale: Scale::Log,
            series: vec![("ours".into(), vec![[1.0, 0.1], [1024.0, 0.2]])],
        });
        assert_eq!(svg.matches("<circle").count(), 2);
        let stacked = stack(&[svg.clone(), svg]);
        assert_eq!((stacked.matches("<svg").count(), stacked.matches("</svg>").count()), (3, 3));
        assert!(stacked.contains("<svg y=\"420\""));
    }
}
