//! What the transmitter says: see [`super::message`].

use pagoda_outbox::limits::READERS_MAX;
use pagoda_outbox::{Ino, ReaderId, Selection};

use super::message::{Kinds, PATH_BYTES_MAX, Packet, Rest, put_name, put_words};

/// In the place of a selection's end: it has none.
const NO_END: u64 = u64::MAX;

/// Names from the root on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Path(Vec<u8>);

impl Path {
    /// `None`: no file has such a path.
    pub fn new<'a>(names: impl Iterator<Item = &'a [u8]>) -> Option<Path> {
        let mut bytes = Vec::new();
        for name in names {
            if !put_name(&mut bytes, name) || bytes.len() > PATH_BYTES_MAX {
                return None;
            }
        }
        Some(Path(bytes))
    }

    fn of(bytes: &[u8]) -> Option<Path> {
        let mut rest = Rest(bytes);
        while !rest.0.is_empty() {
            rest.name()?;
        }
        (bytes.len() <= PATH_BYTES_MAX).then(|| Path(bytes.to_vec()))
    }

    pub fn names(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = Rest(&self.0);
        std::iter::from_fn(move || rest.name())
    }
}

/// What the transmitter says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    Find(Path),
    /// Entries of a directory behind this one.
    List {
        directory: Ino,
        after: Ino,
    },
    Figures,
    Attach {
        ino: Ino,
        selection: Selection,
    },
    /// What the reader sends next.
    Next {
        reader: ReaderId,
        acknowledged: u64,
        max: u64,
    },
    Acknowledge(Vec<(ReaderId, u64)>),
    Detach {
        reader: ReaderId,
        acknowledged: u64,
    },
}

impl Request {
    pub fn packet(&self) -> Packet {
        match self {
            Request::Find(path) => Packet::new(Kinds::Find, &[]).with(path.0.clone()),
            Request::List { directory, after } => Packet::new(Kinds::List, &[directory.0, after.0]),
            Request::Figures => Packet::new(Kinds::Figures, &[]),
            Request::Attach { ino, selection: Selection { start, end } } => {
                Packet::new(Kinds::Attach, &[ino.0, *start, end.unwrap_or(NO_END)])
            }
            Request::Next { reader, acknowledged, max } => Packet::new(Kinds::Next, &[reader.0, *acknowledged, *max]),
            Request::Acknowledge(positions) => {
                let mut tail = Vec::with_capacity(positions.len() * 16);
                positions.iter().for_each(|(reader, position)| put_words(&mut tail, &[reader.0, *position]));
                Packet::new(Kinds::Acknowledge, &[]).with(tail)
            }
            Request::Detach { reader, acknowledged } => Packet::new(Kinds::Detach, &[reader.0, *acknowledged]),
        }
    }

    /// `None`: no transmitter of ours says that.
    pub fn of(packet: &Packet) -> Option<Request> {
        Some(match packet {
            packet if packet.is(Kinds::Find) => {
                let [] = packet.given()?;
                Request::Find(Path::of(&packet.tail)?)
            }
            packet if packet.is(Kinds::List) => {
                let [directory, after] = packet.alone()?;
                Request::List { directory: Ino(directory), after: Ino(after) }
            }
            packet if packet.is(Kinds::Figures) => {
                let [] = packet.alone()?;
                Request::Figures
            }
            packet if packet.is(Kinds::Attach) => {
                let [ino, start, end] = packet.alone()?;
                Request::Attach { ino: Ino(ino), selection: Selection { start, end: (end != NO_END).then_some(end) } }
            }
            packet if packet.is(Kinds::Next) => {
                let [reader, acknowledged, max] = packet.alone()?;
                (max > 0).then_some(Request::Next { reader: ReaderId(reader), acknowledged, max })?
            }
            packet if packet.is(Kinds::Acknowledge) => {
                let [] = packet.given()?;
                let (mut positions, mut rest) = (Vec::new(), Rest(&packet.tail));
                while !rest.0.is_empty() {
                    positions.push((ReaderId(rest.word()?), rest.word()?));
                }
                (positions.len() <= READERS_MAX).then_some(Request::Acknowledge(positions))?
            }
            packet if packet.is(Kinds::Detach) => {
                let [reader, acknowledged] = packet.alone()?;
                Request::Detach { reader: ReaderId(reader), acknowledged }
            }
            _ => return None,
        })
    }
}
