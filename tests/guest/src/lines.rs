//! The lines a guest reports in: `PAGODA kind key=value ...`. The guest formats them, hosts parse them; anything else
//! on the console (the kernel's messages) is not one.

/// Every line begins so; a kernel message may stand before it on the same line.
pub const PREFIX: &str = "PAGODA ";

/// One reported line, as a host reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Line<'a> {
    pub kind: &'a str,
    rest: &'a str,
}

impl<'a> Line<'a> {
    pub fn parse(text: &'a str) -> Option<Self> {
        let start = text.find(PREFIX)?;
        let body = text[start + PREFIX.len()..].trim();
        let (kind, rest) = body.split_once(' ').unwrap_or((body, ""));
        (!kind.is_empty()).then_some(Self { kind, rest })
    }

    pub fn get(&self, key: &str) -> Option<&'a str> {
        self.rest.split_ascii_whitespace().find_map(|field| field.strip_prefix(key)?.strip_prefix('='))
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.get(key)?.parse().ok()
    }

    /// What follows the kind: the message of `error`, the verdict of `result`.
    pub fn text(&self) -> &'a str {
        self.rest
    }

    /// The end of a guest, and its verdict; only `ok` is a success.
    pub fn result(&self) -> Option<&'a str> {
        (self.kind == "result").then_some(self.rest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_parse() {
        let line = Line::parse("[  0.1] PAGODA progress phase=seq pass=1 mib=128 bad=0\r\n").expect("a line");
        assert_eq!((line.kind, line.get("phase"), line.number("mib")), ("progress", Some("seq"), Some(128)));
        assert_eq!((line.number("mi"), line.number("phase"), line.result()), (None, None, None));
        assert_eq!(Line::parse("PAGODA result ok\r").and_then(|line| line.result()), Some("ok"));
        assert_eq!(Line::parse("PAGODA result bad 3").and_then(|line| line.result()), Some("bad 3"));
        for other in ["", "PAGODA ", "Linux version 6.1", "PAGODA\r"] {
            assert_eq!(Line::parse(other), None, "{other:?}");
        }
    }
}
