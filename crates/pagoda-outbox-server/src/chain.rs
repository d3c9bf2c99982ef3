//! Requests that are in no ring: those that an earlier process has taken out of it, and the one that tells the file server what
//! was agreed at the mount. A small ring of our own has them, for the library takes requests out of rings alone.

use std::io::{self, ErrorKind};

use vhost_user_backend::bitmap::BitmapMmapRegion;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap};

use crate::inflight::HEADS_MAX;

/// A guest's memory, as the library has it.
pub type Memory = GuestMemoryMmap<BitmapMmapRegion>;

/// Bytes of a descriptor (virtio 1.2, 2.7.5).
const DESCRIPTOR_BYTES: u64 = 16;
const NEXT: u16 = 1;
const INDIRECT: u16 = 4;
/// Flag of a descriptor that the device writes.
pub const WRITE: u16 = 2;

/// Where the small ring's parts are.
const AVAILABLE: u64 = DESCRIPTOR_BYTES * HEADS_MAX as u64;
const USED: u64 = AVAILABLE + 0x1000;
/// Behind it is room for a request's own bytes.
pub const DATA: u64 = USED + 0x3000;
const BYTES: usize = DATA as usize + 0x2000;

/// Where bytes of a request are, in the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub address: u64,
    pub length: u32,
    /// [`WRITE`] if the device writes these bytes, else 0.
    pub flags: u16,
}

fn invalid() -> io::Error {
    ErrorKind::InvalidData.into()
}

/// The parts of the request that begins at `head` of a table of `size` descriptors. All of it may be anything.
pub fn parts(memory: &impl GuestMemory, table: u64, size: u16, head: u16) -> io::Result<Vec<Part>> {
    let (mut table, mut size, mut at, mut is_indirect) = (table, u64::from(size), u64::from(head), false);
    let mut parts = Vec::new();
    while parts.len() < usize::from(HEADS_MAX) {
        if at >= size {
            return Err(invalid());
        }
        let mut bytes = [0; DESCRIPTOR_BYTES as usize];
        let place =
            at.checked_mul(DESCRIPTOR_BYTES).and_then(|offset| table.checked_add(offset)).ok_or_else(invalid)?;
        memory.read_slice(&mut bytes, GuestAddress(place)).map_err(|_| invalid())?;
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = bytes;
        let address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        let (length, flags) = (u32::from_le_bytes([l0, l1, l2, l3]), u16::from_le_bytes([f0, f1]));
        if flags & INDIRECT != 0 {
            if is_indirect {
                return Err(invalid());
            }
            (table, size, at, is_indirect) = (address, u64::from(length) / DESCRIPTOR_BYTES, 0, true);
            continue;
        }
        parts.push(Part { address, length, flags: flags & WRITE });
        if flags & NEXT == 0 {
            return Ok(parts);
        }
        at = u64::from(u16::from_le_bytes([n0, n1]));
    }
    Err(invalid())
}

/// A ring of our own with one request.
#[derive(Debug)]
pub struct OwnRing {
    pub memory: Memory,
    queue: Queue,
}

impl OwnRing {
    /// With a request of these parts.
    pub fn new(parts: &[Part]) -> io::Result<OwnRing> {
        let memory = Memory::from_ranges(&[(GuestAddress(0), BYTES)]).map_err(io::Error::other)?;
        let last = parts.len().checked_sub(1).filter(|last| *last < usize::from(HEADS_MAX)).ok_or_else(invalid)?;
        for (at, part) in parts.iter().enumerate() {
            let more = if at < last { NEXT } else { 0 };
            let mut bytes = [0; DESCRIPTOR_BYTES as usize];
            bytes[..8].copy_from_slice(&part.address.to_le_bytes());
            bytes[8..12].copy_from_slice(&part.length.to_le_bytes());
            bytes[12..14].copy_from_slice(&(part.flags | more).to_le_bytes());
            bytes[14..].copy_from_slice(&(at as u16 + 1).to_le_bytes());
            memory.write_slice(&bytes, GuestAddress(at as u64 * DESCRIPTOR_BYTES)).map_err(io::Error::other)?;
        }
        // Flags; the index behind the only entry, which is that of descriptor 0.
        memory.write_slice(&[0, 0, 1, 0, 0, 0], GuestAddress(AVAILABLE)).map_err(io::Error::other)?;
        let mut queue = Queue::new(HEADS_MAX).map_err(io::Error::other)?;
        queue.set_size(HEADS_MAX);
        queue.try_set_desc_table_address(GuestAddress(0)).map_err(io::Error::other)?;
        queue.try_set_avail_ring_address(GuestAddress(AVAILABLE)).map_err(io::Error::other)?;
        queue.try_set_used_ring_address(GuestAddress(USED)).map_err(io::Error::other)?;
        queue.set_ready(true);
        Ok(OwnRing { memory, queue })
    }

    pub fn request(&mut self) -> io::Result<DescriptorChain<&Memory>> {
        self.queue.set_next_avail(0);
        self.queue.iter(&self.memory).map_err(io::Error::other)?.next().ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(address: u64, length: u32, flags: u16, next: u16) -> Vec<u8> {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        bytes
    }

    fn memory(table: &[Vec<u8>], indirect: &[Vec<u8>]) -> Memory {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 0x10000)]).unwrap();
        memory.write_slice(&table.concat(), GuestAddress(0)).unwrap();
        memory.write_slice(&indirect.concat(), GuestAddress(0x1000)).unwrap();
        memory
    }

    #[test]
    fn parts_of_requests() {
        let part = |address, length, flags| Part { address, length, flags };
        let direct = [descriptor(0x100, 4, NEXT, 2), vec![0; 16], descriptor(0x200, 8, WRITE, 0)];
        let all = memory(&direct, &[]);
        assert_eq!(parts(&all, 0, 4, 0).unwrap(), [part(0x100, 4, 0), part(0x200, 8, WRITE)]);
        assert_eq!(parts(&all, 0, 4, 2).unwrap(), [part(0x200, 8, WRITE)]);
        assert!(parts(&all, 0, 2, 0).is_err(), "behind the table");
        assert!(parts(&all, 0, 4, 4).is_err());
        assert!(parts(&all, u64::MAX - 8, 4, 1).is_err());
        assert!(parts(&all, 0x20000, 4, 1).is_err());
        let through = [descriptor(0x1000, 32, INDIRECT, 0)];
        let table = [descriptor(0x300, 1, NEXT, 1), descriptor(0x400, 2, WRITE, 0)];
        assert_eq!(parts(&memory(&through, &table), 0, 4, 0).unwrap(), [part(0x300, 1, 0), part(0x400, 2, WRITE)]);
        let again = [descriptor(0x1000, 32, INDIRECT, 0)];
        assert!(parts(&memory(&through, &again), 0, 4, 0).is_err(), "a table in a table");
        let round = [descriptor(0x100, 4, NEXT, 0)];
        assert!(parts(&memory(&round, &[]), 0, 4, 0).is_err(), "without an end");
    }

    #[test]
    fn a_request_comes_out_as_it_went_in() {
        let wanted: Vec<Part> = (0..HEADS_MAX)
            .map(|at| Part { address: u64::from(at) << 20, length: 7, flags: if at < 3 { 0 } else { WRITE } })
            .collect();
        let mut ring = OwnRing::new(&wanted).unwrap();
        for _ in 0..2 {
            let found: Vec<(u64, bool)> =
                ring.request().unwrap().map(|one| (one.addr().0, one.is_write_only())).collect();
            let expected: Vec<(u64, bool)> = wanted.iter().map(|part| (part.address, part.flags == WRITE)).collect();
            assert_eq!(found, expected);
        }
        assert!(OwnRing::new(&[]).is_err());
    }
}
