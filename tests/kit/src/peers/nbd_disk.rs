//! A disk that another process exports over NBD, as a directory of this host: what swap on another machine's disk is today.
//!
//! From below: a file that was written in full, a server behind TCP in another network namespace, nbdfuse as the client (an NBD
//! client in user space, because not every kernel has one), a loop device with direct I/O on the file that it shows, ext4. The
//! server is qemu-nbd with direct I/O, which is a disk; or nbdkit's file plugin with the page cache of its machine in front of it, which
//! for what fits is another machine's memory without a second copy or encryption.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_sys::toy::process::die_with_parent;

use super::swap::write_out;
use crate::link::{ETHERNET_ADDR, ETHERNET_SERVER};
use crate::undo::{Guard, Undo, start_ticks_of};

const START_MAX: Duration = Duration::from_secs(10);
const POLL_EVERY: Duration = Duration::from_millis(10);

/// What is in front of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    Nothing,
    /// Memory of the server's machine.
    PageCache,
}

/// The disk, while this lives.
#[derive(Debug)]
pub struct NbdDisk {
    mount: PathBuf,
    // Undone in this order.
    _mounted: Guard,
    _loop: Guard,
    _client: Guard,
    _fuse: Guard,
    _server: Guard,
    _directory: Guard,
}

impl NbdDisk {
    /// A disk of so many bytes, kept in a file in `parent`. Its server is at the other end of an
    /// [`Ethernet`](crate::link::Ethernet), which outlives it.
    ///
    /// # Errors
    /// Not root, no space, no nbdkit or nbdfuse, no loop device.
    pub fn start(parent: &Path, bytes: u64, cache: Cache) -> Result<NbdDisk> {
        let dir = parent.join("nbd-disk");
        let directory = Guard::new(Undo::Directory { path: dir.clone() })?;
        let (fuse, mount, image) = (dir.join("fuse"), dir.join("mount"), dir.join("image"));
        for path in [&fuse, &mount] {
            fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))?;
        }
        write_out(&image, bytes)?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|free| free.local_addr())?.port();
        let (number, image) = (port.to_string(), path_of(&image)?);
        let server = match cache {
            Cache::Nothing => {
                let listen = ["-f", "raw", "-t", "-b", ETHERNET_ADDR, "-p", &number];
                start_there("qemu-nbd", &[&listen[..], &["--cache=none", "--aio=native", image]].concat())?
            }
            Cache::PageCache => start_there("nbdkit", &["-f", "-i", ETHERNET_ADDR, "-p", &number, "file", image])?,
        };
        until("the NBD server listens", || TcpStream::connect((ETHERNET_ADDR, port)).is_ok())?;
        let unmount_fuse = Guard::new(Undo::Mount { path: fuse.clone() })?;
        let client = start("nbdfuse", &[path_of(&fuse)?, &format!("nbd://{ETHERNET_ADDR}:{port}")])?;
        let disk = fuse.join("nbd");
        until("nbdfuse shows the disk", || fs::metadata(&disk).is_ok_and(|file| file.len() == bytes))?;
        let device = tool("losetup", &["--find", "--show", "--direct-io=on", path_of(&disk)?])?;
        let detach = Guard::new(Undo::Loop { device: PathBuf::from(device.trim()) })?;
        let made = ["-q", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", device.trim()];
        tool("mkfs.ext4", &made)?;
        let unmount = Guard::new(Undo::Mount { path: mount.clone() })?;
        tool("mount", &[device.trim(), path_of(&mount)?])?;
        Ok(NbdDisk {
            mount,
            _mounted: unmount,
            _loop: detach,
            _client: client,
            _fuse: unmount_fuse,
            _server: server,
            _directory: directory,
        })
    }

    /// Where it is mounted.
    pub fn dir(&self) -> &Path {
        &self.mount
    }
}

fn path_of(path: &Path) -> Result<&str> {
    path.to_str().context("the directory's name is not UTF-8")
}

/// Starts what runs until it is ended, at the other end of an [`Ethernet`](crate::link::Ethernet).
fn start_there(program: &str, words: &[&str]) -> Result<Guard> {
    start("ip", &[&["netns", "exec", ETHERNET_SERVER, program], words].concat())
}

/// Starts what runs until it is ended.
fn start(program: &str, words: &[&str]) -> Result<Guard> {
    let mut command = Command::new(program);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    die_with_parent(&mut command);
    let child = command.spawn().with_context(|| format!("start {program}: scripts/install-deps.sh installs it"))?;
    let pid = child.id();
    Guard::new(Undo::Process { pid, start_ticks: start_ticks_of(pid).unwrap_or(0) })
}

fn tool(program: &str, words: &[&str]) -> Result<String> {
    let output = Command::new(program).args(words).output().with_context(|| format!("run {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("read what {program} says"))
}

fn until(what: &str, mut done: impl FnMut() -> bool) -> Result<()> {
    let began = Instant::now();
    while !done() {
        if began.elapsed() > START_MAX {
            bail!("{what}: not within {START_MAX:?}");
        }
        std::thread::sleep(POLL_EVERY);
    }
    Ok(())
}
