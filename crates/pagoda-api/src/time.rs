//! Moments as people read them, in UTC. Elsewhere they are milliseconds since 1970.

/// Writes a moment as RFC 3339 wants it: `2026-11-28T20:30:42Z`.
#[must_use]
pub fn rfc3339(unix_ms: u64) -> String {
    let ([year, month, day], [hour, minute, second]) = civil(unix_ms);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Writes a moment such that it can be part of a name: `20261128-203042`.
#[must_use]
pub fn compact(unix_ms: u64) -> String {
    let ([year, month, day], [hour, minute, second]) = civil(unix_ms);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// Year, month and day; hour, minute and second.
fn civil(unix_ms: u64) -> ([u64; 3], [u64; 3]) {
    let seconds = unix_ms / 1000;
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Days since the first of March of the year 0, in eras of 400 years; a year that begins in March has its leap day last
    // (Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days).
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    ([year, month, day], [time / 3600, time / 60 % 60, time % 60])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_date_says() {
        let check = |seconds: u64, expected: &str| assert_eq!(rfc3339(seconds * 1000 + 999), expected);
        check(0, "1970-01-01T00:00:00Z");
        check(951_782_399, "2000-02-28T23:59:59Z");
        check(951_782_400, "2000-02-29T00:00:00Z");
        check(1_795_881_600, "2026-11-28T16:00:00Z");
        check(4_107_542_399, "2100-02-28T23:59:59Z");
        check(4_107_542_400, "2100-03-01T00:00:00Z");
        assert_eq!(compact(1_795_881_642_000), "20261128-160042");
        assert!(crate::check_snapshot_name(&compact(0)).is_ok());
        // No moment makes it fail.
        assert!(rfc3339(u64::MAX).ends_with('Z'));
    }
}
