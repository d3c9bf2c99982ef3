//! One reply to a guest that lists a directory.

use std::ffi::{CStr, CString};
use std::io;

use pagoda_outbox::{Ino, Kind, Refusal, Space};
use virtiofsd::filesystem::{DirEntry, DirectoryIterator, FileSystem};

/// The least bytes that an entry takes in a reply (`struct fuse_dirent` with one byte of name, padded).
const ENTRY_BYTES_MIN: u32 = 32;
/// The offsets of `.` and `..`; that of any other entry is its number behind them.
const DOT: u64 = 1;
const DOT_DOT: u64 = 2;

#[derive(Debug)]
struct Item {
    ino: u64,
    offset: u64,
    kind: Kind,
    name: CString,
}

/// Entries in the order of their numbers, which stays while names come and go.
#[derive(Debug)]
pub struct Listing {
    items: Vec<Item>,
    next: usize,
}

impl Listing {
    pub fn new(space: &Space, directory: Ino, size: u32, after: u64) -> Result<Listing, Refusal> {
        let mut items = Vec::new();
        let dots = [(DOT, c".", directory), (DOT_DOT, c"..", space.parent(directory)?)];
        for (offset, name, ino) in dots.into_iter().filter(|(offset, ..)| *offset > after) {
            items.push(Item { ino: ino.0, offset, kind: Kind::Directory, name: name.to_owned() });
        }
        let count = (size / ENTRY_BYTES_MIN) as usize;
        for (name, attributes) in space.list(directory, Ino(after.saturating_sub(DOT_DOT)), count)? {
            // Names have no NUL: the space refuses them.
            let name = CString::new(name.into_vec()).map_err(|_| Refusal::BadName)?;
            let ino = attributes.ino.0;
            items.push(Item { ino, offset: ino + DOT_DOT, kind: attributes.kind, name });
        }
        Ok(Listing { items, next: 0 })
    }
}

impl DirectoryIterator for Listing {
    fn next(&mut self) -> Option<DirEntry<'_>> {
        let item = self.items.get(self.next)?;
        self.next += 1;
        let type_ = match item.kind {
            Kind::Directory => libc::DT_DIR,
            Kind::File => libc::DT_REG,
        };
        Some(DirEntry { ino: item.ino, offset: item.offset, type_: u32::from(type_), name: &item.name })
    }
}

/// A file system that does nothing, for what the library answers by itself.
#[derive(Debug)]
pub struct Blank;

#[derive(Debug)]
pub struct NoEntries;

impl DirectoryIterator for NoEntries {
    fn next(&mut self) -> Option<DirEntry<'_>> {
        None
    }
}

impl FileSystem for Blank {
    type Inode = u64;
    type Handle = u64;
    type DirIter = NoEntries;

    fn lookup(&self, _: virtiofsd::filesystem::Context, _: u64, _: &CStr) -> io::Result<virtiofsd::filesystem::Entry> {
        Err(io::Error::from_raw_os_error(libc::ENOENT))
    }
}
