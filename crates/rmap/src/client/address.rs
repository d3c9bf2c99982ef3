//! Where a server is: as the operator lists it, as it was heard, and as it says itself.
//!
//! A hint is believed as far as it takes to say hello there. The hello is for the one who has the server's key, and its
//! answer is what proves the place. So a hint that is wrong costs a few hellos, and the listed address stays in use.

use std::net::SocketAddr;

use super::Client;
use super::peer::Peer;
use super::servers::{Hint, ServerInfo};
use crate::units::Time;

impl Client {
    /// Takes note of where a server says it is. One that is silent is greeted there too, at once if that is news; one that
    /// answers, but says that it has begun a new life, is asked for a sign of the old one. `false` if no such server is known.
    pub fn hint(&mut self, now: Time, hint: &Hint) -> bool {
        let Some(peer_idx) = self.peer_of(hint.server) else { return false };
        let peer = &mut self.peers[peer_idx];
        let news = peer.hint.replace((hint.addr, hint.epoch)) != Some((hint.addr, hint.epoch));
        if news && !peer.is_up() {
            self.greet(peer_idx);
        } else if news && peer.epoch != Some(hint.epoch) {
            peer.ping_for(now, now);
        }
        true
    }
}

impl Peer {
    /// The operator says where one is that has never answered.
    pub(super) fn list(&mut self, info: ServerInfo) {
        self.addr = info.addr;
        self.info = info;
    }

    /// Where it was heard last, where it is listed, and where it said that it is.
    fn addresses(&self) -> [SocketAddr; 3] {
        [self.addr, self.info.addr, self.hint.map_or(self.addr, |(addr, _)| addr)]
    }

    /// Where the next hello goes: each address in turn.
    pub(super) fn next_address(&self) -> SocketAddr {
        let addresses = self.addresses();
        let Some(last) = self.greeting.as_ref().and_then(|greeting| greeting.sent_to) else { return self.addr };
        let after = addresses.iter().position(|address| *address == last).map_or(0, |at| at + 1);
        let in_turn = addresses.iter().cycle().skip(after).take(addresses.len());
        in_turn.copied().find(|address| *address != last).unwrap_or(self.addr)
    }

    /// It answered a hello. Who has several addresses may answer from one that is not known: then it is where it was.
    pub(super) fn found_at(&mut self, from: SocketAddr) {
        if self.addresses().contains(&from) {
            self.addr = from;
        }
    }
}
