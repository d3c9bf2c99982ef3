//! The ledger: the versions of a space's pages, written down before a slab depends on parity.
//!
//! As long as a page has a copy, its version is known from that copy. A page that is put together from other pages has none. What
//! it comes to can be opened only by a client that knows its version. So the versions lie beside the pages, sealed like these, in
//! slabs with two copies. A page of the ledger without content is damage. It never means "no page was written": what is missing
//! there must not read as zeros.
//!
//! A slab's part of the ledger is written by the keeper or owner that makes the parity of its group. It is written before that
//! parity is in the map, and is read by whoever opens the slab afterwards. So nobody reads a part that is being written. When a
//! group has no parity any more, its part is out of date. It is written anew before the group gets parity again.
//!
//! There are few slots for reading and writing the ledger. Nothing begins that would wait for a silent server. A read whose last
//! server falls silent gives its slot back, so that the parts of others go on. A write cannot be taken back, because it may be at
//! a server already. So writes leave half of the slots to reads.

pub mod line;

use super::ops::OWN_MAX;
use super::parity::layout::VERSION_SIZE;
use crate::client::index::SpaceIndex;
use crate::units::{PAGE_SIZE, Page, SlabNo, Version};

use line::Line;

/// How far the versions of a slab are known by the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Table {
    #[default]
    Unknown,
    /// Pages of it that were asked for, and those that came.
    Asked {
        next: usize,
        got: usize,
    },
    Known,
    /// The ledger has no such page, or none that is right.
    Bad,
    /// The last copy of the ledger is gone.
    Gone,
    /// Looked at by who makes parity, and knows the versions from the copies: what is written there already needs no writing.
    Compared {
        next: usize,
        got: usize,
    },
    /// To be written: what is there is something else, or nothing.
    Wanting,
    /// Being written: pages that were begun, and those that all copies have.
    Written {
        next: usize,
        done: usize,
    },
    /// No server has room for it, or it is lost.
    Refused,
}

/// Reads may take all slots, and writes leave the other half to them: who takes a space over is waited for, who makes
/// parity is not.
pub const OWN_WRITES_MAX: usize = OWN_MAX / 2;

/// Slabs whose part of the ledger is to be read or written.
#[derive(Debug, Default)]
pub struct Ledger {
    pub reads: Line,
    pub writes: Line,
}

impl Ledger {
    /// What was to be written for a space that is somebody else's.
    pub fn end_writes(&mut self, space: SpaceIndex) {
        self.writes.forget_space(space);
    }

    /// The same for all that was to be done.
    pub fn forget(&mut self, space: SpaceIndex) {
        self.reads.forget_space(space);
        self.writes.forget_space(space);
    }

    /// Whoever waits may be answered.
    pub fn wake(&mut self) {
        self.reads.wake();
        self.writes.wake();
    }
}

/// A part of a table, as a page.
pub fn encode(versions: &[Version]) -> Page {
    let mut page = [0; PAGE_SIZE];
    for (bytes, version) in page.chunks_exact_mut(VERSION_SIZE).zip(versions) {
        bytes.copy_from_slice(&version.bits().to_le_bytes());
    }
    page
}

pub fn decode(page: &Page, versions: &mut [Version]) {
    for (bytes, version) in page.chunks_exact(VERSION_SIZE).zip(versions) {
        let mut bits = [0; VERSION_SIZE];
        bits.copy_from_slice(bytes);
        *version = Version::from_bits(u64::from_le_bytes(bits));
    }
}

/// What an operation of its own is about.
pub fn token(slab: SlabNo, part: usize) -> u64 {
    u64::from(slab.0) << 32 | part as u64
}

pub fn slab_and_part(token: u64) -> (SlabNo, usize) {
    (SlabNo((token >> 32) as u32), token as u32 as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::parity::layout::VERSIONS_A_PAGE;
    use crate::units::Generation;

    #[test]
    fn a_table_is_read_as_it_was_written() {
        let versions: Vec<Version> =
            (0..VERSIONS_A_PAGE as u64).map(|n| Version::new(Generation(n as u32), n, n % 3 == 0)).collect();
        let mut back = vec![Version::NEVER; VERSIONS_A_PAGE];
        decode(&encode(&versions), &mut back);
        assert_eq!(back, versions);
        // The last one of a small slab.
        let mut few = [Version::NEVER; 8];
        decode(&encode(&versions[8..16]), &mut few);
        assert_eq!(few, versions[8..16]);
    }
}
