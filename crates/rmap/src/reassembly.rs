//! Messages that arrive in pieces.

use crate::units::SEALED_SIZE;
use crate::wire::message::Fragment;

/// Tells pieces of one message from those of others, and from those of the same message answered or cut in another way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    pub id: u64,
    pub version: u64,
    count: u8,
    payload: usize,
}

impl Identity {
    pub fn new(id: u64, version: u64, fragment: Fragment, payload: usize) -> Identity {
        Identity { id, version, count: fragment.count, payload }
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

    /// Drops what there is, and begins another message.
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

    /// Exchanges what was put together last for room as large.
    pub fn swap(&mut self, bytes: &mut Box<[u8]>) {
        std::mem::swap(&mut self.bytes, bytes);
    }

    /// Adds a piece; the whole if it was the last that was missing.
    pub fn add(&mut self, fragment: Fragment, part: &[u8]) -> Option<&[u8]> {
        let payload = self.identity.payload;
        self.bytes[fragment.range(payload)].copy_from_slice(part);
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

    /// A request that is sent again may be answered in another cut, and pieces of both arrive.
    #[test]
    fn pieces_of_two_cuts_are_not_mixed() {
        let page: Vec<u8> = (0..SEALED_SIZE).map(|at| (at % 251) as u8).collect();
        let mut partial = Partial::new();
        let mut add = |index, count| {
            let fragment = Fragment { index, count };
            let identity = Identity::new(1, 2, fragment, SEALED_SIZE);
            if !partial.is(identity) {
                partial.begin(identity);
            }
            partial.add(fragment, &page[fragment.range(SEALED_SIZE)]).map(<[u8]>::to_vec)
        };
        assert_eq!([add(0, 4), add(1, 4), add(1, 3), add(2, 3)], [None, None, None, None]);
        assert_eq!([add(0, 3), add(3, 4)], [Some(page.clone()), None]);
    }
}
