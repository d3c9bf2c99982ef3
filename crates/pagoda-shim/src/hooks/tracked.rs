//! Hooks whose real function is running: system calls that it makes by number are part of it.

use std::cell::Cell;

thread_local! {
    static IN_TRACKED: Cell<bool> = const { Cell::new(false) };
}

/// Runs the real function of a hook that has done its part: system calls that its library makes by number are that function's.
pub fn tracked<R>(call: impl FnOnce() -> R) -> R {
    let outer = IN_TRACKED.replace(true);
    let result = call();
    IN_TRACKED.set(outer);
    result
}

/// Whether this thread is in such a function.
pub fn is_in_tracked() -> bool {
    IN_TRACKED.get()
}
