//! What the guest does: names, open files, writes, attributes.

use crate::limits::{HANDLES_MAX, PAGE_BYTES};
use crate::node::{Attributes, Body, Ino, Kind, NewNode, Owner, Time};
use crate::refusal::Refusal;
use crate::space::{Access, Handle, HandleId, Space, Write};
use crate::tree::Replace;
use crate::xattrs::XattrWrite;

/// An entry of a directory.
pub type NamedFile = (Box<[u8]>, Attributes);

/// Why a handle goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closed {
    ForGood,
    /// The request that opened the file is carried out once more, so a writer that goes now is not the last one.
    ToOpenAgain,
}

impl Space {
    /// # Errors
    /// There is none of that name.
    pub fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attributes, Refusal> {
        self.attributes(self.tree.lookup(parent, name)?)
    }

    /// # Errors
    /// It is gone.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes, Refusal> {
        Ok(self.tree.node(ino)?.attributes(ino))
    }

    /// The directory that `ino` is in; the root is in itself.
    ///
    /// # Errors
    /// It is gone.
    pub fn parent(&self, ino: Ino) -> Result<Ino, Refusal> {
        Ok(self.tree.node(ino)?.parent.unwrap_or(ino))
    }

    /// Up to `count` entries of a directory behind `after`, by number.
    ///
    /// # Errors
    /// It is no directory.
    pub fn list(&self, directory: Ino, after: Ino, count: usize) -> Result<Vec<NamedFile>, Refusal> {
        let directory = self.tree.directory(directory)?;
        let behind = directory.by_ino.range((std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded));
        behind.take(count).map(|(ino, name)| Ok((name.clone(), self.attributes(*ino)?))).collect()
    }

    /// A new, empty file.
    ///
    /// # Errors
    /// The name is taken or none; or a limit is reached.
    pub fn create(&mut self, parent: Ino, name: &[u8], new: NewNode) -> Result<Attributes, Refusal> {
        let ino = self.tree.add(parent, name, new, Kind::File)?;
        self.attributes(ino)
    }

    /// A new directory.
    ///
    /// # Errors
    /// As [`Space::create`].
    pub fn make_directory(&mut self, parent: Ino, name: &[u8], new: NewNode) -> Result<Attributes, Refusal> {
        let ino = self.tree.add(parent, name, new, Kind::Directory)?;
        self.attributes(ino)
    }

    /// Takes a file's or an empty directory's name away. Who has the file open or reads it keeps it.
    ///
    /// # Errors
    /// There is none of that name and kind; or the directory is not empty.
    pub fn unlink(&mut self, parent: Ino, name: &[u8], kind: Kind, now: Time) -> Result<(), Refusal> {
        let ino = self.tree.unlink(parent, name, kind, now)?;
        self.jobs.gone(ino);
        self.drop_if_unused(ino);
        Ok(())
    }

    /// # Errors
    /// As [`Space::create`]; or a directory would come below itself.
    pub fn rename(&mut self, from: (Ino, &[u8]), to: (Ino, &[u8]), replace: Replace, now: Time) -> Result<(), Refusal> {
        if let Some(replaced) = self.tree.rename(from, to, replace, now)? {
            self.jobs.gone(replaced);
            self.drop_if_unused(replaced);
        }
        Ok(())
    }

    /// # Errors
    /// It is gone, may not be written any more, or too much is open.
    pub fn open(&mut self, ino: Ino, access: Access) -> Result<HandleId, Refusal> {
        self.open_by(ino, access, 0)
    }

    /// The same for a request with this number: see [`Space::forget_request`].
    ///
    /// # Errors
    /// As [`Space::open`].
    pub fn open_by(&mut self, ino: Ino, access: Access, request: u64) -> Result<HandleId, Refusal> {
        if self.handles.len() >= HANDLES_MAX {
            return Err(Refusal::TooManyHandles);
        }
        if access == Access::Write {
            let content = self.content_mut(ino)?;
            content.check_writable()?;
            content.add_writer();
        }
        self.tree.node_mut(ino)?.handles += 1;
        let id = HandleId(self.next_handle);
        self.next_handle += 1;
        self.handles.insert(id, Handle { ino, access, request });
        self.noted.handles.insert(id);
        Ok(id)
    }

    /// The last handle that may write seals the file.
    ///
    /// # Errors
    /// There is no such handle.
    pub fn release(&mut self, id: HandleId) -> Result<(), Refusal> {
        self.close(id, Closed::ForGood)
    }

    pub(super) fn close(&mut self, id: HandleId, closed: Closed) -> Result<(), Refusal> {
        let handle = self.handles.remove(&id).ok_or(Refusal::BadHandle)?;
        self.noted.handles.insert(id);
        let node = self.tree.node_mut(handle.ino)?;
        node.handles = node.handles.saturating_sub(1);
        if let (Access::Write, Body::File(content)) = (handle.access, &mut node.body) {
            match closed {
                Closed::ForGood => content.remove_writer(),
                Closed::ToOpenAgain => content.suspend_writer(),
            }
        }
        self.drop_if_unused(handle.ino);
        Ok(())
    }

    fn handle(&self, id: HandleId, ino: Ino) -> Result<Handle, Refusal> {
        let handle = self.handles.get(&id).ok_or(Refusal::BadHandle)?;
        if handle.ino == ino { Ok(*handle) } else { Err(Refusal::BadHandle) }
    }

    /// How much of a write may be made now: all of it, or its beginning. The caller writes it, and then completes it.
    ///
    /// # Errors
    /// [`Refusal::Full`] and [`Refusal::Busy`] pass; all else stays.
    pub fn plan_write(&mut self, id: HandleId, ino: Ino, offset: u64, length: u64) -> Result<Write, Refusal> {
        if self.handle(id, ino)?.access != Access::Write {
            return Err(Refusal::NotOpenForThat);
        }
        let range = offset..offset.checked_add(length).ok_or(Refusal::TooLarge)?;
        let free = self.budget.saturating_sub(self.used) / PAGE_BYTES * PAGE_BYTES;
        let room = self.content(ino)?.room(&range, free);
        let room = self.noted(room)?;
        let range = offset..offset + room.bytes;
        self.content_mut(ino)?.begin_write(range.clone());
        self.used += room.charge;
        debug_assert!(room.charge == 0 || self.used <= self.budget);
        Ok(Write { ino, range })
    }

    /// `written` bytes of it are there now.
    pub fn complete_write(&mut self, write: &Write, written: u64, now: Time) {
        let Ok(node) = self.tree.node_mut(write.ino) else { return };
        if let Body::File(content) = &mut node.body {
            content.complete_write(&write.range, written);
            (node.modified, node.changed) = (now, now);
            self.bytes_written += written;
            if written > 0 {
                self.jobs.wrote(write.ino);
            }
        }
        self.drop_if_unused(write.ino);
    }

    /// How many of `length` bytes at `offset` the guest may read. To be asked again after they were read: what was given
    /// back meanwhile reads as zeros.
    ///
    /// # Errors
    /// They were given back; or the handle is none.
    pub fn check_read(&self, id: HandleId, ino: Ino, offset: u64, length: u64) -> Result<u64, Refusal> {
        self.handle(id, ino)?;
        let content = self.content(ino)?;
        let length = content.size().saturating_sub(offset).min(length);
        if length > 0 && offset < content.freed() {
            return Err(Refusal::Gone { oldest: content.freed() });
        }
        Ok(length)
    }

    /// Gives a file another size. The caller does it, and then completes it.
    ///
    /// # Errors
    /// Bytes below the send cursor would change, or the file is sealed or busy.
    pub fn plan_resize(&mut self, ino: Ino, size: u64) -> Result<(), Refusal> {
        let result = self.content_mut(ino)?.begin_resize(size);
        self.noted(result)
    }

    /// The resize is over, and `worked` says whether the file has the new size.
    pub fn complete_resize(&mut self, ino: Ino, worked: bool, now: Time) {
        let Ok(node) = self.tree.node_mut(ino) else { return };
        if let Body::File(content) = &mut node.body {
            let bytes = content.complete_resize(worked);
            if worked {
                (node.modified, node.changed) = (now, now);
            }
            self.used = self.used.checked_sub(bytes).expect("pages of a file are used");
        }
        self.drop_if_unused(ino);
    }

    /// Holes are not made: below the cursor they would change what is sent, above it a truncate does.
    ///
    /// # Errors
    /// [`Refusal::BelowCursor`] if that is why.
    pub fn check_hole(&mut self, ino: Ino, offset: u64) -> Result<(), Refusal> {
        let result = self.content(ino)?.check_change(offset);
        self.noted(result)
    }

    /// # Errors
    /// It is gone.
    pub fn set_attributes(
        &mut self,
        ino: Ino,
        mode: Option<u32>,
        owner: Option<Owner>,
        modified: Option<Time>,
        now: Time,
    ) -> Result<(), Refusal> {
        let node = self.tree.node_mut(ino)?;
        node.mode = mode.map_or(node.mode, |mode| mode & 0o7777);
        node.owner = owner.unwrap_or(node.owner);
        node.modified = modified.unwrap_or(node.modified);
        node.changed = now;
        Ok(())
    }

    /// # Errors
    /// It is not set, or its file is gone.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<&[u8], Refusal> {
        self.tree.node(ino)?.xattrs.get(name)
    }

    /// # Errors
    /// The file is gone.
    pub fn xattr_names(&self, ino: Ino) -> Result<impl Iterator<Item = &[u8]>, Refusal> {
        Ok(self.tree.node(ino)?.xattrs.names())
    }

    /// Of `user.pagoda.mode`, `user.pagoda.readers` and `user.pagoda.ttl` the value takes effect: of a directory for new files in
    /// it, of a file for itself; the first two as long as nothing of it was sent.
    ///
    /// # Errors
    /// A limit; or a value without a meaning.
    pub fn set_xattr(&mut self, ino: Ino, name: &[u8], value: &[u8], how: XattrWrite) -> Result<(), Refusal> {
        let node = self.tree.node_mut(ino)?;
        node.xattrs.check(name, value, how)?;
        match &mut node.body {
            Body::File(content) => {
                if let Some(policy) = content.policy.with(name, value)? {
                    content.set_policy(policy)?;
                }
            }
            Body::Directory(directory) => {
                directory.policy = directory.policy.with(name, value)?.unwrap_or(directory.policy)
            }
        }
        node.xattrs.set(name, value, how)
    }

    /// # Errors
    /// It is not set; or it is too late for a file to go by the default.
    pub fn remove_xattr(&mut self, ino: Ino, name: &[u8]) -> Result<(), Refusal> {
        let node = self.tree.node_mut(ino)?;
        node.xattrs.get(name)?;
        match &mut node.body {
            Body::File(content) => {
                if let Some(policy) = content.policy.without(name) {
                    content.set_policy(policy)?;
                }
            }
            Body::Directory(directory) => directory.policy = directory.policy.without(name).unwrap_or(directory.policy),
        }
        node.xattrs.remove(name)
    }
}
