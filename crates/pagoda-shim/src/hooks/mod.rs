//! The functions that the VMM calls instead of libc's, libaio's and liburing's.
//!
//! Each does its part and calls the real one ([`crate::real`]). Every exported function of those libraries that takes a
//! buffer or an address is either here or in `doors/*.txt` with the reason why it need not be; `tests/doors.rs` compares.
//! What QEMU imports, in Debian's 7.2 and 10.0 alike: `open64 openat64 mmap64 munmap madvise fallocate64 ftruncate64 posix_fallocate64`,
//! `read readv pread64 __pread64_chk preadv64 write writev pwrite64 pwritev64`, `send sendto sendmsg recv recvmsg recvmmsg
//! setsockopt`, `fread fwrite setvbuf`, `copy_file_range`, `io_setup io_submit io_destroy` (versioned, which an unversioned
//! hook satisfies), `io_uring_queue_init io_uring_queue_exit io_uring_submit io_uring_submit_and_wait __io_uring_get_cqe`,
//! `ioctl syscall strcmp`; 7.2 also `mremap`. The others are here because other VMMs and builds use them.
//!
//! The `64` names are the same functions: on x86-64 `off_t` has 64 bits either way.

mod files;
mod harmless;
mod ioctls;
mod memory;
mod queues;
mod sockets;
mod splices;
mod strings;
mod syscalls;
mod tracked;
mod transfer;

/// Defines hooks: exported C functions, except in unit tests, where they would take over the test's own calls.
macro_rules! hook {
    ($($(#[$doc:meta])* fn $($name:ident)|+ ($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        $( $crate::hooks::hook!(@each [$($name)|+] [$(#[$doc])*] [($($arg: $type),*) -> $result] $body); )*
    };
    (@each [$($name:ident)|+] $doc:tt $signature:tt $body:block) => {
        $( $crate::hooks::hook!(@one $name $doc $signature $body); )+
    };
    (@one $name:ident [$(#[$doc:meta])*] [($($arg:ident: $type:ty),*) -> $result:ty] $body:block) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Those of the function of the same name.
        #[allow(non_snake_case)] // libc's own names
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result $body
    };
}
pub(crate) use hook;

/// What a function of glibc's convention answers to an error.
fn fail(errno: std::ffi::c_int) -> std::ffi::c_int {
    // SAFETY: errno's location is valid for the calling thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}
