//! Encrypted streams between the daemons of hosts that trust each other.
//!
//! A stream is a TCP connection. Both ends show by Noise that they have their private keys ([`handshake`]), the one that was called
//! looks whether it trusts the other's, and says so. From then on records go both ways, each of at most [`RECORD_MAX`] bytes and
//! sealed by AES-256-GCM ([`record`]). Whom a host trusts, and where others are, is in a file ([`hosts`]).
//!
//! **What holds.** A record that was received was sent by the host with that key, after all that was received before it, and nothing is
//! missing between them. Nobody else can read it. **What does not hold.** The end of a stream is not sealed: a stream that was cut looks
//! like one that was closed. So whatever a record begins has to be ended by a record too.
//!
//! The bytes are in `docs/protocol/link.md`.

mod handshake;
pub mod hosts;
mod record;
mod stream;

pub use handshake::NoHandshake;
pub use record::RECORD_MAX;
pub use rmap::crypto::{Keypair, PublicKey};
pub use stream::{Cutter, Draft, Link, LinkError, Receiver, Sender};
