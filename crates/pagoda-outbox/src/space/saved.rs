//! What of a space outlives the process that serves it: records for the [journal](crate::journal), and a space made of them.
//!
//! All of names, attributes, sizes, cursors, given-back bytes and the guest's open files is kept. Of deliveries only what was
//! delivered from a file's beginning on is, so a client may have to fetch something again before its memory is given back. What
//! is lost with the process: its readers, whose connections end with it, and writes under way. Their pages beyond the file's
//! end go, and those within it are charged already.

use std::collections::BTreeMap;

use crate::codec::{Damaged, Decoder, Encoder};
use crate::content::Content;
use crate::journal::batches;
use crate::limits::{HANDLES_MAX, NAME_BYTES_MAX, NODES_MAX};
use crate::node::{Body, Ino, Kind, Node, Owner, ROOT, Time};
use crate::policy::Policy;
use crate::space::files::Closed;
use crate::space::{Access, Handle, HandleId, Space};
use crate::tree::Tree;
use crate::xattrs::Xattrs;

/// What a record is of.
const SNAPSHOT: u64 = 0;
const HEAD: u64 = 1;
const NODE: u64 = 2;
const NODE_GONE: u64 = 3;
const HANDLE: u64 = 4;
const HANDLE_GONE: u64 = 5;

/// A space as it was when its process ended.
#[derive(Debug)]
pub struct Restored {
    pub space: Space,
    /// Number of the snapshot that it began with. The next one has to be higher.
    pub epoch: u64,
}

/// A file of a space that was restored: what its memory has to be made to fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMemory {
    pub ino: Ino,
    /// All behind has to go.
    pub size: u64,
    /// All before has to go.
    pub freed: u64,
}

/// A node as a record says it, not yet in its directory.
#[derive(Debug)]
struct SavedNode {
    name: Box<[u8]>,
    node: Node,
}

/// Records, the later in place of the earlier.
#[derive(Debug, Default)]
struct Records {
    head: Option<Head>,
    nodes: BTreeMap<Ino, SavedNode>,
    handles: BTreeMap<HandleId, Handle>,
}

#[derive(Debug)]
struct Head {
    budget: u64,
    next_ino: u64,
    next_handle: u64,
    refused_changes: u64,
    bytes_written: u64,
    bytes_acknowledged: u64,
    session: u64,
}

impl Space {
    /// Records of what has changed since the last time. `None`: nothing that is kept.
    pub fn take_changes(&mut self) -> Option<Vec<u8>> {
        let mut records = Encoder::default();
        for ino in self.tree.take_touched() {
            let Ok(node) = self.tree.node(ino) else {
                if self.noted.nodes.remove(&ino).is_some() {
                    records.number(NODE_GONE).number(ino.0);
                }
                continue;
            };
            let mut record = Encoder::default();
            self.encode_node(&mut record, ino, node);
            if self.noted.nodes.get(&ino) != Some(&record.0) {
                records.0.extend_from_slice(&record.0);
                self.noted.nodes.insert(ino, record.0);
            }
        }
        for id in std::mem::take(&mut self.noted.handles) {
            self.encode_handle(&mut records, id);
        }
        let head = self.encode_head();
        if head != self.noted.head {
            records.0.extend_from_slice(&head);
            self.noted.head = head;
        }
        (!records.0.is_empty()).then_some(records.0)
    }

    /// Records of all that is kept. They begin the journal with this number.
    pub fn snapshot(&self, epoch: u64) -> Vec<u8> {
        let mut records = Encoder::default();
        records.number(SNAPSHOT).number(epoch);
        self.tree.nodes().for_each(|(ino, node)| self.encode_node(&mut records, ino, node));
        self.handles.keys().for_each(|id| self.encode_handle(&mut records, *id));
        records.0.extend_from_slice(&self.encode_head());
        records.0
    }

    fn encode_head(&self) -> Vec<u8> {
        let mut head = Encoder::default();
        head.number(HEAD).number(self.budget).number(self.tree.next().0).number(self.next_handle);
        head.number(self.refused_changes).number(self.bytes_written).number(self.bytes_acknowledged);
        head.number(self.session);
        head.0
    }

    fn encode_handle(&self, records: &mut Encoder, id: HandleId) {
        match self.handles.get(&id) {
            Some(handle) => {
                let access = u64::from(handle.access == Access::Write);
                records.number(HANDLE).number(id.0).number(handle.ino.0).number(access).number(handle.request);
            }
            None => {
                records.number(HANDLE_GONE).number(id.0);
            }
        }
    }

    fn encode_node(&self, record: &mut Encoder, ino: Ino, node: &Node) {
        let name = node.parent.and_then(|parent| self.tree.directory(parent).ok()?.by_ino.get(&ino));
        record.number(NODE).number(ino.0).number(node.parent.map_or(0, |parent| parent.0));
        record.bytes(name.map_or(&[], |name| name));
        record.number(u64::from(node.mode)).number(u64::from(node.owner.uid)).number(u64::from(node.owner.gid));
        for time in [node.modified, node.changed] {
            record.number(time.seconds).number(u64::from(time.nanos));
        }
        node.xattrs.encode(record);
        match &node.body {
            Body::Directory(directory) => {
                record.number(Kind::Directory as u64);
                directory.policy.encode(record);
            }
            Body::File(content) => {
                record.number(Kind::File as u64);
                content.encode(record);
            }
        }
    }

    /// The space that the two journals tell of. No reader and no write is under way in it.
    ///
    /// # Errors
    /// Neither is a space's.
    pub fn restore(journals: [&[u8]; 2]) -> Result<Restored, Damaged> {
        let valid = journals.iter().filter_map(|journal| Some((epoch_of(journal)?, *journal)));
        let (epoch, journal) = valid.max_by_key(|(epoch, _)| *epoch).ok_or(Damaged("neither has a snapshot"))?;
        let mut records = Records::default();
        for batch in batches(journal) {
            records.read(Decoder(batch))?;
        }
        Ok(Restored { space: records.into_space()?, epoch })
    }

    /// Every file, with what its memory has to be after [`Space::restore`].
    pub fn file_memory(&self) -> Vec<FileMemory> {
        let files = self.tree.nodes().filter_map(|(ino, node)| match &node.body {
            Body::File(content) => Some(FileMemory { ino, size: content.size(), freed: content.freed() }),
            Body::Directory(_) => None,
        });
        files.collect()
    }

    /// The request was not answered before the process ended. Files that it has opened are closed, for the guest does not know
    /// them. If it is answered with an error now, that may be the end of the last writer and seals the file; if it is carried
    /// out `again`, it opens the file once more.
    pub fn forget_request(&mut self, request: u64, again: bool) {
        let opened: Vec<HandleId> =
            self.handles.iter().filter(|(_, handle)| handle.request == request).map(|(id, _)| *id).collect();
        for id in opened {
            let _ = self.close(id, if again { Closed::ToOpenAgain } else { Closed::ForGood });
        }
    }

    /// What the guest's kernel has agreed with the file server at the mount.
    pub fn session(&self) -> u64 {
        self.session
    }

    pub fn set_session(&mut self, session: u64) {
        self.session = session;
    }
}

/// The number of a journal that begins with a whole snapshot.
fn epoch_of(journal: &[u8]) -> Option<u64> {
    let mut first = Decoder(batches(journal).next()?);
    (first.number().ok()? == SNAPSHOT).then(|| first.number().ok())?
}

fn small(number: u64) -> Result<u32, Damaged> {
    u32::try_from(number).map_err(|_| Damaged("a number is beyond its limit"))
}

fn time(from: &mut Decoder<'_>) -> Result<Time, Damaged> {
    Ok(Time { seconds: from.number()?, nanos: small(from.number()?)? })
}

impl Records {
    fn read(&mut self, mut from: Decoder<'_>) -> Result<(), Damaged> {
        while !from.is_empty() {
            match from.number()? {
                SNAPSHOT => {
                    from.number()?;
                }
                HEAD => self.head = Some(Head::read(&mut from)?),
                NODE => {
                    let ino = Ino(from.number()?);
                    self.nodes.insert(ino, SavedNode::read(&mut from)?);
                }
                NODE_GONE => drop(self.nodes.remove(&Ino(from.number()?))),
                HANDLE => {
                    let id = HandleId(from.number()?);
                    let ino = Ino(from.number()?);
                    let access = if from.number_below(1)? == 1 { Access::Write } else { Access::Read };
                    self.handles.insert(id, Handle { ino, access, request: from.number()? });
                }
                HANDLE_GONE => {
                    self.handles.remove(&HandleId(from.number()?));
                }
                _ => return Err(Damaged("a record of an unknown kind")),
            }
            if self.nodes.len() > NODES_MAX || self.handles.len() > HANDLES_MAX {
                return Err(Damaged("more than there may be"));
            }
        }
        Ok(())
    }

    fn into_space(self) -> Result<Space, Damaged> {
        let head = self.head.ok_or(Damaged("it has no head"))?;
        let nodes = self.nodes.into_iter().map(|(ino, saved)| (ino, saved.name, saved.node));
        let tree = Tree::restore(nodes.collect(), Ino(head.next_ino))?;
        let mut space = Space::new(head.budget);
        space.tree = tree;
        space.next_handle = head.next_handle;
        space.refused_changes = head.refused_changes;
        (space.bytes_written, space.bytes_acknowledged) = (head.bytes_written, head.bytes_acknowledged);
        space.session = head.session;
        for (id, handle) in self.handles {
            if id.0 >= head.next_handle {
                return Err(Damaged("a handle that was not given out"));
            }
            space.restore_handle(id, handle)?;
        }
        for ino in space.tree.inos() {
            if let Ok(content) = space.content_mut(ino) {
                let charged = content.trim();
                space.used = space.used.checked_add(charged).ok_or(Damaged("more bytes than there can be"))?;
            }
            space.drop_if_unused(ino);
        }
        Ok(space)
    }
}

impl Space {
    fn restore_handle(&mut self, id: HandleId, handle: Handle) -> Result<(), Damaged> {
        let node = self.tree.node_mut(handle.ino).map_err(|_| Damaged("a handle of no file"))?;
        match (&mut node.body, handle.access) {
            (Body::File(content), Access::Write) => content.add_writer(),
            (Body::File(_), Access::Read) => {}
            (Body::Directory(_), _) => return Err(Damaged("a handle of a directory")),
        }
        node.handles += 1;
        self.handles.insert(id, handle);
        Ok(())
    }
}

impl Head {
    fn read(from: &mut Decoder<'_>) -> Result<Head, Damaged> {
        Ok(Head {
            budget: from.number()?,
            next_ino: from.number()?,
            next_handle: from.number()?,
            refused_changes: from.number()?,
            bytes_written: from.number()?,
            bytes_acknowledged: from.number()?,
            session: from.number()?,
        })
    }
}

impl SavedNode {
    fn read(from: &mut Decoder<'_>) -> Result<SavedNode, Damaged> {
        let parent = from.number()?;
        let name = from.bytes(NAME_BYTES_MAX)?.into();
        let mode = small(from.number_below(0o7777)?)?;
        let owner = Owner { uid: small(from.number()?)?, gid: small(from.number()?)? };
        let (modified, changed) = (time(from)?, time(from)?);
        let xattrs = Xattrs::decode(from)?;
        let body = match from.number()? {
            kind if kind == Kind::Directory as u64 => Node::directory(Policy::decode(from)?),
            kind if kind == Kind::File as u64 => Body::File(Box::new(Content::decode(from)?)),
            _ => return Err(Damaged("neither a file nor a directory")),
        };
        let parent = (parent != 0).then_some(Ino(parent));
        let node = Node { parent, mode, owner, modified, changed, xattrs, handles: 0, readers: 0, body };
        Ok(SavedNode { name, node })
    }
}

impl Tree {
    /// Puts nodes into their directories. Each may say anything about where it is.
    fn restore(saved: Vec<(Ino, Box<[u8]>, Node)>, next: Ino) -> Result<Tree, Damaged> {
        let mut places = Vec::new();
        let mut nodes = BTreeMap::new();
        for (ino, name, node) in saved {
            if ino.0 == 0 || ino >= next {
                return Err(Damaged("a number that was not given out"));
            }
            if let Some(parent) = node.parent {
                places.push((parent, name, ino));
            }
            nodes.insert(ino, node);
        }
        let mut tree = Tree::of(nodes, next);
        if tree.node(ROOT).ok().and_then(|root| root.parent).is_some() || tree.directory(ROOT).is_err() {
            return Err(Damaged("it has no root"));
        }
        for (parent, name, ino) in places {
            tree.put(parent, &name, ino).map_err(|_| Damaged("a name that cannot be"))?;
        }
        if tree.inos().into_iter().any(|ino| !tree.is_in_place(ino)) {
            return Err(Damaged("a directory that is below itself, or too deep"));
        }
        Ok(tree)
    }
}
