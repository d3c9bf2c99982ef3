//! What a host keeps on its disk of the owner of a VM, and has to find again after any crash. A host has at most one note for
//! each VM.
//!
//! | bytes | |
//! |---|---|
//! | 0..4 | `PMVN` |
//! | 4 | version: 1 |
//! | 5 | kind: 1 owned, 2 given, 3 incoming, 4 accepted, 5 refused |
//! | 6 | of kinds 2 and 4, what decides: 0 the grant, 1 the arbiter, 2 the arbiter, whom the source has asked for the VM. Of kind 1, what the attempt was: 0 none, 1 the VM came by it, 2 it was offered by it, 3 it came back from it |
//! | 7 | 0 |
//! | 8..16 | attempt; 0 if there is none |
//! | 16..24 | generation that the attempt offered; at which the VM is owned, if there is none |
//! | 24..32 | the arbiter's registers that both hosts ask for this attempt; 0 if they ask none, and never 0 where the arbiter decides |
//! | 32..64 | key of the other host; zeros if there is none |
//!
//! The note of a VM that is owned may name an attempt. It is the last one by which another host may have the VM, or may take it
//! to be here. What that host says later of this attempt is answered by the note. What any host says of another attempt is not,
//! because VMs of one name may be different ones.
//!
//! The length never changes. So a disk that becomes full does not keep a note from being replaced in its place.

use crate::units::{AttemptId, Generation, HostKey, RegisterId};
use crate::wire::Malformed;
use crate::wire::control::DecidedBy;

/// Bytes of a note.
pub const NOTE_SIZE: usize = 64;
const MAGIC: [u8; 4] = *b"PMVN";
const VERSION: u8 = 1;

/// What decides about a VM that its source has given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The destination alone. The source never asks the arbiter for the VM.
    Grant,
    /// The destination, once it has asked the arbiter. The source has not.
    Arbiter,
    /// Who of the two asks the arbiter first. The destination gets no grant that needs no arbiter.
    TakingBack,
}

impl Decision {
    /// What the grant says of it.
    pub const fn on_the_wire(self) -> DecidedBy {
        match self {
            Decision::Grant => DecidedBy::Grant,
            Decision::Arbiter | Decision::TakingBack => DecidedBy::Arbiter,
        }
    }
}

/// The other host of an attempt, the generation that the grant offers, and the arbiter's registers that both ask: those, and no others,
/// whatever is configured later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    pub attempt: AttemptId,
    pub peer: HostKey,
    pub generation: Generation,
    pub register: Option<RegisterId>,
}

/// A VM that is this host's: at which generation, and the last attempt by which another host has a word to say of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owned {
    /// No other host has a word to say of it: there is no such attempt.
    Alone(Generation),
    /// It came by this one, and is owned at its generation.
    Came(Offered),
    /// It was offered by this one, and is owned at the generation before. Its destination may have all of it, and run it there by the
    /// word of an operator.
    Offered(Offered),
    /// It came back from this one, and is owned at the generation after.
    Back(Offered),
}

impl Owned {
    /// At which the VM is owned.
    pub const fn generation(self) -> Generation {
        match self {
            Owned::Alone(generation) => generation,
            Owned::Came(offered) => offered.generation,
            // A note with 0 is read by nobody.
            Owned::Offered(offered) => Generation(offered.generation.0.saturating_sub(1)),
            Owned::Back(offered) => offered.generation.next(),
        }
    }

    /// The attempt that it tells of.
    pub const fn offered(self) -> Option<Offered> {
        match self {
            Owned::Alone(_) => None,
            Owned::Came(offered) | Owned::Offered(offered) | Owned::Back(offered) => Some(offered),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// The VM is this host's.
    Owned(Owned),
    /// By the source, before the grant. This host does not run the VM without the other's refusal, or the arbiter's word.
    Given(Offered, Decision),
    /// By the destination, before it reserves anything: what a daemon that starts finds of it is removed.
    Incoming(Offered),
    /// By the destination, before the VM runs: it may have run here.
    Accepted(Offered, DecidedBy),
    /// By the destination, before it says so: it has not run the VM at this generation and never will.
    Refused(Offered),
}

impl Note {
    pub fn encode(self) -> [u8; NOTE_SIZE] {
        const NONE: Offered =
            Offered { attempt: AttemptId(0), peer: HostKey([0; 32]), generation: Generation(0), register: None };
        let (kind, decision, offered) = match self {
            Note::Owned(Owned::Alone(generation)) => (1, 0, Offered { generation, ..NONE }),
            Note::Owned(Owned::Came(offered)) => (1, 1, offered),
            Note::Owned(Owned::Offered(offered)) => (1, 2, offered),
            Note::Owned(Owned::Back(offered)) => (1, 3, offered),
            Note::Given(offered, Decision::Grant) => (2, 0, offered),
            Note::Given(offered, Decision::Arbiter) => (2, 1, offered),
            Note::Given(offered, Decision::TakingBack) => (2, 2, offered),
            Note::Incoming(offered) => (3, 0, offered),
            Note::Accepted(offered, DecidedBy::Grant) => (4, 0, offered),
            Note::Accepted(offered, DecidedBy::Arbiter) => (4, 1, offered),
            Note::Refused(offered) => (5, 0, offered),
        };
        let mut bytes = [0; NOTE_SIZE];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..7].copy_from_slice(&[VERSION, kind, decision]);
        bytes[8..16].copy_from_slice(&offered.attempt.0.to_le_bytes());
        bytes[16..24].copy_from_slice(&offered.generation.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&RegisterId::number(offered.register).to_le_bytes());
        bytes[32..].copy_from_slice(&offered.peer.0);
        bytes
    }

    /// # Errors
    /// Bytes that no version writes.
    pub fn decode(bytes: [u8; NOTE_SIZE]) -> Result<Note, Malformed> {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        if bytes[..4] != MAGIC || bytes[4] != VERSION {
            return Err(Malformed("no note of this version"));
        }
        let peer = HostKey(std::array::from_fn(|index| bytes[32 + index]));
        let (attempt, generation) = (AttemptId(number(8)), Generation(number(16)));
        let offered = Offered { attempt, peer, generation, register: RegisterId::of(number(24)) };
        let note = match bytes[5..7] {
            [1, 0] => Note::Owned(Owned::Alone(offered.generation)),
            [1, 1] => Note::Owned(Owned::Came(offered)),
            [1, 2] => Note::Owned(Owned::Offered(offered)),
            [1, 3] => Note::Owned(Owned::Back(offered)),
            [2, 0] => Note::Given(offered, Decision::Grant),
            [2, 1] => Note::Given(offered, Decision::Arbiter),
            [2, 2] => Note::Given(offered, Decision::TakingBack),
            [3, 0] => Note::Incoming(offered),
            [4, 0] => Note::Accepted(offered, DecidedBy::Grant),
            [4, 1] => Note::Accepted(offered, DecidedBy::Arbiter),
            [5, 0] => Note::Refused(offered),
            _ => return Err(Malformed("kind of a note")),
        };
        // Whatever is reserved is zero, and an attempt is there where one belongs.
        let has_attempt = offered.attempt.0 != 0 || matches!(note, Note::Owned(Owned::Alone(_)));
        // There is a generation before the one that was offered, and one after it.
        let is_between = match note {
            Note::Owned(owned) if owned.offered().is_some() => (1..u64::MAX).contains(&offered.generation.0),
            _ => true,
        };
        let is_arbitrated = matches!(
            note,
            Note::Given(_, Decision::Arbiter | Decision::TakingBack) | Note::Accepted(_, DecidedBy::Arbiter)
        );
        let can_ask = offered.register.is_some() || !is_arbitrated;
        if note.encode() == bytes && has_attempt && is_between && can_ask {
            Ok(note)
        } else {
            Err(Malformed("reserved bytes of a note"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OFFERED: Offered = Offered {
        attempt: AttemptId(0x1122_3344_5566_7788),
        peer: HostKey([0xab; 32]),
        generation: Generation(9),
        register: RegisterId::of(0x0102_0304_0506_0708),
    };

    #[test]
    fn notes_have_the_bytes_of_the_table() {
        let check = |note: Note, head: &[u8], rest: &[u8]| {
            let bytes = note.encode();
            assert_eq!((&bytes[..head.len()], &bytes[32..]), (head, rest), "{note:?}");
            assert_eq!(Note::decode(bytes), Ok(note));
        };
        check(
            Note::Owned(Owned::Alone(Generation(7))),
            b"PMVN\x01\x01\0\0\0\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0",
            &[0; 32],
        );
        let notes = [
            (Note::Given(OFFERED, Decision::Grant), b"\x02\0"),
            (Note::Given(OFFERED, Decision::Arbiter), b"\x02\x01"),
            (Note::Given(OFFERED, Decision::TakingBack), b"\x02\x02"),
            (Note::Incoming(OFFERED), b"\x03\0"),
            (Note::Accepted(OFFERED, DecidedBy::Grant), b"\x04\0"),
            (Note::Accepted(OFFERED, DecidedBy::Arbiter), b"\x04\x01"),
            (Note::Refused(OFFERED), b"\x05\0"),
            (Note::Owned(Owned::Came(OFFERED)), b"\x01\x01"),
            (Note::Owned(Owned::Offered(OFFERED)), b"\x01\x02"),
            (Note::Owned(Owned::Back(OFFERED)), b"\x01\x03"),
        ];
        for (note, kind) in notes {
            let rest = b"\0\x88\x77\x66\x55\x44\x33\x22\x11\x09\0\0\0\0\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01";
            let head = [b"PMVN\x01", &kind[..], rest].concat();
            check(note, &head, &[0xab; 32]);
        }
        let alone = Offered { register: None, ..OFFERED };
        let rest = b"\0\x88\x77\x66\x55\x44\x33\x22\x11\x09\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        check(Note::Accepted(alone, DecidedBy::Grant), &[b"PMVN\x01\x04\0", &rest[..]].concat(), &[0xab; 32]);
    }

    #[test]
    fn a_vm_is_owned_around_the_generation_of_its_attempt() {
        let check = |owned: Owned, generation| assert_eq!(owned.generation(), Generation(generation), "{owned:?}");
        check(Owned::Alone(Generation(4)), 4);
        check(Owned::Offered(OFFERED), 8);
        check(Owned::Came(OFFERED), 9);
        check(Owned::Back(OFFERED), 10);
    }

    #[test]
    fn what_nobody_writes_is_refused() {
        let good = Note::Given(OFFERED, Decision::Arbiter).encode();
        for (at, value) in [(0, 0), (4, 2), (5, 0), (5, 6), (6, 3), (7, 1)] {
            let mut bytes = good;
            bytes[at] = value;
            assert!(Note::decode(bytes).is_err(), "{at} {value}");
        }
        let mut bytes = good;
        bytes[8..16].fill(0);
        assert!(Note::decode(bytes).is_err());
        for owned in [Owned::Came(OFFERED), Owned::Offered(OFFERED), Owned::Back(OFFERED)] {
            for generation in [0, u64::MAX] {
                let mut bytes = Note::Owned(owned).encode();
                bytes[16..24].copy_from_slice(&u64::to_le_bytes(generation));
                assert!(Note::decode(bytes).is_err(), "{owned:?} {generation}");
            }
        }
        // Nobody could be asked.
        let alone = Offered { register: None, ..OFFERED };
        for note in [
            Note::Given(alone, Decision::Arbiter),
            Note::Given(alone, Decision::TakingBack),
            Note::Accepted(alone, DecidedBy::Arbiter),
        ] {
            assert!(Note::decode(note.encode()).is_err(), "{note:?}");
        }
        let mut bytes = Note::Owned(Owned::Alone(Generation(7))).encode();
        bytes[24] = 1;
        assert!(Note::decode(bytes).is_err(), "an arbiter of no attempt");
        // A VM that no attempt has a word about has no peer.
        let mut bytes = Note::Owned(Owned::Came(OFFERED)).encode();
        bytes[6] = 0;
        assert!(Note::decode(bytes).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_one_note_or_none(at in 0..NOTE_SIZE, value in any::<u8>()) {
            let mut bytes = Note::Accepted(OFFERED, DecidedBy::Grant).encode();
            bytes[at] = value;
            if let Ok(note) = Note::decode(bytes) {
                prop_assert_eq!(note.encode(), bytes);
            }
        }
    }
}
