//! io_uring: the disk I/O and the polling of one engine thread.
//!
//! A [`Ring`] belongs to the thread that made it (`IORING_SETUP_SINGLE_ISSUER`), hence it is not `Send`. Memory handed to
//! the kernel outlives the I/O whatever happens: a slot of the ring holds the [`IoTarget`] until the kernel's last
//! completion for it has been taken, buffers belong to the ring, and dropping the ring cancels what has not begun and
//! waits for all the rest (and leaks the memory if even the waiting fails). A write whose completion was not taken may
//! thus have happened or not, as after a crash. A killed daemon leaves its I/O to the kernel, which pins what it needs.
//!
//! Order: queue with [`Ring::read`], [`Ring::write`], [`Ring::poll_multishot`]; hand over with [`Ring::submit`] or
//! [`Ring::submit_and_wait`]; take [`Ring::completions`]. Files are registered once ([`Ring::add_file`]), so a queued
//! request can never meet a file descriptor that was closed and reused.

mod buffers;
mod error;

use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::types::{CancelBuilder, Fixed, SubmitArgs, Timespec};
use io_uring::{CompletionQueue, IoUring, cqueue, opcode, squeue};

use crate::Errno;
use crate::ram::IoTarget;
pub use buffers::{BufferId, BufferSlice, Buffers};
pub use error::RingError;
use error::os;

/// Operations in flight for each submission entry: the kernel makes the completion queue twice as long
/// (io_uring_setup(2)), so completions of single-shot operations always have room.
const IN_FLIGHT_PER_ENTRY: u32 = 2;
/// Files registered with one ring: swap files of the VMs one engine thread serves.
pub const FILES_MAX: u32 = 256;

/// How long dropping a ring waits for the kernel to find what can be cancelled, before it waits for the rest to complete.
const CANCEL_WAIT: Timespec = Timespec::new().sec(1);

/// A file registered with a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId(u32);

/// What the kernel reads into or writes from.
#[derive(Clone, Debug)]
pub enum Memory {
    /// A range of a VM's RAM.
    Ram(IoTarget),
    /// A part of one of the ring's buffers.
    Buffer(BufferSlice),
}

impl From<IoTarget> for Memory {
    fn from(target: IoTarget) -> Self {
        Memory::Ram(target)
    }
}

impl From<BufferSlice> for Memory {
    fn from(slice: BufferSlice) -> Self {
        Memory::Buffer(slice)
    }
}

/// The end of an operation, or one event of a multishot poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As given when it was queued.
    pub key: u64,
    /// Bytes transferred (may be fewer than asked for), or poll events.
    pub result: Result<u32, Errno>,
    /// More completions with this key follow; if a poll says no, it has to be armed again.
    pub more: bool,
}

/// An operation in flight.
#[derive(Debug, Default)]
enum Op {
    #[default]
    Free,
    Poll {
        key: u64,
    },
    /// Holds the memory until the kernel is done with it.
    Transfer {
        key: u64,
        memory: Memory,
    },
    /// Removal of a poll: nobody waits for its result.
    Internal,
}

/// The operations in flight: an operation's index is its `user_data`.
#[derive(Debug, Default)]
struct Slots {
    ops: Vec<Op>,
    free: Vec<u32>,
}

impl Slots {
    fn new(count: u32) -> Slots {
        Slots { ops: (0..count).map(|_| Op::Free).collect(), free: (0..count).rev().collect() }
    }

    fn put(&mut self, op: Op) -> Option<u32> {
        let index = self.free.pop()?;
        self.ops[index as usize] = op;
        Some(index)
    }

    fn release(&mut self, index: u32) -> Op {
        self.free.push(index);
        std::mem::take(&mut self.ops[index as usize])
    }

    fn transfers(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::Transfer { .. })).count()
    }
}

/// An io_uring with everything its operations need. See the module.
pub struct Ring {
    uring: IoUring,
    slots: Slots,
    buffers: Option<Buffers>,
    files: Vec<bool>,
    /// A ring is used by the thread that made it, or the kernel refuses.
    _not_send: PhantomData<*const ()>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("in_flight", &self.in_flight())
            .field("buffers", &self.buffers)
            .finish_non_exhaustive()
    }
}

fn build(entries: u32) -> std::io::Result<IoUring> {
    let base = || {
        let mut builder = IoUring::builder();
        builder
            .dontfork()
            .setup_clamp()
            .setup_submit_all()
            .setup_cqsize(entries.next_power_of_two() * IN_FLIGHT_PER_ENTRY);
        builder
    };
    // Best first; EINVAL means that the kernel is older than the flag.
    let deferred = base().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(entries);
    match deferred {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            base().setup_coop_taskrun().setup_taskrun_flag().build(entries)
        }
        result => result,
    }
}

impl Ring {
    /// A ring for the calling thread that queues `entries` operations between submissions and has at most twice as many
    /// in flight.
    ///
    /// # Errors
    /// [`RingError::Disabled`]; ENOMEM.
    pub fn new(entries: u32) -> Result<Ring, RingError> {
        let uring = build(entries).map_err(|error| match error.raw_os_error() {
            Some(libc::EPERM | libc::ENOSYS) => RingError::Disabled,
            _ => os("set up io_uring")(error),
        })?;
        uring.submitter().register_files_sparse(FILES_MAX).map_err(os("reserve io_uring files"))?;
        let slots = Slots::new(uring.params().cq_entries());
        Ok(Ring { uring, slots, buffers: None, files: vec![false; FILES_MAX as usize], _not_send: PhantomData })
    }

    /// Operations the ring can have in flight.
    pub fn limit(&self) -> usize {
        self.slots.ops.len()
    }

    /// Operations queued or in flight, armed polls included.
    pub fn in_flight(&self) -> usize {
        self.slots.ops.len() - self.slots.free.len()
    }

    /// Registers a file. The ring keeps it open until [`Ring::remove_file`] or its end.
    ///
    /// # Errors
    /// [`RingError::Full`] when [`FILES_MAX`] are registered.
    pub fn add_file(&mut self, fd: BorrowedFd<'_>) -> Result<FileId, RingError> {
        let index = self.files.iter().position(|used| !used).ok_or(RingError::Full { limit: FILES_MAX as usize })?;
        let updated = self.uring.submitter().register_files_update(index as u32, &[fd.as_raw_fd()]);
        updated.map_err(os("register file with io_uring"))?;
        self.files[index] = true;
        Ok(FileId(index as u32))
    }

    /// Gives a file back. I/O in flight on it still completes.
    ///
    /// # Errors
    /// [`RingError::Stranger`] if it is not registered.
    pub fn remove_file(&mut self, file: FileId) -> Result<(), RingError> {
        self.check_file(file)?;
        // What is only queued would meet the next file of this number.
        self.submit()?;
        let updated = self.uring.submitter().register_files_update(file.0, &[-1]);
        updated.map_err(os("unregister file from io_uring"))?;
        self.files[file.0 as usize] = false;
        Ok(())
    }

    /// Gives the ring its buffers, once. They are registered with the kernel if the limit on locked memory allows it.
    ///
    /// # Errors
    /// [`RingError::Stranger`] if it has some already.
    pub fn set_buffers(&mut self, mut buffers: Buffers) -> Result<(), RingError> {
        if self.buffers.is_some() {
            return Err(RingError::Stranger { what: "second set of buffers" });
        }
        let area = buffers.area();
        // SAFETY: register_buffers needs memory that stays valid until the ring is gone: `buffers` is kept by the ring
        // from here on, there is no way to take it out, and it is dropped after `uring` (or leaked).
        buffers.registered = unsafe { self.uring.submitter().register_buffers(&[area]) }.is_ok();
        self.buffers = Some(buffers);
        Ok(())
    }

    /// Takes the smallest free buffer of at least `size` bytes, until [`Ring::give_buffer`].
    pub fn take_buffer(&mut self, size: usize) -> Option<BufferId> {
        self.buffers.as_mut()?.take(size)
    }

    /// Gives a buffer back. `false`, and nothing is done, while I/O runs on it or if it was not taken.
    pub fn give_buffer(&mut self, id: BufferId) -> bool {
        self.buffers.as_mut().is_some_and(|buffers| buffers.give(id))
    }

    /// Buffers of at least `size` bytes that can be taken.
    pub fn buffers_free(&self, size: usize) -> usize {
        self.buffers.as_ref().map_or(0, |buffers| buffers.free(size))
    }

    /// The content of a taken buffer; `None` while I/O runs on it.
    pub fn buffer(&self, id: BufferId) -> Option<&[u8]> {
        self.buffers.as_ref()?.bytes(id)
    }

    /// The content of a taken buffer, to be changed; `None` while I/O runs on it.
    pub fn buffer_mut(&mut self, id: BufferId) -> Option<&mut [u8]> {
        self.buffers.as_mut()?.bytes_mut(id)
    }

    /// Copies bytes into a taken buffer, while I/O may run on other parts of it. `false`, and nothing is done, unless they fill
    /// the slice and it lies in the buffer.
    pub fn fill(&mut self, slice: BufferSlice, content: &[u8]) -> bool {
        self.buffers.as_mut().is_some_and(|buffers| buffers.fill(&slice, content))
    }

    /// Asks for a completion each time `fd` becomes readable, until one says that no more follow. Handed over at once, so
    /// `fd` may be closed afterwards; the poll keeps the file open.
    ///
    /// # Errors
    /// [`RingError::Full`]; the submission's error.
    pub fn poll_multishot(&mut self, fd: BorrowedFd<'_>, key: u64) -> Result<(), RingError> {
        let entry = opcode::PollAdd::new(io_uring::types::Fd(fd.as_raw_fd()), libc::POLLIN as u32).multi(true).build();
        self.queue(entry, Op::Poll { key })?;
        self.submit()?;
        Ok(())
    }

    /// Ends the polls with this key; each gives a last completion, ECANCELED, without `more`.
    ///
    /// # Errors
    /// [`RingError::Full`]: then some may still be armed; call again.
    pub fn cancel_poll(&mut self, key: u64) -> Result<(), RingError> {
        for index in 0..self.slots.ops.len() {
            if matches!(self.slots.ops[index], Op::Poll { key: armed } if armed == key) {
                self.queue(opcode::PollRemove::new(index as u64).build(), Op::Internal)?;
            }
        }
        self.submit().map(drop)
    }

    /// Queues a read at `offset` of the file. For direct I/O all three of address, offset and length are whole blocks.
    ///
    /// # Errors
    /// [`RingError::Full`]: take completions first. [`RingError::Stranger`].
    pub fn read(&mut self, file: FileId, offset: u64, into: impl Into<Memory>, key: u64) -> Result<(), RingError> {
        self.check_file(file)?;
        let memory = into.into();
        let (addr, len, fixed) = self.resolve(&memory)?;
        let entry = if fixed {
            opcode::ReadFixed::new(Fixed(file.0), addr, len, 0).offset(offset).build()
        } else {
            opcode::Read::new(Fixed(file.0), addr, len).offset(offset).build()
        };
        self.transfer(entry, key, memory)
    }

    /// Queues a write at `offset` of the file; as [`Ring::read`]. The memory must not change before the completion, if
    /// what arrives on the disk matters.
    ///
    /// # Errors
    /// As [`Ring::read`].
    pub fn write(&mut self, file: FileId, offset: u64, from: impl Into<Memory>, key: u64) -> Result<(), RingError> {
        self.check_file(file)?;
        let memory = from.into();
        let (addr, len, fixed) = self.resolve(&memory)?;
        let entry = if fixed {
            opcode::WriteFixed::new(Fixed(file.0), addr, len, 0).offset(offset).build()
        } else {
            opcode::Write::new(Fixed(file.0), addr, len).offset(offset).build()
        };
        self.transfer(entry, key, memory)
    }

    /// Hands over what is queued and lets the kernel deliver completions that are due; does not wait.
    ///
    /// # Errors
    /// The error of io_uring_enter(2). What was queued stays queued.
    pub fn submit(&mut self) -> Result<usize, RingError> {
        entered(self.uring.submitter().submit())
    }

    /// Hands over what is queued and waits until `min` completions are there or `timeout` has passed. With a timeout of zero it
    /// waits for nothing, and is no system call where nothing is to be handed over or taken in.
    ///
    /// # Errors
    /// The error of io_uring_enter(2); a signal or the timeout is none.
    pub fn submit_and_wait(&mut self, min: usize, timeout: Option<Duration>) -> Result<usize, RingError> {
        let Some(timeout) = timeout else { return entered(self.uring.submitter().submit_and_wait(min)) };
        if timeout.is_zero() {
            // The kernel would arm a timer and sleep until it fires: 3 us (measured: x86-64 VM, Linux 6.18).
            let queue = self.uring.submission();
            let has_work = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
            drop(queue);
            return if has_work { self.submit() } else { Ok(0) };
        }
        let timeout = Timespec::from(timeout);
        entered(self.uring.submitter().submit_with_args(min, &SubmitArgs::new().timespec(&timeout)))
    }

    /// Whether [`Ring::submit_and_wait`] would find a completion at once. No system call.
    pub fn is_due(&mut self) -> bool {
        !self.uring.completion().is_empty() || self.uring.submission().taskrun()
    }

    /// Takes the completions that are there. What the iterator was not asked for stays for the next time.
    pub fn completions(&mut self) -> Completions<'_> {
        Completions { queue: self.uring.completion(), slots: &mut self.slots, buffers: self.buffers.as_mut() }
    }

    fn check_file(&self, file: FileId) -> Result<(), RingError> {
        let known = self.files.get(file.0 as usize).copied().unwrap_or(false);
        if known { Ok(()) } else { Err(RingError::Stranger { what: "file" }) }
    }

    /// Address and length of the memory, and whether it is registered with the kernel.
    fn resolve(&self, memory: &Memory) -> Result<(*mut u8, u32, bool), RingError> {
        match memory {
            Memory::Ram(target) => Ok((target.addr(), target.len(), false)),
            Memory::Buffer(slice) => {
                let buffers = self.buffers.as_ref().ok_or(RingError::Stranger { what: "buffer" })?;
                let addr = buffers.addr_of(slice).ok_or(RingError::Stranger { what: "buffer" })?;
                Ok((addr, slice.len, buffers.registered))
            }
        }
    }

    fn transfer(&mut self, entry: squeue::Entry, key: u64, memory: Memory) -> Result<(), RingError> {
        let slice = match &memory {
            Memory::Buffer(slice) => Some(slice.id),
            Memory::Ram(_) => None,
        };
        self.queue(entry, Op::Transfer { key, memory })?;
        if let (Some(id), Some(buffers)) = (slice, self.buffers.as_mut()) {
            buffers.start_io(id);
        }
        Ok(())
    }

    /// Gives the operation a slot and queues it; submits when the queue is full.
    fn queue(&mut self, entry: squeue::Entry, op: Op) -> Result<(), RingError> {
        let limit = self.limit();
        let index = self.slots.put(op).ok_or(RingError::Full { limit })?;
        let entry = entry.user_data(u64::from(index));
        for _ in 0..2 {
            // SAFETY: push needs the memory of the entry to stay valid until the operation is complete: the slot `index`
            // holds the `IoTarget`, or the ring the buffers, until the last completion (see `Completions`). An entry of
            // a poll or its removal has no memory.
            if unsafe { self.uring.submission().push(&entry) }.is_ok() {
                return Ok(());
            }
            if let Err(error) = self.submit() {
                self.slots.release(index);
                return Err(error);
            }
        }
        // The kernel took nothing because completions wait to be taken.
        self.slots.release(index);
        Err(RingError::Full { limit })
    }
}

/// EINTR and ETIME end a wait, EBUSY and EAGAIN say that completions have to be taken first: no errors to the caller.
fn entered(result: std::io::Result<usize>) -> Result<usize, RingError> {
    match result {
        Ok(count) => Ok(count),
        Err(error) => match error.raw_os_error() {
            Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN) => Ok(0),
            _ => Err(os("io_uring_enter")(error)),
        },
    }
}

/// The completions are taken one by one; [`Ring::completions`] gives them.
#[allow(missing_debug_implementations)] // a borrow of the ring
pub struct Completions<'a> {
    queue: CompletionQueue<'a>,
    slots: &'a mut Slots,
    buffers: Option<&'a mut Buffers>,
}

impl Iterator for Completions<'_> {
    type Item = Completion;

    fn next(&mut self) -> Option<Completion> {
        loop {
            let entry = self.queue.next()?;
            let index = entry.user_data() as u32;
            let more = cqueue::more(entry.flags());
            let result = u32::try_from(entry.result()).map_err(|_| Errno::from_raw_os_error(-entry.result()));
            let key = match &self.slots.ops[index as usize] {
                Op::Poll { key } | Op::Transfer { key, .. } => Some(*key),
                Op::Free | Op::Internal => None,
            };
            // Releasing the slot lets go of the memory; a buffer can be seen again.
            let ended = if more { Op::Internal } else { self.slots.release(index) };
            if let (Op::Transfer { memory: Memory::Buffer(slice), .. }, Some(buffers)) = (ended, self.buffers.as_mut())
            {
                buffers.finish_io(slice.id);
            }
            if let Some(key) = key {
                return Some(Completion { key, result, more });
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Polls have no memory and end with the ring; transfers must end before their memory does. Those that a disk
        // works on cannot be cancelled, others (a pipe's) can, and might else never end.
        if self.slots.transfers() > 0 {
            let _ = self.submit();
            let cancelled = self.uring.submitter().register_sync_cancel(Some(CANCEL_WAIT), CancelBuilder::any());
            // ENOENT, ETIME, or a kernel before 6.0: the wait below is what counts.
            drop(cancelled);
        }
        while self.slots.transfers() > 0 {
            let waited = self.submit_and_wait(1, None);
            if self.completions().count() == 0 && waited.is_err() {
                // The kernel may still write: better leak than let it write into memory of someone else.
                std::mem::forget(std::mem::take(&mut self.slots));
                std::mem::forget(self.buffers.take());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
