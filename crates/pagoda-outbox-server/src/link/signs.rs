//! Two words of memory that the transmitter and the process that serves have in common, so that neither wakes the other for nothing.
//!
//! `changes` counts what readers may wait for: if it is what it was when a reader got all there was, there is no more, and nobody has to be
//! asked. `wanted` says that the transmitter is to be told of the next change.
//!
//! Order: something has changed -> `changes` counts it -> `wanted` is looked at. And: `wanted` is set -> `changes` is looked at. So a change is
//! either seen or told of. Whatever the other side writes here, it costs at most a needless question or byte, or a reader's waiting.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

const CHANGES: usize = 0;
/// In another line of the processor's cache.
const WANTED: usize = 64;
const BYTES: usize = 4096;

/// Memory for both. Nobody can make it shorter, which would end the other one.
pub fn memory() -> io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("pagoda-signs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&memory, BYTES as u64)?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

#[derive(Debug)]
pub struct Signs(MmapRegion<()>);

impl Signs {
    /// # Errors
    /// It is not made by [`memory`], or cannot be mapped.
    pub fn map(memory: OwnedFd) -> io::Result<Signs> {
        let seals = rustix::fs::fcntl_get_seals(&memory)?;
        if !seals.contains(SealFlags::SHRINK) || rustix::fs::fstat(&memory)?.st_size != BYTES as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        MmapRegion::from_file(FileOffset::new(File::from(memory), 0), BYTES).map(Signs).map_err(io::Error::other)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.0.get_atomic_ref(offset).expect("a word of the memory")
    }

    /// Something has changed. Whether that is to be told.
    pub fn count_change(&self) -> bool {
        self.word(CHANGES).fetch_add(1, Ordering::SeqCst);
        // A load first: a store would take the cache line from the other side at each change.
        self.word(WANTED).load(Ordering::SeqCst) != 0 && self.word(WANTED).swap(0, Ordering::SeqCst) != 0
    }

    pub fn changes(&self) -> u64 {
        self.word(CHANGES).load(Ordering::SeqCst)
    }

    /// The next change is to be told, if nothing has changed since `changes`. Whether it will be.
    pub fn want(&self, changes: u64) -> bool {
        self.word(WANTED).store(1, Ordering::SeqCst);
        self.changes() == changes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn each_change_is_seen_or_told() {
        let memory = memory().unwrap();
        assert!(rustix::fs::ftruncate(&memory, 0).is_err());
        let signs = Signs::map(memory.try_clone().unwrap()).unwrap();
        assert!(!signs.count_change(), "nobody wants to know");
        assert!(!signs.want(0) && signs.want(1));
        assert!(signs.count_change() && !signs.count_change(), "told once");
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&plain, BYTES as u64).unwrap();
        assert!(Signs::map(plain).is_err());

        // One changes, another one waits whenever it has seen no change and will be told.
        let changing = Signs::map(memory).unwrap();
        let total = signs.changes() + 20_000;
        let (tell, told) = std::sync::mpsc::channel();
        let changer = std::thread::spawn(move || {
            while changing.changes() < total {
                if changing.count_change() {
                    tell.send(()).unwrap();
                }
            }
        });
        let signs = Arc::new(signs);
        let mut seen = 0;
        while seen < total {
            let now = signs.changes();
            if now == seen && signs.want(now) {
                told.recv().expect("it is told, or has seen the last change");
            }
            seen = now;
        }
        changer.join().unwrap();
    }
}
