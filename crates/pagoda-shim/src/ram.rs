//! Where guest RAM is mapped.
//!
//! Written by the hooks of mmap(2) and munmap(2), read by every hook and by the agent. Reading takes no lock: a region is
//! published by its address, and there are at most [`REGIONS_MAX`] of them, or [`MAPS_MAX`] mappings in a mapper.
//! A zap and the end of a mapping exclude each other ([`pinned`], [`forget`]): a zap that came late would empty whatever
//! the VMM mapped there next.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagoda_abi::attach::{MAPS_MAX, Range};
use pagoda_abi::{PAGE_SIZE, REGIONS_MAX};

use crate::{lent, real};

/// Most elements of an iovec array (`UIO_MAXIOV`): the kernel refuses longer ones unread.
const IOV_MAX: usize = 1024;

/// Between two looks whether a move is over, for which a thread that unmaps RAM waits.
const MOVE_PAUSE: Duration = Duration::from_millis(1);

struct Mapping {
    /// The first address of the mapping; 0: there is none.
    addr: AtomicUsize,
    len: AtomicUsize,
}

/// By region in a VMM, which maps each once; by their own numbers in a mapper.
static MAPPINGS: [Mapping; MAPS_MAX] =
    [const { Mapping { addr: AtomicUsize::new(0), len: AtomicUsize::new(0) } }; MAPS_MAX];
/// How many of them this process may use: each hook looks at all of these.
static USABLE: AtomicUsize = AtomicUsize::new(REGIONS_MAX);
/// How often RAM was mapped or unmapped, so that a process without RAM is known by one load.
static MAPPED: AtomicU64 = AtomicU64::new(0);
/// The protection that the VMM wants for each region. Until the VM is attached its RAM has none, so that no page of it
/// is used before it is managed.
static WANTED: [AtomicI32; REGIONS_MAX] = [const { AtomicI32::new(libc::PROT_NONE) }; REGIONS_MAX];
static LAYOUT: Mutex<()> = Mutex::new(());

fn lock_layout() -> MutexGuard<'static, ()> {
    LAYOUT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same when nothing is being moved. That may wait for a daemon that is away, which needs the agent, which needs the lock: so
/// it is not held meanwhile.
fn lock_layout_at_rest() -> MutexGuard<'static, ()> {
    loop {
        let layout = lock_layout();
        if !lent::is_moving() {
            return layout;
        }
        drop(layout);
        std::thread::sleep(MOVE_PAUSE);
    }
}

/// This process is a mapper, which maps RAM in parts.
pub fn allow_many() {
    USABLE.store(MAPS_MAX, Ordering::SeqCst);
}

fn usable() -> std::ops::Range<usize> {
    0..USABLE.load(Ordering::Relaxed)
}

/// Region `index` is now mapped at `addr`.
pub fn set_mapped(index: usize, addr: usize, len: usize) {
    MAPPINGS[index].len.store(len, Ordering::SeqCst);
    MAPPINGS[index].addr.store(addr, Ordering::SeqCst);
    MAPPED.fetch_add(1, Ordering::SeqCst);
}

/// Address and length of a region, if it is mapped.
pub fn mapping(index: usize) -> Option<(usize, usize)> {
    let addr = MAPPINGS[index].addr.load(Ordering::SeqCst);
    (addr != 0).then(|| (addr, MAPPINGS[index].len.load(Ordering::SeqCst)))
}

/// The first region that this range overlaps, and the part of it, as an offset and a length.
pub fn overlap(addr: usize, len: usize) -> Option<(usize, usize, usize)> {
    if MAPPED.load(Ordering::Acquire) == 0 || len == 0 {
        return None;
    }
    usable().find_map(|index| {
        let (start, size) = mapping(index)?;
        let from = addr.max(start);
        let to = addr.saturating_add(len).min(start + size);
        (from < to).then(|| (index, from - start, to - from))
    })
}

/// Whether a part of this range maps the template of the VM's snapshot.
pub fn is_lent(addr: usize, len: usize) -> bool {
    lent::is_given() && overlap(addr, len).is_some_and(|(region, offset, len)| lent::is_lent(region, offset, len))
}

/// The VMM wants a region to have this protection.
pub fn set_wanted_protection(region: usize, protection: c_int) {
    WANTED[region].store(protection, Ordering::Relaxed);
}

/// The protection that the VMM wants for a region.
pub fn wanted_protection(region: usize) -> c_int {
    WANTED[region].load(Ordering::Relaxed)
}

/// Whether this process has, or had, RAM at all.
pub fn is_mapped() -> bool {
    MAPPED.load(Ordering::Acquire) != 0
}

/// Whether a buffer lies in guest RAM, at least in part.
pub fn overlaps(addr: usize, len: usize) -> bool {
    overlap(addr, len).is_some()
}

/// Whether one of the buffers does.
///
/// # Safety
/// `iov` is null or an array of `count` elements, as every system call that takes it demands.
pub unsafe fn any_overlaps(iov: *const libc::iovec, count: usize) -> bool {
    if MAPPED.load(Ordering::Acquire) == 0 || iov.is_null() || count > IOV_MAX {
        return false;
    }
    // SAFETY: an array of `count` elements (caller).
    let buffers = unsafe { std::slice::from_raw_parts(iov, count) };
    buffers.iter().any(|buffer| overlaps(buffer.iov_base as usize, buffer.iov_len))
}

/// Runs `work` if a region is mapped, which it is until then. Its address.
pub fn while_mapped(region: usize, work: impl FnOnce()) -> Option<usize> {
    let _layout = lock_layout();
    let (addr, _) = mapping(region)?;
    work();
    Some(addr)
}

/// Runs `work` if every range consists of whole pages of guest RAM, and keeps RAM mapped meanwhile.
pub fn pinned<R>(ranges: &[Range], work: impl FnOnce() -> R) -> Option<R> {
    let _layout = lock_layout();
    let page = PAGE_SIZE as u64;
    let inside = |range: &Range| {
        let whole = range.addr.is_multiple_of(page) && range.len.is_multiple_of(page) && range.len > 0;
        // What is borrowed has pages that are in no file.
        let is_ram =
            overlap(range.addr as usize, range.len as usize).is_some_and(|(_, _, len)| len as u64 == range.len);
        whole && is_ram && !is_lent(range.addr as usize, range.len as usize)
    };
    ranges.iter().all(inside).then(work)
}

/// Does something with each mapping of guest RAM: its address and length.
pub fn for_each_mapping(mut work: impl FnMut(usize, usize)) {
    usable().filter_map(mapping).for_each(|(addr, len)| work(addr, len));
}

/// Runs `work`, which ends the mapping of this range, with the regions in it forgotten.
pub fn forget<R>(addr: usize, len: usize, work: impl FnOnce() -> R) -> R {
    let _layout = lock_layout_at_rest();
    while let Some((index, ..)) = overlap(addr, len) {
        MAPPINGS[index].addr.store(0, Ordering::SeqCst);
    }
    work()
}

/// Gives the kernel advice about RAM that is no more than a hint.
pub fn advise(addr: usize, len: usize, advice: c_int) {
    // SAFETY: the range is a mapping of RAM; the advice used here (DONTFORK, HUGEPAGE) keeps its contents.
    unsafe { real::madvise(addr as *mut _, len, advice) };
}

/// The whole pages inside a range, as an offset and a length; a length of 0 if there are none.
pub fn whole_pages(offset: u64, len: u64) -> (u64, u64) {
    let page = PAGE_SIZE as u64;
    let start = offset.next_multiple_of(page);
    let end = (offset + len) / page * page;
    (start, end.saturating_sub(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table is the process's, so one test walks through its life.
    #[test]
    fn regions_come_are_found_and_go() {
        const ADDR: usize = 0x7000_0000_0000;
        const LEN: usize = 1 << 21;
        set_mapped(0, ADDR, LEN);
        set_mapped(1, ADDR + 4 * LEN, LEN);
        let table = [
            (ADDR, LEN, Some((0, 0, LEN))),
            (ADDR - 10, 11, Some((0, 0, 1))),
            (ADDR - 10, 10, None),
            (ADDR + LEN - 1, 100, Some((0, LEN - 1, 1))),
            (ADDR + LEN, 1, None),
            (ADDR + 4 * LEN + 5, 7, Some((1, 5, 7))),
            (ADDR + 5, 0, None),
            (usize::MAX - 5, usize::MAX, None),
        ];
        for (addr, len, expected) in table {
            assert_eq!(overlap(addr, len), expected, "{addr:#x} {len:#x}");
        }
        let range = |addr: usize, len: usize| Range { addr: addr as u64, len: len as u64 };
        let good = range(ADDR + 4096, 8192);
        for bad in [range(ADDR + 1, 4096), range(ADDR, 5), range(ADDR + LEN - 4096, 8192), range(ADDR, 0)] {
            assert_eq!(pinned(&[good, bad], || 1), None, "{bad:?}");
        }
        assert_eq!(pinned(&[good], || 1), Some(1));
        assert_eq!(forget(ADDR, LEN, || 2), 2);
        assert_eq!(pinned(&[good], || 1), None, "what is unmapped is not zapped");
        assert!(overlaps(ADDR + 4 * LEN, 1));
    }

    #[test]
    fn only_whole_pages_are_given_back() {
        let table = [
            (0, 4096, (0, 4096)),
            (1, 4096, (4096, 0)),
            (1, 8191, (4096, 4096)),
            (4095, 4098, (4096, 4096)),
            (5, 9, (4096, 0)),
        ];
        for (offset, len, expected) in table {
            assert_eq!(whole_pages(offset, len), expected, "{offset} {len}");
        }
    }
}
