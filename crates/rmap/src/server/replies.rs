//! Replies that wait to be sent.

use std::collections::VecDeque;

use super::sessions::SessionIndex;
use crate::units::Class;
use crate::wire::PAYLOAD_MAX;
use crate::wire::message::{Message, Status};

/// Replies that wait to be sent. One more is not taken in: its client asks again.
pub const REPLIES_MAX: usize = 4096;

/// From here on, what nobody waits for is told to come again, unexecuted: the rest of the room is for faults and writes.
pub const REPLIES_CROWDED: usize = REPLIES_MAX / 2;

#[derive(Clone, Copy, Debug)]
pub struct Pending {
    pub session: u32,
    pub slot: SessionIndex,
    pub request: Message,
    pub status: Status,
}

#[derive(Debug)]
pub struct Replies {
    /// One queue a class.
    pub queues: [VecDeque<Pending>; Class::ALL.len()],
    /// Versions on their way into a reply.
    pub scratch: Vec<u8>,
}

impl Replies {
    pub fn new() -> Replies {
        Replies {
            queues: Class::ALL.map(|_| VecDeque::with_capacity(REPLIES_MAX)),
            scratch: Vec::with_capacity(PAYLOAD_MAX),
        }
    }

    pub fn len(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }

    pub fn pop(&mut self) -> Option<Pending> {
        self.queues.iter_mut().find_map(VecDeque::pop_front)
    }
}
