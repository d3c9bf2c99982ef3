//! Frames that no version writes: refused by name, and nothing panics.

use pagoda_core::chance::Chance;
use pagoda_core::units::Bytes;
use pagoda_move::units::{AttemptId, ConnectionNo, Generation, RoundNo};
use pagoda_move::wire::limits::{RUN_BYTES_MAX, STATE_CHUNK_MAX, STATE_MAX};
use pagoda_move::wire::{Codec, Control, ControlHeader, Data, DataHeader, Malformed, RunKind};
use proptest::prelude::*;

use crate::{decode_control, decode_data, run};

fn frame(message: &Control) -> Vec<u8> {
    let mut frame = Vec::new();
    message.encode(&mut frame);
    frame
}

#[test]
fn lengths_are_compared_before_there_is_room_for_them() {
    let control = |kind: u8, len: u32| {
        let [a, b, c, d] = len.to_le_bytes();
        ControlHeader::decode([kind, 0, 0, 0, a, b, c, d])
    };
    let too_long = Err(Malformed("a length that this message cannot have"));
    assert_eq!(control(10, u32::MAX), too_long);
    assert_eq!(control(10, 16 + STATE_CHUNK_MAX as u32 + 1), too_long);
    assert!(control(10, 16 + STATE_CHUNK_MAX as u32).is_ok());
    assert_eq!(control(8, 7), too_long);
    for kind in [0, 26, 255] {
        assert_eq!(control(kind, 8), Err(Malformed("unknown message")));
    }
    assert_eq!(ControlHeader::decode([8, 0, 1, 0, 8, 0, 0, 0]), Err(Malformed("reserved bytes of a header")));
    let data = |kind: u8, len: u32| {
        let [a, b, c, d] = len.to_le_bytes();
        DataHeader::decode([kind, 0, 0, 0, a, b, c, d])
    };
    assert_eq!(data(2, 8 + RUN_BYTES_MAX as u32 + 1), too_long.map(|_: ControlHeader| unreachable!()));
    assert!(data(2, 8 + RUN_BYTES_MAX as u32).is_ok() && data(3, 8 + RUN_BYTES_MAX as u32).is_err());
    assert_eq!(data(9, 8), Err(Malformed("unknown message")));
}

/// One field of a message is changed to what nobody writes.
#[test]
fn wrong_fields_are_named() {
    let check = |message: Control, change: &[(usize, u8)], expected: &'static str| {
        let mut bytes = frame(&message);
        for (at, value) in change {
            bytes[8 + at] = *value;
        }
        assert_eq!(decode_control(&bytes), Err(Malformed(expected)));
    };
    let attempt = AttemptId(1);
    check(Control::Whole { attempt }, &[(0, 0)], "attempt 0");
    let started = Control::Started { attempt, generation: Generation(1) };
    check(
        started,
        &[(8, 255), (9, 255), (10, 255), (11, 255), (12, 255), (13, 255), (14, 255), (15, 255)],
        "generation",
    );
    let demand = || Control::Demand { attempt, runs: vec![run(1, 255, 1)] };
    check(demand(), &[(8, 2)], "chunk");
    check(demand(), &[(9, 255)], "number of runs");
    check(demand(), &[(13, 1)], "a chunk beyond any VM");
    check(demand(), &[(15, 1)], "reserved byte of a run");
    check(demand(), &[(16, 0)], "pages of a run");
    check(demand(), &[(16, 2)], "pages of a run");
    check(demand(), &[(8, 0)], "bytes after the end of a message");
    let state = Control::State { attempt, offset: Bytes(STATE_MAX.0 - 1), bytes: vec![1] };
    check(state, &[(8, 0), (11, 16)], "size of the state");
    let room = pagoda_move::wire::offer::Room::default();
    let reserve = || Control::Reserve { attempt, room, specification: "{}".to_owned() };
    check(reserve(), &[(32, 3)], "specification");
    check(reserve(), &[(34, b'\n')], "specification");
    check(reserve(), &[(34, 0xff)], "specification");
    check(reserve(), &[(32, 1)], "bytes after the end of a message");
    let reason = || Control::Refuse { attempt, reasons: Vec::new() };
    check(reason(), &[(8, 1)], "kind of a reason");
    check(reason(), &[(8, 33)], "number of reasons");
}

#[test]
fn content_has_the_size_of_its_pages() {
    let mut bytes = Vec::new();
    Data::Run { pages: run(0, 0, 2), kind: RunKind::Content(Codec::Raw, &[1; 8192]) }.encode(&mut bytes);
    bytes[14] = 1;
    assert_eq!(decode_data(&bytes), Err(Malformed("content of another size than its pages")));
    for codec in [Codec::Lz4, Codec::Zstd] {
        let mut bytes = Vec::new();
        Data::Run { pages: run(0, 0, 2), kind: RunKind::Content(codec, &[1; 5000]) }.encode(&mut bytes);
        bytes[14] = 1;
        assert_eq!(decode_data(&bytes), Err(Malformed("content of another size than its pages")));
    }
    let mut bytes = Vec::new();
    Data::Open { attempt: AttemptId(1), connection: ConnectionNo(1), stream: 15, round: RoundNo(0) }.encode(&mut bytes);
    bytes[8 + 12] = 16;
    assert_eq!(decode_data(&bytes), Err(Malformed("stream")));
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_refused(kind in 0..30u8, payload in proptest::collection::vec(any::<u8>(), 0..200)) {
        let [a, b, c, d] = (payload.len() as u32).to_le_bytes();
        let bytes = [&[kind, 0, 0, 0, a, b, c, d][..], &payload].concat();
        if let Ok(message) = decode_control(&bytes) {
            prop_assert_eq!(frame(&message), bytes.clone());
        }
        let _ = decode_data(&bytes);
    }

    /// Frames of a real peer with some bytes changed, cut or doubled.
    #[test]
    fn damaged_frames_do_not_panic(seed in any::<u64>(), whole in 0..4usize) {
        let mut chance = Chance::new(seed);
        let attempt = AttemptId(3);
        let mut bytes = match whole {
            0 => frame(&Control::Demand { attempt, runs: vec![run(1, 2, 3); 5] }),
            1 => frame(&Control::Grant { attempt, generation: Generation(5), by: pagoda_move::wire::control::DecidedBy::Grant }),
            2 => frame(&Control::State { attempt, offset: Bytes(9), bytes: vec![7; 40] }),
            _ => {
                let mut bytes = Vec::new();
                Data::Run { pages: run(5, 1, 1), kind: RunKind::Content(Codec::Lz4, &[9; 50]) }.encode(&mut bytes);
                bytes
            }
        };
        for _ in 0..chance.below(4) {
            let at = chance.below(bytes.len() as u64) as usize;
            bytes[at] = chance.draw() as u8;
        }
        if chance.per_mille(300) {
            bytes.truncate(8 + chance.below(bytes.len() as u64 - 7) as usize);
        }
        let _ = decode_control(&bytes);
        let _ = decode_data(&bytes);
    }
}
