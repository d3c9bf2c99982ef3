//! Asks servers to keep room.

use super::{ASK_AGAIN, LOOK_EVERY, OfServers, Reservation, Reserved, Share, plan};
use crate::client::Client;
use crate::client::exchange::{Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::sealed::Tenure;
use crate::units::{Class, PageNo, Time, Version};
use crate::wire::message::{Op, Status};

impl Client {
    /// What is kept for a space by servers that answer.
    pub fn reserved(&self, space: crate::client::SpaceRef) -> Reserved {
        let Some(reservation) = &self.spaces[space.0].reservation else {
            return Reserved { is_settled: true, ..Reserved::default() };
        };
        let shares = reservation.shares.enumerate().filter(|(peer, _)| self.peers[*peer].is_up());
        let kept = shares.filter_map(|(_, share)| share.kept).sum();
        Reserved { wanted: reservation.total, kept, is_settled: reservation.is_settled }
    }

    /// Servers are to keep no room for a space any more.
    pub fn unreserve(&mut self, space: crate::client::SpaceRef) {
        self.end_reservation(space.0);
    }

    pub(in crate::client) fn end_reservation(&mut self, space: SpaceIndex) {
        if let Some(reservation) = self.spaces[space].reservation.as_mut().filter(|reservation| reservation.total > 0) {
            (reservation.total, reservation.each, reservation.is_settled) = (0, 0, false);
            self.look_at_reservation(space);
        }
    }

    /// When reservations are to be looked at next.
    pub(in crate::client) fn reserve_due(&self) -> Option<Time> {
        self.reserving.iter().filter_map(|space| self.spaces[*space].reservation.as_ref()).map(|r| r.due).min()
    }

    /// Looks at the reservations that it is time for.
    pub(in crate::client) fn keep_reservations(&mut self, now: Time) {
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

    fn keep_reservation(&mut self, now: Time, space: SpaceIndex, reservation: &mut Reservation) {
        reservation.make_shares(self.peers.len());
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
        for (peer, wanted) in self.peers.indices().zip(shares) {
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
    pub(in crate::client) fn reserve_answered(
        &mut self,
        space: SpaceIndex,
        peer: PeerIndex,
        slabs: u64,
        status: Status,
    ) {
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
    pub(in crate::client) fn look_at_reservation(&mut self, space: SpaceIndex) {
        if let Some(reservation) = &mut self.spaces[space].reservation {
            reservation.due = Time::default();
        }
    }

    /// Slabs that a server keeps for this space, whether it has them already or not.
    pub(in crate::client) fn room_kept_at(&self, space: SpaceIndex, peer: PeerIndex) -> u64 {
        let reservation = self.spaces[space].reservation.as_ref();
        reservation.and_then(|reservation| reservation.shares.get(peer)?.kept).unwrap_or(0)
    }

    /// A server does not let this owner in, so it keeps nothing for it either. It is asked again like one that has no room.
    pub(in crate::client) fn keeps_nothing(&mut self, space: SpaceIndex, peer: PeerIndex) {
        let reservation = self.spaces[space].reservation.as_mut();
        if let Some(share) = reservation.and_then(|reservation| reservation.shares.get_mut(peer)) {
            (share.kept, share.refused) = (Some(0), Some(1));
        }
    }

    /// Slabs that a server keeps for this space and that it does not have yet.
    pub(in crate::client) fn room_kept(&self, space: SpaceIndex, peer: PeerIndex) -> u64 {
        let kept = self.room_kept_at(space, peer);
        if kept == 0 {
            return 0;
        }
        let server = self.peers[peer].info.id;
        let replicas = self.spaces[space].slabs.iter().flat_map(|slab| &slab.entry.replicas);
        kept.saturating_sub(replicas.filter(|replica| replica.server == server).count() as u64)
    }
}
