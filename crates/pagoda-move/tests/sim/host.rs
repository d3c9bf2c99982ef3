//! A host: what outlives its daemon, and the daemon.

use pagoda_core::units::{PageCount, PageIdx};
use pagoda_move::map::PageMap;
use pagoda_move::note::Note;
use pagoda_move::units::{HostKey, Moment};
use pagoda_move::wire::offer::Hello;

use crate::destination::Incoming;
use crate::source::Outgoing;

/// Pages of the VM: two chunks, the last one not whole.
pub const PAGES: PageCount = PageCount(300);
/// What stands in memory that nobody has written, or that was given back.
pub const GARBAGE: u64 = u64::MAX;
pub const STREAMS: usize = 2;

/// The VM's process. It outlives the daemon.
#[derive(Clone, Copy, Debug)]
pub struct Qemu {
    pub running: bool,
    /// Disk writes that the guest has done, as far as this copy of it knows.
    pub count: u64,
}

#[derive(Debug)]
pub struct Host {
    pub key: HostKey,
    /// What is on the disk for sure, and what is on its way there.
    pub note: Option<Note>,
    pub writing: Option<(u64, Option<Note>)>,
    pub disk_fails: bool,
    pub qemu: Option<Qemu>,
    pub was_killed: bool,
    pub reserved: bool,
    pub ram: Vec<u64>,
    /// Pages of a VM here that are still at its source. In files, so that it outlives the daemon.
    pub missing: PageMap,
    pub protected: PageMap,
    pub written: PageMap,
    pub epoch: u64,
    /// Direct I/O into pages, each with the clock at its beginning.
    pub ios: Vec<(PageIdx, u64)>,
    pub life: u64,
    pub paused_until: Moment,
    pub daemon: Option<Daemon>,
}

#[derive(Debug, Default)]
pub struct Daemon {
    pub source: Option<Outgoing>,
    pub destination: Option<Incoming>,
    pub greeted: Option<Hello>,
}

impl Host {
    pub fn new(key: u8) -> Host {
        let empty = PageMap::empty(PAGES);
        Host {
            key: HostKey([key; 32]),
            note: None,
            writing: None,
            disk_fails: false,
            qemu: None,
            was_killed: false,
            reserved: false,
            ram: vec![GARBAGE; PAGES.0 as usize],
            missing: empty.clone(),
            protected: empty.clone(),
            written: empty,
            epoch: 1,
            ios: Vec::new(),
            life: 0,
            paused_until: Moment::default(),
            daemon: Some(Daemon::default()),
        }
    }

    pub fn is_running(&self) -> bool {
        self.qemu.is_some_and(|qemu| qemu.running)
    }

    /// What the daemon goes by: what it wants on the disk, or what is there.
    pub fn current_note(&self) -> Option<Note> {
        let daemon = self.daemon.as_ref().expect("a daemon");
        match (&daemon.source, &daemon.destination) {
            (Some(source), _) => source.owner.note(),
            (_, Some(destination)) => destination.owner.note(),
            _ => self.note,
        }
    }

    /// The page is about to be written, by a processor or by an I/O that begins.
    pub fn reach_for_write(&mut self, page: PageIdx) {
        if self.protected.contains(page) {
            self.protected.remove(page);
            self.written.insert(page);
        }
    }

    /// What was written since the last look. It is protected again; then the clock goes on.
    pub fn scan(&mut self) -> PageMap {
        let written = self.written.take();
        self.protected.insert_all(&written);
        self.epoch += 1;
        written
    }

    pub fn protect_all(&mut self) {
        self.protected = PageMap::full(PAGES);
        self.written = PageMap::empty(PAGES);
        self.epoch += 1;
    }

    /// QEMU, its memory and what was reserved are gone.
    pub fn discard(&mut self) {
        (self.qemu, self.reserved) = (None, false);
        self.ram.fill(GARBAGE);
        self.missing = PageMap::empty(PAGES);
        self.ios.clear();
    }
}
