//! What disks in snapshots may be at most.

use std::time::Duration;

/// Disks of one VM that snapshots have.
pub const DISKS_MAX: usize = 16;
/// Files of one disk, one behind the other: QEMU opens each, and a read may go through all of them.
pub const CHAIN_MAX: u64 = 32;
/// How long `qemu-img` may take. It makes or reads a few headers.
pub const QEMU_IMG_MAX: Duration = Duration::from_secs(30);
/// What it may say: the descriptions of [`CHAIN_MAX`] files.
pub const QEMU_IMG_OUTPUT_MAX: usize = 4 << 20;
/// Parts of a disk that are gone through, as `qemu-img map` says them, until one is found that is the disk's own.
pub const MAP_PARTS_MAX: usize = 4_000_000;
/// Longest name of a file (`NAME_MAX` of Linux).
pub const NAME_MAX: usize = 255;
/// Files that are kept aside for one restore of one disk.
pub const ASIDE_MAX: u32 = 100;
