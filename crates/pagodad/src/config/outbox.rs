//! The section `[outbox]` of the configuration file.

use std::time::Duration;

use anyhow::{Result, ensure};
use pagoda_core::outbox::settings::{WINDOW_MAX, WINDOW_MIN};
use serde::Deserialize;

use crate::outboxes::PERIOD_DEFAULT;

/// The keys of the section, as they are in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutboxFile {
    /// How often sizes that follow an SLO are looked at, and the window in which an SLO is kept or not.
    period_s: Option<u64>,
}

/// The control period.
///
/// # Errors
/// It is out of range.
pub(super) fn period(file: &OutboxFile) -> Result<Duration> {
    let period = file.period_s.map_or(PERIOD_DEFAULT, Duration::from_secs);
    let (least, most) = (WINDOW_MIN.as_secs(), WINDOW_MAX.as_secs());
    ensure!(
        (WINDOW_MIN..=WINDOW_MAX).contains(&period),
        "[outbox] period_s is {}: it can be {least} to {most}",
        period.as_secs()
    );
    Ok(period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods() {
        let check = |period_s, expected: Option<u64>| {
            assert_eq!(period(&OutboxFile { period_s }).ok().map(|period| period.as_secs()), expected);
        };
        check(None, Some(60));
        check(Some(1), Some(1));
        check(Some(0), None);
        check(Some(3601), None);
    }
}
