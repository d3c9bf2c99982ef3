//! Why a VM cannot come.

use std::path::PathBuf;

use pagoda_sys::Errno;
use pagoda_sys::swapfile::SwapFile;

/// Why pages could not be stored.
#[derive(Debug, thiserror::Error)]
pub enum ArriveError {
    /// The files are not those of one new VM.
    #[error("the files of the VM that comes do not fit together: {what}")]
    Files {
        /// What does not fit, in words.
        what: String,
    },
    /// Pages that the VM does not have. The other host is wrong.
    #[error("{len} pages from page {start} on of chunk {chunk} were sent, and the VM has {chunks} chunks of 256 pages")]
    Outside {
        /// The chunk that was named, counted from 0 over all regions.
        chunk: u32,
        /// The first of the pages within the chunk.
        start: u8,
        /// How many pages were named.
        len: u16,
        /// How many chunks there are.
        chunks: usize,
    },
    /// Not 4096 bytes a page. The other host is wrong.
    #[error("{bytes} bytes were sent for {pages} pages")]
    Length {
        /// How many bytes of content came.
        bytes: usize,
        /// How many pages the content was to be for.
        pages: u16,
    },
    /// A system call on a file failed.
    #[error("{what} {file}: {source}")]
    Io {
        /// What was tried, as a verb.
        what: &'static str,
        /// The file's path, or the number of the RAM file.
        file: String,
        /// The error that the kernel returned.
        source: Errno,
    },
    /// No room for what does not fit into DRAM.
    #[error("{}: the disk is full: free some space there, use a swap directory on another disk, or let the VM have more DRAM here, \
             and move it again", path.display())]
    DiskFull {
        /// The path of the VM's swap file.
        path: PathBuf,
    },
    /// The RAM file has not exactly what was put there.
    #[error(
        "RAM file {region} has {found} bytes, and {expected} bytes of pages have come: the VM's QEMU has changed its memory"
    )]
    Changed {
        /// Which of the VM's regions, counted from 0.
        region: usize,
        /// Bytes that the RAM file has allocated.
        found: u64,
        /// Bytes of the pages that were put there.
        expected: u64,
    },
    /// An earlier call failed, and said why.
    #[error("a page that came before could not be stored")]
    Failed,
    /// [`Arriving::finish`] was called before.
    #[error("a page has come after the last one")]
    Finished,
}

/// The failure of a call on a RAM file.
pub fn of_ram(region: usize, what: &'static str, source: Errno) -> ArriveError {
    ArriveError::Io { what, file: format!("RAM file {region}"), source }
}

/// The failure of a call on the swap file: a full disk has an error of its own.
pub fn of_swap(swap: &SwapFile, what: &'static str, source: Errno) -> ArriveError {
    let path = swap.path();
    match source {
        Errno::NOSPC | Errno::DQUOT => ArriveError::DiskFull { path: path.to_owned() },
        _ => ArriveError::Io { what, file: path.display().to_string(), source },
    }
}
