//! Tells the daemon that the VMM ends by itself, and with which exit status.
//!
//! The daemon sees that the process is gone, and not why: it is not its parent. A VMM that was told to end calls exit(3), which
//! notes it in the shared memory ([`pagoda_abi::shared::Shared::mark_ended`]). One that crashes or is killed notes nothing.
//! The guest sees nothing of it.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::clock;

/// The process that is the VM. One that it forks, and that ends by exit(3), is not.
static VMM: AtomicI32 = AtomicI32::new(0);

unsafe extern "C" {
    /// Has glibc call a function when the process ends by exit(3), with the status: on_exit(3).
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Called once, by the constructor: registering may allocate, which no hook may.
pub fn register() {
    // SAFETY: the function is there for the life of the process, since a preloaded library is never unloaded. That it cannot be
    // registered means that nothing is noted.
    let _ = unsafe { on_exit(note, std::ptr::null_mut()) };
}

/// This process is the VM.
pub fn watch() {
    VMM.store(own_pid(), Ordering::Relaxed);
}

extern "C" fn note(status: c_int, _: *mut c_void) {
    if VMM.load(Ordering::Relaxed) == own_pid()
        && let Some(shared) = clock::shared()
    {
        shared.mark_ended(status);
    }
}

fn own_pid() -> c_int {
    // SAFETY: getpid(2) has no conditions.
    unsafe { libc::getpid() }
}
