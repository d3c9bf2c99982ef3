//! What a guest may make grow, and how far. Each limit exists because the other side of it is memory or time of the host.

/// Files and directories together, also those that have no name any more. Each file may need a descriptor of the server.
pub const NODES_MAX: usize = 4096;
/// Open files of the guest.
pub const HANDLES_MAX: usize = 8192;
/// Bytes of one name, as in Linux (`NAME_MAX`).
pub const NAME_BYTES_MAX: usize = 255;
/// Directories below one another.
pub const DEPTH_MAX: usize = 16;
/// End of the last byte of a file. A stream may be far longer than the space.
pub const FILE_BYTES_MAX: u64 = 1 << 42;
/// Pieces of a file with holes between them.
pub const EXTENTS_MAX: usize = 1024;
/// Writes of one file that are under way. The server has fewer threads.
pub const WRITES_MAX: usize = 256;
/// Extended attributes of one file or directory.
pub const XATTRS_MAX: usize = 16;
/// Bytes of the names and values of one file's extended attributes.
pub const XATTR_BYTES_MAX: usize = 4096;
/// Bytes of the name of an extended attribute, as in Linux (`XATTR_NAME_MAX`).
pub const XATTR_NAME_BYTES_MAX: usize = 255;
/// Deliveries that a file may need before its memory is given back.
pub const DELIVERIES_MAX: u8 = 16;
/// Readers that are attached at the same time.
pub const READERS_MAX: usize = 256;
/// Pieces that deliveries of a file consist of. What a further piece would add is not noted, so memory stays longer.
pub const DELIVERED_PIECES_MAX: usize = 64;

/// Jobs that have ended and are kept for the daemon, which asks every second. What it has not asked for until then is lost.
pub const JOBS_KEPT_MAX: usize = 1024;
/// Bytes of a job's label that are kept.
pub const LABEL_BYTES_MAX: usize = 32;

/// Memory is given out and taken back in pages of this size.
pub const PAGE_BYTES: u64 = 4096;

/// The start of the page that `at` is in.
pub(crate) fn page_floor(at: u64) -> u64 {
    at / PAGE_BYTES * PAGE_BYTES
}

/// The end of the page that `at` is in, or `at` between two pages.
pub(crate) fn page_ceil(at: u64) -> u64 {
    at.div_ceil(PAGE_BYTES) * PAGE_BYTES
}
