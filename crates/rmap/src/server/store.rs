//! Slabs and the pages in them, and who may touch them.

use std::collections::{HashMap, VecDeque};

use crate::list::{List, list_index};
use crate::medium::Medium;
use crate::units::{Generation, PAGE_SIZE, PageNo, SEAL_SIZE, SEALED_SIZE, SlabNo, SlabSize, SpaceId, Version};
use crate::wire::message::{HELD_END, HELD_MAX, HELD_SIZE, Status, VERSIONS_MAX};

/// Spaces that one server knows: a thousand VMs with a few disks each.
const SPACES_MAX: usize = 4096;
/// Slots that are looked at for one reply about what a space has here: 64 GiB of the usual slabs, some ten
/// microseconds.
const SLOTS_A_LOOK: usize = 1024;
/// Grants that have ended and are remembered: far more than end while a request is on its way.
const ENDED_MAX: usize = 4096;

/// Ways of being wrong, for tests.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Generations are not compared.
    NoFence,
    /// A late write replaces a newer one.
    NoVersions,
    /// Slabs that are not held are answered as zeros.
    ZerosForUnknown,
    /// Writes are acknowledged and dropped.
    LosesWrites,
    /// Leaves out every other page of a slab that it is to copy to another server, and says that it is done.
    CopiesHalf,
    /// Copies them in versions that nobody has written yet.
    MakesUpVersions,
    /// Writes of a slab's earlier lives are stored.
    NoEpochs,
    /// Says once of each owner that it does not know it, when it is asked for something of a slab.
    ForgetsOwners,
    /// Every page is damaged, at the moment this is set.
    FlipsBits,
    /// Says to every write, of whatever class, that it has too much to do.
    PutsWritesOff,
    /// Lists every page that has content as trimmed since.
    MakesUpTrims,
    /// The same, and answers so when it is asked for one that an earlier owner wrote.
    KeepsToTrims,
}

list_index! {
    /// The room for one slab.
    SlotIndex
}

#[derive(Debug)]
struct Slab {
    owner: Option<(SpaceId, SlabNo)>,
    grant: Version,
    /// What is written in lesser versions is of an earlier life of the slab.
    epoch: Version,
    versions: Box<[Version]>,
    /// Sealed pages, one behind the other; of those on a medium, the seals alone.
    pages: Box<[u8]>,
}

#[derive(Clone, Copy, Debug)]
struct Space {
    generation: Generation,
    /// Who has that generation; zero as long as only readers have named it.
    owner: u64,
    held: u32,
    reserved: u32,
}

/// A space as a server sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceUse {
    pub space: SpaceId,
    pub generation: Generation,
    pub slabs: u32,
    pub reserved: u32,
}

/// A page that was asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct Stored<'a> {
    pub version: Version,
    /// `None` if it was never written, or trimmed.
    pub sealed: Option<&'a [u8]>,
}

#[derive(Debug)]
pub struct Store {
    size: SlabSize,
    quota: u32,
    /// Where pages are that are not in memory.
    medium: Option<Box<dyn Medium>>,
    /// A page from there, sealed.
    room: Box<[u8; SEALED_SIZE]>,
    /// Slabs that the medium failed. They are lent no more.
    broken: usize,
    slabs: List<SlotIndex, Slab>,
    free: Vec<SlotIndex>,
    /// Slabs whose memory the host has back.
    shed: Vec<SlotIndex>,
    /// No slab is given away any more, promised or not.
    pub shut: bool,
    slots: HashMap<(SpaceId, SlabNo), SlotIndex>,
    spaces: HashMap<SpaceId, Space>,
    /// The last grants that have ended here. A request for one of them that is still on its way comes too late, or it would be
    /// another slab under the grant that a reader may be about to ask for.
    ended: VecDeque<(SpaceId, SlabNo, Version)>,
    fault: Option<Fault>,
    /// Owners that it said not to know.
    forgotten: Vec<(SpaceId, Generation)>,
}

impl Store {
    /// `None` if there is no memory for it.
    pub fn new(slabs: usize, size: SlabSize, quota: u32, medium: Option<Box<dyn Medium>>) -> Option<Store> {
        let in_memory = in_memory(medium.as_deref());
        Some(Store {
            size,
            quota,
            medium,
            room: Box::new([0; SEALED_SIZE]),
            broken: 0,
            slabs: (0..slabs).map(|_| Slab::free(size, in_memory)).collect::<Option<_>>()?,
            free: (0..slabs).rev().map(SlotIndex).collect(),
            shed: Vec::with_capacity(slabs),
            shut: false,
            slots: HashMap::with_capacity(slabs),
            spaces: HashMap::with_capacity(SPACES_MAX),
            ended: VecDeque::with_capacity(ENDED_MAX),
            fault: None,
            forgotten: Vec::new(),
        })
    }

    pub fn inject(&mut self, fault: Option<Fault>) {
        self.fault = fault;
        if self.has(Fault::FlipsBits) {
            self.slabs.iter_mut().flat_map(|slab| &mut slab.pages[..]).for_each(|byte| *byte ^= 1);
        }
    }

    pub fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// All of them, those included whose memory the host has back.
    pub fn slabs(&self) -> usize {
        self.slabs.len() - self.broken
    }

    /// Slabs that are gone because their medium failed.
    pub fn broken_slabs(&self) -> usize {
        self.broken
    }

    pub fn free_slabs(&self) -> usize {
        self.free.len()
    }

    /// Slabs that somebody has.
    pub fn held_slabs(&self) -> usize {
        self.slabs() - self.free.len() - self.shed.len()
    }

    /// Gives the memory of a free slab back to the host, unless all of them are promised. `false` if none was.
    pub fn shed(&mut self) -> bool {
        let promised: usize =
            self.spaces.values().map(|state| state.reserved.saturating_sub(state.held) as usize).sum();
        if self.free.len() <= promised {
            return false;
        }
        let Some(slot) = self.free.pop() else { return false };
        // Nobody has it: it was released, or never given away.
        let slab = &mut self.slabs[slot];
        (slab.versions, slab.pages) = (Box::default(), Box::default());
        self.shed.push(slot);
        true
    }

    /// Takes the memory of a slab from the host again. `false` if none was taken.
    pub fn regrow(&mut self) -> bool {
        let Some(&slot) = self.shed.last() else { return false };
        let Some(slab) = Slab::free(self.size, in_memory(self.medium.as_deref())) else { return false };
        self.slabs[slot] = slab;
        self.shed.pop();
        self.free.push(slot);
        true
    }

    pub fn spaces(&self) -> impl Iterator<Item = SpaceUse> {
        self.spaces.iter().map(|(&space, state)| SpaceUse {
            space,
            generation: state.generation,
            slabs: state.held,
            reserved: state.reserved,
        })
    }

    fn check(&self, space: SpaceId, generation: Generation) -> Result<(), Status> {
        let known = self.spaces.get(&space).ok_or(Status::UnknownSlab)?.generation;
        match generation.cmp(&known) {
            _ if self.has(Fault::NoFence) => Ok(()),
            std::cmp::Ordering::Less => Err(Status::StaleGeneration),
            std::cmp::Ordering::Equal => Ok(()),
            std::cmp::Ordering::Greater => Err(Status::NotFenced),
        }
    }

    /// From now on this generation or a later one. `owner` is a random number of whoever has the generation, zero of a reader.
    ///
    /// A control plane that was restored from a backup gives a generation a second time. Whoever has it then would write versions
    /// that are here already, with other content, and would be told that they are written: so it is refused.
    pub fn fence(&mut self, space: SpaceId, generation: Generation, owner: u64) -> Status {
        let is_new = !self.spaces.contains_key(&space);
        if is_new && self.spaces.len() >= SPACES_MAX && !self.forget_one() {
            return Status::Full;
        }
        let no_fence = self.has(Fault::NoFence);
        match self.spaces.get_mut(&space) {
            Some(state) if generation < state.generation && !no_fence => Status::StaleGeneration,
            Some(state) if generation == state.generation => {
                let is_other = owner != 0 && state.owner != 0 && owner != state.owner;
                if is_other && !no_fence {
                    return Status::StaleGeneration;
                }
                state.owner = if owner == 0 { state.owner } else { owner };
                Status::Ok
            }
            Some(state) => {
                (state.generation, state.owner) = (state.generation.max(generation), owner);
                Status::Ok
            }
            None => {
                self.spaces.insert(space, Space { generation, owner, held: 0, reserved: 0 });
                Status::Ok
            }
        }
    }

    /// Forgets a space that has nothing here. Its owner is told so when it next asks for a slab, and fences it anew; an earlier one
    /// that asks before is lent what no map names.
    fn forget_one(&mut self) -> bool {
        let nothing = self.spaces.iter().find(|(_, state)| state.held == 0 && state.reserved == 0);
        let Some(space) = nothing.map(|(space, _)| *space) else { return false };
        self.spaces.remove(&space);
        true
    }

    /// Lends a slab, empty, to be written in versions from `epoch` on. A repeated request for the same grant changes
    /// nothing; an older one is refused, and so is one of a grant that has ended.
    pub fn grant(
        &mut self,
        space: SpaceId,
        slab: SlabNo,
        generation: Generation,
        (grant, epoch): (Version, Version),
        open: bool,
    ) -> Status {
        // Of a life that ended while its request was on the way.
        if epoch > grant {
            return Status::BadRequest;
        }
        if let Err(status) = self.check(space, generation) {
            return status;
        }
        if let Some(&slot) = self.slots.get(&(space, slab)) {
            let held = &mut self.slabs[slot];
            if grant < held.grant {
                return Status::BadRequest;
            }
            if grant > held.grant {
                held.begin(grant, epoch);
            }
            return Status::Ok;
        }
        let kept_for_others = self.kept_for_others(space);
        let Some(state) = self.spaces.get_mut(&space) else { return Status::UnknownSlab };
        if self.ended.iter().any(|(of, at, last)| (*of, *at) == (space, slab) && grant <= *last) {
            return Status::BadRequest;
        }
        if state.held >= self.quota {
            return Status::OverQuota;
        }
        let promised = state.held < state.reserved;
        if self.shut || self.free.is_empty() || (!promised && (!open || self.free.len() <= kept_for_others)) {
            return Status::Full;
        }
        let Some(slot) = self.free.pop() else { return Status::Full };
        state.held += 1;
        self.slots.insert((space, slab), slot);
        let held = &mut self.slabs[slot];
        held.owner = Some((space, slab));
        held.begin(grant, epoch);
        Status::Ok
    }

    fn has_ended(&mut self, space: SpaceId, slab: SlabNo, grant: Version) {
        if self.ended.len() == ENDED_MAX {
            self.ended.pop_front();
        }
        self.ended.push_back((space, slab, grant));
    }

    fn kept_for_others(&self, space: SpaceId) -> usize {
        let others = self.spaces.iter().filter(|(other, _)| **other != space);
        others.map(|(_, state)| state.reserved.saturating_sub(state.held) as usize).sum()
    }

    pub fn release(&mut self, space: SpaceId, slab: SlabNo, generation: Generation, grant: Version) -> Status {
        if let Err(status) = self.check(space, generation) {
            return status;
        }
        let Some(&slot) = self.slots.get(&(space, slab)) else { return Status::Ok };
        let held = &mut self.slabs[slot];
        if held.grant != grant {
            return Status::BadRequest;
        }
        held.owner = None;
        self.slots.remove(&(space, slab));
        self.free.push(slot);
        if let Some(state) = self.spaces.get_mut(&space) {
            state.held -= 1;
        }
        self.has_ended(space, slab, grant);
        Status::Ok
    }

    /// Keeps `slabs` slabs for a space, those that it has included.
    pub fn reserve(&mut self, space: SpaceId, generation: Generation, slabs: u64) -> Status {
        if let Err(status) = self.check(space, generation) {
            return status;
        }
        let Ok(slabs) = u32::try_from(slabs) else { return Status::BadRequest };
        let kept_for_others = self.kept_for_others(space);
        let Some(state) = self.spaces.get_mut(&space) else { return Status::UnknownSlab };
        if slabs > self.quota {
            return Status::OverQuota;
        }
        if slabs.saturating_sub(state.held) as usize + kept_for_others > self.free.len() {
            return Status::Full;
        }
        state.reserved = slabs;
        Status::Ok
    }

    /// The grant of a slab that this owner has here.
    ///
    /// # Errors
    /// It is not the owner of today, or the slab is not here.
    pub fn grant_of(&self, space: SpaceId, slab: SlabNo, generation: Generation) -> Result<Version, Status> {
        self.check(space, generation)?;
        let slot = self.slots.get(&(space, slab)).ok_or(Status::UnknownSlab)?;
        Ok(self.slabs[*slot].grant)
    }

    /// Slabs that a space has here, in slots from `from` on, appended to `out`. Gives the slot to go on from, or
    /// [`HELD_END`].
    ///
    /// # Errors
    /// It is not the owner of today.
    pub fn held(&self, space: SpaceId, generation: Generation, from: u64, out: &mut Vec<u8>) -> Result<u64, Status> {
        self.check(space, generation)?;
        let (begin, end) = (from.min(self.slabs.len() as u64) as usize, out.len() + HELD_MAX * HELD_SIZE);
        let has_any = self.spaces.get(&space).is_some_and(|state| state.held > 0);
        for (at, slab) in self.slabs.iter().enumerate().skip(begin).take_while(|_| has_any) {
            if out.len() >= end || at - begin >= SLOTS_A_LOOK {
                return Ok(at as u64);
            }
            if let Some((_, number)) = slab.owner.filter(|(owner, _)| *owner == space) {
                out.extend_from_slice(&u64::from(number.0).to_le_bytes());
                out.extend_from_slice(&slab.grant.bits().to_le_bytes());
            }
        }
        Ok(HELD_END)
    }

    /// A page of a slab as it was granted to this owner.
    ///
    /// # Errors
    /// It is not that owner's any more, or not that grant.
    pub fn page_of(
        &mut self,
        space: SpaceId,
        slab: SlabNo,
        index: usize,
        generation: Generation,
        grant: Version,
    ) -> Result<Stored<'_>, Status> {
        if self.grant_of(space, slab, generation)? != grant {
            return Err(Status::UnknownSlab);
        }
        self.read(space, self.page_no(slab, index), generation)
    }

    pub fn page_no(&self, slab: SlabNo, index: usize) -> PageNo {
        self.size.page(slab, index)
    }

    fn locate(&mut self, space: SpaceId, page: PageNo, generation: Generation) -> Result<(SlotIndex, usize), Status> {
        self.check(space, generation)?;
        if self.has(Fault::ForgetsOwners) && !self.forgotten.contains(&(space, generation)) {
            self.forgotten.push((space, generation));
            return Err(Status::NotFenced);
        }
        let slab = self.size.slab(page).ok_or(Status::BadRequest)?;
        let slot = self.slots.get(&(space, slab)).ok_or(Status::UnknownSlab)?;
        Ok((*slot, self.size.index(page)))
    }

    /// # Errors
    /// Why the page cannot be had.
    pub fn read(&mut self, space: SpaceId, page: PageNo, generation: Generation) -> Result<Stored<'_>, Status> {
        let (slot, index) = match self.locate(space, page, generation) {
            Err(Status::UnknownSlab) if self.has(Fault::ZerosForUnknown) => {
                return Ok(Stored { version: Version::NEVER, sealed: None });
            }
            found => found?,
        };
        self.read_at(slot, index)
    }

    /// A page of a slab that has this grant, and no other, whoever its owner is: no grant is given twice.
    ///
    /// # Errors
    /// Why the page cannot be had.
    pub fn read_granted(&mut self, space: SpaceId, page: PageNo, grant: Version) -> Result<Stored<'_>, Status> {
        let slab = self.size.slab(page).ok_or(Status::BadRequest)?;
        let slot = *self.slots.get(&(space, slab)).ok_or(Status::UnknownSlab)?;
        if self.slabs[slot].grant != grant {
            return Err(Status::UnknownSlab);
        }
        self.read_at(slot, self.size.index(page))
    }

    fn read_at(&mut self, slot: SlotIndex, index: usize) -> Result<Stored<'_>, Status> {
        let slab = &self.slabs[slot];
        let version = slab.versions[index];
        if !version.has_content() {
            return Ok(Stored { version, sealed: None });
        }
        if let Some(medium) = &mut self.medium {
            let (content, seal) = self.room.split_first_chunk_mut().expect("a page is smaller than a sealed one");
            seal.copy_from_slice(&slab.pages[index * SEAL_SIZE..][..SEAL_SIZE]);
            if medium.read((slot.0 * self.size.pages() + index) as u64, content).is_err() {
                self.give_up(slot);
                return Err(Status::UnknownSlab);
            }
            return Ok(Stored { version, sealed: Some(&self.room[..]) });
        }
        let sealed = &self.slabs[slot].pages[index * SEALED_SIZE..][..SEALED_SIZE];
        Ok(Stored { version, sealed: Some(sealed) })
    }

    /// Takes a page, or a trim where `sealed` is `None`. A version that is not newer changes nothing, and is done. One below the
    /// epoch is for a slab that is not here any more: nobody waits for it, and should somebody do so, "done" would be a
    /// lie.
    pub fn write(
        &mut self,
        space: SpaceId,
        page: PageNo,
        generation: Generation,
        version: Version,
        sealed: Option<&[u8]>,
    ) -> Status {
        let (slot, index) = match self.locate(space, page, generation) {
            Ok(found) => found,
            Err(status) => return status,
        };
        if version == Version::NEVER || version.has_content() != sealed.is_some() {
            return Status::BadRequest;
        }
        if self.has(Fault::LosesWrites) {
            return Status::Ok;
        }
        let (any_order, any_life) = (self.has(Fault::NoVersions), self.has(Fault::NoEpochs));
        let slab = &mut self.slabs[slot];
        if version < slab.epoch && !any_life {
            return Status::UnknownSlab;
        }
        if version <= slab.versions[index] && !any_order {
            return Status::Ok;
        }
        match (sealed, &mut self.medium) {
            (None, _) => {}
            (Some(sealed), None) => slab.pages[index * SEALED_SIZE..][..SEALED_SIZE].copy_from_slice(sealed),
            (Some(sealed), Some(medium)) => {
                let Some((content, seal)) = sealed.split_first_chunk::<PAGE_SIZE>() else { return Status::BadRequest };
                if medium.write((slot.0 * self.size.pages() + index) as u64, content).is_err() {
                    self.give_up(slot);
                    return Status::UnknownSlab;
                }
                slab.pages[index * SEAL_SIZE..][..SEAL_SIZE].copy_from_slice(seal);
            }
        }
        slab.versions[index] = version;
        Status::Ok
    }

    /// The medium failed: what is in the slab is not known any more, and is answered so.
    fn give_up(&mut self, slot: SlotIndex) {
        let Some(owner) = self.slabs[slot].owner.take() else { return };
        self.slots.remove(&owner);
        let grant = self.slabs[slot].grant;
        if let Some(state) = self.spaces.get_mut(&owner.0) {
            state.held -= 1;
        }
        self.has_ended(owner.0, owner.1, grant);
        self.broken += 1;
    }

    /// The grant of a slab and its versions from `page` on.
    ///
    /// # Errors
    /// Why they cannot be had.
    pub fn versions(
        &mut self,
        space: SpaceId,
        page: PageNo,
        generation: Generation,
    ) -> Result<(Version, &[Version]), Status> {
        let (slot, index) = self.locate(space, page, generation)?;
        let slab = &self.slabs[slot];
        let end = (index + VERSIONS_MAX).min(slab.versions.len());
        Ok((slab.grant, &slab.versions[index..end]))
    }
}

impl Slab {
    /// With so many bytes of each page in memory. `None` if there is no memory for it.
    fn free(size: SlabSize, in_memory: usize) -> Option<Slab> {
        let versions = touched(size.pages(), Version::NEVER)?;
        // Not zeros: zeroed memory alone is a promise that the kernel may not keep.
        let (grant, epoch, pages) = (Version::NEVER, Version::NEVER, touched(size.pages() * in_memory, 1)?);
        Some(Slab { owner: None, grant, epoch, versions, pages })
    }

    /// It is lent, and nothing is in it.
    fn begin(&mut self, grant: Version, epoch: Version) {
        (self.grant, self.epoch) = (grant, epoch);
        self.versions.fill(Version::NEVER);
    }
}

/// Bytes of each sealed page that are in memory.
fn in_memory(medium: Option<&dyn Medium>) -> usize {
    if medium.is_some() { SEAL_SIZE } else { SEALED_SIZE }
}

/// Memory that was written to, so that there is a page frame behind each page of it. An allocation that fails is not the
/// end of the process, which holds other people's pages.
fn touched<T: Clone>(count: usize, filler: T) -> Option<Box<[T]>> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(count).ok()?;
    memory.resize(count, filler);
    Some(memory.into())
}

#[cfg(test)]
mod tests;
