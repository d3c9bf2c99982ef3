//! Asks servers to take slabs back.

use super::{AT_A_TIME, RETURNS_MAX, Return};
use crate::client::Client;
use crate::client::exchange::{Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::{Class, SlabNo, Version};
use crate::wire::message::Op;

impl Client {
    /// The server may lend the slab to others. It has a copy that cannot be trusted, or none any more: it may be told all the same.
    pub(in crate::client) fn release(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, grant: Version) {
        let returns = &mut self.peers[peer].returns;
        if returns.len() < RETURNS_MAX {
            returns.push_back(Return { space, slab, grant });
        }
    }

    /// Tells servers that answer what is theirs again.
    pub(in crate::client) fn send_returns(&mut self) {
        for peer in self.peers.indices() {
            for _ in 0..self.peers[peer].returns.len() {
                let may_ask = self.peers[peer].is_up() && self.peers[peer].returning < AT_A_TIME;
                let next = self.peers[peer].returns.front().copied().filter(|_| may_ask);
                let Some(Return { space, slab, grant }) = next else { break };
                if self.spaces[space].is_stale {
                    // It is not known yet whether this client may speak for it.
                    self.peers[peer].returns.rotate_left(1);
                    continue;
                }
                if !self.spaces[space].is_taken {
                    if !self.fence(space, peer) {
                        break;
                    }
                    let (role, op, page) = (Role::Release, Op::Release, self.first_page(slab));
                    let class = Class::Rebuild;
                    if !self.ask(Request { role, peer, op, class, space, page, version: grant }) {
                        break;
                    }
                    self.peers[peer].returning += 1;
                }
                self.peers[peer].returns.pop_front();
            }
        }
    }

    /// Whether something is still to be given back to a server that answers.
    pub(in crate::client) fn is_returning(&self) -> bool {
        self.peers.iter().any(|peer| peer.is_up() && (peer.returning > 0 || !peer.returns.is_empty()))
    }

    /// A server is silent. Questions about slabs are taken back, and asked when it is there again: there may be as many as it
    /// has slabs, and each has a slot that a question to another server needs.
    pub(in crate::client) fn take_back_questions(&mut self, peer: PeerIndex) {
        for slot in 0..crate::client::exchange::EXCHANGES_MAX {
            let found = self.exchanges.at(slot).filter(|e| e.peer == peer && e.role.is_question());
            let Some(exchange) = found else { continue };
            self.cancel(exchange.id);
            let Some(slab) = self.slab_of(exchange.page) else { continue };
            match exchange.role {
                Role::Versions => self.list_again(exchange.space, slab, peer),
                Role::Release => self.release(exchange.space, slab, peer, exchange.version),
                _ => {}
            }
        }
    }
}
