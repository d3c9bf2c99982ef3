//! The functions behind the hooks: the next definition of each symbol after this library.
//!
//! The shim itself must call these, never `libc::` by the same name: that would be its own hook. Each is looked up at
//! its first call (dlsym(3) takes no allocator lock when it succeeds) and remembered. A library that the
//! process does not have answers `ENOSYS`.

use std::ffi::{CStr, c_int, c_long, c_uint, c_ulong, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{iovec, mmsghdr, msghdr, off_t, size_t, ssize_t, timespec};

/// An opaque `struct io_uring`, `io_context_t` or the like, as the VMM passes it.
pub type Opaque = *mut c_void;

fn resolve(cache: &AtomicPtr<c_void>, name: &CStr) -> *mut c_void {
    let known = cache.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: dlsym(3) wants a NUL-terminated name, which a `CStr` is; RTLD_NEXT is a valid handle in any loaded object.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    cache.store(found, Ordering::Relaxed);
    found
}

/// What a function of glibc's convention answers when it does not exist.
fn no_function() -> c_int {
    // SAFETY: errno's location is valid for the calling thread.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

const NO_RING_FUNCTION: c_int = -libc::ENOSYS;

macro_rules! real {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty, else $missing:expr;)*) => {$(
        #[allow(clippy::unused_unit)] // one macro for every result
        /// The function of this name behind the hook.
        ///
        /// # Safety
        /// Those of the function itself.
        pub unsafe fn $name($($arg: $type),*) -> $result {
            static ADDRESS: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
            // SAFETY: the literal ends in NUL and has no other.
            let name = unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) };
            let address = resolve(&ADDRESS, name);
            if address.is_null() {
                return $missing;
            }
            // SAFETY: the symbol of this name is a C function of this signature (its manual page); function and data
            // pointers have the same size on Linux. The caller keeps the function's own conditions.
            unsafe {
                let function: unsafe extern "C" fn($($type),*) -> $result = std::mem::transmute(address);
                function($($arg),*)
            }
        }
    )*};
}

real! {
    fn mmap(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void,
        else { no_function(); libc::MAP_FAILED };
    fn munmap(addr: *mut c_void, len: size_t) -> c_int, else no_function();
    fn mremap(addr: *mut c_void, old: size_t, new: size_t, flags: c_int, to: *mut c_void) -> *mut c_void,
        else { no_function(); libc::MAP_FAILED };
    fn madvise(addr: *mut c_void, len: size_t, advice: c_int) -> c_int, else no_function();
    fn fallocate(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int, else no_function();
    fn ftruncate(fd: c_int, len: off_t) -> c_int, else no_function();

    fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t, else no_function() as ssize_t;
    fn pread(fd: c_int, buf: *mut c_void, len: size_t, offset: off_t) -> ssize_t, else no_function() as ssize_t;
    fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t, else no_function() as ssize_t;
    fn preadv(fd: c_int, iov: *const iovec, count: c_int, offset: off_t) -> ssize_t, else no_function() as ssize_t;
    fn preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t,
        else no_function() as ssize_t;
    fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t, else no_function() as ssize_t;
    fn pwrite(fd: c_int, buf: *const c_void, len: size_t, offset: off_t) -> ssize_t, else no_function() as ssize_t;
    fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t, else no_function() as ssize_t;
    fn pwritev(fd: c_int, iov: *const iovec, count: c_int, offset: off_t) -> ssize_t, else no_function() as ssize_t;
    fn pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t,
        else no_function() as ssize_t;
    fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t) -> ssize_t, else no_function() as ssize_t;
    fn __pread_chk(fd: c_int, buf: *mut c_void, len: size_t, offset: off_t, room: size_t) -> ssize_t,
        else no_function() as ssize_t;

    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t, else no_function() as ssize_t;
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, else no_function();
    fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int, else no_function();
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long,
        else no_function() as c_long;

    fn io_submit(context: Opaque, count: c_long, iocbs: *mut *mut c_void) -> c_int, else NO_RING_FUNCTION;
    fn io_getevents(context: Opaque, min: c_long, count: c_long, events: *mut c_void, timeout: *mut timespec) -> c_int,
        else NO_RING_FUNCTION;
    fn io_destroy(context: Opaque) -> c_int, else NO_RING_FUNCTION;

    fn io_uring_queue_init(entries: c_uint, ring: Opaque, flags: c_uint) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_queue_init_params(entries: c_uint, ring: Opaque, params: Opaque) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_queue_exit(ring: Opaque) -> (), else {};
    fn io_uring_submit(ring: Opaque) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_submit_and_wait(ring: Opaque, count: c_uint) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_submit_and_wait_timeout(ring: Opaque, cqe: Opaque, count: c_uint, timeout: Opaque, mask: Opaque)
        -> c_int, else NO_RING_FUNCTION;
    fn io_uring_submit_and_wait_min_timeout(
        ring: Opaque, cqe: Opaque, count: c_uint, timeout: Opaque, min_us: c_uint, mask: Opaque)
        -> c_int, else NO_RING_FUNCTION;
    fn io_uring_submit_and_wait_reg(ring: Opaque, cqe: Opaque, count: c_uint, index: c_int) -> c_int,
        else NO_RING_FUNCTION;
    fn io_uring_submit_and_get_events(ring: Opaque) -> c_int, else NO_RING_FUNCTION;
    fn __io_uring_get_cqe(ring: Opaque, cqe: Opaque, submit: c_uint, count: c_uint, mask: Opaque) -> c_int,
        else NO_RING_FUNCTION;
    fn io_uring_resize_rings(ring: Opaque, params: Opaque) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_register_buffers(ring: Opaque, iov: *const iovec, count: c_uint) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_register_buffers_tags(ring: Opaque, iov: *const iovec, tags: *const u64, count: c_uint) -> c_int,
        else NO_RING_FUNCTION;
    fn io_uring_register_buffers_update_tag(
        ring: Opaque, first: c_uint, iov: *const iovec, tags: *const u64, count: c_uint)
        -> c_int, else NO_RING_FUNCTION;
    fn io_uring_register(fd: c_uint, opcode: c_uint, argument: *const c_void, count: c_uint) -> c_int,
        else NO_RING_FUNCTION;
    fn io_uring_setup(entries: c_uint, params: Opaque) -> c_int, else NO_RING_FUNCTION;
}
