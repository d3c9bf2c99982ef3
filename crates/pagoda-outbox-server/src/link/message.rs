//! Packets of the [link](super) as bytes. Numbers are 64 bits, little-endian.
//!
//! | packet | words behind its kind | tail |
//! |---|---|---|
//! | `Find` | | names: a byte with the length of each, and the name |
//! | `List` | directory, last file that is known | |
//! | `Figures` | | |
//! | `Attach` | file, start, end (all ones: none) | |
//! | `Next` | reader, acknowledged, most bytes | |
//! | `Acknowledge` | | pairs: reader, acknowledged |
//! | `Detach` | reader, acknowledged | |
//! | `Found` | file: number, size, cursor, freed, flags | |
//! | `Entries` | whether there are no more | of each the five words of `Found`, a byte with the length of its name, the name |
//! | `Stands` | figures | |
//! | `Attached` | reader | |
//! | `Bytes` | offset, length, whether there are no more now | |
//! | `Wait`, `End`, `Broken` | | |
//! | `Refused` | why, where what is left begins | |
//!
//! Both sides are hostile until checked: what has another length, another number or a word too many is no packet.

#[cfg(test)]
mod tests;

use pagoda_outbox::limits::{NAME_BYTES_MAX, READERS_MAX};

/// The kind, and ten words.
pub(super) const WORDS: usize = 11;
pub const FRAME_BYTES: usize = WORDS * 8;
/// Longer than any path that a file can have.
pub const TAIL_BYTES_MAX: usize = 32 << 10;
pub const PACKET_BYTES_MAX: usize = FRAME_BYTES + TAIL_BYTES_MAX;
/// Bytes of a path's names.
pub const PATH_BYTES_MAX: usize = 8 << 10;
pub(super) const FOUND_WORDS: usize = 5;
const ENTRY_BYTES_MAX: usize = FOUND_WORDS * 8 + 1 + NAME_BYTES_MAX;
/// Entries of a directory in one packet.
pub const ENTRIES_MAX: usize = TAIL_BYTES_MAX / ENTRY_BYTES_MAX;

const _: () = assert!(READERS_MAX * 16 <= TAIL_BYTES_MAX && PATH_BYTES_MAX <= TAIL_BYTES_MAX);

/// A packet as it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    pub(super) words: [u64; WORDS],
    pub(super) tail: Vec<u8>,
}

impl Packet {
    pub(super) fn new(kind: Kinds, given: &[u64]) -> Packet {
        let mut words = [0; WORDS];
        words[0] = kind as u64;
        words[1..=given.len()].copy_from_slice(given);
        Packet { words, tail: Vec::new() }
    }

    pub(super) fn with(mut self, tail: Vec<u8>) -> Packet {
        debug_assert!(tail.len() <= TAIL_BYTES_MAX);
        self.tail = tail;
        self
    }

    pub fn frame(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        for (word, to) in self.words.iter().zip(bytes.chunks_exact_mut(8)) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn tail(&self) -> &[u8] {
        &self.tail
    }

    /// `None`: it is too short or too long.
    pub fn of(bytes: &[u8]) -> Option<Packet> {
        let (frame, tail) = bytes.split_at_checked(FRAME_BYTES)?;
        let mut words = [0; WORDS];
        let mut rest = Rest(frame);
        for word in &mut words {
            *word = rest.word()?;
        }
        (tail.len() <= TAIL_BYTES_MAX).then(|| Packet { words, tail: tail.to_vec() })
    }

    pub(super) fn is(&self, kind: Kinds) -> bool {
        self.words[0] == kind as u64
    }

    /// So many words behind the kind, if no other one is set and there is no tail.
    pub(super) fn alone<const N: usize>(&self) -> Option<[u64; N]> {
        if self.tail.is_empty() { self.given() } else { None }
    }

    /// The same, whatever the tail is.
    pub(super) fn given<const N: usize>(&self) -> Option<[u64; N]> {
        let (given, rest) = self.words[1..].split_at_checked(N)?;
        if rest.iter().all(|word| *word == 0) { given.try_into().ok() } else { None }
    }
}

/// The first word of a packet, which says what the others mean.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kinds {
    Find = 1,
    List,
    Figures,
    Attach,
    Next,
    Acknowledge,
    Detach,
    Found = 0x101,
    Entries,
    Stands,
    Attached,
    Bytes,
    Wait,
    End,
    Broken,
    Refused,
}

/// Bytes that are still to be read.
pub(super) struct Rest<'a>(pub(super) &'a [u8]);

impl<'a> Rest<'a> {
    fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    pub(super) fn word(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes(8)?.try_into().ok()?))
    }

    /// A byte with a length, and so many bytes.
    pub(super) fn name(&mut self) -> Option<&'a [u8]> {
        let length = self.bytes(1)?[0];
        self.bytes(length.into())
    }
}

pub(super) fn put_words(tail: &mut Vec<u8>, words: &[u64]) {
    words.iter().for_each(|word| tail.extend_from_slice(&word.to_le_bytes()));
}

/// `false`: no file has such a name.
pub(super) fn put_name(tail: &mut Vec<u8>, name: &[u8]) -> bool {
    let Ok(length) = u8::try_from(name.len()) else { return false };
    tail.push(length);
    tail.extend_from_slice(name);
    true
}
