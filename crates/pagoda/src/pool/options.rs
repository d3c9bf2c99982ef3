//! What the command line says to `pagoda pool`.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::store;
use rmap::server::LANES_MAX;

use crate::cli::Pace;
use crate::units::parse_size;

/// Where keys, settings, the list of servers, the registry and disks are.
#[derive(Debug, Args)]
pub struct Dir {
    /// Directory of keys, settings, servers, registry and disks
    #[arg(long, value_name = "DIR", env = "PAGODA_POOL_DIR", default_value = store::DIR_DEFAULT)]
    pub dir: PathBuf,
}

/// Where a pool is.
#[derive(Debug, Args)]
pub struct Place {
    #[command(flatten)]
    pub dir: Dir,
    /// etcd that keeps the servers, disks and owners of a cluster [default: `cluster` in DIR/pool.toml]
    ///
    /// etcds:// is with TLS; DIR/pool.toml says with which certificates: ca, certificate, key. POOL is for an etcd that
    /// several pools share.
    #[arg(long, value_name = "etcd://HOST:PORT[,HOST:PORT...][/POOL]")]
    pub cluster: Option<String>,
}

impl Place {
    /// What is known of the pool; what goes wrong later is said on standard error.
    pub fn read(&self) -> Result<PoolConfig> {
        PoolConfig::read(&self.dir.dir, self.cluster.as_deref(), |text| eprintln!("pagoda: {text}"))
    }
}

#[derive(Debug, Subcommand)]
pub enum Pool {
    Try(Try),
    Serve(Serve),
    /// List the servers and what they have free
    ///
    /// The servers are those that etcd knows, and those in the file `servers` of the pool's directory, a line for each:
    /// its number, address, public key, and zone (servers in different zones do not fail together). `pagoda pool serve`
    /// prints its line. Ends with status 3 while etcd does not answer: nothing can be placed anew or taken over then.
    Ls {
        #[command(flatten)]
        place: Place,
    },
    Top(Top),
    Drain(Drain),
    /// Keys of this machine and of those that may use its memory
    #[command(subcommand)]
    Key(Key),
}

/// Watch the servers live
///
/// SIZE is what a server lends, USED what of it disks have, FREE what they may still get; DISKS have pages there, CLNTS
/// are sessions of clients. RD/s and WR/s are MiB that clients read and write there, RTT is the round trip from here in
/// microseconds. STATE is up, silent, or draining. PRESSURE is what the server asks of its clients: none, yellow (no
/// new slabs), orange (to move what they have there), red (to drop what has another copy).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda pool top
  pagoda pool top --json                           one sample
  pagoda pool top --batch 60 --json                one JSON object a sample")]
pub struct Top {
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub pace: Pace,
}

/// Have everything moved from a server to others, and end it
///
/// What TERM does at the server's own machine, but without an end to its patience: it ends when it has nothing left.
/// This machine's key must be one that the server's operator has added with `pagoda pool key add --admin`. Disks move
/// their pages while they are exported, as far as other servers have room.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda pool drain 3
  pagoda pool drain 3 --cancel

Exit status:
  0  nothing is left there, and the server ends
  1  something is: nothing moved in time, or the server does not do it for this machine
  4  there is no server of that number")]
pub struct Drain {
    #[command(flatten)]
    pub place: Place,
    /// Number of the server, as `pagoda pool ls` shows it
    #[arg(value_name = "SERVER")]
    pub server: u32,
    /// Stop waiting when nothing has moved for so long; the server goes on
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub timeout: u64,
    /// Let the server go on lending after all
    #[arg(long)]
    pub cancel: bool,
}

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

/// Lend memory of this machine, until the signal TERM
///
/// The memory is taken and locked before anything else. Clients whose keys were added with `pagoda pool key add` may
/// use it, at once. On TERM, clients are asked to move what they have here to other servers; when nothing is left, or
/// the time is over, or at a second TERM, it ends, and what is left is gone.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pagoda pool key init
  pagoda pool key add 5c1f0f...e2 --name host7
  pagoda pool serve --size 32G --listen 10.0.0.5
  pagoda pool serve --size 64G --listen 10.0.0.5:7071 --id 105 --on-disk /var/lib/pagoda
  pagoda pool serve --size 32G --listen 10.0.0.5 --id 3 --cluster etcd://10.0.0.1:2379,10.0.0.2:2379
  systemctl enable --now pagoda-pool          the same, with options in /etc/default/pagoda-pool")]
pub struct Serve {
    #[command(flatten)]
    pub place: Place,
    /// Memory to lend, such as 32G; 64 MiB of pages take 64.4 MiB (of a disk 64 MiB, and 384 KiB of memory)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: u64,
    /// Address to serve at; the port is 7070 unless given
    #[arg(long, value_name = "ADDR[:PORT]", value_parser = listen_addr)]
    pub listen: SocketAddr,
    /// Number of this server, different from all others of the pool
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub id: u32,
    /// Servers of different zones do not fail together; two copies of a page go to two zones where that is possible
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub zone: u32,
    /// Lend room of the disk that DIR is on, instead of memory: a last resort for disks whose pool is full
    ///
    /// Clients ask for it when no server has memory left, or the only copy of something is at one that ends; what they
    /// have there they move to memory as soon as there is some. So a full pool makes writes slow instead of failing them.
    /// The nearest such server is asked first: run one on each host that exports disks. The file has no name, and is gone
    /// with the server like lent memory; what is in it is encrypted.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["pressure_from", "also_borrow"])]
    pub on_disk: Option<PathBuf>,
    /// Let clients come by TCP too, to the same port: for those with `transport = "tcp"` in their pool.toml
    #[arg(long)]
    pub tcp: bool,
    /// Say each second where this server is, to the network that has the address of --listen [place: 239.255.82.77:7069]
    ///
    /// Clients that have its line in their file `servers`, or know it from etcd, find it when it has moved to another address,
    /// and greet it at once when it is back. GROUP may be a broadcast address. The words are signed and change nothing else.
    #[arg(long, value_name = "GROUP:PORT", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = ANNOUNCE_PLACE)]
    pub announce: Option<SocketAddrV4>,
    /// This machine may borrow from the pool, too: for trials on one machine
    #[arg(long)]
    pub also_borrow: bool,
    /// Read what memory there is from the files `meminfo` and `pressure` of DIR instead of the kernel's: for drills
    #[arg(long, value_name = "DIR")]
    pub pressure_from: Option<PathBuf>,
    /// Answer Prometheus at this address, such as 127.0.0.1:9466 (docs/pool-metrics.md)
    #[arg(long, value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// End when standard input is closed: for whoever starts this and must not leave it behind
    #[arg(long, hide = true)]
    pub while_stdin: bool,
    /// After TERM, wait so long for clients to move their pages
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain: u64,
    /// Look for requests so long before sleeping; 0 saves CPU, and costs some microseconds a request
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50)]
    #[arg(value_parser = clap::value_parser!(u64).range(..=SPIN_US_MAX))]
    pub spin: u64,
    /// The most that one disk or VM may have here, reserved or not [default: all of it]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub quota: Option<u64>,
    /// Threads that serve, each its part of the clients; by TCP and of a disk it is one [default: a quarter of the
    /// cores, at most 4]
    #[arg(long = "workers", alias = "lanes", value_name = "COUNT")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=LANES_MAX as u64))]
    pub lanes: Option<u64>,
}

/// A spin longer than this is a mistake: it would burn a core for nothing.
pub const SPIN_US_MAX: u64 = 10_000;

/// [`rmap::udp::ANNOUNCE_AT`], for the command line.
const ANNOUNCE_PLACE: &str = "239.255.82.77:7069";

/// Where servers listen, unless told otherwise.
const PORT: u16 = 7070;

#[derive(Debug, Subcommand)]
pub enum Key {
    /// Make this machine's key and the pool's, where they are missing
    ///
    /// All machines of a pool have the same pool key: copy the file `pool.key` from the first machine into the
    /// directory of each other one before this command is run there.
    Init {
        #[command(flatten)]
        dir: Dir,
    },
    /// Let a machine use the memory that is lent here
    ///
    /// A server that runs takes it up within a second.
    Add {
        #[command(flatten)]
        dir: Dir,
        /// Its public key, as `pagoda pool key ls` shows it there
        #[arg(value_name = "PUBLIC-KEY")]
        key: String,
        /// Its name, for people
        #[arg(long, default_value = "-")]
        name: String,
        /// Let it also drain the server here, which ends it (`pagoda pool drain`); for a key that was added before, too
        #[arg(long)]
        admin: bool,
    },
    /// Let a machine use the memory that is lent here no more
    ///
    /// A server that runs ends the machine's sessions within a second. What the machine's disks and VMs have here is lost to it,
    /// and takes room until the server ends: move them first (`pagoda pool drain`), unless the machine is in wrong hands.
    Rm {
        #[command(flatten)]
        dir: Dir,
        /// Its public key, or its name if no other has it, as `pagoda pool key ls` shows them
        #[arg(value_name = "PUBLIC-KEY|NAME")]
        key: String,
    },
    /// Show the public keys: this machine's, and those that may use its memory
    Ls {
        #[command(flatten)]
        dir: Dir,
    },
}

fn listen_addr(text: &str) -> Result<SocketAddr, String> {
    let with_port = text.parse::<SocketAddr>();
    with_port.or_else(|_| text.parse().map(|ip| SocketAddr::new(ip, PORT))).map_err(|_| {
        format!("{text:?} is not an address of this machine; write 10.0.0.5, 10.0.0.5:7070 or [fd00::5]:7070")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements_have_a_place_by_default() {
        assert_eq!(ANNOUNCE_PLACE.parse(), Ok(rmap::udp::ANNOUNCE_AT));
    }

    #[test]
    fn addresses_have_a_port_by_default() {
        let check = |text: &str, expected: Option<&str>| {
            assert_eq!(listen_addr(text).ok(), expected.map(|addr| addr.parse().unwrap()), "{text}");
        };
        check("10.0.0.5", Some("10.0.0.5:7070"));
        check("10.0.0.5:9", Some("10.0.0.5:9"));
        check("fd00::5", Some("[fd00::5]:7070"));
        check("[fd00::5]:9", Some("[fd00::5]:9"));
        check("host", None);
    }
}
