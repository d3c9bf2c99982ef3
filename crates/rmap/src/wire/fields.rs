//! Reads fields at fixed places, and names input that is malformed.

use thiserror::Error;

/// Input that no version of the protocol produces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("malformed: {0}")]
pub struct Malformed(pub &'static str);

/// Little-endian fields at fixed places. Lengths are checked by the caller, once, for the whole header.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
