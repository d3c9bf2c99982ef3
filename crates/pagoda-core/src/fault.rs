//! The fault state machine of one VM: where every page is, what is under way, what to do next.
//!
//! [`Machine::apply`] takes an [`Event`] and appends [`Action`]s; it does no I/O, takes no lock and reads no clock. The
//! pager executes the actions in order and reports what became of the asynchronous ones as further events. One thread owns
//! the machine, so "the chunk is locked" is simply "the machine has not been told yet".
//!
//! # What a page is
//!
//! Four bits a page, kept as sets per chunk ([`table::Chunk`]):
//!
//! | `ram` | `clean` | `shared` | `swap` | the page's content is |
//! |---|---|---|---|---|
//! | 0 | 0 | 0 | 0 | zero: a hole in both files |
//! | 0 | 0 | 0 | 1 | in swap |
//! | 0 | 0 | 1 | any | a frame of the share group; what swap holds is outdated |
//! | 1 | 0 | 0 | any | in the RAM file; what swap holds is outdated |
//! | 1 | 1 | 0 | any | in the RAM file, and swap equals it (a hole equals zeros) |
//!
//! Of a *borrowed* chunk none of these is true: the VMM reads it in a template, and what it has written there is *private*
//! (`borrow.rs`).
//!
//! Of a VM that runs before all its pages have come from another host, some in swap are *missing*: a read of one may take long. It
//! is begun for a fault on that page alone, and no other read has the page in it.
//!
//! A clean page is mapped write-protected or not at all; its first write is a fault that ends its cleanness. So is a *frozen*
//! page, whose content an image owns (`image.rs`).
//!
//! # Orders that lose nothing
//!
//! * **Out**: zap the chunk, nothing faults on it, every direct I/O in flight began after the zap (the pin rule) -> write the
//!   dirty pages -> all complete -> declare the intent -> punch -> look whether the hole is there -> withdraw. A fault on a
//!   page before the punch takes the page out of the set that will be punched; but while others wait for room, it waits too.
//! * **In, one page**: read into a buffer, `UFFDIO_COPY`. **In, a whole empty chunk** (large folios): declare the intent,
//!   read straight into the hole, withdraw, `UFFDIO_CONTINUE`. No page is continued before its content is complete.
//! * **Share** (`share.rs`): under the conditions of **Out**; what it looks at cannot change. Entry -> intent -> punch ->
//!   look -> withdraw. **Back**: `UFFDIO_COPY` -> clear the entry -> drop the reference.
//! * **Discard**: waits until nothing is under way on the chunk; the swap block goes before the RAM page, or a crash would
//!   bring old bytes back.
//! * **Image**: nobody writes -> protect -> frozen. **A frozen page**: its content is in memory -> preserve -> only then let it
//!   be written, or dropped. One that only a block has is read first; if it changed meanwhile, the read is not used.
//! * **Own**: protect the borrowed chunk as a whole -> every direct I/O in flight began after that, and nobody has written
//!   to it since -> what differs from the template goes into the RAM file -> the RAM file is mapped in its place.
//! * Every message may be stale. The state decides, never the message.
//!
//! A punch that was asked for cannot be taken back: faults on its pages wait for its end.
//!
//! # When something fails
//!
//! A failed read or write stalls the VM ([`Stall`]): nothing is lost, faults that can be answered are answered, the others
//! wait for [`Event::Continue`]. The guest sees a long stall, never a wrong page.

mod action;
mod background;
mod borrow;
mod complete;
mod curve;
mod discard;
mod headroom;
mod heat;
mod image;
mod machine;
mod map;
mod moving;
mod ops;
mod prefetch;
mod reclaim;
mod serve;
mod share;
mod state;
pub mod table;
mod watch;

pub use action::{
    Access, Action, Actions, Event, FaultKind, Found, IoError, Now, OpId, Pages, Refusal, Served, Source, Stall,
};
pub use headroom::{headroom_at, headroom_max, page_out_leaves};
pub use heat::ChunkOrder;
pub use machine::{Config, Machine, PageInPolicy, Replacement};
pub use ops::{COPY_READS_MAX, FILLS_MAX, KEEPS_MAX, OPS_MAX, OUTS_MAX, OWNS_MAX, ZAP_BATCH};
pub use state::share::Sharing;
pub use table::Located;
pub use watch::WATCH_ZAP_BATCH;

#[cfg(test)]
mod tests;
