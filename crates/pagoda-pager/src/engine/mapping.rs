//! Processes that map the VM's memory beside its VMM: they come, fault, unmap what is to leave, and go.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pagoda_abi::attach::{LentMap, Packet};
use pagoda_core::fault::{Access, Event, FaultKind};
use pagoda_core::units::{CHUNK_PAGES, PAGE_SIZE};
use pagoda_sys::Errno;
use pagoda_sys::uffd::{Fault, Uffd};

use super::link::agent::Asked;
use super::link::mappers::{GREET_MAX, Zapped};
use super::slowing::Faulted;
use super::{Engine, EngineError, FAULTS_MAX};
use crate::mapper::{Mapped, NewMapper};

/// The pause before a mapper is asked again what it maps.
const GREET_PAUSE: Duration = Duration::from_millis(20);

impl Engine {
    /// Takes in a mapper. Until it has said what it maps, nothing leaves that it may have mapped before.
    pub(super) fn add_mapper(&mut self, new: NewMapper) {
        let (slot, has_maps, pid) = (new.slot, new.has_maps, new.pid);
        self.paging.mappers().add(slot, has_maps);
        match self.link.mappers.add(&mut self.ring, new) {
            Ok(()) => {
                self.link.mappers.restart();
                self.link.mappers.connect(&mut self.ring);
            }
            // Its end would not be noticed.
            Err(error) => self.pin(format!("process {pid}, which maps its memory, cannot be watched: {error}")),
        }
    }

    /// Takes in the mappers of a VM that an earlier daemon served: before its memory is registered, all have said what they map.
    pub(super) fn meet_mappers(&mut self, known: Vec<NewMapper>, is_taken_over: bool) -> Result<(), EngineError> {
        if is_taken_over {
            self.paging.mappers().assume_armed();
        }
        for new in known {
            let (slot, has_maps) = (new.slot, new.has_maps);
            self.paging.mappers().add(slot, has_maps);
            self.link.mappers.add(&mut self.ring, new)?;
            if has_maps {
                self.meet(slot)?;
            }
        }
        Ok(())
    }

    /// Asks again while its program changes what it maps: a mapping that it has said may have ended since.
    fn meet(&mut self, slot: usize) -> Result<(), EngineError> {
        let deadline = Instant::now() + GREET_MAX;
        loop {
            let greeted = self.link.mappers.greet(&mut self.ring, slot, deadline);
            let taken = greeted.and_then(|(packet, fds)| match packet {
                Packet::Maps { pid, maps } => self.take_maps(slot, pid, maps.as_slice(), fds),
                other => Err(format!("it says {other:?}")),
            });
            let Err(why) = taken else { return Ok(()) };
            if self.link.mappers.worker_ended(&mut self.ring, slot) {
                self.paging.reset_mapper(&mut self.ring, slot);
            }
            // Whether what has mapped memory has ended too is the next attempt's to find out.
            if self.link.mappers.has_ended(&mut self.ring, slot) {
                return Err(EngineError::Mapper(why));
            }
            self.link.mappers.disconnect(&mut self.ring, slot);
            if Instant::now() >= deadline {
                return Err(EngineError::Mapper(why));
            }
            std::thread::sleep(GREET_PAUSE);
        }
    }

    pub(super) fn receive_from_mapper(&mut self, slot: usize, generation: u32, more: bool) {
        while let Some((packet, fds)) = self.link.mappers.receive(&mut self.ring, slot, generation) {
            self.mapper_says(slot, packet, fds);
        }
        if !more {
            self.link.mappers.poll_again(&mut self.ring, slot, generation);
        }
    }

    fn mapper_says(&mut self, slot: usize, packet: Packet, fds: Vec<OwnedFd>) {
        let is_greeted = self.link.mappers.is_greeted(slot);
        match packet {
            Packet::Maps { pid, maps } if !is_greeted => {
                if let Err(why) = self.take_maps(slot, pid, maps.as_slice(), fds) {
                    tracing::warn!(vm = %self.name, "a process that maps its memory: {why}");
                    self.link.mappers.disconnect(&mut self.ring, slot);
                }
                self.link.mappers.restart();
                self.zap_mappers();
            }
            Packet::Map { seq, map } if is_greeted => {
                let errno = match self.map_of(map) {
                    Some(mapped) => self.let_map(slot, mapped).err(),
                    None => Some(Errno::INVAL),
                };
                let errno = errno.map_or(0, |errno| errno.raw_os_error() as u32);
                self.link.mappers.send(&mut self.ring, slot, &Packet::Mapped { seq, errno });
            }
            Packet::Unmap { map, .. } if is_greeted => self.paging.mappers().unmapped(slot, map.addr),
            Packet::Zapped { seq, epoch, errno } if is_greeted => {
                if let Some(zapped) = self.link.mappers.complete(slot, seq, epoch, errno) {
                    self.zapped(zapped);
                    self.zap_mappers();
                }
            }
            Packet::Clocked { .. } => {
                self.link.mappers.complete_clock(slot);
                self.apply(Event::Tick);
            }
            Packet::Foreign { reason } => self.pin_for(reason),
            other => {
                tracing::warn!(vm = %self.name, ?other, "a mapper said something it should not");
                self.link.mappers.disconnect(&mut self.ring, slot);
            }
        }
    }

    /// It has said what it maps, and sent its userfaultfd and its pidfd.
    fn take_maps(&mut self, slot: usize, pid: u32, maps: &[LentMap], fds: Vec<OwnedFd>) -> Result<(), String> {
        let fds = <[OwnedFd; 2]>::try_from(fds);
        let [uffd, pidfd] = fds.map_err(|fds| format!("it sent {} descriptors", fds.len()))?;
        if self.link.mappers.worker_ended(&mut self.ring, slot) {
            // That has also ended the connection; the next one is of the new process.
            self.paging.reset_mapper(&mut self.ring, slot);
            return Err("the process before it has just ended".into());
        }
        let met = self.link.mappers.meet_worker(&mut self.ring, slot, pid, pidfd).map_err(|error| error.to_string())?;
        if !met {
            return Err("another process of it maps memory, and has not ended".into());
        }
        let uffd = Uffd::from_fd(uffd).map_err(|error| error.to_string())?;
        uffd.enable().map_err(|error| error.to_string())?;
        let maps: Option<Vec<Mapped>> = maps.iter().map(|map| self.map_of(*map)).collect();
        let maps = maps.ok_or("it maps what is not RAM of this VM")?;
        let process = self.link.mappers.worker(slot).ok_or("its process is not known")?;
        let taken = self.paging.take_maps(&mut self.ring, slot, process, uffd, &maps);
        taken.map_err(|errno| format!("what it maps cannot be registered: {errno}"))?;
        self.link.mappers.send(&mut self.ring, slot, &Packet::Welcome { flags: 0 });
        self.link.mappers.note_greeted(slot);
        Ok(())
    }

    fn let_map(&mut self, slot: usize, mapped: Mapped) -> Result<(), Errno> {
        let process = self.link.mappers.worker(slot).ok_or(Errno::SRCH)?;
        self.paging.let_map(slot, process, mapped)
    }

    /// Whole pages of RAM at a whole address, or nothing.
    fn map_of(&self, map: LentMap) -> Option<Mapped> {
        let first = self.paging.space().page_in_region(map.region, map.offset, map.len)?;
        let is_sound = map.addr.is_multiple_of(PAGE_SIZE) && map.addr.checked_add(map.len).is_some();
        is_sound.then_some(Mapped { first, pages: map.len / PAGE_SIZE, addr: map.addr })
    }

    /// The pidfd of a process that mapped RAM is readable.
    pub(super) fn worker_exits(&mut self, slot: usize, more: bool) {
        if self.link.mappers.worker_ended(&mut self.ring, slot) {
            self.paging.reset_mapper(&mut self.ring, slot);
            // It has no entries any more: zaps do not wait for it.
            self.link.mappers.restart();
            self.mapper_exits(slot, true);
            self.turn_mappers();
            self.zap_mappers();
        } else if self.link.mappers.worker(slot).is_none() {
            // Its end was seen when the next one came. The mapper may have ended too.
            self.mapper_exits(slot, true);
        } else if !more && let Err(error) = self.link.mappers.poll_worker(&mut self.ring, slot) {
            self.pin(format!("a process that maps its memory cannot be watched: {error}"));
        }
    }

    /// A mapper's pidfd is readable.
    pub(super) fn mapper_exits(&mut self, slot: usize, more: bool) {
        if self.link.mappers.has_ended(&mut self.ring, slot) {
            self.paging.forget_mapper(&mut self.ring, slot);
            // It has no entries any more: zaps do not wait for it.
            self.link.mappers.restart();
            self.zap_mappers();
        } else if !more && let Err(error) = self.link.mappers.poll_exit(&mut self.ring, slot) {
            self.pin(format!("a process that maps its memory cannot be watched: {error}"));
        }
    }

    /// Reads faults of a mapper, each of which is answered as the VMM's are.
    pub(super) fn read_mapper_faults(&mut self, slot: usize) {
        let mut room = [Fault::default(); FAULTS_MAX];
        let mut faults = Vec::new();
        loop {
            let read = self.paging.mappers().read_faults(slot, &mut faults, &mut room);
            self.fault_at = Instant::now();
            for (page, fault) in faults.drain(..) {
                let access = if fault.write || fault.wp { Access::Write } else { Access::Read };
                let kind = if fault.wp { FaultKind::WriteProtected } else { FaultKind::Unmapped };
                // The thread is none of the VMM's, whose processors the engine follows.
                self.answer(Faulted { page, access, kind, thread: 0 });
            }
            match read {
                Ok(true) => drop(self.ring.submit()),
                Ok(false) => return,
                Err(error) => return tracing::debug!(vm = %self.name, "read faults of a mapper: {error}"),
            }
        }
    }

    pub(super) fn poll_mapper_faults(&mut self, slot: usize) {
        let polled = self.paging.mappers().poll_faults(&mut self.ring, slot);
        if let Err(error) = polled {
            self.halt(&format!("cannot wait for faults of a mapper: {error}").into());
        }
    }

    /// The VMM has answered a zap. What was watched without userfaultfds is the VMM's own use; all else is zapped in mappers too.
    pub(super) fn zapped_in_vmm(&mut self, zapped: Zapped) {
        let is_machines = matches!(zapped.asked, Asked::Chunks(_) | Asked::Watch { .. });
        if !is_machines || !zapped.done || self.link.mappers.is_empty() {
            return self.zapped(zapped);
        }
        self.link.mappers.queue(zapped);
        self.zap_mappers();
    }

    /// Goes on with zaps in mappers, if all that may have entries are there.
    pub(super) fn zap_mappers(&mut self) {
        loop {
            let slots = self.link.mappers.slots();
            let is_absent =
                |slot: &usize| self.paging.mappers().has_maps(*slot) && !self.link.mappers.is_greeted(*slot);
            if slots.iter().any(is_absent) {
                return;
            }
            let Some(zapped) = self.link.mappers.next() else { return };
            let packets = slots.into_iter().map(|slot| (slot, self.ranges_in(slot, &zapped.asked))).collect();
            match self.link.mappers.begin(&mut self.ring, zapped, packets) {
                Some(zapped) => self.zapped(zapped),
                None => return,
            }
        }
    }

    fn ranges_in(&self, slot: usize, asked: &Asked) -> Vec<pagoda_abi::attach::Ranges> {
        let (machine, mappers) = (self.paging.machine(), self.paging.mappers());
        match asked {
            Asked::Chunks(op) => {
                let chunks = machine.zap_chunks(*op).iter();
                mappers.ranges(slot, chunks.map(|chunk| (chunk.first_page(), CHUNK_PAGES)))
            }
            Asked::Watch { ticket, .. } if *ticket == machine.watch_ticket() => {
                mappers.ranges(slot, machine.watch_zaps().map(|page| (page, 1)))
            }
            // Nobody waits for another ticket's answer.
            _ => Vec::new(),
        }
    }

    /// Once in a while: mappers that are not connected.
    pub(super) fn turn_mappers(&mut self) {
        if !self.link.mappers.is_empty() {
            self.link.mappers.connect(&mut self.ring);
        }
    }
}
