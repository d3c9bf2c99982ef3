//! The bytes between the two hosts of a move. No other module knows them. The tables are in `docs/protocol/move.md`.
//!
//! A connection has one control stream and several data streams. On both kinds, a frame is a header and a payload. The header
//! says what follows and how long it is. A receiver reads the header, checks it ([`ControlHeader::decode`],
//! [`DataHeader::decode`]), and only then makes room for the payload, whose length has a cap for each kind.
//!
//! Nothing here is trusted: a value that no version writes is [`Malformed`], with its name. Decoding does not panic.

pub mod control;
mod control_codec;
pub mod data;
mod fields;
pub mod limits;
pub mod offer;
mod runs;

pub use control::Control;
pub use control_codec::ControlHeader;
pub use data::{Codec, Data, DataHeader, RunKind};
pub use fields::Malformed;
pub use limits::{HEADER_SIZE, PROTOCOL_VERSION};
