//! The files of a snapshot: an *image* of a VM's memory and device state.
//!
//! An image is a directory with four files: what it is of ([`Manifest`]), QEMU's state, where each page is ([`Entry`]), and the
//! pages. Beside them may be a record of what a VM of it needed first ([`Touched`]). Their formats are in `docs/snapshot-files.md`. A VM's memory is in it from the moment it begins to exist, although it
//! has no page then: the VM holds them for it, unchanged, until the engine has given it a copy of each.
//!
//! | who | has | does |
//! |---|---|---|
//! | the daemon | [`Store`], [`Part`], [`Ledger`] | makes, lists, removes; says what is filled and durable |
//! | the engine | [`Prepared`], [`Writer`] | begins the image; takes over pages; says what is lost |
//! | a restore, a verification | [`Image`] | reads |
//!
//! **Limits.** One daemon at a time uses a directory of images; nothing here locks it. Any file may be damaged, or made by
//! somebody: it is refused with the place of it, and no size in it is believed before it is checked ([`limits`]).
//!
//! **What fails.** Whoever dies leaves a whole image or none. If the disk fails while the VM runs, the image is lost and the VM
//! is not. What a host's crash leaves is an image only if it was [`Stage::Durable`].

mod adopt;
mod chain;
pub mod checked_text;
pub mod cpu;
mod damage;
mod diff;
mod disk;
mod entry;
pub mod export;
mod files;
mod id;
mod image;
mod layer;
mod ledger;
mod lengths;
pub mod limits;
mod manifest;
mod map;
mod part;
mod room;
mod store;
mod touched;
mod verify;
mod write_back;
mod writer;

pub use damage::{Damage, ImageError, ImageFile};
pub use diff::{Diff, DiffError};
pub use disk::{Disk, LinuxDisk};
pub use entry::{BlockIdx, ENTRY_SIZE, Entry, sum_of};
pub use id::{ImageId, NoId};
pub use image::{ChunkContent, Content, Image};
pub use ledger::Ledger;
pub use manifest::{DiskFile, Import, Manifest, Qemu, Stage, State, is_file_name};
pub use part::Part;
pub use room::{NoRoom, Room, RoomLimits, check_room, needed};
pub use store::{Listed, Listing, Store};
pub use touched::{Touched, TouchedRun};
pub use verify::Report;
pub use writer::{Loss, Prepared, Taken, Writer};
