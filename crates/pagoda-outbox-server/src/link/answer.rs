//! What the process that serves answers: see [`super::message`].

use pagoda_outbox::{Attributes, Figures, Ino, Kind, ReaderId, Refusal, State};

use super::message::{ENTRIES_MAX, FOUND_WORDS, Kinds, Packet, Rest, put_name, put_words};

/// What the transmitter knows of a file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    pub ino: Ino,
    pub kind: Kind,
    pub state: State,
    pub size: u64,
    pub cursor: u64,
    pub freed: u64,
    /// Nobody writes it now.
    pub is_complete: bool,
    pub is_published: bool,
}

impl From<&Attributes> for Found {
    fn from(file: &Attributes) -> Found {
        let Attributes { ino, kind, state, size, cursor, freed, is_complete, is_published, .. } = *file;
        Found { ino, kind, state, size, cursor, freed, is_complete, is_published }
    }
}

impl Found {
    fn words(&self) -> [u64; FOUND_WORDS] {
        let kind = u64::from(self.kind == Kind::Directory);
        let state = match self.state {
            State::Open => 0,
            State::Sealed => 1,
            State::Broken => 2,
        };
        let flags = kind | u64::from(self.is_complete) << 1 | u64::from(self.is_published) << 2 | state << 3;
        [self.ino.0, self.size, self.cursor, self.freed, flags]
    }

    fn of([ino, size, cursor, freed, flags]: [u64; FOUND_WORDS]) -> Option<Found> {
        let state = match flags >> 3 {
            0 => State::Open,
            1 => State::Sealed,
            2 => State::Broken,
            _ => return None,
        };
        let kind = if flags & 1 == 0 { Kind::File } else { Kind::Directory };
        let (is_complete, is_published) = (flags & 2 != 0, flags & 4 != 0);
        Some(Found { ino: Ino(ino), kind, state, size, cursor, freed, is_complete, is_published })
    }
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: Box<[u8]>,
    pub found: Found,
}

/// What the process that serves answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Found(Found),
    Entries {
        entries: Vec<Entry>,
        is_last: bool,
    },
    Figures(Figures),
    Attached(ReaderId),
    Bytes {
        offset: u64,
        length: u64,
        /// There are no more now, and it is not the end.
        is_rest: bool,
    },
    Wait,
    End,
    Broken,
    /// Of all refusals the transmitter tells apart `TooManyReaders` and `Gone`.
    Refused(Refusal),
}

impl Answer {
    pub fn packet(&self) -> Packet {
        match self {
            Answer::Found(found) => Packet::new(Kinds::Found, &found.words()),
            Answer::Entries { entries, is_last } => {
                let mut tail = Vec::new();
                for Entry { name, found } in entries {
                    put_words(&mut tail, &found.words());
                    let has_length = put_name(&mut tail, name);
                    debug_assert!(has_length, "the space has no longer names");
                }
                Packet::new(Kinds::Entries, &[(*is_last).into()]).with(tail)
            }
            Answer::Figures(figures) => Packet::new(Kinds::Stands, &figure_words(figures)),
            Answer::Attached(reader) => Packet::new(Kinds::Attached, &[reader.0]),
            Answer::Bytes { offset, length, is_rest } => {
                Packet::new(Kinds::Bytes, &[*offset, *length, (*is_rest).into()])
            }
            Answer::Wait => Packet::new(Kinds::Wait, &[]),
            Answer::End => Packet::new(Kinds::End, &[]),
            Answer::Broken => Packet::new(Kinds::Broken, &[]),
            Answer::Refused(Refusal::Gone { oldest }) => Packet::new(Kinds::Refused, &[1, *oldest]),
            Answer::Refused(Refusal::TooManyReaders) => Packet::new(Kinds::Refused, &[2, 0]),
            Answer::Refused(_) => Packet::new(Kinds::Refused, &[0, 0]),
        }
    }

    /// `None`: no process of ours says that.
    pub fn of(packet: &Packet) -> Option<Answer> {
        Some(match packet {
            packet if packet.is(Kinds::Found) => Answer::Found(Found::of(packet.alone()?)?),
            packet if packet.is(Kinds::Entries) => {
                let [is_last] = packet.given()?;
                Answer::Entries { entries: entries(&packet.tail)?, is_last: bit(is_last)? }
            }
            packet if packet.is(Kinds::Stands) => Answer::Figures(figures_of(packet.alone()?)),
            packet if packet.is(Kinds::Attached) => {
                let [reader] = packet.alone()?;
                Answer::Attached(ReaderId(reader))
            }
            packet if packet.is(Kinds::Bytes) => {
                let [offset, length, is_rest] = packet.alone()?;
                Answer::Bytes { offset, length, is_rest: bit(is_rest)? }
            }
            packet if packet.is(Kinds::Wait) => packet.alone().map(|[]| Answer::Wait)?,
            packet if packet.is(Kinds::End) => packet.alone().map(|[]| Answer::End)?,
            packet if packet.is(Kinds::Broken) => packet.alone().map(|[]| Answer::Broken)?,
            packet if packet.is(Kinds::Refused) => Answer::Refused(match packet.alone()? {
                [0, 0] => Refusal::NotFound,
                [1, oldest] => Refusal::Gone { oldest },
                [2, 0] => Refusal::TooManyReaders,
                _ => return None,
            }),
            _ => return None,
        })
    }
}

fn bit(word: u64) -> Option<bool> {
    (word <= 1).then_some(word == 1)
}

fn entries(tail: &[u8]) -> Option<Vec<Entry>> {
    let (mut entries, mut rest) = (Vec::new(), Rest(tail));
    while !rest.0.is_empty() {
        let words = [rest.word()?, rest.word()?, rest.word()?, rest.word()?, rest.word()?];
        entries.push(Entry { found: Found::of(words)?, name: rest.name()?.into() });
    }
    (entries.len() <= ENTRIES_MAX).then_some(entries)
}

fn figure_words(figures: &Figures) -> [u64; 10] {
    [
        figures.budget,
        figures.used,
        figures.disposable,
        figures.nodes,
        figures.readers,
        figures.refused_changes,
        figures.expired,
        figures.expired_undelivered,
        figures.bytes_written,
        figures.bytes_acknowledged,
    ]
}

pub(super) fn figures_of(words: [u64; 10]) -> Figures {
    let [
        budget,
        used,
        disposable,
        nodes,
        readers,
        refused_changes,
        expired,
        expired_undelivered,
        bytes_written,
        bytes_acknowledged,
    ] = words;
    // A part of what is used: the difference is shown.
    let disposable = disposable.min(used);
    Figures {
        budget,
        used,
        disposable,
        nodes,
        readers,
        refused_changes,
        expired,
        expired_undelivered,
        bytes_written,
        bytes_acknowledged,
    }
}
