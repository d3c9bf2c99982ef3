//! Who owns a VM that moves: exactly one of two hosts, whatever is cut and whoever crashes.
//!
//! The source notes that it has given the VM away before it sends the grant. The destination notes that it has accepted before
//! the VM runs there. From the grant on the source runs the VM again only when the destination has refused for good, or when the
//! arbiter says so. So there are never two. If the link is cut between the grant and its answer there may be none until the link
//! is back, or until the arbiter has decided.
//!
//! [`Source`] and [`Destination`] take events in and give actions back, in the order in which they have to be done. A host that
//! has neither for a message's attempt asks [`answer`]. The rules and what each crash leads to are in `docs/protocol/move-owner.md`.

mod answer;
mod claim;
mod destination;
mod link;
mod notes;
mod recover;
mod source;
mod types;

pub use answer::{Answer, answer, settled_by};
pub use claim::{Claim, Registered, Step};
pub use destination::Destination;
pub use recover::{Recovered, recover};
pub use source::Source;
pub use types::{
    Action, DestinationEvent, End, GIVE_UP_AFTER, NO_ARBITER_AFTER, Qemu, RETRY_EVERY, STOPPED_MAX, SourceEvent,
    TAKE_BACK_AFTER,
};
