//! The size of a slab: its pages, and the memory that it takes.

use rmap::units::{PAGE_SIZE, SEALED_SIZE, SLAB_PAGES};

/// The pages of a slab.
pub const SLAB_CONTENT_BYTES: u64 = SLAB_PAGES as u64 * PAGE_SIZE as u64;
/// What a slab takes at a server: its sealed pages, and their versions.
pub const SLAB_BYTES: u64 = SLAB_PAGES as u64 * (SEALED_SIZE as u64 + 8);
