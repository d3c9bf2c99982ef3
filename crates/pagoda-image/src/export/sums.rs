//! The numbers of the end marker: how many pages and bytes came before it, and a checksum over all of that.

use pagoda_core::units::CHUNK_PAGES;
use xxhash_rust::xxh3::Xxh3;

use super::format::{END_PAYLOAD, get_u64};

/// Counted while a file is written, and again while it is read.
#[derive(Clone, Default)]
pub(crate) struct Sums {
    /// Number of pages that have content.
    pub(crate) blocks: u64,
    /// Pages that are zero.
    pub(crate) zeros: u64,
    /// Bytes of the file.
    pub(crate) bytes: u64,
    /// Of the checksums of the header and of all records, in order.
    chain: Xxh3,
}

impl std::fmt::Debug for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sums({} pages, {} zero, {} bytes)", self.blocks, self.zeros, self.bytes)
    }
}

impl Sums {
    /// A header or a record of so many bytes, by its checksum.
    pub(crate) fn add(&mut self, len: usize, sum: u64) {
        self.bytes += len as u64;
        self.chain.update(&sum.to_le_bytes());
    }

    /// A chunk of which so many pages have content.
    pub(crate) fn add_chunk(&mut self, blocks: u64) {
        self.blocks += blocks;
        self.zeros += CHUNK_PAGES - blocks;
    }

    /// The payload of the end marker.
    pub(crate) fn encode(&self) -> [u8; END_PAYLOAD] {
        let mut bytes = [0; END_PAYLOAD];
        let numbers = [self.blocks, self.zeros, self.bytes, self.chain.digest()];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// Compares this with an end marker.
    ///
    /// # Errors
    /// What differs.
    pub(crate) fn check(&self, payload: &[u8]) -> Result<(), String> {
        let own = self.encode();
        let names = ["pages with content", "zero pages", "bytes before it", "checksum of all records"];
        for (at, name) in (0..).step_by(8).zip(names) {
            let (said, found) = (get_u64(payload, at), get_u64(&own, at));
            if said != found {
                return Err(format!("the end says {said} for the {name}, and {found} is found"));
            }
        }
        Ok(())
    }
}
