//! What is sent next: each server in turn, and copies no faster than the link allows.

use crate::client::Client;
use crate::client::exchange::{Exchange, Role};
use crate::client::index::PeerIndex;
use crate::client::transfer::Instruction;
use crate::transmit::Transmit;
use crate::units::{Class, Time};
use crate::wire::message::Op;

impl Client {
    /// The next thing to send, appended to `out`.
    pub fn poll_transmit(&mut self, now: Time, out: &mut Vec<u8>) -> Option<Transmit> {
        let rate = self.pool.rebuild_rate(&self.parity);
        self.redundancy.repairs.earn(now, rate);
        for peer in self.pool.sessions.peers.in_turn() {
            if let Some(transmit) = self.transmit_to(now, peer, out) {
                self.pool.sessions.peers.had_turn(peer);
                self.pool.stats.sent += 1;
                return Some(transmit);
            }
        }
        None
    }

    fn transmit_to(&mut self, now: Time, peer_idx: PeerIndex, out: &mut Vec<u8>) -> Option<Transmit> {
        let peer = &mut self.pool.sessions.peers[peer_idx];
        if let Some(own) = peer.poll_own(now, out) {
            return Some(own);
        }
        let exchange = peer.next_request(&self.pool.sessions.exchanges, self.redundancy.repairs.can_afford_page())?;
        let Exchange { id, role, op, class, space, page, version, .. } = exchange;
        if class == Class::Rebuild && op == Op::Read {
            self.redundancy.repairs.spend_page();
        }
        self.pool.sessions.exchanges.send(now, id);
        let instruction = self.pool.instruction(&self.parity, role, space, page, version);
        let payload: &[u8] = match (op, role) {
            (Op::Write, Role::Write { op }) => self.pages.ops.sealed(op),
            (Op::Write, Role::CopyWrite { copy }) => self.redundancy.copies.buffer(copy),
            _ => instruction.as_ref().map_or(&[], Instruction::payload),
        };
        let about = (self.pool.map.spaces[space].id, self.pool.map.spaces[space].generation);
        self.pool.sessions.peers[peer_idx].send(now, &exchange, about, payload, &self.pool.sessions.exchanges, out)
    }
}
