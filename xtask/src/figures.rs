//! Puts figures into the README: every one that has a bar, and every one where the peer is better. From
//! `bench/results/*.json`, from nowhere else, and only what the code of today was measured with.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::bench::code::Crates;
use crate::bench::report::{Figure, Report, number};
use crate::bench::{code_of, repository};

const BEGIN: &str = "<!-- figures: begin (filled from bench/results/*.json) -->\n";
const END: &str = "<!-- figures: end -->";

/// Rewrites the README's table; `Ok(false)` when a bar is missed or a result stands for other code than today's.
///
/// # Errors
/// A result cannot be read; the README has no place for the table.
pub fn main() -> Result<bool> {
    let results = Results::look()?;
    let readme = repository().join("README.md");
    let text = fs::read_to_string(&readme).context("read README.md")?;
    fs::write(&readme, results.fill(&text)?).context("write README.md")?;
    for Report { bench, commit, .. } in &results.stale {
        eprintln!(
            "figures: {bench} is left out: its code has changed since {commit}; `cargo xtask bench {bench}` measures it"
        );
    }
    Ok(results.stale.is_empty() && results.today.iter().all(Report::holds))
}

/// Complains where the README's figures are not those of the code of today.
///
/// # Errors
/// A result cannot be read.
pub fn check() -> Result<Option<String>> {
    let text = fs::read_to_string(repository().join("README.md")).context("read README.md")?;
    let is_right = Results::look()?.fill(&text)? == text;
    let complaint = "README.md: not the figures of today's code: run `cargo xtask figures`";
    Ok((!is_right).then(|| complaint.to_owned()))
}

/// The results, by whether the code that they measured is today's.
struct Results {
    today: Vec<Report>,
    stale: Vec<Report>,
}

impl Results {
    fn look() -> Result<Results> {
        let crates = Crates::look()?;
        let (mut today, mut stale) = (Vec::new(), Vec::new());
        for report in read(&repository().join("bench/results"))? {
            let is_today = code_of(&report.bench, &crates)?.is_some_and(|code| code == report.code);
            if is_today { today.push(report) } else { stale.push(report) }
        }
        Ok(Results { today, stale })
    }

    fn fill(&self, readme: &str) -> Result<String> {
        let mut table = table(&self.today);
        if !self.stale.is_empty() {
            let names: Vec<&str> = self.stale.iter().map(|report| report.bench.as_str()).collect();
            let _ = writeln!(
                table,
                "Left out, because their code has changed since they were measured: {}.\n",
                names.join(", ")
            );
        }
        fill(readme, &table).context("README.md has no place for figures")
    }
}

/// All results, by name.
fn read(dir: &Path) -> Result<Vec<Report>> {
    let entries = fs::read_dir(dir).with_context(|| format!("look into {}", dir.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let one = |path: &std::path::PathBuf| {
        let show = path.display();
        let bytes = fs::read(path).with_context(|| format!("read {show}"))?;
        serde_json::from_slice(&bytes).with_context(|| format!("understand {show}"))
    };
    paths.iter().map(one).collect()
}

fn fill(text: &str, table: &str) -> Option<String> {
    let (before, rest) = text.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!("{before}{BEGIN}{table}{END}{after}"))
}

/// Units in which more is better, and those in which less is. Of others it is not known who won.
const MORE_IS_BETTER: [&str; 6] = ["op/s", "MiB/s", "Mbit/s", "pages/s", "1/s", "restarts"];
const LESS_IS_BETTER: [&str; 7] = ["ns", "us", "ms", "s", "us/acc", "s/GiB", "pages"];

/// Whether a figure has no peer, or is known to be no worse than its peer's.
fn is_won(figure: &Figure) -> bool {
    match (figure.peer, figure.ratio) {
        (None, _) => true,
        // The peer alone: nothing is compared.
        _ if figure.ours.is_none() => true,
        (Some(_), Some(ratio)) if MORE_IS_BETTER.contains(&figure.unit.as_str()) => ratio >= 1.0,
        (Some(_), Some(ratio)) if LESS_IS_BETTER.contains(&figure.unit.as_str()) => ratio <= 1.0,
        (Some(_), _) => false,
    }
}

fn table(reports: &[Report]) -> String {
    let mut out = String::new();
    for report in reports {
        let machine = &report.machine;
        let _ = writeln!(
            out,
            "\n**{}** ({}, {} CPUs, {} GiB, Linux {}, {}; accelerator {}; commit {}; [all rows](bench/results/{}.json), \
             [plot](bench/results/{}.svg))\n",
            report.bench,
            machine.cpu,
            machine.cores,
            machine.memory_mib / 1024,
            machine.kernel,
            machine.filesystem,
            report.accelerator,
            report.commit,
            report.bench,
            report.bench,
        );
        out.push_str(
            "| figure: peer | unit | ours | peer | ratio (min-max) | bar | |\n|---|---|---|---|---|---|---|\n",
        );
        for figure in
            report.figures.iter().filter(|figure| figure.bar.is_some() || figure.note.is_some() || !is_won(figure))
        {
            let value = |value: Option<f64>| value.map_or_else(String::new, number);
            let spread =
                figure.spread.map_or_else(String::new, |[low, high]| format!("{}-{}", number(low), number(high)));
            let ratio = match figure.ratio {
                Some(ratio) => format!("{} ({spread})", number(ratio)),
                None => format!("({spread})"),
            };
            let verdict = match (&figure.bar, figure.holds) {
                (None, _) if is_won(figure) => "no bar",
                (None, _) => "no bar, not won",
                (Some(_), Some(true)) => "holds",
                (Some(_), _) => "**falls short**",
            };
            let (ours, peer) = (value(figure.ours), value(figure.peer));
            let bar = figure.bar.as_deref().unwrap_or_default();
            let note = figure.note.as_ref().map_or(String::new(), |note| format!("; {note}"));
            let (name, unit) = (&figure.name, &figure.unit);
            let _ = writeln!(out, "| {name} | {unit} | {ours} | {peer} | {ratio} | {bar} | {verdict}{note} |");
        }
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_won_when_it_is_known_to_be() {
        let row = |unit: &str, ratio: Option<f64>, peer: Option<f64>| {
            let name = "row".to_owned();
            let (ours, spread, bar, holds) = (Some(1.0), None, None, None);
            is_won(&Figure { name, unit: unit.to_owned(), ours, peer, ratio, spread, bar, holds, note: None })
        };
        assert!(row("MiB/s", Some(1.1), Some(1.0)) && !row("MiB/s", Some(0.9), Some(1.0)));
        assert!(row("ms", Some(0.9), Some(1.0)) && !row("ms", Some(1.1), Some(1.0)));
        assert!(!row("furlongs", Some(1.0), Some(1.0)), "nobody knows");
        assert!(row("furlongs", None, None), "nobody to lose to");
        assert!(!row("ms", None, Some(1.0)), "the peer has a figure and we have none");
    }

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let text = format!("a\n{BEGIN}old\n{END}\nb\n");
        assert_eq!(fill(&text, "new\n").as_deref(), Some(format!("a\n{BEGIN}new\n{END}\nb\n").as_str()));
        assert_eq!(fill("a", "new"), None);
    }
}
