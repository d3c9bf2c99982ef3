//! Which pages of a process have a page-table entry (`/proc/PID/pagemap`, Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::PAGE_SIZE;

/// Bytes of one entry.
const ENTRY: u64 = 8;
/// "Bit 63: page present".
const PRESENT: u64 = 1 << 63;

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
}
