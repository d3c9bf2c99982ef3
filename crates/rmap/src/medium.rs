//! Where a server of last resort keeps its pages: a disk instead of memory. The server knows it by this trait.

use std::fmt;
use std::io::Result;

use crate::units::Page;

/// Room for pages, by their places.
pub trait Medium: fmt::Debug + Send {
    /// # Errors
    /// The page cannot be had, and nothing else that is in this medium's slab is counted on.
    fn read(&mut self, place: u64, page: &mut Page) -> Result<()>;

    /// # Errors
    /// As [`Medium::read`].
    fn write(&mut self, place: u64, page: &Page) -> Result<()>;
}
