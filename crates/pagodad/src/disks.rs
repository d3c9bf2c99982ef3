//! The content of a VM's disks in its snapshots.
//!
//! A disk is a qcow2 file `P`, as its user's command line names it. A snapshot with the id `S` makes two names beside it:
//!
//! | name | what it is |
//! |---|---|
//! | `P.pagoda-S` | the *layer*: a second name of the file that QEMU writes until then, which nobody writes from then on |
//! | `P.pagoda-top-S` | an empty overlay on the layer, which QEMU writes from then on |
//!
//! QEMU opens a file again by the name that it opened it with: the layer, when it is no longer written. So `P` stays what it
//! is while QEMU lives. When it has ended, the newest overlay is renamed to `P` ([`settle()`]), and the same command line starts
//! with the newest content, also without Pagoda. The VM's record names the overlay, on the disk, before QEMU gets it
//! ([`crate::record::MovedDisk`]). An overlay that QEMU never got is empty on the file that QEMU wrote: the same content.
//! So it is right to rename whichever is the newest, whoever died when.
//!
//! The directory is the user's. Everything in it is done with the rights of the user whose QEMU it is ([`user`]), and `qemu-img`
//! runs as that user. What a name stands for is a file that was noted if that
//! is a fact ([`crate::record::Noted`]).

mod child;
mod copied;
mod dir;
mod found;
mod layer;
mod limits;
mod map;
mod new_image;
mod overlay;
mod qemu_img;
mod restored;
mod settle;
mod sizes;
mod stat;
mod taken;
mod unsettled;
mod unused;
mod user;
mod words;

pub use copied::{CopiedDisk, find_copied};
pub use dir::Dir;
pub use found::{Found, check_all_open, find};
pub use layer::{NotedLayer, noted, sync_layers};
#[cfg(test)]
pub use new_image::Format;
pub use new_image::NewImage;
pub use restored::{Restored, check_restore, keep_aside, names_disk};
pub use settle::{in_use, settle};
pub use sizes::LayerSizes;
pub use stat::Stat;
pub use taken::Taking;
pub use unsettled::Unsettled;
pub use unused::unused;
pub use user::User;
