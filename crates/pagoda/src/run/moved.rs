//! The process of a VM that comes from another host, until it is QEMU: `pagoda vm start-arrived`, which the daemon starts.
//!
//! The daemon says on standard input what to start. First this process gives up the daemon's rights and becomes the VM's user; only
//! then it looks at what the other host says. The words are held against lists of what is known to be safe
//! (`qemu_args/arrived.rs`), then as those of a snapshot that is restored. QEMU has a session of its own and no
//! terminal: its output is the log that the daemon gave.

use std::io::Read;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use pagoda_api::{Client, CreatedVm, Launch, SnapshotLaunch, in_full};
use rustix::process::{getegid, geteuid};
use rustix::thread::{set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use rustix::{fs::Gid, fs::Uid};
use serde::Deserialize;

use super::{Ready, restore, version};
use crate::exit::Refused;
use crate::qemu_args;

/// The most that is read: a launch has 32 KiB at most, and the rest less.
const INPUT_MAX: u64 = 1 << 20;
/// What the kernel ends first when memory runs out. The daemon's own is not the VM's.
const OOM_SCORE: &str = "/proc/self/oom_score_adj";

/// What the daemon says (its `moves/start.rs` writes it).
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StartArrived {
    /// What is to be started, in the form of a snapshot's launch.
    from: SnapshotLaunch,
    created: CreatedVm,
    /// The daemon's control socket.
    socket: PathBuf,
    /// Directories below which the VM's files are.
    paths: Vec<PathBuf>,
    /// Further groups of its user.
    groups: Vec<u32>,
}

/// Becomes the QEMU. Never returns when all goes well.
pub fn start() -> Result<()> {
    let mut text = String::new();
    std::io::stdin().take(INPUT_MAX).read_to_string(&mut text).context("read what to start")?;
    let start: StartArrived = serde_json::from_str(&text).context("read what to start, which pagodad writes")?;
    // As the leader of a group of processes, such as one that a shell has started, it has what it needs.
    let _ = rustix::process::setsid();
    become_user(&start.from.launch, &start.groups)?;
    let mut ready = prepare(&start).map_err(|error| {
        Refused(format!("{} cannot be started here: {}", start.created.name, in_full(error.as_ref())))
    })?;
    ready.is_in_background = true;
    ready.start(&Client::new(start.socket), |_| Ok(start.created))
}

/// All that can be seen before it is started.
fn prepare(start: &StartArrived) -> Result<Ready> {
    let launch = &start.from.launch;
    ensure!(launch.unstartable.is_empty(), "{}", launch.unstartable.join(", "));
    let words =
        qemu_args::arrived(&launch.words, &start.paths).map_err(|reasons| anyhow::anyhow!(reasons.join("; ")))?;
    let program = restore::place(launch)?;
    let check = version::check(&program, &start.from)?;
    let words = qemu_args::restored(&words, &start.from.qemu.machine)?;
    let ready = restore::ready(program, &start.created.name, words, None, &start.from)?;
    ensure!(!ready.has_device_files(), "its memory has a file, which does not come with it");
    check.end(&start.from)?;
    Ok(ready)
}

/// From here on this process has no more rights than the VM's user. Of one that is not root nothing changes; whether it is the
/// right one is looked at later.
fn become_user(launch: &Launch, groups: &[u32]) -> Result<()> {
    if geteuid().is_root() {
        std::fs::write(OOM_SCORE, "0").with_context(|| format!("write {OOM_SCORE}"))?;
        // A thread changes its own rights only.
        let threads = std::fs::read_dir("/proc/self/task").context("look for threads of this process")?.count();
        ensure!(threads == 1, "this process has {threads} threads, and only one would change its user");
        let (uid, gid) = (Uid::from_raw(launch.uid), Gid::from_raw(launch.gid));
        let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
        set_thread_groups(&groups).context("take the groups of the VM's user")?;
        set_thread_res_gid(gid, gid, gid).context("take the group of the VM's user")?;
        set_thread_res_uid(uid, uid, uid).context("become the VM's user")?;
        let is_back = !uid.is_root() && set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT).is_ok();
        ensure!(!is_back && (geteuid(), getegid()) == (uid, gid), "this process is not the VM's user alone");
    }
    // No program that QEMU might start gets more rights than this.
    set_no_new_privs(true).context("give up further rights")
}
