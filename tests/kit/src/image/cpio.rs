//! The initramfs as the kernel unpacks it (Documentation/driver-api/early-userspace/buffer-format.rst). The crate `cpio`
//! writes the entries; what is here is which ones: each file with the directories above it, once.

use std::collections::BTreeSet;
use std::io::{self, Write};

use cpio::newc::{Builder, trailer};

const DIRECTORY: u32 = 0o040_755;
const EXECUTABLE: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

#[derive(Debug)]
pub struct Archive<W> {
    /// Taken while an entry is written, which gives it back.
    out: Option<W>,
    inodes: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    pub fn new(out: W) -> Self {
        Self { out: Some(out), inodes: 0, directories: BTreeSet::new() }
    }

    /// Adds a file that everyone may read and execute, and the directories above it. `path` is absolute.
    pub fn file(&mut self, path: &str, content: &[u8]) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, EXECUTABLE, (0, 0), content)
    }

    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) -> io::Result<()> {
        self.parents(path)?;
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[])
    }

    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        self.parents(path)?;
        if self.directories.insert(path.to_owned()) { self.entry(path, DIRECTORY, (0, 0), &[]) } else { Ok(()) }
    }

    /// An archive without its trailer is unpacked with an error, so this must be called.
    pub fn finish(mut self) -> io::Result<W> {
        let mut out = trailer(self.take_out()?)?;
        out.flush()?;
        Ok(out)
    }

    fn parents(&mut self, path: &str) -> io::Result<()> {
        for (end, _) in path.match_indices('/').skip(1) {
            let parent = &path[..end];
            if self.directories.insert(parent.to_owned()) {
                self.entry(parent, DIRECTORY, (0, 0), &[])?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) -> io::Result<()> {
        let name = path.trim_start_matches('/');
        let length = u32::try_from(content.len())
            .map_err(|_| io::Error::new(io::ErrorKind::FileTooLarge, format!("{path}: 4 GiB or more")))?;
        self.inodes += 1;
        let entry = Builder::new(name).ino(self.inodes).nlink(1).mode(mode).rdev_major(major).rdev_minor(minor);
        let mut writer = entry.write(self.take_out()?, length);
        writer.write_all(content)?;
        self.out = Some(writer.finish()?);
        Ok(())
    }

    fn take_out(&mut self) -> io::Result<W> {
        self.out.take().ok_or_else(|| io::Error::other("an entry before this one could not be written"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: &str = "070701";
    const HEADER_BYTES: usize = 110;
    const TRAILER: &str = "TRAILER!!!";

    #[test]
    fn a_file_brings_its_directories_once_and_everything_is_aligned() {
        let mut archive = Archive::new(Vec::new());
        archive.file("/a/b/one", b"12345").expect("write to memory");
        archive.file("/a/b/two", b"").expect("write to memory");
        archive.character_device("/dev/console", 5, 1).expect("write to memory");
        let bytes = archive.finish().expect("write to memory");
        assert_eq!(names(&bytes), ["a", "a/b", "a/b/one", "a/b/two", "dev", "dev/console", TRAILER]);
    }

    /// Walks the archive by its own lengths, as the kernel does.
    fn names(mut bytes: &[u8]) -> Vec<String> {
        let mut names = Vec::new();
        while !bytes.is_empty() {
            let field = |index: usize| {
                let digits = std::str::from_utf8(&bytes[6 + index * 8..][..8]).expect("ASCII");
                usize::from_str_radix(digits, 16).expect("hexadecimal")
            };
            assert_eq!(&bytes[..6], MAGIC.as_bytes());
            let (content_length, name_length) = (field(6), field(11));
            let name = &bytes[HEADER_BYTES..][..name_length - 1];
            names.push(String::from_utf8(name.to_vec()).expect("ASCII"));
            let header = (HEADER_BYTES + name_length).next_multiple_of(4);
            bytes = &bytes[header + content_length.next_multiple_of(4)..];
        }
        names
    }
}
