//! The space of a VM's far tier: its pool, and what it is called there.

use std::path::{Path, PathBuf};

use crate::record::{Far, Record};
use anyhow::Result;
use pagoda_pool::config::PoolConfig;
use rmap::client::SpaceSpec;
use rmap::units::{PAGE_SIZE, SpaceId};

use crate::config::Config;

/// Where far tiers come from, and where it is noted what is owed for them.
#[derive(Clone, Debug)]
pub struct Dirs {
    pub(super) pool: PathBuf,
    pub(super) owed: PathBuf,
}

impl Dirs {
    pub fn of(config: &Config) -> Dirs {
        Dirs { pool: config.pool_dir.clone(), owed: config.state_dir.join("far") }
    }
}

/// What errors call a VM's tier.
pub(super) fn whose(name: &str) -> String {
    format!("the far tier of {name}")
}

/// The pool as this tier uses it: a tier stays where it was made, whatever `pool.toml` says of etcd now.
pub(super) fn pool_of(dir: &Path, far: &Far) -> Result<PoolConfig> {
    match far.cluster {
        Some(_) => PoolConfig::read(dir, None, tell),
        None => PoolConfig::by_file(dir, tell),
    }
}

pub(super) fn tell(text: &str) {
    tracing::warn!("pool: {text}");
}

pub(super) fn spec(record: &Record, far: &Far) -> SpaceSpec {
    let pages = record.memory().div_ceil(PAGE_SIZE as u64);
    SpaceSpec { id: SpaceId(far.space), pages, copies: far.copies.into(), reserve: 0, key: far.key }
}
