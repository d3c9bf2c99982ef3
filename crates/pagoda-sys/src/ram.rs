//! A VM's RAM file, a sealed memfd, and the daemon's own mapping of it ([`RamView`]).
//!
//! Existence of a page in the file *is* residence in DRAM: a hole is a page that is out or was never touched. So
//! nothing here may touch a hole by accident: the view's readers and writers allocate the page they touch, and their
//! callers guarantee that it exists. [`RamFile::next_data`] and [`RamFile::data_runs`] look without touching.
//!
//! The file lives as long as anyone holds it: VMM, shim or daemon. It is sealed against changes of size, so that no
//! peer can make a view raise SIGBUS.

mod file;
mod view;
mod words;

pub(crate) use file::TMPFS_MAGIC;
pub use file::{DataRuns, RamError, RamFile};
pub use view::{IoTarget, LargeFolios, RamView};
pub use words::WordTable;

#[cfg(test)]
mod tests;
