//! Keys: who may speak (Noise, the pool's key), what is said (AES-256-GCM), what is stored (the page seal).

pub mod entropy;
pub mod handshake;
pub mod replay;
pub mod seal;
pub mod session;

pub use entropy::Entropy;
pub use handshake::{Keypair, PoolKey, PublicKey};
pub use seal::SpaceKey;

use thiserror::Error;

/// Why something was not accepted. What exactly was wrong helps an attacker more than an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Rejected {
    #[error("not authentic")]
    NotAuthentic,
    #[error("seen before, or too old to tell")]
    Replayed,
}

/// Bytes of every key.
pub const KEY_SIZE: usize = 32;
