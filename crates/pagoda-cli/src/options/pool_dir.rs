//! Where a pool is.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use pagoda_pool::config::PoolConfig;
use pagoda_pool::store;

/// Where keys, settings, the list of servers, the control plane's file and disks are.
#[derive(Debug, Args)]
pub struct Dir {
    /// Directory of keys, settings, servers, disks and, without etcd, the control plane
    #[arg(long, value_name = "DIR", env = "PAGODA_POOL_DIR", default_value = store::DIR_DEFAULT)]
    pub dir: PathBuf,
}

/// Where a pool is.
#[derive(Debug, Args)]
pub struct PoolDir {
    #[command(flatten)]
    pub dir: Dir,
    /// etcd that keeps the servers, disks and owners of a cluster [default: `cluster` in DIR/pool.toml]
    ///
    /// etcds:// is with TLS; DIR/pool.toml says with which certificates: ca, certificate, key. POOL is for an etcd that
    /// several pools share.
    #[arg(long, value_name = "etcd://HOST:PORT[,HOST:PORT...][/POOL]")]
    pub cluster: Option<String>,
}

impl PoolDir {
    /// What is known of the pool. What goes wrong later is printed on standard error.
    ///
    /// # Errors
    /// The pool's settings are wrong.
    pub fn read(&self) -> Result<PoolConfig> {
        PoolConfig::read(&self.dir.dir, self.cluster.as_deref(), |text| eprintln!("pagoda: {text}"))
    }
}
