//! Readers: which bytes of which file each of them is sent, and what has arrived.

use std::collections::BTreeMap;

use crate::limits::READERS_MAX;
use crate::node::Ino;
use crate::refusal::Refusal;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReaderId(pub u64);

/// What a reader wants of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection {
    pub start: u64,
    /// `None`: up to the end, wherever that will be.
    pub end: Option<u64>,
}

/// What a reader is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Send these bytes. From now on they do not change.
    Bytes { offset: u64, length: u64 },
    /// There is nothing yet, and more may come.
    Wait,
    /// The reader has been given all that it wanted.
    End,
    /// There will never be all of it: the client has to see that it is cut short.
    Broken,
}

#[derive(Debug, Clone)]
pub struct Reader {
    pub ino: Ino,
    pub end: Option<u64>,
    /// Everything before was given to it.
    pub given: u64,
    /// Everything before has arrived.
    pub acknowledged: u64,
}

#[derive(Debug, Default)]
pub struct Readers {
    readers: BTreeMap<ReaderId, Reader>,
    next: u64,
}

impl Readers {
    pub fn add(&mut self, ino: Ino, selection: Selection) -> Result<ReaderId, Refusal> {
        if self.readers.len() >= READERS_MAX {
            return Err(Refusal::TooManyReaders);
        }
        let id = ReaderId(self.next);
        self.next += 1;
        let Selection { start, end } = selection;
        self.readers.insert(id, Reader { ino, end, given: start, acknowledged: start });
        Ok(id)
    }

    pub fn get_mut(&mut self, id: ReaderId) -> Result<&mut Reader, Refusal> {
        self.readers.get_mut(&id).ok_or(Refusal::NotFound)
    }

    pub fn remove(&mut self, id: ReaderId) -> Option<Reader> {
        self.readers.remove(&id)
    }

    pub fn len(&self) -> usize {
        self.readers.len()
    }

    pub fn all(&self) -> impl Iterator<Item = &Reader> {
        self.readers.values()
    }

    /// What the slowest reader of a file has acknowledged.
    pub fn slowest(&self, ino: Ino) -> Option<u64> {
        self.readers.values().filter(|reader| reader.ino == ino).map(|reader| reader.acknowledged).min()
    }
}
