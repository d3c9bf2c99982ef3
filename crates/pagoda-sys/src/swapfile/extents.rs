//! Which ranges of a file have data: FIEMAP, which tells reserved space from data on every file system that has it, or
//! lseek(2) where it is missing.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::Errno;
use crate::ram::DataRuns;

/// Extents asked for at a time: 28 KiB of answers; a file fragmented page by page takes 512 calls for each GiB.
const BATCH: usize = 512;
/// These numbers are from linux/fiemap.h.
const FLAG_SYNC: u32 = 1;
const EXTENT_LAST: u32 = 1;
const EXTENT_UNWRITTEN: u32 = 0x800;
/// `_IOWR('f', 11, struct fiemap)`.
const FS_IOC_FIEMAP: u64 = (3 << 30) | ((size_of::<Header>() as u64) << 16) | ((b'f' as u64) << 8) | 11;

/// `struct fiemap` without its extents.
#[repr(C)]
#[derive(Clone, Copy)]
struct Header {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

/// The layout is that of `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with room for its extents.
#[repr(C)]
struct Request {
    header: Header,
    extents: [Extent; BATCH],
}

const _: () = assert!(size_of::<Header>() == 32 && size_of::<Extent>() == 56);
const _: () = assert!(std::mem::offset_of!(Request, extents) == 32);
const _: () = assert!(FS_IOC_FIEMAP == 0xC020_660B);

pub(super) fn data_extents(fd: BorrowedFd<'_>, len: u64, found: &mut impl FnMut(u64, u64)) -> Result<(), Errno> {
    match by_fiemap(fd, len, found) {
        Err(Errno::OPNOTSUPP | Errno::NOTTY) => by_seek(fd, len, found),
        result => result,
    }
}

fn by_seek(fd: BorrowedFd<'_>, len: u64, found: &mut impl FnMut(u64, u64)) -> Result<(), Errno> {
    DataRuns::new(fd, len).try_for_each(|run| run.map(|run| found(run.start, run.end - run.start)))
}

fn by_fiemap(fd: BorrowedFd<'_>, len: u64, found: &mut impl FnMut(u64, u64)) -> Result<(), Errno> {
    let mut start = 0;
    let header =
        Header { start, length: 0, flags: FLAG_SYNC, mapped_extents: 0, extent_count: BATCH as u32, reserved: 0 };
    let mut request = Box::new(Request { header, extents: [Extent::default(); BATCH] });
    while start < len {
        request.header = Header { start, length: len - start, ..header };
        // SAFETY: FS_IOC_FIEMAP writes the header and `extent_count` extents behind it: `Request` is laid out so, with
        // BATCH extents, and asserted above. Any bytes are valid integers.
        let rc = unsafe { libc::ioctl(fd.as_raw_fd(), FS_IOC_FIEMAP as _, std::ptr::from_mut(&mut *request)) };
        if rc < 0 {
            return Err(crate::errno());
        }
        let extents = &request.extents[..(request.header.mapped_extents as usize).min(BATCH)];
        for extent in extents {
            // The first may begin before what was asked for, the last may end behind the file.
            let from = extent.logical.max(start);
            let to = extent.logical.saturating_add(extent.length).min(len);
            if extent.flags & EXTENT_UNWRITTEN == 0 && from < to {
                found(from, to - from);
            }
        }
        match extents.last() {
            Some(last) if last.flags & EXTENT_LAST == 0 => start = last.logical.saturating_add(last.length),
            _ => break,
        }
    }
    Ok(())
}
