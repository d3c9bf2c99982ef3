//! One slab of parity for four, instead of second copies: 1.25 times the memory, and one server may go. For sealed spaces, and for what
//! is cold in others (`parity/cold.rs`).
//!
//! The parity slab of a group has at each place the XOR of what its members have there, *sealed* as it is at their servers;
//! what has no content counts as zeros. Nobody writes to a sealed space any more, nor to a group that has parity, so none is ever
//! out of date.
//!
//! # What makes a read right
//!
//! A page that is put together from the others is the sealed page of that member, and is opened under its space, number and
//! version like any other. A server that lies, parity that is not what it should be, a mistake in the grouping: all of that ends
//! in what is not authentic, an error, and never in a wrong page. Versions come from the ledger (`ledger.rs`), whose pages are
//! sealed too. Without the ledger's word no page of a group is taken for one that was never written; where the last copy of the
//! ledger is gone, for good and in the map, members are believed what they list of themselves, as the only copies of other spaces
//! are, and what would have to be put together is lost.
//!
//! A place of parity has the greatest of its members' versions: what is there never changes, so a slab that is made anew
//! is the same bit by bit, and its versions need no list of their own.
//!
//! # The order that loses nothing
//!
//! The space is sealed -> a keeper writes the versions of a group's members into the ledger -> all of them are at both of its
//! copies -> the parity slab is granted, at a server that none of the members needs -> every page of it is there -> it is in
//! the map: from now on the group *has parity* -> each member drops what it has beyond one copy, where all five
//! are at different servers then, one change of the group at a time. Whatever ends this in between leaves a group that is
//! as it was before, or has parity and some copies more than it needs.
//!
//! A slab of a group whose last copy is gone says so in the map, as lost; it is lost only where another of its group says so, too.
//! Until then it is read by the others, and its keeper makes it anew, at a server that has nothing of the group.

pub mod cold;
mod dissolve;
mod keep;
pub mod layout;
mod place;
pub mod standing;
pub mod stripe;

use smallvec::SmallVec;

use super::ledger::Table;
use super::sealed::Tenure;
use super::slab::{Phase, Slab};
use super::{Client, Failure, SpaceRef};
use crate::control::MapEntry;
use crate::units::{SlabNo, Time, Version};

use cold::Course;
use layout::{Layout, MEMBERS};

/// Slabs of a group, in place: an owner has no memory to ask for while it serves.
type Members = SmallVec<[usize; MEMBERS]>;

/// How far a space is on its way to parity. Groups that nothing was ever written to count nowhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParityView {
    pub groups: usize,
    /// Groups whose parity is in the map.
    pub with_parity: usize,
    /// Groups that have parity, and one copy of each slab, all at different servers, and whose versions are at two.
    pub whole: usize,
    /// Groups in which something is damaged, or that found no room.
    pub stuck: usize,
}

impl Client {
    /// Makes the parity of a sealed space: this client becomes its keeper, as soon as it can be. How far it is says
    /// [`Client::parity`]. Nothing is done for a space that another client writes.
    pub fn make_parity(&mut self, now: Time, space: SpaceRef) {
        if self.is_followed(space.0) {
            return;
        }
        self.now = now;
        let total = self.spaces[space.0].layout.total();
        self.spaces[space.0].extend_to(total);
        self.spaces[space.0].wants_parity = true;
        if self.spaces[space.0].tenure == Tenure::Reader {
            self.begin_watch(space.0);
        } else {
            (0..total).for_each(|slab| self.mark(space.0, slab));
        }
        self.settle(now);
    }

    /// How far the parity of a space is.
    pub fn parity(&self, space: SpaceRef) -> ParityView {
        let (space, state) = (space.0, &self.spaces[space.0]);
        let mut view = ParityView::default();
        for group in 0..state.layout.groups {
            let columns: Vec<&Slab> = state.layout.columns(group).filter_map(|slab| state.slabs.get(slab)).collect();
            if state.layout.members(group).all(|slab| !state.slabs[slab].is_held()) {
                continue;
            }
            view.groups += 1;
            view.with_parity += usize::from(self.has_parity(space, group));
            view.stuck += usize::from(columns.iter().any(|slab| slab.is_stuck || slab.table == Table::Refused));
            let copies = || columns.iter().flat_map(|slab| &slab.entry.replicas);
            let mut servers: Vec<u32> = copies().map(|replica| replica.server.0).collect();
            servers.sort_unstable();
            servers.dedup();
            let held = columns.iter().filter(|slab| slab.is_held()).count();
            let single = columns.iter().all(|slab| slab.entry.replicas.len() == usize::from(slab.is_held()));
            let copies = |slab: usize| state.slabs.get(slab).map_or(0, |slab| slab.entry.replicas.len());
            let is_told = self.ledger_slabs(space, group).all(|slab| copies(slab) >= LEDGER_COPIES);
            let is_whole = self.has_parity(space, group) && single && servers.len() == held && is_told;
            view.whole += usize::from(is_whole);
        }
        view
    }

    /// Groups of a space whose parity is in the map.
    pub fn groups_with_parity(&self, space: SpaceRef) -> usize {
        (0..self.spaces[space.0].layout.groups).filter(|group| self.has_parity(space.0, *group)).count()
    }

    /// Whether the map says that a group has parity.
    pub(super) fn has_parity(&self, space: usize, group: usize) -> bool {
        let state = &self.spaces[space];
        !state.is_removed && state.slabs.get(state.layout.parity(group)).is_some_and(Slab::is_held)
    }

    /// Whether a slab is one of a group that has parity.
    pub(super) fn is_grouped(&self, space: usize, slab: usize) -> bool {
        self.spaces[space].layout.group(slab).is_some_and(|group| self.has_parity(space, group))
    }

    /// How many copies a slab is to have.
    pub(super) fn wanted_copies(&self, space: usize, slab: usize) -> usize {
        let state = &self.spaces[space];
        if state.layout.is_ledger(slab) {
            return LEDGER_COPIES;
        }
        let is_dissolved = self.is_dissolving(space, slab) && !state.layout.is_parity(slab);
        let is_single = self.is_grouped(space, slab) && !is_dissolved || self.is_followed_group(space, slab);
        if is_single { 1 } else { state.copies }
    }

    /// Slabs of a group depend on each other.
    pub(super) fn mark_group(&mut self, space: usize, slab: usize) {
        let layout = self.spaces[space].layout;
        for column in layout.group(slab).into_iter().flat_map(|group| layout.columns(group)) {
            if column < self.spaces[space].slabs.len() {
                self.mark(space, column);
            }
        }
    }

    /// What does not belong to any one slab. `true` if slabs have to be looked at again.
    pub(super) fn tend_parity(&mut self) -> bool {
        if self.stripes.has_turn() {
            self.begin_waiting_stripes();
        }
        let any = self.take_own_results();
        self.tend_ledger() || any
    }

    /// Looks at a slab of a group that has parity, or is to have. `false` if it is a slab like any other.
    pub(super) fn advance_grouped(&mut self, now: Time, space: usize, slab: usize) -> bool {
        let layout = self.spaces[space].layout;
        let Some(group) = layout.group(slab).filter(|_| !self.spaces[space].is_removed) else {
            self.ledger_was_looked_at(space, slab);
            return false;
        };
        let owns = self.spaces[space].tenure == Tenure::Owner;
        if owns && self.is_frozen(space, group) {
            self.decline_late(now, space, slab);
        }
        if !self.has_parity(space, group) && owns {
            return self.advance_cold(now, space, slab);
        }
        if !self.has_parity(space, group) {
            let keeps = self.spaces[space].tenure == Tenure::Keeper && self.spaces[space].wants_parity;
            if keeps && layout.is_parity(slab) {
                self.make_group(now, space, group);
            } else if keeps && matches!(self.spaces[space].slabs[slab].phase, Phase::Open) {
                self.mark(space, layout.parity(group));
            }
            return layout.is_parity(slab);
        }
        if matches!(self.spaces[space].slabs[slab].phase, Phase::Vacant | Phase::Granting(_) | Phase::Leaving) {
            return false;
        }
        let is_gone = self.spaces[space].slabs[slab].entry.lost;
        // An owner may have given a slab up that the map has.
        let is_lost = |slab: &Slab| slab.entry.lost || owns && matches!(slab.phase, Phase::Lost);
        let others_gone = self.other_columns(space, slab).any(|column| is_lost(&self.spaces[space].slabs[column]));
        if owns && self.is_worthless(space, group) {
            self.dissolve(space, group);
        }
        // Of one that is not open, too: it may never be, where others of the group are lost, and these wait for what is known of it.
        self.check_copies(space, slab);
        if is_gone && others_gone {
            self.slab_is_lost(space, slab, Failure::Lost);
        } else if matches!(self.spaces[space].slabs[slab].phase, Phase::Open) {
            self.tend_column(now, space, slab);
        } else if layout.is_parity(slab) {
            self.open_parity(space, group);
            self.keep_unopened(space, slab);
        } else {
            let by_ledger = self.open_member(space, slab);
            if by_ledger {
                self.keep_unopened(space, slab);
            }
            return by_ledger;
        }
        let is_open = matches!(self.spaces[space].slabs[slab].phase, Phase::Open);
        if layout.is_parity(slab) && !is_open && self.is_dissolving(space, slab) {
            // Nobody may ever need to read it.
            let doubt = self.spaces[space].slabs[slab].doubt.take();
            self.part_group(now, space, group, doubt);
        }
        true
    }

    /// A slab of an owner's group that the map does not say to have parity.
    fn advance_cold(&mut self, now: Time, space: usize, slab: usize) -> bool {
        let layout = self.spaces[space].layout;
        let Some(group) = layout.group(slab) else { return false };
        if layout.is_parity(slab) {
            self.make_cold(now, space, group);
            return true;
        }
        if self.spaces[space].groups.get(group).is_some_and(|group| group.course == Course::Making) {
            self.mark(space, layout.parity(group));
        }
        // While the map is being asked for parity it is asked for nothing else: whatever happens is judged after that.
        self.is_frozen(space, group)
    }

    fn slab_is_lost(&mut self, space: usize, slab: usize, failure: Failure) {
        self.abort_repair(space, slab);
        let owns = self.spaces[space].tenure == Tenure::Owner;
        let is_new = !matches!(self.spaces[space].slabs[slab].phase, Phase::Lost);
        self.stats.slabs_lost += u64::from(owns && is_new && !self.spaces[space].layout.is_parity(slab));
        self.spaces[space].slabs[slab].phase = Phase::Lost;
        self.fail_ops(space, Some(slab), failure);
        self.look_after_if_reader(space, slab);
    }

    /// By what the ledger says of it. `false`: there is no ledger any more, and its copy has to say it.
    fn open_member(&mut self, space: usize, slab: usize) -> bool {
        match self.spaces[space].slabs[slab].table {
            Table::Known => self.column_opens(space, slab),
            Table::Asked { .. } => {}
            Table::Bad => self.slab_is_lost(space, slab, Failure::Corrupt),
            Table::Gone if self.spaces[space].slabs[slab].entry.lost => {
                self.slab_is_lost(space, slab, Failure::Lost);
            }
            Table::Gone => return false,
            _ => self.read_table(space, slab),
        }
        true
    }

    fn open_parity(&mut self, space: usize, group: usize) {
        if self.members_known(space, group) {
            self.make_parity_table(space, group);
            self.column_opens(space, self.spaces[space].layout.parity(group));
        }
    }

    fn members_known(&self, space: usize, group: usize) -> bool {
        self.held_members(space, group).iter().all(|slab| self.knows_versions(space, *slab))
    }

    fn held_members(&self, space: usize, group: usize) -> Members {
        let state = &self.spaces[space];
        state.layout.members(group).filter(|slab| state.slabs[*slab].is_held()).collect()
    }

    /// The versions that parity has: the greatest of its members' at each place, and none of an earlier life of it.
    fn make_parity_table(&mut self, space: usize, group: usize) {
        let members = self.held_members(space, group);
        let size = self.config.slab_size;
        let parity = self.spaces[space].layout.parity(group);
        let slabs = &mut self.spaces[space].slabs;
        slabs[parity].make_table(&mut self.tables);
        for index in 0..size.pages() {
            let versions = members.iter().map(|slab| slabs[*slab].version(index));
            let greatest = versions.filter(|version| version.has_content()).max();
            slabs[parity].versions[index] = greatest.map_or(Version::NEVER, |version| version.max(slabs[parity].floor));
        }
    }

    fn column_opens(&mut self, space: usize, slab: usize) {
        self.spaces[space].slabs[slab].phase = Phase::Open;
        self.mark_group(space, slab);
        self.wake_ops(space, slab);
    }

    fn check_copies(&mut self, space: usize, slab: usize) {
        let copies = self.peers_of(&self.spaces[space].slabs[slab].entry);
        for peer in copies.iter() {
            if self.fence(space, peer) {
                self.check_copy(space, slab, peer);
            }
        }
    }

    fn tend_column(&mut self, now: Time, space: usize, slab: usize) {
        self.retry_reads(space, slab);
        if self.spaces[space].tenure == Tenure::Reader {
            self.look_after(space, slab);
        } else {
            self.keep_column(now, space, slab);
        }
    }

    pub(super) fn look_after_if_reader(&mut self, space: usize, slab: usize) {
        if self.spaces[space].tenure == Tenure::Reader {
            self.look_after(space, slab);
        }
    }
}

/// Of the ledger: without it, nothing that was lost can be made anew.
const LEDGER_COPIES: usize = 2;

impl Slab {
    /// Some server has it, or had.
    pub fn is_held(&self) -> bool {
        self.entry.lost || !self.entry.replicas.is_empty()
    }
}

impl super::slab::Space {
    /// A reader or owner that finds entries beyond the last page has room for all that there may be.
    pub fn extend_to(&mut self, slabs: usize) {
        while self.slabs.len() < slabs {
            self.slabs.push(Slab::vacant());
        }
    }
}

/// What a layout of a space needs, where the map has entries beyond its pages.
pub fn slabs_needed(layout: Layout, map: &[(SlabNo, MapEntry)]) -> usize {
    let beyond = map.iter().any(|(slab, _)| slab.0 as usize >= layout.data);
    if beyond { layout.total() } else { layout.data }
}
