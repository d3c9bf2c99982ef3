//! The section `[hosts]` of the configuration file: what other hosts may do here. It has no options on the command line.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use pagoda_link::hosts::dir_below;
use serde::Deserialize;

/// The keys of the section, as they are in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct HostsFile {
    pub listen: Option<String>,
}

/// What other hosts may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostsConfig {
    /// The daemon's key, and whom it trusts.
    pub dir: PathBuf,
    /// Where it listens for other hosts; nowhere unless the section says it.
    pub listen: Option<SocketAddr>,
}

impl HostsConfig {
    /// What holds without the section.
    pub fn below(state_dir: &Path) -> HostsConfig {
        HostsConfig { dir: dir_below(state_dir), listen: None }
    }

    /// What the section says.
    ///
    /// # Errors
    /// The address is none.
    pub(super) fn resolve(file: HostsFile, state_dir: &Path) -> Result<HostsConfig> {
        let address = |listen: String| {
            let wrong =
                || format!("[hosts] listen = {listen:?} is no address: write ADDR:PORT, such as \"0.0.0.0:7075\"");
            listen.parse::<SocketAddr>().with_context(wrong)
        };
        Ok(HostsConfig { listen: file.listen.map(address).transpose()?, ..HostsConfig::below(state_dir) })
    }
}
