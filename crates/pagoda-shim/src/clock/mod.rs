//! The clock of I/O: since when is the oldest transfer in flight that may pin guest RAM? (The pin rule of `pagoda_abi::shared`.)
//!
//! Every transfer that names guest RAM is on the clock, or is reported as one that cannot be followed, unless it is known
//! to copy ([`copies`], [`uring`], `hooks`): a list of what is safe, never one of what is dangerous.
//!
//! Owns: the mapping of the shared memory, and the table of each queue. Written by the VMM's threads in their hooks, and
//! by the agent when it reads the queues.
//! Order: a request is registered *before* the system call that may start it, and released *after* the kernel has published
//! its completion. To release late only delays an eviction; to release early would let the disk write into a page that is
//! no longer the guest's. So whatever the shim does not understand ends in `UntrackedIo`: nothing of this VM is evicted.
//! Limits: system calls that do not go through a dynamic symbol (a statically linked liburing, inline assembly) are not seen.

pub mod copies;
pub mod libaio;
pub mod rings;
pub mod sync;
pub mod table;
pub mod uring;

use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pagoda_abi::shared::{Shared, VMM_IO_SLOTS, mapper_io_slots};

use crate::real;

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
/// The mapper's number by which its slots are its own; [`VMM`] in the VMM.
static MAPPER: AtomicUsize = AtomicUsize::new(VMM);
const VMM: usize = usize::MAX;

/// The shared memory, once it is mapped.
pub fn shared() -> Option<&'static Shared> {
    // SAFETY: null, or what `set_shared` was given: valid for ever, and all its fields are atomics.
    unsafe { SHARED.load(Ordering::Acquire).as_ref() }
}

/// This process is the mapper of this number.
pub fn set_mapper(slot: usize) {
    MAPPER.store(slot, Ordering::Relaxed);
}

/// A slot for a direct I/O of this process; see [`Shared::start_io`].
pub fn start_io(clock: &Shared, hint: usize) -> Option<usize> {
    let slots = match MAPPER.load(Ordering::Relaxed) {
        VMM => VMM_IO_SLOTS,
        mapper => mapper_io_slots(mapper),
    };
    clock.start_io_in(slots, hint)
}

/// Starts the clock.
///
/// # Safety
/// `mapping` points to a `Shared` that is never unmapped.
pub unsafe fn set_shared(mapping: *mut Shared) {
    SHARED.store(mapping, Ordering::Release);
}

/// Puts memory of this process in the place of the shared memory: zeros. Whether that worked.
pub fn replace_shared() -> bool {
    let mapping = SHARED.load(Ordering::Acquire);
    if mapping.is_null() {
        return true;
    }
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: `attach::map_shared` mapped so many bytes there, which are never unmapped. All bits of its fields, which are atomics, may be
    // zero.
    let replaced = unsafe { real::mmap(mapping.cast(), size_of::<Shared>(), protection, flags, -1, 0) };
    replaced != libc::MAP_FAILED
}

/// What the tests of this module share.
#[cfg(test)]
pub mod testing {
    use std::sync::atomic::AtomicU64;

    use super::table::Table;
    use pagoda_abi::shared::{SHARED_MAGIC, Shared};
    use pagoda_core::chance::Chance;

    /// Shared memory as the daemon makes it, with no transfer in flight.
    pub fn shared() -> Box<Shared> {
        // SAFETY: a struct of atomics: all zero bits are a valid value.
        let mut shared: Box<Shared> = unsafe { Box::new_zeroed().assume_init() };
        shared.magic = AtomicU64::new(SHARED_MAGIC);
        shared.epoch = AtomicU64::new(1);
        shared
    }

    /// An empty table on the heap: it is too big for a test's stack in a debug build.
    pub fn boxed_table() -> Box<Table> {
        // SAFETY: `Table::EMPTY` is all zero bits (`Held`), and so are valid numbers.
        unsafe { Box::new_zeroed().assume_init() }
    }

    /// Numbers from a seed.
    pub struct Rng(Chance);

    impl Rng {
        pub fn new(seed: u64) -> Rng {
            Rng(Chance::new(seed))
        }

        /// The next number below `end`.
        pub fn below(&mut self, end: u64) -> u64 {
            self.0.draw() % end
        }
    }
}
