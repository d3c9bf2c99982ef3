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
    fn exact_sizes_come_back() {
        for bytes in [0, 1, 4096, 3 << 20, (3 << 20) + 1, 5 << 30] {
            assert_eq!(parse_size(&format_exact(bytes)), Ok(bytes));
        }
    }
}
