//! Options that both the command and `pagoda-server` read.

mod export;
mod pool_dir;
mod serve;
mod trial;

use std::path::PathBuf;

use clap::Args;

pub use self::export::Export;
pub use self::pool_dir::{Dir, PoolDir};
pub use self::serve::Serve;
pub use self::trial::Try;
use crate::output::Format;

/// A spin longer than this is a mistake: it would burn a core for nothing.
const SPIN_US_MAX: u64 = 10_000;

/// Options of every subcommand.
#[derive(Debug, Args)]
pub struct Global {
    /// Control socket of the daemon [default: /run/pagoda/pagoda.sock]
    #[arg(long, global = true, env = pagoda_api::SOCKET_ENV, value_name = "PATH", hide_env_values = true)]
    pub socket: Option<PathBuf>,
    /// Print JSON for programs instead of a table for people
    #[arg(long, global = true)]
    pub json: bool,
}

impl Global {
    /// The format in which this command prints, by `--json`.
    pub fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }
}
