//! What a frame may have at most. What claims more is refused before anything is allocated for it.

use pagoda_core::units::{Bytes, CHUNK_SIZE, PageCount};

/// The one version there is.
pub const PROTOCOL_VERSION: u16 = 1;
/// Bytes of each frame's header.
pub const HEADER_SIZE: usize = 8;
/// A version, a machine type, the name of a VM or of a region, bytes.
pub const TEXT_MAX: usize = 255;
/// The features of a CPU as text, bytes: QEMU knows some 400 names of at most 24 letters.
pub const FEATURES_MAX: usize = 16 << 10;
/// What makes and starts a VM, as JSON, bytes: what the length of a text can say. A launch specification has at most half of it.
pub const SPECIFICATION_MAX: usize = u16::MAX as usize;
/// Regions of a VM: as many as the shim hands over.
pub const REGIONS_MAX: usize = 8;
/// Pages of a VM: 1 TiB, as in an image.
pub const VM_PAGES_MAX: PageCount = PageCount(1 << 28);
/// Reasons of one refusal. There are fewer kinds than that.
pub const REASONS_MAX: usize = 32;
/// What a reason says, and what it says to do, bytes each.
pub const REASON_TEXT_MAX: usize = 512;
/// Device state in one frame, bytes.
pub const STATE_CHUNK_MAX: usize = 256 << 10;
/// The device state of a VM, as in an image: a few MiB, and 64 MiB of a large display's memory.
pub const STATE_MAX: Bytes = Bytes::from_mib(256);
/// Chunks in one frame of a map of pages: 36 KiB.
pub const MAP_CHUNKS_MAX: usize = 1024;
/// Runs of pages in one frame that asks for pages or acknowledges them.
pub const RUNS_MAX: usize = 1024;
/// Content of one run of pages, bytes.
pub const RUN_BYTES_MAX: usize = CHUNK_SIZE as usize;
/// Data streams of a connection.
pub const STREAMS_MAX: u16 = 16;
