//! Arming: the VM's memory is registered with its userfaultfds, and what is where is found out.
//!
//! The kernel gives a range to one userfaultfd only. QEMU has its own for post-copy migration and background snapshots, which
//! the shim refuses; a VM that was started with an older shim may hold one. Then the VM runs on unarmed, over its limit if
//! need be, and arming is tried again.

use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, Located, Pages};
use pagoda_core::units::{ChunkIdx, PAGE_SIZE};
use pagoda_sys::ring::Ring;
use pagoda_sys::uffd::Resolved;

use super::busy::Busy;
use super::{Paging, io};
use crate::engine::broken::Broken;
use crate::engine::parts::EngineError;
use crate::recover::{self, RecoverError};

/// The pause between two attempts while the memory is another userfaultfd's.
const BUSY_PAUSE: Duration = Duration::from_secs(1);
/// How long a punch of the VMM's own may take: one is microseconds, and a host that runs short delays a thread for less.
const OWN_PUNCH_MAX: Duration = Duration::from_secs(5);
/// The pause between two looks whether the punch is over.
const OWN_PUNCH_PAUSE: Duration = Duration::from_micros(50);

impl Paging {
    /// Registers the memory, and tells the machine where every page is. `frozen`: pages that the newest image has no copy of.
    ///
    /// # Errors
    /// Another has the memory, or the kernel or a tier refuses. The machine is told nothing then.
    pub fn arm(&mut self, ring: &mut Ring, frozen: impl Fn(ChunkIdx) -> PageSet) -> Result<(), EngineError> {
        self.take_punches();
        if !std::mem::replace(&mut self.has_buffers, true) {
            ring.set_buffers(io::buffers()?)?;
        }
        let places = self.places()?;
        // It is no part of any page yet.
        self.drop_copies(&places)?;
        for (registered, shard) in self.space.shards().iter().enumerate() {
            let result = self.register(shard, &places);
            result.map_err(|errno| EngineError::Register { errno, registered })?;
        }
        let armed = self.mappers().arm();
        armed.map_err(|errno| EngineError::Register { errno, registered: self.space.shards().len() })?;
        self.protect_borrowed(&places)?;
        let mut found = match self.expected.take() {
            Some(found) => self.check_arrived(found)?,
            None => recover::find(&self.space, &mut self.tiers, frozen)?,
        };
        self.find_private(&places, &mut found)?;
        self.machine.armed(|chunk| found[chunk.as_usize()]);
        Ok(())
    }

    /// Where pages are that have arrived from another host, instead of looking for them.
    pub fn expect_pages(&mut self, found: Vec<Located>) {
        self.expected = Some(found);
    }

    /// Some pages of a VM that has arrived have not come yet: the tier of its source holds them from now on, and what has come of
    /// them before is outdated. They have no block in another tier when this returns. The RAM files may have a page still, of
    /// which `found` says nothing: it goes when the memory is registered.
    ///
    /// # Errors
    /// It cannot be noted, or an outdated block cannot be dropped; no tier expects pages. Nothing may serve the VM then.
    pub fn expect_missing(&mut self, found: &mut [Located]) -> Result<(), EngineError> {
        if found.len() != self.space.chunks().as_usize() {
            return Err(EngineError::Misplaced { chunk: ChunkIdx(found.len() as u32) });
        }
        for (chunk, located) in (0..).map(ChunkIdx).zip(&mut *found) {
            let missing = located.missing;
            let outdated = located.swap & missing;
            if !outdated.is_empty() {
                let dropped = self.tiers.drop_blocks(chunk, outdated);
                dropped.map_err(|source| RecoverError::Os { what: "drop blocks that are outdated", source })?;
            }
            located.ram -= missing;
        }
        let missing: Vec<PageSet> = found.iter().map(|located| located.missing).collect();
        let expected = self.tiers.expect(&missing);
        expected.map_err(|source| RecoverError::Os { what: "note which pages have not come", source })?;
        found.iter_mut().for_each(|located| located.swap |= located.missing);
        Ok(())
    }

    /// Compares where pages are said to be that have arrived with the files, by which alone a daemon goes that comes next. The memory
    /// is registered: nothing becomes a page of it any more without the engine. Until then a touch of the VMM, or the kernel, may have
    /// made pages of zeros where nothing is to be.
    fn check_arrived(&mut self, mut found: Vec<Located>) -> Result<Vec<Located>, EngineError> {
        if self.space.allocated() != pages_of(&found) {
            for (chunk, located) in (0..).map(ChunkIdx).zip(&found) {
                for run in (PageSet::FULL - located.ram).runs() {
                    let location = self.space.locate(Pages { chunk, run });
                    let punched = location.region.ram.punch(location.offset, location.len);
                    punched.map_err(|source| RecoverError::Os { what: "punch what has not arrived", source })?;
                }
            }
            if self.space.allocated() != pages_of(&found) {
                return Err(EngineError::Misplaced { chunk: ChunkIdx(0) });
            }
        }
        let in_dram: Vec<PageSet> = found.iter().map(|located| located.ram).collect();
        let held = self.tiers.recover(&in_dram).map_err(RecoverError::from)?;
        for (chunk, (located, held)) in (0..).map(ChunkIdx).zip(found.iter_mut().zip(held)) {
            // A file system may have more data than was written: its blocks may be larger than a page. That is zeros.
            if !held.contains_all(located.swap) {
                return Err(EngineError::Misplaced { chunk });
            }
            located.swap = held;
            located.missing = self.tiers.missing(chunk);
        }
        Ok(found)
    }

    /// The VM is armed because the machine asked for it.
    pub fn begin_to_page(&mut self) {
        if self.busy.take().is_some() {
            tracing::info!(vm = %self.vm, "its memory is free again, and it is paged");
        }
        // Now that it is known what is resident, page-out can begin.
        self.push(Event::Tick);
    }

    /// Another has the memory that comes after the first `registered` ranges: leaves the VM as it was, to try again later.
    pub fn wait_until_free(&mut self, registered: usize) -> Result<(), Broken> {
        // No others: until Linux 6.15 a userfaultfd could take a range from another.
        for shard in &self.space.shards()[..registered] {
            if let Err(errno) = shard.uffd.unregister(shard.addr, shard.len) {
                return Err(format!("it could not be armed, nor left as it was: {errno}").into());
            }
        }
        self.mappers().disarm();
        self.leave_punches();
        let since = self.busy.as_ref().map_or_else(Instant::now, |busy| busy.since);
        let busy = Busy { since, next: Instant::now() + BUSY_PAUSE };
        if self.busy.is_none() {
            tracing::warn!(vm = %self.vm, "{}", busy.text());
        }
        self.busy = Some(busy);
        Ok(())
    }

    /// It is time to try again to arm.
    pub fn may_be_free(&self) -> bool {
        self.busy.as_ref().is_some_and(|busy| Instant::now() >= busy.next) && !self.is_halted()
    }

    /// What the VM waits for while another has its memory.
    pub fn busy_text(&self) -> Option<String> {
        self.busy.as_ref().map(Busy::text)
    }

    /// From now on all that leaves RAM does so with our knowledge.
    fn take_punches(&self) {
        self.shared.take_punches();
        let deadline = Instant::now() + OWN_PUNCH_MAX;
        while self.shared.is_punching() {
            if Instant::now() > deadline {
                // The VMM stands still in the middle of it, or lies. It will ask for the same again.
                return tracing::warn!(vm = %self.vm, "the VMM does not finish to give memory back");
            }
            std::thread::sleep(OWN_PUNCH_PAUSE);
        }
    }

    /// Leaves the VM's faults to the kernel. Everything is in RAM. False: the VMM is gone, and the
    /// machine is told nothing.
    pub fn disarm(&mut self) -> Result<bool, Broken> {
        // Blocks go first: from now on pages become zero without our knowing.
        if let Err(errno) = self.tiers.clear_blocks() {
            return Err(format!("swap could not be emptied: {errno}").into());
        }
        for shard in self.space.shards() {
            if let Err(errno) = shard.uffd.unregister(shard.addr, shard.len) {
                self.check(Resolved::Partial { bytes: 0, errno }, "unregister memory")?;
                return Ok(false);
            }
        }
        self.mappers().disarm();
        if let Some(member) = self.tiers.frames() {
            member.trim();
        }
        self.machine.disarmed();
        self.leave_punches();
        Ok(true)
    }
}

/// Bytes of the pages that are in DRAM.
fn pages_of(found: &[Located]) -> u64 {
    found.iter().map(|located| u64::from(located.ram.count())).sum::<u64>() * PAGE_SIZE
}
