//! Options of `pagoda pool serve`.

use std::net::{SocketAddr, SocketAddrV4};
use std::path::PathBuf;

use clap::Args;

use super::{PoolDir, SPIN_US_MAX};
use crate::units::parse_size;

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
    pub pool_dir: PoolDir,
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
    /// Lend room of the disk that DIR is on, instead of memory: an overflow disk for a pool that is full
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
    /// Announce each second where this server is, in the network of the address of --listen [GROUP:PORT: 239.255.82.77:7069]
    ///
    /// Clients that have its line in their file `servers`, or know it from etcd, find it when it has moved to another address,
    /// and greet it at once when it is back. GROUP may be a broadcast address. Announcements are signed and change nothing else.
    #[arg(long, value_name = "GROUP:PORT", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = ANNOUNCE_GROUP)]
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
    #[arg(long, alias = "lanes", value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..=WORKERS_MAX))]
    pub workers: Option<u64>,
}

/// [`rmap_io::net::ANNOUNCE_AT`], for the command line.
const ANNOUNCE_GROUP: &str = "239.255.82.77:7069";

/// Worker threads of a server.
const WORKERS_MAX: u64 = rmap::server::WORKERS_MAX as u64;

/// Where servers listen, unless told otherwise.
const PORT: u16 = 7070;

fn listen_addr(text: &str) -> Result<SocketAddr, String> {
    let with_port = text.parse::<SocketAddr>();
    with_port.or_else(|_| text.parse().map(|ip| SocketAddr::new(ip, PORT))).map_err(|_| {
        format!("{text:?} is not an address of this machine; write 10.0.0.5, 10.0.0.5:7070 or [fd00::5]:7070")
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Server {
        #[command(flatten)]
        serve: Serve,
    }

    #[test]
    fn workers_have_their_old_name_too() {
        for name in ["--workers", "--lanes"] {
            let words = ["server", "--size", "1G", "--listen", "127.0.0.1", name, "3"];
            assert_eq!(Server::try_parse_from(words).unwrap().serve.workers, Some(3), "{name}");
        }
    }

    #[test]
    fn announcements_have_a_group_by_default() {
        assert_eq!(ANNOUNCE_GROUP.parse(), Ok(rmap_io::net::ANNOUNCE_AT));
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
