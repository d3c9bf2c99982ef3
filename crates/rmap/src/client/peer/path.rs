//! Which sizes of datagrams get to a server and back.

use std::time::Duration;

use crate::units::Time;
use crate::wire::{DATAGRAM_MIN_MAX, DATAGRAM_SIZES};

/// Large datagrams that got lost so often while others came through do not fit the path any more.
const BLACK_HOLE_TRIES: u32 = 5;
/// Paths change; larger datagrams are tried again.
const PROBE_AGAIN: Duration = Duration::from_secs(60);
const LARGEST: usize = DATAGRAM_SIZES[DATAGRAM_SIZES.len() - 1];

#[derive(Debug)]
pub struct Path {
    /// The largest datagram that is known to get there and back.
    cut: usize,
    /// Sizes still to be tried: a bit each of `DATAGRAM_SIZES`.
    probes: u8,
    probed_at: Time,
}

impl Path {
    pub fn new(now: Time) -> Path {
        Path { cut: DATAGRAM_MIN_MAX, probes: 0, probed_at: now }
    }

    /// The largest datagram that is known to get there and back, in bytes.
    pub fn cut(&self) -> usize {
        self.cut
    }

    /// A session begins: nothing is known, and every size up to `max` is tried.
    pub fn begin(&mut self, max: usize) {
        self.cut = DATAGRAM_SIZES[0];
        self.probe_larger(max);
    }

    /// The next size that is to be tried.
    pub fn next_probe(&mut self, now: Time) -> Option<usize> {
        let size = *DATAGRAM_SIZES.get(self.probes.trailing_zeros() as usize)?;
        self.probes &= self.probes - 1;
        self.probed_at = now;
        Some(size)
    }

    /// Larger datagrams are tried, if it is time.
    pub fn poll(&mut self, now: Time, max: usize) {
        if now.since(self.probed_at) >= PROBE_AGAIN && self.cut < LARGEST {
            self.probed_at = now;
            self.probe_larger(max);
        }
    }

    fn probe_larger(&mut self, max: usize) {
        let larger = DATAGRAM_SIZES.iter().enumerate().filter(|(_, size)| **size > self.cut && **size <= max);
        self.probes = larger.fold(0, |bits, (at, _)| bits | 1 << at);
    }

    /// A datagram of this size came back.
    pub fn carried(&mut self, size: usize) {
        self.cut = self.cut.max(size.min(LARGEST));
    }

    /// Something was lost so often. Where that is often, long datagrams are lost and shorter ones are not: from now on only the
    /// shortest are sent, and asked for.
    pub fn lost(&mut self, now: Time, times: u32) {
        if times >= BLACK_HOLE_TRIES && self.cut > DATAGRAM_MIN_MAX {
            (self.cut, self.probed_at) = (DATAGRAM_MIN_MAX, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::default() + Duration::from_secs(seconds)
    }

    fn probes(path: &mut Path, seconds: u64) -> Vec<usize> {
        std::iter::from_fn(|| path.next_probe(at(seconds))).collect()
    }

    #[test]
    fn every_size_is_tried_and_only_what_came_back_is_used() {
        let mut path = Path::new(at(0));
        path.begin(LARGEST);
        assert_eq!(probes(&mut path, 0), DATAGRAM_SIZES[1..]);
        path.carried(DATAGRAM_SIZES[1]);
        path.carried(DATAGRAM_SIZES[0]);
        assert_eq!((path.cut(), probes(&mut path, 0)), (DATAGRAM_SIZES[1], vec![]));
        // Not beyond what the client allows, nor what there is.
        path.begin(DATAGRAM_SIZES[1]);
        assert_eq!(probes(&mut path, 0), DATAGRAM_SIZES[1..2]);
        path.carried(2 * LARGEST);
        assert_eq!(path.cut(), LARGEST);
    }

    #[test]
    fn a_path_that_loses_long_datagrams_is_tried_again_later() {
        let mut path = Path::new(at(0));
        path.carried(LARGEST);
        path.lost(at(1), BLACK_HOLE_TRIES - 1);
        assert_eq!(path.cut(), LARGEST);
        path.lost(at(1), BLACK_HOLE_TRIES);
        assert_eq!(path.cut(), DATAGRAM_MIN_MAX);
        path.poll(at(60), LARGEST);
        assert_eq!(probes(&mut path, 60), []);
        path.poll(at(61), LARGEST);
        assert_eq!(probes(&mut path, 61).last(), Some(&LARGEST));
    }
}
