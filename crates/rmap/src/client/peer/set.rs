//! Sets of servers, of which a client knows at most 64.

use crate::client::index::PeerIndex;

/// A set of servers, a bit for each [`PeerIndex`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerSet(u64);

impl PeerSet {
    pub fn has(self, peer: PeerIndex) -> bool {
        self.0 & 1 << peer.0 != 0
    }

    pub fn insert(&mut self, peer: PeerIndex) {
        self.0 |= 1 << peer.0;
    }

    pub fn remove(&mut self, peer: PeerIndex) {
        self.0 &= !(1 << peer.0);
    }

    pub fn is_subset_of(self, other: PeerSet) -> bool {
        self.0 & !other.0 == 0
    }

    pub fn union(self, other: PeerSet) -> PeerSet {
        PeerSet(self.0 | other.0)
    }

    pub fn intersection(self, other: PeerSet) -> PeerSet {
        PeerSet(self.0 & other.0)
    }

    pub fn minus(self, other: PeerSet) -> PeerSet {
        PeerSet(self.0 & !other.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub fn iter(self) -> impl Iterator<Item = PeerIndex> {
        let rest = std::iter::successors(Some(self.0), |rest| Some(rest & rest.wrapping_sub(1)));
        rest.take_while(|rest| *rest != 0).map(|rest| PeerIndex(rest.trailing_zeros() as usize))
    }
}

impl FromIterator<PeerIndex> for PeerSet {
    fn from_iter<I: IntoIterator<Item = PeerIndex>>(peers: I) -> PeerSet {
        let mut set = PeerSet::default();
        peers.into_iter().for_each(|peer| set.insert(peer));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let set: PeerSet = [1, 5, 63].map(PeerIndex).into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [1, 5, 63].map(PeerIndex));
        let smaller: PeerSet = [PeerIndex(5)].into_iter().collect();
        assert!(smaller.is_subset_of(set) && !set.is_subset_of(smaller));
        assert_eq!(set.minus(smaller).union(smaller), set);
    }
}
