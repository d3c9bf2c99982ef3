//! The inner layer: requests and replies. Each fragment repeats its message's header, so that each stands alone.

use std::ops::Range;

use super::copy::ORDER_SIZE;
use super::fields::{Malformed, u16_at, u32_at, u64_at};
use super::report::REPORT_SIZE;
pub use super::sizes::MESSAGE_HEADER_SIZE as HEADER_SIZE;
use super::sizes::{DATAGRAM_MAX, DATAGRAM_MIN_MAX, FRAGMENTS_MAX, OVERHEAD, PAYLOAD_MAX};
use crate::crypto::KEY_SIZE;
use crate::units::{Class, Generation, PageNo, SEALED_SIZE, SpaceId, Version};

/// The epoch in a request for a slab: a version.
pub const EPOCH_SIZE: usize = 8;
/// Versions in one reply to [`Op::Versions`].
pub const VERSIONS_MAX: usize = 512;
/// A slab in a reply to [`Op::Held`]: its number and its grant.
pub const HELD_SIZE: usize = 16;
/// Slabs in one such reply.
pub const HELD_MAX: usize = 256;
/// The place that [`Op::Held`] begins at, and where its answers end.
pub const HELD_END: u64 = 0;

const REPLY: u8 = 0x80;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Is anybody there, and does a datagram of this size get through? Answered in the same size.
    Probe = 1,
    /// Send the content of a page.
    Read = 2,
    /// Here is a page.
    Write = 3,
    /// The page is zero from this version on.
    Trim = 4,
    /// The versions of [`VERSIONS_MAX`] pages and the grant of their slab.
    Versions = 5,
    /// From now on only this generation.
    Fence = 6,
    /// Lend a slab, empty. The version field numbers the grant; the payload is the epoch: what is written in lesser
    /// versions is of an earlier life of the slab.
    Grant = 7,
    /// The slab is not needed any more, if it still has this grant.
    Release = 8,
    /// Keep this many slabs (version field) for the space.
    Reserve = 9,
    /// How is the server? Answered by a [`Report`](super::report::Report).
    Report = 10,
    /// Have everything moved elsewhere, and end then ([`DRAIN`] in the version field); or do not ([`DRAIN_OFF`]).
    Drain = 11,
    /// The server whose public key is the payload may fill this slab, which has this grant.
    Admit = 12,
    /// Copy this slab, which has this grant here, to the server of the payload; and how far is that?
    Copy = 13,
    /// Which slabs does the space have here? Of the server's slots from that of the version field on; the reply's says
    /// from which one to ask for the rest, or [`HELD_END`].
    Held = 14,
    /// A page, of whomever's time, as long as its slab still has the grant of the version field.
    ReadGranted = 15,
}

/// What [`Op::Drain`] has in its version field.
pub const DRAIN: u64 = 1;
pub const DRAIN_OFF: u64 = 0;

impl Op {
    pub const ALL: [Op; 15] = [
        Op::Probe,
        Op::Read,
        Op::Write,
        Op::Trim,
        Op::Versions,
        Op::Fence,
        Op::Grant,
        Op::Release,
        Op::Reserve,
        Op::Report,
        Op::Drain,
        Op::Admit,
        Op::Copy,
        Op::Held,
        Op::ReadGranted,
    ];

    /// Whether it changes a page.
    pub fn is_change(self) -> bool {
        matches!(self, Op::Write | Op::Trim)
    }

    /// Whether the reply has more than a header, where the request has none but that.
    pub fn is_answered_at_length(self) -> bool {
        matches!(self, Op::Read | Op::ReadGranted | Op::Versions | Op::Held)
    }
}

/// How a request went, as its reply says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Ok = 0,
    /// Too much at once; ask again.
    Busy = 1,
    /// The server does not hold this slab: never zeros instead.
    UnknownSlab = 2,
    /// The space has a newer owner.
    StaleGeneration = 3,
    /// The server does not know this owner yet: fence first.
    NotFenced = 4,
    /// No slab is free, or the server gives none away now.
    Full = 5,
    /// The space has as many slabs here as it may have.
    OverQuota = 6,
    /// A request that makes no sense.
    BadRequest = 7,
    /// It is not for this client to ask for that.
    Denied = 8,
}

impl Status {
    pub const ALL: [Status; 9] = [
        Status::Ok,
        Status::Busy,
        Status::UnknownSlab,
        Status::StaleGeneration,
        Status::NotFenced,
        Status::Full,
        Status::OverQuota,
        Status::BadRequest,
        Status::Denied,
    ];
}

/// How short of memory a server is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    #[default]
    None = 0,
    /// Gives no slabs away.
    Yellow = 1,
    /// Wants its slabs moved elsewhere.
    Orange = 2,
    /// Drops slabs that have another copy in sync.
    Red = 3,
}

impl Pressure {
    pub const ALL: [Pressure; 4] = [Pressure::None, Pressure::Yellow, Pressure::Orange, Pressure::Red];
}

/// How a server is, in every reply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub free_slabs: u32,
    /// Writes that this client may have under way here.
    pub write_credits: u16,
    /// Replies that wait to be sent.
    pub queued: u16,
}

/// What only requests have, or only replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// `cut`: the largest datagram that the reply may use.
    Request {
        cut: u16,
        generation: Generation,
    },
    Reply {
        status: Status,
        pressure: Pressure,
        load: Load,
    },
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub op: Op,
    pub class: Class,
    pub direction: Direction,
    /// Chosen by the client, unique in its life; the reply has the same.
    pub id: u64,
    pub space: SpaceId,
    pub page: PageNo,
    pub version: Version,
    /// Bytes of payload in the whole message.
    pub payload: u16,
}

/// Which part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    pub index: u8,
    pub count: u8,
}

impl Fragment {
    pub const WHOLE: Fragment = Fragment { index: 0, count: 1 };

    /// How many datagrams of at most `cut` bytes a payload takes.
    pub fn count_for(payload: usize, cut: usize) -> u8 {
        payload.div_ceil(cut.max(DATAGRAM_MIN_MAX) - OVERHEAD).max(1) as u8
    }

    /// The length of each fragment's part of the payload. All are equally long, so that the fragments of many messages can go
    /// to the kernel in one call; the last is filled up with zeros.
    pub fn length(self, payload: usize) -> usize {
        payload.div_ceil(usize::from(self.count))
    }

    /// Which bytes of the payload this fragment has.
    pub fn range(self, payload: usize) -> Range<usize> {
        let start = usize::from(self.index) * self.length(payload);
        start..payload.min(start + self.length(payload))
    }
}

impl Message {
    pub fn encode(&self, fragment: Fragment) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let (reply, word, last) = match self.direction {
            Direction::Request { cut, generation } => (0, cut, u64::from(generation.0)),
            Direction::Reply { status, pressure, load } => (
                REPLY,
                u16::from_le_bytes([status as u8, pressure as u8]),
                u64::from(load.free_slabs) | u64::from(load.write_credits) << 32 | u64::from(load.queued) << 48,
            ),
        };
        bytes[..4].copy_from_slice(&[self.op as u8 | reply, self.class as u8, fragment.index, fragment.count]);
        bytes[4..6].copy_from_slice(&self.payload.to_le_bytes());
        bytes[6..8].copy_from_slice(&word.to_le_bytes());
        let words = [self.id, self.space.0, self.page.0, last, self.version.bits()];
        for (field, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The header of a fragment, and its part of the payload.
    ///
    /// # Errors
    /// A value that does not exist, a length beyond its cap, a fragment that does not fit its message.
    pub fn decode(bytes: &[u8]) -> Result<(Message, Fragment, &[u8]), Malformed> {
        if bytes.len() < HEADER_SIZE {
            return Err(Malformed("shorter than a message header"));
        }
        let (header, part) = bytes.split_at(HEADER_SIZE);
        let op = Op::ALL.into_iter().find(|op| *op as u8 == header[0] & !REPLY).ok_or(Malformed("unknown request"))?;
        let class = *Class::ALL.get(usize::from(header[1])).ok_or(Malformed("unknown class"))?;
        let direction = if header[0] & REPLY == 0 {
            let cut = u16_at(header, 6);
            if !(DATAGRAM_MIN_MAX..=DATAGRAM_MAX).contains(&usize::from(cut)) {
                return Err(Malformed("datagram size for the reply out of range"));
            }
            let generation = u32::try_from(u64_at(header, 32)).map_err(|_| Malformed("generation out of range"))?;
            if Generation(generation) > Generation::MAX {
                return Err(Malformed("generation out of range"));
            }
            Direction::Request { cut, generation: Generation(generation) }
        } else {
            let status = *Status::ALL.get(usize::from(header[6])).ok_or(Malformed("unknown status"))?;
            let pressure = *Pressure::ALL.get(usize::from(header[7])).ok_or(Malformed("unknown pressure"))?;
            let load =
                Load { free_slabs: u32_at(header, 32), write_credits: u16_at(header, 36), queued: u16_at(header, 38) };
            Direction::Reply { status, pressure, load }
        };
        let message = Message {
            op,
            class,
            direction,
            id: u64_at(header, 8),
            space: SpaceId(u64_at(header, 16)),
            page: PageNo(u64_at(header, 24)),
            version: Version::from_bits(u64_at(header, 40)),
            payload: u16_at(header, 4),
        };
        let fragment = Fragment { index: header[2], count: header[3] };
        let part = message.check(fragment, part)?;
        Ok((message, fragment, part))
    }

    /// The fragment's part of the payload, without what it was filled up with.
    fn check<'a>(&self, fragment: Fragment, part: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let payload = usize::from(self.payload);
        let request = matches!(self.direction, Direction::Request { .. });
        let sizes = match (self.op, request) {
            (Op::Probe, _) => 0..=PAYLOAD_MAX,
            (Op::Write, true) => SEALED_SIZE..=SEALED_SIZE,
            (Op::Grant, true) => EPOCH_SIZE..=EPOCH_SIZE,
            (Op::Read | Op::ReadGranted | Op::Versions | Op::Held, false) => 0..=PAYLOAD_MAX,
            (Op::Report, false) => REPORT_SIZE..=REPORT_SIZE,
            (Op::Admit, true) => KEY_SIZE..=KEY_SIZE,
            (Op::Copy, true) => ORDER_SIZE..=ORDER_SIZE,
            _ => 0..=0,
        };
        if !sizes.contains(&payload) {
            return Err(Malformed("a payload that this message does not have"));
        }
        if fragment.index >= fragment.count || usize::from(fragment.count) > FRAGMENTS_MAX {
            return Err(Malformed("no such fragment"));
        }
        let range = fragment.range(payload);
        let fits = part.len() == fragment.length(payload) && (range.start < range.end || fragment.count == 1);
        let (part, filling) = part.split_at_checked(range.len()).ok_or(Malformed("a fragment too short"))?;
        if !fits || filling.iter().any(|byte| *byte != 0) {
            return Err(Malformed("a fragment that does not fit its message"));
        }
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub fn request(op: Op, payload: usize) -> Message {
        Message {
            op,
            class: Class::Eviction,
            direction: Direction::Request { cut: 1472, generation: Generation(3) },
            id: 0x0102_0304_0506_0708,
            space: SpaceId(0x11),
            page: PageNo(0x22),
            version: Version::from_bits(0x33),
            payload: payload as u16,
        }
    }

    /// Changing this is changing the protocol.
    #[test]
    fn golden() {
        let request = request(Op::Write, SEALED_SIZE).encode(Fragment { index: 1, count: 3 });
        assert_eq!(request[..16], [3, 2, 1, 3, 0x10, 0x10, 0xc0, 0x05, 8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(request[16..].chunks(8).map(|word| word[0]).collect::<Vec<_>>(), [0x11, 0x22, 3, 0x33]);
        let load = Load { free_slabs: 5, write_credits: 6, queued: 7 };
        let direction = Direction::Reply { status: Status::Full, pressure: Pressure::Orange, load };
        let reply = Message { op: Op::Grant, payload: 0, direction, ..self::request(Op::Grant, 0) };
        let bytes = reply.encode(Fragment::WHOLE);
        assert_eq!(bytes[..8], [0x87, 2, 0, 1, 0, 0, 5, 2]);
        assert_eq!(bytes[32..40], [5, 0, 0, 0, 6, 0, 7, 0]);
        assert_eq!(Message::decode(&bytes), Ok((reply, Fragment::WHOLE, &[][..])));
        let epoch = Version::from_bits(0x0807_0605_0403_0201);
        let mut asked = self::request(Op::Grant, EPOCH_SIZE).encode(Fragment::WHOLE).to_vec();
        asked.extend(epoch.bits().to_le_bytes());
        assert_eq!((&asked[..6], &asked[HEADER_SIZE..]), (&[7, 2, 0, 1, 8, 0][..], &[1, 2, 3, 4, 5, 6, 7, 8][..]));
        let (message, _, part) = Message::decode(&asked).unwrap();
        assert_eq!((usize::from(message.payload), part), (EPOCH_SIZE, &epoch.bits().to_le_bytes()[..]));
        assert_eq!(Op::ALL.map(|op| op as u8), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(Status::ALL.map(|status| status as u8), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    }

    #[test]
    fn every_cut_of_a_page_comes_back() {
        for cut in crate::wire::DATAGRAM_SIZES {
            let message = request(Op::Write, SEALED_SIZE);
            let count = Fragment::count_for(SEALED_SIZE, cut);
            let page: Vec<u8> = (0..SEALED_SIZE).map(|i| (i % 251) as u8).collect();
            let mut out = vec![0; SEALED_SIZE];
            for index in 0..count {
                let fragment = Fragment { index, count };
                let mut bytes = message.encode(fragment).to_vec();
                bytes.extend_from_slice(&page[fragment.range(SEALED_SIZE)]);
                bytes.resize(HEADER_SIZE + fragment.length(SEALED_SIZE), 0);
                assert!(bytes.len() + OVERHEAD - HEADER_SIZE <= cut);
                let (got, fragment, part) = Message::decode(&bytes).unwrap();
                assert_eq!(got, message);
                out[fragment.range(SEALED_SIZE)].copy_from_slice(part);
            }
            assert!(out == page, "cut to {cut}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert!(Message::decode(&request(Op::Grant, 0).encode(Fragment::WHOLE)).is_err(), "a grant has an epoch");
        let good = request(Op::Read, 0).encode(Fragment::WHOLE);
        assert!(Message::decode(&good).is_ok());
        for (at, value) in [(0, 0), (0, 77), (1, 4), (2, 1), (3, 0), (3, 9), (4, 1), (7, 0xff), (36, 1), (34, 0xff)] {
            let mut bad = good;
            bad[at] = value;
            assert!(Message::decode(&bad).is_err(), "byte {at} = {value}");
        }
        assert!(Message::decode(&good[..HEADER_SIZE - 1]).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(
            head in proptest::collection::vec(any::<u8>(), HEADER_SIZE),
            kind in 1u8..14, class in 0u8..4, count in 1u8..5, length in 0usize..1500,
        ) {
            let mut bytes = head;
            (bytes[0], bytes[1], bytes[3]) = (kind | bytes[0] & REPLY, class, count);
            bytes.resize(HEADER_SIZE + length, 0);
            if let Ok((message, fragment, part)) = Message::decode(&bytes) {
                // What was accepted has a place in its payload.
                let range = fragment.range(usize::from(message.payload));
                prop_assert!(range.end <= usize::from(message.payload));
                prop_assert_eq!(range.len(), part.len());
                prop_assert_eq!(&message.encode(fragment)[..6], &bytes[..6]);
            }
        }
    }
}
