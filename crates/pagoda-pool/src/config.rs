//! The pool that is worked with: its directory, and etcd where the pool is a cluster's.
//!
//! The file `pool.toml` of the directory says what need not be typed each time; an option beats it.
//!
//! | key | |
//! |---|---|
//! | `cluster` | `etcd://HOST:PORT[,HOST:PORT...][/POOL]`, `etcds://` for TLS |
//! | `ca`, `certificate`, `key` | PEM files for `etcds`; relative paths begin at the directory |
//! | `host` | what others call this machine; its host name unless it is given |
//! | `transport` | how this machine reaches servers: `udp`, or `tcp` where UDP is not allowed |
//! | `announcements` | where servers announce themselves, `239.255.82.77:7069` unless it is given |
//! | `announcements_on` | IPv4 address of this machine's network card that hears them; the kernel's choice unless it is given |
//! | `link_mbit` | what its network carries, Mbit/s each way: 10000 unless it is given. Copies that are made anew use part of it |

use std::net::{Ipv4Addr, SocketAddrV4};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rmap::client::ServerInfo;
use rmap_etcd::{Etcd, EtcdConfig, NAME_MAX, Node, TlsFiles};
use rmap_io::net::ANNOUNCE_AT;
use serde::Deserialize;

use crate::error::UsageError;
use crate::{Report, store};

/// The pool of an etcd address that names none: most etcds serve one.
const DEFAULT_POOL: &str = "default";

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    cluster: Option<String>,
    ca: Option<PathBuf>,
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    host: Option<String>,
    #[serde(default)]
    transport: Transport,
    #[serde(default)]
    link_mbit: LinkMbit,
    announcements: Option<SocketAddrV4>,
    announcements_on: Option<Ipv4Addr>,
}

/// How servers are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    #[default]
    Udp,
    /// Slower, and servers have to allow it.
    Tcp,
}

/// What a machine's network carries each way, in Mbit/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
pub struct LinkMbit(u64);

impl LinkMbit {
    /// Ethernet, from the slowest that may be found up to some generations ahead.
    const RANGE: RangeInclusive<u64> = 10..=1_000_000;

    pub fn mbit(self) -> u64 {
        self.0
    }

    pub fn bytes_per_second(self) -> u64 {
        self.0 * 1_000_000 / 8
    }
}

impl Default for LinkMbit {
    fn default() -> LinkMbit {
        LinkMbit(10_000)
    }
}

impl TryFrom<u64> for LinkMbit {
    type Error = String;

    fn try_from(mbit: u64) -> Result<LinkMbit, String> {
        let (least, most) = (LinkMbit::RANGE.start(), LinkMbit::RANGE.end());
        if LinkMbit::RANGE.contains(&mbit) {
            return Ok(LinkMbit(mbit));
        }
        Err(format!("link_mbit is {mbit}: give what the network carries in Mbit/s, {least} to {most}"))
    }
}

/// Where announcements of servers are heard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// A group, or the broadcast address of a network.
    pub at: SocketAddrV4,
    /// Which card a group is joined on; unspecified: the one that the kernel would send to it by.
    pub on: Ipv4Addr,
}

/// A pool's directory, and its etcd.
#[derive(Debug)]
pub struct PoolConfig {
    pub dir: PathBuf,
    pub etcd: Option<EtcdConfig>,
    pub transport: Transport,
    pub link: LinkMbit,
    pub announcements: Heard,
    /// What goes wrong, and is gone on without.
    pub report: Report,
}

impl PoolConfig {
    /// `cluster`: an address of etcd that beats the one in `pool.toml`.
    pub fn read(dir: &Path, cluster: Option<&str>, report: Report) -> Result<PoolConfig> {
        let settings = Settings::read(dir)?;
        let address = cluster.or(settings.cluster.as_deref());
        let etcd = address.map(|address| settings.etcd(dir, address)).transpose()?;
        Ok(PoolConfig { etcd, ..settings.without_etcd(dir, report) })
    }

    /// The pool of this machine's registry file, whatever `pool.toml` says of etcd.
    pub fn by_file(dir: &Path, report: Report) -> Result<PoolConfig> {
        Ok(Settings::read(dir)?.without_etcd(dir, report))
    }

    /// A connection to etcd, which answers; `None` where the pool is none of a cluster.
    pub fn connect(&self) -> Result<Option<Etcd>> {
        Ok(self.etcd.clone().map(Etcd::connect).transpose()?)
    }

    /// The servers that etcd knows, and those of the file `servers` that it does not.
    pub fn servers(&self) -> Result<Vec<ServerInfo>> {
        let mut servers = self.members()?;
        let listed = store::servers(&self.dir)?;
        let unknown = |server: &ServerInfo| servers.iter().all(|member| member.id != server.id);
        let unknown: Vec<ServerInfo> = listed.into_iter().filter(unknown).collect();
        servers.extend(unknown);
        if servers.is_empty() {
            let (path, lines) = (store::servers_path(&self.dir), "the line that `pagoda pool serve` prints");
            let advice = match self.etcd {
                Some(_) => "no server is in etcd: start `pagoda pool serve` with the same --cluster".to_owned(),
                None => format!("{} names no server: add {lines} on each server", path.display()),
            };
            return Err(UsageError(advice).into());
        }
        Ok(servers)
    }

    fn members(&self) -> Result<Vec<ServerInfo>> {
        let Some(mut etcd) = self.connect()? else { return Ok(Vec::new()) };
        let (nodes, bad) = etcd.nodes()?;
        bad.iter().for_each(|error| (self.report)(&format!("a server is left out: {error}")));
        Ok(nodes.into_iter().map(info).collect())
    }
}

pub(crate) fn info(node: Node) -> ServerInfo {
    let Node { id, addr, key, zone, announcer, .. } = node;
    ServerInfo { id, addr, key, zone, announcer }
}

impl Settings {
    fn read(dir: &Path) -> Result<Settings> {
        let path = dir.join("pool.toml");
        let text = store::read_text(&path)?.unwrap_or_default();
        toml::from_str(&text).with_context(|| format!("read {}", path.display()))
    }

    fn without_etcd(&self, dir: &Path, report: Report) -> PoolConfig {
        let announcements = Heard {
            at: self.announcements.unwrap_or(ANNOUNCE_AT),
            on: self.announcements_on.unwrap_or(Ipv4Addr::UNSPECIFIED),
        };
        let (dir, transport, link) = (dir.to_owned(), self.transport, self.link_mbit);
        PoolConfig { dir, etcd: None, transport, link, announcements, report }
    }

    fn etcd(&self, dir: &Path, address: &str) -> Result<EtcdConfig> {
        let host =
            self.host.clone().unwrap_or_else(|| host_name(&rustix::system::uname().nodename().to_string_lossy()));
        let named = address.split_once("://").is_none_or(|(_, rest)| rest.contains('/'));
        let whole = if named { address.to_owned() } else { format!("{address}/{DEFAULT_POOL}") };
        let mut config = EtcdConfig::parse(&whole, &host)?;
        config.tls = self.tls(dir)?;
        if config.secure != config.tls.is_some() {
            let advice = "TLS is etcds:// with `ca` in pool.toml: who may have signed etcd's certificate";
            return Err(UsageError(format!("{address}: {advice}")).into());
        }
        Ok(config)
    }

    fn tls(&self, dir: &Path) -> Result<Option<TlsFiles>> {
        let whole = |path: &PathBuf| dir.join(path);
        let identity = match (&self.certificate, &self.key) {
            (Some(certificate), Some(key)) => Some((whole(certificate), whole(key))),
            (None, None) => None,
            _ => return Err(UsageError("pool.toml: `certificate` and `key` go together".into()).into()),
        };
        ensure!(self.ca.is_some() || identity.is_none(), UsageError("pool.toml: `certificate` needs `ca`".into()));
        if let Some((_, key)) = &identity {
            store::read_secret(key)?.with_context(|| format!("{} is not there", key.display()))?;
        }
        Ok(self.ca.as_ref().map(|ca| TlsFiles { ca: whole(ca), identity }))
    }
}

/// The machine's name in the characters that etcd's records have.
fn host_name(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c.to_ascii_lowercase() } else { '-' };
    let name: String = name.chars().take(NAME_MAX).map(plain).collect();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn etcd(text: &str, address: &str) -> Result<EtcdConfig> {
        toml::from_str::<Settings>(text)?.etcd(Path::new("/pool"), address)
    }

    #[test]
    fn addresses_name_a_pool_or_mean_the_default_one() {
        let check = |address: &str, pool: &str| assert_eq!(etcd("", address).unwrap().pool, pool, "{address}");
        check("etcd://a:1,b:2", "default");
        check("etcd://a:1/lab", "lab");
        for bad in ["a:1", "http://a:1", "etcd://a:1/", "etcd://a", "etcd:///lab", "etcds://a:1"] {
            assert!(etcd("", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_link_is_what_its_network_carries() {
        let link = |text: &str| toml::from_str::<Settings>(text).map(|settings| settings.link_mbit.bytes_per_second());
        assert_eq!([link("").unwrap(), link("link_mbit = 1000").unwrap()], [1_250_000_000, 125_000_000]);
        for bad in ["link_mbit = 0", "link_mbit = 9", "link_mbit = 1000001", "link_mbit = -1", "link_mbit = \"1G\""] {
            assert!(link(bad).is_err(), "{bad}");
        }
        let said = link("link_mbit = 1").unwrap_err().to_string();
        assert!(said.contains("in Mbit/s, 10 to 1000000"), "{said}");
    }

    #[test]
    fn tls_is_all_or_nothing() {
        let config = etcd("ca = \"ca.pem\"\nhost = \"h1\"", "etcds://a:1/lab").unwrap();
        let ca = PathBuf::from("/pool/ca.pem");
        assert_eq!((config.tls, config.host.as_str()), (Some(TlsFiles { ca, identity: None }), "h1"));
        assert!(etcd("ca = \"ca.pem\"", "etcd://a:1/lab").is_err(), "a CA for what is not encrypted");
        assert!(etcd("ca = \"/ca.pem\"\ncertificate = \"c\"", "etcds://a:1/lab").is_err());
        assert!(etcd("certificate = \"c\"\nkey = \"k\"", "etcds://a:1/lab").is_err());
        assert!(etcd("cert = \"c\"", "etcd://a:1/lab").is_err());
    }

    #[test]
    fn any_host_has_a_name() {
        let check = |name: &str, expected: &str| assert_eq!(host_name(name), expected);
        check("Web1.Example", "web1.example");
        check("b\u{fc}ro", "b-ro");
        check("", "localhost");
        assert_eq!(host_name(&"a".repeat(100)).len(), NAME_MAX);
    }
}
