//! Opening files: the paths of RAM, and what makes userfaultfds.

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, Ordering};

use libc::mode_t;

use super::{fail, hook};
use crate::say::say;
use crate::{config, real, take};

/// What a VMM may open by name, but not as the kernel would.
enum Special {
    Ram(usize),
    /// Something that makes userfaultfds.
    Userfaultfd,
}

/// # Safety
/// `path` is null or ends in NUL, as open(2) demands.
unsafe fn special(path: *const c_char) -> Option<Special> {
    config::name()?;
    if path.is_null() {
        return None;
    }
    // SAFETY: it ends in NUL (caller).
    let path = unsafe { CStr::from_ptr(path) };
    if path == c"/dev/userfaultfd" {
        return Some(Special::Userfaultfd);
    }
    take::region_of_path(path).map(Special::Ram)
}

fn open_special(special: Special) -> c_int {
    match special {
        Special::Ram(region) => take::open(region).unwrap_or_else(fail),
        Special::Userfaultfd => refuse_userfaultfd(),
    }
}

/// A range has one userfaultfd, and that of RAM is Pagoda's. QEMU asks for one before it agrees to post-copy migration or to a
/// background snapshot, and says no to its user if there is none.
pub(super) fn refuse_userfaultfd() -> c_int {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        say(format_args!(
            "userfaultfd is Pagoda's in this process: post-copy migration and background snapshots are refused; migrate by \
             pre-copy, or pause the VM for a snapshot"
        ));
    }
    fail(libc::EPERM)
}

hook! {
    /// Opens a file, or RAM. A mode that was not given is not used by it.
    fn open | open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { special(path) } {
            Some(special) => open_special(special),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::open(path, flags, mode) },
        }
    }

    /// Opens a file relative to a directory, or RAM.
    fn openat | openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { special(path) } {
            Some(special) => open_special(special),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::openat(dir, path, flags, mode) },
        }
    }

    /// What open(2) is when glibc's checks are compiled in.
    fn __open_2 | __open64_2(path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { special(path) } {
            Some(special) => open_special(special),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::__open_2(path, flags) },
        }
    }

    /// What openat(2) is when glibc's checks are compiled in.
    fn __openat_2 | __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
        // SAFETY: the caller's path, which ends in NUL.
        match unsafe { special(path) } {
            Some(special) => open_special(special),
            // SAFETY: the caller's call, passed on unchanged.
            None => unsafe { real::__openat_2(dir, path, flags) },
        }
    }
}
