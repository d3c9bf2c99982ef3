//! Which copy of each slab of a group stays, so that no server has two of them.

use smallvec::{SmallVec, smallvec};

use super::super::peer::PeerSet;
use super::layout::COLUMNS;
use crate::client::index::PeerIndex;

/// Something of each slab of a group, its parity among them, in place.
pub type OfColumns<T> = SmallVec<[T; COLUMNS]>;

/// For each column of a group, by the servers that have it: the one that keeps it; none where all are taken. What has one
/// copy only keeps that, whatever else would fit better: so what is decided for one stays right for all.
pub fn assign(columns: &[PeerSet]) -> OfColumns<Option<PeerIndex>> {
    let mut kept: OfColumns<Option<PeerIndex>> = smallvec![None; columns.len()];
    let mut fixed = PeerSet::default();
    for (column, servers) in columns.iter().enumerate().filter(|(_, servers)| servers.len() == 1) {
        kept[column] = servers.minus(fixed).iter().next();
        fixed = fixed.union(*servers);
    }
    for column in (0..columns.len()).filter(|column| columns[*column].len() > 1) {
        find_server(column, columns, fixed, &mut kept, &mut PeerSet::default());
    }
    kept
}

/// Kuhn's algorithm: a column takes a server that is free, or whose column finds another one.
fn find_server(
    column: usize,
    columns: &[PeerSet],
    fixed: PeerSet,
    kept: &mut [Option<PeerIndex>],
    tried: &mut PeerSet,
) -> bool {
    for server in columns[column].minus(fixed).iter() {
        if tried.has(server) {
            continue;
        }
        tried.insert(server);
        let holder = kept.iter().position(|server_of| *server_of == Some(server));
        if holder.is_none_or(|other| find_server(other, columns, fixed, kept, tried)) {
            kept[column] = Some(server);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(columns: &[&[usize]], expected: &[Option<usize>]) {
        let sets: Vec<PeerSet> =
            columns.iter().map(|servers| servers.iter().copied().map(PeerIndex).collect()).collect();
        let kept: Vec<Option<usize>> = assign(&sets).into_iter().map(|peer| peer.map(|peer| peer.0)).collect();
        assert_eq!(kept, *expected, "{columns:?}");
    }

    #[test]
    fn no_server_keeps_two() {
        check(&[&[1], &[2], &[3]], &[Some(1), Some(2), Some(3)]);
        // The first makes way for the second, and that for the third.
        check(&[&[0, 1], &[0, 2], &[0, 2], &[3]], &[Some(1), Some(2), Some(0), Some(3)]);
        // One too many for two servers.
        check(&[&[0, 1], &[0, 1], &[0, 1]], &[Some(1), Some(0), None]);
        // Who has one copy only keeps it.
        check(&[&[0, 1], &[0], &[0, 1]], &[Some(1), Some(0), None]);
        check(&[&[4], &[4], &[]], &[Some(4), None, None]);
    }

    /// Deciding column after column comes to the same as deciding at once.
    #[test]
    fn what_is_decided_stays_right() {
        let mut state = 7_u64;
        for _ in 0..2000 {
            let mut any = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let mut columns: Vec<PeerSet> =
                (0..5).map(|_| (0..1 + any(2)).map(|_| PeerIndex(any(6) as usize)).collect()).collect();
            let count = |columns: &[PeerSet]| assign(columns).iter().flatten().count();
            let whole = count(&columns);
            for _ in 0..5 {
                let column = any(5) as usize;
                if let Some(server) = assign(&columns)[column] {
                    columns[column] = [server].into_iter().collect();
                }
                assert_eq!(count(&columns), whole, "{columns:?}");
            }
        }
    }
}
