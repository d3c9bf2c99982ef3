//! Becomes the QEMU of a snapshot: `pagoda vm restore` and `pagoda vm rollback`.
//!
//! The snapshot has the words that its QEMU was started with. They are checked as those of `pagoda run` are, before the daemon
//! makes or ends any VM. Then this process turns into that QEMU, which waits for its state; the daemon loads it, and the guest
//! goes on. Terminal, environment and user are the caller's: whoever is another user than the VM's is refused.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use pagoda_api::{Client, Launch, RestoreRequest, SnapshotLaunch, VmKind, VmSpec, in_full};

use super::{Ready, Request, program, shim, version};
use crate::exit::Refused;
use crate::qemu_args;

/// Where users have their names.
const USERS: &str = "/etc/passwd";

/// Never returns when all goes well.
pub fn restore(client: &Client, request: &RestoreRequest, snapshot: &SnapshotLaunch) -> Result<()> {
    let client = client.anchored().context("find the directory of this process")?;
    let ready = prepare(request, snapshot)
        .map_err(|error| Refused(format!("{} cannot be restored here: {}", request.from, in_full(error.as_ref()))))?;
    ready.start(&client, |_| Ok(client.restore(request)?))
}

/// All that can be seen before anything is made or ended.
fn prepare(request: &RestoreRequest, snapshot: &SnapshotLaunch) -> Result<Ready> {
    let program = place(&snapshot.launch)?;
    let check = version::check(&program, snapshot)?;
    let words = qemu_args::restored(&snapshot.launch.words, &snapshot.qemu.machine)?;
    let ready = ready(program, request.vm_name(), words, request.dram, snapshot)?;
    check.end(snapshot)?;
    Ok(ready)
}

/// The program of a snapshot, in whose directory this process is from now on.
///
/// # Errors
/// Another user's; its directory or its program is missing.
pub(super) fn place(launch: &Launch) -> Result<PathBuf> {
    check_user(launch)?;
    // The paths among its words may be relative.
    std::env::set_current_dir(&launch.cwd).with_context(|| format!("go to its directory {}", launch.cwd))?;
    program::find(&launch.program)
}

/// A QEMU with the memory of a snapshot.
///
/// # Errors
/// What is wrong with its words or its memory.
pub(super) fn ready(
    program: PathBuf,
    name: &str,
    words: Vec<String>,
    dram: Option<u64>,
    snapshot: &SnapshotLaunch,
) -> Result<Ready> {
    let ready = Ready::new(Request {
        name: Some(name.to_owned()),
        memory_bytes: None,
        spec: VmSpec { dram: dram.or(snapshot.spec.dram), ..snapshot.spec.clone() },
        kind: VmKind::Qemu,
        program,
        words,
        outbox: None,
    })?;
    ensure!(
        ready.memory() == snapshot.memory,
        "its command line gives {:?} bytes of memory now, and the snapshot has {:?}",
        ready.memory(),
        snapshot.memory
    );
    if let Some(shim) = &snapshot.shim {
        shim::check(shim, true)?;
    }
    Ok(ready)
}

/// Its files and its sockets were that user's.
fn check_user(launch: &Launch) -> Result<()> {
    let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let users = std::fs::read_to_string(USERS).unwrap_or_default();
    match who_else((launch.uid, launch.gid), own, &users) {
        None => Ok(()),
        Some(why) => Err(anyhow!(why)),
    }
}

/// Why one user and group cannot start what another one's was. `users` is the text of [`USERS`].
fn who_else(of_vm: (u32, u32), own: (u32, u32), users: &str) -> Option<String> {
    if of_vm == own {
        return None;
    }
    let named = |(uid, gid): (u32, u32)| {
        let of_line = |line: &str| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
        };
        let name = users.lines().find_map(of_line).unwrap_or_else(|| "a user without a name".to_owned());
        format!("{name} ({uid}:{gid})")
    };
    Some(format!(
        "its QEMU ran as {}, and this is {}: run this command as that user and group",
        named(of_vm),
        named(own)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_user_is_named() {
        let users = "root:x:0:0:root:/root:/bin/sh\nlibvirt-qemu:x:64055:108::/:/usr/sbin/nologin\n";
        assert_eq!(who_else((0, 0), (0, 0), users), None);
        let why = who_else((64055, 108), (0, 0), users).unwrap();
        assert!(why.contains("ran as libvirt-qemu (64055:108), and this is root (0:0)"), "{why}");
        let why = who_else((7, 7), (7, 8), users).unwrap();
        assert!(why.contains("a user without a name (7:7)"), "{why}");
    }
}
