//! Pages that arrive in pieces. A page replaces another only when it is whole.
//!
//! The room for them is the worker's and not a session's: pieces of a message are sent one right behind the other, so
//! of two thousand sessions few have any under way at a time. A session that has more than it may, or pieces that never
//! became whole, pushes out its own first.

use crate::reassembly::{Identity, Partial};
use crate::wire::message::Fragment;

/// Writes that a client may have under way at a server, and so pages in pieces: 128 KiB, the bandwidth-delay product of
/// 10 Gbit/s and 100 us.
pub const WRITE_CREDITS: u16 = 32;
/// Messages in pieces of a worker at a time: 8 MiB, so 64 sessions may have as many as they may. What is pushed out is
/// sent again.
const PARTIALS_MAX: u16 = 64 * WRITE_CREDITS;
/// Of a session that has none.
const NOWHERE: u16 = u16::MAX;

/// Where a session's messages in pieces are; some of them may have become whole, or be others' by now.
#[derive(Debug)]
pub struct Pieces([u16; WRITE_CREDITS as usize]);

impl Default for Pieces {
    fn default() -> Pieces {
        Pieces([NOWHERE; WRITE_CREDITS as usize])
    }
}

#[derive(Debug)]
struct Held {
    partial: Partial,
    session: u32,
    /// When it was begun, by the clock of [`Reassembly`]: the oldest one is given up first.
    began: u64,
}

/// The messages in pieces of a worker.
#[derive(Debug)]
pub struct Reassembly {
    all: Vec<Held>,
    /// The place that is taken next: the one that was taken longest ago.
    next: u16,
    clock: u64,
}

impl Reassembly {
    pub fn new() -> Reassembly {
        let held = || Held { partial: Partial::new(), session: 0, began: 0 };
        Reassembly { all: (0..PARTIALS_MAX).map(|_| held()).collect(), next: 0, clock: 0 }
    }

    /// What is in pieces at a place, if it is of this session.
    fn of(&self, session: u32, slot: u16) -> Option<&Held> {
        self.all.get(usize::from(slot)).filter(|held| held.session == session && !held.partial.is_free())
    }

    /// Adds a piece of message `id` in a version, of the session with this number. Where a client has more under way than it may, the
    /// oldest is given up.
    pub fn add(
        &mut self,
        (session, pieces): (u32, &mut Pieces),
        (id, version): (u64, u64),
        fragment: Fragment,
        part: &[u8],
        payload: usize,
    ) -> Option<&[u8]> {
        let identity = Identity::new(id, version, fragment, payload);
        let known = self.find(session, pieces, |held| held.partial.is(identity));
        let slot = known.unwrap_or_else(|| {
            // The same message cut another way: what there was of it is of no use.
            let same = self.find(session, pieces, |held| held.partial.is_of(id));
            let slot = same.unwrap_or_else(|| self.slot_for(session, pieces));
            self.clock += 1;
            let held = &mut self.all[usize::from(slot)];
            (held.session, held.began) = (session, self.clock);
            held.partial.begin(identity);
            slot
        });
        self.all[usize::from(slot)].partial.add(fragment, part)
    }

    fn find(&self, session: u32, pieces: &Pieces, fits: impl Fn(&Held) -> bool) -> Option<u16> {
        pieces.0.iter().copied().find(|slot| self.of(session, *slot).is_some_and(&fits))
    }

    /// Room for one more message of a session.
    fn slot_for(&mut self, session: u32, pieces: &mut Pieces) -> u16 {
        let Some(spare) = pieces.0.iter().position(|slot| self.of(session, *slot).is_none()) else {
            let began = |slot: &u16| self.of(session, *slot).map(|held| held.began);
            return pieces.0.iter().copied().min_by_key(began).unwrap_or(self.next);
        };
        let slot = self.next;
        self.next = (slot + 1) % PARTIALS_MAX;
        // It may be one that the session had before.
        pieces.0.iter_mut().filter(|own| **own == slot).for_each(|own| *own = NOWHERE);
        pieces.0[spare] = slot;
        slot
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SEALED_SIZE;

    fn part(index: u8, byte: u8) -> (Fragment, Vec<u8>) {
        let fragment = Fragment { index, count: 3 };
        (fragment, vec![byte; fragment.range(SEALED_SIZE).len()])
    }

    /// Sessions of a worker.
    struct Worker {
        reassembly: Reassembly,
        sessions: Vec<Pieces>,
    }

    impl Worker {
        fn new(sessions: usize) -> Worker {
            let sessions = (0..sessions).map(|_| Pieces::default()).collect();
            Worker { reassembly: Reassembly::new(), sessions }
        }

        /// A piece of a message that is filled with its number. Whether that was the last, and all is as it was sent.
        fn add(&mut self, session: usize, id: u64, index: u8) -> Option<bool> {
            let (fragment, bytes) = part(index, id as u8);
            let about = (session as u32 + 1, &mut self.sessions[session]);
            let whole = self.reassembly.add(about, (id, 0), fragment, &bytes, SEALED_SIZE);
            whole.map(|whole| whole.iter().all(|b| *b == id as u8))
        }

        fn add_rest(&mut self, session: usize, id: u64) -> Option<bool> {
            self.add(session, id, 1);
            self.add(session, id, 2)
        }
    }

    #[test]
    fn pieces_of_several_messages_in_any_order() {
        let mut worker = Worker::new(1);
        let mut add = |id, index| worker.add(0, id, index);
        assert_eq!([add(1, 2), add(2, 0), add(2, 0), add(1, 0), add(2, 1)], [None; 5]);
        assert_eq!([add(1, 1), add(2, 2)], [Some(true); 2]);
    }

    #[test]
    fn too_many_push_out_the_oldest() {
        let mut worker = Worker::new(1);
        for id in 0..=u64::from(WRITE_CREDITS) {
            assert_eq!(worker.add(0, id, 0), None);
        }
        assert_eq!(worker.add_rest(0, 1), Some(true));
        assert_eq!(worker.add_rest(0, 0), None, "its first piece was given up");
    }

    /// Messages of the same numbers in different sessions are different ones.
    #[test]
    fn sessions_do_not_mix() {
        let mut worker = Worker::new(3);
        for id in 1..=20 {
            (0..3).for_each(|session| assert_eq!(worker.add(session, id, 0), None));
        }
        for id in 1..=20 {
            assert_eq!([0, 1].map(|session| worker.add_rest(session, id)), [Some(true); 2]);
        }
        assert_eq!(worker.add_rest(2, 7), Some(true));
    }

    /// One that begins message after message and ends none is in its own way only.
    #[test]
    fn a_session_that_ends_nothing_pushes_out_its_own() {
        let mut worker = Worker::new(2);
        assert_eq!(worker.add(0, 1, 0), None);
        for id in 0..3 * u64::from(PARTIALS_MAX) {
            assert_eq!(worker.add(1, id, 0), None);
        }
        assert_eq!(worker.add_rest(0, 1), Some(true));
    }

    /// What became whole makes room, however often the places go round.
    #[test]
    fn a_session_goes_on_for_ever() {
        let mut worker = Worker::new(1);
        for id in 0..3 * u64::from(PARTIALS_MAX) {
            assert_eq!(worker.add(0, id, 0), None);
            assert_eq!(worker.add_rest(0, id), Some(true), "message {id}");
        }
    }
}
