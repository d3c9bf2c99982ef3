//! The configuration file. `packaging/pagoda.toml` shows every key.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::hosts::HostsFile;
use super::moves::MovesFile;
use super::outbox::OutboxFile;
use super::policy::PolicyFile;
use super::snapshots::SnapshotsFile;
use super::values::{Group, LargeFolios, Metrics, PageIn, Replacement};
use crate::compressed::CompressedFile;

/// The keys, each named as its option.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct File {
    pub state_dir: Option<PathBuf>,
    pub swap_dir: Option<PathBuf>,
    pub pool_dir: Option<PathBuf>,
    pub socket: Option<PathBuf>,
    pub attach_socket: Option<PathBuf>,
    pub group: Option<Group>,
    pub metrics: Option<Metrics>,
    pub shim: Option<PathBuf>,
    pub tune_host: Option<bool>,
    pub large_folios: Option<LargeFolios>,
    pub page_sharing: Option<bool>,
    pub clone_sharing: Option<bool>,
    pub page_in: Option<PageIn>,
    pub replacement: Option<Replacement>,
    pub busy_poll_us: Option<u64>,
    pub policy_recording: Option<PathBuf>,
    pub compressed: Option<CompressedFile>,
    pub snapshots: SnapshotsFile,
    pub hosts: HostsFile,
    pub moves: MovesFile,
    pub outbox: OutboxFile,
    pub policy: PolicyFile,
}

pub(super) fn read(path: &Path) -> Result<File> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("read the configuration file {}", path.display()))?;
    parse(&text, path)
}

pub(super) fn read_if_there(path: &Path) -> Result<File> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text, path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(File::default()),
        Err(error) => Err(error).with_context(|| format!("read the configuration file {}", path.display())),
    }
}

pub(super) fn parse(text: &str, path: &Path) -> Result<File> {
    let file: File =
        toml::from_str(text).with_context(|| format!("wrong setting in the configuration file {}", path.display()))?;
    let paths = [
        ("state_dir", &file.state_dir),
        ("swap_dir", &file.swap_dir),
        ("pool_dir", &file.pool_dir),
        ("socket", &file.socket),
        ("attach_socket", &file.attach_socket),
        ("shim", &file.shim),
        ("policy_recording", &file.policy_recording),
    ];
    for (key, value) in paths {
        // Which directory the daemon is started in is not the file's to know.
        if let Some(value) = value.as_ref().filter(|value| !value.is_absolute()) {
            bail!("{}, line {}: {key} = {value:?} has to be a full path", path.display(), line_of(text, key));
        }
    }
    Ok(file)
}

fn line_of(text: &str, key: &str) -> usize {
    let is_key =
        |line: &str| line.trim_start().strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='));
    text.lines().position(is_key).map_or(1, |index| index + 1)
}
