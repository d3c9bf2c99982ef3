//! Opening the paths of RAM.

use std::ffi::{CStr, c_char, c_int};

use libc::mode_t;

use super::{fail, hook};
use crate::{real, take};

/// The region whose RAM this path is.
///
/// # Safety
/// `path` is null or ends in NUL, as open(2) demands.
unsafe fn region(path: *const c_char) -> Option<usize> {
    if path.is_null() {
        return None;
    }
    // SAFETY: it ends in NUL (caller).
    take::region_of_path(unsafe { CStr::from_ptr(path) })
}

fn open_region(region: usize) -> c_int {
    take::open(region).unwrap_or_else(fail)
}

hook! {
    /// Opens a file, or RAM. A mode that was not given is not used by it.
    fn open | open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { region(path) } {
            Some(region) => open_region(region),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::open(path, flags, mode) },
        }
    }

    /// Opens a file relative to a directory, or RAM.
    fn openat | openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { region(path) } {
            Some(region) => open_region(region),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::openat(dir, path, flags, mode) },
        }
    }

    /// What open(2) is when glibc's checks are compiled in.
    fn __open_2 | __open64_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { region(path) } {
            Some(region) => open_region(region),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::__open_2(path, flags) },
        }
    }

    /// What openat(2) is when glibc's checks are compiled in.
    fn __openat_2 | __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { region(path) } {
            Some(region) => open_region(region),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::__openat_2(dir, path, flags) },
        }
    }
}
