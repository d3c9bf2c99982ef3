//! What is written is read again, whatever it is, and no frame is longer than its header may say.

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, ChunkIdx, PageIdx};
use pagoda_move::map::PageRun;
use pagoda_move::units::{AttemptId, ConnectionNo, Generation, RegisterId, RoundNo};
use pagoda_move::wire::control::{DecidedBy, Holding, MapPart, Verdict};
use pagoda_move::wire::limits::{
    FEATURES_MAX, MAP_CHUNKS_MAX, REASON_TEXT_MAX, REASONS_MAX, REGIONS_MAX, RUNS_MAX, SPECIFICATION_MAX,
    STATE_CHUNK_MAX, TEXT_MAX,
};
use pagoda_move::wire::offer::{Capabilities, Hello, Reason, ReasonKind, RegionFacts, Room, Welcome};
use pagoda_move::wire::{Codec, Control, Data, RunKind};
use proptest::prelude::*;

use crate::{decode_control, decode_data, run};

fn any_run() -> impl Strategy<Value = PageRun> {
    (0..1u32 << 20, 0..=255u8, 0..256u16)
        .prop_map(|(chunk, start, len)| run(chunk, start, 1 + len.min(255 - u16::from(start))))
}

fn any_hello(attempt: AttemptId, number: u64, text: &str) -> Hello {
    let region =
        |index: u64| RegionFacts { id: format!("{text}{index}"), size: Bytes((number % 1000 + 1 + index) << 12) };
    Hello {
        attempt,
        connection: ConnectionNo(number as u32),
        generation: Generation(number >> 1),
        protocol_min: 0,
        protocol_max: 1 + (number % 7) as u16,
        capabilities: Capabilities(number),
        required: Capabilities(!number),
        unix_s: number,
        register: RegisterId::of(number >> 3),
        software: text.to_owned(),
        vm: text.to_uppercase(),
        qemu: text.repeat(2),
        machine: String::new(),
        cpu_features: text.repeat(40),
        regions: (0..=number % REGIONS_MAX as u64).map(region).collect(),
    }
}

fn any_control() -> impl Strategy<Value = Control> {
    let parts = (1..u64::MAX, 0..u64::MAX / 2, "[a-z0-9é.,-]{0,30}", proptest::collection::vec(any_run(), 0..8));
    (0..25, parts, any::<[u64; 4]>()).prop_map(|(kind, (attempt, number, text, runs), words)| {
        let attempt = AttemptId(attempt);
        let generation = Generation(number);
        let room = |shift: u32| Room { dram: Bytes(number >> shift), swap: Bytes(number), pool: Bytes(words[0]) };
        match kind {
            0 => Control::Hello(any_hello(attempt, number, &text)),
            1 => Control::Welcome(Welcome { attempt, protocol: 3, capabilities: Capabilities(number), software: text }),
            2 => {
                let kind = ReasonKind::ALL[number as usize % ReasonKind::ALL.len()];
                let reason = Reason { kind, what: text.clone(), remedy: text };
                Control::Refuse { attempt, reasons: vec![reason; number as usize % 4] }
            }
            3 => Control::Reserve { attempt, room: room(1), specification: text.repeat(50) },
            4 => Control::Reserved { attempt },
            5 => Control::NoRoom { attempt, needed: room(2), free: room(3) },
            6 => Control::Resume { attempt, connection: ConnectionNo(number as u32) },
            7 => Control::Forgotten { attempt },
            8 => Control::RoundKept { attempt, round: RoundNo(number as u32) },
            9 => Control::State { attempt, offset: Bytes(number % (1 << 27)), bytes: text.into_bytes().repeat(9) },
            10 => Control::StateEnd { attempt, total: Bytes(number % (1 << 28)), round: RoundNo(number as u32) },
            11 | 22 => {
                let pages = PageSet::from_words(words) | PageSet::single(0);
                let chunks = [3, 900_000].map(|chunk| (ChunkIdx(chunk), pages));
                let part = MapPart { chunks: chunks.to_vec(), last: number % 2 == 0 };
                if kind == 11 { Control::Missing { attempt, part } } else { Control::RemoteMap { attempt, part } }
            }
            12 => Control::Holds { attempt, holding: if number % 2 == 0 { Holding::Filling } else { Holding::Ready } },
            13 => {
                let by = if number % 2 == 0 { DecidedBy::Grant } else { DecidedBy::Arbiter };
                Control::Grant { attempt, generation, by }
            }
            14 => Control::Started { attempt, generation },
            15 => Control::Refusal { attempt, generation },
            16 => Control::Withdraw { attempt, generation },
            17 => Control::NoArbiter { attempt, generation },
            18 => {
                let verdict = if number % 2 == 0 { Verdict::Mine } else { Verdict::Yours };
                Control::Settled { attempt, generation, verdict }
            }
            19 => Control::Demand { attempt, runs },
            20 => Control::Kept { attempt, runs },
            23 => Control::Check { attempt, specification: text.repeat(50) },
            24 => Control::Possible { attempt },
            _ => Control::Whole { attempt },
        }
    })
}

proptest! {
    #[test]
    fn a_control_message_is_read_as_it_was_written(message in any_control()) {
        // State of no length is never sent.
        prop_assume!(!matches!(&message, Control::State { bytes, .. } if bytes.is_empty()));
        let mut frame = Vec::new();
        message.encode(&mut frame);
        prop_assert_eq!(decode_control(&frame), Ok(message));
    }

    #[test]
    fn a_run_is_read_as_it_was_written(pages in any_run(), what in 0..6, byte in any::<u8>(), first in 0..1u64 << 27) {
        let whole = pages.count().bytes().as_usize();
        let content = vec![byte; whole];
        let kind = match what {
            0 => RunKind::Content(Codec::Raw, &content),
            1 => RunKind::Content(Codec::Lz4, &content[..1 + usize::from(byte) * 16 % (whole - 1)]),
            2 => RunKind::Zero,
            3 => RunKind::Freed,
            4 => RunKind::Content(Codec::Zstd, &content[..1 + usize::from(byte) * 16 % (whole - 1)]),
            _ => RunKind::InImage { image: u128::from(byte) << 100, first: PageIdx(first) },
        };
        let mut frame = Vec::new();
        Data::Run { pages, kind }.encode(&mut frame);
        prop_assert_eq!(decode_data(&frame), Ok(Data::Run { pages, kind }));
    }
}

/// The largest of each message with a list or a text fits below its own cap.
#[test]
fn the_caps_leave_room_for_what_they_allow() {
    let check = |message: Control| {
        let mut frame = Vec::new();
        message.encode(&mut frame);
        assert_eq!(decode_control(&frame), Ok(message));
    };
    let attempt = AttemptId(1);
    let long = "x".repeat(TEXT_MAX);
    let mut hello = any_hello(attempt, 5, "");
    for text in [&mut hello.software, &mut hello.vm, &mut hello.qemu, &mut hello.machine] {
        text.clone_from(&long);
    }
    hello.cpu_features = "y".repeat(FEATURES_MAX);
    hello.regions = vec![RegionFacts { id: long, size: Bytes(4096) }; REGIONS_MAX];
    check(Control::Hello(hello));
    let text = "z".repeat(REASON_TEXT_MAX);
    let reason = Reason { kind: ReasonKind::Clock, what: text.clone(), remedy: text };
    check(Control::Refuse { attempt, reasons: vec![reason; REASONS_MAX] });
    let room = Room { dram: Bytes(u64::MAX), swap: Bytes(u64::MAX), pool: Bytes(u64::MAX) };
    check(Control::Reserve { attempt, room, specification: "s".repeat(SPECIFICATION_MAX) });
    check(Control::Check { attempt, specification: "s".repeat(SPECIFICATION_MAX) });
    check(Control::State { attempt, offset: Bytes(1), bytes: vec![1; STATE_CHUNK_MAX] });
    let chunks = (0..MAP_CHUNKS_MAX as u32).map(|chunk| (ChunkIdx(chunk), PageSet::FULL)).collect();
    let part = MapPart { chunks, last: false };
    check(Control::Missing { attempt, part: part.clone() });
    check(Control::RemoteMap { attempt, part });
    check(Control::Demand { attempt, runs: vec![run(1, 2, 3); RUNS_MAX] });
}

#[test]
fn texts_are_cut_and_stay_on_one_line() {
    let reason = Reason { kind: ReasonKind::Qemu, what: "é".repeat(300), remedy: "a\nb".to_owned() };
    let mut frame = Vec::new();
    Control::Refuse { attempt: AttemptId(1), reasons: vec![reason] }.encode(&mut frame);
    let Ok(Control::Refuse { reasons, .. }) = decode_control(&frame) else { panic!("no refusal") };
    assert_eq!((reasons[0].what.len(), reasons[0].remedy.as_str()), (512, "a b"));
}
