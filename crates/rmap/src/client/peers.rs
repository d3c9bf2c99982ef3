//! All servers of a client, and whose turn it is.

use std::ops::{Index, IndexMut};

use super::ClientError;
use super::config::ClientConfig;
use super::exchange::Exchanges;
use super::peer::{Heard, Peer, PeerSet, Watched};
use super::servers::{SERVERS_MAX, ServerInfo};
use crate::client::index::{List, PeerIndex};
use crate::crypto::entropy::SharedEntropy;
use crate::units::{ServerId, Time};

/// The low bits of a session's number are its server's index in the client's list; the others are random.
const PEER_BITS: u32 = SERVERS_MAX.trailing_zeros();

#[derive(Debug)]
pub struct Peers {
    all: List<PeerIndex, Peer>,
    /// Those that have been silent for [`ClientConfig::error_after`].
    long_silent: PeerSet,
    /// Which one is looked at first for something to send.
    turn: usize,
    /// Random bytes for the numbers and keys of handshakes.
    entropy: SharedEntropy,
}

impl Peers {
    pub fn new(entropy: SharedEntropy) -> Peers {
        Peers { all: List::default(), long_silent: PeerSet::default(), turn: 0, entropy }
    }

    /// Makes a server known, or says where one is that has never answered, and begins its session.
    ///
    /// # Errors
    /// More than [`SERVERS_MAX`]; one that has answered elsewhere.
    pub fn add(&mut self, now: Time, info: ServerInfo, config: &ClientConfig) -> Result<(), ClientError> {
        let peer = match self.of(info.id) {
            Some(peer) if self[peer].epoch().is_some() => {
                return Err(ClientError::KnownServer { addr: self[peer].addr() });
            }
            Some(peer) => {
                self[peer].list(info);
                peer
            }
            None if self.all.len() >= SERVERS_MAX => return Err(ClientError::TooManyServers),
            None => self.all.push(Peer::new(info, now)),
        };
        self.greet(peer, config);
        Ok(())
    }

    pub fn of(&self, server: ServerId) -> Option<PeerIndex> {
        self.all.position(|peer| peer.info().id == server)
    }

    /// The server that a session number belongs to.
    pub fn of_number(&self, number: u32) -> Option<PeerIndex> {
        let peer = PeerIndex((number & ((1 << PEER_BITS) - 1)) as usize);
        self.all.get(peer).map(|_| peer)
    }

    pub fn indices(&self) -> impl DoubleEndedIterator<Item = PeerIndex> + Clone + use<> {
        self.all.indices()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, Peer> {
        self.all.iter()
    }

    /// Begins a handshake with a server, under a new number.
    pub fn greet(&mut self, peer: PeerIndex, config: &ClientConfig) {
        let number = (self.entropy.next_u64() as u32) << PEER_BITS | peer.0 as u32;
        self.all[peer].greet(number, config, &self.entropy);
    }

    /// All of them, in the order in which they are asked for something to send.
    pub fn in_turn(&self) -> impl Iterator<Item = PeerIndex> + use<> {
        let (turn, peers) = (self.turn, self.all.len());
        (0..peers).map(move |step| PeerIndex((turn + step) % peers))
    }

    /// It had something to send: the next one is asked first.
    pub fn had_turn(&mut self, peer: PeerIndex) {
        self.turn = peer.0 + 1;
    }

    /// Those that have been silent for [`ClientConfig::error_after`].
    pub fn long_silent(&self) -> PeerSet {
        self.long_silent
    }

    /// A server gave a sign of life.
    pub fn heard(&mut self, now: Time, peer: PeerIndex, exchanges: &Exchanges) -> Heard {
        self.long_silent.remove(peer);
        self.all[peer].heard(now, exchanges)
    }

    /// When the first of them is to be watched, at the latest.
    pub fn due(&mut self, now: Time, config: &ClientConfig, exchanges: &Exchanges) -> Option<Time> {
        let long_silent = self.long_silent;
        let all = self.all.enumerate_mut();
        all.filter_map(|(at, peer)| peer.due(now, config, long_silent.has(at), exchanges)).min()
    }

    /// Looks what time has brought to a server. One whose keys are used up is greeted.
    pub fn watch(&mut self, now: Time, peer: PeerIndex, config: &ClientConfig, exchanges: &Exchanges) -> Watched {
        let mut watched = self.all[peer].watch(now, config, exchanges);
        watched.is_long_silent &= !self.long_silent.has(peer);
        if watched.is_long_silent {
            self.long_silent.insert(peer);
        }
        if !watched.is_silent && self.all[peer].needs_session() {
            self.greet(peer, config);
        }
        watched
    }

    #[cfg(test)]
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, Peer> {
        self.all.iter_mut()
    }
}

impl Index<PeerIndex> for Peers {
    type Output = Peer;

    fn index(&self, at: PeerIndex) -> &Peer {
        &self.all[at]
    }
}

impl IndexMut<PeerIndex> for Peers {
    fn index_mut(&mut self, at: PeerIndex) -> &mut Peer {
        &mut self.all[at]
    }
}
