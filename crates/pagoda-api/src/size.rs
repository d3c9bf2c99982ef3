//! Sizes of Pagoda's own options, as people write them.

/// Reads a size of Pagoda's own options: a number and a unit, `4G`, `1.5GiB`, `512m`.
///
/// The unit is required, because QEMU reads a bare number as MiB, libvirt as KiB. 0 is 0 in all of them.
///
/// # Errors
/// A sentence that says what would be right.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let advice = || format!("{text:?} is not a size; write a number and a unit, such as 512M or 4G");
    if text == "0" {
        return Ok(0);
    }
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => return Err(format!("{text:?} has no unit; write {text}M or {text}G")),
        "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        unit @ ("kb" | "mb" | "gb" | "tb") => {
            let letter = unit[..1].to_ascii_uppercase();
            return Err(format!(
                "{text:?}: write {digits}{letter} or {digits}{letter}iB, which count in 1024s as QEMU does"
            ));
        }
        _ => return Err(advice()),
    };
    scale(digits, unit).ok_or_else(advice)
}

/// A number of units in the least unit; `None` if it is no number or too large. `digits` may have a fraction; a
/// fraction of a byte is rounded down.
pub fn scale(digits: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    // Nine digits tell bytes apart within a GiB, and the product below stays in range.
    if !is_number(whole) || !is_number(fraction) || fraction.len() > 9 {
        return None;
    }
    let whole = whole.parse::<u64>().ok()?.checked_mul(unit)?;
    let denominator = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let part = u128::from(fraction.parse::<u64>().ok()?) * u128::from(unit) / denominator;
    whole.checked_add(u64::try_from(part).ok()?)
}
