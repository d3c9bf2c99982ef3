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
use std::sync::atomic::{AtomicUsize, Ordering};

use pagoda_abi::attach::Packet;
use pagoda_abi::template::{ENTRY, TRAILER, slots, table_at};
use pagoda_abi::{CHUNK_SIZE, REGIONS_MAX};

use crate::config::{Config, RamFile, config};
use crate::orders::{self, Order};
use crate::say::give_up;
use crate::{agent, clock, foreign, lent, link, ram, real};

/// Entries of the table read at once.
const ENTRIES: usize = 256;

/// Where each region's RAM is mapped a second time.
static SPARE: [AtomicUsize; REGIONS_MAX] = [const { AtomicUsize::new(0) }; REGIONS_MAX];
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
            let Some((region, offset)) = place(config.ram(), chunk).filter(|_| chunk < lent::CHUNKS_MAX as u64) else {
                slot += 1;
                continue;
            };
            if !run.grow(region, offset, slot) {
                run.map(template);
                run = Run { region, offset, slot, chunks: 1 };
            }
            lent::lend(chunk);
            slot += 1;
        }
    }
    run.map(template);
    lent::set_given();
    foreign::template_given();
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

extern "C" fn mover(_: *mut c_void) -> *mut c_void {
    // SAFETY: PR_SET_NAME reads a NUL-terminated name of at most 16 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"pagoda-mover".as_ptr()) };
    let Some(config) = config() else { return null_mut() };
    loop {
        let order = orders::next();
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
    let first = lent::first_chunk(config.ram(), region) + offset / size;
    if !(first..first + len / size).all(lent::is_lent_chunk) {
        return Err(libc::EINVAL);
    }
    let shared = clock::shared().ok_or(libc::EINVAL)?;
    let spare = SPARE[region].load(Ordering::Acquire) + offset as usize;
    // Until it is done nothing of RAM is unmapped: see `ram::forget`.
    let start = ram::while_mapped(region, || lent::set_moving(true)).ok_or(libc::EINVAL)?;
    let to = start + offset as usize;
    let moved = (|| {
        let wanted = ram::wanted_protection(region);
        // SAFETY: the piece is of the spare mapping of this region, which nobody else uses; with access it is RAM that nobody
        // has an address of.
        if unsafe { libc::mprotect(spare as *mut c_void, len as usize, wanted) } != 0 {
            return Err(link::errno());
        }
        if !shared.begin_move(number) {
            return Err(libc::ECANCELED);
        }
        // SAFETY: source and target are whole chunks of mappings that stay meanwhile (`lent::is_moving`): the spare one, which nobody
        // uses, and RAM's place, where the template is mapped and protected. The daemon has seen to it that the piece has what
        // the place has, and answers for what the guest finds there.
        let moved = unsafe {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            real::mremap(spare as *mut c_void, len as usize, len as usize, flags, to as *mut c_void)
        };
        let result = if moved == libc::MAP_FAILED { Err(link::errno()) } else { Ok(()) };
        if result.is_ok() {
            (first..first + len / size).for_each(lent::end);
        }
        shared.end_move();
        result
    })();
    if moved.is_err() {
        // SAFETY: as above; a piece that is not mapped any more is an error that changes nothing.
        unsafe { libc::mprotect(spare as *mut c_void, len as usize, libc::PROT_NONE) };
    }
    lent::set_moving(false);
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
