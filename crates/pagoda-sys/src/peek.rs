//! What another process maps and holds: `/proc/PID/maps` and `/proc/PID/mem` (proc(5)).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A part of a process's address space that maps a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The mapping begins at this address.
    pub addr: u64,
    /// The mapping has so many bytes.
    pub len: u64,
    /// The mapping begins at this offset of the file.
    pub offset: u64,
    /// The file's device and inode.
    pub inode: (u64, u64),
}

/// The memory of one process, whatever becomes of its number. It takes the rights of a debugger to open it (ptrace(2),
/// "PTRACE_MODE_ATTACH_FSCREDS"), and none to go on with it.
#[derive(Debug)]
pub struct Memory {
    pid: u32,
    file: File,
}

impl Memory {
    /// Of the process `pid`.
    ///
    /// # Errors
    /// It is gone, or its memory may not be read.
    pub fn open(pid: u32) -> io::Result<Memory> {
        Ok(Memory { pid, file: File::open(format!("/proc/{pid}/mem"))? })
    }

    /// Reads what the process has at an address. It waits where a thread of the process would wait.
    ///
    /// # Errors
    /// EIO if nothing is mapped there; `UnexpectedEof` when the process has ended.
    pub fn read(&self, addr: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, addr)
    }

    /// What the process maps of these files (device and inode), by ascending address.
    ///
    /// # Errors
    /// The process is gone.
    pub fn mappings(&self, inodes: &[(u64, u64)]) -> io::Result<Vec<Mapping>> {
        let text = std::fs::read_to_string(format!("/proc/{}/maps", self.pid))?;
        let mut mappings = Vec::new();
        for line in text.lines() {
            let mapping = parse(line).ok_or_else(|| io::Error::other("unexpected format of /proc/PID/maps"))?;
            if inodes.contains(&mapping.inode) {
                mappings.push(mapping);
            }
        }
        Ok(mappings)
    }
}

/// One line: `7f80206c3000-7f80207c3000 rw-s 00000000 00:01 204   /memfd:r (deleted)`.
fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (addr, end) = (hex(start)?, hex(end)?);
    let _modes = fields.next()?;
    let offset = hex(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let dev = rustix::fs::makedev(hex(major)? as u32, hex(minor)? as u32);
    let ino = fields.next()?.parse().ok()?;
    Some(Mapping { addr, len: end.checked_sub(addr)?, offset, inode: (dev, ino) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::{LargeFolios, RamFile};

    #[test]
    fn what_a_process_maps_and_holds() {
        let ram = RamFile::create("peek", 2 << 20, crate::process::own_uid()).unwrap();
        let memory = Memory::open(std::process::id()).unwrap();
        assert!(memory.mappings(&[ram.inode()]).unwrap().is_empty());
        let view = ram.map(LargeFolios::Never).unwrap();
        view.write_page(1, &[7; crate::PAGE_SIZE]);
        let mappings = memory.mappings(&[ram.inode()]).unwrap();
        assert_eq!((mappings.len(), mappings[0].len, mappings[0].offset), (1, 2 << 20, 0));
        let mut page = [0; crate::PAGE_SIZE];
        memory.read(mappings[0].addr + crate::PAGE_SIZE as u64, &mut page).unwrap();
        assert_eq!(page, [7; crate::PAGE_SIZE]);
        drop(view);
        assert!(memory.read(mappings[0].addr, &mut page).is_err());
    }

    #[test]
    fn a_line_of_maps() {
        let line = "7f80206c3000-7f80207c3000 rw-s 00100000 00:01 204                        /memfd:r (deleted)";
        let expected =
            Mapping { addr: 0x7f80206c3000, len: 1 << 20, offset: 1 << 20, inode: (rustix::fs::makedev(0, 1), 204) };
        assert_eq!(parse(line), Some(expected));
        assert_eq!(parse("nonsense"), None);
        assert!(parse("ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]").is_some());
    }
}
