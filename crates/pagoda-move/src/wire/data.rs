//! Messages of a data stream: pages, and the ends of rounds.
//!
//! A page always goes by the stream [`stream_of`] its chunk. So what was sent later arrives later, and a page of an earlier round
//! never replaces a newer one.

use pagoda_core::units::{ChunkIdx, PageIdx};

use super::fields::{Malformed, Reader, Writer};
use super::limits::{HEADER_SIZE, RUN_BYTES_MAX, STREAMS_MAX, VM_PAGES_MAX};
use super::runs::{RUN_SIZE, decode_run, encode_run};
use crate::map::PageRun;
use crate::units::{AttemptId, ConnectionNo, RoundNo};

const OPEN: u8 = 1;
const RAW: u8 = 2;
const LZ4: u8 = 3;
const ZERO: u8 = 4;
const FREED: u8 = 5;
const IMAGE: u8 = 6;
const ROUND_END: u8 = 7;
const ZSTD: u8 = 8;

const OPEN_SIZE: usize = 18;
const ROUND_END_SIZE: usize = 4;
/// A run's head, the image's name, and a page's number in it.
const IMAGE_SIZE: usize = RUN_SIZE + 16 + 8;

/// How the content of pages is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    Raw,
    /// One LZ4 block, which unpacks to the pages of the run and to nothing else. Always shorter than them.
    Lz4,
    /// One zstd frame, of which the same holds.
    Zstd,
}

/// What the pages of a run hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind<'a> {
    Content(Codec, &'a [u8]),
    Zero,
    /// The guest gave the pages back: nobody cares what they hold until they are written.
    Freed,
    /// The destination has the content: in this image, from this page on.
    InImage {
        image: u128,
        first: PageIdx,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data<'a> {
    /// First on each stream. `round` is the one that goes on, or the one after the last in a tail.
    Open {
        attempt: AttemptId,
        connection: ConnectionNo,
        stream: u16,
        round: RoundNo,
    },
    Run {
        pages: PageRun,
        kind: RunKind<'a>,
    },
    /// Everything of the round that goes by this stream has been sent. The next round begins.
    RoundEnd {
        round: RoundNo,
    },
}

/// The stream of a chunk, out of so many.
pub const fn stream_of(chunk: ChunkIdx, streams: u16) -> u16 {
    assert!(streams > 0 && streams <= STREAMS_MAX, "1 to 16 streams");
    (chunk.0 % streams as u32) as u16
}

/// A frame's header that has been checked: its payload's length is one that its kind can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHeader {
    kind: u8,
    len: usize,
}

impl DataHeader {
    /// # Errors
    /// A header that no version writes, or a payload longer than its kind's cap.
    pub fn decode(bytes: [u8; HEADER_SIZE]) -> Result<DataHeader, Malformed> {
        let [kind, zeros @ .., a, b, c, d] = bytes;
        if zeros != [0; 3] {
            return Err(Malformed("reserved bytes of a header"));
        }
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        let sizes = match kind {
            OPEN => OPEN_SIZE..=OPEN_SIZE,
            RAW => RUN_SIZE + 1..=RUN_SIZE + RUN_BYTES_MAX,
            LZ4 | ZSTD => RUN_SIZE + 1..=RUN_SIZE + RUN_BYTES_MAX - 1,
            ZERO | FREED => RUN_SIZE..=RUN_SIZE,
            IMAGE => IMAGE_SIZE..=IMAGE_SIZE,
            ROUND_END => ROUND_END_SIZE..=ROUND_END_SIZE,
            _ => return Err(Malformed("unknown message")),
        };
        if sizes.contains(&len) {
            Ok(DataHeader { kind, len })
        } else {
            Err(Malformed("a length that this message cannot have"))
        }
    }

    /// Bytes that follow the header.
    pub const fn payload_len(self) -> usize {
        self.len
    }
}

impl<'a> Data<'a> {
    /// Appends the message's frame, with its content.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_SIZE]);
        let w = &mut Writer(out);
        let kind = match self {
            Data::Open { attempt, connection, stream, round } => {
                w.u64(attempt.0);
                w.u32(connection.0);
                w.u16(*stream);
                w.u32(round.0);
                OPEN
            }
            Data::Run { pages, kind } => {
                encode_run(*pages, w);
                encode_kind(*pages, *kind, w)
            }
            Data::RoundEnd { round } => {
                w.u32(round.0);
                ROUND_END
            }
        };
        let len = out.len() - start - HEADER_SIZE;
        out[start] = kind;
        out[start + 4..start + HEADER_SIZE].copy_from_slice(&(len as u32).to_le_bytes());
    }

    /// The message with this header and payload, of which there have to be as many bytes as the header says.
    ///
    /// # Errors
    /// A payload that no version writes.
    pub fn decode(header: DataHeader, payload: &'a [u8]) -> Result<Data<'a>, Malformed> {
        if payload.len() != header.len {
            return Err(Malformed("a payload of another length than its header says"));
        }
        let mut r = Reader::new(payload);
        let data = match header.kind {
            OPEN => Data::Open {
                attempt: AttemptId(r.u64("attempt")?),
                connection: ConnectionNo(r.u32("connection")?),
                stream: r.u16("stream")?,
                round: RoundNo(r.u32("round")?),
            },
            ROUND_END => Data::RoundEnd { round: RoundNo(r.u32("round")?) },
            kind => {
                let pages = decode_run(&mut r)?;
                Data::Run { pages, kind: decode_kind(kind, pages, header.len - RUN_SIZE, &mut r)? }
            }
        };
        r.end()?;
        match data {
            Data::Open { attempt: AttemptId(0), .. } => Err(Malformed("attempt 0")),
            Data::Open { stream, .. } if stream >= STREAMS_MAX => Err(Malformed("stream")),
            data => Ok(data),
        }
    }
}

fn encode_kind(pages: PageRun, kind: RunKind<'_>, w: &mut Writer<'_>) -> u8 {
    match kind {
        RunKind::Content(codec, bytes) => {
            let whole = pages.count().bytes().as_usize();
            w.bytes(bytes);
            match codec {
                Codec::Raw => assert_eq!(bytes.len(), whole, "content of another size than its pages"),
                Codec::Lz4 | Codec::Zstd => {
                    assert!((1..whole).contains(&bytes.len()), "content that packing did not make smaller");
                }
            }
            match codec {
                Codec::Raw => RAW,
                Codec::Lz4 => LZ4,
                Codec::Zstd => ZSTD,
            }
        }
        RunKind::Zero => ZERO,
        RunKind::Freed => FREED,
        RunKind::InImage { image, first } => {
            w.u128(image);
            w.u64(first.0);
            IMAGE
        }
    }
}

fn decode_kind<'a>(kind: u8, pages: PageRun, len: usize, r: &mut Reader<'a>) -> Result<RunKind<'a>, Malformed> {
    let whole = pages.count().bytes().as_usize();
    match kind {
        RAW if len == whole => Ok(RunKind::Content(Codec::Raw, r.bytes(len, "content")?)),
        LZ4 if len < whole => Ok(RunKind::Content(Codec::Lz4, r.bytes(len, "content")?)),
        ZSTD if len < whole => Ok(RunKind::Content(Codec::Zstd, r.bytes(len, "content")?)),
        RAW | LZ4 | ZSTD => Err(Malformed("content of another size than its pages")),
        ZERO => Ok(RunKind::Zero),
        FREED => Ok(RunKind::Freed),
        _ => {
            let (image, first) = (r.u128("name of an image")?, r.u64("page of an image")?);
            let is_possible = first <= VM_PAGES_MAX.0 - pages.count().0;
            if !is_possible {
                return Err(Malformed("page of an image"));
            }
            Ok(RunKind::InImage { image, first: PageIdx(first) })
        }
    }
}
