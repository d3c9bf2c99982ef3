//! The header `Range` (RFC 9110, 14.2), of which one range of bytes is understood.

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// No range, or one that is not understood and so is ignored.
    All,
    /// From here, up to and including there.
    From(u64, Option<u64>),
    /// The last so many bytes.
    Last(u64),
}

pub fn parse(header: Option<&str>) -> Wanted {
    let Some((first, last)) = header.and_then(|text| text.trim().strip_prefix("bytes=")?.split_once('-')) else {
        return Wanted::All;
    };
    // Digits alone: `parse` would also take a sign.
    let number =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok()).flatten();
    match (first, last) {
        ("", last) => number(last).map_or(Wanted::All, Wanted::Last),
        (first, "") => number(first).map_or(Wanted::All, |first| Wanted::From(first, None)),
        (first, last) => match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => Wanted::From(first, Some(last)),
            _ => Wanted::All,
        },
    }
}

impl Wanted {
    /// The bytes of a file of `size` bytes; `None`: there are none of them.
    pub fn of(self, size: u64) -> Option<std::ops::Range<u64>> {
        match self {
            Wanted::All => Some(0..size),
            Wanted::From(first, last) if first < size => {
                Some(first..last.map_or(size, |last| last.saturating_add(1).min(size)))
            }
            Wanted::Last(count) if count > 0 && size > 0 => Some(size.saturating_sub(count)..size),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        let check = |text: &str, expected| assert_eq!(parse(Some(text)), expected, "{text}");
        assert_eq!(parse(None), Wanted::All);
        check("bytes=0-0", Wanted::From(0, Some(0)));
        check("bytes=5-", Wanted::From(5, None));
        check("bytes=-5", Wanted::Last(5));
        for ignored in
            ["bytes=", "bytes=-", "bytes=5-4", "bytes=+5-", "bytes=1-2,4-5", "lines=1-2", "bytes=99999999999999999999-"]
        {
            check(ignored, Wanted::All);
        }
        let check = |wanted: Wanted, size, expected| assert_eq!(wanted.of(size), expected, "{wanted:?} of {size}");
        check(Wanted::All, 0, Some(0..0));
        check(Wanted::From(0, None), 0, None);
        check(Wanted::From(9, None), 10, Some(9..10));
        check(Wanted::From(10, None), 10, None);
        check(Wanted::From(2, Some(u64::MAX)), 10, Some(2..10));
        check(Wanted::Last(3), 10, Some(7..10));
        check(Wanted::Last(30), 10, Some(0..10));
        check(Wanted::Last(0), 10, None);
    }
}
