//! What a client asks of the control plane, whatever that is: a file, or a cluster's store.
//!
//! The control plane keeps for each space its owner's generation and which servers have which slab in sync. It compares and
//! swaps; the client retries a lost answer with the same request and recognizes its own entry.

use smallvec::SmallVec;

use crate::units::{Generation, ServerId, SlabNo, SpaceId, Version};

/// Copies of a slab: two, and a third while one is being replaced.
pub const REPLICAS_MAX: usize = 3;

/// A copy of a slab at a server. The grant tells it from earlier ones at the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    pub server: ServerId,
    pub grant: Version,
}

/// The copies of a slab, in place: a map is changed while nothing may need memory for it.
pub type Replicas = SmallVec<[Replica; REPLICAS_MAX]>;

/// Which servers have a slab in sync: every acknowledged write is at all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapEntry {
    /// Counts the entries of this slab; 0 is "none yet".
    pub revision: u64,
    pub replicas: Replicas,
    /// The last copy is gone. Its pages are errors, never zeros.
    pub lost: bool,
    /// Its owner has given it back: nobody has it, and its pages are zeros. Said on purpose, so that an entry whose copies are
    /// missing by mistake does not read as zeros.
    pub empty: bool,
}

impl MapEntry {
    /// These have it, in sync. As every proposal it gets its revision when it is made.
    pub fn of(replicas: impl IntoIterator<Item = Replica>) -> MapEntry {
        MapEntry { replicas: replicas.into_iter().collect(), ..MapEntry::default() }
    }

    /// The last copy is gone.
    pub fn lost() -> MapEntry {
        MapEntry { lost: true, ..MapEntry::default() }
    }

    /// It was given back.
    pub fn empty() -> MapEntry {
        MapEntry { empty: true, ..MapEntry::default() }
    }

    /// Whether it can be: somebody has it, or it is lost, or it is empty; one of them. No control plane takes another one.
    pub fn is_sound(&self) -> bool {
        [!self.replicas.is_empty(), self.lost, self.empty].into_iter().filter(|so| *so).count() == 1
    }
}

/// "Replace the entry before this one by it, if `generation` still owns the space."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub space: SpaceId,
    pub generation: Generation,
    pub slab: SlabNo,
    pub entry: MapEntry,
}

/// One question of a client, and no other of the same one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuestionId(pub u64);

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// Compares and swaps an entry.
    Change(Change),
    /// How is this space? An answer is as it was at some moment after the question was asked, never before.
    Look { space: SpaceId },
    /// Does this generation still own the space? As of a look, an answer is of some moment after the question was asked.
    Confirm { space: SpaceId, generation: Generation },
    /// "I keep this sealed space from now on, if it still has this generation": the next one is the caller's.
    Keep { space: SpaceId, generation: Generation },
}

impl ControlRequest {
    /// What it is about. A client asks one thing at a time about each.
    pub fn subject(&self) -> (SpaceId, Option<SlabNo>) {
        match self {
            ControlRequest::Change(change) => (change.space, Some(change.slab)),
            ControlRequest::Look { space }
            | ControlRequest::Confirm { space, .. }
            | ControlRequest::Keep { space, .. } => (*space, None),
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlReply {
    /// It is so: the change is made, or the generation owns the space.
    Done,
    /// The entry of today is this one.
    Conflict(MapEntry),
    /// The space has another owner.
    Fenced,
    /// No answer yet: the request is on its way, and is to be asked again for its answer. Until then the change may have
    /// happened or not.
    Later,
    /// How the space is. Who asked to keep it does not: another has the generation that was asked for, maybe the caller
    /// itself, where an answer was lost.
    Seen(Today),
    /// The caller keeps the space.
    Kept(Today),
    /// There is no such space any more.
    Gone,
}

/// A map, as a new owner gets it.
pub type Map = Vec<(SlabNo, MapEntry)>;

/// A space as the control plane knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Today {
    /// 0 if it had no owner yet.
    pub generation: Generation,
    /// Nobody writes to it any more, ever. Its copies may still move.
    pub sealed: bool,
    pub map: Map,
}

/// What keeps owners and maps. All changes of a space are in one order, and a change that was answered is never undone,
/// whatever crashes.
pub trait ControlPlane {
    type Error: std::error::Error + Send + Sync + 'static;

    /// Makes the caller the owner of a space: its generation is greater than all before, and no change of an earlier
    /// owner comes into the map from now on. A sealed space stays sealed.
    ///
    /// # Errors
    /// The caller is not the owner. Where the answer was lost, the generation may be used up.
    fn take_over(&mut self, space: SpaceId) -> Result<(Generation, Map), Self::Error>;

    /// Seals a space, if its owner is still of this generation: all writes are done, and all copies of the map have the
    /// same. That is the end of this owner, too: the generation after it is nobody's, and readers find it.
    ///
    /// # Errors
    /// The space has another owner. Where the answer was lost, it may be sealed.
    fn seal(&mut self, space: SpaceId, generation: Generation) -> Result<Generation, Self::Error>;

    /// A change asked for twice changes nothing the second time: the answer is `Done`, or `Conflict` with the caller's own
    /// entry.
    ///
    /// # Errors
    /// The change may have happened or not: to be asked again.
    fn answer(&mut self, request: &ControlRequest) -> Result<ControlReply, Self::Error>;

    /// Compares and swaps one entry of a map.
    ///
    /// # Errors
    /// As of [`ControlPlane::answer`].
    fn swap(&mut self, change: &Change) -> Result<ControlReply, Self::Error> {
        self.answer(&ControlRequest::Change(change.clone()))
    }
}
