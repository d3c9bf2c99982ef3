//! What a client knows of its spaces and their slabs.

use std::time::Duration;

use smallvec::SmallVec;

use super::exchange::Role;
use super::follow::Following;
use super::ledger::Table;
use super::open::Listing;
use super::parity::cold::Group;
use super::parity::layout::Layout;
use super::parity::slabs_needed;
use super::peer::PeerSet;
use super::repair::Repair;
use super::reserve::Reservation;
use super::sealed::{Tenure, Watch};
use super::tables::Tables;
use super::{Client, Question, SpaceSpec};
use crate::control::{Change, ControlReply, ControlRequest, MapEntry};
use crate::crypto::SpaceKey;
use crate::units::{Generation, PageNo, SlabNo, SlabSize, SpaceId, Time, Version};

/// Slabs of a space: 16 TiB of the usual size.
pub const SPACE_SLABS_MAX: usize = 1 << 18;
/// Copies that a space may ask for.
pub const COPIES_MAX: usize = 2;
/// A question that the control plane did not answer is asked again; a store with three members answers in 10 ms.
pub const CONTROL_RETRY: Duration = Duration::from_millis(500);
/// An answer that is not there yet is looked for no more often; a store on the same machine answers in 1 ms.
const CONTROL_LOOK: Duration = Duration::from_micros(200);

/// How long after "later" to ask again: a quarter of what was waited already, so that an answer is found soon after it
/// came and a store that is away costs nothing.
pub fn ask_again(waited: Duration) -> Duration {
    (waited / 4).clamp(CONTROL_LOOK, CONTROL_RETRY)
}

/// A server that is asked for a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub peer: usize,
    pub grant: Version,
    pub step: GrantStep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrantStep {
    /// Must know this owner before it is asked.
    Fencing,
    Asked,
    Granted,
}

/// Servers that are being asked for a slab, and those that have none to give.
#[derive(Debug, Default)]
pub struct Candidates {
    pub asked: SmallVec<[Candidate; COPIES_MAX]>,
    pub refused: PeerSet,
}

impl Candidates {
    /// Each of these has said no, or is not there.
    pub fn refuse(&mut self, which: impl Fn(&Candidate) -> bool) {
        for candidate in self.asked.iter().filter(|candidate| which(candidate)) {
            self.refused.insert(candidate.peer);
        }
        self.asked.retain(|candidate| !which(candidate));
    }

    /// It may be asked anew.
    pub fn forget(&mut self, peer: usize) {
        self.asked.retain(|candidate| candidate.peer != peer);
        self.refused.remove(peer);
    }

    pub fn peers(&self) -> PeerSet {
        self.refused.union(self.asked.iter().map(|candidate| candidate.peer).collect())
    }
}

/// What may be done with a slab.
#[derive(Debug)]
pub enum Phase {
    /// No server has it; its pages were never written.
    Vacant,
    /// Servers are being asked for it.
    Granting(Candidates),
    /// Taken over from another owner, whose unfinished writes may be at some copies and not at others.
    Opening(Vec<Listing>),
    Open,
    /// Its content is not needed, and the map is about to say that nobody has it. Writes wait for that.
    Leaving,
    Lost,
    /// Another client's: its entry is all that is known, and is looked at anew for each read.
    Followed,
}

impl Phase {
    /// Where a slab begins that the map says this of. What is lost may still be put together from others, by who has it sealed; what
    /// cannot be is an error, never zeros.
    pub fn of(entry: &MapEntry, tenure: Tenure) -> Phase {
        match entry {
            entry if !entry.is_sound() => Phase::Lost,
            MapEntry { lost: true, .. } if tenure == Tenure::Owner => Phase::Lost,
            MapEntry { empty: true, .. } => Phase::Vacant,
            _ => Phase::Opening(Vec::new()),
        }
    }
}

/// A change of the map that is under way.
#[derive(Clone, Debug)]
pub struct Pending {
    pub entry: MapEntry,
}

/// Copies that are to leave, and since when. They stay until one of those that stay was alive after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    pub leaving: PeerSet,
    pub since: Time,
}

#[derive(Debug)]
pub struct Slab {
    pub phase: Phase,
    /// The map's entry, as the control plane last confirmed it.
    pub entry: MapEntry,
    pub pending: Option<Pending>,
    /// The truth: what every copy in sync has.
    pub versions: Box<[Version]>,
    /// Of an owner's open slab: pages with content, since when there are none, and whether it is to be looked at therefore.
    pub content: usize,
    pub empty_since: Time,
    pub is_vacating: bool,
    /// What is written in lesser versions is of an earlier life of the slab under this owner; see `discard.rs`.
    pub floor: Version,
    /// Copies whose content is gone or cannot be trusted.
    pub failed: PeerSet,
    /// Of a sealed space: copies that list less content than another one. They are not asked for pages. That the other one has what it
    /// lists is only its word, so all of them list their versions again whenever the slab is opened.
    pub behind: PeerSet,
    /// Of a sealed space: the pages, in their order, of which one copy lists a trim and another content; see `trims.rs`.
    pub disputed: Vec<usize>,
    /// Of a group with parity: copies that are being asked whether they are those of the map, and that are.
    pub checking: PeerSet,
    pub checked: PeerSet,
    pub repair: Option<Repair>,
    pub doubt: Option<Doubt>,
    /// Of a sealed space with parity: whether the ledger has told the versions.
    pub table: Table,
    /// What it would be made anew from is damaged.
    pub is_stuck: bool,
    pub dirty: bool,
    /// It waits for its turn to ask something.
    pub is_hungry: bool,
}

#[derive(Debug)]
pub struct Space {
    pub id: SpaceId,
    pub pages: u64,
    pub copies: usize,
    pub key: SpaceKey,
    pub generation: Generation,
    /// Random, never zero, and new with each generation: tells servers this owner or keeper from another one that was given the
    /// same generation, by a control plane that was restored from a backup.
    pub owner: u64,
    pub sequence: u64,
    pub slabs: Vec<Slab>,
    pub layout: Layout,
    /// This client was asked to make the parity of a sealed space.
    pub wants_parity: bool,
    /// Of an owner: what it does with each group.
    pub groups: Vec<Group>,
    /// Its slabs are being given back for good.
    pub is_removed: bool,
    /// Servers that know this owner, and servers that are being told.
    pub fenced_at: PeerSet,
    pub fencing: PeerSet,
    /// Servers that said that they do not know this reader: nothing is asked there until they are told. And those that were
    /// told for it, or because they had forgotten this owner.
    pub unknown_at: PeerSet,
    pub told_again: PeerSet,
    /// Servers that were asked, and that said all, of what earlier owners left there.
    pub looked_at: PeerSet,
    /// Servers with nothing of this owner that know of a newer one, as they say.
    pub disbelieved: PeerSet,
    /// Of a sealed space: servers that said that it has a newer generation, and the map was not looked at since.
    pub accused: PeerSet,
    /// Servers that said so, and the map, which was asked after that, knows of none. Nothing is asked there until then.
    pub refusing: PeerSet,
    pub refused_until: Time,
    /// Another owner has it now.
    pub is_taken: bool,
    pub tenure: Tenure,
    /// Of a sealed space: servers know a newer generation than this client does.
    pub is_stale: bool,
    /// Of a sealed space that is not as it should be.
    pub watch: Option<Watch>,
    /// Room that servers keep for it.
    pub reservation: Option<Reservation>,
    /// Of a space that another client writes.
    pub following: Following,
}

impl Space {
    pub fn new(
        spec: &SpaceSpec,
        key: SpaceKey,
        (generation, owner): (Generation, u64),
        tenure: Tenure,
        size: SlabSize,
        map: &[(SlabNo, MapEntry)],
    ) -> Space {
        let layout = Layout::new(spec.pages, size);
        let needed = if tenure == Tenure::Follower { layout.data } else { slabs_needed(layout, map) };
        let mut slabs: Vec<Slab> = (0..needed).map(|_| Slab::vacant()).collect();
        for (slab, entry) in map {
            let Some(slab) = slabs.get_mut(slab.0 as usize) else { continue };
            slab.phase = Phase::of(entry, tenure);
            slab.entry = entry.clone();
        }
        for slab in 0..layout.data {
            // Of a group with parity it says that there is no copy.
            let parity = layout.group(slab).and_then(|group| slabs.get(layout.parity(group)));
            let has_parity = parity.is_some_and(Slab::is_held);
            if has_parity && slabs[slab].entry.lost && slabs[slab].entry.is_sound() {
                slabs[slab].phase = Phase::Opening(Vec::new());
            }
        }
        Space {
            id: spec.id,
            pages: spec.pages,
            copies: spec.copies,
            key,
            generation,
            owner,
            sequence: 0,
            slabs,
            layout,
            wants_parity: false,
            groups: if tenure == Tenure::Owner { vec![Group::default(); layout.groups] } else { Vec::new() },
            is_removed: false,
            fenced_at: PeerSet::default(),
            fencing: PeerSet::default(),
            unknown_at: PeerSet::default(),
            told_again: PeerSet::default(),
            looked_at: PeerSet::default(),
            disbelieved: PeerSet::default(),
            accused: PeerSet::default(),
            refusing: PeerSet::default(),
            refused_until: Time::default(),
            is_taken: false,
            tenure,
            is_stale: false,
            watch: None,
            reservation: None,
            following: Following::default(),
        }
    }

    /// A version that nothing had before. `None` when this generation has no more.
    pub fn next_version(&mut self, trimmed: bool) -> Option<Version> {
        if self.sequence >= Version::SEQUENCE_MAX {
            return None;
        }
        self.sequence += 1;
        Some(Version::new(self.generation, self.sequence, trimmed))
    }
}

impl Slab {
    pub fn vacant() -> Slab {
        Slab {
            phase: Phase::Vacant,
            entry: MapEntry::default(),
            pending: None,
            versions: Box::default(),
            content: 0,
            empty_since: Time::default(),
            is_vacating: false,
            floor: Version::NEVER,
            failed: PeerSet::default(),
            behind: PeerSet::default(),
            disputed: Vec::new(),
            checking: PeerSet::default(),
            checked: PeerSet::default(),
            repair: None,
            doubt: None,
            table: Table::Unknown,
            is_stuck: false,
            dirty: false,
            is_hungry: false,
        }
    }

    /// With the first use of the slab: 8 bytes a page.
    pub fn make_table(&mut self, tables: &mut Tables) {
        if self.versions.is_empty() {
            self.versions = tables.take();
        }
    }

    pub fn version(&self, index: usize) -> Version {
        self.versions.get(index).copied().unwrap_or(Version::NEVER)
    }
}

impl Client {
    /// Servers of a map entry.
    pub(super) fn peers_of(&self, entry: &MapEntry) -> PeerSet {
        entry.replicas.iter().filter_map(|replica| self.place_of(replica.server)).collect()
    }

    /// Which copies must have a write before it is acknowledged: those of the map as it is, and as it may already be.
    pub(super) fn required(&self, space: usize, slab: usize) -> PeerSet {
        let slab = &self.spaces[space].slabs[slab];
        let pending = slab.pending.as_ref().map(|pending| self.peers_of(&pending.entry)).unwrap_or_default();
        self.peers_of(&slab.entry).union(pending)
    }

    /// Asks the control plane for another set of copies. Only one change of a slab is under way at a time.
    pub(super) fn propose(&mut self, space: usize, slab: usize, entry: MapEntry) {
        let state = &mut self.spaces[space];
        debug_assert!(state.tenure.changes_map(), "readers change no map");
        let entry = MapEntry { revision: state.slabs[slab].entry.revision + 1, ..entry };
        let (id, generation, number) = (state.id, state.generation, SlabNo(slab as u32));
        let change = Change { space: id, generation, slab: number, entry: entry.clone() };
        state.slabs[slab].pending = Some(Pending { entry });
        self.ask_control(space, ControlRequest::Change(change));
    }

    pub(super) fn ask_control(&mut self, space: usize, request: ControlRequest) {
        self.question_ids += 1;
        self.questions.push(Question { id: self.question_ids, space, request, first_asked: None, due: Time(0) });
    }

    /// The control plane answered.
    pub(super) fn control_answered(&mut self, now: Time, question: Question, reply: ControlReply) {
        let (space, id) = (question.space, question.id);
        match (question.request, reply) {
            (ControlRequest::Change(change), reply) => {
                let slab = change.slab.0 as usize;
                self.mark(space, slab);
                match reply {
                    // Where an earlier answer was lost, it is our own entry that stands there.
                    ControlReply::Conflict(entry) if entry != change.entry => self.space_taken(space),
                    ControlReply::Done | ControlReply::Conflict(_) => self.map_changed(space, slab, change.entry),
                    _ => self.space_taken(space),
                }
            }
            (ControlRequest::Confirm { .. }, ControlReply::Done) => self.confirmed(space, id),
            (ControlRequest::Confirm { .. }, _) => self.space_taken(space),
            (_, ControlReply::Seen(today)) if self.is_followed(space) => self.followed_seen(now, space, today),
            (_, ControlReply::Seen(today)) => self.space_seen(now, space, today, Tenure::Reader),
            (_, ControlReply::Kept(today)) => self.space_seen(now, space, today, Tenure::Keeper),
            _ => self.space_gone(space),
        }
    }

    fn map_changed(&mut self, space: usize, slab: usize, entry: MapEntry) {
        let before = self.peers_of(&self.spaces[space].slabs[slab].entry);
        let after = self.peers_of(&entry);
        let state = &mut self.spaces[space].slabs[slab];
        let old = std::mem::replace(&mut state.entry, entry);
        state.pending = None;
        let left = before.minus(after);
        let given_back = matches!(state.phase, Phase::Leaving);
        let is_parity = self.spaces[space].layout.is_parity(slab);
        self.stats.slabs_given_back += u64::from(given_back && !is_parity);
        self.stats.copies_left += if given_back { 0 } else { left.len() as u64 };
        self.stats.copies_joined += if before.is_empty() { 0 } else { after.minus(before).len() as u64 };
        for replica in &old.replicas {
            if let Some(peer) = self.place_of(replica.server).filter(|peer| left.has(*peer)) {
                self.forget_copy(space, slab, peer);
                self.release(space, slab, peer, replica.grant);
                let state = &mut self.spaces[space].slabs[slab];
                state.failed.remove(peer);
                state.checked.remove(peer);
                self.end_repair_at(space, slab, peer);
            }
        }
        let is_lost = self.spaces[space].slabs[slab].entry.lost && !self.is_grouped(space, slab);
        if is_lost {
            // There is nothing left to copy.
            self.abort_repair(space, slab);
        }
        self.mark_group(space, slab);
        let state = &mut self.spaces[space].slabs[slab];
        if is_lost {
            state.phase = Phase::Lost;
            self.stats.slabs_lost += 1;
        } else if matches!(state.phase, Phase::Granting(_)) {
            state.make_table(&mut self.tables);
            state.phase = Phase::Open;
            self.count_content(space, slab);
        } else if matches!(state.phase, Phase::Leaving) {
            (state.phase, state.content) = (Phase::Vacant, 0);
            self.tables.give_back(std::mem::take(&mut state.versions).into());
        }
        if is_parity {
            self.parity_changed(space, slab);
        }
        let state = &self.spaces[space].slabs[slab];
        if !left.is_empty() && !state.disputed.is_empty() && matches!(state.phase, Phase::Open) {
            // What was disputed may be clear without the copies that left.
            let entry = state.entry.clone();
            return self.reopen(space, slab, entry);
        }
        self.map_settled(space, slab);
    }

    /// Everything under way at a copy that is not one any more.
    pub(super) fn forget_copy(&mut self, space: usize, slab: usize, peer: usize) {
        let size = self.config.slab_size;
        loop {
            let found = self.exchanges.find(|exchange| {
                exchange.space == space
                    && exchange.peer == peer
                    && size.slab(exchange.page) == Some(SlabNo(slab as u32))
                    && !(exchange.role.is_of_space() || exchange.role == Role::Release)
            });
            let Some(exchange) = found else { break };
            self.cancel(exchange.id);
        }
        // One that is still being read elsewhere would be written here once it has come.
        self.end_copies_to(space, slab, peer);
        self.unsend_writes(space, slab, peer);
    }

    /// Another owner has the space. Of a sealed one nothing is lost but the right to keep it.
    pub(super) fn space_taken(&mut self, space: usize) {
        match self.spaces[space].tenure {
            Tenure::Owner => self.space_gone(space),
            Tenure::Reader | Tenure::Keeper => self.is_outdated(space),
            // The next look at the map tells who owns it.
            Tenure::Follower => {}
        }
    }

    /// Nothing of the space can be done here any more.
    pub(super) fn space_gone(&mut self, space: usize) {
        let state = &mut self.spaces[space];
        if state.is_taken {
            return;
        }
        state.is_taken = true;
        state.watch = None;
        self.questions.retain(|question| question.space != space);
        while let Some(exchange) = self.exchanges.find(|exchange| exchange.space == space) {
            self.cancel(exchange.id);
        }
        self.copies.end_all(space);
        self.ledger.forget(space);
        self.forget_groups(space);
        for slab in 0..self.spaces[space].slabs.len() {
            self.end_repair(space, slab);
        }
        self.fail_ops(space, None, super::Failure::Fenced);
        self.unpark_space(space);
        self.refuse_confirms(space);
    }

    pub(super) fn first_page(&self, slab: usize) -> PageNo {
        self.config.slab_size.page(SlabNo(slab as u32), 0)
    }
}
