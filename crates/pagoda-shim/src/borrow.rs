//! What a clone borrows: the template of its snapshot is mapped in the place of RAM, until the daemon has RAM moved there.
//!
//! The template is mapped before RAM is handed over, so nobody has touched that place. RAM is mapped a second time, without
//! access, and pieces of it are moved to where they belong, one order of the daemon after the other. mremap(2) waits until the
//! daemon has heard of it from a userfaultfd, and the agent has to hand those to the next daemon if this one dies: so a thread
//! of its own moves, and holds no lock meanwhile.
//!
//! A page that the VMM has written there is its own, in no file. What would drop it is refused: zaps of the daemon's, which knows
//! better, and advice of the VMM's, which is a hint for RAM.
//!
//! What the guest sees when a move fails: nothing, unless the kernel has unmapped the template already. Then its next access
//! ends the VMM.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use pagoda_abi::attach::Packet;
use pagoda_abi::template::{ENTRY, TRAILER, slots, table_at};
use pagoda_abi::{CHUNK_SIZE, REGIONS_MAX};

use crate::config::{Config, RamFile, config};
use crate::say::give_up;
use crate::{agent, clock, foreign, hooks, link, ram, real};

/// Chunks of a VM that can be borrowed: 4 TiB. What comes behind them is RAM as in any VM.
const CHUNKS_MAX: usize = 4 << 20;
/// Entries of the table read at once.
const ENTRIES: usize = 256;

/// Chunks whose place maps the template, a bit each. Static memory that is not used costs nothing.
static LENT: [AtomicU64; CHUNKS_MAX / 64] = [const { AtomicU64::new(0) }; CHUNKS_MAX / 64];
/// Any of them is.
static IS_GIVEN: AtomicBool = AtomicBool::new(false);
/// Where each region's RAM is mapped a second time.
static SPARE: [AtomicUsize; REGIONS_MAX] = [const { AtomicUsize::new(0) }; REGIONS_MAX];
/// A move is being done.
static IS_MOVING: AtomicBool = AtomicBool::new(false);

/// What the daemon wants moved.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    pub number: u64,
    pub region: u32,
    pub offset: u64,
    pub len: u64,
}

static ORDER: Mutex<Option<Order>> = Mutex::new(None);
static ORDERED: Condvar = Condvar::new();

/// This VM has a template: its memory may have pages that are in no file.
pub fn is_given() -> bool {
    IS_GIVEN.load(Ordering::Acquire)
}

/// Where a template belongs: the region of a chunk, and its offset in that.
fn place(ram: &[RamFile], chunk: u64) -> Option<(usize, u64)> {
    let mut at = chunk.checked_mul(CHUNK_SIZE as u64)?;
    for (region, file) in ram.iter().enumerate() {
        if at < file.len {
            return Some((region, at));
        }
        at -= file.len;
    }
    None
}

/// The chunk at the beginning of a region.
fn first_chunk(ram: &[RamFile], region: usize) -> u64 {
    ram[..region].iter().map(|file| file.len / CHUNK_SIZE as u64).sum()
}

/// Maps the template. All of RAM is mapped, without access, and nobody has it yet.
pub fn map(config: &Config, template: c_int) {
    let Some(count) = count_slots(template) else {
        give_up(format_args!("attach: what the daemon gave as a template is none; install matching pagoda packages"));
    };
    for (region, file) in config.ram().iter().enumerate() {
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let spare = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
            real::mmap(null_mut(), file.len as usize, libc::PROT_NONE, flags, file.fd, 0)
        };
        if spare == libc::MAP_FAILED {
            give_up(format_args!("attach: RAM cannot be mapped a second time, for want of address space"));
        }
        ram::advise(spare as usize, file.len as usize, libc::MADV_DONTFORK);
        SPARE[region].store(spare as usize, Ordering::Release);
    }
    let mut run = Run::default();
    let mut slot = 0;
    while slot < count {
        let mut entries = [0; ENTRIES * ENTRY];
        let wanted = (count - slot).min(ENTRIES as u32) as usize * ENTRY;
        if !read_at(template, &mut entries[..wanted], table_at(count) + u64::from(slot) * ENTRY as u64) {
            give_up(format_args!("attach: the template of the VM's snapshot cannot be read"));
        }
        for entry in entries[..wanted].chunks_exact(ENTRY) {
            let chunk = u64::from(u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]));
            let Some((region, offset)) = place(config.ram(), chunk).filter(|_| chunk < CHUNKS_MAX as u64) else {
                slot += 1;
                continue;
            };
            if !run.grow(region, offset, slot) {
                run.map(template);
                run = Run { region, offset, slot, chunks: 1 };
            }
            LENT[chunk as usize / 64].fetch_or(1 << (chunk % 64), Ordering::SeqCst);
            slot += 1;
        }
    }
    run.map(template);
    IS_GIVEN.store(true, Ordering::Release);
    agent::start_thread(mover, null_mut());
}

fn count_slots(template: c_int) -> Option<u32> {
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: fstat(2) fills the structure it is given; a bad fd is an error.
    if unsafe { libc::fstat(template, &mut stat) } != 0 {
        return None;
    }
    let (len, mut end) = (stat.st_size as u64, [0; TRAILER]);
    let at = len.checked_sub(TRAILER as u64)?;
    read_at(template, &mut end, at).then(|| slots(len, &end)).flatten()
}

fn read_at(fd: c_int, into: &mut [u8], offset: u64) -> bool {
    // SAFETY: pread(2) writes at most as many bytes as the slice has.
    let got = unsafe { real::pread(fd, into.as_mut_ptr().cast(), into.len(), offset as i64) };
    got == into.len() as isize
}

/// Chunks next to one another, in RAM and in the template.
#[derive(Clone, Copy, Default)]
struct Run {
    region: usize,
    offset: u64,
    slot: u32,
    chunks: u32,
}

impl Run {
    /// Whether this chunk is the next one, and belongs to it now.
    fn grow(&mut self, region: usize, offset: u64, slot: u32) -> bool {
        let end = self.offset + u64::from(self.chunks) * CHUNK_SIZE as u64;
        let is_next = region == self.region && offset == end && slot == self.slot + self.chunks;
        if self.chunks > 0 && is_next {
            self.chunks += 1;
            return true;
        }
        false
    }

    fn map(&self, template: c_int) {
        if self.chunks == 0 {
            return;
        }
        let (addr, len) = (ram::mapping(self.region), self.chunks as usize * CHUNK_SIZE);
        let Some((addr, _)) = addr else {
            give_up(format_args!("attach: RAM was unmapped while it was being attached"));
        };
        let to = (addr + self.offset as usize) as *mut c_void;
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: it replaces a part of RAM's mapping, which `place` found inside of its region and which nobody may access yet.
        let mapped = unsafe {
            real::mmap(to, len, libc::PROT_NONE, flags, template, u64::from(self.slot) as i64 * CHUNK_SIZE as i64)
        };
        if mapped != to {
            give_up(format_args!("attach: the template of the VM's snapshot cannot be mapped"));
        }
        ram::advise(to as usize, len, libc::MADV_DONTFORK);
        // The kernel would take pages of equal content together, and the marks of protection with them.
        ram::advise(to as usize, len, libc::MADV_UNMERGEABLE);
    }
}

/// Whether a part of this range maps the template.
pub fn is_lent(addr: usize, len: usize) -> bool {
    if !is_given() {
        return false;
    }
    let Some(config) = config() else { return false };
    let Some((region, offset, len)) = ram::overlap(addr, len) else { return false };
    let first = first_chunk(config.ram(), region);
    let chunks = offset / CHUNK_SIZE..=(offset + len - 1) / CHUNK_SIZE;
    chunks.into_iter().any(|chunk| is_lent_chunk(first + chunk as u64))
}

/// Whether any of the VM's memory does.
pub fn is_any_lent() -> bool {
    is_given() && LENT.iter().any(|word| word.load(Ordering::SeqCst) != 0)
}

fn is_lent_chunk(chunk: u64) -> bool {
    let word = LENT.get(chunk as usize / 64).map_or(0, |word| word.load(Ordering::SeqCst));
    word >> (chunk % 64) & 1 == 1
}

/// A move is being done: what is mapped where must not change.
pub fn is_moving() -> bool {
    IS_MOVING.load(Ordering::SeqCst)
}

/// Has an order carried out. One that was not begun is forgotten: its daemon is gone.
pub fn order(order: Order) {
    *ORDER.lock().unwrap_or_else(PoisonError::into_inner) = Some(order);
    ORDERED.notify_one();
}

extern "C" fn mover(_: *mut c_void) -> *mut c_void {
    // SAFETY: PR_SET_NAME reads a NUL-terminated name of at most 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pagoda-mover".as_ptr()) };
    let Some(config) = config() else { return null_mut() };
    loop {
        let mut slot = ORDER.lock().unwrap_or_else(PoisonError::into_inner);
        let order = loop {
            match slot.take() {
                Some(order) => break order,
                None => slot = ORDERED.wait(slot).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(slot);
        let errno = carry_out(config, &order).err().unwrap_or(0);
        // A daemon that is away looks by itself what became of it.
        foreign::say(&Packet::Owned { order: order.number, errno: errno as u32 });
    }
}

/// Moves a piece of RAM to its place, if the order still stands. An errno.
fn carry_out(config: &Config, order: &Order) -> Result<(), c_int> {
    let &Order { number, region, offset, len } = order;
    let (region, size) = (region as usize, CHUNK_SIZE as u64);
    let file = config.ram().get(region).ok_or(libc::EINVAL)?;
    let is_inside = offset.checked_add(len).is_some_and(|end| end <= file.len);
    if !is_inside || len == 0 || !offset.is_multiple_of(size) || !len.is_multiple_of(size) {
        return Err(libc::EINVAL);
    }
    let first = first_chunk(config.ram(), region) + offset / size;
    if !(first..first + len / size).all(is_lent_chunk) {
        return Err(libc::EINVAL);
    }
    let shared = clock::shared().ok_or(libc::EINVAL)?;
    let spare = SPARE[region].load(Ordering::Acquire) + offset as usize;
    // Until it is done nothing of RAM is unmapped: see `ram::forget`.
    let start = ram::while_mapped(region, || IS_MOVING.store(true, Ordering::SeqCst)).ok_or(libc::EINVAL)?;
    let to = start + offset as usize;
    let moved = (|| {
        let wanted = hooks::wanted_protection(region);
        // SAFETY: the piece is of the spare mapping of this region, which nobody else uses; with access it is RAM that nobody
        // has an address of.
        if unsafe { libc::mprotect(spare as *mut c_void, len as usize, wanted) } != 0 {
            return Err(link::errno());
        }
        if !shared.begin_move(number) {
            return Err(libc::ECANCELED);
        }
        // SAFETY: source and target are whole chunks of mappings that stay meanwhile (`IS_MOVING`): the spare one, which nobody
        // uses, and RAM's place, where the template is mapped and protected. The daemon has seen to it that the piece has what
        // the place has, and answers for what the guest finds there.
        let moved = unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            real::mremap(spare as *mut c_void, len as usize, len as usize, flags, to as *mut c_void)
        };
        let result = if moved == libc::MAP_FAILED { Err(link::errno()) } else { Ok(()) };
        if result.is_ok() {
            for chunk in first..first + len / size {
                LENT[chunk as usize / 64].fetch_and(!(1 << (chunk % 64)), Ordering::SeqCst);
            }
        }
        shared.end_move();
        result
    })();
    if moved.is_err() {
        // SAFETY: as above; a piece that is not mapped any more is an error that changes nothing.
        unsafe { libc::mprotect(spare as *mut c_void, len as usize, libc::PROT_NONE) };
    }
    IS_MOVING.store(false, Ordering::SeqCst);
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_next_to_one_another_are_mapped_at_once() {
        let mib = CHUNK_SIZE as u64;
        let mut run = Run::default();
        assert!(!run.grow(0, 0, 0), "there is none yet");
        run = Run { region: 0, offset: 4 * mib, slot: 7, chunks: 1 };
        assert!(run.grow(0, 5 * mib, 8) && run.chunks == 2);
        for (region, offset, slot) in [(1, 6 * mib, 9), (0, 7 * mib, 9), (0, 6 * mib, 10)] {
            assert!(!run.grow(region, offset, slot), "{region} {offset} {slot}");
        }
    }
}
