//! Which pages of a process have a page-table entry (`/proc/PID/pagemap`, Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::PAGE_SIZE;

/// Bytes of one entry.
const ENTRY: u64 = 8;
/// "Bit 63: page present".
const PRESENT: u64 = 1 << 63;
/// "Bit 62: page swapped", "Bit 61: page is file-page or shared-anon".
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;
/// "Bits 0-4: swap type if swapped". A mark of write-protection of a page that is not mapped looks like a swapped page of the
/// last type; files and partitions have the first ones (`MAX_SWAPFILES` of linux/swap.h is below this).
const SWAP_TYPE: u64 = 0x1f;
const MARK: u64 = 0x1f;
/// "Bits 0-54": zero for who may not see them.
const FRAME: u64 = (1 << 55) - 1;
/// `PAGEMAP_SCAN`, `_IOWR('f', 16, struct pm_scan_arg)` (linux/fs.h): Linux 6.7.
const SCAN: u64 = 0xc060_6610;
/// These are `PAGE_IS_PRESENT` and `PAGE_IS_HUGE` of linux/fs.h.
const IS_PRESENT: u64 = 1 << 3;
const IS_HUGE: u64 = 1 << 6;

/// The layout is that of `struct pm_scan_arg` in linux/fs.h.
#[repr(C)]
#[derive(Debug, Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// How a range is mapped, by its first page that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapped {
    /// No page of the range is mapped.
    Not,
    /// Each page has an entry of its own.
    Small,
    /// One entry maps many pages.
    Huge,
}

/// What the page table says of one page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry(u64);

impl Entry {
    /// It is, or may be, a page of the process's own and of no file. One that is swapped out and one that is only marked as
    /// protected can be told apart by who sees page frames (`CAP_SYS_ADMIN`); for others the mark is taken for what it is most
    /// likely to be.
    pub fn is_anonymous(self) -> bool {
        let is_mark = self.0 & FRAME == 0 || self.0 & SWAP_TYPE == MARK;
        match self.0 & (PRESENT | SWAPPED) {
            PRESENT => self.0 & OF_FILE == 0,
            SWAPPED => !is_mark,
            _ => false,
        }
    }
}

/// The page tables of one process. After its end every look fails or finds nothing.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Of the process `pid`.
    ///
    /// # Errors
    /// It is gone, or its memory may not be inspected (ptrace(2), "PTRACE_MODE_READ_FSCREDS").
    pub fn open(pid: u32) -> io::Result<Pagemap> {
        Ok(Pagemap { file: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// Whether the page at this address can be reached without a fault. Any part of a huge mapping can.
    ///
    /// # Errors
    /// The process is gone.
    pub fn is_present(&self, addr: u64) -> io::Result<bool> {
        let mut entry = [0; ENTRY as usize];
        self.file.read_exact_at(&mut entry, addr / PAGE_SIZE as u64 * ENTRY)?;
        Ok(u64::from_ne_bytes(entry) & PRESENT != 0)
    }
}

impl Pagemap {
    /// Entries of pages that follow one another, from this address on.
    ///
    /// # Errors
    /// The process is gone.
    pub fn read(&self, addr: u64, out: &mut [Entry]) -> io::Result<()> {
        let mut bytes = [0; 256 * ENTRY as usize];
        for (part, out) in (0..).zip(out.chunks_mut(256)) {
            let bytes = &mut bytes[..out.len() * ENTRY as usize];
            self.file.read_exact_at(bytes, (addr / PAGE_SIZE as u64 + part * 256) * ENTRY)?;
            for (entry, bytes) in out.iter_mut().zip(bytes.chunks_exact(ENTRY as usize)) {
                *entry = Entry(u64::from_ne_bytes(bytes.try_into().unwrap_or_default()));
            }
        }
        Ok(())
    }

    /// How the pages of a range are mapped.
    ///
    /// # Errors
    /// The process is gone; ENOTTY before Linux 6.7.
    pub fn mapped(&self, addr: u64, len: u64) -> io::Result<Mapped> {
        let mut region = [0_u64; 3];
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            start: addr,
            end: addr + len,
            vec: region.as_mut_ptr() as u64,
            vec_len: 1,
            max_pages: 1,
            category_mask: IS_PRESENT,
            return_mask: IS_PRESENT | IS_HUGE,
            ..ScanArg::default()
        };
        // SAFETY: PAGEMAP_SCAN reads and writes one `pm_scan_arg`, and writes at most `vec_len` regions of three words to
        // `vec`; both live until it returns.
        let found = unsafe { libc::ioctl(self.file.as_raw_fd(), SCAN as _, std::ptr::from_mut(&mut arg)) };
        match found {
            0 => Ok(Mapped::Not),
            found if found < 0 => Err(io::Error::last_os_error()),
            _ if region[2] & IS_HUGE != 0 => Ok(Mapped::Huge),
            _ => Ok(Mapped::Small),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_present_once_it_was_touched() {
        let mut memory = vec![0u8; 64 << 20];
        let pagemap = Pagemap::open(std::process::id()).expect("our own pagemap");
        // Far from the ends, and past what a huge page around the first byte would cover.
        let at = memory.as_ptr() as u64 + (40 << 20);
        assert!(!pagemap.is_present(at).expect("look"), "zeroed memory comes from mmap(2) untouched");
        memory[40 << 20] = 1;
        assert!(pagemap.is_present(at).expect("look"));
    }

    #[test]
    fn which_pages_are_the_processs_own() {
        // Seen on Linux 6.18, of a private mapping of a memfd that is protected by a userfaultfd.
        let table = [
            (0x4200_0000_0000_003f, false, "marked as protected, and not mapped"),
            (0x4200_0000_0000_0000, false, "the same without the right to see page frames"),
            (0xa300_0000_0012_ade1, false, "read"),
            (0x8300_0000_0028_fde7, true, "copied and protected"),
            (0x8100_0000_0018_7151, true, "written"),
            (0x4100_0000_0000_0020, true, "swapped out"),
            (0x4200_0000_0000_0021, true, "swapped out and protected"),
            (0, false, "nothing"),
        ];
        for (entry, expected, what) in table {
            assert_eq!(Entry(entry).is_anonymous(), expected, "{what}");
        }
    }

    #[test]
    fn how_a_range_is_mapped() {
        const MIB: u64 = 1 << 20;
        let mut memory = vec![0u8; 64 << 20];
        let pagemap = Pagemap::open(std::process::id()).expect("our own pagemap");
        let at = (memory.as_ptr() as u64 + 40 * MIB) / (2 * MIB) * (2 * MIB);
        match pagemap.mapped(at, 2 * MIB) {
            Ok(mapped) => assert_eq!(mapped, Mapped::Not),
            Err(error) => return assert_eq!(error.raw_os_error(), Some(libc::ENOTTY), "before Linux 6.7"),
        }
        let page = (at - memory.as_ptr() as u64) as usize + 300 * PAGE_SIZE;
        memory[page] = 1;
        // Which of the two is the host's choice.
        assert_ne!(pagemap.mapped(at, 2 * MIB).expect("look"), Mapped::Not);
        assert_eq!(pagemap.mapped(at - 4 * MIB, 2 * MIB).expect("look"), Mapped::Not);
    }
}
