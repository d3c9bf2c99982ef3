//! What the transmitter does: readers of files.

use crate::content::{Content, State};
use crate::node::{Ino, ROOT};
use crate::readers::{Next, Reader, ReaderId, Selection};
use crate::refusal::Refusal;
use crate::space::Space;

impl Space {
    /// The file or directory that a path names, from the root on.
    ///
    /// # Errors
    /// There is none.
    pub fn resolve<'a>(&self, path: impl Iterator<Item = &'a [u8]>) -> Result<Ino, Refusal> {
        let mut at = ROOT;
        for name in path {
            at = self.tree.lookup(at, name)?;
        }
        Ok(at)
    }

    /// A reader of a file from `selection.start` on. What it has not acknowledged stays, whoever else has it.
    ///
    /// # Errors
    /// It may not be read (yet), or not from there.
    pub fn attach(&mut self, ino: Ino, selection: Selection) -> Result<ReaderId, Refusal> {
        let content = self.content(ino)?;
        if content.state() == State::Broken {
            return Err(Refusal::Broken);
        }
        if !content.is_published() {
            return Err(Refusal::NotPublished);
        }
        if selection.start < content.freed() {
            return Err(Refusal::Gone { oldest: content.freed() });
        }
        if content.is_complete() && selection.start > content.size() {
            return Err(Refusal::BeyondEnd { size: content.size() });
        }
        let reader = self.readers.add(ino, selection)?;
        self.tree.node_mut(ino)?.readers += 1;
        Ok(reader)
    }

    /// What `reader` is to send next, at most `max` bytes. These bytes never change from now on.
    ///
    /// # Errors
    /// There is no such reader.
    pub fn next(&mut self, reader: ReaderId, max: u64) -> Result<Next, Refusal> {
        let id = reader;
        let reader = self.readers.get_mut(id)?;
        let end = reader.end.unwrap_or(u64::MAX);
        let (ino, offset) = (reader.ino, reader.given);
        if offset >= end {
            return Ok(Next::End);
        }
        let content = self.content(ino)?;
        let to = content.sendable_end().min(end).min(offset.saturating_add(max));
        if to > offset {
            self.content_mut(ino)?.send(to);
            self.readers.get_mut(id)?.given = to;
            return Ok(Next::Bytes { offset, length: to - offset });
        }
        Ok(match content.state() {
            State::Broken => Next::Broken,
            _ if content.is_complete() && content.sendable_end() == content.size() => Next::End,
            _ => Next::Wait,
        })
    }

    /// Everything that `reader` was given below `position` has arrived.
    ///
    /// # Errors
    /// There is no such reader.
    pub fn acknowledge(&mut self, reader: ReaderId, position: u64) -> Result<(), Refusal> {
        let reader = self.readers.get_mut(reader)?;
        let range = reader.acknowledged..position.min(reader.given);
        if range.start >= range.end {
            return Ok(());
        }
        reader.acknowledged = range.end;
        let ino = reader.ino;
        self.bytes_acknowledged += range.end - range.start;
        self.content_mut(ino)?.acknowledge(range);
        Ok(())
    }

    /// Readers that have bytes to take, or have not acknowledged what they were given.
    pub fn busy_readers(&self) -> usize {
        let is_busy = |reader: &&Reader| {
            let end = self.content(reader.ino).map_or(0, Content::sendable_end).min(reader.end.unwrap_or(u64::MAX));
            reader.acknowledged < reader.given || reader.given < end
        };
        self.readers.all().filter(is_busy).count()
    }

    /// The reader is gone; what it has not acknowledged was not delivered.
    pub fn detach(&mut self, reader: ReaderId) {
        let Some(reader) = self.readers.remove(reader) else { return };
        if let Ok(node) = self.tree.node_mut(reader.ino) {
            node.readers = node.readers.saturating_sub(1);
        }
        self.drop_if_unused(reader.ino);
    }
}
