//! The fixed parts of an exported file: its header, and the header of each record. Numbers are little-endian.
//!
//! | header's bytes | what |
//! |---|---|
//! | 0-7 | `PAGODAEX` |
//! | 8-11 | version: 1 |
//! | 12-15 | features that a reader has to know: none in version 1 |
//! | 16-19 | bytes of the manifest |
//! | 20-23 | chunks of the VM's memory |
//! | 24-31 | bytes of QEMU's state |
//! | 32-39 | pages with content |
//! | 40-55 | 0 |
//! | 56-63 | XXH3-64 of bytes 0-55 |
//!
//! | record's bytes | what |
//! |---|---|
//! | 0-3 | kind |
//! | 4-7 | index |
//! | 8-11 | bytes of the payload |
//! | 12-15 | count |
//! | 16-23 | XXH3-64 of bytes 0-15 and the payload |
//! | 24- | the payload |

use pagoda_core::units::{Bytes, CHUNK_PAGES, CHUNK_SIZE, ChunkCount};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::limits::{IMAGE_PAGES_MAX, MANIFEST_MAX, STATE_BYTES_MAX};

/// How a file begins.
pub const MAGIC: &[u8; 8] = b"PAGODAEX";
pub const VERSION: u32 = 1;
/// Features that this version knows: a bit each.
pub const FEATURES_KNOWN: u32 = 0;
/// Bytes of the header.
pub const HEADER_SIZE: usize = 64;
/// Bytes of a record before its payload.
pub const RECORD_HEADER_SIZE: usize = 24;
/// Bytes of QEMU's state in one record.
pub const STATE_PIECE_MAX: usize = 1 << 20;
/// Bytes that say which pages of a chunk have content.
pub const BITMAP_SIZE: usize = CHUNK_PAGES as usize / 8;
/// Bytes of a page's checksum.
pub const SUM_SIZE: usize = 4;
/// The longest payload of a chunk: its bitmap, the checksums of all pages, and their content as it is.
pub const CHUNK_PAYLOAD_MAX: usize = BITMAP_SIZE + CHUNK_PAGES as usize * SUM_SIZE + CHUNK_SIZE as usize;
/// Bytes of the end marker's payload.
pub const END_PAYLOAD: usize = 32;
/// Chunks of a VM.
pub const CHUNKS_MAX: u32 = (IMAGE_PAGES_MAX.0 / CHUNK_PAGES) as u32;

const SUMMED: usize = HEADER_SIZE - 8;
const RESERVED: std::ops::Range<usize> = 40..SUMMED;

/// What the header says. See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) manifest_len: usize,
    pub(crate) chunks: ChunkCount,
    pub(crate) state: Bytes,
    /// Pages with content: what an import needs room for.
    pub(crate) blocks: u64,
}

impl Header {
    pub(crate) fn encode(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[..8].copy_from_slice(MAGIC);
        put_u32(&mut bytes, 8, VERSION);
        put_u32(&mut bytes, 16, self.manifest_len as u32);
        put_u32(&mut bytes, 20, self.chunks.0);
        bytes[24..32].copy_from_slice(&self.state.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.blocks.to_le_bytes());
        let sum = xxh3_64(&bytes[..SUMMED]);
        bytes[SUMMED..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// What is wrong with a file that has another number of pages with content.
    pub(crate) fn too_many_or_few(&self) -> String {
        format!("the header says that {} pages have content, and that is not so", self.blocks)
    }

    /// # Errors
    /// Which byte is wrong, and why.
    pub(crate) fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Header, (usize, String)> {
        let wrong = |at: usize, what: String| Err((at, what));
        if !bytes.starts_with(MAGIC) {
            return wrong(0, "no exported snapshot: it does not begin with PAGODAEX".to_owned());
        }
        // The version comes first: what follows is that version's.
        let version = get_u32(bytes, 8);
        if version != VERSION {
            return wrong(8, format!("written in version {version} of the format, and this knows {VERSION}"));
        }
        if xxh3_64(&bytes[..SUMMED]) != get_u64(bytes, SUMMED) {
            return wrong(SUMMED, "the header does not match its checksum".to_owned());
        }
        let unknown = get_u32(bytes, 12) & !FEATURES_KNOWN;
        if unknown != 0 {
            return wrong(
                12,
                format!("it needs feature {}, which this version does not know", unknown.trailing_zeros()),
            );
        }
        let (manifest_len, chunks, state) = (get_u32(bytes, 16) as usize, get_u32(bytes, 20), get_u64(bytes, 24));
        if !(1..=MANIFEST_MAX).contains(&manifest_len) {
            return wrong(16, format!("a manifest of {manifest_len} bytes: it has 1 to {MANIFEST_MAX}"));
        }
        if !(1..=CHUNKS_MAX).contains(&chunks) {
            return wrong(20, format!("{chunks} MiB of memory: a VM has 1 to {CHUNKS_MAX}"));
        }
        if !(1..=STATE_BYTES_MAX.0).contains(&state) {
            return wrong(24, format!("a state of {state} bytes: it has 1 to {}", STATE_BYTES_MAX.0));
        }
        let (blocks, pages) = (get_u64(bytes, 32), u64::from(chunks) * CHUNK_PAGES);
        if blocks > pages {
            return wrong(32, format!("{blocks} pages with content, of {pages}"));
        }
        if let Some(at) = RESERVED.into_iter().find(|at| bytes[*at] != 0) {
            return wrong(at, "a byte of the header that is 0 in this version".to_owned());
        }
        Ok(Header { manifest_len, chunks: ChunkCount(chunks), state: Bytes(state), blocks })
    }
}

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    Manifest = 1,
    State = 2,
    Chunk = 3,
    Zeros = 4,
    End = 5,
}

impl Kind {
    fn of(number: u32) -> Option<Kind> {
        [Kind::Manifest, Kind::State, Kind::Chunk, Kind::Zeros, Kind::End]
            .into_iter()
            .find(|kind| *kind as u32 == number)
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Kind::Manifest => "the manifest",
            Kind::State => "QEMU's state",
            Kind::Chunk => "a chunk",
            Kind::Zeros => "zeros",
            Kind::End => "the end",
        }
    }

    /// The longest payload that a record of this kind may have.
    const fn payload_max(self) -> usize {
        match self {
            Kind::Manifest => MANIFEST_MAX,
            Kind::State => STATE_PIECE_MAX,
            Kind::Chunk => CHUNK_PAYLOAD_MAX,
            Kind::Zeros => 0,
            Kind::End => END_PAYLOAD,
        }
    }
}

/// The header of a record, without its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHead {
    pub(crate) kind: Kind,
    pub(crate) index: u32,
    pub(crate) count: u32,
    pub(crate) payload_len: usize,
}

impl RecordHead {
    /// Fills in the header at the beginning of `record`, whose payload is in its place. Its checksum.
    pub(crate) fn seal(self, record: &mut [u8]) -> u64 {
        assert_eq!(record.len(), RECORD_HEADER_SIZE + self.payload_len, "a record");
        put_u32(record, 0, self.kind as u32);
        put_u32(record, 4, self.index);
        put_u32(record, 8, self.payload_len as u32);
        put_u32(record, 12, self.count);
        let (head, payload) = record.split_at(RECORD_HEADER_SIZE);
        let sum = sum_of_record(head, payload);
        record[16..RECORD_HEADER_SIZE].copy_from_slice(&sum.to_le_bytes());
        sum
    }

    /// The header, and the checksum that the record should have. The payload's length is one that its kind may have.
    ///
    /// # Errors
    /// Which byte is wrong, and why.
    pub(crate) fn decode(bytes: &[u8; RECORD_HEADER_SIZE]) -> Result<(RecordHead, u64), (usize, String)> {
        let number = get_u32(bytes, 0);
        let kind =
            Kind::of(number).ok_or_else(|| (0, format!("a record of kind {number}, which version 1 has not")))?;
        let payload_len = get_u32(bytes, 8) as usize;
        if payload_len > kind.payload_max() {
            let what = format!("{payload_len} bytes for {}: it has at most {}", kind.name(), kind.payload_max());
            return Err((8, what));
        }
        let head = RecordHead { kind, index: get_u32(bytes, 4), count: get_u32(bytes, 12), payload_len };
        Ok((head, get_u64(bytes, 16)))
    }
}

/// The checksum of a record.
pub(crate) fn sum_of_record(head: &[u8], payload: &[u8]) -> u64 {
    let mut sum = Xxh3::new();
    sum.update(&head[..16]);
    sum.update(payload);
    sum.digest()
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

pub(crate) fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

pub(crate) fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}
