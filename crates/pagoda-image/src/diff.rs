//! Which pages differ between two images of a VM, by what their maps say.
//!
//! No page is read. Two pages are the same if both are zero, if both are one block of one image, or if their checksums are equal.
//! A checksum has 32 bits. So of four thousand million pages that differ, one is taken for the same. That is good enough, because
//! the result is only told to a user.

use pagoda_core::units::{CHUNK_PAGES, ChunkIdx};

use crate::damage::ImageError;
use crate::entry::Entry;
use crate::id::ImageId;
use crate::image::Image;

/// How many pages of a VM differ between two of its images.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Diff {
    pub pages: u64,
    /// Other content than before, and not zero in either.
    pub changed: u64,
    /// Zero in the first, and not in the second.
    pub filled: u64,
    /// Zero in the second, and not in the first.
    pub cleared: u64,
}

/// Why two images are not compared.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    #[error("they are of VMs with other memory")]
    OtherMemory,
    #[error("{image} has no content of page {page} yet")]
    Missing { image: ImageId, page: u64 },
    #[error("the map of {image} cannot be read")]
    Unreadable { image: ImageId, source: ImageError },
}

impl Diff {
    /// Compares two images of VMs with the same regions.
    ///
    /// # Errors
    /// They cannot be compared; a map is damaged or cannot be read: where.
    pub fn between(first: &Image, second: &Image) -> Result<Diff, DiffError> {
        let (a, b) = (first.manifest(), second.manifest());
        if a.regions != b.regions {
            return Err(DiffError::OtherMemory);
        }
        let pages = a.pages().0;
        let mut diff = Diff { pages, ..Diff::default() };
        for chunk in (0..first.chunks().0).map(ChunkIdx) {
            let places = |image: &Image| {
                let image_id = image.manifest().id;
                image.places_of(chunk).map_err(|source| DiffError::Unreadable { image: image_id, source })
            };
            let (before, after) = (places(first)?, places(second)?);
            for (index, (before, after)) in (0..CHUNK_PAGES).zip(before.iter().zip(&after)) {
                let page = chunk.first_page().0 + index;
                if page < pages {
                    diff.count(*before, *after)
                        .map_err(|side| DiffError::Missing { image: [a.id, b.id][side], page })?;
                }
            }
        }
        Ok(diff)
    }

    /// All pages that differ.
    pub fn differing(&self) -> u64 {
        self.changed + self.filled + self.cleared
    }

    /// Errors: which of the two has no content of the page.
    fn count(&mut self, before: (ImageId, Entry), after: (ImageId, Entry)) -> Result<(), usize> {
        match (before.1, after.1) {
            (Entry::Missing | Entry::Parent { .. }, _) => return Err(0),
            (_, Entry::Missing | Entry::Parent { .. }) => return Err(1),
            (Entry::Zero, Entry::Zero) => {}
            (Entry::Zero, Entry::Block { .. }) => self.filled += 1,
            (Entry::Block { .. }, Entry::Zero) => self.cleared += 1,
            (Entry::Block { block, sum }, Entry::Block { block: other, sum: other_sum }) => {
                let is_same = (before.0, block) == (after.0, other) || sum == other_sum;
                self.changed += u64::from(!is_same);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::BlockIdx;

    #[test]
    fn pages_are_compared_by_place_and_checksum() {
        let (a, b) = (ImageId(1), ImageId(2));
        let block = |block, sum| Entry::Block { block: BlockIdx(block), sum };
        let check = |before, after, expected: Result<[u64; 3], usize>| {
            let mut diff = Diff::default();
            let counted = diff.count(before, after).map(|()| [diff.changed, diff.filled, diff.cleared]);
            assert_eq!(counted, expected, "{before:?} {after:?}");
        };
        check((a, Entry::Zero), (b, Entry::Zero), Ok([0, 0, 0]));
        check((a, Entry::Zero), (b, block(0, 7)), Ok([0, 1, 0]));
        check((a, block(0, 7)), (b, Entry::Zero), Ok([0, 0, 1]));
        check((a, block(0, 7)), (a, block(0, 7)), Ok([0, 0, 0]));
        check((a, block(0, 7)), (b, block(5, 7)), Ok([0, 0, 0]));
        check((a, block(0, 7)), (b, block(0, 8)), Ok([1, 0, 0]));
        check((a, Entry::Missing), (b, Entry::Zero), Err(0));
        check((a, Entry::Zero), (b, Entry::Missing), Err(1));
    }
}
