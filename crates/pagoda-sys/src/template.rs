//! The template of a snapshot: memory that the VMMs of its clones map privately, and that nobody can change
//! (`pagoda_abi::template` has its layout).
//!
//! A [`Draft`] is filled by one thread, all of it, and becomes a [`Template`] when it is sealed. Nobody else has a descriptor of
//! it before that. A template that a VMM hands back is believed to be one only as far as its seals go: they say that it cannot
//! change, and not what it holds.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use pagoda_abi::CHUNK_SIZE;
use pagoda_abi::template::{ENTRY, TRAILER, len_of, slots, table_at, trailer};
use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::PAGE_SIZE;
use crate::ram::{RamError, TMPFS_MAGIC};

/// Nobody can write to it, make it shorter or longer, punch it, or take a seal off (fcntl(2), "File Sealing").
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> RamError {
    move |source| RamError::Os { what, source }
}

fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> RamError {
    move |error| RamError::Os {
        what,
        source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO),
    }
}

/// A template that is being filled.
#[derive(Debug)]
pub struct Draft {
    file: std::fs::File,
    chunks: Vec<u32>,
    /// Chunks written so far.
    filled: u32,
}

impl Draft {
    /// Of these chunks, by their index in the VM's space, in ascending order.
    ///
    /// # Errors
    /// EMFILE, ENOMEM, EINVAL if the chunks are not in order.
    pub fn create(name: &str, chunks: Vec<u32>) -> Result<Draft, RamError> {
        if !chunks.is_sorted_by(|a, b| a < b) {
            return Err(os("make a template of chunks that are not in order")(rustix::io::Errno::INVAL));
        }
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(os("create template"))?;
        rustix::fs::ftruncate(&fd, len_of(chunks.len() as u32)).map_err(os("set size of template"))?;
        Ok(Draft { file: fd.into(), chunks, filled: 0 })
    }

    /// The chunks, by slot.
    pub fn chunks(&self) -> &[u32] {
        &self.chunks
    }

    /// Bytes of DRAM that it takes when it is filled.
    pub fn bytes(&self) -> u64 {
        len_of(self.chunks.len() as u32)
    }

    /// Writes the chunk of the next slot.
    ///
    /// # Errors
    /// ENOMEM, ENOSPC; EINVAL if there is no next slot, or if this is no chunk.
    pub fn push(&mut self, content: &[u8]) -> Result<(), RamError> {
        if content.len() != CHUNK_SIZE || self.filled as usize == self.chunks.len() {
            return Err(os("fill a template with something else than its chunks")(rustix::io::Errno::INVAL));
        }
        self.file.write_all_at(content, table_at(self.filled)).map_err(io("fill template"))?;
        self.filled += 1;
        Ok(())
    }

    /// Seals it. From now on others may have it.
    ///
    /// # Errors
    /// As [`Draft::push`]; EINVAL if it is not filled.
    pub fn seal(self) -> Result<Template, RamError> {
        if self.filled as usize != self.chunks.len() {
            return Err(os("seal a template that is not filled")(rustix::io::Errno::INVAL));
        }
        let count = self.filled;
        let mut tail = vec![0; (len_of(count) - table_at(count)) as usize];
        for (entry, chunk) in tail.chunks_exact_mut(ENTRY).zip(&self.chunks) {
            entry.copy_from_slice(&chunk.to_le_bytes());
        }
        let at = tail.len() - TRAILER;
        tail[at..].copy_from_slice(&trailer(count));
        self.file.write_all_at(&tail, table_at(count)).map_err(io("fill template"))?;
        rustix::fs::fchmod(&self.file, Mode::RUSR).map_err(os("set mode of template"))?;
        rustix::fs::fcntl_add_seals(&self.file, SEALS).map_err(os("seal template"))?;
        Template::from_fd(self.file.into(), count)
    }
}

/// A sealed template and our mapping of it.
#[derive(Debug)]
pub struct Template {
    fd: OwnedFd,
    inode: (u64, u64),
    chunks: Vec<u32>,
    addr: *mut u8,
    len: usize,
}

// SAFETY: `Template` is a mapping that it alone unmaps, of a file that nobody can change: it is memory that is only read.
unsafe impl Send for Template {}
// SAFETY: as above.
unsafe impl Sync for Template {}

impl Drop for Template {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: munmap(2) needs a range that nobody uses any more: it was mapped by `from_fd` with this length, and slices
            // of it borrow `self`.
            let _ = unsafe { rustix::mm::munmap(self.addr.cast(), self.len) };
        }
    }
}

impl Template {
    /// Takes over what is said to be a template, of at most so many chunks.
    ///
    /// # Errors
    /// [`RamError::NotRam`] unless it is a memfd that is sealed as a template is, with a table of chunks in order.
    pub fn from_fd(fd: OwnedFd, chunks_max: u32) -> Result<Template, RamError> {
        let not = |what: &str| Err(RamError::NotRam { what: what.to_owned() });
        let kind = rustix::fs::fstatfs(&fd).map_err(os("statfs template"))?.f_type as u64;
        if kind != TMPFS_MAGIC {
            return not("a template that is not in memory");
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(os("read seals of template"))?;
        if !seals.contains(SEALS) {
            return not("a template that could be changed");
        }
        let stat = rustix::fs::fstat(&fd).map_err(os("stat template"))?;
        let (file, len) = (std::fs::File::from(fd), stat.st_size as u64);
        let mut end = [0; TRAILER];
        let Some(at) = len.checked_sub(TRAILER as u64) else { return not("an empty template") };
        file.read_exact_at(&mut end, at).map_err(io("read template"))?;
        let Some(count) = slots(len, &end).filter(|count| *count <= chunks_max) else {
            return not("a template without a table");
        };
        let mut table = vec![0; count as usize * ENTRY];
        file.read_exact_at(&mut table, table_at(count)).map_err(io("read template"))?;
        let chunks: Vec<u32> =
            table.chunks_exact(ENTRY).map(|entry| u32::from_le_bytes(entry.try_into().unwrap_or_default())).collect();
        if !chunks.is_sorted_by(|a, b| a < b) {
            return not("a template whose chunks are not in order");
        }
        let len = table_at(count) as usize;
        let mut template =
            Template { fd: file.into(), inode: (stat.st_dev, stat.st_ino), chunks, addr: ptr::null_mut(), len: 0 };
        if len > 0 {
            // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
            let addr =
                unsafe { rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, &template.fd, 0) };
            (template.addr, template.len) = (addr.map_err(os("map template"))?.cast(), len);
        }
        Ok(template)
    }

    /// Lends the descriptor, so that it can be passed on.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Device and inode: how a mapping of it is known in `/proc/PID/maps`.
    pub fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// Its chunks, by slot.
    pub fn chunks(&self) -> &[u32] {
        &self.chunks
    }

    /// Bytes of DRAM that it takes.
    pub fn bytes(&self) -> u64 {
        len_of(self.chunks.len() as u32)
    }

    /// The slot of a chunk.
    pub fn slot_of(&self, chunk: u32) -> Option<usize> {
        self.chunks.binary_search(&chunk).ok()
    }

    /// What a chunk holds. Panics if there is no such slot.
    pub fn content(&self, slot: usize) -> &[u8] {
        assert!(slot < self.chunks.len(), "a template has no slot {slot}");
        // SAFETY: inside the mapping, which lives as long as `self`. The file is sealed against writes and changes of size, and the
        // mapping is ours alone and not writable, so the bytes exist and do not change.
        unsafe { std::slice::from_raw_parts(self.addr.add(slot * CHUNK_SIZE), CHUNK_SIZE) }
    }

    /// Which pages of a chunk's content differ from what the template has, one bit a page.
    pub fn differing(&self, slot: usize, content: &[u8]) -> [u64; CHUNK_SIZE / PAGE_SIZE / 64] {
        let mut words = [0; CHUNK_SIZE / PAGE_SIZE / 64];
        let pages = self.content(slot).chunks_exact(PAGE_SIZE).zip(content.chunks_exact(PAGE_SIZE));
        for (index, (ours, theirs)) in pages.enumerate() {
            words[index / 64] |= u64::from(ours != theirs) << (index % 64);
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(byte: u8) -> Vec<u8> {
        vec![byte; CHUNK_SIZE]
    }

    fn template() -> Template {
        let mut draft = Draft::create("test", vec![2, 5]).unwrap();
        draft.push(&chunk(2)).unwrap();
        draft.push(&chunk(5)).unwrap();
        assert!(draft.push(&chunk(6)).is_err());
        draft.seal().unwrap()
    }

    #[test]
    fn what_was_put_in_is_read_by_whoever_gets_it() {
        let template = template();
        let again = Template::from_fd(template.as_fd().try_clone_to_owned().unwrap(), 2).unwrap();
        assert_eq!((again.chunks(), again.inode()), (&[2, 5][..], template.inode()));
        assert_eq!((again.slot_of(5), again.slot_of(3)), (Some(1), None));
        assert!(again.content(1).iter().all(|byte| *byte == 5));
        let mut other = chunk(5);
        other[70 * PAGE_SIZE + 9] = 0;
        assert_eq!(again.differing(1, &other), [0, 1 << 6, 0, 0]);
        assert!(Template::from_fd(again.as_fd().try_clone_to_owned().unwrap(), 1).is_err(), "of a larger VM");
    }

    #[test]
    fn nobody_can_change_it() {
        let template = template();
        let file = std::fs::File::from(template.as_fd().try_clone_to_owned().unwrap());
        assert!(file.write_at(b"x", 0).is_err(), "written");
        assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err(), "cut or made longer");
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&file, punch, 0, 4096).is_err(), "punched");
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let mapped = unsafe {
            let prot = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), PAGE_SIZE, prot, MapFlags::SHARED, &file, 0)
        };
        assert!(mapped.is_err(), "mapped for writing");
    }

    #[test]
    fn what_is_not_sealed_or_not_filled_is_no_template() {
        let draft = Draft::create("test", vec![1]).unwrap();
        assert!(Template::from_fd(draft.file.as_fd().try_clone_to_owned().unwrap(), 9).is_err());
        assert!(draft.seal().is_err());
        assert!(Draft::create("test", vec![1, 1]).is_err() && Draft::create("test", vec![2, 1]).is_err());
        let none = Draft::create("test", Vec::new()).unwrap().seal().unwrap();
        assert!(none.chunks().is_empty());
    }
}
