//! Where the server of an overflow disk keeps its pages: on the disk instead of in memory.
//!
//! The file has no name, so that it is gone with the process, as lent memory is: nothing has to be recovered, and nothing
//! old can be taken for something new. All of it is there before anything is promised. It is written past the page cache:
//! a machine that is short of memory must be able to write to it.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rmap::medium::Medium;
use rmap::units::{PAGE_SIZE, Page};
use rustix::fs::{CWD, FallocateFlags, Mode, OFlags, fallocate, openat, statfs, statvfs};
use rustix::io::Errno;
use thiserror::Error;

/// `statfs(2)`: file systems whose files are memory.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Why there is no room on a disk. Nothing was changed.
#[derive(Debug, Error)]
pub enum MediumError {
    #[error("{dir} is in memory: give a directory on a disk")]
    InMemory { dir: PathBuf },
    #[error("{dir}: its file system has {available} bytes left, and {wanted} are to be lent: give less")]
    TooLittle { dir: PathBuf, wanted: u64, available: u64 },
    #[error("{dir}: its file system lacks {what}, which ext4, xfs and btrfs have: give another directory")]
    Lacks { dir: PathBuf, what: &'static str },
    #[error("{dir}: {source}")]
    Io { dir: PathBuf, source: io::Error },
}

/// What the kernel takes for direct I/O.
#[repr(align(4096))]
struct Aligned(Page);

/// A file on a disk. One request at a time: whoever needs more wants memory.
pub struct FileMedium {
    file: File,
    room: Box<Aligned>,
}

impl fmt::Debug for FileMedium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileMedium({:?})", self.file)
    }
}

impl FileMedium {
    /// Takes `bytes` of the file system that `dir` is on.
    ///
    /// # Errors
    /// They are not there, or it is no disk.
    pub fn create(dir: &Path, bytes: u64) -> Result<FileMedium, MediumError> {
        let fail = |error: Errno| MediumError::Io { dir: dir.to_owned(), source: error.into() };
        let lacks = |what| {
            move |error| match error {
                Errno::OPNOTSUPP | Errno::INVAL | Errno::ISDIR => MediumError::Lacks { dir: dir.to_owned(), what },
                error => fail(error),
            }
        };
        // The type's width differs between machines.
        #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
        let kind = statfs(dir).map_err(fail)?.f_type as u64 & 0xffff_ffff;
        if IN_MEMORY.contains(&kind) {
            return Err(MediumError::InMemory { dir: dir.to_owned() });
        }
        let space = statvfs(dir).map_err(fail)?;
        let available = space.f_bavail.saturating_mul(space.f_frsize);
        if available < bytes {
            return Err(MediumError::TooLittle { dir: dir.to_owned(), wanted: bytes, available });
        }
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        let file =
            openat(CWD, dir, flags, Mode::RUSR | Mode::WUSR).map_err(lacks("files without a name, or direct I/O"))?;
        fallocate(&file, FallocateFlags::empty(), 0, bytes).map_err(lacks("fallocate"))?;
        Ok(FileMedium { file: file.into(), room: Box::new(Aligned([0; PAGE_SIZE])) })
    }
}

impl Medium for FileMedium {
    fn read(&mut self, index: u64, page: &mut Page) -> io::Result<()> {
        self.file.read_exact_at(&mut self.room.0, index * PAGE_SIZE as u64)?;
        page.copy_from_slice(&self.room.0);
        Ok(())
    }

    fn write(&mut self, index: u64, page: &Page) -> io::Result<()> {
        self.room.0.copy_from_slice(page);
        self.file.write_all_at(&self.room.0, index * PAGE_SIZE as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_from_their_indices() {
        // The build's directory is on a disk; /tmp need not be.
        let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut medium = FileMedium::create(dir, 8 * PAGE_SIZE as u64).unwrap();
        let page = |filler| [filler; PAGE_SIZE];
        (0..8).for_each(|index| medium.write(index, &page(index as u8)).unwrap());
        medium.write(3, &page(33)).unwrap();
        let mut back = page(0);
        for (index, filler) in [(0, 0), (3, 33), (4, 4), (7, 7)] {
            medium.read(index, &mut back).unwrap();
            assert!(back == page(filler), "place {index}");
        }
        assert_eq!(medium.read(8, &mut back).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_disk_or_too_small_is_refused() {
        let of = |dir: &str, bytes| FileMedium::create(Path::new(dir), bytes).unwrap_err();
        assert!(matches!(of("/dev/shm", 1 << 20), MediumError::InMemory { .. }));
        assert!(matches!(of(env!("CARGO_MANIFEST_DIR"), 1 << 60), MediumError::TooLittle { .. }));
        assert!(matches!(of("/proc/self/none", 1 << 20), MediumError::Io { .. }));
        let unnamed = of("/proc", 0);
        assert!(matches!(unnamed, MediumError::Lacks { .. }), "{unnamed}");
    }
}
