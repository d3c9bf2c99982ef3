//! The space of a VM's remote tier: its pool, and what it is called there.

use std::path::{Path, PathBuf};

use crate::record::{Record, Remote};
use anyhow::Result;
use pagoda_pool::config::PoolConfig;
use rmap::client::SpaceSpec;
use rmap::units::{PAGE_SIZE, SpaceId};

use crate::config::Config;
use crate::moves::Notes;

/// Where remote tiers come from, where their pending releases are noted, and who owns VMs that move.
#[derive(Clone, Debug)]
pub struct Dirs {
    pub(super) pool: PathBuf,
    pub(super) pending: PathBuf,
    pub(super) notes: Notes,
}

impl Dirs {
    pub fn of(config: &Config) -> Dirs {
        let notes = Notes::below(&config.state_dir);
        Dirs { pool: config.pool_dir.clone(), pending: config.state_dir.join("far"), notes }
    }
}

/// What errors call a VM's tier.
pub(super) fn whose(name: &str) -> String {
    format!("the remote tier of {name}")
}

/// The pool as this tier uses it: a tier stays where it was made, whatever `pool.toml` says of etcd now.
pub(super) fn pool_of(dir: &Path, remote: &Remote) -> Result<PoolConfig> {
    match remote.cluster {
        Some(_) => PoolConfig::read(dir, None, report),
        None => PoolConfig::by_file(dir, report),
    }
}

pub(super) fn report(text: &str) {
    tracing::warn!("pool: {text}");
}

pub(super) fn spec(record: &Record, remote: &Remote) -> SpaceSpec {
    let pages = record.memory().div_ceil(PAGE_SIZE as u64);
    SpaceSpec { id: SpaceId(remote.space), pages, copies: remote.copies.into(), reserve: 0, key: remote.key }
}
