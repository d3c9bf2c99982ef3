//! All queues of the process: who owns which, and the lock of each.
//!
//! A queue is known by the address that the VMM calls it by. The lock of a queue is held while the shim reads it, never
//! over a system call of the VMM. The agent only *tries* the locks: it must not wait for a thread that may be
//! waiting for the daemon, and what it skips is released a little later.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::table::{Fault, Table};
use super::{libaio, shared, uring};
use crate::foreign;
use pagoda_abi::attach::ForeignReason;

/// Queues at one time: QEMU has up to three for each I/O thread (libaio, io_uring, and its event loop's own).
const RINGS_MAX: usize = 64;
/// An owner that is no address: its queue is going away, or was lost track of with I/O in flight.
const GONE: usize = 1;

/// How a queue's completions are read. `None` is all zero bits, so that the table of unused queues costs no memory.
#[repr(u8)]
pub enum Reader {
    /// The queue is not read: there is none, or it is not followed any more.
    None,
    /// Completions are read from the event ring of a libaio context.
    Libaio(libaio::Reader),
    /// Completions are read from the completion queue of a liburing ring.
    Uring(uring::Reader),
}

/// A queue: what it has in flight, and how to learn what has ended.
pub struct Ring {
    /// What is in flight.
    pub table: Table,
    /// How to learn what has ended.
    pub reader: Reader,
}

impl Ring {
    const FREE: Ring = Ring { table: Table::EMPTY, reader: Reader::None };

    /// Reads what arrived. After a fault the queue is not read again and the VM's memory stays.
    pub fn scan(&mut self) {
        let clock = shared();
        let scanned = match &mut self.reader {
            Reader::None => Ok(()),
            Reader::Libaio(reader) => reader.scan(&mut self.table, clock),
            Reader::Uring(reader) => reader.scan(&mut self.table, clock),
        };
        self.accept(scanned);
    }

    /// Turns a fault into "nothing of this VM may be evicted".
    pub fn accept(&mut self, result: Result<(), Fault>) {
        if result.is_err() {
            self.reader = Reader::None;
            foreign::report(ForeignReason::UntrackedIo);
        }
    }

    fn holds_ram(&self) -> bool {
        match &self.reader {
            Reader::Uring(reader) => reader.holds_ram(&self.table),
            _ => self.table.holds_ram(),
        }
    }
}

static OWNERS: [AtomicUsize; RINGS_MAX] = [const { AtomicUsize::new(0) }; RINGS_MAX];
static RINGS: [Mutex<Ring>; RINGS_MAX] = [const { Mutex::new(Ring::FREE) }; RINGS_MAX];
/// Held while a queue is given a place, so that it gets one only.
static ADOPTION: Mutex<()> = Mutex::new(());

fn lock(index: usize) -> MutexGuard<'static, Ring> {
    RINGS[index].lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(owner: usize) -> Option<usize> {
    OWNERS.iter().position(|known| known.load(Ordering::Acquire) == owner)
}

/// Runs `work` on the queue of this owner. A queue not yet known is read by what `adopt` makes, `None` from it being
/// a queue that cannot be followed. Without a place for it the answer is `None`, and the VM's memory stays.
pub fn with<R>(owner: usize, adopt: impl FnOnce() -> Option<Reader>, work: impl FnOnce(&mut Ring) -> R) -> Option<R> {
    let index = match find(owner) {
        Some(index) => index,
        None => {
            let _adopting = ADOPTION.lock().unwrap_or_else(PoisonError::into_inner);
            match find(owner).or_else(|| claim(owner, adopt)) {
                Some(index) => index,
                None => {
                    foreign::report(ForeignReason::UntrackedIo);
                    return None;
                }
            }
        }
    };
    let mut ring = lock(index);
    (OWNERS[index].load(Ordering::Acquire) == owner).then(|| work(&mut ring))
}

fn claim(owner: usize, adopt: impl FnOnce() -> Option<Reader>) -> Option<usize> {
    let index = find(0)?;
    let mut ring = lock(index);
    ring.reader = adopt().unwrap_or_else(|| {
        foreign::report(ForeignReason::UntrackedIo);
        Reader::None
    });
    OWNERS[index].store(owner, Ordering::Release);
    Some(index)
}

/// A queue on its way out.
#[must_use]
pub struct Leaving(usize);

/// The queue of this owner is about to be destroyed: it is read a last time, and never again.
pub fn leave(owner: usize) -> Option<Leaving> {
    let index = find(owner)?;
    let mut ring = lock(index);
    ring.scan();
    OWNERS[index].store(GONE, Ordering::Release);
    if ring.holds_ram() {
        // Whatever is still in flight can only be waited for, or is lost track of: see `Leaving`.
        ring.reader = Reader::None;
        return Some(Leaving(index));
    }
    ring.table.complete_all(shared());
    ring.reader = Reader::None;
    OWNERS[index].store(0, Ordering::Release);
    None
}

impl Leaving {
    /// Its destruction waited for everything in flight.
    pub fn all_ended(self) {
        let mut ring = lock(self.0);
        ring.table.complete_all(shared());
        OWNERS[self.0].store(0, Ordering::Release);
    }

    /// It went with direct I/O in flight whose end nobody can see: the slots stay taken.
    pub fn lost(self) {
        foreign::report(ForeignReason::UntrackedIo);
    }
}

/// Reads every queue that nobody else is reading.
pub fn refresh() {
    let used = OWNERS.iter().zip(&RINGS).filter(|(owner, _)| owner.load(Ordering::Acquire) > GONE);
    // A queue whose owner leaves it meanwhile has nothing to read in it any more.
    used.filter_map(|(_, ring)| ring.try_lock().ok()).for_each(|mut ring| ring.scan());
}
