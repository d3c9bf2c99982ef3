//! Transfers that are neither a read nor a write: pipes that keep references to pages, other processes' memory, POSIX
//! asynchronous I/O, and RDMA's registrations.

use std::ffi::{c_int, c_uint, c_ulong, c_void};

use libc::{aiocb, iovec, off_t, pid_t, sigevent, size_t, ssize_t};

use super::{hook, sockets};
use crate::clock::sync::timed;
use crate::config::config;
use crate::{foreign, ram, real};
use pagoda_abi::attach::ForeignReason;

/// Most requests of one lio_listio(3) that are looked at; longer lists count as naming RAM.
const LIST_MAX: usize = 4096;

/// Pages of a file in RAM are about to go elsewhere by reference. What is out would be read as zeros, so all of it is
/// brought back first.
pub fn before(files: [c_int; 2]) {
    if let Some(config) = config()
        && files.into_iter().any(|fd| config.region_of(fd).is_some())
    {
        foreign::report_and_wait(ForeignReason::RamFdSent);
    }
}

/// Whether a request of POSIX asynchronous I/O names RAM.
///
/// # Safety
/// `request` is null or valid.
unsafe fn names_ram(request: *const aiocb) -> bool {
    // SAFETY: null or valid (caller).
    unsafe { request.as_ref() }.is_some_and(|request| ram::overlaps(request.aio_buf as usize, request.aio_nbytes))
}

hook! {
    /// Puts pages into a pipe by reference.
    fn vmsplice(fd: c_int, iov: *const iovec, count: size_t, flags: c_uint) -> ssize_t {
        // SAFETY: an array of `count` elements (caller).
        sockets::report_if(unsafe { ram::any_overlaps(iov, count) });
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::vmsplice(fd, iov, count, flags) }
    }

    /// Moves pages of a file into a pipe, or out of it.
    fn splice(from: c_int, from_at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: c_uint) -> ssize_t {
        before([from, to]);
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::splice(from, from_at, to, to_at, len, flags) }
    }

    /// Puts what one pipe holds into another, by reference; vmsplice(2) was looked at when it came in.
    fn tee(from: c_int, to: c_int, len: size_t, flags: c_uint) -> ssize_t {
        before([from, to]);
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::tee(from, to, len, flags) }
    }

    /// Sends pages of a file.
    fn sendfile | sendfile64(to: c_int, from: c_int, at: *mut off_t, len: size_t) -> ssize_t {
        before([to, from]);
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::sendfile(to, from, at, len) }
    }

    /// Copies between files, after all of a RAM file among them was brought back.
    fn copy_file_range(
        from: c_int, from_at: *mut off_t, to: c_int, to_at: *mut off_t, len: size_t, flags: c_uint) -> ssize_t
    {
        before([from, to]);
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::copy_file_range(from, from_at, to, to_at, len, flags) }
    }

    /// Reads another process's memory, which is pinned meanwhile; it may be this one's.
    fn process_vm_readv(
        pid: pid_t, local: *const iovec, count: c_ulong, remote: *const iovec, remote_count: c_ulong, flags: c_ulong)
        -> ssize_t
    {
        // SAFETY: arrays of so many elements (caller).
        let touches = unsafe { ram::any_overlaps(local, count as usize) || ram::any_overlaps(remote, remote_count as usize) };
        // SAFETY: the caller's call, passed on unchanged.
        timed(touches, || unsafe { real::process_vm_readv(pid, local, count, remote, remote_count, flags) })
    }

    /// Writes another process's memory, which is pinned meanwhile; it may be this one's.
    fn process_vm_writev(
        pid: pid_t, local: *const iovec, count: c_ulong, remote: *const iovec, remote_count: c_ulong, flags: c_ulong)
        -> ssize_t
    {
        // SAFETY: arrays of so many elements (caller).
        let touches = unsafe { ram::any_overlaps(local, count as usize) || ram::any_overlaps(remote, remote_count as usize) };
        // SAFETY: the caller's call, passed on unchanged.
        timed(touches, || unsafe { real::process_vm_writev(pid, local, count, remote, remote_count, flags) })
    }

    /// Asynchronous I/O of POSIX: threads of libc transfer, without a symbol that could be hooked.
    fn aio_read | aio_read64(request: *mut aiocb) -> c_int {
        // SAFETY: a valid request (caller).
        sockets::report_if(unsafe { names_ram(request) });
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::aio_read(request) }
    }

    /// The same for a write.
    fn aio_write | aio_write64(request: *mut aiocb) -> c_int {
        // SAFETY: a valid request (caller).
        sockets::report_if(unsafe { names_ram(request) });
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::aio_write(request) }
    }

    /// The same for a list.
    fn lio_listio | lio_listio64(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int {
        let len = usize::try_from(count).unwrap_or(0);
        // SAFETY: an array of `count` requests, each null or valid (caller).
        let names = |index| unsafe { names_ram(*list.add(index)) };
        sockets::report_if(!list.is_null() && ram::is_mapped() && (len > LIST_MAX || (0..len).any(names)));
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::lio_listio(mode, list, count, event) }
    }

    /// Registers memory with an RDMA device, which reaches it until it is deregistered.
    fn ibv_reg_mr(domain: *mut c_void, addr: *mut c_void, len: size_t, access: c_int) -> *mut c_void {
        report_registration(addr, len);
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::ibv_reg_mr(domain, addr, len, access) }
    }

    /// The same at an address of the device's.
    fn ibv_reg_mr_iova(domain: *mut c_void, addr: *mut c_void, len: size_t, iova: u64, access: c_int) -> *mut c_void {
        report_registration(addr, len);
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::ibv_reg_mr_iova(domain, addr, len, iova, access) }
    }

    /// The same with optional access flags.
    fn ibv_reg_mr_iova2(domain: *mut c_void, addr: *mut c_void, len: size_t, iova: u64, access: c_uint) -> *mut c_void {
        report_registration(addr, len);
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::ibv_reg_mr_iova2(domain, addr, len, iova, access) }
    }
}

fn report_registration(addr: *mut c_void, len: size_t) {
    if ram::overlaps(addr as usize, len) {
        foreign::report_and_wait(ForeignReason::DmaMapped);
    }
}
