//! The memory a VM's shim and the daemon share: [`pagoda_abi::shared::Shared`] in a sealed memfd.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering;

use pagoda_abi::shared::{SHARED_MAGIC, Shared};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::{Errno, PAGE_SIZE};

/// Length of the file: the layout in whole pages.
const LEN: usize = size_of::<Shared>().div_ceil(PAGE_SIZE) * PAGE_SIZE;
const _: () = assert!(align_of::<Shared>() <= PAGE_SIZE);

/// Why shared memory could not be made or taken over.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// Not a file this daemon's kind made.
    #[error("shared memory handed over is {what}")]
    NotShared {
        /// What is wrong with it.
        what: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// The text says what was tried.
        what: &'static str,
        /// It failed with this error.
        source: Errno,
    },
}

fn os(what: &'static str) -> impl FnOnce(Errno) -> SharedError {
    move |source| SharedError::Os { what, source }
}

/// The mapped shared memory of one VM, and its file. Whatever the VMM writes there, reading it is safe: all fields are
/// atomic, every bit pattern is a valid integer, and the file cannot shrink.
#[derive(Debug)]
pub struct SharedMap {
    fd: OwnedFd,
    shared: *const Shared,
}

// SAFETY: the mapping belongs to this value alone and is plain memory; `Shared` itself is `Send` and `Sync`.
unsafe impl Send for SharedMap {}
// SAFETY: as above: only `&Shared` is handed out, and all its fields are atomic.
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// Makes the shared memory of a new VM.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn create() -> Result<SharedMap, SharedError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("pagoda-shared", flags).map_err(os("create shared memory"))?;
        rustix::fs::ftruncate(&fd, LEN as u64).map_err(os("set size of shared memory"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(os("seal shared memory"))?;
        let map = SharedMap::map(fd)?;
        map.epoch.store(1, Ordering::SeqCst);
        map.magic.store(SHARED_MAGIC, Ordering::SeqCst);
        Ok(map)
    }

    /// Takes over the shared memory of a VM that runs.
    ///
    /// # Errors
    /// [`SharedError::NotShared`] unless it is a sealed memfd of the right size and layout.
    pub fn from_fd(fd: OwnedFd) -> Result<SharedMap, SharedError> {
        let not_shared = |what: String| Err(SharedError::NotShared { what });
        // EINVAL: a kind of file that has no seals.
        let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return not_shared("not sealed against shrinking".to_owned());
        }
        let len = rustix::fs::fstat(&fd).map_err(os("stat shared memory"))?.st_size;
        if len != LEN as i64 {
            return not_shared(format!("{len} bytes long, {LEN} expected: the shim is of another version"));
        }
        let map = SharedMap::map(fd)?;
        match map.magic.load(Ordering::SeqCst) {
            SHARED_MAGIC => Ok(map),
            other => not_shared(format!("of another layout ({other:#018x}): the shim is of another version")),
        }
    }

    /// For passing to the shim.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn map(fd: OwnedFd) -> Result<SharedMap, SharedError> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only.
        let addr = unsafe { rustix::mm::mmap(ptr::null_mut(), LEN, prot, MapFlags::SHARED, &fd, 0) };
        Ok(SharedMap { shared: addr.map_err(os("map shared memory"))?.cast_const().cast(), fd })
    }
}

impl Deref for SharedMap {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        // SAFETY: a reference needs an aligned, mapped, valid value that only changes inside atomics: the mapping is
        // page-aligned, LEN covers `Shared`, it is unmapped only by `drop`, the file is sealed against shrinking, and
        // `Shared` is nothing but atomic integers, of which every bit pattern is valid.
        unsafe { &*self.shared }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: munmap(2) needs memory nobody uses: references into it borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.shared.cast_mut().cast(), LEN) };
    }
}
