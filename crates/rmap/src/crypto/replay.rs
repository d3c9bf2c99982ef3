//! The replay window of one direction of a session (as RFC 6479 does it, without the ring).

const WORDS: usize = 16;
/// Datagrams that may overtake another: what a burst over several queues of a network card reorders, many times over.
pub const WINDOW: u64 = 64 * WORDS as u64;

/// Which counters were seen, of the last [`WINDOW`].
#[derive(Clone, Debug)]
pub struct ReplayWindow {
    /// One above the greatest counter seen.
    next: u64,
    /// Whether a counter was seen, in bit `counter % WINDOW`.
    seen: [u64; WORDS],
}

impl Default for ReplayWindow {
    fn default() -> ReplayWindow {
        ReplayWindow { next: 0, seen: [0; WORDS] }
    }
}

impl ReplayWindow {
    /// Whether a datagram with this counter may be looked at. Asked before its authenticity is known.
    pub fn admits(&self, counter: u64) -> bool {
        counter >= self.next || (self.next - counter <= WINDOW && !self.bit(counter))
    }

    /// Remembers the counter of an authentic datagram.
    pub fn mark(&mut self, counter: u64) {
        if counter >= self.next {
            if counter - self.next >= WINDOW {
                self.seen = [0; WORDS];
            } else {
                (self.next..counter).for_each(|skipped| self.set(skipped, false));
            }
            self.next = counter.saturating_add(1);
        }
        self.set(counter, true);
    }

    fn position(counter: u64) -> (usize, u64) {
        ((counter / 64) as usize % WORDS, 1 << (counter % 64))
    }

    fn bit(&self, counter: u64) -> bool {
        let (word, mask) = ReplayWindow::position(counter);
        self.seen[word] & mask != 0
    }

    fn set(&mut self, counter: u64, to: bool) {
        let (word, mask) = ReplayWindow::position(counter);
        if to { self.seen[word] |= mask } else { self.seen[word] &= !mask }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        /// Against a set that remembers everything.
        #[test]
        fn as_a_set_would(steps in proptest::collection::vec((0u64..3, 0u64..3000), 1..400)) {
            let mut window = ReplayWindow::default();
            let (mut seen, mut top) = (BTreeSet::new(), 0u64);
            for (kind, by) in steps {
                let counter = match kind {
                    0 => top + by % 4,
                    1 => top.saturating_sub(by),
                    _ => top + by,
                };
                let expected = counter >= top || (top - counter <= WINDOW && !seen.contains(&counter));
                prop_assert_eq!(window.admits(counter), expected, "{} under {}", counter, top);
                if expected {
                    window.mark(counter);
                    seen.insert(counter);
                    top = top.max(counter + 1);
                }
            }
        }
    }
}
