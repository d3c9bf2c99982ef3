//! Room that servers keep for a space, whatever others take.
//!
//! A reservation lives in the memory of servers, for the space and not for its owner. It is spread evenly, at no server for more
//! slabs than were asked for, so that each slab finds its copies at different ones. One that ends, comes back empty or wants to
//! be rid of what it has keeps nothing: the owner looks once a second, and asks others. What a server refuses is asked for in
//! halves, so that the most that it can keep is found in a few questions.

pub mod keep;

use std::time::Duration;

use smallvec::SmallVec;

use super::exchange::ExchangeId;
use super::servers::SERVERS_MAX;
use crate::client::index::{List, PeerIndex, SpaceIndex};
use crate::units::{BootEpoch, Time};

/// How often it is looked whether all that was kept still is.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// What a server refused it may have later.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// What servers that answer keep for a space, in slabs, each copy counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserved {
    pub wanted: u64,
    pub kept: u64,
    /// Nothing more is to be had now, and nothing is being asked.
    pub is_settled: bool,
}

/// What servers are to keep for the spaces of this client, and what they keep.
#[derive(Debug, Default)]
pub struct Reservations {
    /// In the order of their spaces.
    all: Vec<(SpaceIndex, Reservation)>,
}

/// What servers are to keep for one space, and what they keep.
#[derive(Debug)]
struct Reservation {
    /// Slabs, each copy counted, and the most at one server.
    total: u64,
    each: u64,
    shares: List<PeerIndex, Share>,
    due: Time,
    ask_again: Time,
    is_settled: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Share {
    epoch: Option<BootEpoch>,
    /// What it said that it keeps; `None`: whatever an earlier owner left.
    kept: Option<u64>,
    /// It has refused so much, and may keep less.
    refused: Option<u64>,
    exchange: Option<ExchangeId>,
}

impl Share {
    /// What it may keep, as far as it is known: half-way between what it keeps and what it refused.
    fn most(&self) -> u64 {
        let kept = self.kept.unwrap_or(0);
        self.refused.map_or(u64::MAX, |refused| kept.max((kept + refused) / 2).min(refused.saturating_sub(1)))
    }
}

/// Something of each server, in place: this is looked at every second.
type OfServers<T> = SmallVec<[T; SERVERS_MAX]>;

/// What each server is to keep: as even as can be, `total` together, no less than now where too little is kept, and no more
/// where too much is. A server: what it keeps, and the most that it can.
fn plan(total: u64, servers: &[(u64, u64)]) -> OfServers<u64> {
    let grows = total >= servers.iter().map(|(kept, _)| kept).sum();
    let at = |level: u64, &(kept, most): &(u64, u64)| if grows { kept.max(level.min(most)) } else { kept.min(level) };
    let sum = |level: u64| servers.iter().map(|server| at(level, server)).sum::<u64>();
    let (mut low, mut high) = (0, servers.iter().map(|(kept, most)| *kept.max(most)).max().unwrap_or(0));
    while low < high {
        let middle = (low + high) / 2;
        if sum(middle) >= total { high = middle } else { low = middle + 1 }
    }
    // At the level that is enough it may be more than that: some stay one below it.
    let mut beyond = sum(low).saturating_sub(total);
    let share = |server: &(u64, u64)| {
        let share = at(low, server);
        let less = u64::from(beyond > 0 && share == low && share > if grows { server.0 } else { 0 });
        beyond -= less;
        share - less
    };
    servers.iter().map(share).collect()
}

impl Reservation {
    fn new(slabs: usize, copies: usize) -> Reservation {
        let (total, each) = ((slabs * copies) as u64, slabs as u64);
        let (shares, due) = (List::with_capacity(SERVERS_MAX), Time::default());
        Reservation { total, each, shares, due, ask_again: due, is_settled: false }
    }

    /// A share for each server.
    fn make_shares(&mut self, servers: usize) {
        while self.shares.len() < servers {
            self.shares.push(Share::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::plan;

    #[test]
    fn a_plan_is_even_and_moves_nothing_without_need() {
        for (total, servers, expected) in [
            (0, &[(0, 4)][..], &[0][..]),
            (8, &[(0, 4), (0, 4)], &[4, 4]),
            (8, &[(0, 4), (0, 4), (0, 4)], &[2, 3, 3]),
            (8, &[(0, 4), (0, 1), (0, 4)], &[3, 1, 4]),
            (8, &[(4, 4), (0, 4), (0, 4)], &[4, 2, 2]),
            (8, &[(4, 4), (4, 4), (0, 4)], &[4, 4, 0]),
            // There is not so much.
            (8, &[(1, 1), (0, 2)], &[1, 2]),
            (8, &[], &[]),
            // Too much is kept: one came back that had been replaced.
            (8, &[(4, 4), (4, 4), (4, 4)], &[2, 3, 3]),
            (0, &[(4, 0), (2, 0)], &[0, 0]),
        ] {
            assert_eq!(plan(total, servers)[..], *expected, "{total} of {servers:?}");
        }
    }
}
