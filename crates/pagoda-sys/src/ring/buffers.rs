//! Bounce buffers of a ring: page-aligned, locked when the limit allows it, registered with the kernel.
//!
//! A buffer's bytes can be seen only while no I/O runs on it: a count of operations in flight says so, and the borrow
//! of the ring keeps new ones from starting meanwhile.

use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

use super::error::RingError;
use crate::PAGE_SIZE;

/// One of a ring's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(u16);

/// A part of a buffer, for I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSlice {
    /// The slice is of this buffer.
    pub id: BufferId,
    /// The slice begins at this byte of the buffer.
    pub offset: u32,
    /// The slice has so many bytes.
    pub len: u32,
}

/// This is what is known of one buffer.
#[derive(Clone, Copy, Debug)]
struct State {
    /// The buffer begins at this byte of the area.
    start: usize,
    /// The buffer has so many bytes.
    size: usize,
    taken: bool,
    /// So many operations on the buffer are in flight.
    busy: u32,
}

/// A set of buffers, of a few sizes.
#[derive(Debug)]
pub struct Buffers {
    base: *mut u8,
    total: usize,
    states: Vec<State>,
    /// Free buffers of each size, in ascending order of size.
    free: Vec<(usize, Vec<BufferId>)>,
    pub(super) registered: bool,
}

impl Buffers {
    /// Zeroed buffers: for each `(count, size)` so many of so many bytes.
    ///
    /// # Errors
    /// EINVAL unless counts are positive, sizes whole pages and ascending; ENOMEM.
    pub fn new(classes: &[(u16, usize)]) -> Result<Buffers, RingError> {
        let os = |what| move |source| RingError::Os { what, source };
        let invalid = || os("sizes of I/O buffers")(rustix::io::Errno::INVAL);
        let (mut states, mut free, mut total) = (Vec::new(), Vec::new(), 0_usize);
        for &(count, size) in classes {
            let first = u16::try_from(states.len()).map_err(|_| invalid())?;
            let ascending = free.last().is_none_or(|(smaller, _)| *smaller < size);
            if count == 0 || size == 0 || size % PAGE_SIZE != 0 || !ascending {
                return Err(invalid());
            }
            let ids = first..first.checked_add(count).ok_or_else(invalid)?;
            for _ in ids.clone() {
                states.push(State { start: total, size, taken: false, busy: 0 });
                total = total.checked_add(size).ok_or_else(invalid)?;
            }
            free.push((size, ids.rev().map(BufferId).collect()));
        }
        if total == 0 {
            return Err(invalid());
        }
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::POPULATE);
        // SAFETY: mmap(2) without MAP_FIXED takes unused addresses only.
        let base = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), total, prot, flags) };
        let base: *mut u8 = base.map_err(os("map I/O buffers"))?.cast();
        // Locking only spares page faults when the host swaps: without the right to it, go on.
        // SAFETY: mlock(2) needs a mapped range: it is the one just made. Its content does not change.
        let _ = unsafe { rustix::mm::mlock(base.cast(), total) };
        Ok(Buffers { base, total, states, free, registered: false })
    }

    pub(super) fn area(&self) -> libc::iovec {
        libc::iovec { iov_base: self.base.cast(), iov_len: self.total }
    }

    /// Free buffers of at least `size` bytes.
    pub(super) fn free(&self, size: usize) -> usize {
        self.free.iter().filter(|(class, _)| *class >= size).map(|(_, free)| free.len()).sum()
    }

    /// The smallest free buffer of at least `size` bytes.
    pub(super) fn take(&mut self, size: usize) -> Option<BufferId> {
        let id = self.free.iter_mut().filter(|(class, _)| *class >= size).find_map(|(_, free)| free.pop())?;
        self.states[usize::from(id.0)].taken = true;
        Some(id)
    }

    pub(super) fn give(&mut self, id: BufferId) -> bool {
        let idle = self.idle(id);
        if idle {
            let state = &mut self.states[usize::from(id.0)];
            state.taken = false;
            let size = state.size;
            if let Some((_, free)) = self.free.iter_mut().find(|(class, _)| *class == size) {
                free.push(id);
            }
        }
        idle
    }

    pub(super) fn bytes(&self, id: BufferId) -> Option<&[u8]> {
        if !self.idle(id) {
            return None;
        }
        // SAFETY: from_raw_parts needs initialised memory that nobody writes while the slice lives: the mapping is
        // zero-filled, buffer `id` lies in it (`idle` checked the index), no I/O is in flight on it, and none can start
        // nor can `bytes_mut` be called while `self` is borrowed.
        Some(unsafe { std::slice::from_raw_parts(self.start(id), self.size(id)) })
    }

    pub(super) fn bytes_mut(&mut self, id: BufferId) -> Option<&mut [u8]> {
        if !self.idle(id) {
            return None;
        }
        // SAFETY: as in `bytes`; the exclusive borrow of `self` excludes every other slice.
        Some(unsafe { std::slice::from_raw_parts_mut(self.start(id), self.size(id)) })
    }

    pub(super) fn fill(&mut self, slice: &BufferSlice, content: &[u8]) -> bool {
        let Some(to) = self.addr_of(slice).filter(|_| content.len() == slice.len as usize) else { return false };
        // SAFETY: copy_nonoverlapping needs `content.len()` bytes on both sides that do not overlap: `addr_of` checked that the
        // slice lies in a taken buffer of ours, and `content` is no part of one, as `bytes` and `bytes_mut` borrow `self`. The
        // kernel may write to the same bytes only if the caller asked it to: then either content may be found.
        unsafe { ptr::copy_nonoverlapping(content.as_ptr(), to, content.len()) };
        true
    }

    /// Where the slice starts; `None` unless it lies in a taken buffer.
    pub(super) fn addr_of(&self, slice: &BufferSlice) -> Option<*mut u8> {
        let state = self.states.get(usize::from(slice.id.0))?;
        let end = slice.offset as usize + slice.len as usize;
        (state.taken && slice.len > 0 && end <= state.size)
            .then(|| self.start(slice.id).wrapping_add(slice.offset as usize))
    }

    pub(super) fn start_io(&mut self, id: BufferId) {
        self.states[usize::from(id.0)].busy += 1;
    }

    pub(super) fn finish_io(&mut self, id: BufferId) {
        self.states[usize::from(id.0)].busy -= 1;
    }

    fn idle(&self, id: BufferId) -> bool {
        self.states.get(usize::from(id.0)).is_some_and(|state| state.taken && state.busy == 0)
    }

    fn size(&self, id: BufferId) -> usize {
        self.states[usize::from(id.0)].size
    }

    fn start(&self, id: BufferId) -> *mut u8 {
        self.base.wrapping_add(self.states[usize::from(id.0)].start)
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        // SAFETY: munmap(2) needs memory nobody uses: slices borrow `self`, and a ring drops its buffers only when no
        // I/O is in flight.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.total) };
    }
}
