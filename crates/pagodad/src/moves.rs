//! VMs that move between hosts: `pagoda vm move`.

pub mod board;
pub mod channel;
mod claims;
pub mod destination;
mod notes;
mod outgoing;
pub mod recovery;
mod sessions;
mod source;
mod specification;
mod start;
mod state;
mod store;

pub use self::state::Moves;
