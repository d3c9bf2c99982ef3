//! The servers of a client, and what they are asked.
//!
//! Owns each server's session ([`Peers`]), the requests that wait or are under way ([`Exchanges`]), what is to be given back to
//! each server, and when slabs are looked at for a change of the servers' load. It knows no space: what an answer means is
//! decided by whoever asked. A request that ends gives back all that it held of its server's windows, whichever way it ends.

use super::ClientError;
use super::config::ClientConfig;
use super::exchange::Exchanges;
use super::load::LoadWatch;
use super::peers::Peers;
use super::returns::Returns;
use super::servers::ServerInfo;
use crate::client::index::{List, PeerIndex};
use crate::crypto::entropy::SharedEntropy;
use crate::units::Time;

#[derive(Debug)]
pub struct Sessions {
    pub peers: Peers,
    pub exchanges: Exchanges,
    pub returns: List<PeerIndex, Returns>,
    pub load: LoadWatch,
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
}
