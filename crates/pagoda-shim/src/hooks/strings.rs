//! strcmp(3), by which QEMU finds what a name means.

use std::ffi::{CStr, c_char, c_int};

use super::hook;
use crate::{config, gate, real};

hook! {
    /// Compares two texts. A name that the gate hides equals none.
    fn strcmp(a: *const c_char, b: *const c_char) -> c_int {
        // SAFETY: two texts that end in NUL (caller).
        let order = unsafe { real::strcmp(a, b) };
        // SAFETY: the same; an empty text has its NUL to look at.
        if order == 0 && gate::may_hide(unsafe { *a } as u8) && is_hidden(unsafe { CStr::from_ptr(a) }) {
            return 1;
        }
        order
    }
}

/// Only in what `pagoda run` started.
#[cold]
fn is_hidden(name: &CStr) -> bool {
    config::name().is_some() && gate::hides(name.to_bytes())
}
