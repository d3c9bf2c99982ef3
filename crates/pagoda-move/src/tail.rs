//! Post-copy: the VM runs at its destination, and some of its pages are still at its source.
//!
//! [`TailDestination`] knows what is missing, and asks for what a thread of the guest needs. [`TailSource`] sends what is asked
//! for first, then the rest, hot chunks first. It forgets a page only when the destination has it *for good*: where a crash of
//! its daemon leaves it. After a cut the destination's map says what it still needs, and nothing else is believed.
//!
//! What the guest sees: a thread that needs a missing page waits for it, over a cut link until that is back.

mod destination;
mod source;

pub use destination::{Fault, TailDestination};
pub use source::TailSource;
