//! Pages that arrive in pieces. A page replaces another only when it is whole.

use crate::reassembly::{Identity, Partial};
use crate::wire::message::Fragment;

/// Writes that a client may have under way at a server, and so pages in pieces: 128 KiB, the bandwidth-delay product of
/// 10 Gbit/s and 100 us.
pub const WRITE_CREDITS: u16 = 32;

/// The messages in pieces of one session.
#[derive(Debug)]
pub struct Reassembly {
    /// Each with the moment it began.
    partials: Vec<(Partial, u64)>,
    clock: u64,
}

impl Reassembly {
    pub fn new() -> Reassembly {
        Reassembly { partials: (0..WRITE_CREDITS).map(|_| (Partial::new(), 0)).collect(), clock: 0 }
    }

    /// Adds a piece of message `id`. Where a client has more under way than it may, the oldest is given up.
    pub fn add(&mut self, id: u64, version: u64, fragment: Fragment, part: &[u8], payload: usize) -> Option<&[u8]> {
        let identity = Identity::new(id, version, fragment, payload);
        let place = self.partials.iter().position(|(partial, _)| partial.is(identity)).or_else(|| {
            // The same message cut another way: what there was of it is of no use.
            let same = self.partials.iter().position(|(partial, _)| partial.is_of(id));
            let oldest =
                || (0..self.partials.len()).min_by_key(|&at| (!self.partials[at].0.is_free(), self.partials[at].1));
            let place = same.or_else(oldest)?;
            self.clock += 1;
            self.partials[place].0.begin(identity);
            self.partials[place].1 = self.clock;
            Some(place)
        })?;
        self.partials[place].0.add(fragment, part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SEALED_SIZE;

    fn part(index: u8, byte: u8) -> (Fragment, Vec<u8>) {
        let fragment = Fragment { index, count: 3 };
        (fragment, vec![byte; fragment.range(SEALED_SIZE).len()])
    }

    #[test]
    fn pieces_of_several_messages_in_any_order() {
        let mut reassembly = Reassembly::new();
        let mut add = |id, index| {
            let (fragment, bytes) = part(index, id as u8);
            reassembly.add(id, 0, fragment, &bytes, SEALED_SIZE).map(|whole| whole.iter().all(|b| *b == id as u8))
        };
        assert_eq!([add(1, 2), add(2, 0), add(2, 0), add(1, 0), add(2, 1)], [None; 5]);
        assert_eq!([add(1, 1), add(2, 2)], [Some(true); 2]);
    }

    #[test]
    fn too_many_push_out_the_oldest() {
        let mut reassembly = Reassembly::new();
        let (first, bytes) = part(0, 9);
        for id in 0..=u64::from(WRITE_CREDITS) {
            assert_eq!(reassembly.add(id, 0, first, &bytes, SEALED_SIZE), None);
        }
        let mut rest = |id| {
            let (second, third) = (part(1, 9), part(2, 9));
            reassembly.add(id, 0, second.0, &second.1, SEALED_SIZE);
            reassembly.add(id, 0, third.0, &third.1, SEALED_SIZE).is_some()
        };
        assert!(rest(1));
        assert!(!rest(0), "its first piece was given up");
    }
}
