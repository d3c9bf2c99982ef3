//! Rust source as the rules read it: without comments, without what literals say, without what only tests compile.
//!
//! Everything that is left out becomes blanks, so offsets and line numbers stay those of the file.

/// A word or one character of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token<'a> {
    Word(&'a str),
    /// The two characters `::` of a path.
    PathSeparator,
    Other(char),
}

/// The text without comments and literals.
pub fn code_of(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        match comment_or_literal_end(bytes, at) {
            Some(end) => {
                blank(&mut code, at, end);
                at = end;
            }
            None => at += 1,
        }
    }
    into_text(code)
}

/// `code` (as [`code_of`] gives it) without items under `#[cfg(test)]`.
pub fn without_tests(code: &str) -> String {
    let mut bytes = code.as_bytes().to_vec();
    for (start, attribute) in code.match_indices("#[cfg(test)]") {
        let end = item_end(code, start + attribute.len());
        blank(&mut bytes, start, end);
    }
    into_text(bytes)
}

/// Names of the modules that only tests compile: `#[cfg(test)] mod NAME;`.
pub fn test_modules(code: &str) -> impl Iterator<Item = &str> {
    code.match_indices("#[cfg(test)]").filter_map(|(start, attribute)| {
        let from = start + attribute.len();
        let item = &code[from..item_end(code, from)];
        let words: Vec<Token<'_>> = tokens(item).map(|(_, token)| token).collect();
        match words.iter().position(|token| *token == Token::Word("mod")).and_then(|at| words.get(at + 1..)) {
            Some([Token::Word(name), Token::Other(';')]) => Some(*name),
            _ => None,
        }
    })
}

/// The words and characters of `code`, with the offset of each.
pub fn tokens(code: &str) -> impl Iterator<Item = (usize, Token<'_>)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        at += code[at..].len() - code[at..].trim_start().len();
        let rest = &code[at..];
        let first = rest.chars().next()?;
        let start = at;
        let token = if is_word(first) {
            let len = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            at += len;
            Token::Word(&rest[..len])
        } else if rest.starts_with("::") {
            at += 2;
            Token::PathSeparator
        } else {
            at += first.len_utf8();
            Token::Other(first)
        };
        Some((start, token))
    })
}

/// The line of `offset`, from 1.
pub fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

/// Where the item ends whose text, attributes included, begins at `from`: behind its `;`, its block, or
/// the comma of a field or a variant.
pub fn item_end(code: &str, from: usize) -> usize {
    let mut depth = 0_usize;
    let mut words = 0;
    let mut is_field = false;
    for (at, token) in tokens(&code[from..]) {
        match token {
            Token::Other('(' | '[' | '{') => depth += 1,
            Token::Other(c @ (')' | ']' | '}')) => {
                // Of a struct whose last field has no comma.
                if depth == 0 {
                    return from + at;
                }
                depth -= 1;
                if depth == 0 && c == '}' {
                    return from + at + 1;
                }
            }
            Token::Other(';') if depth == 0 => return from + at + 1,
            Token::Other(',') if depth == 0 && (is_field || words == 1) => return from + at + 1,
            Token::Other(':') if depth == 0 && words == 1 => is_field = true,
            Token::Word(word) if depth == 0 && word != "pub" => words += 1,
            _ => {}
        }
    }
    code.len()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn into_text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

fn blank(bytes: &mut [u8], start: usize, end: usize) {
    for byte in &mut bytes[start..end] {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

/// The end of the comment or literal that begins at `at`.
fn comment_or_literal_end(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let len = match rest {
        [b'/', b'/', ..] => rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment_len(rest),
        [b'"', ..] => quoted_len(rest, b'"'),
        [b'\'', b'\\', ..] => quoted_len(rest, b'\''),
        [b'\'', first, ..] => {
            // A lifetime has no quote behind its first character.
            let char_len = std::str::from_utf8(rest.get(1..5.min(rest.len())).unwrap_or_default())
                .map_or_else(|error| error.valid_up_to(), str::len);
            let whole = std::str::from_utf8(&rest[1..=char_len]).ok().and_then(|text| text.chars().next());
            let len = whole.map_or(usize::from(*first != b'\''), char::len_utf8);
            if rest.get(1 + len) != Some(&b'\'') {
                return None;
            }
            len + 2
        }
        [b'r', b'"' | b'#', ..] if !continues_word(bytes, at) => raw_string_len(rest)?,
        _ => return None,
    };
    Some(at + len)
}

/// Whether the `r` at `at` is the end of a name rather than the start of a raw string. `br"` and `cr"` are such starts.
fn continues_word(bytes: &[u8], at: usize) -> bool {
    let word = |byte: &u8| is_word(char::from(*byte));
    let before = bytes[..at].iter().rev().take_while(|byte| word(byte)).count();
    before > 1 || (before == 1 && !matches!(bytes[at - 1], b'b' | b'c'))
}

fn block_comment_len(rest: &[u8]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

fn quoted_len(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// `None` for a raw name, as `r#type`.
fn raw_string_len(rest: &[u8]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|&&byte| byte == b'#').count();
    if rest.get(1 + hashes) != Some(&b'"') {
        return None;
    }
    let end = [&b"\""[..], &b"#".repeat(hashes)].concat();
    let from = 2 + hashes;
    let found = rest[from..].windows(end.len()).position(|window| window == end);
    Some(found.map_or(rest.len(), |at| from + at + end.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_left_out() {
        for (text, expected) in [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ d */ e", "a                   e"),
            (r#"f("a\"{", x)"#, "f(      , x)"),
            (r##"f(r#"a"{"#, br"\", x)"##, "f(        , b    , x)"),
            ("f('{', '\\'', 'é', b'}')", "f(   ,     ,     , b   )"),
            ("impl<'a> X<'a> for r#type {}", "impl<'a> X<'a> for r#type {}"),
        ] {
            let code = code_of(text);
            assert_eq!(code, expected, "{text}");
            assert_eq!(code.len(), text.len(), "{text}");
        }
    }

    #[test]
    fn what_only_tests_compile_is_left_out() {
        for (code, expected) in [
            ("a; #[cfg(test)] mod tests { b; { c } } d", "a; d"),
            ("#[cfg(test)] mod tests; a", "a"),
            ("#[cfg(test)] #[inline] pub fn f<A, B>(a: A, b: B) -> [u8; 2] { c } a", "a"),
            ("struct A { #[cfg(test)] b: u64, c: u64 }", "struct A { c: u64 }"),
            ("struct A { a: u64, #[cfg(test)] b: u64 }", "struct A { a: u64, }"),
            ("enum A { #[cfg(test)] B, C }", "enum A { C }"),
            ("#[cfg(test)] { a } b", "b"),
        ] {
            let words: Vec<_> = without_tests(code).split_whitespace().map(str::to_owned).collect();
            assert_eq!(words.join(" "), expected, "{code}");
        }
        let code = "#[cfg(test)] #[path = ] mod a; #[cfg(test)] mod b { c } mod d; #[cfg(test)] pub mod e;";
        assert_eq!(test_modules(code).collect::<Vec<_>>(), ["a", "e"]);
    }
}
