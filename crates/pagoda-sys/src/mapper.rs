//! What a program that maps a VM's RAM beside its VMM asks of the shim that is loaded into it.

use std::ffi::c_void;

/// Lets go of all RAM of the VM: what was mapped is the program's own memory from now on, and zero. This is for a
/// program that has no use any more for what it finds there. Without the shim nothing happens.
pub fn release() {
    // SAFETY: dlsym(3) with a NUL-terminated name.
    let found: *mut c_void = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"pagoda_mapper_release".as_ptr()) };
    if !found.is_null() {
        // SAFETY: only the shim has a function of this name; it takes and returns nothing.
        let call: extern "C" fn() = unsafe { std::mem::transmute(found) };
        call();
    }
}
