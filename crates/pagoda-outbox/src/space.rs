//! The space as a whole: files, handles, readers, and the budget that they share.

mod expiry;
mod files;
mod jobs;
pub(crate) mod saved;
mod transmission;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use crate::content::Content;
use crate::jobs::Jobs;
use crate::node::{Body, Ino, Time};
use crate::readers::Readers;
use crate::refusal::Refusal;
use crate::tree::Tree;

/// Number of an open file or directory. Never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandleId(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

#[derive(Debug, Clone, Copy)]
struct Handle {
    ino: Ino,
    access: Access,
    /// Number of the request that has opened it.
    request: u64,
}

/// A write that may be made now: of the bytes from `range.start` to `range.end` of `ino`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a write that was planned has to be completed, or readers wait for it"]
pub struct Write {
    pub ino: Ino,
    pub range: Range<u64>,
}

/// Memory that is to be given back by the one who has it, and then reported by [`Space::complete_reclaim`]. Until then it
/// counts as used.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "memory counts as used until it was given back"]
pub struct Reclaim {
    pub ino: Ino,
    pub kind: ReclaimKind,
    bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReclaimKind {
    /// Whole pages at the beginning of a file.
    Punch(Range<u64>),
    /// The file: it has no name, and nobody has it open or reads it.
    Drop,
}

/// How the space stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    pub budget: u64,
    /// Bytes of pages that files have, or that are being given back.
    pub used: u64,
    /// Those of them that were delivered and go when there is need.
    pub disposable: u64,
    /// The space has so many files and directories.
    pub nodes: u64,
    pub readers: u64,
    /// Changes below a send cursor that were refused.
    pub refused_changes: u64,
    /// Files that were removed because of their age, and those of them that had not been delivered.
    pub expired: u64,
    pub expired_undelivered: u64,
    pub bytes_written: u64,
    pub bytes_acknowledged: u64,
}

impl Figures {
    /// What a writer gets without waiting.
    pub fn available(&self) -> u64 {
        self.budget.saturating_sub(self.used - self.disposable)
    }
}

/// What is in the journal, so that only what differs goes there: see [`Space::take_changes`].
#[derive(Debug, Default)]
struct Noted {
    /// These records of nodes are in the journal.
    nodes: BTreeMap<Ino, Vec<u8>>,
    head: Vec<u8>,
    /// Handles that came or went since.
    handles: BTreeSet<HandleId>,
}

/// The crate's head says what a space is, and what always holds of it.
#[derive(Debug)]
pub struct Space {
    budget: u64,
    used: u64,
    tree: Tree,
    handles: BTreeMap<HandleId, Handle>,
    next_handle: u64,
    readers: Readers,
    /// Nodes that went, with memory that is still to be given back.
    dropped: Vec<Reclaim>,
    jobs: Jobs,
    refused_changes: u64,
    /// Of files that have none of their own; `None`: they stay.
    default_ttl: Option<Duration>,
    expired: u64,
    expired_undelivered: u64,
    bytes_written: u64,
    bytes_acknowledged: u64,
    /// The guest's kernel and the file server have agreed on this at the mount.
    session: u64,
    noted: Noted,
}

impl Space {
    pub fn new(budget: u64) -> Space {
        Space {
            budget,
            used: 0,
            tree: Tree::new(),
            handles: BTreeMap::new(),
            next_handle: 1,
            readers: Readers::default(),
            dropped: Vec::new(),
            jobs: Jobs::default(),
            refused_changes: 0,
            default_ttl: None,
            expired: 0,
            expired_undelivered: 0,
            bytes_written: 0,
            bytes_acknowledged: 0,
            session: 0,
            noted: Noted::default(),
        }
    }

    /// Below what is used: nothing is lost, and nothing is written until enough has been delivered. The caller then asks for
    /// [`Space::plan_reclaim`] of what is above the budget.
    pub fn set_budget(&mut self, budget: u64) {
        self.budget = budget;
    }

    pub fn figures(&self) -> Figures {
        let disposable = self.tree.nodes().filter_map(|(ino, node)| match &node.body {
            Body::File(content) => Some(content.disposable(self.readers.slowest(ino))),
            Body::Directory(_) => None,
        });
        Figures {
            budget: self.budget,
            used: self.used,
            disposable: disposable.sum(),
            nodes: self.tree.len() as u64,
            readers: self.readers.len() as u64,
            refused_changes: self.refused_changes,
            expired: self.expired,
            expired_undelivered: self.expired_undelivered,
            bytes_written: self.bytes_written,
            bytes_acknowledged: self.bytes_acknowledged,
        }
    }

    /// Nothing that was published waits for a delivery.
    pub fn is_drained(&self) -> bool {
        let figures = self.figures();
        figures.used == figures.disposable && self.readers.len() == 0
    }

    /// Memory to be given back now: of files that went, and `want` bytes of what was delivered, oldest files first.
    pub fn plan_reclaim(&mut self, want: u64) -> Vec<Reclaim> {
        let mut plan = std::mem::take(&mut self.dropped);
        let mut found: u64 = plan.iter().map(|reclaim| reclaim.bytes).sum();
        if found >= want {
            return plan;
        }
        for ino in self.tree.inos() {
            let slowest = self.readers.slowest(ino);
            // What is looked at for a change counts as changed.
            if !self.content(ino).is_ok_and(|content| content.disposable(slowest) > 0) {
                continue;
            }
            let Ok(content) = self.content_mut(ino) else { continue };
            if let Some((range, bytes)) = content.dispose(slowest, want - found) {
                found += bytes;
                plan.push(Reclaim { ino, kind: ReclaimKind::Punch(range), bytes });
            }
            if found >= want {
                break;
            }
        }
        plan
    }

    /// The memory was given back, so it is not used any more.
    pub fn complete_reclaim(&mut self, reclaim: Reclaim) {
        self.used = self.used.checked_sub(reclaim.bytes).expect("what is given back was used");
    }

    /// What is above the budget.
    pub fn excess(&self) -> u64 {
        self.used.saturating_sub(self.budget)
    }

    fn content(&self, ino: Ino) -> Result<&Content, Refusal> {
        match &self.tree.node(ino)?.body {
            Body::File(content) => Ok(content),
            Body::Directory(_) => Err(Refusal::IsADirectory),
        }
    }

    fn content_mut(&mut self, ino: Ino) -> Result<&mut Content, Refusal> {
        match &mut self.tree.node_mut(ino)?.body {
            Body::File(content) => Ok(content),
            Body::Directory(_) => Err(Refusal::IsADirectory),
        }
    }

    /// Counts what was refused because of a send cursor.
    fn noted<T>(&mut self, result: Result<T, Refusal>) -> Result<T, Refusal> {
        if matches!(result, Err(Refusal::BelowCursor)) {
            self.refused_changes += 1;
        }
        result
    }

    /// Forgets a node that has no name and that nobody uses.
    fn drop_if_unused(&mut self, ino: Ino) {
        let Ok(node) = self.tree.node(ino) else { return };
        let is_idle = match &node.body {
            Body::File(content) => content.is_idle(),
            Body::Directory(_) => true,
        };
        if node.parent.is_some() || node.handles > 0 || node.readers > 0 || !is_idle || ino == crate::node::ROOT {
            return;
        }
        if let Some(node) = self.tree.remove(ino)
            && let Body::File(content) = node.body
        {
            self.dropped.push(Reclaim { ino, kind: ReclaimKind::Drop, bytes: content.charged_bytes() });
        }
    }

    /// The bytes of a file are gone, and it with them.
    pub fn lose(&mut self, ino: Ino, now: Time) {
        let Ok(content) = self.content_mut(ino) else { return };
        content.lose();
        self.tree.unlink_node(ino, now).expect("a node of the tree has its name in its directory");
        self.drop_if_unused(ino);
    }

    /// The process takes over from another one, some of whose writes are still to be carried out. Until [`Space::let_go`] readers get
    /// nothing new of files that may still change, or what half a write has left would be sent for good.
    pub fn hold(&mut self) {
        self.all_content(Content::hold);
    }

    /// All of those writes have been carried out or have failed.
    pub fn let_go(&mut self) {
        self.all_content(Content::let_go);
    }

    fn all_content(&mut self, change: impl Fn(&mut Content)) {
        for ino in self.tree.inos() {
            if let Ok(content) = self.content_mut(ino) {
                change(content);
            }
        }
    }

    /// The guest has started anew, or is gone. What it was writing will never be whole: readers of it are told so, and its
    /// name goes. What it has closed stays.
    pub fn abandon(&mut self, now: Time) {
        self.noted.handles.extend(self.handles.keys());
        self.handles.clear();
        self.jobs.all_gone();
        self.let_go();
        for ino in self.tree.inos() {
            let Ok(node) = self.tree.node_mut(ino) else { continue };
            node.handles = 0;
            if let Body::File(content) = &mut node.body
                && content.abandon_writers()
            {
                self.tree.unlink_node(ino, now).expect("a node of the tree has its name in its directory");
            }
            self.drop_if_unused(ino);
        }
    }
}
