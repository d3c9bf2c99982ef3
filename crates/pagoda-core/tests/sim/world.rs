//! What the kernel holds: the RAM file, the swap file's blocks, the VMM's page-table entries, the clock of direct I/O, intents.
//!
//! Naive on purpose: one entry a page, no sets, and nothing shared with the machine but the numbers of pages. Content is
//! a number; 0 stands for a page of zeros.

use std::cell::Cell;
use std::rc::Rc;

use pagoda_core::fault::{Access, FaultKind};

use crate::borrow::Loan;
use crate::image::{Blocks, Image};
use crate::moving::Moving;

pub const CHUNK: usize = 256;
/// Content of a frame that nobody has written yet. In a real one: zeros, or what was there before.
pub const GARBAGE: u64 = u64::MAX;

/// A page frame. Direct I/O holds on to the frame, whatever becomes of the file.
pub type Frame = Rc<Cell<u64>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pte {
    Absent,
    Protected,
    Writable,
}

#[derive(Clone, Copy, Debug)]
pub struct Message {
    pub page: usize,
    pub access: Access,
    pub kind: FaultKind,
}

/// What a crash leaves behind, the guest apart.
#[derive(Debug)]
pub struct World {
    pub ram: Vec<Option<Frame>>,
    pub blocks: Blocks,
    /// Of the VM's memory, the oldest first.
    pub images: Vec<Image>,
    /// Images that have begun.
    pub begun: usize,
    /// Entries of images that refer to a parent.
    pub inherited: u64,
    pub pte: Vec<Pte>,
    /// Somebody reached the page since the oracle looked.
    pub used: Vec<bool>,
    pub registered: bool,
    /// Fault messages that the daemon has not taken in yet.
    pub messages: Vec<Message>,
    /// Pages that were woken since the VMM looked.
    pub woken: Vec<std::ops::Range<usize>>,
    pub epoch: u64,
    /// Start epochs of the direct I/Os in flight; the VMM keeps them.
    pub slots: Vec<u64>,
    /// Pages whose truth is not the RAM file, each with the operation that declared it.
    pub intents: Vec<(u16, Vec<usize>)>,
    /// The VM's table of shared pages: the frame of each.
    pub entries: Vec<Option<usize>>,
    /// The share group's frames, as far as they are in use.
    pub frames: Vec<Option<u64>>,
    /// Entries of the other VMs in the group.
    pub others: Vec<usize>,
    /// What the VM borrows of its snapshot's template.
    pub loan: Loan,
    /// A move of the VM to another host.
    pub moving: Option<Moving>,
}

impl World {
    pub fn new(pages: usize) -> World {
        World {
            ram: vec![None; pages],
            blocks: Blocks::new(pages),
            images: Vec::new(),
            begun: 0,
            inherited: 0,
            pte: vec![Pte::Absent; pages],
            used: vec![false; pages],
            registered: false,
            messages: Vec::new(),
            woken: Vec::new(),
            epoch: 1,
            slots: Vec::new(),
            intents: Vec::new(),
            entries: vec![None; pages],
            frames: Vec::new(),
            others: Vec::new(),
            loan: Loan::new(pages),
            moving: None,
        }
    }

    /// Content of the frame that the page's entry names.
    pub fn shared_content(&self, page: usize) -> Option<u64> {
        self.entries[page].map(|frame| self.frames[frame].expect("an entry names a frame in use"))
    }

    pub fn pages(&self) -> usize {
        self.ram.len()
    }

    pub fn oldest_io(&self) -> u64 {
        if self.loan.is_io_unseen {
            return 0;
        }
        self.slots.iter().copied().min().unwrap_or(u64::MAX)
    }

    /// Reaches a page the way the processor does. `None`: it faulted, and the thread sleeps until it is woken.
    pub fn reach(&mut self, page: usize, access: Access) -> Option<Frame> {
        if self.loan.has(page) {
            return self.reach_borrowed(page, access);
        }
        if !self.registered {
            let frame = self.ram[page].get_or_insert_with(|| Rc::new(Cell::new(0)));
            self.pte[page] = Pte::Writable;
            return Some(frame.clone());
        }
        let kind = match (self.pte[page], access) {
            (Pte::Writable, _) | (Pte::Protected, Access::Read) => {
                self.used[page] = true;
                return Some(self.ram[page].clone().expect("a mapped page has a frame"));
            }
            (Pte::Protected, Access::Write) => FaultKind::WriteProtected,
            (Pte::Absent, _) => FaultKind::Unmapped,
        };
        self.messages.push(Message { page, access, kind });
        None
    }

    /// `UFFDIO_CONTINUE`, page by page: a page that is mapped already stays as it is.
    pub fn map(&mut self, page: usize, protect: bool) {
        assert!(self.ram[page].is_some(), "page {page} is mapped, but is a hole");
        if self.pte[page] == Pte::Absent {
            self.pte[page] = if protect { Pte::Protected } else { Pte::Writable };
        }
    }

    /// Write-protects a page as `UFFDIO_WRITEPROTECT` does, if it is mapped writable.
    pub fn protect(&mut self, page: usize) {
        if self.pte[page] == Pte::Writable {
            self.pte[page] = Pte::Protected;
        }
    }

    pub fn unprotect(&mut self, page: usize) {
        if self.pte[page] == Pte::Protected {
            self.pte[page] = Pte::Writable;
        }
    }

    /// Content appears in the file in one step, as with `UFFDIO_COPY`.
    pub fn put(&mut self, page: usize, content: u64) {
        assert!(self.ram[page].is_none(), "page {page} is put into the RAM file, but is there");
        assert_eq!(self.pte[page], Pte::Absent);
        self.ram[page] = Some(Rc::new(Cell::new(content)));
    }

    pub fn punch(&mut self, page: usize) {
        self.ram[page] = None;
        self.pte[page] = Pte::Absent;
    }

    /// A punch of a folio that cannot be split.
    pub fn punch_in_place(&mut self, page: usize) {
        self.pte[page] = Pte::Absent;
        if let Some(frame) = &self.ram[page] {
            frame.set(0);
        }
    }

    pub fn swapped_content(&self, page: usize) -> u64 {
        self.blocks.get(page).unwrap_or(0)
    }

    /// What a daemon that starts now would take for the page's content.
    pub fn recoverable(&self, page: usize) -> u64 {
        if self.loan.has(page) {
            return self.loan.content(page);
        }
        let intended = self.intents.iter().any(|(_, pages)| pages.contains(&page));
        match &self.ram[page] {
            Some(frame) if !intended => frame.get(),
            _ => self.shared_content(page).unwrap_or_else(|| self.swapped_content(page)),
        }
    }
}
