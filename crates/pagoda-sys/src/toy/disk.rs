//! The disk by itself: O_DIRECT reads and writes through io_uring with registered buffers, as
//! many bytes written as read. This is the ceiling a pager of that disk can reach.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

/// O_DIRECT wants the memory aligned to the device's logical block; a page satisfies all.
const BUFFER_ALIGN_BYTES: usize = 4096;

/// A load says how the disk is read and written, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct BalancedLoad {
    /// Requests in flight, reads and writes together.
    pub queue_depth: u32,
    /// Bytes of one request.
    pub request_bytes: usize,
    /// How long to keep it up.
    pub duration: Duration,
}

/// A rate says how much was read and written, and in what time.
#[derive(Debug, Clone, Copy)]
pub struct BalancedRate {
    /// So many bytes were read.
    pub read_bytes: u64,
    /// So many bytes were written.
    pub written_bytes: u64,
    /// Time from the first submission to the last completion.
    pub elapsed: Duration,
}

struct Buffers {
    start: *mut u8,
    layout: Layout,
}

impl Buffers {
    fn new(count: usize, bytes: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(count * bytes, BUFFER_ALIGN_BYTES)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        if layout.size() == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the layout has a size above zero (checked).
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(Self { start, layout })
    }

    /// `count` buffers of `bytes` each.
    ///
    /// # Panics
    /// If there is no room for so many.
    fn vectors(&self, count: usize, bytes: usize) -> Vec<libc::iovec> {
        assert!(count * bytes <= self.layout.size());
        let vector = |index| libc::iovec {
            // SAFETY: index * bytes is inside the allocation of count * bytes and more.
            iov_base: unsafe { self.start.add(index * bytes) }.cast(),
            iov_len: bytes,
        };
        (0..count).map(vector).collect()
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout; the ring that used it is gone, because
        // `run_balanced` drops the ring first and waits for every request before it returns.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// Reads the first half of `file` and writes its second half, in order and round and round.
///
/// `file` must be open with O_DIRECT and hold written blocks throughout.
///
/// # Errors
/// Setting up the ring, or the first failed or short request.
pub fn run_balanced(file: &File, load: BalancedLoad) -> io::Result<BalancedRate> {
    let slots = load.queue_depth as usize;
    let bytes = load.request_bytes;
    let half = file.metadata()?.len() / 2 / bytes as u64 * bytes as u64;
    let request_len = u32::try_from(bytes).map_err(io::Error::other)?;
    if half == 0 || slots == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "file or queue too small"));
    }
    let buffers = Buffers::new(slots, bytes)?;
    let mut ring = IoUring::new(load.queue_depth)?;
    let vectors = buffers.vectors(slots, bytes);
    // SAFETY: the buffers outlive the ring: it is dropped before them at the end of this function
    // (declared later), and every request is waited for.
    unsafe { ring.submitter().register_buffers(&vectors)? };

    let mut rate = BalancedRate { read_bytes: 0, written_bytes: 0, elapsed: Duration::ZERO };
    let mut issued = [0_u64; 2]; // reads, writes
    let mut free: Vec<usize> = (0..slots).collect();
    let mut is_write = vec![false; slots];
    let start = Instant::now();
    let mut failure: Option<io::Error> = None;
    loop {
        let stop = failure.is_some() || start.elapsed() >= load.duration;
        let idle = if stop { Vec::new() } else { std::mem::take(&mut free) };
        for slot in idle {
            let write = issued[1] < issued[0];
            let at = issued[usize::from(write)] * bytes as u64 % half;
            issued[usize::from(write)] += 1;
            is_write[slot] = write;
            let fd = types::Fd(file.as_raw_fd());
            let address = vectors[slot].iov_base.cast::<u8>();
            // A ring has at most 32768 entries (io_uring_setup(2)), checked when it was made.
            let index = slot as u16;
            let entry = if write {
                opcode::WriteFixed::new(fd, address, request_len, index).offset(half + at).build()
            } else {
                opcode::ReadFixed::new(fd, address, request_len, index).offset(at).build()
            };
            // SAFETY: the buffer is registered, belongs to this request alone until its
            // completion returns the slot, and outlives the ring; the fd is open throughout.
            let pushed = unsafe { ring.submission().push(&entry.user_data(slot as u64)) };
            if pushed.is_err() {
                // No early return: requests may be in flight, and they own their buffers.
                failure = Some(io::Error::other("the submission queue is full"));
                free.push(slot);
            }
        }
        if free.len() == slots {
            break;
        }
        match ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                // Requests may be in flight: their buffers must not be freed.
                std::mem::forget(buffers);
                return Err(error);
            }
            _ => {}
        }
        for entry in ring.completion() {
            let slot = usize::try_from(entry.user_data()).unwrap_or(0);
            free.push(slot);
            if entry.result() == i32::try_from(bytes).unwrap_or(i32::MAX) {
                let total = if is_write[slot] { &mut rate.written_bytes } else { &mut rate.read_bytes };
                *total += bytes as u64;
            } else if entry.result() < 0 {
                failure = Some(io::Error::from_raw_os_error(-entry.result()));
            } else {
                failure = Some(io::Error::other("short direct read or write"));
            }
        }
    }
    drop(ring);
    rate.elapsed = start.elapsed();
    failure.map_or(Ok(rate), Err)
}
