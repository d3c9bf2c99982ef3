//! Puts the figures that have a bar into the README: from `bench/results/*.json`, and from nowhere else.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::bench::report::{Report, number};
use crate::bench::repository;

const BEGIN: &str = "<!-- figures: begin (filled from bench/results/*.json) -->\n";
const END: &str = "<!-- figures: end -->";

/// Rewrites the README's table; `Ok(false)` when a bar is missed.
///
/// # Errors
/// A result cannot be read; the README has no place for the table.
pub fn main() -> Result<bool> {
    let reports = read(&repository().join("bench/results"))?;
    let readme = repository().join("README.md");
    let text = fs::read_to_string(&readme).context("read README.md")?;
    let filled = fill(&text, &table(&reports)).context("README.md has no place for figures")?;
    fs::write(&readme, filled).context("write README.md")?;
    Ok(reports.iter().all(Report::holds))
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
        for figure in report.figures.iter().filter(|figure| figure.bar.is_some()) {
            let value = |value: Option<f64>| value.map_or_else(String::new, number);
            let spread =
                figure.spread.map_or_else(String::new, |[low, high]| format!("{}-{}", number(low), number(high)));
            let ratio = match figure.ratio {
                Some(ratio) => format!("{} ({spread})", number(ratio)),
                None => format!("({spread})"),
            };
            let verdict = if figure.holds == Some(true) { "holds" } else { "**falls short**" };
            let (ours, peer) = (value(figure.ours), value(figure.peer));
            let bar = figure.bar.as_deref().unwrap_or_default();
            let _ =
                writeln!(out, "| {} | {} | {ours} | {peer} | {ratio} | {bar} | {verdict} |", figure.name, figure.unit);
        }
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let text = format!("a\n{BEGIN}old\n{END}\nb\n");
        assert_eq!(fill(&text, "new\n").as_deref(), Some(format!("a\n{BEGIN}new\n{END}\nb\n").as_str()));
        assert_eq!(fill("a", "new"), None);
    }
}
