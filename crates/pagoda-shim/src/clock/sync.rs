//! Transfers that end when their system call returns: read(2), write(2), recv(2), ioctl(2) and their relatives.
//!
//! The buffer decides first, because that is a few comparisons. A transfer that names guest RAM is on the clock for as
//! long as the call lasts, whatever the file is: that a transfer pins shows in no flag. Where the call may wait for long, the
//! file is looked at, and one that is known to copy ([`super::copies`]) stays off the clock. It is looked at each time: a table
//! by fd would be wrong after a dup2(2) or close(2) that the shim cannot see.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{copies, shared};

/// Runs `call`, which transfers between RAM and this file, on the clock.
pub fn timed<R>(touches_ram: bool, call: impl FnOnce() -> R) -> R {
    if !touches_ram {
        return call();
    }
    let Some(clock) = shared() else {
        // RAM is mapped and not yet attached: its I/O could outlive the attach unseen.
        crate::foreign::report(pagoda_abi::attach::ForeignReason::UntrackedIo);
        return call();
    };
    let slot = super::start_io(clock, hint());
    let result = call();
    clock.finish_io(slot);
    result
}

/// The same for a call that may wait for data or room for as long as the other end likes.
pub fn timed_unless_copied<R>(fd: c_int, touches_ram: bool, call: impl FnOnce() -> R) -> R {
    timed(touches_ram && !copies::is_known_to_copy(fd), call)
}

/// Where this thread looks for a slot first: threads in the order of their first I/O, so that they do not compete and
/// the daemon's scan stays short.
fn hint() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static HINT: Cell<Option<usize>> = const { Cell::new(None) };
    }
    HINT.with(|hint| {
        hint.get().unwrap_or_else(|| {
            let next = THREADS.fetch_add(1, Ordering::Relaxed);
            hint.set(Some(next));
            next
        })
    })
}
