//! What an image may be at most. Files that claim more are refused before anything is allocated for them.

use pagoda_core::units::{Bytes, PageCount};

/// Images of one VM. Each unshared page of a running VM may be in all of them.
pub const SNAPSHOTS_PER_VM_MAX: usize = 16;
/// Images that refer one to the other, the first and the last counted: as many as a reader opens for one of them. A page's
/// place in them fits into a byte.
pub const CHAIN_MAX: usize = 32;
/// Images of a host.
pub const SNAPSHOTS_MAX: usize = 256;
/// The device state of a VM, which QEMU sends without its RAM: a few MiB, and 64 MiB of a large display's memory.
pub const STATE_BYTES_MAX: Bytes = Bytes::from_mib(256);
/// The longest manifest that is read or written, in bytes.
pub const MANIFEST_MAX: usize = 64 << 10;
/// What a new manifest leaves free of [`MANIFEST_MAX`], so that a stage, a pause and a `why` always fit in later.
pub const MANIFEST_RESERVE: usize = 4 << 10;
/// The reason for a loss, bytes: in JSON a byte takes at most six.
pub const WHY_MAX: usize = 512;
/// Pages of a VM, and blocks of an image: an entry of the map has 28 bits for a block's number. 1 TiB.
pub const IMAGE_PAGES_MAX: PageCount = PageCount(1 << 28);
/// Runs of pages in the record of what a VM needed first: a file of 512 KiB. Where every page of it is alone, that is 256 MiB.
pub const TOUCHED_RUNS_MAX: usize = 1 << 16;
/// Entries of the directory of images that are looked at: several times what the limits above can make.
pub const LISTED_MAX: usize = 4 * SNAPSHOTS_MAX;
/// Places of damage that a verification names; it counts the others.
pub const DAMAGES_MAX: usize = 64;
