//! The section `[policy]` of the configuration file. It has no options on the command line, and is read again on SIGHUP.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, ensure};
use pagoda_core::policy::PerMille;
use pagoda_core::policy::settings::{SAMPLE_PAGES_MAX, SAMPLE_PERIOD_S_MAX, SAMPLING_DEFAULT, Sampling};
use pagoda_core::units::Bytes;
use serde::{Deserialize, Deserializer};

/// The keys of the section, as they are in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyFile {
    #[serde(deserialize_with = "text")]
    pool: Option<Bytes>,
    #[serde(deserialize_with = "text")]
    idle_tax: Option<PerMille>,
    thresholds: Option<[Part; 4]>,
    #[serde(deserialize_with = "text")]
    host_available_min: Option<Bytes>,
    sample_pages: Option<u32>,
    sample_period_s: Option<u32>,
    curves: Option<bool>,
}

/// A part of the pool, such as `"4%"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct Part(PerMille);

impl TryFrom<String> for Part {
    type Error = String;

    fn try_from(text: String) -> Result<Part, String> {
        text.parse().map(Part).map_err(|error: pagoda_core::policy::InvalidSettings| error.to_string())
    }
}

fn text<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// A size, such as `"48G"`.
pub(crate) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// What is configured of the memory policy; what is `None` has the policy's own default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyConfig {
    /// DRAM for VMs and what they cost.
    pub pool: Option<Bytes>,
    pub idle_tax: Option<PerMille>,
    /// High, soft, hard, low.
    pub thresholds: Option<[PerMille; 4]>,
    /// Less than this available means that the host itself is short.
    pub host_available_min: Option<Bytes>,
    /// The sampling of VMs for which nothing else is set.
    pub sampling: Sampling,
    /// Miss-ratio curves are watched.
    pub curves: bool,
    /// Rounds are recorded there. Not of this section: it has effect only at the daemon's start.
    pub recording: Option<PathBuf>,
}

impl Default for PolicyConfig {
    fn default() -> PolicyConfig {
        PolicyConfig {
            pool: None,
            idle_tax: None,
            thresholds: None,
            host_available_min: None,
            sampling: SAMPLING_DEFAULT,
            curves: true,
            recording: None,
        }
    }
}

impl PolicyConfig {
    /// What the section says. What depends on the host is looked at when it is used.
    ///
    /// # Errors
    /// Sampling that is none.
    pub(super) fn resolve(file: PolicyFile) -> Result<PolicyConfig> {
        let defaults = PolicyConfig::default();
        let pages = file.sample_pages.unwrap_or(defaults.sampling.pages);
        let period_s = file.sample_period_s.unwrap_or(defaults.sampling.period_s);
        ensure!((1..=SAMPLE_PAGES_MAX).contains(&pages), "sample_pages is {pages}: it can be 1 to {SAMPLE_PAGES_MAX}");
        ensure!(
            (1..=SAMPLE_PERIOD_S_MAX).contains(&period_s),
            "sample_period_s is {period_s}: it can be 1 to {SAMPLE_PERIOD_S_MAX}"
        );
        Ok(PolicyConfig {
            pool: file.pool,
            idle_tax: file.idle_tax,
            thresholds: file.thresholds.map(|all| all.map(|Part(part)| part)),
            host_available_min: file.host_available_min,
            sampling: Sampling { pages, period_s },
            curves: file.curves.unwrap_or(defaults.curves),
            recording: defaults.recording,
        })
    }
}
