//! The servers of a client, and what they are asked.
//!
//! Owns each server's session ([`Peers`]), the requests that wait or are under way ([`Exchanges`]), what is to be given back to
//! each server, and when slabs are looked at for a change of the servers' load. It knows no space: what an answer means is
//! decided by whoever asked. A request that ends gives back all that it held of its server's windows, whichever way it ends.

use crate::client::ClientError;
use crate::client::config::ClientConfig;
use crate::client::exchange::{Exchange, ExchangeId, Exchanges, Role};
use crate::client::index::{List, PeerIndex, SpaceIndex};
use crate::client::load::LoadWatch;
use crate::client::peer::{PeerSet, Reach};
use crate::client::peers::Peers;
use crate::client::returns::{Return, Returns};
use crate::client::servers::ServerInfo;
use crate::control::MapEntry;
use crate::crypto::entropy::SharedEntropy;
use crate::units::{SlabNo, Time, Version};
use crate::wire::message::Pressure;

#[derive(Debug)]
pub struct Sessions {
    pub peers: Peers,
    pub exchanges: Exchanges,
    pub returns: List<PeerIndex, Returns>,
    load: LoadWatch,
}

impl Sessions {
    pub fn new(config: &ClientConfig, entropy: SharedEntropy) -> Sessions {
        Sessions {
            peers: Peers::new(entropy),
            exchanges: Exchanges::new(config.questions_max),
            returns: List::default(),
            load: LoadWatch::default(),
        }
    }

    /// Makes a server known, as [`Peers::add`] does.
    ///
    /// # Errors
    /// The same.
    pub fn add(&mut self, now: Time, info: ServerInfo, config: &ClientConfig) -> Result<(), ClientError> {
        self.peers.add(now, info, config)?;
        while self.returns.len() < self.peers.iter().len() {
            self.returns.push(Returns::new());
        }
        Ok(())
    }

    /// Servers of a map entry.
    pub fn peers_of(&self, entry: &MapEntry) -> PeerSet {
        entry.replicas.iter().filter_map(|replica| self.peers.of(replica.server)).collect()
    }

    /// Frees an exchange, and what it held of the windows.
    pub fn end_exchange(&mut self, id: ExchangeId) -> Option<Exchange> {
        let exchange = *self.exchanges.get(id)?;
        self.peers[exchange.peer].ended(&exchange);
        if exchange.role == Role::Release {
            self.returns[exchange.peer].ended();
        }
        self.exchanges.end(id);
        Some(exchange)
    }

    /// The server may lend the slab to others. It has a copy that cannot be trusted, or none any more: it may be told all the same.
    pub fn release(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, grant: Version) {
        self.returns[peer].push(Return { space, slab, grant });
    }

    /// Whether something is still to be given back to a server that answers.
    pub fn is_returning(&self) -> bool {
        self.peers.iter().zip(&self.returns).any(|(peer, returns)| peer.is_up() && returns.is_pending())
    }

    /// A server's load has changed, as it says.
    pub fn load_changed(&mut self, now: Time) {
        self.load.changed(now);
    }

    /// Whether slabs are to be looked at for that by now. They are then.
    pub fn is_load_due(&mut self, now: Time) -> bool {
        self.load.is_due(now)
    }

    /// When that is, if a load has changed.
    pub fn load_due(&self) -> Option<Time> {
        self.load.due
    }

    /// A server in distress is relieved at once where another copy is in sync.
    pub fn one_to_drop(&self, here: PeerSet) -> PeerSet {
        here.iter().find(|peer| self.peers[*peer].pressure() == Pressure::Red).into_iter().collect()
    }

    /// Whether what a server has is to be moved away, and is in its memory.
    pub fn flees(&self, peer: PeerIndex) -> bool {
        self.peers[peer].wants_relief() && !self.peers[peer].has_overflow_disk()
    }

    /// A server was not heard yet.
    pub fn someone_may_come(&self) -> bool {
        self.peers.iter().any(|peer| matches!(peer.reach(), Reach::Connecting { .. }))
    }
}
