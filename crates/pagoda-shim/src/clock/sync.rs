//! Direct I/O that ends when its system call returns: read(2), write(2) and their relatives.
//!
//! The buffer decides first, because that is a few comparisons: only a buffer in guest RAM makes it worth asking the
//! kernel whether the file is O_DIRECT. It is asked each time (0.5 us on a busy 2-CPU VM, against 16 us and more of a direct I/O); a
//! table of flags by fd would be wrong after a dup2(2) or close(2) that the shim cannot see.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::shared;

/// Runs `call`, on the clock when it is direct I/O on guest RAM.
pub fn timed<R>(fd: c_int, touches_ram: bool, call: impl FnOnce() -> R) -> R {
    if !touches_ram || !is_direct(fd) {
        return call();
    }
    let Some(clock) = shared() else {
        // RAM is mapped and not yet attached: its I/O could outlive the attach unseen.
        crate::foreign::report(pagoda_abi::attach::ForeignReason::UntrackedIo);
        return call();
    };
    let slot = clock.start_io(hint());
    let result = call();
    clock.finish_io(slot);
    result
}

fn is_direct(fd: c_int) -> bool {
    // SAFETY: F_GETFL takes no argument and only reads the flags of the fd; a bad fd is an error, hence not direct.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags != -1 && flags & libc::O_DIRECT != 0
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
