//! The spaces of a client: where their slabs are, and which version each page has.
//!
//! Owns the spaces, the tables of versions that are kept ready, the slabs that are to be looked at ([`Agenda`]), the questions
//! to the control plane ([`Questions`]), what is still to be asked of earlier owners' leftovers, and which sealed spaces are
//! watched. It knows no session. An entry of the map changes only when the control plane has confirmed it; until then the
//! change is the slab's pending one, and the slab asks for no other.

mod change;
mod copies;
mod follow;
mod groups;
mod ledger;

use crate::client::agenda::Agenda;
use crate::client::index::{List, SpaceIndex};
use crate::client::leftovers::Leftovers;
use crate::client::questions::Questions;
use crate::client::servers::SERVERS_MAX;
use crate::client::slab::{Phase, Space};
use crate::client::tables::Tables;
use crate::units::{PageNo, SlabNo, SlabSize, Time};

#[derive(Debug)]
pub struct Map {
    pub size: SlabSize,
    pub spaces: List<SpaceIndex, Space>,
    pub tables: Tables,
    agenda: Agenda,
    pub questions: Questions,
    pub leftovers: Leftovers,
    /// Sealed spaces that are not as they should be.
    watched: Vec<SpaceIndex>,
}

impl Map {
    pub fn new(size: SlabSize) -> Map {
        Map {
            size,
            spaces: List::default(),
            tables: Tables::new(size),
            agenda: Agenda::default(),
            questions: Questions::default(),
            leftovers: Leftovers::default(),
            watched: Vec::new(),
        }
    }

    /// Room for all that may be under way about slabs: for each of them a question, and a look at it now and one later. How many slabs
    /// these are. When a server dies, all that it had are looked at together.
    pub fn make_room(&mut self) -> usize {
        let slabs = self.spaces.iter().map(|space| space.slabs.len() + 1).sum::<usize>();
        self.questions.make_room(slabs);
        self.agenda.make_room(slabs);
        self.leftovers.make_room(self.spaces.len() * SERVERS_MAX);
        slabs
    }

    /// When a question is to be asked, a slab or a map to be looked at, or reads to be tried again.
    pub fn due(&self) -> Option<Time> {
        let due = [self.questions.due(), self.agenda.timed_due(), self.watch_due(), self.follow_due()];
        due.into_iter().flatten().min()
    }

    /// The slab that a page is in.
    pub fn slab_of(&self, page: PageNo) -> Option<SlabNo> {
        self.size.slab(page)
    }

    /// The first page of a slab, by which requests name it.
    pub fn first_page(&self, slab: SlabNo) -> PageNo {
        self.size.page(slab, 0)
    }

    /// Something happened to a slab.
    pub fn mark(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.agenda.mark((space, slab), &mut self.spaces[space].slabs[slab].marks);
    }

    /// A slab is looked at when that time has come, whatever happens.
    pub fn mark_at(&mut self, time: Time, space: SpaceIndex, slab: SlabNo) {
        self.agenda.add_timed(time, (space, slab));
    }

    /// The next slab that something happened to.
    pub fn next_due(&mut self) -> Option<(SpaceIndex, SlabNo)> {
        self.agenda.next_due()
    }

    /// The next slab that waits for room to ask something. There is some now.
    pub fn next_with_room(&mut self) -> Option<(SpaceIndex, SlabNo)> {
        let (space, slab) = self.agenda.next_waiting()?;
        self.spaces[space].slabs[slab].marks.has_room();
        Some((space, slab))
    }

    /// A slab is looked at from now on.
    pub fn begin_look(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.agenda.begin((space, slab), &mut self.spaces[space].slabs[slab].marks);
    }

    /// It has been looked at.
    pub fn end_look(&mut self) {
        self.agenda.end();
    }

    /// Slabs that are looked at later, whatever happens.
    pub fn timed(&self) -> impl Iterator<Item = (SpaceIndex, SlabNo)> {
        self.agenda.timed()
    }

    /// When the first of them is looked at.
    #[cfg(test)]
    pub fn timed_due(&self) -> Option<Time> {
        self.agenda.timed_due()
    }

    /// Slabs are looked at whose time has come.
    pub fn mark_timed(&mut self, now: Time) {
        while let Some((space, slab)) = self.agenda.poll(now) {
            self.mark(space, slab);
        }
    }

    /// Slabs of a group depend on each other.
    pub fn mark_group(&mut self, space: SpaceIndex, slab: SlabNo) {
        let layout = self.spaces[space].layout;
        for column in layout.group(slab).into_iter().flat_map(|group| layout.columns(group)) {
            if self.spaces[space].slabs.get(column).is_some() {
                self.mark(space, column);
            }
        }
    }

    /// Something changed that concerns slabs everywhere: a server came, or has room.
    pub fn mark_all(&mut self) {
        self.spaces.indices().for_each(|space| self.mark_all_of(space));
    }

    /// The same of one space. A slab that nobody has depends on no server.
    pub fn mark_all_of(&mut self, space: SpaceIndex) {
        for slab in self.spaces[space].slabs.indices() {
            if !matches!(self.spaces[space].slabs[slab].phase, Phase::Vacant) {
                self.mark(space, slab);
            }
        }
    }

    /// What is asked about a page found no room: its slab waits for some, and so does the one that is being looked at.
    pub fn wait_for_room(&mut self, space: SpaceIndex, slab: Option<SlabNo>) {
        for (space, slab) in slab.map(|slab| (space, slab)).into_iter().chain(self.agenda.current()) {
            // What an earlier owner left may be of no slab of today.
            if let Some(state) = self.spaces[space].slabs.get_mut(slab) {
                self.agenda.wait_for_room((space, slab), &mut state.marks);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::SpaceSpec;
    use crate::client::sealed::Tenure;
    use crate::control::{Change, ControlRequest, MapEntry, Replica};
    use crate::crypto::{KEY_SIZE, SpaceKey};
    use crate::units::{Generation, ServerId, SpaceId, Version};

    const SPACE: SpaceIndex = SpaceIndex(0);

    /// The map of an owner's space of four slabs. Two servers have the second.
    fn map() -> Map {
        let mut map = Map::new(SlabSize::new(8).unwrap());
        let spec = SpaceSpec { id: SpaceId(1), pages: 32, copies: 2, reserve: 0, key: [1; KEY_SIZE] };
        let replica = |server| Replica { server: ServerId(server), grant: Version::new(Generation(1), 1, false) };
        let held = [(SlabNo(1), MapEntry::of([replica(1), replica(2)]))];
        let key = SpaceKey::new(&spec.key, spec.id);
        map.spaces.push(Space::new(&spec, key, (Generation(1), 7), Tenure::Owner, map.size, &held));
        map
    }

    #[test]
    fn a_slab_that_somebody_has_is_looked_at_once() {
        let mut map = map();
        (0..2).for_each(|_| map.mark_all());
        assert_eq!((map.next_due(), map.next_due()), (Some((SPACE, SlabNo(1))), None));
    }

    #[test]
    fn what_finds_no_room_waits_with_the_slab_that_is_being_looked_at() {
        let mut map = map();
        map.begin_look(SPACE, SlabNo(0));
        // What an earlier owner left may be of no slab of today.
        [1, 99].into_iter().for_each(|slab| map.wait_for_room(SPACE, Some(SlabNo(slab))));
        map.end_look();
        map.wait_for_room(SPACE, None);
        let waiting: Vec<_> = std::iter::from_fn(|| map.next_with_room()).collect();
        assert_eq!(waiting, [(SPACE, SlabNo(1)), (SPACE, SlabNo(0))]);
    }

    #[test]
    fn an_entry_changes_when_the_control_plane_has_confirmed_it() {
        let (mut map, slab) = (map(), SlabNo(1));
        let before = map.spaces[SPACE].slabs[slab].entry.clone();
        map.propose(SPACE, slab, MapEntry::lost());
        assert_eq!(map.spaces[SPACE].slabs[slab].entry, before);
        assert!(map.waits_for_map(SPACE, slab) && !map.waits_for_map(SPACE, SlabNo(0)));
        let Some((_, ControlRequest::Change(Change { entry, .. }))) = map.questions.poll(Time(0)) else {
            unreachable!("it was asked for")
        };
        assert_eq!((entry.lost, entry.revision), (true, before.revision + 1));
        assert_eq!(map.due(), Some(Time(0) + std::time::Duration::from_millis(500)), "it is asked again");
    }
}
