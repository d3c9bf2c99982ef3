//! A function fits on a screen and a half: one that is longer has several duties, and each of them deserves a name.

use super::Source;
use super::code::{Token, code_of, item_end, line_of, tokens, without_tests};

/// From the line of `fn` to the line of the closing brace.
const FUNCTION_LINES_MAX: usize = 80;
/// Functions that are still longer. One that is not any more is a complaint.
const KNOWN: [(&str, &str); 0] = [];

/// Functions of products and of xtask that are too long. Tests may be: they tell a story from its start to its end.
pub fn check(sources: &[Source]) -> Vec<String> {
    check_but(sources, &KNOWN)
}

fn check_but(sources: &[Source], known: &[(&str, &str)]) -> Vec<String> {
    let is_code = |source: &&Source| source.is_product() || source.path.starts_with("xtask/src/");
    let code = sources.iter().filter(is_code).filter(|source| !source.is_test());
    let long = code.flat_map(|source| long(source).map(move |function| (source.path.as_str(), function)));
    let (excused, others): (Vec<_>, Vec<_>) =
        long.partition(|(path, function)| known.contains(&(*path, function.name.as_str())));
    let mut complaints: Vec<String> = others
        .iter()
        .map(|(path, Function { line, name, lines })| {
            format!("{path}:{line}: {name} has {lines} lines, split it by duty (at most {FUNCTION_LINES_MAX})")
        })
        .collect();
    for (path, name) in known {
        if !excused.iter().any(|(excused, function)| (*excused, function.name.as_str()) == (*path, *name)) {
            complaints.push(format!("{path}: {name} is not too long, take it off the list of known ones"));
        }
    }
    complaints
}

fn long(source: &Source) -> impl Iterator<Item = Function> {
    functions(&source.text).filter(|function| function.lines > FUNCTION_LINES_MAX)
}

#[derive(Debug, PartialEq, Eq)]
struct Function {
    line: usize,
    name: String,
    lines: usize,
}

/// Each function with a body outside of tests.
fn functions(text: &str) -> impl Iterator<Item = Function> {
    let code = without_tests(&code_of(text));
    let all: Vec<(usize, Token<'_>)> = tokens(&code).collect();
    let mut found = Vec::new();
    for pair in all.windows(2) {
        // A type `fn(…)` has no name.
        if let [(start, Token::Word("fn")), (_, Token::Word(name))] = *pair {
            let end = item_end(&code, start);
            let (line, last) = (line_of(&code, start), line_of(&code, end));
            found.push(Function { line, name: name.to_owned(), lines: last - line + 1 });
        }
    }
    found.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one function of `len` lines, which begins on line 3.
    fn file(len: usize) -> String {
        let lines = "        f(\"}\"); // }\n".repeat(len - 4);
        format!("impl A {{\n    /// }}\n    pub fn a(&self) -> [u8; 2]\n    where A: B,\n    {{\n{lines}    }}\n}}\n")
    }

    #[test]
    fn a_long_function_is_found() {
        let complaints = |path: &str, len| {
            let source = Source { path: path.to_owned(), text: file(len) };
            check_but(&[source], &[])
        };
        let product = "crates/pagoda-core/src/a.rs";
        assert_eq!(complaints(product, FUNCTION_LINES_MAX), [""; 0]);
        let expected = format!("{product}:3: a has 81 lines, split it by duty (at most 80)");
        assert_eq!(complaints(product, FUNCTION_LINES_MAX + 1), [expected]);
        for (path, expected) in [("xtask/src/a.rs", 1), ("crates/rmap/tests/a.rs", 0), ("crates/rmap/src/tests.rs", 0)]
        {
            assert_eq!(complaints(path, FUNCTION_LINES_MAX + 1).len(), expected, "{path}");
        }
    }

    #[test]
    fn an_exception_has_to_be_needed() {
        let path = "crates/pagoda-core/src/a.rs";
        for (len, known, expected) in [
            (FUNCTION_LINES_MAX + 1, (path, "a"), 0),
            (FUNCTION_LINES_MAX, (path, "a"), 1),
            (FUNCTION_LINES_MAX + 1, (path, "b"), 2),
        ] {
            let source = Source { path: path.to_owned(), text: file(len) };
            assert_eq!(check_but(&[source], &[known]).len(), expected, "{len} {known:?}");
        }
    }

    #[test]
    fn functions_are_measured_without_tests_and_types() {
        let text = "fn a();\ntype F = fn(u8) -> u8;\n#[cfg(test)]\nmod tests {\n    fn b() {\n    }\n}\nfn c() {\n    fn d() {\n    }\n}\n";
        let found: Vec<_> = functions(text).map(|function| (function.name, function.line, function.lines)).collect();
        assert_eq!(found, [("a".to_owned(), 1, 1), ("c".to_owned(), 8, 4), ("d".to_owned(), 9, 2)]);
    }
}
