//! What a program that maps a VM's RAM beside its VMM asks of the shim that is loaded into it.

use std::ffi::{CStr, c_void};

/// For a child of the program that will not map RAM: has no part any more in what the VMM, the daemon and those that map share. Without the
/// shim nothing happens.
pub fn leave() {
    call(c"pagoda_mapper_leave");
}

/// Lets go of all RAM of the VM: what was mapped is the program's own memory from now on, and zero. This is for a
/// program that has no use any more for what it finds there. Without the shim nothing happens.
pub fn release() {
    call(c"pagoda_mapper_release");
}

/// Calls a function of the shim's that takes and returns nothing, if the shim is there.
fn call(name: &CStr) {
    // SAFETY: dlsym(3) with a NUL-terminated name.
    let found: *mut c_void = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if !found.is_null() {
        // SAFETY: only the shim has functions of these names; they take and return nothing.
        let call: extern "C" fn() = unsafe { std::mem::transmute(found) };
        call();
    }
}
