//! The terms on which a VM takes part in the memory policy, and what they may be.

use serde::{Deserialize, Serialize};

/// Shares of a VM of which nothing is said. Only ratios matter.
pub const SHARES_DEFAULT: u32 = 1000;
/// The most shares of one VM.
pub const SHARES_MAX: u32 = 1_000_000;
/// Length of the name of a share group.
pub const SHARE_GROUP_LEN_MAX: usize = 64;

// How a VM's working set is sampled: so many random pages in so many seconds (ESX section 5.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(deny_unknown_fields)]
pub struct Sampling {
    /// Random pages that are watched in each sampling period, 1 to 4096 [default: 100]
    ///
    /// A watched page costs a fault at its next use; more of them make ACTV steadier.
    #[cfg_attr(feature = "clap", arg(id = "sample_pages", long = "sample-pages", value_name = "N",
        default_value_t = Sampling::default().pages, hide_default_value = true))]
    pub pages: u32,
    /// Seconds of a sampling period, 1 to 3600 [default: 30]
    #[cfg_attr(feature = "clap", arg(id = "sample_period", long = "sample-period", value_name = "SECONDS",
        default_value_t = Sampling::default().period_s, hide_default_value = true))]
    pub period_s: u32,
}

impl Sampling {
    /// A sampled page costs a zap and a fault: more would be a scan.
    pub const PAGES_MAX: u32 = 4096;
    /// A longer period says nothing of now.
    pub const PERIOD_S_MAX: u32 = 3600;
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { pages: 100, period_s: 30 }
    }
}

/// Checks a guarantee against the cap of the VM.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_min(min_bytes: u64, dram_bytes: u64) -> Result<(), String> {
    if min_bytes <= dram_bytes {
        return Ok(());
    }
    Err(format!(
        "a min of {} MiB is more than the VM's DRAM cap of {} MiB; lower --min or raise --dram",
        min_bytes >> 20,
        dram_bytes >> 20
    ))
}

/// Checks a number of shares.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_shares(shares: u32) -> Result<(), String> {
    match shares {
        0 => Err("0 shares would give a VM nothing; the least is 1".into()),
        shares if shares > SHARES_MAX => Err(format!("{shares} shares are more than the {SHARES_MAX} a VM may have")),
        _ => Ok(()),
    }
}

/// Checks how a working set is to be sampled.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_sampling(sampling: Sampling) -> Result<(), String> {
    let Sampling { pages, period_s } = sampling;
    if pages == 0 || pages > Sampling::PAGES_MAX {
        return Err(format!("a sample has 1 to {} pages, not {pages}", Sampling::PAGES_MAX));
    }
    if period_s == 0 || period_s > Sampling::PERIOD_S_MAX {
        return Err(format!("a sampling period has 1 to {} seconds, not {period_s}", Sampling::PERIOD_S_MAX));
    }
    Ok(())
}

/// Checks the name of a share group: letters, digits, `-`, `_`, `.`.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_share_group(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > SHARE_GROUP_LEN_MAX {
        return Err(format!("the name of a share group has 1 to {SHARE_GROUP_LEN_MAX} characters, not {}", name.len()));
    }
    match name.chars().find(|c| !c.is_ascii_alphanumeric() && !matches!(c, '-' | '_' | '.')) {
        Some(bad) => {
            Err(format!("the name of a share group has only letters, digits, '-', '_' and '.': {name:?} has {bad:?}"))
        }
        None => Ok(()),
    }
}

#[cfg(feature = "clap")]
pub(super) mod option {
    use super::{check_share_group, check_shares};

    pub fn shares(text: &str) -> Result<u32, String> {
        let shares = text.parse().map_err(|_| format!("{text:?} is not a number of shares, such as 2000"))?;
        check_shares(shares).map(|()| shares)
    }

    pub fn share_group(text: &str) -> Result<String, String> {
        check_share_group(text).map(|()| text.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_refused() {
        let says = |result: Result<(), String>, expected: &str| {
            let said = result.err().unwrap_or_default();
            assert!(if expected.is_empty() { said.is_empty() } else { said.contains(expected) }, "{said}");
        };
        says(check_min(1 << 30, 1 << 30), "");
        says(check_min(2 << 30, 1 << 30), "lower --min or raise --dram");
        says(check_shares(1), "");
        says(check_shares(0), "the least is 1");
        says(check_shares(SHARES_MAX), "");
        says(check_shares(SHARES_MAX + 1), "more than the 1000000");
        says(check_sampling(Sampling::default()), "");
        says(check_sampling(Sampling { pages: 0, period_s: 30 }), "1 to 4096 pages");
        says(check_sampling(Sampling { pages: 100, period_s: 3601 }), "1 to 3600 seconds");
        says(check_share_group("tenant-1"), "");
        says(check_share_group(""), "1 to 64 characters");
        says(check_share_group("a b"), "has ' '");
    }
}
