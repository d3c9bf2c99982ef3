//! libaio and liburing: what is submitted goes on the clock, what has completed is read wherever the VMM passes by.

use std::ffi::{c_int, c_long, c_uint, c_void};
use std::mem::zeroed;

use libc::{iovec, timespec};

use super::tracked::tracked;
use super::{hook, sockets};
use crate::clock::libaio::{self, Iocb};
use crate::clock::rings::{self, Reader, Ring};
use crate::clock::{shared, uring};
use crate::config::config;
use crate::real::Opaque;
use crate::{foreign, ram, real};
use pagoda_abi::attach::ForeignReason;

/// `struct io_uring_params` of `linux/io_uring.h`.
#[repr(C)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    rest: [u32; 27],
}

const _: () = assert!(size_of::<Params>() == 120);

fn with_context<R>(context: Opaque, work: impl FnOnce(&mut Ring) -> R) -> Option<R> {
    // SAFETY: the VMM submits to this context, so io_setup(2) made it and it is not destroyed before this call is over;
    // `io_destroy` makes us leave it first.
    let adopt = || unsafe { libaio::Reader::new(context as usize) }.map(Reader::Libaio);
    rings::with(context as usize, adopt, work)
}

fn with_ring<R>(ring: Opaque, work: impl FnOnce(&mut Ring) -> R) -> Option<R> {
    // SAFETY: the VMM uses this ring, so it is initialised; `io_uring_queue_exit` makes us leave it before it is unmapped.
    let adopt = || unsafe { uring::Reader::new(ring.cast()) }.map(Reader::Uring);
    rings::with(ring as usize, adopt, work)
}

/// Registers the batch, or as much of it as can be followed: how many requests may be submitted.
fn register_batch(queue: &mut Ring, iocbs: &[*mut c_void]) -> usize {
    queue.scan();
    let Reader::Libaio(reader) = &queue.reader else { return iocbs.len() };
    let batch = iocbs.len().min(reader.room(&queue.table));
    for iocb in &iocbs[..batch] {
        // SAFETY: the VMM submits it, so it is a valid `struct iocb`.
        let touch = unsafe { libaio::touch(iocb.cast::<Iocb>()) };
        let added = queue.table.add(*iocb as u64, touch, shared());
        queue.accept(added);
    }
    batch
}

/// What has to happen before a submission through liburing.
fn before_submit(ring: Opaque) {
    if config().is_none() {
        return;
    }
    with_ring(ring, |queue| {
        if let Reader::Uring(reader) = &mut queue.reader {
            // SAFETY: the ring this queue was adopted from, and its submitter is in this call.
            let registered = unsafe { reader.register(ring.cast(), &mut queue.table, shared()) };
            queue.accept(registered);
        }
    });
}

/// What has to happen after a call that may have brought completions.
fn after_wait(ring: Opaque) {
    if config().is_some() {
        with_ring(ring, Ring::scan);
    }
}

/// A ring is about to be unmapped.
fn leave_ring(ring: Opaque) {
    if let Some(leaving) = rings::leave(ring as usize) {
        leaving.lost();
    }
}

/// A context is destroyed in a way that does not tell whether the kernel waited for what is in flight.
pub fn context_is_destroyed(context: Opaque) {
    if let Some(leaving) = rings::leave(context as usize) {
        leaving.lost();
    }
}

/// Opcodes of io_uring_register(2) by `linux/io_uring.h`.
mod register {
    use std::ffi::c_uint;

    /// The fd is the index of a registered ring: no part of the opcode.
    pub const USE_REGISTERED_RING: c_uint = 1 << 31;
    pub const BUFFERS: c_uint = 0;
    pub const BUFFERS2: c_uint = 15;
    pub const BUFFERS_UPDATE: c_uint = 16;
    pub const PBUF_RING: c_uint = 22;
    pub const CLONE_BUFFERS: c_uint = 30;
    pub const ZCRX_IFQ: c_uint = 32;
    pub const RESIZE_RINGS: c_uint = 33;
    pub const MEM_REGION: c_uint = 34;

    /// Opcodes that register no memory: files, event fds, a probe, restrictions, workers, ring fds, cancellation, a clock,
    /// NAPI, a message to another ring, a query; and those that only end a registration.
    pub fn names_no_memory(opcode: c_uint) -> bool {
        matches!(opcode, 1..=14 | 17..=21 | 23..=29 | 31 | 35)
    }
}

/// Before something is registered with a ring. Registered memory stays pinned for as long as it is registered, and what the shim
/// does not know of is taken for memory.
pub fn before_register(opcode: c_uint, argument: *const c_void, count: c_uint) {
    if config().is_none() {
        return;
    }
    match opcode & !register::USE_REGISTERED_RING {
        known if register::names_no_memory(known) => {}
        // SAFETY: an array of `count` elements, as the registration demands of its caller.
        register::BUFFERS if !unsafe { ram::any_overlaps(argument.cast(), count as usize) } => {}
        register::PBUF_RING => {
            // SAFETY: `struct io_uring_buf_reg` begins with an address of 64 bits and a number of entries of 32
            // (linux/io_uring.h), each entry having 16 bytes; without it the call fails.
            let ring = unsafe { argument.cast::<(u64, u32)>().as_ref() };
            let names = ring.is_some_and(|(addr, entries)| ram::overlaps(*addr as usize, *entries as usize * 16));
            if names {
                foreign::report_pins(ForeignReason::FixedBuffers);
            }
        }
        register::RESIZE_RINGS => sockets::report_if(true),
        register::BUFFERS
        | register::BUFFERS2
        | register::BUFFERS_UPDATE
        | register::CLONE_BUFFERS
        | register::ZCRX_IFQ
        | register::MEM_REGION => {
            foreign::report_pins(ForeignReason::FixedBuffers);
        }
        _ => sockets::report_if(true),
    }
}

/// Fixed buffers stay pinned as long as the ring lives.
fn report_fixed(iov: *const iovec, count: c_uint) {
    // SAFETY: `iov` is null or has `count` elements, as the registering functions demand.
    if unsafe { ram::any_overlaps(iov, count as usize) } {
        foreign::report_pins(ForeignReason::FixedBuffers);
    }
}

hook! {
    /// Submits a batch of requests. Fewer than given may be accepted, by the kernel as by the shim.
    fn io_submit(context: Opaque, count: c_long, iocbs: *mut *mut c_void) -> c_int {
        if config().is_none() || count <= 0 || iocbs.is_null() {
            // SAFETY: the caller's call, passed on unchanged.
            return unsafe { real::io_submit(context, count, iocbs) };
        }
        // SAFETY: an array of `count` requests, as io_submit(3) demands.
        let batch = unsafe { std::slice::from_raw_parts(iocbs, count as usize) };
        let registered = with_context(context, |queue| register_batch(queue, batch));
        if registered == Some(0) {
            // The ring is full, which the kernel says in these words.
            return -libc::EAGAIN;
        }
        let submitted = registered.map_or(count, |n| n as c_long);
        // SAFETY: the caller's array or a first part of it.
        let accepted = tracked(|| unsafe { real::io_submit(context, submitted, iocbs) });
        if let Some(registered) = registered {
            let rejected = &batch[(accepted.max(0) as usize).min(registered)..registered];
            if !rejected.is_empty() {
                with_context(context, |queue| {
                    for iocb in rejected.iter().filter(|_| !matches!(queue.reader, Reader::None)) {
                        let _ = queue.table.complete(*iocb as u64, shared());
                    }
                });
            }
        }
        accepted
    }

    /// Takes completions, after which the shim reads the ring too.
    fn io_getevents(context: Opaque, min: c_long, count: c_long, events: *mut c_void, timeout: *mut timespec)
        -> c_int
    {
        // SAFETY: the caller's call, passed on unchanged.
        let taken = unsafe { real::io_getevents(context, min, count, events, timeout) };
        if config().is_some() && taken > 0 {
            with_context(context, Ring::scan);
        }
        taken
    }

    /// Destroys a context; the kernel waits for all that is in flight (`fs/aio.c`, since Linux 3.11).
    fn io_destroy(context: Opaque) -> c_int {
        let leaving = rings::leave(context as usize);
        // SAFETY: the caller's call, passed on unchanged.
        let destroyed = tracked(|| unsafe { real::io_destroy(context) });
        match leaving {
            Some(leaving) if destroyed == 0 => leaving.all_ended(),
            Some(leaving) => leaving.lost(),
            None => {}
        }
        destroyed
    }

    /// Destroys a context, by another name.
    fn io_queue_release(context: Opaque) -> c_int {
        context_is_destroyed(context);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_queue_release(context) })
    }

    /// Takes completions with a signal mask, as io_getevents does without one.
    fn io_pgetevents(
        context: Opaque, min: c_long, count: c_long, events: *mut c_void, timeout: *mut timespec, mask: Opaque) -> c_int
    {
        // SAFETY: the caller's call, passed on unchanged.
        let taken = unsafe { real::io_pgetevents(context, min, count, events, timeout, mask) };
        if config().is_some() && taken > 0 {
            with_context(context, Ring::scan);
        }
        taken
    }

    /// Makes a ring without liburing's functions for it. What it does is not followed.
    fn io_uring_setup(entries: c_uint, params: Opaque) -> c_int {
        sockets::report_if(config().is_some());
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_setup(entries, params) })
    }

    /// Submits by a ring's fd, around what the shim follows.
    fn io_uring_enter(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, mask: Opaque) -> c_int {
        sockets::report_if(config().is_some() && submit > 0);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_enter(fd, submit, wait, flags, mask) })
    }

    /// The same with a size of the mask.
    fn io_uring_enter2(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, mask: Opaque, size: usize) -> c_int {
        sockets::report_if(config().is_some() && submit > 0);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_enter2(fd, submit, wait, flags, mask, size) })
    }

    /// Registers something with a ring, perhaps memory.
    fn io_uring_register(fd: c_uint, opcode: c_uint, argument: *const c_void, count: c_uint) -> c_int {
        before_register(opcode, argument, count);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_register(fd, opcode, argument, count) })
    }

    /// Registers a ring of buffers, whose own memory the kernel keeps.
    fn io_uring_register_buf_ring(ring: Opaque, registration: *const c_void, flags: c_uint) -> c_int {
        before_register(register::PBUF_RING, registration, 1);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_register_buf_ring(ring, registration, flags) })
    }

    /// Shares another ring's fixed buffers.
    fn io_uring_clone_buffers(to: Opaque, from: Opaque) -> c_int {
        before_register(register::CLONE_BUFFERS, std::ptr::null(), 1);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_clone_buffers(to, from) })
    }

    /// The same for some of them.
    fn io_uring_clone_buffers_offset(
        to: Opaque, from: Opaque, to_at: c_uint, from_at: c_uint, count: c_uint, flags: c_uint) -> c_int
    {
        before_register(register::CLONE_BUFFERS, std::ptr::null(), 1);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_clone_buffers_offset(to, from, to_at, from_at, count, flags) })
    }

    /// Registers memory of the caller's with a ring.
    fn io_uring_register_region(ring: Opaque, region: *const c_void) -> c_int {
        before_register(register::MEM_REGION, region, 1);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_register_region(ring, region) })
    }

    /// Registers memory that a network card writes to.
    fn io_uring_register_ifq(ring: Opaque, registration: Opaque) -> c_int {
        before_register(register::ZCRX_IFQ, registration, 1);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_register_ifq(ring, registration) })
    }

    /// Makes a ring by way of io_uring_queue_init_params, which the shim hooks.
    fn io_uring_queue_init(entries: c_uint, ring: Opaque, flags: c_uint) -> c_int {
        if config().is_none() {
            // SAFETY: the caller's call, passed on unchanged.
            return tracked(|| unsafe { real::io_uring_queue_init(entries, ring, flags) });
        }
        // SAFETY: a plain C structure: all zero bits are valid.
        let mut params: Params = unsafe { zeroed() };
        params.flags = flags;
        // SAFETY: the caller's ring, and parameters of our own: what liburing's own function does.
        unsafe { io_uring_queue_init_params(entries, ring, (&raw mut params).cast()) }
    }

    /// Makes a ring, with room for more completions where the VMM leaves the size open (`uring::CQ_ENTRIES`).
    fn io_uring_queue_init_params(entries: c_uint, ring: Opaque, params: Opaque) -> c_int {
        let given = params.cast::<Params>();
        if config().is_some() && !given.is_null() {
            leave_ring(ring);
            // SAFETY: valid parameters (caller); a copy of plain numbers.
            let mut wider: Params = unsafe { std::ptr::read(given) };
            if wider.flags & uring::SETUP_CQSIZE == 0 && entries <= uring::CQ_ENTRIES / 2 {
                wider.flags |= uring::SETUP_CQSIZE;
                wider.cq_entries = uring::CQ_ENTRIES;
                // SAFETY: the caller's ring, and parameters like the caller's.
                let made = tracked(|| unsafe { real::io_uring_queue_init_params(entries, ring, (&raw mut wider).cast()) });
                if made == 0 {
                    // SAFETY: valid and writable, for the kernel's answers (caller).
                    unsafe { std::ptr::write(given, wider) };
                    return made;
                }
            }
        }
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_queue_init_params(entries, ring, params) })
    }

    /// Unmaps and closes a ring.
    fn io_uring_queue_exit(ring: Opaque) -> () {
        leave_ring(ring);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_queue_exit(ring) })
    }

    /// Submits requests, which go on the clock before.
    fn io_uring_submit(ring: Opaque) -> c_int {
        before_submit(ring);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_submit(ring) })
    }

    /// Submits requests, and waits until so many have ended.
    fn io_uring_submit_and_wait(ring: Opaque, count: c_uint) -> c_int {
        before_submit(ring);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_submit_and_wait(ring, count) })
    }

    /// Submits and waits for a limited time.
    fn io_uring_submit_and_wait_timeout(ring: Opaque, cqe: Opaque, count: c_uint, timeout: Opaque, mask: Opaque)
        -> c_int
    {
        before_submit(ring);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_submit_and_wait_timeout(ring, cqe, count, timeout, mask) })
    }

    /// Submits and waits for a limited time.
    fn io_uring_submit_and_wait_min_timeout(
        ring: Opaque, cqe: Opaque, count: c_uint, timeout: Opaque, min_us: c_uint, mask: Opaque) -> c_int
    {
        before_submit(ring);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_submit_and_wait_min_timeout(ring, cqe, count, timeout, min_us, mask) })
    }

    /// Submits requests, and waits as registered memory says.
    fn io_uring_submit_and_wait_reg(ring: Opaque, cqe: Opaque, count: c_uint, index: c_int) -> c_int {
        before_submit(ring);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_submit_and_wait_reg(ring, cqe, count, index) })
    }

    /// Submits and fetches completions.
    fn io_uring_submit_and_get_events(ring: Opaque) -> c_int {
        before_submit(ring);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_submit_and_get_events(ring) })
    }

    /// Fetches or waits for a completion; liburing's inline functions come here when they find none.
    fn __io_uring_get_cqe(ring: Opaque, cqe: Opaque, submit: c_uint, count: c_uint, mask: Opaque) -> c_int {
        // SAFETY: the caller's call, passed on unchanged.
        let got = tracked(|| unsafe { real::__io_uring_get_cqe(ring, cqe, submit, count, mask) });
        after_wait(ring);
        got
    }

    /// Replaces a ring's queues by others, which the shim does not follow.
    fn io_uring_resize_rings(ring: Opaque, params: Opaque) -> c_int {
        if config().is_some() {
            foreign::report(ForeignReason::UntrackedIo);
            leave_ring(ring);
        }
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_resize_rings(ring, params) })
    }

    /// Registers fixed buffers: those in guest RAM stay pinned, and are reported.
    fn io_uring_register_buffers(ring: Opaque, iov: *const iovec, count: c_uint) -> c_int {
        report_fixed(iov, count);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_register_buffers(ring, iov, count) })
    }

    /// Registers fixed buffers with tags, which are reported alike.
    fn io_uring_register_buffers_tags(ring: Opaque, iov: *const iovec, tags: *const u64, count: c_uint) -> c_int {
        report_fixed(iov, count);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_register_buffers_tags(ring, iov, tags, count) })
    }

    /// Replaces fixed buffers, whose successors are reported alike.
    fn io_uring_register_buffers_update_tag(
        ring: Opaque, first: c_uint, iov: *const iovec, tags: *const u64, count: c_uint) -> c_int
    {
        report_fixed(iov, count);
        // SAFETY: the caller's call, passed on unchanged.
        tracked(|| unsafe { real::io_uring_register_buffers_update_tag(ring, first, iov, tags, count) })
    }
}
