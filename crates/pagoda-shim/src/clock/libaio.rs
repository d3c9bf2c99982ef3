//! libaio: completions are read from the event ring that the kernel maps into the process.
//!
//! The context handle *is* the address of the ring (`fs/aio.c`). The kernel writes an event at `tail` and moves it; the
//! VMM, often without any call, moves `head`. The shim has its own position, `seen`, and reads from there to `tail`.
//!
//! Why no event is lost: at most `nr - 1` requests are ever registered and not yet read (a longer batch is cut, which
//! io_submit(2) may do anyway), so the events not yet read lie in distinct cells and `tail` cannot come round.
//! Why no slot is released early: a request is registered after everything that ended before has been read, and
//! the kernel moves `tail` before it tells anybody that a request is complete, so an event of an
//! earlier use of the same `struct iocb` has been read when that is submitted again.

use std::sync::atomic::{AtomicU32, Ordering};

use pagoda_abi::shared::Shared;

use super::table::{Fault, Table, Touch};
use crate::ram;

/// What the kernel has in `magic` of each ring (`AIO_RING_MAGIC` of `fs/aio.c`).
const MAGIC: u32 = 0xa10a_10a1;

/// `struct aio_ring` of `fs/aio.c`, unchanged since Linux 2.6; libaio itself depends on it.
#[repr(C)]
struct Header {
    id: u32,
    nr: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

/// `struct io_event` of `linux/aio_abi.h`.
#[repr(C)]
struct Event {
    data: u64,
    /// Address of the `struct iocb`.
    obj: u64,
    res: i64,
    res2: i64,
}

/// `struct iocb` of `linux/aio_abi.h`.
#[repr(C)]
pub struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    reqprio: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

const _: () = assert!(size_of::<Header>() == 32 && size_of::<Event>() == 32 && size_of::<Iocb>() == 64);

/// The opcodes of requests (`linux/aio_abi.h`).
const PREAD: u16 = 0;
const PWRITE: u16 = 1;
/// FSYNC, FDSYNC, POLL and NOOP name no memory. Any other opcode may.
const WITHOUT_MEMORY: [u16; 4] = [2, 3, 5, 6];
const PREADV: u16 = 7;
const PWRITEV: u16 = 8;

/// The position up to which one context's ring was read.
pub struct Reader {
    ring: usize,
    nr: u32,
    seen: u32,
}

impl Reader {
    /// Starts reading a context; `None` when it does not look like an event ring.
    ///
    /// # Safety
    /// `context` is what io_setup(2) returned, and its ring stays mapped for as long as the reader is used.
    pub unsafe fn new(context: usize) -> Option<Reader> {
        if context == 0 || !context.is_multiple_of(pagoda_abi::PAGE_SIZE) {
            return None;
        }
        // SAFETY: the ring is mapped (caller), a page at least, and page aligned.
        let header = unsafe { &*(context as *const Header) };
        let known = header.magic == MAGIC
            && header.incompat_features == 0
            && header.header_length as usize == size_of::<Header>()
            && header.nr > 1;
        known.then(|| Reader { ring: context, nr: header.nr, seen: header.tail.load(Ordering::Acquire) })
    }

    /// How many more requests may be registered so that no event can be overwritten unread.
    pub fn room(&self, table: &Table) -> usize {
        (u64::from(self.nr) - 1).saturating_sub(table.pending()) as usize
    }

    /// Reads the events that arrived and ends their requests.
    pub fn scan(&mut self, table: &mut Table, clock: Option<&Shared>) -> Result<(), Fault> {
        // SAFETY: the ring is mapped for as long as the reader is used (`new`); the kernel writes it, hence atomics.
        let header = unsafe { &*(self.ring as *const Header) };
        // Acquire: the kernel wrote the events before it moved the tail.
        let tail = header.tail.load(Ordering::Acquire);
        if tail >= self.nr {
            return Err(Fault::Surprise);
        }
        while self.seen != tail {
            let at = self.ring + size_of::<Header>() + self.seen as usize * size_of::<Event>();
            // SAFETY: `seen < nr`, so the cell lies in the mapped ring; the kernel does not write it now, since it has
            // been written (before `tail`) and cannot be reused before it is read here (module head).
            let key = unsafe { (&raw const (*(at as *const Event)).obj).read_volatile() };
            table.complete(key, clock)?;
            self.seen = (self.seen + 1) % self.nr;
        }
        Ok(())
    }
}

/// Whether a request may touch RAM.
///
/// # Safety
/// `iocb` is a valid request about to be submitted.
pub unsafe fn touch(iocb: *const Iocb) -> Touch {
    // SAFETY: valid (caller), and nobody writes it while it is being submitted.
    let (opcode, buf, len) = unsafe { ((*iocb).opcode, (*iocb).buf, (*iocb).nbytes) };
    let touches = match opcode {
        PREAD | PWRITE => ram::overlaps(buf as usize, len as usize),
        // SAFETY: for the vectored opcodes `buf` is an iovec array of `nbytes` elements (linux/aio_abi.h).
        PREADV | PWRITEV => unsafe { ram::any_overlaps(buf as *const libc::iovec, len as usize) },
        other => !WITHOUT_MEMORY.contains(&other),
    };
    if touches { Touch::Ram } else { Touch::Other }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::testing::{Rng, boxed_table, shared};
    use std::collections::VecDeque;

    const NR: u32 = 13;

    /// The kernel's side of a ring, in page-aligned memory of our own.
    struct Kernel {
        ring: Box<Page>,
    }

    #[repr(C, align(4096))]
    struct Page([u64; 512]);

    impl Kernel {
        fn new() -> Kernel {
            let mut kernel = Kernel { ring: Box::new(Page([0; 512])) };
            let header = kernel.header();
            header.nr = NR;
            header.magic = MAGIC;
            header.header_length = 32;
            kernel
        }

        fn header(&mut self) -> &mut Header {
            // SAFETY: the page is big and aligned enough, all bits are valid, and the borrow is exclusive.
            unsafe { &mut *(&raw mut *self.ring).cast::<Header>() }
        }

        fn complete(&mut self, key: u64) {
            let tail = *self.header().tail.get_mut();
            self.ring.0[4 + tail as usize * 4 + 1] = key;
            *self.header().tail.get_mut() = (tail + 1) % NR;
        }
    }

    #[test]
    fn no_request_is_released_before_its_event_and_all_are_after() {
        let seed = 0x5eed_0002;
        let (clock, mut table, mut rng) = (shared(), boxed_table(), Rng::new(seed));
        let mut kernel = Kernel::new();
        // SAFETY: the page outlives the reader.
        let mut reader = unsafe { Reader::new(&raw const *kernel.ring as usize) }.unwrap();
        let mut in_flight: VecDeque<u64> = VecDeque::new();
        let mut free: Vec<u64> = (0..40).map(|i| 0x5500_0000_0000 + i * 64).collect();
        for step in 0..50_000 {
            if rng.below(2) == 0 {
                reader.scan(&mut table, Some(&clock)).unwrap();
                let batch = (rng.below(9) as usize).min(reader.room(&table)).min(free.len());
                for _ in 0..batch {
                    let key = free.swap_remove(rng.below(free.len() as u64) as usize);
                    table.add(key, Touch::Ram, Some(&clock)).unwrap();
                    in_flight.push_back(key);
                }
                // The kernel may take only the first few.
                for _ in 0..(rng.below(3) as usize).min(batch) {
                    let key = in_flight.pop_back().unwrap();
                    table.complete(key, Some(&clock)).unwrap();
                    free.push(key);
                }
            } else if !in_flight.is_empty() {
                let key = in_flight.remove(rng.below(in_flight.len() as u64) as usize).unwrap();
                kernel.complete(key);
                free.push(key); // its owner may use the iocb again at once
            }
            let held = clock.io.iter().filter(|slot| slot.load(Ordering::SeqCst) != 0).count();
            assert!(held >= in_flight.len(), "early release: seed {seed:#x} step {step}");
            assert!(table.pending() < u64::from(NR));
        }
        while let Some(key) = in_flight.pop_front() {
            kernel.complete(key);
        }
        reader.scan(&mut table, Some(&clock)).unwrap();
        assert_eq!(clock.oldest_io(), u64::MAX);
    }

    #[test]
    fn a_stranger_is_not_taken_for_a_ring() {
        let mut kernel = Kernel::new();
        kernel.header().magic = 1;
        // SAFETY: the page is mapped while it is looked at.
        assert!(unsafe { Reader::new(&raw const *kernel.ring as usize) }.is_none());
        // SAFETY: refused before it is read.
        assert!(unsafe { Reader::new(0) }.is_none());
    }

    #[test]
    fn an_event_nobody_submitted_is_a_fault() {
        let mut kernel = Kernel::new();
        // SAFETY: the page outlives the reader.
        let mut reader = unsafe { Reader::new(&raw const *kernel.ring as usize) }.unwrap();
        kernel.complete(99);
        assert_eq!(reader.scan(&mut boxed_table(), None), Err(Fault::Surprise));
    }
}
