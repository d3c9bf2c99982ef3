//! What is sent next: each server in turn, and copies no faster than the link allows.

use super::Client;
use super::exchange::{Exchange, Role};
use super::transfer::Instruction;
use crate::client::index::PeerIndex;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::transmit::Transmit;
use crate::units::{Class, Time};
use crate::wire::message::{Op, Pressure};

/// Copies that restore redundancy may use this part of the link: demand must not feel them, even where all clients of a
/// dead server copy at once. Each page comes in and goes out once.
const REBUILD_PERCENT: u64 = 30;
/// The same where a server asks to be relieved: somebody waits for its end, or for its memory.
const RELIEF_PERCENT: u64 = 60;
/// The same where a write waits until slabs have their second copies.
const DISSOLVE_PERCENT: u64 = 90;

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

impl Pool {
    /// What new copies may use of the link, in bytes a second.
    pub(super) fn rebuild_rate(&self, parity: &Parity) -> u64 {
        let relieves = self.sessions.peers.iter().any(|peer| peer.pressure() >= Pressure::Orange);
        let percent = match (parity.cold.is_any_dissolving(), relieves) {
            (true, _) => DISSOLVE_PERCENT,
            (_, true) => RELIEF_PERCENT,
            _ => REBUILD_PERCENT,
        };
        self.config.link_bytes_per_second / 100 * percent
    }
}
