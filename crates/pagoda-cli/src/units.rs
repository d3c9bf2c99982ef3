//! Sizes and times as people write and read them. Units are binary throughout, as QEMU's.

pub use pagoda_api::parse_size;

/// Reads a length of time, `90s`, `5m`, `2h` or `1d`, as seconds.
///
/// # Errors
/// A sentence that says what would be right.
pub fn parse_seconds(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "s" => Some(1),
        "m" => Some(60),
        "h" => Some(3600),
        "d" => Some(86_400),
        _ => None,
    };
    let seconds = unit.and_then(|unit| digits.parse::<u64>().ok()?.checked_mul(unit));
    seconds.ok_or_else(|| format!("{text:?} is not a time; write a number and s, m, h or d, such as 30s or 5m"))
}

/// A length of time as [`parse_seconds`] reads it: `90s`, `10m`, `2h`, `1d`.
pub fn format_seconds(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "m")];
    let unit = units.iter().find(|(length, _)| seconds >= *length && seconds.is_multiple_of(*length));
    unit.map_or_else(|| format!("{seconds}s"), |(length, name)| format!("{}{name}", seconds / length))
}

/// A size for tables: one decimal below a hundred, `1.5G`, `512M`, `0`.
pub fn format_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "K", "M", "G", "T", "P", "E"];
    let mut value = bytes as f64;
    let mut unit = 0;
    // 1023.95 is the least that would print as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = usize::from(value < 99.95);
    let number = format!("{value:.decimals$}");
    format!("{}{}", number.trim_end_matches(".0"), UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    const G: u64 = 1 << 30;

    #[test]
    fn times() {
        let check = |text: &str, expected: Option<u64>| assert_eq!(parse_seconds(text).ok(), expected, "{text}");
        check("90s", Some(90));
        check("5m", Some(300));
        check("2h", Some(7200));
        check("1d", Some(86_400));
        check("5", None);
        check("s", None);
        check("1.5h", None);
        check("99999999999999999999d", None);
        for text in ["0s", "59s", "90s", "10m", "23h", "3d"] {
            assert_eq!(format_seconds(parse_seconds(text).unwrap()), text);
        }
    }

    #[test]
    fn printed() {
        let check = |bytes: u64, expected: &str| assert_eq!(format_size(bytes), expected);
        check(0, "0");
        check(1023, "1023");
        check(1024, "1K");
        check(1536, "1.5K");
        check(4 * G, "4G");
        check(G - 1, "1G");
        check(100 * G + G / 2, "100G");
        check(u64::MAX, "16E");
    }
}
