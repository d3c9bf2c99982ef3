//! Rules of the repository that no compiler checks.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::bench::repository;

/// A file that one cannot read in one sitting is split by duty.
const FILE_LINES_MAX: usize = 700;
/// The crates that may hold unsafe code.
const UNSAFE_CRATES: [&str; 2] = ["crates/pagoda-sys/", "crates/pagoda-shim/"];
/// Directories that hold nothing of ours.
const SKIPPED: [&str; 4] = ["target", "out", ".git", "results"];
const TEXT_ENDINGS: [&str; 8] = ["rs", "md", "toml", "sh", "service", "yml", "json", "conf"];

#[derive(Debug)]
struct Source {
    /// Relative to the root, with forward slashes.
    path: String,
    text: String,
}

/// Checks all rules; `Ok(true)` when none is broken.
///
/// # Errors
/// The repository cannot be read.
pub fn main() -> Result<bool> {
    let root = repository();
    let mut sources = Vec::new();
    collect(&root, &root, &mut sources)?;
    let mut complaints = Vec::new();
    for source in &sources {
        complaints.extend(check_source(source));
        if source.path.ends_with(".md") {
            complaints.extend(check_links(&root, source));
        }
    }
    if !root.join("LICENSE").exists() {
        complaints.push("LICENSE: missing".to_owned());
    }
    complaints.extend(check_metrics(&sources));
    complaints.extend(crate::figures::check()?);
    for complaint in &complaints {
        eprintln!("tidy: {complaint}");
    }
    println!("tidy: {} files, {} complaints", sources.len(), complaints.len());
    Ok(complaints.is_empty())
}

fn collect(root: &Path, dir: &Path, sources: &mut Vec<Source>) -> Result<()> {
    let entries = fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("list {}", dir.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if SKIPPED.contains(&name.as_str()) || path.is_symlink() {
            continue;
        }
        if path.is_dir() {
            collect(root, &path, sources)?;
            continue;
        }
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or("");
        if TEXT_ENDINGS.contains(&ending) || name == "Makefile" || name == "run" {
            let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            let relative = path.strip_prefix(root).unwrap_or(&path);
            sources.push(Source { path: relative.to_string_lossy().into_owned(), text });
        }
    }
    Ok(())
}

fn check_source(source: &Source) -> Vec<String> {
    let mut complaints = Vec::new();
    let path = &source.path;
    let lines = source.text.lines().count();
    let is_rust = path.ends_with(".rs");
    if is_rust && lines > FILE_LINES_MAX {
        complaints.push(format!("{path}: {lines} lines, split it (at most {FILE_LINES_MAX})"));
    }
    let mut in_tests = path.contains("/tests/") || path.ends_with("tests.rs");
    for (number, line) in (1..).zip(source.text.lines()) {
        let mut complain = |what: &str| complaints.push(format!("{path}:{number}: {what}"));
        if private_path(line) {
            complain("an absolute path of one person's machine");
        }
        if !is_rust {
            continue;
        }
        let code = code_of(line);
        in_tests |= code.contains("#[cfg(test)]");
        // Written in two pieces, so that this file does not find itself.
        if code.contains(concat!("to", "do!(")) || code.contains(concat!("unimple", "mented!(")) {
            complain("unfinished code");
        }
        if line.contains(concat!("FIX", "ME")) || line.contains(concat!("XX", "X:")) {
            complain("unfinished work");
        }
        if code.contains(concat!("#[ign", "ore")) {
            complain("an ignored test");
        }
        if in_tests && code.contains(concat!("thread::", "sleep")) {
            complain("a sleep in a test: wait for the event instead");
        }
        let may_be_unsafe = UNSAFE_CRATES.iter().any(|allowed| path.starts_with(allowed));
        if !may_be_unsafe && has_word(code, concat!("uns", "afe")) {
            complain("code that is not safe outside of pagoda-sys and pagoda-shim");
        }
    }
    complaints
}

/// The line without what follows `//`.
fn code_of(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

fn has_word(code: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_';
    code.split(|c| !part(c)).any(|found| found == word)
}

/// Home directories and scratch directories have no place in the sources.
fn private_path(line: &str) -> bool {
    [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/")].iter().any(|start| {
        line.match_indices(start).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            before.is_none_or(|c| !(c.is_alphanumeric() || "._-~/$}*".contains(c)))
        })
    })
}

/// Every relative link of a document leads to a file.
fn check_links(root: &Path, source: &Source) -> Vec<String> {
    let dir = root.join(&source.path).parent().map_or_else(PathBuf::new, Path::to_owned);
    links(&source.text)
        .filter(|link| !link.contains("://") && !link.starts_with('#') && !link.starts_with("mailto:"))
        .filter(|link| {
            let file = link.split('#').next().unwrap_or(link);
            !dir.join(file).exists()
        })
        .map(|link| format!("{}: the link {link} leads nowhere", source.path))
        .collect()
}

fn links(text: &str) -> impl Iterator<Item = &str> {
    let after = text.split("](").skip(1);
    after.filter_map(|rest| rest.split_once(')')).map(|(link, _)| link.trim())
}

/// Every metric of the catalogue stands in the documentation.
fn check_metrics(sources: &[Source]) -> Vec<String> {
    let docs: Vec<&Source> = sources.iter().filter(|source| source.path.ends_with(".md")).collect();
    let names = sources
        .iter()
        .filter(|source| source.path.ends_with(".rs") && !source.path.starts_with("xtask/"))
        .flat_map(|source| metric_names(&source.text).map(move |name| (source, name)));
    let mut complaints: Vec<String> = names
        .filter(|(_, name)| !docs.iter().any(|doc| doc.text.contains(*name)))
        .map(|(source, name)| format!("{}: metric {name} is not in any document", source.path))
        .collect();
    complaints.sort();
    complaints.dedup();
    complaints
}

/// Names of metrics by their prefix and a unit or `_total` at the end, as string literals.
fn metric_names(text: &str) -> impl Iterator<Item = &str> {
    let literals = text.split('"').skip(1).step_by(2);
    literals.filter(|literal| {
        let form = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let unit = ["_total", "_bytes", "_seconds", "_ratio", "_pages"];
        literal.starts_with("pagoda_") && literal.chars().all(form) && unit.iter().any(|unit| literal.ends_with(unit))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(path: &str, text: &str) -> usize {
        check_source(&Source { path: path.to_owned(), text: text.to_owned() }).len()
    }

    #[test]
    fn rules_are_applied_where_they_hold() {
        let block = concat!("let x = uns", "afe { f() };");
        let nap = concat!("#[cfg(test)]\nfn f() { thread::", "sleep(d) }");
        let long = "\n".repeat(FILE_LINES_MAX + 1);
        for (path, text, expected) in [
            ("crates/pagoda-core/src/a.rs", block, 1),
            ("crates/pagoda-sys/src/a.rs", block, 0),
            ("crates/pagoda-core/src/a.rs", concat!("// uns", "afe is not used"), 0),
            ("crates/pagoda-core/src/a.rs", concat!("#![forbid(uns", "afe_code)]"), 0),
            ("xtask/src/a.rs", nap, 1),
            ("xtask/src/a.rs", concat!("thread::", "sleep(d)"), 0),
            ("xtask/src/a.rs", concat!("to", "do!()"), 1),
            ("xtask/src/a.rs", long.as_str(), 1),
            ("README.md", concat!("see /ho", "me/me/x"), 1),
            ("README.md", concat!("see DIR/ho", "me/x and $X/ro", "ot/y"), 0),
        ] {
            assert_eq!(complaints(path, text), expected, "{path}: {text}");
        }
    }

    #[test]
    fn links_and_metrics_are_found() {
        let found: Vec<_> = links("[a](b.md) and [c](d/e.md#f), (g)").collect();
        assert_eq!(found, ["b.md", "d/e.md#f"]);
        let text = r#"m("pagoda_faults_total", "pagoda_x", "pagoda_Y_bytes", "pagoda_swap_bytes")"#;
        let found: Vec<_> = metric_names(text).collect();
        assert_eq!(found, ["pagoda_faults_total", "pagoda_swap_bytes"]);
    }
}
