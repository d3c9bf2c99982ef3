//! Messages that arrive in pieces.

use crate::units::SEALED_SIZE;
use crate::wire::message::Fragment;

/// Tells pieces of one message from those of others, and from those of the same message answered or cut in another way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    pub id: u64,
    pub version: u64,
    count: u8,
    stride: u16,
    payload: usize,
}

impl Identity {
    pub fn new(id: u64, version: u64, fragment: Fragment, length: usize, payload: usize) -> Identity {
        Identity { id, version, count: fragment.count, stride: fragment.stride(length, payload), payload }
    }
}

/// One message in pieces.
#[derive(Debug)]
pub struct Partial {
    identity: Identity,
    have: u8,
    is_free: bool,
    bytes: Box<[u8]>,
}

impl Partial {
    pub fn new() -> Partial {
        Partial { identity: Identity::default(), have: 0, is_free: true, bytes: vec![0; SEALED_SIZE].into() }
    }

    /// Begins another message.
    pub fn begin(&mut self, identity: Identity) {
        (self.identity, self.have, self.is_free) = (identity, 0, false);
    }

    pub fn clear(&mut self) {
        self.is_free = true;
    }

    pub fn is(&self, identity: Identity) -> bool {
        !self.is_free && self.identity == identity
    }

    /// Whether it is message `id`, however answered or cut.
    pub fn is_of(&self, id: u64) -> bool {
        !self.is_free && self.identity.id == id
    }

    pub fn is_free(&self) -> bool {
        self.is_free
    }

    /// What was put together last.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Adds a piece; the whole if it was the last that was missing.
    pub fn add(&mut self, fragment: Fragment, part: &[u8]) -> Option<&[u8]> {
        let payload = self.identity.payload;
        let offset = fragment.offset(part.len(), payload);
        self.bytes[offset..offset + part.len()].copy_from_slice(part);
        self.have |= 1 << fragment.index;
        if self.have.count_ones() == u32::from(self.identity.count) {
            self.is_free = true;
            return Some(&self.bytes[..payload]);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1200 and 1422 bytes both cut a page into four; found by simulation.
    #[test]
    fn pieces_of_two_cuts_are_not_mixed() {
        let page: Vec<u8> = (0..SEALED_SIZE).map(|at| (at % 251) as u8).collect();
        let pieces = |room: usize| {
            let cut = page.chunks(room).map(<[u8]>::to_vec);
            let count = SEALED_SIZE.div_ceil(room) as u8;
            cut.enumerate().map(move |(index, part)| (Fragment { index: index as u8, count }, part)).collect::<Vec<_>>()
        };
        let (small, large) = (pieces(1120), pieces(1342));
        assert_eq!((small.len(), large.len()), (4, 4));
        let mut partial = Partial::new();
        let mut add = |(fragment, part): &(Fragment, Vec<u8>)| {
            let identity = Identity::new(1, 2, *fragment, part.len(), SEALED_SIZE);
            if !partial.is(identity) {
                partial.begin(identity);
            }
            partial.add(*fragment, part).map(<[u8]>::to_vec)
        };
        assert_eq!([add(&small[0]), add(&small[1]), add(&large[2]), add(&large[3])], [None, None, None, None]);
        assert_eq!([add(&large[1]), add(&large[0])], [None, Some(page.clone())]);
    }
}
