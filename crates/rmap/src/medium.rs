//! Where the server of an overflow disk keeps its pages: on the disk instead of in memory. The server knows it by this
//! trait.

use std::fmt;
use std::io::Result;

use crate::units::Page;

/// Room for pages, by their index.
pub trait Medium: fmt::Debug + Send {
    /// # Errors
    /// The page cannot be had, and nothing else that is in this medium's slab is counted on.
    fn read(&mut self, index: u64, page: &mut Page) -> Result<()>;

    /// # Errors
    /// As [`Medium::read`].
    fn write(&mut self, index: u64, page: &Page) -> Result<()>;
}
