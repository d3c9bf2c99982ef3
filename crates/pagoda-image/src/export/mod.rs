//! A snapshot as one file that stands alone: the [format](../../../docs/snapshot-export.md), its writer and its reader.
//!
//! | who | uses | does |
//! |---|---|---|
//! | an export | [`export()`] | reads an image with all that it refers to, and gives the file's bytes in order |
//! | an import | [`Importing`] | reads such bytes, which may be anybody's, and makes an image that is durable |
//! | an export for plain QEMU | [`qemu::export`] | gives a migration stream with all of the memory in it |
//!
//! The format itself (`format.rs`, `chunk.rs`, [`Reader`]) is pure: bytes in, bytes or an error out. A file is hostile until it
//! was checked: every length in it has a limit with a name, is compared with it before anything is allocated, and what is wrong is
//! named with its place. Nothing of an import can be seen before all of the file was found to be right.

mod chunk;
mod export_image;
mod format;
mod import_image;
mod pack;
pub mod qemu;
mod reader;
mod sums;

pub use self::chunk::Level;
pub use self::export_image::{ExportFailed, Exported, export};
pub use self::format::{
    CHUNK_PAYLOAD_MAX, END_PAYLOAD, FEATURES_KNOWN, HEADER_SIZE, MAGIC, RECORD_HEADER_SIZE, STATE_PIECE_MAX, VERSION,
};
pub use self::import_image::{ImportError, Imported, Importing};
pub use self::reader::{Fault, FileError, Piece, Reader, Totals};
