//! Holes that stay holes while nobody handles their faults.
//!
//! khugepaged makes one huge page of a range that has holes and fills these with zeros, by default up to 511 pages of
//! 512 (`khugepaged/max_ptes_none`, transhuge.rst): what a guest gave back by its balloon is there again some seconds
//! later. It leaves a range alone that some mapping of the file has registered for MISSING faults (`collapse_file` in
//! mm/khugepaged.c), whichever process that mapping belongs to. So the daemon keeps one that can never fault.

use std::ptr;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::view::Mapping;
use super::{RamError, RamFile, os};
use crate::Errno;
use crate::uffd::{self, Uffd, UffdError};

/// Why holes cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// No userfaultfd.
    #[error(transparent)]
    Uffd(#[from] UffdError),
    /// No mapping.
    #[error(transparent)]
    Ram(#[from] RamError),
}

/// As long as it lives the kernel fills no hole of the file unless somebody touches it.
#[derive(Debug)]
pub struct HoleKeeper {
    _mapping: Mapping,
    _uffd: Uffd,
}

impl HoleKeeper {
    pub(super) fn new(file: &RamFile) -> Result<HoleKeeper, KeepError> {
        let uffd = Uffd::from_fd(uffd::create()?)?;
        uffd.enable()?;
        let len = usize::try_from(file.len()).map_err(|_| os("map RAM file")(Errno::OVERFLOW))?;
        // No access: whoever strays here is stopped, and does not wait for a fault that nobody reads.
        let prot = ProtFlags::empty();
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only, so it disturbs no memory of ours.
        let addr = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, file.as_fd(), 0) }
            .map_err(os("map RAM file"))?;
        let mapping = Mapping { addr: addr.cast(), len };
        // SAFETY: madvise(2) of the mapping just made, which nobody can touch.
        unsafe { rustix::mm::madvise(addr, len, Advice::LinuxDontFork) }.map_err(os("keep RAM out of forks"))?;
        uffd.register(addr.addr() as u64, len as u64).map_err(os("register the keeper of holes"))?;
        Ok(HoleKeeper { _mapping: mapping, _uffd: uffd })
    }
}
