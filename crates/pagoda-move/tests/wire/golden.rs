//! Each message in the bytes of the tables in `docs/protocol/move.md`.

use pagoda_core::bits::PageSet;
use pagoda_core::units::{Bytes, ChunkIdx, PageIdx};
use pagoda_move::units::{AttemptId, ConnectionNo, Generation, RegisterId, RoundNo};
use pagoda_move::wire::control::{DecidedBy, Holding, MapPart, Verdict};
use pagoda_move::wire::offer::{Capabilities, Hello, Reason, ReasonKind, RegionFacts, Room, Welcome};
use pagoda_move::wire::{Codec, Control, Data, RunKind};

use crate::{decode_control, decode_data, run};

const ATTEMPT: AttemptId = AttemptId(0x1122_3344_5566_7788);

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn check(message: Control, golden: &str) {
    let mut encoded = Vec::new();
    message.encode(&mut encoded);
    assert_eq!(encoded, bytes(golden), "{message:?}");
    assert_eq!(decode_control(&encoded), Ok(message));
}

fn check_data(message: Data<'_>, golden: &str) {
    let mut encoded = Vec::new();
    message.encode(&mut encoded);
    assert_eq!(encoded, bytes(golden), "{message:?}");
    assert_eq!(decode_data(&encoded), Ok(message));
}

#[test]
fn messages_before_the_first_page() {
    let region = |id: &str, size| RegionFacts { id: id.to_owned(), size: Bytes(size) };
    let hello = Hello {
        attempt: ATTEMPT,
        connection: ConnectionNo(1),
        generation: Generation(7),
        protocol_min: 1,
        protocol_max: 2,
        capabilities: Capabilities::LZ4.with(Capabilities::POSTCOPY).with(Capabilities::ARBITER),
        required: Capabilities::POSTCOPY,
        unix_s: 1_764_400_000,
        register: RegisterId::of(0xa7b6_c5d4_e3f2_0102),
        software: "0.1.0".to_owned(),
        vm: "web1".to_owned(),
        qemu: "10.0.2".to_owned(),
        machine: "pc-q35-7.2".to_owned(),
        cpu_features: "sse,avx2".to_owned(),
        regions: vec![region("pc.ram", 1 << 30), region("ram1", 4096)],
    };
    check(
        Control::Hello(hello),
        "010000008300000088776655443322110100000007000000000000000100020007000000000000000200000000000000\
             809b2a69000000000201f2e3d4c5b6a70500302e312e30040077656231060031302e302e320a0070632d7133352d372e3208007373652c61\
             7678320200060070632e72616d0000004000000000040072616d310010000000000000",
    );
    let welcome = Welcome {
        attempt: ATTEMPT,
        protocol: 1,
        capabilities: Capabilities::LZ4.with(Capabilities::POSTCOPY),
        software: "0.2.0".to_owned(),
    };
    check(Control::Welcome(welcome), "02000000190000008877665544332211010003000000000000000500302e322e30");
    let reasons = vec![Reason { kind: ReasonKind::NameTaken, what: "taken".to_owned(), remedy: "rename".to_owned() }];
    check(
        Control::Refuse { attempt: ATTEMPT, reasons },
        "030000001b000000887766554433221101000800050074616b656e060072656e616d65",
    );
    let room = Room { dram: Bytes(1 << 29), swap: Bytes(3 << 30), pool: Bytes::ZERO };
    let free = Room { dram: Bytes(1 << 28), swap: Bytes(1 << 40), pool: Bytes::ZERO };
    check(
        Control::Reserve { attempt: ATTEMPT, room, specification: r#"{"memory":[4096]}"#.to_owned() },
        "040000003300000088776655443322110000002000000000000000c000000000000000000000000011007b226d656d6f\
             7279223a5b343039365d7d",
    );
    check(Control::Reserved { attempt: ATTEMPT }, "05000000080000008877665544332211");
    check(
        Control::NoRoom { attempt: ATTEMPT, needed: room, free },
        "060000003800000088776655443322110000002000000000000000c00000000000000000000000000000001000000000\
             00000000000100000000000000000000",
    );
    check(
        Control::Resume { attempt: ATTEMPT, connection: ConnectionNo(2) },
        "070000000c000000887766554433221102000000",
    );
    check(Control::Forgotten { attempt: ATTEMPT }, "08000000080000008877665544332211");
    check(
        Control::Check { attempt: ATTEMPT, specification: "{}".to_owned() },
        "180000000c000000887766554433221102007b7d",
    );
    check(Control::Possible { attempt: ATTEMPT }, "19000000080000008877665544332211");
}

#[test]
fn messages_of_the_copy_and_of_the_tail() {
    check(Control::RoundKept { attempt: ATTEMPT, round: RoundNo(3) }, "090000000c000000887766554433221103000000");
    check(
        Control::State { attempt: ATTEMPT, offset: Bytes(4), bytes: vec![1, 2, 3] },
        "0a0000001300000088776655443322110400000000000000010203",
    );
    check(
        Control::StateEnd { attempt: ATTEMPT, total: Bytes(7), round: RoundNo(3) },
        "0b000000140000008877665544332211070000000000000003000000",
    );
    let part = MapPart { chunks: vec![(ChunkIdx(2), PageSet::from_words([5, 0, 0, 1 << 63]))], last: true };
    check(
        Control::Missing { attempt: ATTEMPT, part: part.clone() },
        "0c0000002f00000088776655443322110101000200000005000000000000000000000000000000000000000000000000\
             00000000000080",
    );
    check(
        Control::RemoteMap { attempt: ATTEMPT, part },
        "170000002f00000088776655443322110101000200000005000000000000000000000000000000000000000000000000\
             00000000000080",
    );
    check(
        Control::Demand { attempt: ATTEMPT, runs: vec![run(2, 254, 2)] },
        "14000000120000008877665544332211010002000000fe000200",
    );
    check(
        Control::Kept { attempt: ATTEMPT, runs: vec![run(2, 254, 2)] },
        "15000000120000008877665544332211010002000000fe000200",
    );
    check(Control::Whole { attempt: ATTEMPT }, "16000000080000008877665544332211");
}

#[test]
fn messages_about_the_owner() {
    let (attempt, generation) = (ATTEMPT, Generation(8));
    check(Control::Holds { attempt, holding: Holding::Ready }, "0d00000009000000887766554433221101");
    check(
        Control::Grant { attempt, generation, by: DecidedBy::Arbiter },
        "0e000000110000008877665544332211080000000000000001",
    );
    check(Control::Started { attempt, generation }, "0f0000001000000088776655443322110800000000000000");
    check(Control::Refusal { attempt, generation }, "100000001000000088776655443322110800000000000000");
    check(Control::Withdraw { attempt, generation }, "110000001000000088776655443322110800000000000000");
    check(Control::NoArbiter { attempt, generation }, "120000001000000088776655443322110800000000000000");
    check(
        Control::Settled { attempt, generation, verdict: Verdict::Yours },
        "13000000110000008877665544332211080000000000000001",
    );
}

#[test]
fn messages_of_a_data_stream() {
    let open = Data::Open { attempt: ATTEMPT, connection: ConnectionNo(2), stream: 3, round: RoundNo(4) };
    check_data(open, "0100000012000000887766554433221102000000030004000000");
    let pages = run(2, 254, 2);
    let packed = RunKind::Content(Codec::Lz4, &[10, 11]);
    check_data(Data::Run { pages, kind: packed }, "030000000a00000002000000fe0002000a0b");
    let packed = RunKind::Content(Codec::Zstd, &[10, 11]);
    check_data(Data::Run { pages, kind: packed }, "080000000a00000002000000fe0002000a0b");
    check_data(Data::Run { pages, kind: RunKind::Zero }, "040000000800000002000000fe000200");
    check_data(Data::Run { pages, kind: RunKind::Freed }, "050000000800000002000000fe000200");
    let there = RunKind::InImage { image: 0x1112_1314_1516_1718_0102_0304_0506_0708, first: PageIdx(9) };
    check_data(
        Data::Run { pages, kind: there },
        "060000002000000002000000fe000200080706050403020118171615141312110900000000000000",
    );
    check_data(Data::RoundEnd { round: RoundNo(4) }, "070000000400000004000000");
    let content = vec![7; 8192];
    let mut encoded = Vec::new();
    Data::Run { pages, kind: RunKind::Content(Codec::Raw, &content) }.encode(&mut encoded);
    assert_eq!(encoded[..16], bytes("020000000820000002000000fe000200"));
    assert_eq!(decode_data(&encoded), Ok(Data::Run { pages, kind: RunKind::Content(Codec::Raw, &content) }));
}
