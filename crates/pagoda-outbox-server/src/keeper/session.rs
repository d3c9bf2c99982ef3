//! What QEMU has told the process that serves, to be told to the next one. QEMU tells it once: its device for virtiofs cannot
//! begin again.

use std::collections::BTreeMap;
use std::io;

use super::message::{Message, kind};
use crate::inflight::RINGS;

/// Regions of memory, as the library that answers has it.
const REGIONS_MAX: usize = 509;
/// Where a region's address in the guest and its size are in a message.
const REGION: std::ops::Range<usize> = 8..24;

/// Kinds that count once, in the order in which they are told.
const ONCE: [u32; 5] =
    [kind::GET_FEATURES, kind::SET_OWNER, kind::GET_PROTOCOL_FEATURES, kind::SET_PROTOCOL_FEATURES, kind::SET_FEATURES];
/// The same of each ring.
const EACH_RING: [u32; 7] = [
    kind::SET_VRING_NUM,
    kind::SET_VRING_BASE,
    kind::SET_VRING_ADDR,
    kind::SET_VRING_ERR,
    kind::SET_VRING_CALL,
    kind::SET_VRING_KICK,
    kind::SET_VRING_ENABLE,
];

#[derive(Debug, Default)]
pub struct Session {
    once: BTreeMap<u32, Message>,
    table: Option<Message>,
    regions: Vec<Message>,
    rings: [BTreeMap<u32, Message>; RINGS],
}

/// The ring that a message is about.
pub fn ring_of(message: &Message) -> Option<usize> {
    let ring = match message.kind {
        // The lowest byte; another bit says that there is no descriptor.
        kind::SET_VRING_KICK | kind::SET_VRING_CALL | kind::SET_VRING_ERR => message.word(0) & 0xff,
        _ => message.word(0),
    };
    usize::try_from(ring).ok().filter(|ring| *ring < RINGS)
}

/// The ring that may have begun, or may have got another way to tell the guest of answers, by this message.
pub fn begun(message: &Message) -> Option<usize> {
    let begins = match message.kind {
        kind::SET_VRING_KICK | kind::SET_VRING_CALL => true,
        kind::SET_VRING_ENABLE => message.word(4) != 0,
        _ => false,
    };
    begins.then(|| ring_of(message)).flatten()
}

impl Session {
    /// It was told, and was not refused.
    pub fn note(&mut self, message: Message) {
        match message.kind {
            kind if ONCE.contains(&kind) => drop(self.once.insert(kind, message)),
            kind if EACH_RING.contains(&kind) => {
                if let Some(ring) = ring_of(&message) {
                    self.rings[ring].insert(kind, message);
                }
            }
            // It stops the ring, and its descriptors are closed.
            kind::GET_VRING_BASE => {
                if let Some(ring) = ring_of(&message) {
                    self.rings[ring].retain(|kind, _| !matches!(*kind, kind::SET_VRING_KICK | kind::SET_VRING_CALL));
                }
            }
            kind::SET_MEM_TABLE => {
                self.regions.clear();
                self.table = Some(message);
            }
            kind::ADD_MEM_REG if self.regions.len() < REGIONS_MAX => self.regions.push(message),
            kind::REM_MEM_REG => {
                self.regions.retain(|region| region.payload.get(REGION) != message.payload.get(REGION));
            }
            _ => {}
        }
    }

    /// All of it again. Rings go on where `next_index` says that they are.
    pub fn told(&self, next_index: impl Fn(usize) -> u16) -> io::Result<Vec<Message>> {
        let mut told = Vec::new();
        for kind in ONCE {
            told.extend(self.once.get(&kind).map(Message::again));
        }
        told.extend(self.table.iter().chain(&self.regions).map(Message::again));
        for (ring, messages) in self.rings.iter().enumerate() {
            for kind in EACH_RING {
                let Some(message) = messages.get(&kind) else { continue };
                let mut message = message.again()?;
                if kind == kind::SET_VRING_BASE
                    && let Some(index) = message.payload.get_mut(4..8)
                {
                    index.copy_from_slice(&u32::from(next_index(ring)).to_le_bytes());
                }
                told.push(Ok(message));
            }
        }
        told.into_iter().collect()
    }

    /// Whether requests are taken out of a ring.
    pub fn is_running(&self, ring: usize) -> bool {
        self.rings[ring].contains_key(&kind::SET_VRING_KICK)
    }

    /// Has the worker look at a ring without the guest's doing, and the guest at what was answered in it while nobody could tell it.
    pub fn wake(&self, ring: usize) {
        for kind in [kind::SET_VRING_KICK, kind::SET_VRING_CALL] {
            if let Some(event) = self.rings[ring].get(&kind).and_then(|message| message.fds.first()) {
                // An eventfd that cannot take more is one that is being looked at.
                let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u32, words: &[u32]) -> Message {
        let payload = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Message { kind, flags: 1, payload, fds: Vec::new() }
    }

    fn kinds(session: &Session) -> Vec<u32> {
        session.told(|_| 0).unwrap().iter().map(|message| message.kind).collect()
    }

    #[test]
    fn it_is_told_in_order_and_once() {
        let mut session = Session::default();
        for kind in
            [kind::SET_VRING_KICK, kind::SET_VRING_BASE, kind::SET_FEATURES, kind::SET_OWNER, kind::SET_FEATURES]
        {
            session.note(message(kind, &[1, 7]));
        }
        session.note(message(kind::SET_MEM_TABLE, &[]));
        session.note(message(kind::SET_VRING_NUM, &[2, 7]));
        session.note(message(99, &[1]));
        let expected =
            [kind::SET_OWNER, kind::SET_FEATURES, kind::SET_MEM_TABLE, kind::SET_VRING_BASE, kind::SET_VRING_KICK];
        assert_eq!(kinds(&session), expected);
        let told = session.told(|ring| ring as u16 + 40).unwrap();
        assert_eq!((told[3].word(0), told[3].word(4)), (1, 41), "where the ring is now");
        session.note(message(kind::GET_VRING_BASE, &[1]));
        assert!(!kinds(&session).contains(&kind::SET_VRING_KICK), "the ring was stopped");
    }

    #[test]
    fn a_ring_that_begins_is_looked_at_by_both_sides() {
        let mut session = Session::default();
        let event = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let (kick, call) = (event(), event());
        let is_written = |event: &std::os::fd::OwnedFd| rustix::io::read(event, &mut [0; 8]).is_ok();
        session.wake(1);
        for (kind, event) in [(kind::SET_VRING_KICK, &kick), (kind::SET_VRING_CALL, &call)] {
            let message = Message { fds: vec![event.try_clone().unwrap()], ..message(kind, &[1, 0]) };
            assert_eq!(begun(&message), Some(1));
            session.note(message);
        }
        assert_eq!((session.is_running(0), session.is_running(1)), (false, true));
        session.wake(0);
        assert!(!is_written(&kick) && !is_written(&call), "another ring's");
        session.wake(1);
        assert!(is_written(&kick) && is_written(&call));
        assert_eq!(begun(&message(kind::SET_VRING_ENABLE, &[1, 1])), Some(1));
        for other in [message(kind::SET_VRING_ENABLE, &[1, 0]), message(kind::GET_VRING_BASE, &[1])] {
            assert_eq!(begun(&other), None);
        }
        session.note(message(kind::GET_VRING_BASE, &[1]));
        session.wake(1);
        assert!(!session.is_running(1) && !is_written(&kick), "it was stopped");
    }

    #[test]
    fn regions_come_and_go() {
        let mut session = Session::default();
        let region = |kind, at| message(kind, &[0, 0, at, 0, 4096, 0, 5, 0, 0, 0]);
        session.note(region(kind::ADD_MEM_REG, 1));
        session.note(region(kind::ADD_MEM_REG, 2));
        session.note(region(kind::REM_MEM_REG, 1));
        let told = session.told(|_| 0).unwrap();
        assert_eq!((told.len(), told[0].word(8)), (1, 2));
        (0..REGIONS_MAX as u32 + 5).for_each(|at| session.note(region(kind::ADD_MEM_REG, at)));
        assert_eq!(session.told(|_| 0).unwrap().len(), REGIONS_MAX);
        session.note(message(kind::SET_MEM_TABLE, &[]));
        assert_eq!(kinds(&session), [kind::SET_MEM_TABLE]);
    }
}
