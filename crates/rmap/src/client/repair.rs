//! A slab that has too few copies, or one at a server that wants to be rid of it, gets a new one.
//!
//! The order that loses nothing: the new copy gets every write from now on; it gets every page that it lacks, once the
//! writes that it missed are done, and from then on its acknowledgement is waited for like any other, so that it is not
//! behind for ever; then it joins the map. Only then does the copy leave that it replaces.

use super::tables::Tables;
use super::transfer::Transfer;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::{SEALED_SIZE, SlabNo, Time, Version};

/// Slabs that get a new copy at a time, so that not all clients of a dead server copy everything at once.
pub const REPAIRS_MAX: usize = 4;

/// What copies may save up of the link: a few milliseconds of 1 Gbit/s.
const BUDGET_MAX: u64 = 256 * 1024;

/// Which slabs get a copy, from when on, and what that may use of the link.
#[derive(Debug, Default)]
pub struct Repairs {
    running: Vec<(SpaceIndex, SlabNo)>,
    /// No copy is restored before that.
    starts_at: Option<Time>,
    /// Bytes that copies may use now, and when that was.
    budget: u64,
    budget_at: Time,
}

impl Repairs {
    /// For so many slabs.
    pub fn make_room(&mut self, slabs: usize) {
        self.running.reserve(slabs.saturating_sub(self.running.len()));
    }

    pub fn begin(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.running.push((space, slab));
    }

    pub fn end(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.running.retain(|of| *of != (space, slab));
    }

    /// Slabs that get a copy, in the order in which that began.
    pub fn iter(&self) -> impl Iterator<Item = (SpaceIndex, SlabNo)> {
        self.running.iter().copied()
    }

    pub fn len(&self) -> usize {
        self.running.len()
    }

    /// A server is lost: copies are restored from then on, unless that is decided already.
    pub fn put_off(&mut self, until: impl FnOnce() -> Time) {
        self.starts_at.get_or_insert_with(until);
    }

    pub fn is_put_off(&self) -> bool {
        self.starts_at.is_some()
    }

    /// When copies begin to be restored that were put off.
    pub fn due(&self) -> Option<Time> {
        self.starts_at
    }

    /// Whether copies that were put off may begin as of now.
    pub fn poll(&mut self, now: Time) -> bool {
        self.starts_at.take_if(|at| *at <= now).is_some()
    }

    /// Time went by, in which copies could have used so many bytes a second.
    pub fn earn(&mut self, now: Time, bytes_per_second: u64) {
        let elapsed = now.since(self.budget_at).as_nanos() as u64;
        let gained = (u128::from(elapsed) * u128::from(bytes_per_second) / 1_000_000_000) as u64;
        if gained > 0 {
            self.budget = (self.budget + gained).min(BUDGET_MAX);
            self.budget_at = now;
        }
    }

    /// Whether a page may be read for a copy now.
    pub fn can_afford_page(&self) -> bool {
        self.budget >= SEALED_SIZE as u64
    }

    pub fn spend_page(&mut self) {
        self.budget = self.budget.saturating_sub(SEALED_SIZE as u64);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Fencing,
    Granting,
    /// The server that has the slab copies it to the other one.
    Transferring(Transfer),
    /// What is missing goes through the client.
    Copying,
    /// The map is being changed.
    Joining,
}

/// A copy in the making.
#[derive(Debug)]
pub struct Repair {
    pub peer: PeerIndex,
    pub grant: Version,
    pub step: Step,
    pub replaces: Option<PeerIndex>,
    /// What it has, as far as is known.
    pub list: Box<[Version]>,
    /// Pages before this one were looked at in this pass.
    pub cursor: usize,
}

impl Repair {
    pub fn new(peer: PeerIndex, grant: Version, replaces: Option<PeerIndex>) -> Repair {
        Repair { peer, grant, step: Step::Fencing, replaces, list: Box::default(), cursor: 0 }
    }

    /// The server that gets every write.
    pub fn mirror(&self) -> Option<PeerIndex> {
        matches!(self.step, Step::Transferring(_) | Step::Copying | Step::Joining).then_some(self.peer)
    }

    /// The server without which no write that it got is done: one that has all but what is being written could be behind
    /// for ever otherwise, while others are faster.
    pub fn catches_up(&self) -> Option<PeerIndex> {
        matches!(self.step, Step::Copying | Step::Joining).then_some(self.peer)
    }

    pub fn granted(&mut self, tables: &mut Tables) {
        if self.step == Step::Granting {
            self.step = Step::Transferring(Transfer::Wanted);
            self.list = tables.take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_use_what_they_have_saved_up_and_no_more() {
        let mut repairs = Repairs::default();
        assert!(!repairs.can_afford_page());
        repairs.earn(Time(1_000_000_000), 1_000_000_000);
        let pages = std::iter::from_fn(|| repairs.can_afford_page().then(|| repairs.spend_page())).count();
        assert_eq!(pages, BUDGET_MAX as usize / SEALED_SIZE);
        // A moment in which nothing is gained counts for the next one.
        repairs.earn(Time(1_000_000_001), 1_000_000);
        repairs.earn(Time(1_000_000_000 + 10_000_000), 1_000_000);
        assert!(repairs.can_afford_page());
    }

    #[test]
    fn copies_are_put_off_once() {
        let mut repairs = Repairs::default();
        repairs.put_off(|| Time(5));
        repairs.put_off(|| panic!("it is decided"));
        assert_eq!((repairs.poll(Time(4)), repairs.is_put_off(), repairs.due()), (false, true, Some(Time(5))));
        assert_eq!((repairs.poll(Time(5)), repairs.is_put_off()), (true, false));
    }
}
