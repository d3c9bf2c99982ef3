//! Who this host is, and which other ones it trusts.
//!
//! | file below the directory | |
//! |---|---|
//! | `key` | this host's private key: 64 hexadecimal digits, readable by their owner only |
//! | `trusted` | a line for each host: name, public key, `HOST:PORT` |
//! | `lock` | held while `trusted` is changed |
//!
//! A host that is trusted may send VMs here, and gets the memory of VMs that move to it. The configuration says what of that this
//! host allows.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_pool::store::{create_secret, hex, make_dir, random_key, read_secret, read_text};
use rmap::crypto::{Keypair, PublicKey};
use rmap::servers::parse_key;

/// Hosts that one trusts.
pub const HOSTS_MAX: usize = 1024;
/// A host name, a colon and a port.
const ADDRESS_MAX: usize = 260;
/// Where other hosts are called unless an address says it.
pub const PORT_DEFAULT: u16 = 7075;

/// A host that is trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    pub key: PublicKey,
    /// Where the host is called, as `HOST:PORT`.
    pub address: String,
}

/// The directory that has this host's key and the hosts that it trusts.
#[derive(Clone, Debug)]
pub struct Hosts {
    dir: PathBuf,
}

impl Hosts {
    /// Those of a directory, which need not be there.
    pub fn in_dir(dir: impl Into<PathBuf>) -> Hosts {
        Hosts { dir: dir.into() }
    }

    /// This host's keys. They are made if there are none.
    ///
    /// # Errors
    /// The file is not readable, none, or others can read it.
    pub fn own(&self) -> Result<Keypair> {
        let path = self.dir.join("key");
        if read_text(&path)?.is_none() {
            let _lock = self.lock()?;
            // Somebody else may have made them at the same moment: those count.
            create_secret(&path, &(hex(&random_key()) + "\n"))?;
            File::open(&self.dir)?.sync_all().with_context(|| format!("sync {}", self.dir.display()))?;
        }
        let text = read_secret(&path)?.with_context(|| format!("{} has gone", path.display()))?;
        let key = parse_key(text.trim());
        let key = key.with_context(|| format!("{} is not a key: 64 hexadecimal digits", path.display()))?;
        Ok(Keypair::from_private(key.0))
    }

    /// All that are trusted, by their names.
    ///
    /// # Errors
    /// The list cannot be read: nobody is trusted then.
    pub fn all(&self) -> Result<Vec<Host>> {
        let path = self.path();
        let text = read_text(&path)?.unwrap_or_default();
        let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'));
        let host = |(number, line): (usize, &str)| {
            parse(line).with_context(|| format!("{}, line {number}: write NAME KEY HOST:PORT", path.display()))
        };
        lines.map(host).collect()
    }

    /// The host of this name, if it is trusted.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn find(&self, name: &str) -> Result<Option<Host>> {
        Ok(self.all()?.into_iter().find(|host| host.name == name))
    }

    /// Trusts one more host, or one of this name by another key or at another address.
    ///
    /// # Errors
    /// What is wrong with it; there are too many.
    pub fn trust(&self, host: Host) -> Result<()> {
        check(&host)?;
        ensure!(host.key != self.own()?.public(), "that is this host's own key");
        let _lock = self.lock()?;
        let mut hosts = self.all()?;
        if let Some(other) = hosts.iter().find(|other| other.key == host.key && other.name != host.name) {
            bail!("this key is trusted already, as {}: `pagoda host untrust` removes that", other.name);
        }
        hosts.retain(|other| other.name != host.name);
        hosts.push(host);
        ensure!(hosts.len() <= HOSTS_MAX, "{HOSTS_MAX} hosts are trusted, and no more can be");
        hosts.sort_by(|a, b| a.name.cmp(&b.name));
        self.write(&hosts)
    }

    /// Trusts a host no more; whether it was trusted. Streams that are open stay.
    ///
    /// # Errors
    /// The list cannot be read or written.
    pub fn untrust(&self, name: &str) -> Result<bool> {
        let _lock = self.lock()?;
        let mut hosts = self.all()?;
        let before = hosts.len();
        hosts.retain(|host| host.name != name);
        if hosts.len() == before {
            return Ok(false);
        }
        self.write(&hosts).map(|()| true)
    }

    fn path(&self) -> PathBuf {
        self.dir.join("trusted")
    }

    fn lock(&self) -> Result<File> {
        make_dir(&self.dir)?;
        pagoda_pool::store::lock(&self.dir)
    }

    fn write(&self, hosts: &[Host]) -> Result<()> {
        let line = |host: &Host| format!("{} {:?} {}\n", host.name, host.key, host.address);
        let text: String = hosts.iter().map(line).collect();
        let path = self.path();
        let replaced = pagoda_pool::store::replace(&path, &text).and_then(|()| File::open(&self.dir)?.sync_all());
        replaced.with_context(|| format!("write {}", path.display()))
    }
}

/// An address as users write it: without a port it gets the usual one.
///
/// # Errors
/// It is none.
pub fn full_address(address: &str) -> Result<String> {
    let full = match address.rsplit_once(':') {
        // The last colon of an IPv6 address is no port's unless the address is in brackets.
        Some((host, port)) if port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']')) => {
            address.to_owned()
        }
        Some((host, _)) if host.contains(':') && !address.starts_with('[') => format!("[{address}]:{PORT_DEFAULT}"),
        Some(_) if !address.ends_with(']') => bail!("{address:?} is no address: write HOST or HOST:PORT"),
        _ => format!("{address}:{PORT_DEFAULT}"),
    };
    let is_plain = full.chars().all(|c| c.is_ascii_graphic()) && !address.is_empty();
    ensure!(is_plain && full.len() <= ADDRESS_MAX, "{address:?} is no address: write HOST or HOST:PORT");
    Ok(full)
}

/// A public key as users write it.
///
/// # Errors
/// It is none.
pub fn public_key(text: &str) -> Result<PublicKey> {
    parse_key(text).with_context(|| format!("{text:?} is not a public key: give 64 hexadecimal digits"))
}

/// The name of a directory of hosts below a daemon's.
#[must_use]
pub fn dir_below(state_dir: &Path) -> PathBuf {
    state_dir.join("hosts")
}

fn check(host: &Host) -> Result<()> {
    pagoda_api::check_host_name(&host.name).map_err(|why| anyhow!(why))?;
    ensure!(full_address(&host.address)? == host.address, "{:?} lacks a port", host.address);
    Ok(())
}

fn parse(line: &str) -> Result<Host> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name, key, address] = words[..] else { bail!("there are {} words", words.len()) };
    let host = Host { name: name.to_owned(), key: public_key(key)?, address: address.to_owned() };
    check(&host)?;
    Ok(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_dir(name: &str, body: impl FnOnce(&Hosts)) {
        let dir = std::env::temp_dir().join(format!("pagoda-hosts-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        body(&Hosts::in_dir(&dir));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    fn host(name: &str, key: u8) -> Host {
        Host { name: name.into(), key: PublicKey([key; 32]), address: "10.0.0.2:7075".into() }
    }

    #[test]
    fn hosts_are_trusted_and_no_more() {
        in_dir("trusted", |hosts| {
            assert_eq!(hosts.all().unwrap(), []);
            assert_eq!(hosts.find("b").unwrap(), None);
            hosts.trust(host("b", 2)).unwrap();
            hosts.trust(host("a", 1)).unwrap();
            assert_eq!(hosts.all().unwrap(), [host("a", 1), host("b", 2)]);
            hosts.trust(host("b", 3)).unwrap();
            assert_eq!(hosts.find("b").unwrap(), Some(host("b", 3)), "it has another key now");
            assert!(hosts.trust(host("c", 3)).unwrap_err().to_string().contains("already, as b"));
            let own = Host { key: hosts.own().unwrap().public(), ..host("own", 0) };
            assert!(hosts.trust(own).unwrap_err().to_string().contains("own key"));
            assert!(hosts.untrust("a").unwrap());
            assert_eq!(hosts.all().unwrap(), [host("b", 3)]);
            assert!(!hosts.untrust("a").unwrap());
        });
    }

    #[test]
    fn its_own_key_stays_and_is_a_secret() {
        in_dir("own", |hosts| {
            let public = hosts.own().unwrap().public();
            assert_eq!(hosts.own().unwrap().public(), public);
            use std::os::unix::fs::PermissionsExt;
            let path = hosts.dir.join("key");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
            assert!(hosts.own().unwrap_err().to_string().contains("can be read by others"));
        });
    }

    #[test]
    fn a_list_that_is_wrong_trusts_nobody() {
        in_dir("wrong", |hosts| {
            hosts.trust(host("b", 2)).unwrap();
            let good = std::fs::read_to_string(hosts.path()).unwrap();
            for bad in ["c 12 10.0.0.1:1", "c", &format!("c/d {} 10.0.0.1:1", "0".repeat(64))] {
                std::fs::write(hosts.path(), format!("# ours\n\n{good}{bad}\n")).unwrap();
                let said = format!("{:#}", hosts.all().unwrap_err());
                assert!(said.contains("line 4: write NAME KEY HOST:PORT"), "{said}");
            }
        });
    }

    #[test]
    fn addresses_get_a_port() {
        let check = |address: &str, expected: Option<&str>| {
            assert_eq!(full_address(address).ok().as_deref(), expected, "{address:?}");
        };
        check("host2", Some("host2:7075"));
        check("host2:1234", Some("host2:1234"));
        check("10.0.0.2", Some("10.0.0.2:7075"));
        check("fe80::1", Some("[fe80::1]:7075"));
        check("::1", Some("[::1]:7075"));
        check("[fe80::1]", Some("[fe80::1]:7075"));
        check("[fe80::1]:80", Some("[fe80::1]:80"));
        check("host2:http", None);
        check("host 2", None);
        check("", None);
    }
}
