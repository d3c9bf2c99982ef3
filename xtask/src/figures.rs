//! Fills figures into documents, from `bench/results/*.json` alone. The README gets a chosen few. `docs/figures.md` gets every
//! figure that has a bar, and every one where the peer is better.
//!
//! Each figure stands with its commit. If it was measured with other code than today's, the row says so: it may have become
//! better or worse since.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use testkit::results::benches::code_of;
use testkit::results::code::Crates;
use testkit::results::report::{Figure, Report, number};
use testkit::workspace::repository;

const BEGIN: &str = "<!-- figures: begin (filled from bench/results/*.json) -->\n";
const END: &str = "<!-- figures: end -->";

/// The README's rows, by bench and the beginning of the row's name: what the tool is for, and where its peers are better.
const README_ROWS: [(&str, &str); 10] = [
    ("crash", "wrong pages after 100 kills"),
    ("overcommit", "seq read-write 2x: kernel swap, best"),
    ("overcommit", "random read-write 2x: kernel swap, best"),
    ("overcommit", "random read 2x: kernel swap, best"),
    ("recover", "time until 90 % of full speed"),
    ("resident", "random, after pressure"),
    ("fault", "MINOR, first touch of a chunk, 4 threads, p50"),
    ("pins", "guest disk, cache=writeback, all in DRAM, sequential read: plain QEMU"),
    ("share", "processor time a page reclaimed"),
    ("far", "quicksort of 512 MiB in half the DRAM, far tier pool: private swap on the disk"),
];
/// Digits of a commit in the README.
const COMMIT_SHOWN: usize = 7;
const README: &str = "README.md";
const ALL: &str = "docs/figures.md";

/// Rewrites the tables; `Ok(false)` when a bar is missed or a result stands for other code than today's.
///
/// # Errors
/// A result cannot be read; a document has no place for its table.
pub fn main() -> Result<bool> {
    let results = Results::look()?;
    for (document, table) in results.tables() {
        let path = repository().join(document);
        let text = fs::read_to_string(&path).with_context(|| format!("read {document}"))?;
        let filled = fill(&text, &table).with_context(|| format!("{document} has no place for figures"))?;
        fs::write(&path, filled).with_context(|| format!("write {document}"))?;
    }
    for Report { bench, commit, .. } in &results.earlier {
        eprintln!(
            "figures: {bench} was measured with earlier code, at {commit}; `cargo xtask bench {bench}` measures it again"
        );
    }
    Ok(results.earlier.is_empty() && results.all().all(Report::holds))
}

/// Complains where figures are not those of the code of today.
///
/// # Errors
/// A result cannot be read.
pub fn check() -> Result<Vec<String>> {
    let mut complaints = Vec::new();
    let results = Results::look()?;
    for (bench, beginning) in README_ROWS {
        if results.find(bench, beginning).is_none() {
            complaints.push(format!("figures.rs: README is to have a row that no result has: {bench}: {beginning}"));
        }
    }
    for (document, table) in results.tables() {
        let text = fs::read_to_string(repository().join(document)).with_context(|| format!("read {document}"))?;
        if fill(&text, &table).as_ref() != Some(&text) {
            complaints.push(format!("{document}: not the figures of today's code: run `cargo xtask figures`"));
        }
    }
    Ok(complaints)
}

/// The results, by whether the code that they measured is today's.
struct Results {
    today: Vec<Report>,
    earlier: Vec<Report>,
}

/// What stands beside a result that was measured with other code than today's.
const EARLIER: &str = "earlier code";

impl Results {
    fn look() -> Result<Results> {
        let crates = Crates::look()?;
        let (mut today, mut earlier) = (Vec::new(), Vec::new());
        for report in read(&repository().join("bench/results"))? {
            let is_today = code_of(&report.bench, &crates)?.is_some_and(|code| code == report.code);
            if is_today { today.push(report) } else { earlier.push(report) }
        }
        Ok(Results { today, earlier })
    }

    fn all(&self) -> impl Iterator<Item = &Report> {
        self.today.iter().chain(&self.earlier)
    }

    fn is_earlier(&self, bench: &str) -> bool {
        self.earlier.iter().any(|report| report.bench == bench)
    }

    /// The first figure of a bench whose name begins so, and the commit that it stands for.
    fn find(&self, bench: &str, beginning: &str) -> Option<(&Figure, &str)> {
        let report = self.all().find(|report| report.bench == bench)?;
        let figure = report.figures.iter().find(|figure| figure.name.starts_with(beginning))?;
        Some((figure, &report.commit))
    }

    /// Each document with what it is to have between its marks.
    fn tables(&self) -> [(&'static str, String); 2] {
        [(README, self.readme_table()), (ALL, self.table())]
    }

    /// All of them, by name.
    fn table(&self) -> String {
        let mut all: Vec<&Report> = self.all().collect();
        all.sort_by(|one, other| one.bench.cmp(&other.bench));
        all.iter().map(|report| table_of(report, self.is_earlier(&report.bench))).collect::<String>() + "\n"
    }

    /// The chosen rows, each with its commit.
    fn readme_table(&self) -> String {
        let row_of = |&(bench, beginning): &(&str, &str)| {
            let (figure, commit) = self.find(bench, beginning)?;
            let commit = &commit[..commit.len().min(COMMIT_SHOWN)];
            let code = if self.is_earlier(bench) { format!("{commit}, {EARLIER}") } else { commit.to_owned() };
            Some(row(figure, Some((bench, &code))))
        };
        let rows: String = README_ROWS.iter().filter_map(row_of).collect();
        format!("\n{HEAD}{rows}\n")
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

/// The heads of all tables.
const HEAD: &str = "| figure: peer | unit | ours | peer | ratio (min-max) | bar | |\n|---|---|---|---|---|---|---|\n";

/// A figure as a line of a table; the name of its bench and its commit stand with its name.
fn row(figure: &Figure, of: Option<(&str, &str)>) -> String {
    let value = |value: Option<f64>| value.map_or_else(String::new, number);
    let spread = figure.spread.map_or_else(String::new, |[low, high]| format!("{}-{}", number(low), number(high)));
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
    let name = match of {
        None => figure.name.clone(),
        Some((bench, code)) => format!("{bench}: {} ({code})", figure.name),
    };
    format!("| {name} | {} | {ours} | {peer} | {ratio} | {bar} | {verdict}{note} |\n", figure.unit)
}

fn table_of(report: &Report, is_earlier: bool) -> String {
    let machine = &report.machine;
    let earlier = if is_earlier { format!(" ({EARLIER})") } else { String::new() };
    let mut out = format!(
        "\n**{}** ({}, {} CPUs, {} GiB, Linux {}, {}; accelerator {}; commit {}{earlier}; [all rows](../bench/results/{}.json), \
         [plot](../bench/results/{}.svg))\n\n{HEAD}",
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
    let is_shown = |figure: &&Figure| figure.bar.is_some() || figure.note.is_some() || !is_won(figure);
    out.extend(report.figures.iter().filter(is_shown).map(|figure| row(figure, None)));
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
