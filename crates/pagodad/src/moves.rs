//! VMs that move between hosts: `pagoda vm move`.

pub mod arbiter;
pub mod board;
mod capabilities;
pub mod channel;
mod claims;
mod copies;
pub mod destination;
mod nameless;
mod notes;
mod outgoing;
pub mod recovery;
mod sessions;
mod source;
mod specification;
mod start;
mod state;
mod store;
mod streams;
mod unclear;
mod untrust;

pub use self::notes::Notes;
pub use self::state::Moves;
pub use self::untrust::untrust;
