//! Files of a crate do not import each other in a circle: one can be read, and tested, after those that it imports.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;
use super::imports::{Imports, imports};

/// Circles in products' crates.
pub fn check(sources: &[Source]) -> Vec<String> {
    let crates: BTreeSet<String> = sources.iter().filter_map(Source::product_src).collect();
    let all: Imports = crates.iter().flat_map(|src| imports(sources, src)).collect();
    let graph = Graph::of(all.keys().map(|(from, to)| (from.as_str(), to.as_str())));
    graph.circles().map(|circle| describe(&circle, &all)).collect()
}

fn describe(circle: &BTreeSet<&str>, imports: &Imports) -> String {
    let inside =
        imports.iter().filter(|((from, to), _)| circle.contains(from.as_str()) && circle.contains(to.as_str()));
    let arrows: Vec<String> = inside
        .map(|((from, to), names)| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            format!("\n    {from} imports {to}: {}", names.join(", "))
        })
        .collect();
    let first = circle.first().copied().unwrap_or_default();
    format!("{first}: a circle of {} files{}", circle.len(), arrows.concat())
}

/// Which file imports which others.
struct Graph<'a> {
    targets: BTreeMap<&'a str, Vec<&'a str>>,
}

impl<'a> Graph<'a> {
    fn of(edges: impl Iterator<Item = (&'a str, &'a str)>) -> Self {
        let mut targets: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (from, to) in edges {
            targets.entry(from).or_default().push(to);
        }
        Self { targets }
    }

    /// All that one comes to from `start` by one import and more.
    fn reachable(&self, start: &str) -> BTreeSet<&'a str> {
        let mut found = BTreeSet::new();
        let targets_of = |file: &str| self.targets.get(file).into_iter().flatten().copied();
        let mut ahead: Vec<&str> = targets_of(start).collect();
        while let Some(file) = ahead.pop() {
            if found.insert(file) {
                ahead.extend(targets_of(file));
            }
        }
        found
    }

    /// Sets of files each of which reaches all others of its set.
    fn circles(&self) -> impl Iterator<Item = BTreeSet<&'a str>> {
        let reachable: BTreeMap<&str, BTreeSet<&str>> =
            self.targets.keys().map(|file| (*file, self.reachable(file))).collect();
        let circles: BTreeSet<BTreeSet<&str>> = reachable
            .iter()
            .map(|(file, others)| {
                let back = |other: &&&str| reachable.get(**other).is_some_and(|others| others.contains(file));
                others.iter().filter(back).copied().collect()
            })
            .filter(|circle: &BTreeSet<&str>| !circle.is_empty())
            .collect();
        circles.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SRC: &str = "crates/pagoda-core/src/";

    fn sources(files: &[(&str, &str)]) -> Vec<Source> {
        let source = |(name, text): &(&str, &str)| Source { path: format!("{SRC}{name}"), text: (*text).to_owned() };
        files.iter().map(source).collect()
    }

    fn arrows(files: &[(&str, &str)]) -> Vec<String> {
        let short = |path: &String| path.trim_start_matches(SRC).trim_end_matches(".rs").to_owned();
        let text = |(edge, names): (&(String, String), &BTreeSet<String>)| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            format!("{} -> {}: {}", short(&edge.0), short(&edge.1), names.join(" "))
        };
        imports(&sources(files), SRC).iter().map(text).collect()
    }

    #[test]
    fn imports_are_resolved() {
        let lib = ("lib.rs", "mod a;\nmod b;\npub use b::B;\n");
        let b = ("b/mod.rs", "pub mod c;\npub use c::C;\npub struct B;\npub fn f() {}\n");
        let c = ("b/c.rs", "pub struct C;\n");
        for (text, expected) in [
            ("use crate::b::B;", "a -> b/mod: B"),
            ("use crate::B;", "a -> b/mod: B"),
            ("use super::b::{self, C, c::C as D};", "a -> b/c: C"),
            ("use crate::b; fn g() { b::C; b::f() }", "a -> b/c: C|a -> b/mod: f"),
            ("pub(in crate::b) fn g() {}", ""),
            ("fn g() { crate::b::f() }", "a -> b/mod: f"),
            ("pub(crate) mod d { use super::super::b::B; }", "a -> b/mod: B"),
            ("pub use crate::b::B;", ""),
            ("pub use crate::b::B; fn g() -> B {}", "a -> b/mod: B"),
            ("use crate::b::*;", "a -> b/mod: *"),
            ("use std::fmt; fn g() { fmt::Debug; x.b::<C>(); }", ""),
            ("#[cfg(test)] mod tests { use crate::b::B; } // crate::b::B", ""),
            ("fn g() { \"crate::b::B\" }", ""),
        ] {
            assert_eq!(arrows(&[lib, ("a.rs", text), b, c]).join("|"), expected, "{text}");
        }
    }

    #[test]
    fn names_of_a_parent_count_for_the_file_that_defines_them() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a.rs", "mod b;\nmod c;\n#[cfg(test)] mod more;\npub use b::B;\nuse c::*;\nfn f() -> B {}\n"),
            ("a/b.rs", "use super::{D, f};\npub struct B;\n"),
            ("a/c.rs", "pub struct D;\n"),
            ("a/more.rs", "use super::B;\n"),
            ("a/tests.rs", "use super::B;\n"),
        ];
        assert_eq!(arrows(&files), ["a -> a/b: B", "a -> a/c: *", "a/b -> a: f", "a/b -> a/c: D"]);
    }

    #[test]
    fn circles_are_found() {
        let complaints = |c: &str| {
            let files = [
                ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
                ("a.rs", "use crate::b::B;\npub struct A;\n"),
                ("b.rs", "use crate::c::C;\npub struct B;\n"),
                ("c.rs", c),
                ("d.rs", "use crate::a::A;\n"),
            ];
            check(&sources(&files))
        };
        let found = complaints("use crate::a::A;\npub struct C;\n");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with(&format!("{SRC}a.rs: a circle of 3 files")), "{found:?}");
        for (file, by) in [("a", "A"), ("b", "B"), ("c", "C")] {
            assert!(found[0].contains(&format!("imports {SRC}{file}.rs: {by}")), "{found:?}");
        }
        assert!(!found[0].contains("d.rs"), "{found:?}");
        assert_eq!(complaints("pub struct C;\n"), [""; 0]);
    }
}
