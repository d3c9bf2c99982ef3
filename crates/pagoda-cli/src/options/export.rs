//! Options of `pagoda disk export`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgGroup, Args};
use rmap::client::KEEP_AFTER;

use super::{PoolDir, SPIN_US_MAX};
use crate::units::parse_seconds;

/// Offer a disk to programs that speak NBD, until the signal TERM
///
/// A write is answered when all copies have it, so nothing is lost when this ends, or is killed. Whoever may open the
/// socket may use the disk; its mode is 0600.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("where").required(true).args(["nbd", "tcp"]))]
#[command(after_help = "\
Examples:
  pagoda disk export scratch --nbd /run/scratch.sock
  qemu-system-x86_64 ... -drive file=nbd:unix:/run/scratch.sock,format=raw,if=virtio
  nbdcopy image.raw 'nbd+unix:///?socket=/run/scratch.sock'
  nbd-client -unix /run/scratch.sock /dev/nbd0 -b 4096      on kernels that have nbd")]
pub struct Export {
    #[command(flatten)]
    pub pool_dir: PoolDir,
    pub name: String,
    /// Unix socket to listen at; one that a dead process left is replaced
    #[arg(long, value_name = "PATH")]
    pub nbd: Option<PathBuf>,
    /// Address on the loopback to listen at, such as 127.0.0.1:10809
    #[arg(long, value_name = "ADDR:PORT")]
    pub tcp: Option<SocketAddr>,
    /// Take the disk away from whoever exports it: what that one had not answered is not written
    ///
    /// Also needed where another machine of the cluster was the last to export it: it may still do.
    #[arg(long)]
    pub take_over: bool,
    /// Only read the disk, beside any others that read it and one that writes it: a read returns what was written before it
    ///
    /// Each read asks the disk's map, so it takes about as long as an answer of etcd, and none comes while that is away. What
    /// the reading program, or its kernel, keeps in a cache is as old as it is: read with O_DIRECT. A disk that was shared
    /// (`pagoda disk share`) is only read anyway, and without that.
    #[arg(long, conflicts_with_all = ["take_over", "parity_after"])]
    pub read_only: bool,
    /// Give a server up, where another has a copy, after so long a silence: longer where networks or machines pause
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u64).range(5..=60_000))]
    pub fail_after: u64,
    /// Answer with an error what only servers have that have been silent for so long, until one of them is back; 0: wait for
    /// them as long as it takes
    ///
    /// So are writes answered that wait for etcd: the first to a part of the disk, and those of which one copy is at a dead
    /// server. Nothing is lost by that. A write that was answered so may be there later, and may not.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u64).range(..=86_400))]
    pub error_after: u64,
    /// Of a read-only disk: make missing copies when nobody else has for so long
    #[arg(long, value_name = "SECONDS", default_value_t = KEEP_AFTER.as_secs())]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub keep_after: u64,
    /// Keep parts of the disk that were not written to for so long, such as 10m, with parity instead of second copies: 1.25 times
    /// their size instead of twice
    ///
    /// At five servers or more, of a disk with two copies. Four parts of 64 MiB get their second copies again before one of them
    /// is written to, and that write waits for it: some tenths of a second on a network of 10 Gbit/s.
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub parity_after: Option<u64>,
    /// Look at every copy of every page once in so long, so that damage is found while another copy is right; 0: never
    #[arg(long, value_name = "HOURS", default_value_t = 24)]
    #[arg(value_parser = clap::value_parser!(u64).range(..=SCRUB_HOURS_MAX))]
    pub scrub: u64,
    /// Answer Prometheus at this address, such as 127.0.0.1:9465 (docs/pool-metrics.md)
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// Look for requests and answers so long before sleeping; 0 saves CPU, and costs some microseconds a request
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    #[arg(value_parser = clap::value_parser!(u64).range(..=SPIN_US_MAX))]
    pub spin: u64,
}

/// A leap year in hours, the longest that reading every copy once may take.
const SCRUB_HOURS_MAX: u64 = 366 * 24;
