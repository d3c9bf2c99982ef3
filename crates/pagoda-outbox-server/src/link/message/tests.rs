//! Packets there and back, and what is none.

use proptest::prelude::*;

use pagoda_outbox::{Ino, Kind, ReaderId, Refusal, Selection, State};

use super::*;
use crate::link::answer::{Answer, Entry, Found, figures_of};
use crate::link::request::{Path, Request};

fn again(packet: &Packet) -> Packet {
    Packet::of(&[&packet.frame()[..], packet.tail()].concat()).unwrap()
}

fn file() -> Found {
    Found {
        ino: Ino(7),
        kind: Kind::File,
        state: State::Sealed,
        size: 1 << 40,
        cursor: 5,
        freed: 4096,
        is_complete: true,
        is_published: false,
    }
}

fn path(names: &[&[u8]]) -> Option<Path> {
    Path::new(names.iter().copied())
}

fn requests() -> Vec<Request> {
    let reader = ReaderId(u64::MAX);
    vec![
        Request::Find(Path::default()),
        Request::Find(path(&[b"a", b"", b"b/c", &[b'n'; 255]]).unwrap()),
        Request::List { directory: Ino(1), after: Ino(0) },
        Request::Figures,
        Request::Attach { ino: Ino(3), selection: Selection { start: 1, end: None } },
        Request::Attach { ino: Ino(3), selection: Selection { start: 1, end: Some(9) } },
        Request::Next { reader, acknowledged: 8, max: 1 << 20 },
        Request::Acknowledge((0..READERS_MAX as u64).map(|id| (ReaderId(id), id * 3)).collect()),
        Request::Detach { reader, acknowledged: 4 },
    ]
}

fn answers() -> Vec<Answer> {
    let directory = Found { kind: Kind::Directory, state: State::Open, ..file() };
    let entry = |found| Entry { name: vec![b'n'; NAME_BYTES_MAX].into(), found };
    let entries = std::iter::repeat_n(entry(file()), ENTRIES_MAX - 1).chain([entry(directory)]).collect();
    vec![
        Answer::Found(file()),
        Answer::Found(Found { state: State::Broken, is_published: true, is_complete: false, ..directory }),
        Answer::Entries { entries, is_last: false },
        Answer::Entries { entries: Vec::new(), is_last: true },
        Answer::Figures(figures_of([10, 9, 8, 7, 6, 5, 4, 3, 2, 1])),
        Answer::Attached(ReaderId(3)),
        Answer::Bytes { offset: 4096, length: 1 << 20, is_rest: false },
        Answer::Bytes { offset: 0, length: 1, is_rest: true },
        Answer::Wait,
        Answer::End,
        Answer::Broken,
        Answer::Refused(Refusal::Gone { oldest: 4096 }),
        Answer::Refused(Refusal::TooManyReaders),
        Answer::Refused(Refusal::NotFound),
    ]
}

#[test]
fn packets_come_as_they_go() {
    for request in requests() {
        assert_eq!(Request::of(&again(&request.packet())), Some(request.clone()));
        assert_eq!(Answer::of(&request.packet()), None, "{request:?} is no answer");
    }
    for answer in answers() {
        assert_eq!(Answer::of(&again(&answer.packet())), Some(answer.clone()));
        assert_eq!(Request::of(&answer.packet()), None, "{answer:?} is no request");
    }
    let names: Vec<Vec<u8>> = path(&[b"a", b"", b"b/c"]).unwrap().names().map(<[u8]>::to_vec).collect();
    assert_eq!(names, [&b"a"[..], b"", b"b/c"]);
    assert_eq!(path(&[&[b'n'; 256]]), None);
    assert_eq!(path(&[&[b'n'; 255][..]; 33]), None);
    assert_eq!(Answer::of(&Answer::Refused(Refusal::Busy).packet()), Some(Answer::Refused(Refusal::NotFound)));
}

/// Each packet with a word too many, cut short, or with something behind it.
#[test]
fn what_is_no_packet() {
    let packets =
        requests().iter().map(Request::packet).chain(answers().iter().map(Answer::packet)).collect::<Vec<_>>();
    for packet in packets {
        let is_none = |packet: &Packet| Request::of(packet).is_none() && Answer::of(packet).is_none();
        let mut longer = packet.clone();
        longer.tail.push(9);
        assert!(is_none(&longer), "{packet:?} with a byte behind it");
        if !packet.is(Kinds::Stands) {
            let mut more = packet.clone();
            more.words[WORDS - 1] = 1;
            assert!(is_none(&more), "{packet:?} with a word more");
        }
        let mut other = packet.clone();
        other.words[0] += 0x1_0000_0000;
        assert!(is_none(&other));
        if !packet.tail.is_empty() {
            let mut shorter = packet.clone();
            shorter.tail.pop();
            assert!(is_none(&shorter), "{packet:?} without its last byte");
        }
    }
    assert_eq!(Packet::of(&[0; FRAME_BYTES - 1]), None);
    assert_eq!(Packet::of(&[0; PACKET_BYTES_MAX + 1]), None);
    let next = |max| Packet::new(Kinds::Next, &[1, 0, max]);
    assert!(Request::of(&next(1)).is_some() && Request::of(&next(0)).is_none());
    let too_many = Packet::new(Kinds::Acknowledge, &[]).with(vec![0; (READERS_MAX + 1) * 16]);
    assert_eq!(Request::of(&too_many), None);
}

proptest! {
    /// Whatever comes is either no packet or one that says the same when it is sent on.
    #[test]
    fn any_bytes(
        kind in prop_oneof![0_u64..20, 0x100_u64..0x10c, any::<u64>()],
        words in prop::collection::vec(prop_oneof![3 => Just(0_u64), 1 => any::<u64>(), 1 => 0_u64..20], WORDS - 1),
        tail in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let mut bytes = kind.to_le_bytes().to_vec();
        put_words(&mut bytes, &words);
        bytes.extend_from_slice(&tail);
        let packet = Packet::of(&bytes).unwrap();
        if let Some(request) = Request::of(&packet) {
            prop_assert_eq!(request.packet(), packet.clone());
        }
        if let Some(answer) = Answer::of(&packet) {
            prop_assert_eq!(Answer::of(&answer.packet()), Some(answer));
        }
    }
}
