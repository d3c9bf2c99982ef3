//! What a client knows of its spaces and their slabs.

use smallvec::SmallVec;

use super::agenda::Marks;
use super::follow::Following;
use super::ledger::Table;
use super::open::Listing;
use super::outcome::{COPIES_MAX, SpaceSpec};
use super::parity::layout::Layout;
use super::parity::layout::slabs_needed;
use super::peer::PeerSet;
use super::repair::Repair;
use super::sealed::{Tenure, Watch};
use super::tables::Tables;
use super::vacate::content::Content;
use crate::client::index::{List, PeerIndex};
use crate::control::MapEntry;
use crate::crypto::SpaceKey;
use crate::units::{Generation, SlabNo, SlabSize, SpaceId, Time, Version};

/// Slabs of a space: 16 TiB of the usual size.
pub const SPACE_SLABS_MAX: usize = 1 << 18;
/// A server that is asked for a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub peer: PeerIndex,
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
    pub fn forget(&mut self, peer: PeerIndex) {
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
    /// Of an owner's open slab: whether any page has content.
    pub content: Content,
    /// What is written in lesser versions is of an earlier life of the slab under this owner; see `discard.rs`.
    pub epoch: Version,
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
    pub marks: Marks,
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
    pub slabs: List<SlabNo, Slab>,
    pub layout: Layout,
    /// This client was asked to make the parity of a sealed space.
    pub wants_parity: bool,
    /// Its slabs are being given back for good.
    pub is_removed: bool,
    /// Servers that know this owner, and servers that are being told.
    pub fenced_at: PeerSet,
    pub fencing: PeerSet,
    /// Servers that said that they do not know this reader: nothing is asked there until they are told. And those that were
    /// told for it, or because they had forgotten this owner.
    pub unknown_at: PeerSet,
    pub notified_again: PeerSet,
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
        let mut slabs: List<SlabNo, Slab> = (0..needed).map(|_| Slab::vacant()).collect();
        for (slab, entry) in map {
            let Some(slab) = slabs.get_mut(*slab) else { continue };
            slab.phase = Phase::of(entry, tenure);
            slab.entry = entry.clone();
        }
        for slab in slabs.indices().take(layout.data) {
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
            is_removed: false,
            fenced_at: PeerSet::default(),
            fencing: PeerSet::default(),
            unknown_at: PeerSet::default(),
            notified_again: PeerSet::default(),
            looked_at: PeerSet::default(),
            disbelieved: PeerSet::default(),
            accused: PeerSet::default(),
            refusing: PeerSet::default(),
            refused_until: Time::default(),
            is_taken: false,
            tenure,
            is_stale: false,
            watch: None,
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
            content: Content::default(),
            epoch: Version::NEVER,
            failed: PeerSet::default(),
            behind: PeerSet::default(),
            disputed: Vec::new(),
            checking: PeerSet::default(),
            checked: PeerSet::default(),
            repair: None,
            doubt: None,
            table: Table::Unknown,
            is_stuck: false,
            marks: Marks::default(),
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
