//! An entry of an image's map: where one page of the VM is.
//!
//! | bits | meaning |
//! |---|---|
//! | 0-3 | kind: 0 missing, 1 zero, 2 block, 3 the parent's |
//! | 4-31 | number of the block in `pages`; 0 if the kind is not 2 |
//! | 32-63 | kind 2: checksum of the content; kind 3: of the image's name; else 0 |
//!
//! The checksum is the low half of XXH3-64 with the page's number as its seed. So it also tells a page from another one of the
//! same image, whose entry or block stands where this one's should. An entry of kind 3 has no content to compare, so it has the
//! checksum of its own image's name with that seed: one of another image or another page is refused, not believed.

use pagoda_core::units::{Bytes, PAGE_SIZE, PageIdx};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::id::ImageId;
use crate::limits::IMAGE_PAGES_MAX;

/// Bytes of an entry.
pub const ENTRY_SIZE: usize = 8;
const KIND_BITS: u32 = 4;
const ZERO: u64 = 1;
const BLOCK: u64 = 2;
const PARENT: u64 = 3;
const _: () = assert!(IMAGE_PAGES_MAX.0 == 1 << (32 - KIND_BITS));
/// What no version writes: its page is not to be had.
pub(crate) const POISON: u64 = u64::MAX;

/// A block of `pages` by its number: the bytes from `4096 * number` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockIdx(pub u32);

impl BlockIdx {
    /// Where it starts in `pages`.
    pub const fn offset(self) -> Bytes {
        Bytes(self.0 as u64 * PAGE_SIZE)
    }
}

/// Where one page of the VM is, as an entry of the map says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// The VM still has the page, unchanged: the image owns it and has no copy.
    Missing,
    /// All bytes are zero.
    Zero,
    /// The image has a copy in this block. `sum`: the checksum of its content.
    Block { block: BlockIdx, sum: u32 },
    /// What the image's parent has of the page. `seal`: [`seal_of`] the page in this image.
    Parent { seal: u32 },
}

impl Entry {
    /// As it is in the file, in the byte order of this machine.
    pub const fn encode(self) -> u64 {
        match self {
            Entry::Missing => 0,
            Entry::Zero => ZERO,
            Entry::Block { block, sum } => {
                assert!((block.0 as u64) < IMAGE_PAGES_MAX.0);
                BLOCK | (block.0 as u64) << KIND_BITS | (sum as u64) << 32
            }
            Entry::Parent { seal } => PARENT | (seal as u64) << 32,
        }
    }

    /// Reads what [`Entry::encode`] has made.
    ///
    /// # Errors
    /// What no version up to this one writes, in words.
    pub fn decode(bits: u64) -> Result<Entry, String> {
        let kind = bits & ((1 << KIND_BITS) - 1);
        match kind {
            0 if bits == 0 => Ok(Entry::Missing),
            ZERO if bits == ZERO => Ok(Entry::Zero),
            0 | ZERO => Err(format!("entry {bits:#018x} of kind {kind} has more than its kind")),
            BLOCK => Ok(Entry::Block { block: BlockIdx(bits as u32 >> KIND_BITS), sum: (bits >> 32) as u32 }),
            PARENT if bits as u32 == PARENT as u32 => Ok(Entry::Parent { seal: (bits >> 32) as u32 }),
            PARENT => Err(format!("entry {bits:#018x} of kind {kind} has a block")),
            _ => Err(format!("entry {bits:#018x} is of kind {kind}, which this version does not know")),
        }
    }
}

/// Where a page's entry starts in `map`.
pub const fn entry_offset(page: PageIdx) -> u64 {
    page.0 * ENTRY_SIZE as u64
}

/// What an entry of kind 3 for this page has in its upper half, in the map of this image.
pub(crate) fn seal_of(image: ImageId, page: PageIdx) -> u32 {
    xxh3_64_with_seed(&image.0.to_le_bytes(), page.0) as u32
}

/// The checksum of a page's content.
pub fn sum_of(page: PageIdx, content: &[u8]) -> u32 {
    xxh3_64_with_seed(content, page.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn entries_have_the_bits_of_the_table() {
        let check = |entry: Entry, bits: u64| {
            assert_eq!(entry.encode(), bits, "{entry:?}");
            assert_eq!(Entry::decode(bits), Ok(entry));
        };
        check(Entry::Missing, 0);
        check(Entry::Zero, 1);
        check(Entry::Block { block: BlockIdx(0), sum: 0 }, 2);
        check(Entry::Block { block: BlockIdx(0x123_4567), sum: 0x89ab_cdef }, 0x89ab_cdef_1234_5672);
        check(Entry::Block { block: BlockIdx((1 << 28) - 1), sum: u32::MAX }, 0xffff_ffff_ffff_fff2);
        check(Entry::Parent { seal: 0x89ab_cdef }, 0x89ab_cdef_0000_0003);
    }

    #[test]
    fn what_nobody_writes_is_refused() {
        for bits in [0x10, 1 << 32, 0x11, 1 << 32 | 1, 0x13, 4, 15, POISON] {
            assert!(Entry::decode(bits).is_err(), "{bits:#x}");
        }
    }

    #[test]
    fn a_checksum_is_of_one_page() {
        let content = [7; PAGE_SIZE as usize];
        // By the reference implementation.
        assert_eq!(sum_of(PageIdx(0), &content), 0x74b6_859d);
        assert_eq!(sum_of(PageIdx(1), &content), 0xdfa6_7e74);
        let seals = [(1, 0), (1, 1), (2, 0)].map(|(image, page)| seal_of(ImageId(image), PageIdx(page)));
        assert!(seals[0] != seals[1] && seals[0] != seals[2]);
    }

    proptest! {
        #[test]
        fn any_bits_are_one_entry_or_none(bits in any::<u64>()) {
            if let Ok(entry) = Entry::decode(bits) {
                prop_assert_eq!(entry.encode(), bits);
            }
        }
    }
}
