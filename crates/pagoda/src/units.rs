//! Sizes as people and QEMU write them: binary units throughout. What the servers read and print too is in `pagoda-cli`.

use pagoda_api::size::scale;
pub use pagoda_cli::units::{format_seconds, format_size, parse_seconds, parse_size};

/// Reads a part, `75%`, `7.5%` or `0.75`, as per mille, 0 to 1000. What is finer than that is refused.
///
/// # Errors
/// A sentence that says what would be right.
pub fn parse_per_mille(text: &str) -> Result<u16, String> {
    let (number, per_mille_of_one) = match text.strip_suffix('%') {
        Some(percent) => (percent.trim_end(), 10),
        None => (text, 1000),
    };
    // Counted in thousandths of a per mille, so that a finer part is seen.
    let exact = scale(number, per_mille_of_one * 1000).filter(|exact| exact % 1000 == 0 && *exact <= 1_000_000);
    let part = exact.and_then(|exact| u16::try_from(exact / 1000).ok());
    part.ok_or_else(|| format!("{text:?} is not a part of a whole; write 75% or 0.75, to a tenth of a percent"))
}

/// Per mille as percent, `75 %` or `7.5 %`.
pub fn format_per_mille(part: u16) -> String {
    match part % 10 {
        0 => format!("{} %", part / 10),
        tenth => format!("{}.{tenth} %", part / 10),
    }
}

/// Reads a rate of a network, `500M` or `2.5G`: bits a second in thousands, as networks count. In bytes a second.
///
/// # Errors
/// A sentence that says what would be right.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let bits = text.strip_suffix("/s").unwrap_or(text);
    let bits = bits.strip_suffix("bit").unwrap_or(bits);
    let unit = match bits.chars().last() {
        Some('k' | 'K') => Some(1_000),
        Some('m' | 'M') => Some(1_000_000),
        Some('g' | 'G') => Some(1_000_000_000),
        Some('t' | 'T') => Some(1_000_000_000_000),
        _ => None,
    };
    let rate = unit.and_then(|unit| scale(&bits[..bits.len() - 1], unit));
    rate.map(|bits| bits / 8).ok_or_else(|| {
        format!("{text:?} is not a rate; write bits a second, such as 500M or 2G, which is 250 million bytes a second")
    })
}

/// Bytes a second as a network counts them, `941 Mbit/s` or `2.5 Gbit/s`.
pub fn format_rate(bytes_per_second: u64) -> String {
    let mbit = bytes_per_second as f64 * 8.0 / 1e6;
    match mbit {
        // 999.5 is the least that would print as 1000.
        mbit if mbit >= 999.5 => {
            format!("{:.2}", mbit / 1e3).trim_end_matches('0').trim_end_matches('.').to_owned() + " Gbit/s"
        }
        mbit if mbit >= 10.0 => format!("{mbit:.0} Mbit/s"),
        mbit => format!("{mbit:.1} Mbit/s"),
    }
}

/// Reads a short time, `30ms` or `1.5s`, as milliseconds.
///
/// # Errors
/// A sentence that says what would be right.
pub fn parse_millis(text: &str) -> Result<u64, String> {
    let millis = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(millis), _) => millis.parse().ok(),
        (None, Some(seconds)) => scale(seconds, 1000),
        (None, None) => None,
    };
    millis.ok_or_else(|| format!("{text:?} is not a time; write a number and ms or s, such as 30ms or 1.5s"))
}

/// A size that [`parse_size`] reads as exactly so many bytes.
pub fn format_exact(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format_mib(bytes) } else { format!("{bytes}B") }
}

/// Reads a size as QEMU's `qemu_strtosz` does: decimal with a fraction or hexadecimal, then a
/// suffix of `BKMGTPE` in either case; without one it counts in `default_unit` bytes.
pub fn parse_qemu_size(text: &str, default_unit: u64) -> Option<u64> {
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(hex, 16).ok()?.checked_mul(default_unit);
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => default_unit,
        "B" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        "P" => 1 << 50,
        "E" => 1 << 60,
        _ => return None,
    };
    scale(digits, unit)
}

/// The size in MiB, exactly, for QEMU's options; `bytes` is a multiple of MiB.
pub fn format_mib(bytes: u64) -> String {
    format!("{}M", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_units_are_refused_with_the_binary_ones() {
        let said = parse_size("512MB").unwrap_err();
        assert!(said.contains("512M or 512MiB"), "{said}");
        assert!(parse_size("1.5gb").unwrap_err().contains("1.5GiB"));
    }

    const G: u64 = 1 << 30;

    #[test]
    fn own_sizes() {
        let check = |text: &str, expected: Option<u64>| {
            assert_eq!(parse_size(text).ok(), expected, "{text}");
        };
        check("4G", Some(4 * G));
        check("4g", Some(4 * G));
        check("4GiB", Some(4 * G));
        check("1.5G", Some(3 * G / 2));
        check("0.25t", Some(256 * G));
        check("512M", Some(G / 2));
        check("4096B", Some(4096));
        check("4096", None);
        check("0", Some(0));
        check("", None);
        check("G", None);
        check("4GB", None);
        check("-4G", None);
        check("4 G", None);
        check("4..5G", None);
        check("4.G", None);
        check("99999999999T", None);
        check("1e3G", None);
        check("４G", None);
        assert!(parse_size("4096").unwrap_err().contains("4096M"));
    }

    #[test]
    fn qemus_sizes() {
        let check = |text: &str, unit: u64, expected: Option<u64>| {
            assert_eq!(parse_qemu_size(text, unit), expected, "{text}");
        };
        check("4096", 1 << 20, Some(4 * G));
        check("4096", 1, Some(4096));
        check("4G", 1 << 20, Some(4 * G));
        check("786432k", 1, Some(768 << 20));
        check("1.5G", 1, Some(3 * G / 2));
        check("0x1000", 1, Some(4096));
        check("1B", 1 << 20, Some(1));
        check("4GiB", 1, None);
        check("x", 1, None);
        check("16E", 1, None);
    }

    #[test]
    fn parts() {
        let check = |text: &str, expected: Option<u16>| assert_eq!(parse_per_mille(text).ok(), expected, "{text}");
        check("75%", Some(750));
        check("7.5 %", Some(75));
        check("0.75", Some(750));
        check("1", Some(1000));
        check("0%", Some(0));
        check("100%", Some(1000));
        check("100.1%", None);
        check("75", None);
        check("7.55%", None);
        check("0.7555", None);
        check("-1%", None);
        check("%", None);
        check("", None);
        assert_eq!((format_per_mille(750), format_per_mille(75)), ("75 %".to_owned(), "7.5 %".to_owned()));
    }

    #[test]
    fn rates() {
        let check = |text: &str, expected: Option<u64>| assert_eq!(parse_rate(text).ok(), expected, "{text}");
        check("2G", Some(250_000_000));
        check("2.5g", Some(312_500_000));
        check("500Mbit/s", Some(62_500_000));
        check("8k", Some(1000));
        check("0G", Some(0));
        check("2", None);
        check("", None);
        check("G", None);
        check("2GiB", None);
        check("2GB", None);
        check("-2G", None);
        check("２G", None);
        let check = |rate: u64, expected: &str| assert_eq!(format_rate(rate), expected);
        check(125_000_000, "1 Gbit/s");
        check(117_000_000, "936 Mbit/s");
        check(312_500_000, "2.5 Gbit/s");
        check(1_000_000, "8.0 Mbit/s");
        check(0, "0.0 Mbit/s");
    }

    #[test]
    fn short_times() {
        let check = |text: &str, expected: Option<u64>| assert_eq!(parse_millis(text).ok(), expected, "{text}");
        check("30ms", Some(30));
        check("1.5s", Some(1500));
        check("30", None);
        check("ms", None);
        check("-1s", None);
        check("1m", None);
    }

    #[test]
    fn exact_sizes_come_back() {
        for bytes in [0, 1, 4096, 3 << 20, (3 << 20) + 1, 5 << 30] {
            assert_eq!(parse_size(&format_exact(bytes)), Ok(bytes));
        }
    }
}
