//! What a bench found: figures, each a pair of ours and the peer's where there is one, with the
//! bar it is held to.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::machine::Machine;

/// What a figure must reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bar {
    /// The ratio, or the value where there is no peer, must not be below.
    AtLeast(f64),
    /// It must not be above.
    AtMost(f64),
    /// There is no bar: the figure is shown for information.
    None,
}

impl Bar {
    fn text(self) -> Option<String> {
        let short = |limit: f64| (limit * 1000.0).round() / 1000.0;
        match self {
            Self::AtLeast(limit) => Some(format!("at least {}", short(limit))),
            Self::AtMost(limit) => Some(format!("at most {}", short(limit))),
            Self::None => None,
        }
    }

    fn holds(self, value: Option<f64>) -> Option<bool> {
        match (self, value) {
            (Self::None, _) => None,
            (_, None) => Some(false),
            (Self::AtLeast(limit), Some(value)) => Some(value >= limit),
            (Self::AtMost(limit), Some(value)) => Some(value <= limit),
        }
    }
}

/// One figure, which is one row of a table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// What was measured, and against which peer.
    pub name: String,
    /// Unit of `ours` and `peer`.
    pub unit: String,
    /// Median of the rounds.
    pub ours: Option<f64>,
    /// Median of the rounds.
    pub peer: Option<f64>,
    /// Median of each round's ours / peer.
    pub ratio: Option<f64>,
    /// Smallest and greatest of the rounds: of the ratio, or of the value that stands alone.
    pub spread: Option<[f64; 2]>,
    /// What it must reach.
    pub bar: Option<String>,
    /// Whether it does; absent without a bar.
    pub holds: Option<bool>,
    /// What the figures do not say: of a peer that did not come to its end, say.
    #[serde(default)]
    pub note: Option<String>,
}

/// All figures of a bench.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// Name of the bench.
    pub bench: String,
    /// The machine on which it ran.
    pub machine: Machine,
    /// What ran the memory accesses: native (toy VMM), tcg or kvm.
    pub accelerator: String,
    /// Commit of the sources.
    pub commit: String,
    /// Hash of the code that was measured ([`super::code`]); empty if it is not known.
    #[serde(default)]
    pub code: String,
    /// The figures, in the order in which the bench gives them.
    pub figures: Vec<Figure>,
}

impl Report {
    /// A report without figures, of the code as it is now.
    pub fn new(bench: &str, machine: Machine, accelerator: &str) -> Self {
        Self {
            bench: bench.to_owned(),
            machine,
            accelerator: accelerator.to_owned(),
            commit: super::machine::commit(),
            code: String::new(),
            figures: Vec::new(),
        }
    }

    /// Ours against a peer, one value of each per round: [`NO_VALUE`] where a side did not come to its end.
    pub fn pair(&mut self, name: &str, unit: &str, ours: &[f64], peer: &[f64], bar: Bar) {
        let ratios: Vec<f64> = ours.iter().zip(peer).filter(|(_, p)| **p > 0.0).map(|(o, p)| o / p).collect();
        let ratio = median(&ratios);
        // Without ours, as when the peers are measured alone, there is nothing to judge; nor where no peer came to its end.
        let is_judged = !ours.is_empty() && (peer.is_empty() || peer.iter().any(|value| !value.is_nan()));
        self.figures.push(Figure {
            name: name.to_owned(),
            unit: unit.to_owned(),
            ours: median(ours),
            peer: median(peer),
            ratio,
            spread: spread(&ratios),
            bar: bar.text(),
            holds: if is_judged { bar.holds(ratio) } else { None },
            note: None,
        });
    }

    /// Says more of the last row.
    pub fn note(&mut self, note: String) {
        if let Some(figure) = self.figures.last_mut() {
            figure.note = Some(match figure.note.take() {
                Some(before) => format!("{before}; {note}"),
                None => note,
            });
        }
    }

    /// A value of ours that is held to a bar by itself.
    pub fn single(&mut self, name: &str, unit: &str, ours: &[f64], bar: Bar) {
        let value = median(ours);
        self.figures.push(Figure {
            name: name.to_owned(),
            unit: unit.to_owned(),
            ours: value,
            peer: None,
            ratio: None,
            spread: spread(ours),
            bar: bar.text(),
            holds: bar.holds(value),
            note: None,
        });
    }

    /// A value of a peer, for information.
    pub fn peer_only(&mut self, name: &str, unit: &str, peer: &[f64]) {
        self.figures.push(Figure {
            name: name.to_owned(),
            unit: unit.to_owned(),
            ours: None,
            peer: median(peer),
            ratio: None,
            spread: spread(peer),
            bar: None,
            holds: None,
            note: None,
        });
    }

    /// Whether no bar is missed.
    pub fn holds(&self) -> bool {
        self.figures.iter().all(|figure| figure.holds != Some(false))
    }

    /// The table for people.
    pub fn table(&self) -> String {
        let mut text = format!("{}\n", self.heading());
        let width = self.figures.iter().map(|figure| figure.name.len()).max().unwrap_or(0).max(6);
        let _ = writeln!(
            text,
            "{:width$}  {:>7} {:>10} {:>10} {:>8} {:>19}  {:14} verdict",
            "figure", "unit", "ours", "peer", "ratio", "spread", "bar"
        );
        for figure in &self.figures {
            let verdict = match figure.holds {
                Some(true) => "holds",
                Some(false) => "falls short",
                None => "",
            };
            let range = figure.spread.map_or(String::new(), |[low, high]| format!("{}-{}", number(low), number(high)));
            let note = figure.note.as_ref().map_or(String::new(), |note| format!(" ({note})"));
            let line = format!(
                "{:width$}  {:>7} {:>10} {:>10} {:>8} {:>19}  {:14} {verdict}{note}",
                figure.name,
                figure.unit,
                optional(figure.ours),
                optional(figure.peer),
                optional(figure.ratio),
                range,
                figure.bar.as_deref().unwrap_or(""),
            );
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }

    fn heading(&self) -> String {
        format!("{}: {}\naccelerator {}, commit {}", self.bench, self.machine.line(), self.accelerator, self.commit)
    }

    /// Writes the report as JSON, and makes its directory if there is none.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_json(&self, path: &Path) -> Result<()> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(|| format!("make {}", dir.display()))?;
        }
        let json = serde_json::to_string_pretty(self)? + "\n";
        fs::write(path, json).with_context(|| format!("write {}", path.display()))
    }
}

fn optional(value: Option<f64>) -> String {
    value.map_or(String::new(), number)
}

/// Three significant digits, no exponent.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        v if v >= 0.01 => 3,
        _ => 5,
    };
    format!("{value:.digits$}")
}

/// Of a round in which a side did not come to its end.
pub const NO_VALUE: f64 = f64::NAN;

/// The middle value; the mean of the two middle ones where their number is even.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The smallest and the greatest of the values that are numbers.
pub fn spread(values: &[f64]) -> Option<[f64; 2]> {
    let values = || values.iter().copied().filter(|value| !value.is_nan());
    let (low, high) = (values().min_by(f64::total_cmp)?, values().max_by(f64::total_cmp)?);
    Some([low, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        for (values, expected) in
            [(&[][..], None), (&[2.0][..], Some(2.0)), (&[3.0, 1.0, 2.0][..], Some(2.0)), (&[4.0, 1.0][..], Some(2.5))]
        {
            assert_eq!(median(values), expected);
        }
        assert_eq!(spread(&[3.0, 1.0, 2.0]), Some([1.0, 3.0]));
    }

    #[test]
    fn a_pair_is_judged_by_the_median_of_its_ratios() {
        let mut report = Report::new("test", Machine::default(), "native");
        report.pair("a", "MiB/s", &[100.0, 300.0, 80.0], &[50.0, 100.0, 80.0], Bar::AtLeast(2.0));
        report.pair("b", "us", &[4.0], &[2.0], Bar::AtMost(1.5));
        report.pair("c", "us", &[4.0], &[], Bar::AtMost(1.5));
        report.single("d", "%", &[0.3], Bar::AtMost(0.4));
        let got: Vec<_> = report.figures.iter().map(|f| (f.ratio, f.holds)).collect();
        assert_eq!(got, [(Some(2.0), Some(true)), (Some(2.0), Some(false)), (None, Some(false)), (None, Some(true))]);
        assert!(!report.holds());
        // A peer that was killed in a round takes no part in it; one that was killed in all of them gives no verdict.
        report.pair("e", "op/s", &[10.0, 30.0], &[NO_VALUE, 10.0], Bar::AtLeast(2.0));
        report.pair("f", "op/s", &[10.0], &[NO_VALUE], Bar::AtLeast(2.0));
        let got: Vec<_> = report.figures[4..].iter().map(|f| (f.peer, f.ratio, f.holds)).collect();
        assert_eq!(got, [(Some(10.0), Some(3.0), Some(true)), (None, None, None)]);
        assert!(report.table().contains("falls short"));
    }

    #[test]
    fn the_json_has_the_agreed_form() {
        let mut report = Report::new("test", Machine::default(), "native");
        report.pair("a", "us", &[1.0], &[2.0], Bar::None);
        let json = serde_json::to_value(&report).unwrap();
        let keys = |value: &serde_json::Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
        assert_eq!(keys(&json), ["accelerator", "bench", "code", "commit", "figures", "machine"]);
        assert_eq!(
            keys(&json["figures"][0]),
            ["bar", "holds", "name", "note", "ours", "peer", "ratio", "spread", "unit"]
        );
    }
}
