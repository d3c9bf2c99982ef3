//! A ring stops, and QEMU gives the memory of it and of its requests back to the guest: another kernel may begin in it a moment later.
//!
//! **The rule: after GET_VRING_BASE of a ring was answered, nothing is written into the guest's memory for that ring.** The library that
//! answers does not take requests out of a ring any more by then, but those that were taken go on. So the keeper holds the answer back,
//! while QEMU and the guest wait for it:
//!
//! ```text
//! the worker answers -> no request of the ring is in the table, or the worker has ended -> QEMU hears the answer
//! ```
//!
//! A request leaves the table after its answer is written, and a process that has ended writes nothing. What is in the table then stays
//! there: if the ring goes on where it was (`stop` and `cont`), another worker carries it out; if it begins anew, nobody does.
//!
//! What else takes a ring's memory away is refused, or ends the worker first: RESET_OWNER and RESET_DEVICE (QEMU says neither to this
//! device), and another place or size of a ring that runs (QEMU does that to a ring that it has stopped). These need nothing: SET_VRING_ENABLE 0,
//! after which the guest's memory stays the ring's until GET_VRING_BASE; SET_MEM_TABLE and REM_MEM_REG, because a request that has begun
//! keeps the mapping that it began with, which is of the same memory; the end of QEMU's process, after which the memory is nobody's.

use super::message::{Message, kind};
use super::session::{Session, ring_of};

/// The ring that has stopped when this is answered.
pub fn stopped(message: &Message) -> Option<usize> {
    (message.kind == kind::GET_VRING_BASE).then(|| ring_of(message)).flatten()
}

/// Whether the library would answer this without doing it.
pub fn is_unknown(message: &Message) -> bool {
    matches!(message.kind, kind::RESET_OWNER | kind::RESET_DEVICE)
}

/// Whether a ring that was not stopped would be somewhere else from then on.
pub fn changes_a_running_ring(message: &Message, session: &Session) -> bool {
    matches!(message.kind, kind::SET_VRING_NUM | kind::SET_VRING_ADDR | kind::SET_VRING_BASE)
        && ring_of(message).is_some_and(|ring| session.is_running(ring))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u32, ring: u8) -> Message {
        Message { payload: vec![ring, 0, 0, 0, 0, 0, 0, 0], ..Message::ask(kind) }
    }

    #[test]
    fn what_takes_a_rings_memory_away() {
        let mut session = Session::default();
        let moves = [kind::SET_VRING_NUM, kind::SET_VRING_ADDR, kind::SET_VRING_BASE];
        let is_change = |kind, ring, session: &Session| changes_a_running_ring(&message(kind, ring), session);
        assert!(!moves.iter().any(|kind| is_change(*kind, 1, &session)), "it has not begun");
        session.note(message(kind::SET_VRING_KICK, 1));
        assert!(moves.iter().all(|kind| is_change(*kind, 1, &session)));
        assert!(!moves.iter().any(|kind| is_change(*kind, 0, &session)), "the other ring has not begun");
        assert!(![kind::SET_VRING_CALL, kind::SET_VRING_ENABLE].iter().any(|kind| is_change(*kind, 1, &session)));
        let stops = message(kind::GET_VRING_BASE, 1);
        assert_eq!((stopped(&stops), stopped(&message(kind::GET_VRING_BASE, 2))), (Some(1), None));
        assert_eq!(stopped(&message(kind::SET_VRING_BASE, 1)), None);
        session.note(stops);
        assert!(!moves.iter().any(|kind| is_change(*kind, 1, &session)), "it was stopped");
        assert!(is_unknown(&message(kind::RESET_OWNER, 0)) && is_unknown(&message(kind::RESET_DEVICE, 0)));
        assert!(!moves.iter().any(|kind| is_unknown(&message(*kind, 0))));
    }
}
