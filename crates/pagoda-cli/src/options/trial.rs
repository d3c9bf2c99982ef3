//! Options of `pagoda pool try`.

use std::path::PathBuf;

use clap::Args;

use crate::units::parse_size;

/// Try a pool on this machine alone: servers, a disk and its export, until Ctrl-C
///
/// Keys, servers and the disk are in a directory of their own under /tmp, which ends with the trial; nothing of another pool is
/// touched. Each server locks as much memory as the disk has, which needs root or a higher `ulimit -l`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda pool try
  pagoda pool try --size 1G --servers 5 --nbd /run/try.sock")]
pub struct Try {
    /// Size of the disk, a multiple of 4096 bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "256M")]
    pub size: u64,
    /// Servers, each with room for all of the disk
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=TRY_SERVERS_MAX))]
    pub servers: u32,
    /// Unix socket to export the disk at [default: in the trial's directory]
    #[arg(long, value_name = "PATH")]
    pub nbd: Option<PathBuf>,
}

/// More teach nothing that these do not.
const TRY_SERVERS_MAX: i64 = 16;
