//! The space of one VM's outbox: what the guest has written and the network has not taken yet.
//!
//! [`Space`] knows names, sizes, cursors and the byte budget. It holds no content and does no I/O: the file server keeps a
//! memfd for each file, asks before it writes ([`Space::plan_write`]), says what it has done, and carries out what the space
//! wants to be given back ([`Reclaim`]). The transmitter attaches a reader to a file, is told which bytes to send next, and
//! says what the network has acknowledged.
//!
//! What always holds:
//! - No page is written that was not charged before, and none is charged above the budget. So real memory never exceeds it.
//! - Bytes below a file's send cursor never change. Whoever wants to change them is refused ([`Refusal::BelowCursor`]).
//! - Bytes are given back only behind the slowest reader, and only after as many deliveries as the file needs.
//! - What a space has said is in its [`journal`] before anything follows from it, so a process that is killed loses nothing
//!   that the guest or a client was told.
//! - Everything that a guest can make grow has a limit with a name ([`limits`]).

mod codec;
mod content;
mod delivery;
mod jobs;
pub mod journal;
pub mod limits;
mod meter;
mod node;
mod pace;
mod policy;
mod ranges;
mod readers;
mod refusal;
mod space;
mod tree;
mod xattrs;

pub use self::codec::Damaged;
pub use self::content::State;
pub use self::jobs::{EndedJob, JobCounts, Jobs, Labels};
pub use self::meter::Meter;
pub use self::node::{Attributes, Ino, Kind, NewNode, Owner, ROOT, Time};
pub use self::pace::Pace;
pub use self::policy::{Mode, Policy, Ttl};
pub use self::readers::{Next, ReaderId, Selection};
pub use self::refusal::Refusal;
pub use self::space::saved::{FileMemory, Restored};
pub use self::space::{Access, Figures, HandleId, Reclaim, ReclaimKind, Space, Write};
pub use self::tree::Replace;
pub use self::xattrs::XattrWrite;
