//! Mappings and files of guest RAM.

use std::ffi::{c_int, c_void};

use libc::{off_t, size_t};

use super::{fail, hook};
use crate::attach;
use crate::attachment::attachment;
use crate::config::{Config, Role, config};
use crate::say::{give_up, say};
use crate::{calls, folios, mapper, ram, real};

/// A mapping of a RAM file is about to be made: is it the one of its region?
fn is_whole_region(config: &Config, region: usize, len: usize, offset: off_t) -> bool {
    let first = ram::mapping(region).is_none() && attachment().is_none();
    first && offset == 0 && len as u64 == config.ram()[region].len
}

/// The region is mapped: with the last of them the VM is handed over before its VMM goes on.
fn region_mapped(config: &'static Config, region: usize, addr: *mut c_void, len: usize, prot: c_int) {
    ram::set_wanted_protection(region, prot);
    ram::set_mapped(region, addr as usize, len);
    // A child after fork(2) would map RAM without a userfaultfd and read zeros where pages are out.
    ram::advise(addr as usize, len, libc::MADV_DONTFORK);
    folios::mapped(addr as usize, len);
    if (0..config.ram().len()).all(|index| ram::mapping(index).is_some()) {
        attach::attach(config);
        for index in 0..config.ram().len() {
            let Some((addr, len)) = ram::mapping(index) else { continue };
            // SAFETY: the mapping is this region's and stays; the VMM asked for this protection.
            if unsafe { libc::mprotect(addr as *mut _, len, ram::wanted_protection(index)) } != 0 {
                give_up(format_args!("RAM cannot be given the protection that the VMM asked for"));
            }
        }
    }
}

/// Advice that means nothing to a shared file, which RAM is to the VMM, and that drops pages of a private mapping or has the
/// kernel replace them.
fn drops_private_pages(advice: c_int) -> bool {
    /// `MADV_DONTNEED_LOCKED` of `linux/mman.h` (Linux 5.18).
    const DONTNEED_LOCKED: c_int = 24;
    /// `MADV_GUARD_INSTALL` of `linux/mman.h`, of files since Linux 6.15.
    const GUARD_INSTALL: c_int = 102;
    let drops = [
        libc::MADV_DONTNEED,
        DONTNEED_LOCKED,
        GUARD_INSTALL,
        libc::MADV_FREE,
        libc::MADV_MERGEABLE,
        libc::MADV_WIPEONFORK,
    ];
    drops.contains(&advice)
}

/// What mmap(2) answers to an error.
fn failed(errno: c_int) -> *mut c_void {
    fail(errno);
    libc::MAP_FAILED
}

/// The guest gave part of a region back.
fn discard(config: &Config, region: usize, offset: u64, len: u64) {
    let end = offset.saturating_add(len).min(config.ram()[region].len);
    let (start, len) = ram::whole_pages(offset, end.saturating_sub(offset));
    if len > 0 {
        calls::discard(config, region, start, len);
    }
}

/// Size of a segment of System V; one that is not known counts as one without end.
fn segment_size(segment: c_int) -> size_t {
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut state: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: IPC_STAT fills the structure it is given; a bad segment is an error.
    let known = unsafe { libc::shmctl(segment, libc::IPC_STAT, &mut state) } == 0;
    if known { state.shm_segsz } else { size_t::MAX }
}

hook! {
    /// Maps memory. A RAM file may be mapped once and whole; anything else would read pages that are out as zeros. It is
    /// mapped shared, also when QEMU asks for a private mapping: an older `pagoda run` tells QEMU that RAM is private.
    fn mmap | mmap64(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t)
        -> *mut c_void
    {
        // SAFETY: the caller's call, passed on with at most another protection and kind of sharing.
        let call = |prot, flags| unsafe { real::mmap(addr, len, prot, flags, fd, offset) };
        let Some(config) = config() else { return call(prot, flags) };
        let region = if flags & libc::MAP_ANONYMOUS == 0 { config.region_of(fd) } else { None };
        if let Some(region) = region
            && config.role == Role::Mapper
        {
            let replaces = flags & libc::MAP_FIXED != 0 && ram::overlaps(addr as usize, len);
            if replaces || flags & libc::MAP_TYPE == libc::MAP_PRIVATE {
                fail(libc::EINVAL);
                return libc::MAP_FAILED;
            }
            return mapper::map(config, region, (len, offset), prot, |prot| call(prot, flags)).unwrap_or_else(failed);
        }
        if let Some(region) = region {
            if !is_whole_region(config, region, len, offset) {
                say(format_args!(
                    "a RAM file was to be mapped other than once and whole; start the VM with `pagoda run`, \
                     which gives the right memory options"
                ));
                fail(libc::EINVAL);
                return libc::MAP_FAILED;
            }
            let mapped = call(libc::PROT_NONE, flags & !libc::MAP_TYPE | libc::MAP_SHARED);
            if mapped != libc::MAP_FAILED {
                region_mapped(config, region, mapped, len, prot);
            }
            return mapped;
        }
        if flags & libc::MAP_FIXED != 0 && ram::overlaps(addr as usize, len) {
            let replace = || call(prot, flags);
            if config.role == Role::Mapper {
                let unmapped = mapper::unmap(addr as usize, len, replace, |mapped| *mapped != libc::MAP_FAILED);
                return unmapped.unwrap_or_else(failed);
            }
            return ram::forget(addr as usize, len, replace);
        }
        call(prot, flags)
    }

    /// Ends a mapping; a region in it is no longer ours to zap.
    fn munmap(addr: *mut c_void, len: size_t) -> c_int {
        // SAFETY: the caller's call, passed on unchanged.
        let call = || unsafe { real::munmap(addr, len) };
        match ram::overlaps(addr as usize, len) {
            true if mapper::is_one() => {
                mapper::unmap(addr as usize, len, call, |result| *result == 0).unwrap_or_else(fail)
            }
            true => ram::forget(addr as usize, len, call),
            false => call(),
        }
    }

    /// Moves a mapping; RAM stays where the daemon knows it.
    fn mremap(addr: *mut c_void, old: size_t, new: size_t, flags: c_int, to: *mut c_void) -> *mut c_void {
        if ram::overlaps(addr as usize, old.max(1)) {
            fail(libc::ENOMEM);
            return libc::MAP_FAILED;
        }
        // SAFETY: the caller's call, passed on unchanged. A fifth argument that was not given is not used by it.
        let call = || unsafe { real::mremap(addr, old, new, flags, to) };
        if flags & libc::MREMAP_FIXED != 0 && ram::overlaps(to as usize, new) {
            if mapper::is_one() {
                return failed(libc::EINVAL);
            }
            return ram::forget(to as usize, new, call);
        }
        call()
    }

    /// Gives advice. Of that on RAM, MADV_REMOVE is a discard, and DOFORK and HUGEPAGE must not undo what `region_mapped` did.
    fn madvise(addr: *mut c_void, len: size_t, advice: c_int) -> c_int {
        if drops_private_pages(advice) && ram::is_lent(addr as usize, len) {
            return 0;
        }
        let special = match advice {
            libc::MADV_REMOVE | libc::MADV_DOFORK => true,
            libc::MADV_HUGEPAGE => folios::must_be_small(),
            _ => false,
        };
        let on_ram = if special { config().zip(ram::overlap(addr as usize, len)) } else { None };
        if let Some((config, (region, offset, len))) = on_ram {
            if advice == libc::MADV_REMOVE && config.role == Role::Mapper {
                return fail(libc::EPERM);
            }
            if advice == libc::MADV_REMOVE {
                discard(config, region, offset as u64, len as u64);
            }
            return 0;
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::madvise(addr, len, advice) }
    }

    /// Punches and preallocates. A hole in RAM is the daemon's to make: it may have the pages elsewhere. And it is the
    /// daemon's to fill: what is allocated there would be zeros in the place of pages that are out.
    fn fallocate | fallocate64(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
        let ram = config().and_then(|config| Some((config, config.region_of(fd)?)));
        if let Some((config, region)) = ram {
            if mode & libc::FALLOC_FL_PUNCH_HOLE == 0 {
                return fail(libc::EOPNOTSUPP);
            }
            if config.role == Role::Mapper {
                return fail(libc::EPERM);
            }
            if offset < 0 || len <= 0 {
                return fail(libc::EINVAL);
            }
            discard(config, region, offset as u64, len as u64);
            return 0;
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::fallocate(fd, mode, offset, len) }
    }

    /// Preallocates; not RAM, for the same reason.
    fn posix_fallocate | posix_fallocate64(fd: c_int, offset: off_t, len: off_t) -> c_int {
        if config().is_some_and(|config| config.region_of(fd).is_some()) {
            return libc::EOPNOTSUPP;
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::posix_fallocate(fd, offset, len) }
    }

    /// Maps a file's pages in another order; not RAM's.
    fn remap_file_pages(addr: *mut c_void, len: size_t, prot: c_int, page: size_t, flags: c_int) -> c_int {
        if ram::overlaps(addr as usize, len) {
            return fail(libc::EINVAL);
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::remap_file_pages(addr, len, prot, page, flags) }
    }

    /// Maps a segment of System V, perhaps over other mappings; not over RAM.
    fn shmat(segment: c_int, addr: *const c_void, flags: c_int) -> *mut c_void {
        if flags & libc::SHM_REMAP != 0 && ram::overlaps(addr as usize, segment_size(segment)) {
            fail(libc::EINVAL);
            return libc::MAP_FAILED;
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::shmat(segment, addr, flags) }
    }

    /// Cuts a file; not RAM.
    fn ftruncate | ftruncate64(fd: c_int, len: off_t) -> c_int {
        if config().is_some_and(|config| config.region_of(fd).is_some()) {
            return fail(libc::EPERM);
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::ftruncate(fd, len) }
    }
}
