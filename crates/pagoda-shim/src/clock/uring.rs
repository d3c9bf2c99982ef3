//! io_uring through liburing: submissions are read from the ring before they are flushed, completions from the mapped
//! completion queue.
//!
//! Why no completion is lost: a completion's cell is written again only `entries` completions later, and as long as no
//! more than `entries` requests are registered and not yet read, those cells are distinct. (Comparing against the
//! kernel's tail would not do: it fills cells ahead of the tail it shows.) The shim asks for
//! [`CQ_ENTRIES`] when the VMM leaves the size open; QEMU's 128 requests would give 256. Above that the queue is *blind*: it only counts
//! completions, which the free-running tail tells exactly, and everything it has keeps its clock slot until nothing is in flight.
//! Why none is released early: every request is counted by its `user_data`, whatever its opcode, and each gives exactly
//! one final completion. What breaks that rule (multishot, `IOSQE_CQE_SKIP_SUCCESS`, `MSG_RING`, mixed
//! entry sizes, submissions that went around liburing) is a fault: the VM's memory is then no longer evicted. So is a
//! zero-copy send of RAM, whose pages are read after its completion.

use std::sync::atomic::{AtomicU32, Ordering};

use pagoda_abi::shared::Shared;

use super::copies;
use super::table::{Fault, Table, Touch};
use crate::ram;

/// Completion queue the shim asks for: 64 KiB of kernel memory at most, and half of [`super::table::CAPACITY`], so
/// that the table of a sighted queue cannot be full.
pub const CQ_ENTRIES: u32 = 2048;

/// `IORING_SETUP_CQSIZE`: the parameters name the size of the completion queue.
pub const SETUP_CQSIZE: u32 = 1 << 3;
const SETUP_SQE128: u32 = 1 << 10;
const SETUP_CQE32: u32 = 1 << 11;
/// Later flags (`CQE_MIXED`, `SQE_MIXED` and what may follow) change the layout of the queues.
const SETUP_KNOWN: u32 = (1 << 18) - 1;
/// `IORING_FEAT_EXT_ARG` (Linux 5.11): without it liburing submits time-outs of its own.
const FEAT_EXT_ARG: u32 = 1 << 8;
const SQE_FIXED_FILE: u8 = 1;
const SQE_CQE_SKIP_SUCCESS: u8 = 1 << 6;
const SQE_BUFFER_SELECT: u8 = 1 << 5;
/// More completions of this request follow.
const CQE_MORE: u32 = 1 << 1;

/// `struct io_uring_sq` of liburing 2 (soname 2; offsets verified against 2.3).
#[repr(C)]
struct Submission {
    khead: *const AtomicU32,
    ktail: *const AtomicU32,
    kring_mask: *const u32,
    kring_entries: *const u32,
    kflags: *const AtomicU32,
    kdropped: *const AtomicU32,
    array: *const u32,
    sqes: *const Sqe,
    sqe_head: u32,
    sqe_tail: u32,
    ring_sz: usize,
    ring_ptr: usize,
    pad: [u32; 4],
}

/// `struct io_uring_cq` of liburing 2.
#[repr(C)]
struct Completion {
    khead: *const AtomicU32,
    ktail: *const AtomicU32,
    kring_mask: *const u32,
    kring_entries: *const u32,
    kflags: *const AtomicU32,
    koverflow: *const AtomicU32,
    cqes: *const Cqe,
    ring_sz: usize,
    ring_ptr: usize,
    pad: [u32; 4],
}

/// `struct io_uring` of liburing 2. The masks are read through `kring_mask`, which is there in all of 2.x.
#[repr(C)]
pub struct Ring {
    sq: Submission,
    cq: Completion,
    flags: u32,
    ring_fd: i32,
    features: u32,
    enter_ring_fd: i32,
    int_flags: u32,
    pad: u32,
}

/// `struct io_uring_sqe` of `linux/io_uring.h`; what follows is not looked at.
#[repr(C)]
struct Sqe {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    off: u64,
    addr: u64,
    len: u32,
    rw_flags: u32,
    user_data: u64,
    rest: [u64; 3],
}

/// `struct io_uring_cqe` of `linux/io_uring.h`.
#[repr(C)]
struct Cqe {
    user_data: u64,
    res: i32,
    flags: u32,
}

const _: () = assert!(size_of::<Sqe>() == 64 && size_of::<Cqe>() == 16);
const _: () = assert!(std::mem::offset_of!(Ring, cq) == 104 && std::mem::offset_of!(Ring, flags) == 192);
const _: () = assert!(std::mem::offset_of!(Submission, sqe_tail) == 68 && size_of::<Ring>() == 216);

/// Opcodes of `enum io_uring_op` (`linux/io_uring.h`).
mod op {
    pub const READV: u8 = 1;
    pub const WRITEV: u8 = 2;
    #[cfg(test)]
    pub const READ_FIXED: u8 = 4;
    pub const SENDMSG: u8 = 9;
    pub const RECVMSG: u8 = 10;
    pub const READ: u8 = 22;
    pub const WRITE: u8 = 23;
    pub const SEND: u8 = 26;
    pub const RECV: u8 = 27;
    pub const SPLICE: u8 = 30;
    pub const TEE: u8 = 33;
    pub const MSG_RING: u8 = 40;
    pub const SEND_ZC: u8 = 47;
    pub const SENDMSG_ZC: u8 = 48;
    #[cfg(test)]
    pub const READ_MULTISHOT: u8 = 49;

    /// Opcodes that name no memory, or only what the kernel copies before it completes them: NOP, FSYNC, POLL_ADD, POLL_REMOVE,
    /// SYNC_FILE_RANGE, TIMEOUT, TIMEOUT_REMOVE, ACCEPT, ASYNC_CANCEL, LINK_TIMEOUT, CONNECT, FALLOCATE, OPENAT, CLOSE,
    /// FILES_UPDATE, STATX, FADVISE, OPENAT2, EPOLL_CTL, PROVIDE_BUFFERS, REMOVE_BUFFERS, SHUTDOWN, RENAMEAT, UNLINKAT,
    /// MKDIRAT, SYMLINKAT, LINKAT, FSETXATTR to GETXATTR, SOCKET, WAITID, FUTEX_WAIT to FUTEX_WAITV, FIXED_FD_INSTALL,
    /// FTRUNCATE, BIND, LISTEN, EPOLL_WAIT, PIPE. Every other opcode may touch RAM, those of the future included.
    pub fn names_no_pages(opcode: u8) -> bool {
        matches!(opcode, 0 | 3 | 6..=8 | 11..=21 | 24 | 28 | 29 | 31 | 32 | 34..=39 | 41..=45 | 50..=57 | 59 | 62)
    }
}

/// Requests of a queue that had more in flight than its completion queue has cells.
struct Blind {
    in_flight: u64,
    slot: Option<usize>,
}

/// The position up to which one ring's completions were read.
pub struct Reader {
    ktail: usize,
    cqes: usize,
    stride: usize,
    entries: u32,
    seen: u32,
    sqe_seen: u32,
    blind: Option<Blind>,
}

impl Reader {
    /// Starts reading a ring before its first submission; `None` when it is not laid out as expected or was used before.
    ///
    /// # Safety
    /// `ring` is an initialised `struct io_uring`, and its queues stay mapped for as long as the reader is used.
    pub unsafe fn new(ring: *const Ring) -> Option<Reader> {
        // SAFETY: initialised and mapped (caller); nobody else submits to it during this call, as liburing demands.
        let ring = unsafe { &*ring };
        if ring.flags & !SETUP_KNOWN != 0 || ring.features & FEAT_EXT_ARG == 0 {
            return None;
        }
        let (sq, cq) = (&ring.sq, &ring.cq);
        let in_sq = |address: usize| address.wrapping_sub(sq.ring_ptr) < sq.ring_sz;
        let in_cq = |address: usize| address.wrapping_sub(cq.ring_ptr) < cq.ring_sz;
        let sq_ok = [sq.khead as usize, sq.ktail as usize, sq.kring_mask as usize, sq.kring_entries as usize];
        let cq_ok = [cq.khead as usize, cq.ktail as usize, cq.kring_mask as usize, cq.kring_entries as usize];
        if !sq_ok.into_iter().all(in_sq) || !cq_ok.into_iter().all(in_cq) || !in_cq(cq.cqes as usize) {
            return None;
        }
        // SAFETY: all inside the mapped queues, as just checked; the kernel aligns them.
        let (sq_mask, sq_entries, cq_mask, cq_entries, head, tail) = unsafe {
            (
                *sq.kring_mask,
                *sq.kring_entries,
                *cq.kring_mask,
                *cq.kring_entries,
                (*sq.khead).load(Ordering::Acquire),
                (*cq.ktail).load(Ordering::Acquire),
            )
        };
        let sized = |mask: u32, entries: u32| entries.is_power_of_two() && mask == entries - 1;
        let fresh = head == 0 && tail == 0 && sq.sqe_head == 0;
        if !sized(sq_mask, sq_entries) || !sized(cq_mask, cq_entries) || !fresh {
            return None;
        }
        let shift = u32::from(ring.flags & SETUP_CQE32 != 0);
        let stride = size_of::<Cqe>() << shift;
        let last = cq.cqes as usize + stride * cq_entries as usize - 1;
        in_cq(last).then_some(Reader {
            ktail: cq.ktail as usize,
            cqes: cq.cqes as usize,
            stride,
            entries: cq_entries,
            seen: 0,
            sqe_seen: 0,
            blind: None,
        })
    }

    /// Registers what the VMM prepared and is about to submit. Comes before the system call.
    ///
    /// # Safety
    /// `ring` is the one given to `new`, and the caller is its submitter.
    pub unsafe fn register(
        &mut self,
        ring: *const Ring,
        table: &mut Table,
        clock: Option<&Shared>,
    ) -> Result<(), Fault> {
        self.scan(table, clock)?;
        // SAFETY: valid (caller), and its submitter is in this call.
        let ring = unsafe { &*ring };
        let (sq, wide) = (&ring.sq, u32::from(ring.flags & SETUP_SQE128 != 0));
        // liburing flushes everything from `sqe_head` to `sqe_tail`. What lies before `sqe_head` and was not looked at
        // went around the hooks.
        if (sq.sqe_head.wrapping_sub(self.sqe_seen) as i32) > 0 {
            return Err(Fault::Surprise);
        }
        // SAFETY: a mapped constant of the ring (`new`).
        let mask = unsafe { *sq.kring_mask };
        while self.sqe_seen != sq.sqe_tail {
            // SAFETY: `mask` keeps the index inside the array; the VMM filled this entry before it called submit.
            let sqe = unsafe { &*sq.sqes.add(((self.sqe_seen & mask) << wide) as usize) };
            self.register_one(sqe, table, clock)?;
            self.sqe_seen = self.sqe_seen.wrapping_add(1);
        }
        Ok(())
    }

    fn register_one(&mut self, sqe: &Sqe, table: &mut Table, clock: Option<&Shared>) -> Result<(), Fault> {
        if sqe.flags & SQE_CQE_SKIP_SUCCESS != 0 || sqe.opcode == op::MSG_RING || keeps_pages(sqe) {
            return Err(Fault::Surprise);
        }
        if self.blind.is_none() && table.pending() >= u64::from(self.entries) {
            self.blind =
                Some(Blind { in_flight: table.pending(), slot: clock.and_then(|clock| super::start_io(clock, 0)) });
        }
        match &mut self.blind {
            Some(blind) => {
                blind.in_flight += 1;
                Ok(())
            }
            None => table.add(sqe.user_data, touch(sqe), clock),
        }
    }

    /// Reads the completions that arrived and ends their requests.
    pub fn scan(&mut self, table: &mut Table, clock: Option<&Shared>) -> Result<(), Fault> {
        // SAFETY: the queue is mapped for as long as the reader is used (`new`); the kernel writes the tail, hence atomic.
        // Acquire: the kernel wrote the completions before it moved the tail.
        let tail = unsafe { (*(self.ktail as *const AtomicU32)).load(Ordering::Acquire) };
        if let Some(blind) = &mut self.blind {
            let arrived = u64::from(tail.wrapping_sub(self.seen));
            self.seen = tail;
            blind.in_flight = blind.in_flight.checked_sub(arrived).ok_or(Fault::Surprise)?;
            if blind.in_flight == 0 {
                table.complete_all(clock);
                if let Some(clock) = clock {
                    clock.finish_io(blind.slot);
                }
                self.blind = None;
            }
            return Ok(());
        }
        if u64::from(tail.wrapping_sub(self.seen)) > table.pending() {
            return Err(Fault::Surprise);
        }
        while self.seen != tail {
            let at = self.cqes + (self.seen & (self.entries - 1)) as usize * self.stride;
            // SAFETY: the masked index lies in the queue (`new` checked its end); the kernel does not write this cell
            // now (module head).
            let (key, flags) = unsafe {
                let cqe = at as *const Cqe;
                ((&raw const (*cqe).user_data).read_volatile(), (&raw const (*cqe).flags).read_volatile())
            };
            if flags & CQE_MORE != 0 {
                return Err(Fault::Surprise);
            }
            table.complete(key, clock)?;
            self.seen = self.seen.wrapping_add(1);
        }
        Ok(())
    }

    /// Whether anything that may touch RAM is in flight.
    pub fn holds_ram(&self, table: &Table) -> bool {
        self.blind.is_some() || table.holds_ram()
    }
}

/// Whether a request may touch RAM. One whose memory is not named here, or whose opcode is not known, is assumed to.
fn touch(sqe: &Sqe) -> Touch {
    // Buffers picked by the kernel: their address is not here.
    let picked = sqe.flags & SQE_BUFFER_SELECT != 0;
    let touches = match sqe.opcode {
        known if op::names_no_pages(known) => false,
        op::READ | op::WRITE => picked || names_ram(sqe),
        op::READV | op::WRITEV => picked || names_ram(sqe),
        // A socket may keep the request waiting for as long as the other end likes.
        op::SEND | op::RECV | op::SENDMSG | op::RECVMSG => (picked || names_ram(sqe)) && !is_known_to_copy(sqe),
        _ => true,
    };
    if touches { Touch::Ram } else { Touch::Other }
}

/// Whether the memory that a transfer names lies in RAM.
fn names_ram(sqe: &Sqe) -> bool {
    let addr = sqe.addr as usize;
    match sqe.opcode {
        // SAFETY: for the vectored opcodes `addr` is an iovec array of `len` elements (io_uring_enter(2)).
        op::READV | op::WRITEV => unsafe { ram::any_overlaps(addr as *const libc::iovec, sqe.len as usize) },
        op::SENDMSG | op::RECVMSG | op::SENDMSG_ZC => {
            // SAFETY: for messages `addr` is a `struct msghdr` (io_uring_enter(2)), null at most when the call fails.
            let message = unsafe { (addr as *const libc::msghdr).as_ref() };
            // SAFETY: a message has `msg_iovlen` elements at `msg_iov`.
            message.is_some_and(|message| unsafe { ram::any_overlaps(message.msg_iov, message.msg_iovlen) })
        }
        _ => ram::overlaps(addr, sqe.len as usize),
    }
}

/// Whether the request's file is known to copy; of one that is known to the ring alone nothing is.
fn is_known_to_copy(sqe: &Sqe) -> bool {
    sqe.flags & SQE_FIXED_FILE == 0 && copies::is_known_to_copy(sqe.fd)
}

/// Whether a request may keep pages of RAM for longer than until its completion: the network card may still read what a
/// zero-copy send named, until a second completion, and a pipe keeps what was spliced into it from a file in RAM.
fn keeps_pages(sqe: &Sqe) -> bool {
    let zero_copy = match sqe.opcode {
        op::SPLICE | op::TEE => return ram::is_mapped(),
        op::SEND_ZC | op::SENDMSG_ZC => true,
        op::SEND | op::SENDMSG => sqe.rw_flags & libc::MSG_ZEROCOPY as u32 != 0,
        _ => false,
    };
    // A fixed buffer has its address here, too; RAM among fixed buffers is reported when they are registered.
    zero_copy && names_ram(sqe)
}

#[cfg(test)]
#[path = "uring_tests.rs"]
mod tests;
