//! Groups of slabs that have parity or are to have it, as the map says: which slabs there are of one, and whether it may be written.

use crate::client::index::{GroupIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::outcome::COPIES_MAX;
use crate::client::parity::layout::Members;
use crate::client::peer::PeerSet;
use crate::client::sealed::Tenure;
use crate::client::slab::{Phase, Slab};
use crate::units::{SlabNo, Version};

impl Map {
    /// Whether the map says that a group has parity.
    pub fn has_parity(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let state = &self.spaces[space];
        !state.is_removed && state.slabs.get(state.layout.parity(group)).is_some_and(Slab::is_held)
    }

    /// Whether a slab is one of a group that has parity.
    pub fn is_grouped(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.spaces[space].layout.group(slab).is_some_and(|group| self.has_parity(space, group))
    }

    /// Columns of a slab's group that hold something, but the slab itself.
    pub fn other_columns(&self, space: SpaceIndex, slab: SlabNo) -> impl Iterator<Item = SlabNo> {
        let spaces = &self.spaces;
        let layout = spaces[space].layout;
        let columns = layout.group(slab).into_iter().flat_map(move |group| layout.columns(group));
        columns.filter(move |column| *column != slab && spaces[space].slabs.get(*column).is_some_and(|s| s.is_held()))
    }

    /// Members of a group that some server has, or had.
    pub fn held_members(&self, space: SpaceIndex, group: GroupIndex) -> Members {
        let state = &self.spaces[space];
        state.layout.members(group).filter(|slab| state.slabs[*slab].is_held()).collect()
    }

    /// Whether the versions of all of them are known.
    pub fn members_known(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        self.held_members(space, group).iter().all(|slab| self.knows_versions(space, *slab))
    }

    /// The versions that parity has: the greatest of its members' at each place, and none of an earlier life of it.
    pub fn make_parity_table(&mut self, space: SpaceIndex, group: GroupIndex) {
        let members = self.held_members(space, group);
        let size = self.size;
        let parity = self.spaces[space].layout.parity(group);
        let slabs = &mut self.spaces[space].slabs;
        slabs[parity].make_table(&mut self.tables);
        for index in 0..size.pages() {
            let versions = members.iter().map(|slab| slabs[*slab].version(index));
            let greatest = versions.filter(|version| version.has_content()).max();
            slabs[parity].versions[index] = greatest.map_or(Version::NEVER, |version| version.max(slabs[parity].epoch));
        }
    }

    /// Whether this client is the owner of a space whose cold groups are better off with parity.
    pub fn makes_parity(&self, space: SpaceIndex) -> bool {
        let state = &self.spaces[space];
        state.tenure == Tenure::Owner && !state.is_taken && !state.is_removed && state.copies == COPIES_MAX
    }

    /// Whether nothing may be written to a group. Only its owner could.
    pub fn is_frozen(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let state = &self.spaces[space];
        let has = |slab: &super::super::slab::Slab| slab.is_held() || slab.pending.is_some();
        !state.is_removed
            && state.tenure == Tenure::Owner
            && state.slabs.get(state.layout.parity(group)).is_some_and(has)
    }

    /// The same for the group of a slab.
    pub fn is_in_frozen(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.spaces[space].layout.group(slab).is_some_and(|group| self.is_frozen(space, group))
    }

    /// The map is being asked to have the parity of a slab's group leave.
    pub fn is_parting(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let state = &self.spaces[space];
        let parity = state.layout.group(slab).and_then(|group| state.slabs.get(state.layout.parity(group)));
        parity.is_some_and(|parity| matches!(parity.phase, Phase::Leaving))
    }

    /// Whether the map is being asked for a change of a slab's group. One at a time: what is decided of one slab depends on where the
    /// others are.
    pub fn is_changing(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let changing = |slab: SlabNo| self.spaces[space].slabs[slab].pending.is_some();
        changing(slab) || self.other_columns(space, slab).any(changing)
    }

    /// Whether a group with parity is worth nothing any more.
    pub fn is_worthless(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let slabs = &self.spaces[space].slabs;
        let is_lost = |slab: SlabNo| slabs.get(slab).is_some_and(|slab| matches!(slab.phase, Phase::Lost));
        self.spaces[space].layout.columns(group).any(is_lost) || self.is_ledger_lost(space, group)
    }

    /// Whether somebody can have taken this version for parity: whoever made it may have had epochs of its own.
    pub fn may_be_parity(&self, space: SpaceIndex, slab: SlabNo, version: Version) -> bool {
        let state = &self.spaces[space];
        state.layout.is_parity(slab) && version <= Version::new(state.generation, state.sequence, true)
    }

    /// Servers that know this keeper, and have said that they have the slab as the map says.
    pub fn heard_of(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        self.spaces[space].fenced_at.intersection(self.spaces[space].slabs[slab].checked)
    }
}
