//! The same pages in mappers: their userfaultfds, what they map, and who waits there.
//!
//! Whatever is unmapped or protected in the VMM is so in every mapper, at once. The reverse is left to faults: a page that is mapped in
//! the VMM is mapped in a mapper when a thread there waits for it, with the same protection. So an entry of a mapper never allows
//! more than the VMM's, and the machine needs to know of none.
//!
//! A mapper that may have entries and whose userfaultfd is not here, because it has not come back to a new daemon, keeps the VM
//! from being armed and its pages from being protected; zaps wait for it ([`crate::engine::link::mappers`]).

use pagoda_abi::attach::{MAPS_MAX, Range, Ranges};
use pagoda_core::fault::Pages;
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::{Ring, RingError};
use pagoda_sys::uffd::{Fault, Protect, Uffd, gone};

use crate::mapper::{Mapped, Table};
use crate::source::Source;

/// The userfaultfds and mappings of all mappers of one VM.
#[derive(Debug, Default)]
pub struct Mappers {
    list: Vec<Mapper>,
    /// The VM is armed.
    is_armed: bool,
}

#[derive(Debug)]
struct Mapper {
    slot: usize,
    uffd: Option<Uffd>,
    table: Table,
    /// It may have page-table entries.
    has_maps: bool,
    /// Pages that its threads wait for.
    waiting: Vec<PageIdx>,
}

impl Mapper {
    /// Whether somebody waits for one of these pages. Nobody does any more.
    fn take_waiting(&mut self, pages: Pages) -> bool {
        let (first, end) = (pages.first().0, pages.first().0 + u64::from(pages.run.len));
        let before = self.waiting.len();
        self.waiting.retain(|page| page.0 < first || page.0 >= end);
        self.waiting.len() != before
    }

    fn pieces(&self, pages: Pages) -> impl Iterator<Item = (&Uffd, u64, u64)> {
        let pieces = self.table.pieces(pages.first(), u64::from(pages.run.len));
        self.uffd
            .as_ref()
            .into_iter()
            .zip(std::iter::once(pieces))
            .flat_map(|(uffd, pieces)| pieces.map(move |(addr, len)| (uffd, addr, len)))
    }

    fn register(&self) -> Result<(), Errno> {
        if !self.has_maps {
            return Ok(());
        }
        // Without it nobody knows what it has mapped.
        let uffd = self.uffd.as_ref().ok_or(Errno::BUSY)?;
        self.table.ranges().try_for_each(|(addr, len)| ended_or(uffd.register(addr, len)))
    }

    /// Leaves its faults to the kernel, which wakes who waits.
    fn unregister(&mut self) {
        for (addr, len) in self.table.ranges() {
            if let Some(uffd) = &self.uffd
                && let Err(errno) = uffd.unregister(addr, len)
            {
                tracing::debug!("unregister memory of a mapper: {errno}");
            }
        }
        self.waiting.clear();
    }
}

/// Pages that threads of one mapper wait for at the same time. It has a hundred threads; more is a mapper that interrupts them.
const WAITING_MAX: usize = 1024;

/// A process without an address space has no entries. (Registering says ENOMEM then, which may be something else.)
fn ended_or(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::SRCH) => Ok(()),
        other => other,
    }
}

impl Mappers {
    pub fn add(&mut self, slot: usize, has_maps: bool) {
        self.remove(slot);
        self.list.push(Mapper { slot, uffd: None, table: Table::default(), has_maps, waiting: Vec::new() });
    }

    /// An earlier daemon has served the VM, and may have had it armed: what mappers say is registered at once.
    pub fn assume_armed(&mut self) {
        self.is_armed = true;
    }

    /// Forgets a mapper that has ended.
    pub fn remove(&mut self, slot: usize) {
        self.list.retain(|mapper| mapper.slot != slot);
    }

    /// The process that mapped RAM has ended: there are no entries, and another process may come.
    pub fn reset(&mut self, slot: usize) {
        if let Some(mapper) = self.find(slot) {
            *mapper = Mapper { slot, uffd: None, table: Table::default(), has_maps: false, waiting: Vec::new() };
        }
    }

    fn find(&mut self, slot: usize) -> Option<&mut Mapper> {
        self.list.iter_mut().find(|mapper| mapper.slot == slot)
    }

    /// It has (come back and) said what it maps. Its faults are polled for from now on.
    ///
    /// # Errors
    /// One of them is not mapped, or is another's: nothing of the VM may leave.
    pub fn set_maps(&mut self, ring: &mut Ring, slot: usize, uffd: Uffd, maps: &[Mapped]) -> Result<(), Errno> {
        let is_armed = self.is_armed;
        let Some(mapper) = self.find(slot) else { return Err(Errno::NODEV) };
        if mapper.uffd.is_none() {
            poll(ring, slot, &uffd).map_err(|_| Errno::NOMEM)?;
            mapper.uffd = Some(uffd);
        }
        mapper.table.clear();
        maps.iter().for_each(|mapped| mapper.table.insert(*mapped));
        mapper.has_maps |= !maps.is_empty();
        mapper.waiting.clear();
        if is_armed {
            mapper.register()?;
        }
        mapper.wake_all();
        Ok(())
    }

    /// It maps another part, to which it has no access yet.
    ///
    /// # Errors
    /// The kernel's: it must not get access.
    pub fn insert(&mut self, slot: usize, mapped: Mapped) -> Result<(), Errno> {
        let is_armed = self.is_armed;
        let Some(mapper) = self.find(slot) else { return Err(Errno::NODEV) };
        let Some(uffd) = &mapper.uffd else { return Err(Errno::NODEV) };
        if mapper.table.len() >= MAPS_MAX {
            return Err(Errno::NOMEM);
        }
        if is_armed {
            uffd.register(mapped.addr, mapped.pages * PAGE_SIZE)?;
        }
        mapper.table.insert(mapped);
        mapper.has_maps = true;
        Ok(())
    }

    /// It has unmapped what began at this address.
    pub fn unmapped(&mut self, slot: usize, addr: u64) {
        if let Some(mapper) = self.find(slot) {
            mapper.table.remove(addr);
        }
    }

    /// Registers all that is mapped. Before anybody looks where the VM's pages are.
    ///
    /// # Errors
    /// [`Errno::BUSY`]: a mapper has not come back, or what it maps cannot be registered.
    pub fn arm(&mut self) -> Result<(), Errno> {
        self.is_armed = true;
        let registered = self.list.iter().try_for_each(Mapper::register);
        registered.map_err(|errno| {
            // Nothing is taken back here: pages may be out, and what is registered stays so.
            tracing::warn!("memory of a mapper cannot be registered: {errno}");
            Errno::BUSY
        })
    }

    /// Leaves all of it to the kernel.
    pub fn disarm(&mut self) {
        self.is_armed = false;
        self.list.iter_mut().for_each(Mapper::unregister);
    }

    /// Reads faults of a mapper, and the pages that they are about; whoever does not fault on RAM tries again.
    ///
    /// # Errors
    /// The mapper is gone, as a rule.
    pub fn read_faults(
        &mut self,
        slot: usize,
        into: &mut Vec<(PageIdx, Fault)>,
        room: &mut [Fault],
    ) -> std::io::Result<bool> {
        let is_armed = self.is_armed;
        let Some(mapper) = self.find(slot) else { return Ok(false) };
        let Some(uffd) = &mapper.uffd else { return Ok(false) };
        let count = uffd.read(room)?;
        for fault in &room[..count] {
            match mapper.table.page_at(fault.addr) {
                Some(page) if is_armed && mapper.waiting.len() < WAITING_MAX => {
                    if !mapper.waiting.contains(&page) {
                        mapper.waiting.push(page);
                    }
                    into.push((page, *fault));
                }
                Some(_) => {
                    let _ = uffd.wake(fault.addr, PAGE_SIZE);
                }
                // It is mapped no more, and what is there now is not RAM.
                None => {
                    let _ = uffd.unregister(fault.addr, PAGE_SIZE);
                }
            }
        }
        Ok(count == room.len())
    }

    /// Waits for messages of its userfaultfd.
    ///
    /// # Errors
    /// Of the ring.
    pub fn poll_faults(&mut self, ring: &mut Ring, slot: usize) -> Result<(), RingError> {
        let uffd = self.find(slot).and_then(|mapper| mapper.uffd.as_ref());
        uffd.map_or(Ok(()), |uffd| poll(ring, slot, uffd))
    }

    /// These pages are mapped in the VMM now, with this protection: so they are for whoever waits for one of them.
    pub fn map(&mut self, pages: Pages, protect: Protect) {
        for mapper in &mut self.list {
            if !mapper.take_waiting(pages) {
                continue;
            }
            for (uffd, addr, len) in mapper.pieces(pages) {
                let mapped = uffd.cont_over(addr, len, protect);
                if !mapped.is_all() && !mapped.gone() {
                    tracing::debug!("map pages in a mapper: {:?}", mapped.errno());
                    // The thread that waits there faults again.
                    let _ = uffd.wake(addr, len);
                }
            }
        }
    }

    /// These pages may be written in the VMM now.
    pub fn unprotect(&mut self, pages: Pages) {
        for mapper in &mut self.list {
            if !mapper.take_waiting(pages) {
                continue;
            }
            for (uffd, addr, len) in mapper.pieces(pages) {
                let _ = uffd.unprotect(addr, len);
                // Whoever waits may have no entry yet.
                let _ = uffd.wake(addr, len);
            }
        }
    }

    /// Write-protects these pages in every mapper.
    ///
    /// # Errors
    /// Of one of them: they may be written there as before.
    pub fn protect(&self, pages: Pages) -> Result<(), Errno> {
        for mapper in self.list.iter().filter(|mapper| mapper.has_maps) {
            if mapper.uffd.is_none() {
                return Err(Errno::BUSY);
            }
            mapper.pieces(pages).try_for_each(|(uffd, addr, len)| ended_or(uffd.protect(addr, len)))?;
        }
        Ok(())
    }

    /// Whoever waits for these pages tries again.
    pub fn wake(&mut self, pages: Pages) {
        for mapper in &mut self.list {
            if mapper.take_waiting(pages) {
                mapper.pieces(pages).for_each(|(uffd, addr, len)| {
                    let _ = uffd.wake(addr, len);
                });
            }
        }
    }

    /// Everybody who waits tries again.
    pub fn wake_all(&mut self) {
        self.list.iter_mut().for_each(Mapper::wake_all);
    }

    /// Where a mapper maps these pages, in packets.
    pub fn ranges(&self, slot: usize, pages: impl Iterator<Item = (PageIdx, u64)>) -> Vec<Ranges> {
        let mut packets: Vec<Ranges> = Vec::new();
        let Some(mapper) = self.list.iter().find(|mapper| mapper.slot == slot) else { return packets };
        for (first, count) in pages {
            for (addr, len) in mapper.table.pieces(first, count) {
                let range = Range { addr, len };
                if !packets.last_mut().is_some_and(|last| last.push(range)) {
                    let mut next = Ranges::default();
                    next.push(range);
                    packets.push(next);
                }
            }
        }
        packets
    }

    /// Whether this one may have page-table entries.
    pub fn has_maps(&self, slot: usize) -> bool {
        self.list.iter().any(|mapper| mapper.slot == slot && mapper.has_maps)
    }
}

impl Mapper {
    fn wake_all(&mut self) {
        self.waiting.clear();
        for (addr, len) in self.table.ranges() {
            if let Some(uffd) = &self.uffd
                && let Err(errno) = uffd.wake(addr, len)
                && !gone(errno)
            {
                tracing::debug!("wake a mapper: {errno}");
            }
        }
    }
}

fn poll(ring: &mut Ring, slot: usize, uffd: &Uffd) -> Result<(), RingError> {
    ring.poll_multishot(uffd.as_fd(), Source::MapperUffd(slot as u32).key())
}
