//! The code map says what there is: every crate, and no file that is gone.
//!
//! ARCHITECTURE.md has a row for each crate. ARCHITECTURE.md and docs/architecture list modules in two forms: a paragraph
//! "`crates/NAME/src`: `a.rs` (…), `b/` (…)", and a table whose heading, or the paragraph before it, names the directory.
//! Whatever is named has to exist. What lists a directory has to name all that is in it: those who add a file say what it is.

use std::collections::BTreeSet;

use super::Source;

/// Roots of a crate, which no list names.
const ROOTS: [&str; 3] = ["lib.rs", "main.rs", "mod.rs"];

/// The documents against `sources`; `exists` tells whether a path from the root does.
pub fn check(sources: &[Source], exists: &dyn Fn(&str) -> bool) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut listed = BTreeSet::new();
    let mut named = BTreeSet::new();
    let is_map = |path: &str| path == "ARCHITECTURE.md" || path.starts_with("docs/architecture/");
    for source in sources.iter().filter(|source| is_map(&source.path)) {
        let map = read(&source.text);
        for path in &map.named {
            if !exists(path) {
                complaints.push(format!("{}: {path} does not exist", source.path));
            }
        }
        listed.extend(map.listed);
        named.extend(map.named);
    }
    for directory in &listed {
        for path in entries(sources, directory) {
            let (file, below) = (format!("{path}.rs"), format!("{path}/"));
            if !named.iter().any(|name| *name == file || *name == path || name.starts_with(&below)) {
                complaints.push(format!("{directory}: no document of the architecture says what {path} is"));
            }
        }
    }
    complaints.extend(check_crates(sources));
    complaints
}

/// Paths of the modules in `directory`, without an ending.
fn entries(sources: &[Source], directory: &str) -> BTreeSet<String> {
    let inside = |source: &Source| {
        let rest = source.path.strip_prefix(directory)?.strip_prefix('/')?;
        let is_module = rest.ends_with(".rs") && !ROOTS.contains(&rest) && !source.is_test();
        let name = rest.split('/').next().unwrap_or(rest).trim_end_matches(".rs");
        is_module.then(|| format!("{directory}/{name}"))
    };
    sources.iter().filter_map(inside).collect()
}

/// Each crate has a row in the table of crates.
fn check_crates(sources: &[Source]) -> Vec<String> {
    let Some(map) = sources.iter().find(|source| source.path == "ARCHITECTURE.md") else {
        return vec!["ARCHITECTURE.md: missing".to_owned()];
    };
    let directory = |source: &Source| {
        let directory = source.path.strip_suffix("/Cargo.toml")?;
        let name = directory.strip_prefix("crates/").unwrap_or(directory);
        (!name.contains('/') || directory.starts_with("tests/")).then(|| name.to_owned())
    };
    let crates = sources.iter().filter_map(directory);
    let missing = crates.filter(|name| !map.text.lines().any(|line| line.starts_with(&format!("| `{name}` |"))));
    missing.map(|name| format!("ARCHITECTURE.md: the code map has no row for {name}")).collect()
}

/// What a document says of the code.
#[derive(Debug, Default)]
struct Map {
    /// Directories whose modules it lists.
    listed: BTreeSet<String>,
    /// Paths from the root.
    named: BTreeSet<String>,
}

fn read(text: &str) -> Map {
    let mut map = Map::default();
    let mut before = None;
    for block in text.split("\n\n") {
        let is_table = block.trim_start().starts_with('|');
        let own = quoted(block.lines().next().unwrap_or_default()).find(|name| is_directory(name));
        let directory = if is_table { own.or(before.take()) } else { own };
        let rows = block.lines().map(|line| if is_table { line.split('|').nth(1).unwrap_or_default() } else { line });
        let rest = block.lines().flat_map(quoted).filter(|name| is_path(name));
        map.named.extend(rest.map(|path| path.trim_end_matches('/').to_owned()));
        if let Some(directory) = directory {
            let names: Vec<&str> = rows.flat_map(quoted).filter(|name| is_module(name)).collect();
            if !names.is_empty() {
                map.listed.insert(directory.to_owned());
            }
            map.named.extend(names.iter().map(|name| format!("{directory}/{name}")));
        }
        before = if is_table { None } else { own };
    }
    map
}

/// What stands in backquotes.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// A path from the root.
fn is_path(name: &str) -> bool {
    let starts = ["crates/", "xtask/", "tests/", "scripts/", "docs/", "bench/"];
    starts.iter().any(|start| name.starts_with(start)) && !name.contains(' ')
}

fn is_directory(name: &str) -> bool {
    name.starts_with("crates/") && name.contains("/src") && !name.ends_with(".rs")
}

/// A file or a directory beside others, as `a/b.rs` or `a/`.
fn is_module(name: &str) -> bool {
    !is_path(name) && !name.contains(' ') && (name.ends_with(".rs") || name.ends_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CRATES: &str = "| crate | what |\n|---|---|\n| `a` | x |\n| `tests/b` | y |\n";

    fn complaints(map: &str) -> Vec<String> {
        let files = ["crates/a/Cargo.toml", "tests/b/Cargo.toml", "crates/a/src/lib.rs", "crates/a/src/c.rs"];
        let more = ["crates/a/src/d/mod.rs", "crates/a/src/d/e.rs", "crates/a/src/d/tests.rs"];
        let paths: Vec<&str> = files.into_iter().chain(more).collect();
        let exists = |path: &str| {
            let path = path.trim_end_matches('/');
            paths.iter().any(|file| *file == path || file.starts_with(&format!("{path}/")))
        };
        let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
        let mut sources: Vec<Source> = paths.iter().map(|path| source(path, "")).collect();
        sources.push(source("ARCHITECTURE.md", CRATES));
        sources.push(source("docs/architecture/modules.md", map));
        check(&sources, &exists)
    }

    #[test]
    fn what_is_named_exists_and_what_is_listed_is_whole() {
        let gone = "docs/architecture/modules.md: crates/a/src/f.rs does not exist";
        let unnamed = "crates/a/src: no document of the architecture says what crates/a/src/d is";
        for (map, expected) in [
            ("See `crates/a/src/c.rs`, and `fork(2)`.", vec![]),
            ("See `crates/a/src/f.rs`.", vec![gone]),
            ("`crates/a/src`: `c.rs` (x), `d/` (y).", vec![]),
            ("`crates/a/src`: `c.rs` (x).", vec![unnamed]),
            ("`crates/a/src`: `c.rs` (x), `d/e.rs`, `f.rs`.", vec![gone]),
            ("`crates/a/src`, the x:\n\n| file | what |\n|---|---|\n| `c.rs`, `d/` | `f.rs` |", vec![]),
            ("`crates/a/src`, the x:\n\n| file | what |\n|---|---|\n| `c.rs` | `d/` |", vec![unnamed]),
            (
                "| in `crates/a/src` | what |\n|---|---|\n| `c.rs`, `f.rs` | |\n\n`crates/a/src/d/e.rs` is y.",
                vec![gone],
            ),
            ("`crates/a/src/d`: `e.rs`.", vec![]),
        ] {
            assert_eq!(complaints(map), expected, "{map}");
        }
    }

    #[test]
    fn every_crate_has_a_row() {
        let sources = [("crates/z/Cargo.toml", ""), ("ARCHITECTURE.md", CRATES)]
            .map(|(path, text)| Source { path: path.to_owned(), text: text.to_owned() });
        assert_eq!(check(&sources, &|_| true), ["ARCHITECTURE.md: the code map has no row for z"]);
    }
}
