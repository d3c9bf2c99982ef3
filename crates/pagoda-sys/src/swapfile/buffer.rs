//! Memory that begins at a page boundary, as direct I/O wants it.

use std::ops::{Deref, DerefMut, Range};

use crate::PAGE_SIZE;

/// Bytes that begin at a page of memory, all zero at first.
#[derive(Debug)]
pub struct DirectBuffer {
    bytes: Vec<u8>,
    aligned: Range<usize>,
}

impl DirectBuffer {
    /// Makes a buffer of so many bytes.
    pub fn new(len: usize) -> DirectBuffer {
        let bytes = vec![0; len + PAGE_SIZE];
        let start = bytes.as_ptr().align_offset(PAGE_SIZE);
        DirectBuffer { aligned: start..start + len, bytes }
    }
}

impl Deref for DirectBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.aligned.clone()]
    }
}

impl DerefMut for DirectBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.aligned.clone()]
    }
}
