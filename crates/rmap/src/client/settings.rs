//! What callers change or ask for while a client runs, beside pages.

use std::time::Duration;

use crate::client::peer::Drain;
use crate::client::sealed::Tenure;
use crate::client::tables::SpareTable;
use crate::client::{Client, SpaceRef};
use crate::units::{SlabSize, Time};

impl Client {
    /// Replaces [`ClientConfig::scrub_pass`](crate::client::ClientConfig::scrub_pass) from now on.
    pub fn set_scrub_pass(&mut self, pass: Option<Duration>) {
        self.pool.config.scrub_pass = pass;
    }

    /// Replaces [`ClientConfig::keep_after`](crate::client::ClientConfig::keep_after) from now on.
    pub fn set_keep_after(&mut self, keep_after: Duration) {
        self.pool.config.keep_after = keep_after;
    }

    /// Replaces [`ClientConfig::parity_after`](crate::client::ClientConfig::parity_after) from now on.
    pub fn set_parity_after(&mut self, after: Option<Duration>) {
        self.pool.config.parity_after = after;
        self.parity.look_anew();
        self.pool.map.spaces.indices().for_each(|space| self.pool.expect_parity(space));
        self.make_room();
    }

    /// Makes the parity of a sealed space: this client becomes its keeper, as soon as it can be. How far it is says
    /// [`Client::parity`]. Nothing is done for a space that another client writes.
    pub fn make_parity(&mut self, now: Time, space: SpaceRef) {
        if self.pool.map.is_followed(space.0) {
            return;
        }
        self.pool.now = now;
        let total = self.pool.map.spaces[space.0].layout.total();
        self.pool.map.spaces[space.0].extend_to(total);
        self.pool.map.spaces[space.0].wants_parity = true;
        if self.pool.map.spaces[space.0].tenure == Tenure::Reader {
            self.pool.begin_watch(space.0);
        } else {
            self.pool.map.spaces[space.0].slabs.indices().for_each(|slab| self.pool.map.mark(space.0, slab));
        }
        self.settle(now);
    }

    /// Nothing more is given back by itself: this client is about to end.
    pub fn stop_giving_back(&mut self) {
        self.pool.config.give_back_after = None;
    }

    /// Servers are to keep no room for a space any more.
    pub fn unreserve(&mut self, space: SpaceRef) {
        self.redundancy.unreserve(space.0);
    }

    /// Asks every server how it is. What they say is in [`Client::servers`] as it comes; what gets lost is not asked
    /// for again.
    pub fn ask_reports(&mut self) {
        self.pool.sessions.peers.indices().for_each(|peer| self.pool.sessions.peers[peer].ask_report());
    }

    /// Asks a server to be drained, or not to be. Its answer is in [`Client::servers`]; a request that gets lost is not
    /// made again.
    pub fn ask_drain(&mut self, server: crate::units::ServerId, drain: Drain) {
        if let Some(peer) = self.pool.sessions.peers.of(server) {
            self.pool.sessions.peers[peer].ask_drain(drain);
        }
    }

    pub fn slab_size(&self) -> SlabSize {
        self.pool.map.size
    }

    /// How many tables are to be added, so that there are as many as are kept ready.
    pub fn wanted_spares(&self) -> usize {
        self.pool.map.tables.wanted()
    }

    /// Takes a table for a slab that is written to later. Beyond those that are wanted, or of another size, it is dropped.
    pub fn add_spare(&mut self, table: SpareTable) {
        self.pool.map.tables.add_spare(table);
    }
}
