//! The pool as this client knows it: its servers, and the spaces that they hold.
//!
//! Owns what every part of the client may read, which are the settings, the time, chance and the counters, and two parts that know
//! nothing of each other: [`Sessions`] has the servers, [`Map`] the spaces. What needs both is done here: a request is made, a
//! server is told who owns a space, copies of a slab are chosen by how their servers answer. It knows no operation and no copy in
//! the making; those come as arguments, or are in the parts above it.

mod copies;
mod groups;
mod ledger;
mod leftovers;
mod opening;
mod patience;
mod readers;
mod requests;
mod silence;
pub mod transfer;

use crate::client::config::{ClientConfig, Fault};
use crate::client::exchange::{ExchangeId, Request};
use crate::client::map::Map;
use crate::client::sessions::Sessions;
use crate::client::stats::ClientStats;
use crate::crypto::entropy::SharedEntropy;
use crate::units::Time;

#[derive(Debug)]
pub struct Pool {
    pub config: ClientConfig,
    pub entropy: SharedEntropy,
    /// When something last came.
    pub now: Time,
    pub stats: ClientStats,
    pub sessions: Sessions,
    pub map: Map,
}

impl Pool {
    pub fn new(config: ClientConfig, entropy: SharedEntropy) -> Pool {
        Pool {
            sessions: Sessions::new(&config, entropy.clone()),
            map: Map::new(config.slab_size),
            config,
            entropy,
            now: Time::default(),
            stats: ClientStats::default(),
        }
    }

    /// Whether this mistake is built in.
    pub fn has(&self, fault: Fault) -> bool {
        self.config.fault == Some(fault)
    }

    /// A new random name for this owner, never zero ([`Space::owner`](super::slab::Space::owner)).
    pub fn new_owner(&self) -> u64 {
        self.entropy.next_u64().max(1)
    }

    /// A request to one server; waits in its queue until it may be sent.
    pub fn ask(&mut self, request: Request) -> bool {
        self.ask_for(request).is_some()
    }

    /// The same, and the number that it has. Where too much is asked already, its slab waits for room.
    pub fn ask_for(&mut self, request: Request) -> Option<ExchangeId> {
        let Some(id) = self.sessions.exchanges.begin(request) else {
            self.map.wait_for_room(request.space, self.map.slab_of(request.page));
            return None;
        };
        self.sessions.peers[request.peer].queue(request.class, id, &self.sessions.exchanges);
        Some(id)
    }
}
