//! A stream of bytes that both sides know: what a guest publishes, and what a client is to receive.

use crate::pattern::Pattern;
use crate::{DISK_SEED_DEFAULT, DISK_VERSION, PAGE_SIZE, PAGES_PER_MIB};

/// It comes in blocks of this size.
pub const BLOCK_BYTES: usize = 1 << 20;

/// A file has fewer blocks than 2 to this.
const FILE_BLOCKS_BITS: u32 = 20;

/// Blocks one after another. Each page begins with its number in the stream, so that none passes for another one; the rest is the same in
/// each block, because a guest that computed it all would measure that.
#[derive(Debug)]
pub struct Stream {
    block: Vec<u8>,
    number: u64,
}

impl Stream {
    pub fn new() -> Stream {
        let mut block = vec![0; BLOCK_BYTES];
        let pattern = Pattern::new(DISK_SEED_DEFAULT);
        for (page, bytes) in (0..).zip(block.chunks_exact_mut(PAGE_SIZE)) {
            pattern.content(page, DISK_VERSION).fill_bytes(bytes);
        }
        Stream { block, number: 0 }
    }

    /// Goes on as the stream of a file, from a block of it on: none of its pages is one of another file's. `file` has 34 bits at most.
    pub fn begin(&mut self, file: u64, block: u64) {
        self.number = (file << FILE_BLOCKS_BITS) + block;
    }

    /// The block that [`Stream::next_block`] gave last.
    pub fn block(&self) -> &[u8] {
        &self.block
    }

    /// The next block of the stream, which stays as it is until the call after this.
    pub fn next_block(&mut self) -> &[u8] {
        let first = self.number * PAGES_PER_MIB as u64;
        for (page, bytes) in (first..).zip(self.block.chunks_exact_mut(PAGE_SIZE)) {
            bytes[..size_of::<u64>()].copy_from_slice(&page.to_le_bytes());
        }
        self.number += 1;
        &self.block
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_tell_where_they_are() {
        let mut stream = Stream::new();
        let blocks = [stream.next_block().to_vec(), stream.next_block().to_vec()].concat();
        let numbers: Vec<u64> = blocks
            .chunks_exact(PAGE_SIZE)
            .map(|page| u64::from_le_bytes(page[..8].try_into().expect("eight bytes")))
            .collect();
        assert_eq!(numbers, (0..2 * PAGES_PER_MIB as u64).collect::<Vec<_>>());
        assert!(blocks.chunks_exact(8).filter(|word| *word == [0; 8]).count() < 2, "it has content");
    }

    #[test]
    fn files_have_pages_of_their_own_and_can_be_begun_anywhere() {
        let mut stream = Stream::new();
        let mut first_words = |file, block| {
            stream.begin(file, block);
            let block = stream.next_block().to_vec();
            assert_eq!(block, stream.block());
            block[..8].to_vec()
        };
        assert_eq!(first_words(0, 0), 0_u64.to_le_bytes());
        assert_eq!(first_words(5, 2), ((5_u64 << 28) + 512).to_le_bytes());
        assert_ne!(first_words(1, 0), first_words(2, 0));
    }
}
