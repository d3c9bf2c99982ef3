//! Room that servers keep for a space, whatever others take.
//!
//! A reservation lives in the memory of servers, for the space and not for its owner. It is spread evenly, at no server for more
//! slabs than were asked for, so that each slab finds its copies at different ones. One that ends, comes back empty or wants to
//! be rid of what it has keeps nothing: the owner looks once a second, and asks others. What a server refuses is asked for in
//! halves, so that the most that it can keep is found in a few questions.

use std::time::Duration;

use smallvec::SmallVec;

use super::Client;
use super::exchange::{Request, Role};
use super::sealed::Tenure;
use super::servers::SERVERS_MAX;
use crate::units::{BootEpoch, Class, PageNo, Time, Version};
use crate::wire::message::{Op, Status};

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

/// Of one space.
#[derive(Debug)]
pub struct Reservation {
    /// Slabs, each copy counted, and the most at one server.
    total: u64,
    each: u64,
    /// By place of the server.
    shares: Vec<Share>,
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
    exchange: Option<u64>,
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
    pub fn new(slabs: usize, copies: usize) -> Reservation {
        let (total, each) = ((slabs * copies) as u64, slabs as u64);
        let (shares, due) = (Vec::with_capacity(SERVERS_MAX), Time::default());
        Reservation { total, each, shares, due, ask_again: due, is_settled: false }
    }
}

impl Client {
    /// What is kept for a space by servers that answer.
    pub fn reserved(&self, space: super::SpaceRef) -> Reserved {
        let Some(reservation) = &self.spaces[space.0].reservation else {
            return Reserved { is_settled: true, ..Reserved::default() };
        };
        let shares = reservation.shares.iter().enumerate().filter(|(peer, _)| self.peers[*peer].is_up());
        let kept = shares.filter_map(|(_, share)| share.kept).sum();
        Reserved { wanted: reservation.total, kept, is_settled: reservation.is_settled }
    }

    /// Servers are to keep no room for a space any more.
    pub fn unreserve(&mut self, space: super::SpaceRef) {
        self.end_reservation(space.0);
    }

    pub(super) fn end_reservation(&mut self, space: usize) {
        if let Some(reservation) = self.spaces[space].reservation.as_mut().filter(|reservation| reservation.total > 0) {
            (reservation.total, reservation.each, reservation.is_settled) = (0, 0, false);
            self.look_at_reservation(space);
        }
    }

    /// When reservations are to be looked at next.
    pub(super) fn reserve_due(&self) -> Option<Time> {
        self.reserving.iter().filter_map(|space| self.spaces[*space].reservation.as_ref()).map(|r| r.due).min()
    }

    /// Looks at the reservations that it is time for.
    pub(super) fn keep_reservations(&mut self, now: Time) {
        for at in 0..self.reserving.len() {
            let space = self.reserving[at];
            let is_due = self.spaces[space].reservation.as_ref().is_some_and(|reservation| reservation.due <= now);
            if is_due && let Some(mut reservation) = self.spaces[space].reservation.take() {
                reservation.due = now + LOOK_EVERY;
                if self.spaces[space].tenure == Tenure::Owner && !self.spaces[space].is_taken {
                    self.keep_reservation(now, space, &mut reservation);
                }
                self.spaces[space].reservation = Some(reservation);
            }
        }
    }

    fn keep_reservation(&mut self, now: Time, space: usize, reservation: &mut Reservation) {
        reservation.shares.resize(self.peers.len(), Share::default());
        let again = reservation.ask_again <= now;
        if again {
            reservation.ask_again = now + ASK_AGAIN;
        }
        let mut is_asking = false;
        let mut servers = OfServers::new();
        for (share, peer) in reservation.shares.iter_mut().zip(&self.peers) {
            share.exchange = share.exchange.filter(|id| self.exchanges.get(*id).is_some());
            is_asking |= share.exchange.is_some() && peer.is_up();
            if share.epoch != peer.epoch {
                *share = Share { epoch: peer.epoch, exchange: share.exchange, ..Share::default() };
            }
            if again {
                share.refused = None;
            }
            let keeps = peer.is_up() && !peer.wants_relief();
            let most = if keeps { share.most().min(reservation.each) } else { 0 };
            servers.push((share.kept.filter(|_| keeps).unwrap_or(0), most));
        }
        if is_asking {
            return;
        }
        let shares = plan(reservation.total, &servers);
        for (peer, wanted) in shares.into_iter().enumerate() {
            let share = &mut reservation.shares[peer];
            if !self.peers[peer].is_up() || share.kept == Some(wanted) || share.exchange.is_some() {
                continue;
            }
            is_asking = true;
            if self.fence(space, peer) {
                let (role, op, class, version) =
                    (Role::Reserve, Op::Reserve, Class::Rebuild, Version::from_bits(wanted));
                let request = Request { role, peer, op, class, space, page: PageNo(0), version };
                share.exchange = self.ask_for(request);
            }
        }
        reservation.is_settled = !is_asking;
    }

    /// A server keeps what it was asked to keep, or cannot.
    pub(super) fn reserve_answered(&mut self, space: usize, peer: usize, slabs: u64, status: Status) {
        let Some(reservation) = self.spaces[space].reservation.as_mut() else { return };
        let Some(share) = reservation.shares.get_mut(peer) else { return };
        match status {
            Status::Ok => (share.kept, share.exchange) = (Some(slabs), None),
            Status::Full | Status::OverQuota => (share.refused, share.exchange) = (Some(slabs), None),
            Status::StaleGeneration => {
                share.exchange = None;
                self.keeps_nothing(space, peer);
            }
            // It does not know this owner: it is told with the next look.
            _ => return self.spaces[space].fenced_at.remove(peer),
        }
        self.look_at_reservation(space);
    }

    /// Something was answered that it waits for.
    pub(super) fn look_at_reservation(&mut self, space: usize) {
        if let Some(reservation) = &mut self.spaces[space].reservation {
            reservation.due = Time::default();
        }
    }

    /// Slabs that a server keeps for this space, whether it has them already or not.
    pub(super) fn room_kept_at(&self, space: usize, peer: usize) -> u64 {
        let reservation = self.spaces[space].reservation.as_ref();
        reservation.and_then(|reservation| reservation.shares.get(peer)?.kept).unwrap_or(0)
    }

    /// A server does not let this owner in, so it keeps nothing for it either. It is asked again like one that has no room.
    pub(super) fn keeps_nothing(&mut self, space: usize, peer: usize) {
        let reservation = self.spaces[space].reservation.as_mut();
        if let Some(share) = reservation.and_then(|reservation| reservation.shares.get_mut(peer)) {
            (share.kept, share.refused) = (Some(0), Some(1));
        }
    }

    /// Slabs that a server keeps for this space and that it does not have yet.
    pub(super) fn room_kept(&self, space: usize, peer: usize) -> u64 {
        let kept = self.room_kept_at(space, peer);
        if kept == 0 {
            return 0;
        }
        let server = self.peers[peer].info.id;
        let replicas = self.spaces[space].slabs.iter().flat_map(|slab| &slab.entry.replicas);
        kept.saturating_sub(replicas.filter(|replica| replica.server == server).count() as u64)
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
