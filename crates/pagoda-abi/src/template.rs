//! The template of a snapshot: what clones read of its memory.
//!
//! It is a memfd that the daemon fills as a whole, and seals against writes and changes of size before anybody else gets it.
//! It has no holes: whoever reads one would make a page there. So it has the chunks that are borrowed one after the other, and
//! the table of which they are:
//!
//! ```text
//! offset                 bytes      field
//! slot * 1 MiB           1 MiB      the chunk of this slot
//! slots * 1 MiB          4 x slots  u32: index of each slot's chunk in the VM's space, each larger than the one before
//! ...                    ..         zero, up to whole pages behind the trailer
//! length - 16            8          magic "PGDtmpl1"
//! length - 8             4          slots u32
//! length - 4             4          zero
//! ```
//!
//! The VM's space is its regions, one after the other.

use crate::{CHUNK_SIZE, PAGE_SIZE};

/// At the beginning of the trailer.
pub const MAGIC: [u8; 8] = *b"PGDtmpl1";
/// Bytes of the trailer.
pub const TRAILER: usize = 16;
/// Bytes of one entry of the table.
pub const ENTRY: usize = 4;

/// Where the table of a template with so many slots begins.
pub const fn table_at(slots: u32) -> u64 {
    slots as u64 * CHUNK_SIZE as u64
}

/// Length of a template with so many slots.
pub const fn len_of(slots: u32) -> u64 {
    let end = table_at(slots) + slots as u64 * ENTRY as u64 + TRAILER as u64;
    end.div_ceil(PAGE_SIZE as u64) * PAGE_SIZE as u64
}

/// The trailer of a template with so many slots.
pub fn trailer(slots: u32) -> [u8; TRAILER] {
    let mut bytes = [0; TRAILER];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&slots.to_le_bytes());
    bytes
}

/// Slots of a template of this length and trailer. `None`: it is no template.
pub fn slots(len: u64, bytes: &[u8; TRAILER]) -> Option<u32> {
    let slots = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
    (*bytes == trailer(slots) && len == len_of(slots)).then_some(slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trailer_says_how_many_slots_there_are() {
        for count in [0, 1, 2, 1019, 1020, 1021, 1 << 20] {
            let len = len_of(count);
            assert_eq!(slots(len, &trailer(count)), Some(count));
            assert_eq!(slots(len + 4096, &trailer(count)), None);
            assert!(len.is_multiple_of(4096) && len >= table_at(count) + u64::from(count) * 4 + 16);
        }
        let mut other = trailer(3);
        other[15] = 1;
        assert_eq!(slots(len_of(3), &other), None);
    }
}
