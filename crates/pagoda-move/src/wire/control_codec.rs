//! Control messages as bytes.

use pagoda_core::bits::PageSet;
use pagoda_core::units::Bytes;

use super::control::{Control, DecidedBy, Holding, MapPart, Verdict};
use super::fields::{Malformed, Reader, Writer};
use super::limits::{
    FEATURES_MAX, HEADER_SIZE, MAP_CHUNKS_MAX, PROTOCOL_VERSION, REASON_TEXT_MAX, REASONS_MAX, REGIONS_MAX, RUNS_MAX,
    SPECIFICATION_MAX, STATE_CHUNK_MAX, STATE_MAX, TEXT_MAX, VM_PAGES_MAX,
};
use super::offer::{Capabilities, Hello, Reason, ReasonKind, RegionFacts, Room, Welcome};
use super::runs::{RUN_SIZE, decode_chunk, decode_run, encode_run};
use crate::map::PageRun;
use crate::units::{AttemptId, ConnectionNo, Generation, RegisterId, RoundNo};

/// A text's bytes, and the two of its length.
const TEXT: usize = 2 + TEXT_MAX;
const MAP_ENTRY: usize = 4 + 32;

/// For each kind, counted from 1: the least and the greatest length of its payload.
const SIZES: [(usize, usize); 25] = [
    (78, 56 + 4 * TEXT + 2 + FEATURES_MAX + 2 + REGIONS_MAX * (TEXT + 8)),
    (20, 18 + TEXT),
    (10, 10 + REASONS_MAX * (2 + 2 * (2 + REASON_TEXT_MAX))),
    (34, 34 + SPECIFICATION_MAX),
    (8, 8),
    (56, 56),
    (12, 12),
    (8, 8),
    (12, 12),
    (17, 16 + STATE_CHUNK_MAX),
    (20, 20),
    (11, 11 + MAP_CHUNKS_MAX * MAP_ENTRY),
    (9, 9),
    (17, 17),
    (16, 16),
    (16, 16),
    (16, 16),
    (16, 16),
    (17, 17),
    (10, 10 + RUNS_MAX * RUN_SIZE),
    (10, 10 + RUNS_MAX * RUN_SIZE),
    (8, 8),
    (11, 11 + MAP_CHUNKS_MAX * MAP_ENTRY),
    (10, 10 + SPECIFICATION_MAX),
    (8, 8),
];

/// A frame's header that has been checked: its payload's length is one that its kind can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlHeader {
    kind: u8,
    len: usize,
}

impl ControlHeader {
    /// # Errors
    /// A header that no version writes, or a payload longer than its kind's cap.
    pub fn decode(bytes: [u8; HEADER_SIZE]) -> Result<ControlHeader, Malformed> {
        let [kind, zeros @ .., a, b, c, d] = bytes;
        let (least, most) =
            usize::from(kind).checked_sub(1).and_then(|at| SIZES.get(at)).ok_or(Malformed("unknown message"))?;
        if zeros != [0; 3] {
            return Err(Malformed("reserved bytes of a header"));
        }
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if !(*least..=*most).contains(&len) {
            return Err(Malformed("a length that this message cannot have"));
        }
        Ok(ControlHeader { kind, len })
    }

    /// Bytes that follow the header.
    pub const fn payload_len(self) -> usize {
        self.len
    }
}

impl Control {
    /// Appends the message's frame.
    ///
    /// Texts that are too long are cut. A list or a specification that is too long is a bug of the caller and panics, and so is a
    /// specification with control characters: half of one, or another one, would start another VM.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_SIZE]);
        let kind = self.encode_payload(&mut Writer(out));
        let len = out.len() - start - HEADER_SIZE;
        let (least, most) = SIZES[usize::from(kind) - 1];
        assert!((least..=most).contains(&len), "message {kind} of {len} bytes");
        out[start] = kind;
        out[start + 4..start + HEADER_SIZE].copy_from_slice(&(len as u32).to_le_bytes());
    }

    fn encode_payload(&self, w: &mut Writer<'_>) -> u8 {
        w.u64(self.attempt().0);
        match self {
            Control::Hello(hello) => encode_hello(hello, w),
            Control::Welcome(welcome) => {
                w.u16(welcome.protocol);
                w.u64(welcome.capabilities.0);
                w.text(&welcome.software, TEXT_MAX);
                2
            }
            Control::Refuse { reasons, .. } => {
                w.list(reasons, REASONS_MAX, |w, reason| {
                    w.u16(reason.kind as u16);
                    w.text(&reason.what, REASON_TEXT_MAX);
                    w.text(&reason.remedy, REASON_TEXT_MAX);
                });
                3
            }
            Control::Reserve { room, specification, .. } => {
                encode_room(*room, 4, w);
                encode_specification(specification, 4, w)
            }
            Control::Reserved { .. } => 5,
            Control::NoRoom { needed, free, .. } => {
                encode_room(*needed, 6, w);
                encode_room(*free, 6, w)
            }
            Control::Resume { connection, .. } => {
                w.u32(connection.0);
                7
            }
            Control::Forgotten { .. } => 8,
            Control::RoundKept { round, .. } => {
                w.u32(round.0);
                9
            }
            Control::State { offset, bytes, .. } => {
                w.u64(offset.0);
                w.bytes(bytes);
                10
            }
            Control::StateEnd { total, round, .. } => {
                w.u64(total.0);
                w.u32(round.0);
                11
            }
            Control::Missing { part, .. } => encode_map_part(part, 12, w),
            Control::Holds { holding, .. } => {
                w.u8(u8::from(*holding == Holding::Ready));
                13
            }
            Control::Grant { generation, by, .. } => {
                w.u64(generation.0);
                w.u8(u8::from(*by == DecidedBy::Arbiter));
                14
            }
            Control::Started { generation, .. } => encode_generation(*generation, 15, w),
            Control::Refusal { generation, .. } => encode_generation(*generation, 16, w),
            Control::Withdraw { generation, .. } => encode_generation(*generation, 17, w),
            Control::NoArbiter { generation, .. } => encode_generation(*generation, 18, w),
            Control::Settled { generation, verdict, .. } => {
                w.u64(generation.0);
                w.u8(u8::from(*verdict == Verdict::Yours));
                19
            }
            Control::Demand { runs, .. } => encode_runs(runs, 20, w),
            Control::Kept { runs, .. } => encode_runs(runs, 21, w),
            Control::Whole { .. } => 22,
            Control::RemoteMap { part, .. } => encode_map_part(part, 23, w),
            Control::Check { specification, .. } => encode_specification(specification, 24, w),
            Control::Possible { .. } => 25,
        }
    }

    /// The message with this header and payload, of which there have to be as many bytes as the header says.
    ///
    /// # Errors
    /// A payload that no version writes.
    pub fn decode(header: ControlHeader, payload: &[u8]) -> Result<Control, Malformed> {
        if payload.len() != header.len {
            return Err(Malformed("a payload of another length than its header says"));
        }
        let mut reader = Reader::new(payload);
        let r = &mut reader;
        let attempt = AttemptId(r.u64("attempt")?);
        if attempt.0 == 0 {
            return Err(Malformed("attempt 0"));
        }
        let message = match header.kind {
            1 => Control::Hello(decode_hello(attempt, r)?),
            2 => Control::Welcome(Welcome {
                attempt,
                protocol: r.u16("protocol version")?,
                capabilities: Capabilities(r.u64("capabilities")?),
                software: r.text(TEXT_MAX, "software version")?,
            }),
            3 => Control::Refuse { attempt, reasons: r.list(REASONS_MAX, "number of reasons", decode_reason)? },
            4 => {
                let room = decode_room(r)?;
                Control::Reserve { attempt, room, specification: r.text(SPECIFICATION_MAX, "specification")? }
            }
            5 => Control::Reserved { attempt },
            6 => Control::NoRoom { attempt, needed: decode_room(r)?, free: decode_room(r)? },
            7 => Control::Resume { attempt, connection: ConnectionNo(r.u32("connection")?) },
            8 => Control::Forgotten { attempt },
            9 => Control::RoundKept { attempt, round: RoundNo(r.u32("round")?) },
            10 => decode_state(attempt, header.len, r)?,
            11 => {
                let total = state_size(r.u64("size of the state")?)?;
                Control::StateEnd { attempt, total, round: RoundNo(r.u32("round")?) }
            }
            12 => Control::Missing { attempt, part: decode_map_part(r)? },
            13 => {
                let holding = if flag(r, "what is held")? { Holding::Ready } else { Holding::Filling };
                Control::Holds { attempt, holding }
            }
            14 => {
                let generation = decode_generation(r)?;
                let by = if flag(r, "what decides")? { DecidedBy::Arbiter } else { DecidedBy::Grant };
                Control::Grant { attempt, generation, by }
            }
            15 => Control::Started { attempt, generation: decode_generation(r)? },
            16 => Control::Refusal { attempt, generation: decode_generation(r)? },
            17 => Control::Withdraw { attempt, generation: decode_generation(r)? },
            18 => Control::NoArbiter { attempt, generation: decode_generation(r)? },
            19 => {
                let generation = decode_generation(r)?;
                let verdict = if flag(r, "verdict")? { Verdict::Yours } else { Verdict::Mine };
                Control::Settled { attempt, generation, verdict }
            }
            20 => Control::Demand { attempt, runs: decode_runs(r)? },
            21 => Control::Kept { attempt, runs: decode_runs(r)? },
            22 => Control::Whole { attempt },
            23 => Control::RemoteMap { attempt, part: decode_map_part(r)? },
            24 => Control::Check { attempt, specification: r.text(SPECIFICATION_MAX, "specification")? },
            25 => Control::Possible { attempt },
            _ => return Err(Malformed("unknown message")),
        };
        reader.end()?;
        Ok(message)
    }
}

fn encode_hello(hello: &Hello, w: &mut Writer<'_>) -> u8 {
    w.u32(hello.connection.0);
    w.u64(hello.generation.0);
    w.u16(hello.protocol_min);
    w.u16(hello.protocol_max);
    w.u64(hello.capabilities.0);
    w.u64(hello.required.0);
    w.u64(hello.unix_s);
    w.u64(RegisterId::number(hello.register));
    for text in [&hello.software, &hello.vm, &hello.qemu, &hello.machine] {
        w.text(text, TEXT_MAX);
    }
    w.text(&hello.cpu_features, FEATURES_MAX);
    w.list(&hello.regions, REGIONS_MAX, |w, region| {
        w.text(&region.id, TEXT_MAX);
        w.u64(region.size.0);
    });
    1
}

fn decode_hello(attempt: AttemptId, r: &mut Reader<'_>) -> Result<Hello, Malformed> {
    let hello = Hello {
        attempt,
        connection: ConnectionNo(r.u32("connection")?),
        generation: decode_generation(r)?,
        protocol_min: r.u16("protocol versions")?,
        protocol_max: r.u16("protocol versions")?,
        capabilities: Capabilities(r.u64("capabilities")?),
        required: Capabilities(r.u64("required capabilities")?),
        unix_s: r.u64("clock")?,
        register: RegisterId::of(r.u64("registers of the arbiter")?),
        software: r.text(TEXT_MAX, "software version")?,
        vm: r.text(TEXT_MAX, "name of the VM")?,
        qemu: r.text(TEXT_MAX, "version of QEMU")?,
        machine: r.text(TEXT_MAX, "machine type")?,
        cpu_features: r.text(FEATURES_MAX, "features of the CPU")?,
        regions: r.list(REGIONS_MAX, "number of regions", decode_region)?,
    };
    if hello.protocol_min > hello.protocol_max || hello.protocol_max < PROTOCOL_VERSION {
        return Err(Malformed("protocol versions"));
    }
    let sizes = hello.regions.iter().try_fold(Bytes::ZERO, |sum, region| sum.checked_add(region.size));
    if hello.regions.is_empty() || sizes.is_none_or(|sum| sum > VM_PAGES_MAX.bytes()) {
        return Err(Malformed("size of the VM's RAM"));
    }
    Ok(hello)
}

fn decode_region(r: &mut Reader<'_>) -> Result<RegionFacts, Malformed> {
    let region = RegionFacts { id: r.text(TEXT_MAX, "id of a region")?, size: Bytes(r.u64("size of a region")?) };
    let is_whole = region.size > Bytes::ZERO && region.size.is_multiple_of_page();
    if is_whole { Ok(region) } else { Err(Malformed("size of a region")) }
}

fn decode_reason(r: &mut Reader<'_>) -> Result<Reason, Malformed> {
    let kind = r.u16("kind of a reason")?;
    let kind = ReasonKind::ALL.into_iter().find(|known| *known as u16 == kind);
    Ok(Reason {
        kind: kind.ok_or(Malformed("kind of a reason"))?,
        what: r.text(REASON_TEXT_MAX, "text of a reason")?,
        remedy: r.text(REASON_TEXT_MAX, "text of a reason")?,
    })
}

fn encode_specification(specification: &str, kind: u8, w: &mut Writer<'_>) -> u8 {
    let is_whole = specification.len() <= SPECIFICATION_MAX && !specification.contains(char::is_control);
    assert!(is_whole, "a specification of {} bytes", specification.len());
    w.text(specification, SPECIFICATION_MAX);
    kind
}

fn encode_room(room: Room, kind: u8, w: &mut Writer<'_>) -> u8 {
    [room.dram, room.swap, room.pool].into_iter().for_each(|size| w.u64(size.0));
    kind
}

fn decode_room(r: &mut Reader<'_>) -> Result<Room, Malformed> {
    Ok(Room { dram: Bytes(r.u64("DRAM")?), swap: Bytes(r.u64("swap")?), pool: Bytes(r.u64("memory of a pool")?) })
}

fn encode_generation(generation: Generation, kind: u8, w: &mut Writer<'_>) -> u8 {
    w.u64(generation.0);
    kind
}

/// A generation that leaves room for those of this attempt: the next one, and the one that takes it back.
fn decode_generation(r: &mut Reader<'_>) -> Result<Generation, Malformed> {
    let generation = r.u64("generation")?;
    if generation < u64::MAX - 2 { Ok(Generation(generation)) } else { Err(Malformed("generation")) }
}

fn decode_state(attempt: AttemptId, len: usize, r: &mut Reader<'_>) -> Result<Control, Malformed> {
    let offset = Bytes(r.u64("offset in the state")?);
    let bytes = r.bytes(len - 16, "a part of the state")?;
    let end = offset.checked_add(Bytes(bytes.len() as u64)).ok_or(Malformed("offset in the state"))?;
    state_size(end.0)?;
    Ok(Control::State { attempt, offset, bytes: bytes.to_vec() })
}

fn state_size(bytes: u64) -> Result<Bytes, Malformed> {
    if bytes <= STATE_MAX.0 { Ok(Bytes(bytes)) } else { Err(Malformed("size of the state")) }
}

fn encode_map_part(part: &MapPart, kind: u8, w: &mut Writer<'_>) -> u8 {
    w.u8(part.last.into());
    w.list(&part.chunks, MAP_CHUNKS_MAX, |w, (chunk, pages)| {
        w.u32(chunk.0);
        pages.words().into_iter().for_each(|word| w.u64(word));
    });
    kind
}

fn decode_map_part(r: &mut Reader<'_>) -> Result<MapPart, Malformed> {
    let last = flag(r, "end of a map")?;
    let mut next = 0;
    let chunks = r.list(MAP_CHUNKS_MAX, "number of chunks", |r| {
        let chunk = decode_chunk(r)?;
        let mut words = [0; 4];
        for word in &mut words {
            *word = r.u64("pages of a chunk")?;
        }
        let pages = PageSet::from_words(words);
        if chunk.0 < next || pages.is_empty() {
            return Err(Malformed("chunk of a map"));
        }
        next = chunk.0 + 1;
        Ok((chunk, pages))
    })?;
    Ok(MapPart { chunks, last })
}

fn encode_runs(runs: &[PageRun], kind: u8, w: &mut Writer<'_>) -> u8 {
    w.list(runs, RUNS_MAX, |w, run| encode_run(*run, w));
    kind
}

fn decode_runs(r: &mut Reader<'_>) -> Result<Vec<PageRun>, Malformed> {
    r.list(RUNS_MAX, "number of runs", decode_run)
}

fn flag(r: &mut Reader<'_>, what: &'static str) -> Result<bool, Malformed> {
    match r.u8(what)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed(what)),
    }
}
