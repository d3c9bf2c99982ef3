//! The pool's directory: who we are, whom we admit, who lends, what disks there are.
//!
//! | file | |
//! |---|---|
//! | `node.key`, `pool.key` | 64 hexadecimal digits, readable by their owner only |
//! | `admitted` | a line for each client that may use our memory: public key, name, `admin=yes` if it may drain us |
//! | `pool.toml` | settings, see `config.rs` |
//! | `servers` | the static list of servers, see `rmap::servers` |
//! | `registry` | which server has what, see `rmap_file` |
//! | `disks/NAME.toml` | a disk and its key, see `record.rs` |

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rmap::client::ServerInfo;
use rmap::crypto::{Entropy, KEY_SIZE, Keypair, PoolKey, PublicKey};
use rmap::servers::parse_key;
use rmap_file::Registry;
use rmap_io::SystemEntropy;

/// Where the pool's directory is unless another is given.
pub const DIR_DEFAULT: &str = "/var/lib/pagoda/pool";

/// A longer file is none of ours.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Makes a directory that only its owner may look into, and those above it.
pub fn make_dir(dir: &Path) -> Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).with_context(|| format!("make {}", dir.display()))
}

pub fn random_key() -> [u8; KEY_SIZE] {
    let mut key = [0; KEY_SIZE];
    SystemEntropy::default().fill(&mut key);
    key
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file that only its owner may read. It is there whole or not at all: under another name first, then linked,
/// which fails where the name is taken. `false` if it is.
pub fn create_secret(path: &Path, text: &str) -> Result<bool> {
    let context = || format!("write {}", path.display());
    let name = temporary(path);
    write_secret(&name, text).with_context(context)?;
    let linked = std::fs::hard_link(&name, path);
    std::fs::remove_file(&name).with_context(context)?;
    match linked {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        linked => linked.map(|()| true).with_context(context),
    }
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    name.into()
}

fn write_secret(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}

/// Reads a small text file; `None` if it is not there.
pub fn read_text(path: &Path) -> Result<Option<String>> {
    let length = match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.with_context(|| format!("read {}", path.display()))?.len(),
    };
    ensure!(length <= FILE_BYTES_MAX, "{} has {length} bytes; it is none of Pagoda's", path.display());
    std::fs::read_to_string(path).map(Some).with_context(|| format!("read {}", path.display()))
}

/// Reads a file with a secret. One that others may read is refused: its secret may be known.
pub fn read_secret(path: &Path) -> Result<Option<String>> {
    if let Some(text) = read_text(path)? {
        let mode = std::fs::metadata(path).with_context(|| format!("read {}", path.display()))?.mode();
        ensure!(
            mode & 0o077 == 0,
            "{path} can be read by others (mode {mode:o}): run chmod 600 {path}, and think of it as known",
            path = path.display(),
            mode = mode & 0o777
        );
        return Ok(Some(text));
    }
    Ok(None)
}

/// Makes the directory, this machine's key and the pool's, where they are missing.
pub fn make_keys(dir: &Path) -> Result<()> {
    make_dir(dir)?;
    for name in ["pool.key", "node.key"] {
        // What is there stays: another key would cut this machine off.
        if !dir.join(name).exists() {
            create_secret(&dir.join(name), &(hex(&random_key()) + "\n"))?;
        }
    }
    Ok(())
}

/// Who we are, and the pool's key.
pub fn identity(dir: &Path) -> Result<(Keypair, PoolKey)> {
    Ok((Keypair::from_private(key_of(dir, "node.key")?), PoolKey::new(key_of(dir, "pool.key")?)))
}

fn key_of(dir: &Path, name: &str) -> Result<[u8; KEY_SIZE]> {
    let path = dir.join(name);
    let text =
        read_secret(&path)?.with_context(|| format!("{} is missing: run `pagoda pool key init`", path.display()))?;
    let key = parse_key(text.trim());
    Ok(key.with_context(|| format!("{} is not a key: 64 hexadecimal digits", path.display()))?.0)
}

/// A client that may use our memory.
#[derive(Debug, Clone)]
pub struct Admitted {
    pub key: PublicKey,
    pub name: String,
    /// It may also ask us to move everything away and to end.
    pub admin: bool,
}

/// At the end of an administrator's line; no name of `pagoda pool key add` contains a blank.
const ADMIN: &str = " admin=yes";

pub fn admitted_path(dir: &Path) -> PathBuf {
    dir.join("admitted")
}

pub fn admitted(dir: &Path) -> Result<Vec<Admitted>> {
    let path = admitted_path(dir);
    let text = read_text(&path)?.unwrap_or_default();
    let mut clients = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split_once('#').map_or(line, |(before, _)| before).trim();
        if line.is_empty() {
            continue;
        }
        let (line, admin) = line.strip_suffix(ADMIN).map_or((line, false), |line| (line, true));
        let (key, name) = line.split_once(char::is_whitespace).unwrap_or((line, "-"));
        let key = parse_key(key);
        let key = key.with_context(|| format!("{}, line {number}: a key is 64 hexadecimal digits", path.display()))?;
        clients.push(Admitted { key, name: name.trim().to_owned(), admin });
    }
    Ok(clients)
}

/// Puts a new list in the place of the old one.
pub fn set_admitted(dir: &Path, clients: &[Admitted]) -> Result<()> {
    let path = admitted_path(dir);
    let line =
        |client: &Admitted| format!("{:?} {}{}\n", client.key, client.name, if client.admin { ADMIN } else { "" });
    let text: String = clients.iter().map(line).collect();
    replace(&path, &text).with_context(|| format!("write {}", path.display()))
}

/// Writes a file that only its owner may read over an older one: it is there whole, the old or the new.
pub fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let name = temporary(path);
    write_secret(&name, text).and_then(|()| std::fs::rename(&name, path))
}

/// Lets nobody else change the directory's lists until it is dropped.
pub fn lock(dir: &Path) -> Result<File> {
    let path = dir.join("lock");
    let open = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
    let file = open.with_context(|| format!("open {}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
        .with_context(|| format!("lock {}", path.display()))?;
    Ok(file)
}

pub fn servers_path(dir: &Path) -> PathBuf {
    dir.join("servers")
}

/// The servers of the static list, which may be none.
pub fn servers(dir: &Path) -> Result<Vec<ServerInfo>> {
    let path = servers_path(dir);
    let text = read_text(&path)?.unwrap_or_default();
    rmap::servers::parse(&text).with_context(|| format!("read {}", path.display()))
}

pub fn registry(dir: &Path) -> Result<Registry> {
    Ok(Registry::open(&dir.join("registry"))?)
}
