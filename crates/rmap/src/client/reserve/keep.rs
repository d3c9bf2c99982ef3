//! Decides which servers are asked to keep room.

use smallvec::SmallVec;

use super::{ASK_AGAIN, LOOK_EVERY, OfServers, Reservation, Reservations, Reserved, Share, plan};
use crate::client::context::Context;
use crate::client::exchange::ExchangeId;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::peers::Peers;
use crate::client::sealed::Tenure;
use crate::client::servers::SERVERS_MAX;
use crate::units::Time;
use crate::wire::message::Status;

/// Servers that are to be asked for a space, and for how many slabs each is to keep room.
pub type Wanted = SmallVec<[(PeerIndex, u64); SERVERS_MAX]>;

impl Reservations {
    /// A space is opened for which servers are to keep room.
    pub fn add(&mut self, space: SpaceIndex, slabs: usize, copies: usize) {
        debug_assert!(self.all.last().is_none_or(|(last, _)| *last < space), "spaces are opened in their order");
        self.all.push((space, Reservation::new(slabs, copies)));
    }

    fn get(&self, space: SpaceIndex) -> Option<&Reservation> {
        let at = self.all.binary_search_by_key(&space, |(of, _)| *of).ok()?;
        Some(&self.all[at].1)
    }

    fn get_mut(&mut self, space: SpaceIndex) -> Option<&mut Reservation> {
        let at = self.all.binary_search_by_key(&space, |(of, _)| *of).ok()?;
        Some(&mut self.all[at].1)
    }

    /// What is kept for a space by servers that answer.
    pub fn view(&self, space: SpaceIndex, peers: &Peers) -> Reserved {
        let Some(reservation) = self.get(space) else {
            return Reserved { is_settled: true, ..Reserved::default() };
        };
        let shares = reservation.shares.enumerate().filter(|(peer, _)| peers[*peer].is_up());
        let kept = shares.filter_map(|(_, share)| share.kept).sum();
        Reserved { wanted: reservation.total, kept, is_settled: reservation.is_settled }
    }

    /// Servers are to keep no room for a space any more.
    pub fn end(&mut self, space: SpaceIndex) {
        if let Some(reservation) = self.get_mut(space).filter(|reservation| reservation.total > 0) {
            (reservation.total, reservation.each, reservation.is_settled) = (0, 0, false);
            reservation.due = Time::default();
        }
    }

    /// When reservations are to be looked at next.
    pub fn due(&self) -> Option<Time> {
        self.all.iter().map(|(_, reservation)| reservation.due).min()
    }

    /// Looks at the next reservation that it is time for: the servers that are to be asked, each if it knows the owner. What was
    /// asked is handed to [`Reservations::was_asked`]. `None`: no other is due.
    pub fn poll(&mut self, now: Time, context: &Context<'_>) -> Option<(SpaceIndex, Wanted)> {
        let (space, reservation) = self.all.iter_mut().find(|(_, reservation)| reservation.due <= now)?;
        reservation.due = now + LOOK_EVERY;
        let state = &context.pool.map.spaces[*space];
        let owns = state.tenure == Tenure::Owner && !state.is_taken;
        let wanted = if owns { reservation.plan_requests(now, context) } else { Wanted::new() };
        Some((*space, wanted))
    }

    /// A server was asked to keep room for a space, or there was no room for the request.
    pub fn was_asked(&mut self, space: SpaceIndex, peer: PeerIndex, exchange: Option<ExchangeId>) {
        if let Some(share) = self.share(space, peer) {
            share.exchange = exchange;
        }
    }

    /// A server keeps what it was asked to keep, or cannot. `false` if it does not know this owner.
    pub fn complete(&mut self, space: SpaceIndex, peer: PeerIndex, slabs: u64, status: Status) -> bool {
        let Some(share) = self.share(space, peer) else { return true };
        match status {
            Status::Ok => (share.kept, share.exchange) = (Some(slabs), None),
            Status::Full | Status::OverQuota => (share.refused, share.exchange) = (Some(slabs), None),
            Status::StaleGeneration => {
                share.exchange = None;
                self.keeps_nothing(space, peer);
            }
            // It is told with the next look.
            _ => return false,
        }
        self.poll_soon(space);
        true
    }

    /// Something was answered that a reservation waits for.
    pub fn poll_soon(&mut self, space: SpaceIndex) {
        if let Some(reservation) = self.get_mut(space) {
            reservation.due = Time::default();
        }
    }

    /// Slabs that a server keeps for a space, whether it has them already or not.
    pub fn kept_at(&self, space: SpaceIndex, peer: PeerIndex) -> u64 {
        self.get(space).and_then(|reservation| reservation.shares.get(peer)?.kept).unwrap_or(0)
    }

    /// A server does not let this owner in, so it keeps nothing for it either. It is asked again like one that has no room.
    pub fn keeps_nothing(&mut self, space: SpaceIndex, peer: PeerIndex) {
        if let Some(share) = self.share(space, peer) {
            (share.kept, share.refused) = (Some(0), Some(1));
        }
    }

    fn share(&mut self, space: SpaceIndex, peer: PeerIndex) -> Option<&mut Share> {
        self.get_mut(space)?.shares.get_mut(peer)
    }
}

impl Reservation {
    fn plan_requests(&mut self, now: Time, context: &Context<'_>) -> Wanted {
        self.make_shares(context.pool.sessions.peers.iter().len());
        let again = self.ask_again <= now;
        if again {
            self.ask_again = now + ASK_AGAIN;
        }
        let mut is_asking = false;
        let mut servers = OfServers::new();
        for (share, peer) in self.shares.iter_mut().zip(context.pool.sessions.peers.iter()) {
            share.exchange = share.exchange.filter(|id| context.pool.sessions.exchanges.peek(*id).is_some());
            is_asking |= share.exchange.is_some() && peer.is_up();
            if share.epoch != peer.epoch() {
                *share = Share { epoch: peer.epoch(), exchange: share.exchange, ..Share::default() };
            }
            if again {
                share.refused = None;
            }
            let keeps = peer.is_up() && !peer.wants_relief();
            let most = if keeps { share.most().min(self.each) } else { 0 };
            servers.push((share.kept.filter(|_| keeps).unwrap_or(0), most));
        }
        if is_asking {
            return Wanted::new();
        }
        let shares = plan(self.total, &servers);
        let is_to_be_asked = |(peer, slabs): &(PeerIndex, u64)| {
            let share = &self.shares[*peer];
            context.pool.sessions.peers[*peer].is_up() && share.kept != Some(*slabs) && share.exchange.is_none()
        };
        let wanted: Wanted = context.pool.sessions.peers.indices().zip(shares).filter(is_to_be_asked).collect();
        self.is_settled = wanted.is_empty();
        wanted
    }
}
