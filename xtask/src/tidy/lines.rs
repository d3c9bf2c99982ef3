//! Rules about single lines, and about the length of a file.

use super::Source;

/// A file that one cannot read in one sitting is split by duty.
const FILE_LINES_MAX: usize = 700;
/// The crates that may hold unsafe code.
const UNSAFE_CRATES: [&str; 2] = ["crates/pagoda-sys/", "crates/pagoda-shim/"];

/// All lines of all files.
pub fn check(sources: &[Source]) -> Vec<String> {
    sources.iter().flat_map(check_source).collect()
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
}
