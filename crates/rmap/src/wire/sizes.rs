//! How large datagrams and their parts are.

use crate::units::SEALED_SIZE;

/// Bytes of a datagram before its encrypted part.
pub const DATAGRAM_HEADER_SIZE: usize = 16;
/// Bytes of a message before its payload.
pub const MESSAGE_HEADER_SIZE: usize = 48;
/// Tag of AES-256-GCM at the end of a data datagram.
pub const TAG_SIZE: usize = 16;
/// What surrounds the payload in a data datagram.
pub const OVERHEAD: usize = DATAGRAM_HEADER_SIZE + MESSAGE_HEADER_SIZE + TAG_SIZE;
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
