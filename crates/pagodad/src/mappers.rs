//! Processes that map a VM's RAM beside its VMM: where their sockets are, and which of them still run.
//!
//! Which there are is written in the memory that the VMM keeps ([`pagoda_abi::shared::Shared::mappers`]), so that a new daemon knows of
//! each before it serves the VM. The sockets are in a directory of the daemon's own: nobody else connects to a mapper. A mapper
//! is ended by nobody here. Its socket is removed after its end or its VM's.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use pagoda_abi::shared::Shared;
use pagoda_pager::mapper::NewMapper;
use pagoda_sys::{Errno, process};

/// The directory of mappers' sockets, below a state directory.
pub fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join("mappers")
}

/// The socket of a mapper, by its process, of which there is one, and by the VM's first RAM file, of which the daemon knows whose it
/// is. What a VM writes into its shared memory so leads to no other VM's mapper.
pub fn socket_path(state_dir: &Path, inode: u64, pid: u32, start: u64) -> PathBuf {
    dir(state_dir).join(format!("{inode}-{pid}-{start}"))
}

/// Makes the directory, for its owner alone, without the sockets of processes that have ended.
///
/// # Errors
/// The disk's.
pub fn make_dir(state_dir: &Path) -> Result<()> {
    let dir = dir(state_dir);
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.with_context(|| format!("make {}", dir.display()))?;
    for entry in dir.read_dir().with_context(|| format!("read {}", dir.display()))? {
        let path = entry?.path();
        let ended = process_of(&path).is_some_and(|(pid, start)| matches!(watch(pid, start), Ok(None)));
        if ended && let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!("remove {}: {error}", path.display());
        }
    }
    Ok(())
}

/// The process whose socket this is: its id and its start time.
fn process_of(path: &Path) -> Option<(u32, u64)> {
    let (_, process) = path.file_name()?.to_str()?.split_once('-')?;
    let (pid, start) = process.split_once('-')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

/// The mappers of a VM that run. Those that have ended are forgotten.
///
/// # Errors
/// One that may run cannot be watched.
pub fn known(shared: &Shared, state_dir: &Path, inodes: &[(u64, u64)]) -> Result<Vec<NewMapper>> {
    let inode = inodes.first().map_or(0, |(_, inode)| *inode);
    let mut running = Vec::new();
    for (slot, pid, start, _) in shared.known_mappers().collect::<Vec<_>>() {
        let maps = shared.mapping_process(slot);
        let has_maps = match maps.map(|(pid, start)| watch(pid, start)) {
            None => false,
            Some(Ok(None)) => {
                // It has ended while no daemon saw it: it has no pages, and its direct I/O has ended.
                shared.clear_mapper(slot);
                false
            }
            Some(running) => running.context("watch a process that maps its memory")?.is_some(),
        };
        match watch(pid, start).with_context(|| format!("watch process {pid}, which maps its memory"))? {
            Some(pidfd) => {
                let socket = socket_path(state_dir, inode, pid, start);
                running.push(NewMapper { slot, pid, pidfd, socket, has_maps });
            }
            // It is being ended, for its parent has; until then it may write.
            None if has_maps => bail!("process {pid} has ended, and what it has let map memory has not yet"),
            None => shared.remove_mapper(slot),
        }
    }
    Ok(running)
}

/// A pidfd of a process that started then; `None` if that one has ended.
fn watch(pid: u32, start: u64) -> std::io::Result<Option<OwnedFd>> {
    let has_ended = |error: &std::io::Error| {
        error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
    };
    let pidfd = match process::pidfd_open(pid) {
        Ok(pidfd) => pidfd,
        Err(error) if has_ended(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    // After the pidfd: the number may be another process's by now.
    match process::start_time(pid) {
        Ok(now) if now == start => Ok(Some(pidfd)),
        Ok(_) => Ok(None),
        Err(error) if has_ended(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_processes_that_ended_are_removed() {
        let state = std::env::temp_dir().join(format!("pagoda-mappers-{}", std::process::id()));
        make_dir(&state).unwrap();
        let own = std::process::id();
        let start = process::start_time(own).unwrap();
        let (running, ended) = (socket_path(&state, 5, own, start), socket_path(&state, 5, own, start + 1));
        let other = dir(&state).join("other");
        for path in [&running, &ended, &other] {
            std::fs::write(path, "").unwrap();
        }
        assert_eq!(process_of(&running), Some((own, start)));
        make_dir(&state).unwrap();
        assert_eq!([&running, &ended, &other].map(|path| path.exists()), [true, false, true]);
        std::fs::remove_dir_all(&state).unwrap();
    }

    #[test]
    fn a_process_that_ended_or_another_of_its_number_is_none() {
        let own = std::process::id();
        let start = process::start_time(own).unwrap();
        assert!(watch(own, start).unwrap().is_some());
        assert!(watch(own, start + 1).unwrap().is_none());
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let (pid, start) = (child.id(), process::start_time(child.id()).unwrap());
        child.wait().unwrap();
        assert!(watch(pid, start).unwrap().is_none());
    }
}
