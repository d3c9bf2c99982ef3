//! The section `[snapshots]` of the configuration file. It has no options on the command line.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Result, ensure};
use pagoda_core::units::Bytes;
use pagoda_image::RoomLimits;
use pagoda_image::limits::{CHAIN_MAX, SNAPSHOTS_PER_VM_MAX};
use serde::Deserialize;

use super::policy::size;

/// In percent. With more, a file system of usual size would have no room for a VM's memory.
const KEEP_FREE_PERCENT_MAX: u8 = 90;
const KEEP_FREE_PERCENT_DEFAULT: u8 = 10;
/// As many snapshots as a VM can have.
const CHAIN_DEFAULT: usize = SNAPSHOTS_PER_VM_MAX;
/// Less holds no VM's memory.
const MAX_BYTES_MIN: Bytes = Bytes::from_mib(64);

/// The keys of the section, as they are in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SnapshotsFile {
    pub dir: Option<PathBuf>,
    pub max_bytes: Option<Size>,
    pub keep_free: Option<Percent>,
    pub chain_max: Option<usize>,
    pub prefetch: Option<bool>,
}

/// A size, such as `"200G"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub(super) struct Size(#[serde(deserialize_with = "size")] Bytes);

/// A part of the file system, such as `"10%"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Percent(u8);

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Percent, String> {
        let number = text.strip_suffix('%').and_then(|digits| digits.trim_end().parse().ok());
        match number {
            Some(percent @ 0..=KEEP_FREE_PERCENT_MAX) => Ok(Percent(percent)),
            _ => Err(format!(
                "{text:?} is no part of a file system: write 0% to {KEEP_FREE_PERCENT_MAX}%, such as \"10%\""
            )),
        }
    }
}

impl TryFrom<String> for Percent {
    type Error = String;

    fn try_from(text: String) -> Result<Percent, String> {
        text.parse()
    }
}

/// Where snapshots are, and how much room they may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotsConfig {
    pub dir: PathBuf,
    pub limits: RoomLimits,
    /// Snapshots that refer one to the other at most, the first counted, which refers to none. 1: each is a full one.
    pub chain_max: usize,
    /// What a VM needs first is recorded in its image, and the next VM of the image gets that before it asks.
    pub prefetch: bool,
}

impl SnapshotsConfig {
    /// What holds without the section.
    pub fn below(state_dir: &Path) -> SnapshotsConfig {
        let limits = RoomLimits { max: None, keep_free_percent: KEEP_FREE_PERCENT_DEFAULT };
        SnapshotsConfig { dir: state_dir.join("images"), limits, chain_max: CHAIN_DEFAULT, prefetch: true }
    }

    /// What the section says.
    ///
    /// # Errors
    /// A directory that is no full path, or hardly room.
    pub(super) fn resolve(file: SnapshotsFile, state_dir: &Path) -> Result<SnapshotsConfig> {
        let defaults = SnapshotsConfig::below(state_dir);
        let dir = file.dir.unwrap_or(defaults.dir);
        ensure!(dir.is_absolute(), "[snapshots] dir = {dir:?} has to be a full path");
        let max = file.max_bytes.map(|Size(bytes)| bytes);
        ensure!(
            max.is_none_or(|max| max >= MAX_BYTES_MIN),
            "[snapshots] max_bytes is less than {} MiB: no VM's memory fits; leave it out for no limit",
            MAX_BYTES_MIN.0 >> 20
        );
        let keep_free_percent = file.keep_free.map_or(defaults.limits.keep_free_percent, |Percent(percent)| percent);
        let chain_max = file.chain_max.unwrap_or(defaults.chain_max);
        ensure!(
            (1..=CHAIN_MAX).contains(&chain_max),
            "[snapshots] chain_max is {chain_max}: it can be 1, for snapshots that have all memory by themselves, to {CHAIN_MAX}"
        );
        let prefetch = file.prefetch.unwrap_or(defaults.prefetch);
        Ok(SnapshotsConfig { dir, limits: RoomLimits { max, keep_free_percent }, chain_max, prefetch })
    }
}
