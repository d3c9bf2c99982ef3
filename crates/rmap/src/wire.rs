//! Bytes on the wire, and nowhere else. The tables are in `docs/protocol/rmap.md`.
//!
//! Nothing here is trusted: a length follows from what precedes it or is compared with a cap, an unknown value is
//! [`Malformed`], and decoding neither allocates nor panics.

pub mod copy;
pub mod datagram;
pub mod message;
pub mod report;

use thiserror::Error;

use crate::units::SEALED_SIZE;

/// The one version there is. A hello names the range its sender speaks; the server picks the greatest they share.
pub const PROTOCOL_VERSION: u8 = 5;

/// Tag of AES-256-GCM at the end of a data datagram.
pub const TAG_SIZE: usize = 16;
/// What surrounds the payload in a data datagram.
pub const OVERHEAD: usize = datagram::HEADER_SIZE + message::HEADER_SIZE + TAG_SIZE;
/// The largest payload of a message: one sealed page.
pub const PAYLOAD_MAX: usize = SEALED_SIZE;
/// A whole page in one datagram; more is never of use.
pub const DATAGRAM_MAX: usize = OVERHEAD + PAYLOAD_MAX;
/// Every path is taken to carry this (as QUIC does, RFC 9000, section 14).
pub const DATAGRAM_MIN_MAX: usize = 1200;
/// Fragments of a message: a sealed page over the smallest path.
pub const FRAGMENTS_MAX: usize = PAYLOAD_MAX.div_ceil(DATAGRAM_MIN_MAX - OVERHEAD);
/// Sizes to try on a path: Ethernet under VXLAN over IPv4, Ethernet with IPv6, with IPv4, jumbo frames.
pub const DATAGRAM_SIZES: [usize; 5] = [DATAGRAM_MIN_MAX, 1422, 1452, 1472, DATAGRAM_MAX];

/// Input that no version of the protocol produces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

/// Little-endian fields at fixed places. Lengths are checked by the caller, once, for the whole header.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
