//! The lines of slabs that the client has to look at. A slab is in one because something happened to it, because there is room
//! again for what it has to ask, or because it is time.
//!
//! A slab stands at most once in each line. Its [`Marks`] say in which.

mod apply;

use std::collections::VecDeque;

use crate::client::index::SpaceIndex;
use crate::units::{SlabNo, Time};

/// A slab of a space.
type At = (SpaceIndex, SlabNo);

/// The lines that a slab stands in.
#[derive(Clone, Copy, Debug, Default)]
pub struct Marks {
    is_due: bool,
    waits_for_room: bool,
}

/// The lines in which slabs wait to be looked at, each for its own reason.
#[derive(Debug, Default)]
pub struct Agenda {
    /// Something happened to these.
    due: VecDeque<At>,
    /// These could not ask what they have to, as too much was asked.
    waiting: VecDeque<At>,
    /// The one that is being looked at.
    current: Option<At>,
    /// To be looked at later, whatever happens: those that servers copy, and those that wait for a silent server.
    timed: Vec<(Time, SpaceIndex, SlabNo)>,
}

impl Agenda {
    /// For so many slabs.
    pub fn make_room(&mut self, slabs: usize) {
        self.due.reserve(slabs.saturating_sub(self.due.len()));
        self.waiting.reserve(slabs.saturating_sub(self.waiting.len()));
        self.timed.reserve(slabs.saturating_sub(self.timed.len()));
    }

    /// Something happened to a slab.
    pub fn mark(&mut self, at: At, marks: &mut Marks) {
        if !std::mem::replace(&mut marks.is_due, true) {
            self.due.push_back(at);
        }
    }

    /// The next slab that something happened to.
    pub fn next_due(&mut self) -> Option<At> {
        self.due.pop_front()
    }

    /// A slab is looked at from now on.
    pub fn begin(&mut self, at: At, marks: &mut Marks) {
        marks.is_due = false;
        self.current = Some(at);
    }

    pub fn end(&mut self) {
        self.current = None;
    }

    /// The slab that is being looked at.
    pub fn current(&self) -> Option<At> {
        self.current
    }

    /// A slab has to ask something, and too much is asked already.
    pub fn wait_for_room(&mut self, at: At, marks: &mut Marks) {
        if !std::mem::replace(&mut marks.waits_for_room, true) {
            self.waiting.push_back(at);
        }
    }

    /// The next slab that waits for room; its mark goes with [`Marks::has_room`].
    pub fn next_waiting(&mut self) -> Option<At> {
        self.waiting.pop_front()
    }

    /// A slab is looked at again at that time.
    pub fn add_timed(&mut self, time: Time, (space, slab): At) {
        if !self.timed.contains(&(time, space, slab)) {
            self.timed.push((time, space, slab));
        }
    }

    /// When the next one is to be looked at.
    pub fn timed_due(&self) -> Option<Time> {
        self.timed.iter().map(|(time, ..)| *time).min()
    }

    /// A slab that it is time for by now. The one that came last comes first.
    pub fn poll(&mut self, now: Time) -> Option<At> {
        let at = self.timed.iter().rposition(|(time, ..)| *time <= now)?;
        let (_, space, slab) = self.timed.swap_remove(at);
        Some((space, slab))
    }

    /// Slabs that are looked at later.
    pub fn timed(&self) -> impl Iterator<Item = At> {
        self.timed.iter().map(|(_, space, slab)| (*space, *slab))
    }
}

impl Marks {
    /// A slab that waited for room has some.
    pub fn has_room(&mut self) {
        self.waits_for_room = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(slab: u32) -> At {
        (SpaceIndex(0), SlabNo(slab))
    }

    #[test]
    fn a_slab_stands_in_line_once() {
        let (mut agenda, mut marks) = (Agenda::default(), Marks::default());
        (0..2).for_each(|_| agenda.mark(at(3), &mut marks));
        (0..2).for_each(|_| agenda.wait_for_room(at(3), &mut marks));
        assert_eq!((agenda.next_due(), agenda.next_due()), (Some(at(3)), None));
        assert_eq!((agenda.next_waiting(), agenda.next_waiting()), (Some(at(3)), None));
        agenda.begin(at(3), &mut marks);
        assert_eq!(agenda.current(), Some(at(3)));
        // What happens while it is looked at has it looked at again.
        agenda.mark(at(3), &mut marks);
        marks.has_room();
        agenda.wait_for_room(at(3), &mut marks);
        agenda.end();
        assert_eq!((agenda.current(), agenda.next_due(), agenda.next_waiting()), (None, Some(at(3)), Some(at(3))));
    }

    #[test]
    fn slabs_are_looked_at_when_it_is_time() {
        let mut agenda = Agenda::default();
        [(5, 0), (7, 1), (3, 2), (5, 0)].into_iter().for_each(|(time, slab)| agenda.add_timed(Time(time), at(slab)));
        assert_eq!((agenda.timed().count(), agenda.timed_due()), (3, Some(Time(3))));
        let due: Vec<At> = std::iter::from_fn(|| agenda.poll(Time(5))).collect();
        assert_eq!((due, agenda.timed_due()), (vec![at(2), at(0)], Some(Time(7))));
    }
}
