//! Files and directories without their bytes.

use std::collections::BTreeMap;

use crate::content::{Content, State};
use crate::policy::Policy;
use crate::xattrs::Xattrs;

/// Number of a file or directory. Never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

/// The directory of all (`FUSE_ROOT_ID`).
pub const ROOT: Ino = Ino(1);

/// A time counts from the beginning of 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time {
    pub seconds: u64,
    pub nanos: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// What a new file or directory has from the beginning.
#[derive(Debug, Clone, Copy, Default)]
pub struct NewNode {
    /// The node has these permission bits.
    pub mode: u32,
    pub owner: Owner,
    pub now: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Directory,
    File,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    pub ino: Ino,
    pub kind: Kind,
    pub size: u64,
    /// Bytes of pages that it has.
    pub charged: u64,
    pub mode: u32,
    pub owner: Owner,
    pub modified: Time,
    pub changed: Time,
    /// A file has 1 while it has a name, else 0. Every directory has 2, whatever is in it.
    pub links: u32,
    /// State, cursor and freed bytes are a file's; a directory is open, with 0 and 0.
    pub state: State,
    pub cursor: u64,
    pub freed: u64,
    /// Nobody writes it now.
    pub is_complete: bool,
    /// Readers may have it.
    pub is_published: bool,
}

#[derive(Debug, Clone)]
pub struct Directory {
    pub names: BTreeMap<Box<[u8]>, Ino>,
    /// The same by number, which is the order that listings go on by.
    pub by_ino: BTreeMap<Ino, Box<[u8]>>,
    /// What new files in it get.
    pub policy: Policy,
}

#[derive(Debug, Clone)]
pub enum Body {
    Directory(Directory),
    File(Box<Content>),
}

#[derive(Debug, Clone)]
pub struct Node {
    /// `None`: it has no name any more, or is the root.
    pub parent: Option<Ino>,
    pub mode: u32,
    pub owner: Owner,
    pub modified: Time,
    pub changed: Time,
    pub xattrs: Xattrs,
    /// Handles of the guest.
    pub handles: usize,
    /// Readers of the transmitter.
    pub readers: usize,
    pub body: Body,
}

impl Node {
    pub fn new(parent: Option<Ino>, new: NewNode, body: Body) -> Node {
        Node {
            parent,
            mode: new.mode & 0o7777,
            owner: new.owner,
            modified: new.now,
            changed: new.now,
            xattrs: Xattrs::default(),
            handles: 0,
            readers: 0,
            body,
        }
    }

    pub fn directory(policy: Policy) -> Body {
        Body::Directory(Directory { names: BTreeMap::new(), by_ino: BTreeMap::new(), policy })
    }

    pub fn attributes(&self, ino: Ino) -> Attributes {
        let named = u32::from(self.parent.is_some());
        let base = Attributes {
            ino,
            kind: Kind::Directory,
            size: 0,
            charged: 0,
            mode: self.mode,
            owner: self.owner,
            modified: self.modified,
            changed: self.changed,
            links: 2,
            state: State::Open,
            cursor: 0,
            freed: 0,
            is_complete: true,
            is_published: true,
        };
        match &self.body {
            Body::Directory(_) => base,
            Body::File(content) => Attributes {
                kind: Kind::File,
                size: content.size(),
                charged: content.charged_bytes(),
                links: named,
                state: content.state(),
                cursor: content.cursor(),
                freed: content.freed(),
                is_complete: content.is_complete(),
                is_published: content.is_published(),
                ..base
            },
        }
    }
}
