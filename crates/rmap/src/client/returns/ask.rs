//! Asks servers to take slabs back.

use super::Return;
use crate::client::Client;
use crate::client::exchange::{Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::pool::Pool;
use crate::client::sessions::Sessions;
use crate::units::{Class, SlabNo, Version};
use crate::wire::message::Op;

impl Client {
    /// A server is silent. Questions about slabs are taken back, and asked when it is there again: there may be as many as it
    /// has slabs, and each has a slot that a question to another server needs.
    pub(in crate::client) fn take_back_questions(&mut self, peer: PeerIndex) {
        for slot in 0..crate::client::exchange::EXCHANGES_MAX {
            let found = self.pool.sessions.exchanges.at(slot).filter(|e| e.peer == peer && e.role.is_question());
            let Some(exchange) = found else { continue };
            self.redundancy.cancel(&mut self.pool, &mut self.pages, &mut self.parity, exchange.id);
            let Some(slab) = self.pool.map.slab_of(exchange.page) else { continue };
            match exchange.role {
                Role::Versions => self.pool.map.list_again(exchange.space, slab, peer),
                Role::Release => self.pool.sessions.release(exchange.space, slab, peer, exchange.version),
                _ => {}
            }
        }
    }
}

impl Pool {
    /// Tells servers that answer what is theirs again.
    pub(in crate::client) fn send_returns(&mut self) {
        for peer in self.sessions.peers.indices() {
            for _ in 0..self.sessions.returns[peer].len() {
                let next = self.sessions.returns[peer].next().filter(|_| self.sessions.peers[peer].is_up());
                let Some(Return { space, slab, grant }) = next else { break };
                if self.map.spaces[space].is_stale {
                    // It is not known yet whether this client may speak for it.
                    self.sessions.returns[peer].put_off();
                    continue;
                }
                let may_speak = !self.map.spaces[space].is_taken;
                if may_speak {
                    if !self.fence(space, peer) {
                        break;
                    }
                    let (role, op, page) = (Role::Release, Op::Release, self.map.first_page(slab));
                    let class = Class::Rebuild;
                    if !self.ask(Request { role, peer, op, class, space, page, version: grant }) {
                        break;
                    }
                }
                self.sessions.returns[peer].pop(may_speak);
            }
        }
    }
}

impl Sessions {
    /// The server may lend the slab to others. It has a copy that cannot be trusted, or none any more: it may be told all the same.
    pub(in crate::client) fn release(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, grant: Version) {
        self.returns[peer].push(Return { space, slab, grant });
    }

    /// Whether something is still to be given back to a server that answers.
    pub(in crate::client) fn is_returning(&self) -> bool {
        self.peers.iter().zip(&self.returns).any(|(peer, returns)| peer.is_up() && returns.is_pending())
    }
}
