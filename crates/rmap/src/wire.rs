//! Bytes on the wire, and nowhere else. The tables are in `docs/protocol/rmap.md`.
//!
//! Nothing here is trusted: a length follows from what precedes it or is compared with a cap, an unknown value is
//! [`Malformed`], and decoding neither allocates nor panics.

pub mod copy;
pub mod datagram;
mod fields;
pub mod message;
pub mod report;
mod sizes;

pub use fields::Malformed;
pub use sizes::{DATAGRAM_MAX, DATAGRAM_MIN_MAX, DATAGRAM_SIZES, FRAGMENTS_MAX, OVERHEAD, PAYLOAD_MAX, TAG_SIZE};

/// The one version there is. A hello names the range its sender speaks; the server picks the greatest they share.
pub const PROTOCOL_VERSION: u8 = 5;
