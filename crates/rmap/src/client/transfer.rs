//! A new copy that servers make among themselves, as the owner of the slab has it made.
//!
//! The order, each step after the answer to the one before: the target already gets every write (`repair.rs`); it is told to
//! let the source in; the source copies, and is asked from time to time how far it is; the target is told to let nobody in any
//! more; it is asked what it has. Only what it then lists counts: the source's word is a hint for when to look. What is still
//! missing goes through the client, so nothing depends on servers that cannot reach each other, or that lie.

use crate::client::index::PeerIndex;
use crate::units::Time;
use crate::wire::copy::ORDER_SIZE;

/// How often a source is asked how far it is: a slab of 64 MiB takes a tenth of a second at the very best.
pub const PROGRESS_EVERY: std::time::Duration = std::time::Duration::from_millis(5);
/// A slab with less in it than this part of its pages goes through the client: the questions would be more than the pages.
pub const WORTH_PART: usize = 16;

/// How far the servers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// The target gets every write, and can be filled.
    Wanted,
    /// The target is being told to let the source in.
    Admitting { source: PeerIndex },
    /// The source copies. It is being asked how far it is, or will be.
    Running { source: PeerIndex, ask_at: Option<Time> },
    /// The target is being told to let nobody in any more.
    Ending { source: PeerIndex },
    /// The target is being asked what it has.
    Listing { source: PeerIndex },
}

/// The payload of such a request.
pub struct Instruction {
    bytes: [u8; ORDER_SIZE],
    length: usize,
}

impl Instruction {
    /// # Panics
    /// Of more than [`ORDER_SIZE`] bytes.
    pub fn new(payload: &[u8]) -> Instruction {
        let mut instruction = Instruction { bytes: [0; ORDER_SIZE], length: payload.len() };
        instruction.bytes[..payload.len()].copy_from_slice(payload);
        instruction
    }

    pub fn payload(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
