//! What a server needs of its host: memory that stays in place, what the kernel says of memory, and that the host does not borrow
//! memory from a pool at the same time.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CapabilitySet, capabilities};
use thiserror::Error;

use rmap::pressure::Sample;

/// The process itself beside its slabs: code, sockets' buffers, sessions.
pub const OVERHEAD_BYTES: u64 = 256 << 20;

/// Why this host cannot lend or borrow. Nothing was changed.
#[derive(Debug, Error)]
pub enum HostError {
    #[error("lending {wanted} bytes needs {needed} available, and {available} are: lend less")]
    TooLittle { wanted: u64, needed: u64, available: u64 },
    #[error(
        "{needed} bytes are to be locked and the limit is {limit}: raise it (systemd: LimitMEMLOCK=infinity; shell: \
         ulimit -l unlimited), or give the process CAP_IPC_LOCK"
    )]
    LockLimit { needed: u64, limit: u64 },
    #[error("memory cannot be locked: {0}")]
    Lock(io::Error),
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("{path} is not what Linux has there")]
    NotUnderstood { path: PathBuf },
    #[error(
        "this host borrows memory already ({path} is locked): one that lends while it borrows passes its pressure on in \
         a circle; stop its borrowers first"
    )]
    Borrows { path: PathBuf },
    #[error(
        "this host lends memory already ({path} is locked): one that borrows while it lends passes its pressure on in a \
         circle; stop its server first"
    )]
    Lends { path: PathBuf },
}

/// Locks all memory that the process has and will have, so that what it lends never goes to a disk. To be called before
/// the server is made; its slabs are then locked as they are touched.
///
/// # Errors
/// There is not enough memory for `lent` bytes, or not enough may be locked: both are looked at before anything is done,
/// because a process that finds out later dies.
pub fn lock_memory(lent: u64) -> Result<(), HostError> {
    let needed = lent.saturating_add(OVERHEAD_BYTES);
    let available = sample()?.available;
    if available < needed {
        return Err(HostError::TooLittle { wanted: lent, needed, available });
    }
    if let Some(limit) = lock_limit().filter(|limit| *limit < needed) {
        return Err(HostError::LockLimit { needed, limit });
    }
    mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE).map_err(|error| HostError::Lock(error.into()))
}

/// How many bytes this process may lock; `None`: any.
pub fn lock_limit() -> Option<u64> {
    let may_lock_all = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    getrlimit(Resource::Memlock).current.filter(|_| !may_lock_all)
}

/// Tells the kernel that I/O waits for this process, so that what it allocates does not wait for that I/O.
///
/// # Errors
/// The process lacks `CAP_SYS_RESOURCE`.
pub fn serve_io() -> io::Result<()> {
    rustix::process::configure_io_flusher_behavior(true).map_err(io::Error::from)
}

/// What the kernel says of memory now.
///
/// # Errors
/// There is no `/proc`.
pub fn sample() -> Result<Sample, HostError> {
    sample_of(Path::new("/proc/meminfo"), Path::new("/proc/pressure/memory"))
}

/// The same from other files than the kernel's.
///
/// # Errors
/// The first cannot be read, or says nothing of memory.
pub fn sample_of(meminfo: &Path, pressure: &Path) -> Result<Sample, HostError> {
    let text = fs::read_to_string(meminfo).map_err(|source| HostError::Io { path: meminfo.to_owned(), source })?;
    // Kernels may be built without it; then free memory alone counts.
    let stalls = fs::read_to_string(pressure).unwrap_or_default();
    Sample::parse(&text, &stalls).ok_or_else(|| HostError::NotUnderstood { path: meminfo.to_owned() })
}

/// What a host does with memory, until this is dropped. A host lends or borrows; it may do either several times.
#[derive(Debug)]
pub struct Role {
    _own: File,
}

impl Role {
    /// This process lends. `dir` is the same for all of this host, and exists.
    ///
    /// # Errors
    /// The host borrows.
    pub fn lend(dir: &Path) -> Result<Role, HostError> {
        Role::take(&dir.join("lends.lock"), &dir.join("borrows.lock"), |path| HostError::Borrows { path })
    }

    /// This process borrows; the other rules are those of [`Role::lend`].
    ///
    /// # Errors
    /// The host lends.
    pub fn borrow(dir: &Path) -> Result<Role, HostError> {
        Role::take(&dir.join("borrows.lock"), &dir.join("lends.lock"), |path| HostError::Lends { path })
    }

    /// The order: its own lock, shared, and then a look at the other, which is to lock it: so one at a time looks, or two
    /// that look at once would take each other for what they look for.
    fn take(own: &Path, other: &Path, refused: impl Fn(PathBuf) -> HostError) -> Result<Role, HostError> {
        let looks = own.with_file_name("role.lock");
        let looking = open(&looks)?;
        flock(&looking, FlockOperation::LockExclusive)
            .map_err(|error| HostError::Io { path: looks.clone(), source: error.into() })?;
        let locked = open(own)?;
        let fail = |path: &Path, source: io::Error| HostError::Io { path: path.to_owned(), source };
        flock(&locked, FlockOperation::LockShared).map_err(|error| fail(own, error.into()))?;
        match flock(&open(other)?, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Role { _own: locked }),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(refused(other.to_owned())),
            Err(error) => Err(fail(other, error.into())),
        }
    }
}

fn open(path: &Path) -> Result<File, HostError> {
    use std::os::unix::fs::OpenOptionsExt;
    let opened = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
    opened.map_err(|source| HostError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_lends_or_borrows() {
        let dir = std::env::temp_dir().join(format!("rmap-role-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let lends = Role::lend(&dir).unwrap();
        let twice = Role::lend(&dir).unwrap();
        assert!(matches!(Role::borrow(&dir), Err(HostError::Lends { .. })));
        drop((lends, twice));
        let borrows = Role::borrow(&dir).unwrap();
        assert!(matches!(Role::lend(&dir), Err(HostError::Borrows { .. })));
        drop(borrows);
        drop(Role::lend(&dir).unwrap());
        // Many that begin at once and want the same do not hinder each other.
        std::thread::scope(|scope| {
            let begin = || (0..200).map(|_| Role::borrow(&dir)).collect::<Result<Vec<_>, _>>().map(drop);
            let all: Vec<_> = (0..4).map(|_| scope.spawn(begin)).collect();
            all.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        });
        fs::remove_dir_all(&dir).unwrap();
        assert!(matches!(Role::lend(&dir), Err(HostError::Io { .. })));
    }

    #[test]
    fn more_than_there_is_is_refused_before_anything_is_locked() {
        assert!(matches!(lock_memory(1 << 60), Err(HostError::TooLittle { .. })));
        let status = fs::read_to_string("/proc/self/status").unwrap();
        assert!(status.lines().any(|line| line.starts_with("VmLck:") && line.ends_with(" 0 kB")), "{status}");
    }
}
