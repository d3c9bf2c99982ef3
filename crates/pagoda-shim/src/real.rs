//! The functions behind the hooks: the next definition of each symbol after this library.
//!
//! The shim itself must call these, never `libc::` by the same name: that would be its own hook. Each is looked up at
//! its first call (dlsym(3) takes no allocator lock when it succeeds) and remembered. A library that the
//! process does not have answers `ENOSYS`.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{
    FILE, aiocb, iovec, mmsghdr, mode_t, msghdr, off_t, pid_t, sigevent, size_t, sockaddr, socklen_t, ssize_t, timespec,
};

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
        #[allow(clippy::unused_unit, non_snake_case)] // one macro for every result, and libc's own names
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
    fn posix_fallocate(fd: c_int, offset: off_t, len: off_t) -> c_int, else libc::ENOSYS;
    fn remap_file_pages(addr: *mut c_void, len: size_t, prot: c_int, page: size_t, flags: c_int) -> c_int,
        else no_function();

    fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, else no_function();
    fn openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, else no_function();
    fn __open_2(path: *const c_char, flags: c_int) -> c_int, else no_function();
    fn __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int, else no_function();

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

    fn fread(buf: *mut c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t, else 0;
    fn fread_unlocked(buf: *mut c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t, else 0;
    fn __fread_chk(buf: *mut c_void, room: size_t, size: size_t, count: size_t, file: *mut FILE) -> size_t, else 0;
    fn __fread_unlocked_chk(buf: *mut c_void, room: size_t, size: size_t, count: size_t, file: *mut FILE) -> size_t,
        else 0;
    fn strcmp(a: *const c_char, b: *const c_char) -> c_int, else no_function();
    fn fputs(text: *const c_char, file: *mut FILE) -> c_int, else no_function();
    fn fputs_unlocked(text: *const c_char, file: *mut FILE) -> c_int, else no_function();
    fn puts(text: *const c_char) -> c_int, else no_function();
    fn _IO_sgetn(file: *mut FILE, buf: *mut c_void, len: size_t) -> size_t, else 0;
    fn _IO_file_read(file: *mut FILE, buf: *mut c_void, len: ssize_t) -> ssize_t, else no_function() as ssize_t;
    fn _IO_file_write(file: *mut FILE, buf: *const c_void, len: ssize_t) -> ssize_t, else no_function() as ssize_t;
    fn tee(from: c_int, to: c_int, len: size_t, flags: c_uint) -> ssize_t, else no_function() as ssize_t;
    fn shmat(segment: c_int, addr: *const c_void, flags: c_int) -> *mut c_void,
        else { no_function(); libc::MAP_FAILED };
    fn fwrite(buf: *const c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t, else 0;
    fn fwrite_unlocked(buf: *const c_void, size: size_t, count: size_t, file: *mut FILE) -> size_t, else 0;
    fn setvbuf(file: *mut FILE, buf: *mut c_char, mode: c_int, size: size_t) -> c_int, else no_function();
    fn setbuffer(file: *mut FILE, buf: *mut c_char, size: size_t) -> (), else {};
    fn setbuf(file: *mut FILE, buf: *mut c_char) -> (), else {};

    fn vmsplice(fd: c_int, iov: *const iovec, count: size_t, flags: c_uint) -> ssize_t, else no_function() as ssize_t;
    fn splice(from: c_int, from_at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: c_uint) -> ssize_t,
        else no_function() as ssize_t;
    fn sendfile(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t, else no_function() as ssize_t;
    fn copy_file_range(
        from: c_int, from_at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: c_uint)
        -> ssize_t, else no_function() as ssize_t;
    fn process_vm_readv(
        pid: pid_t, local: *const iovec, count: c_ulong, remote: *const iovec, remote_count: c_ulong, flags: c_ulong)
        -> ssize_t, else no_function() as ssize_t;
    fn process_vm_writev(
        pid: pid_t, local: *const iovec, count: c_ulong, remote: *const iovec, remote_count: c_ulong, flags: c_ulong)
        -> ssize_t, else no_function() as ssize_t;
    fn aio_read(request: *mut aiocb) -> c_int, else no_function();
    fn aio_write(request: *mut aiocb) -> c_int, else no_function();
    fn lio_listio(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int,
        else no_function();
    fn ibv_reg_mr(domain: *mut c_void, addr: *mut c_void, len: size_t, access: c_int) -> *mut c_void,
        else { no_function(); null_mut() };
    fn ibv_reg_mr_iova(domain: *mut c_void, addr: *mut c_void, len: size_t, iova: u64, access: c_int) -> *mut c_void,
        else { no_function(); null_mut() };
    fn ibv_reg_mr_iova2(domain: *mut c_void, addr: *mut c_void, len: size_t, iova: u64, access: c_uint) -> *mut c_void,
        else { no_function(); null_mut() };

    fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t, else no_function() as ssize_t;
    fn sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t)
        -> ssize_t, else no_function() as ssize_t;
    fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t, else no_function() as ssize_t;
    fn __recv_chk(fd: c_int, buf: *mut c_void, len: size_t, room: size_t, flags: c_int) -> ssize_t,
        else no_function() as ssize_t;
    fn recvfrom(
        fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, from: *mut sockaddr, from_len: *mut socklen_t)
        -> ssize_t, else no_function() as ssize_t;
    fn __recvfrom_chk(
        fd: c_int, buf: *mut c_void, len: size_t, room: size_t, flags: c_int, from: *mut sockaddr,
        from_len: *mut socklen_t)
        -> ssize_t, else no_function() as ssize_t;
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t, else no_function() as ssize_t;
    fn recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int,
        else no_function();
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int,
        else no_function();
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t, else no_function() as ssize_t;
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, else no_function();
    fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int, else no_function();
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long,
        else no_function() as c_long;

    fn io_submit(context: Opaque, count: c_long, iocbs: *mut *mut c_void) -> c_int, else NO_RING_FUNCTION;
    fn io_getevents(context: Opaque, min: c_long, count: c_long, events: *mut c_void, timeout: *mut timespec) -> c_int,
        else NO_RING_FUNCTION;
    fn io_pgetevents(
        context: Opaque, min: c_long, count: c_long, events: *mut c_void, timeout: *mut timespec, mask: Opaque)
        -> c_int, else NO_RING_FUNCTION;
    fn io_destroy(context: Opaque) -> c_int, else NO_RING_FUNCTION;
    fn io_queue_release(context: Opaque) -> c_int, else NO_RING_FUNCTION;

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
    fn io_uring_enter(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, mask: Opaque) -> c_int,
        else NO_RING_FUNCTION;
    fn io_uring_enter2(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, mask: Opaque, size: usize) -> c_int,
        else NO_RING_FUNCTION;
    fn io_uring_register_buf_ring(ring: Opaque, registration: *const c_void, flags: c_uint) -> c_int,
        else NO_RING_FUNCTION;
    fn io_uring_clone_buffers(to: Opaque, from: Opaque) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_clone_buffers_offset(
        to: Opaque, from: Opaque, to_at: c_uint, from_at: c_uint, count: c_uint, flags: c_uint)
        -> c_int, else NO_RING_FUNCTION;
    fn io_uring_register_region(ring: Opaque, region: *const c_void) -> c_int, else NO_RING_FUNCTION;
    fn io_uring_register_ifq(ring: Opaque, registration: Opaque) -> c_int, else NO_RING_FUNCTION;
}
