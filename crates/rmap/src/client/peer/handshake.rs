//! How a session begins, and where its server is: as the operator lists it, as it was heard, and as it says itself.
//!
//! A hint is believed as far as it takes to say hello there. The hello is for the one who has the server's key, and its
//! answer is what proves the place. So a hint that is wrong costs a few hellos, and the listed address stays in use.

use std::net::SocketAddr;

use super::greeting::Greeting;
use super::{Peer, Reach};
use crate::client::config::ClientConfig;
use crate::client::servers::{Hint, ServerInfo};
use crate::crypto::PoolKey;
use crate::crypto::entropy::SharedEntropy;
use crate::crypto::handshake::Initiator;
use crate::crypto::session::Session;
use crate::units::Time;
use crate::wire::PROTOCOL_VERSION;
use crate::wire::datagram::{Head, Versions};

/// What a server is taken to have until it says so in its first reply. With little, the first writes to several slabs would
/// be declined; with too much, a server that is full says no.
const ROOM_UNREPORTED: u32 = crate::units::SLABS_MAX as u32;

/// What a server's answer to a hello says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// It has slabs of another size, or is another server.
    Incompatible,
    /// A session has begun; the server is in another life than in the last one, or not.
    Session { is_restarted: bool },
}

impl Peer {
    /// The operator says where one is that has never answered.
    pub fn list(&mut self, info: ServerInfo) {
        self.addr = info.addr;
        self.info = info;
    }

    /// It says where it is. One that answers, but says that it has begun a new life, is asked for a sign of the old one. `true` if it
    /// is to be greeted there.
    pub fn hint(&mut self, now: Time, hint: &Hint) -> bool {
        let is_news = self.hint.replace((hint.addr, hint.epoch)) != Some((hint.addr, hint.epoch));
        if is_news && self.is_up() && self.epoch != Some(hint.epoch) {
            self.ping_for(now, now);
        }
        is_news && !self.is_up()
    }

    /// Begins a handshake for a session that is called `number`.
    pub fn greet(&mut self, number: u32, config: &ClientConfig, entropy: &SharedEntropy) {
        let versions = Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION };
        let head = Head::Hello { versions, sender: number };
        let initiator = Initiator::new(&config.keys, &self.info.key, &config.pool, head, entropy);
        self.greeting = Some(Greeting::new(initiator, number));
    }

    pub fn is_greeted(&self) -> bool {
        self.greeting.is_some()
    }

    /// Whether it refused the hello, and not somebody else. `None`: there was none of that number.
    pub fn has_refused(&self, number: u32, datagram: &[u8], pool: &PoolKey) -> Option<bool> {
        let greeting = self.greeting.as_ref().filter(|greeting| greeting.number == number)?;
        Some(pool.admits_refusal(datagram, &greeting.initiator.hello))
    }

    /// It answered the hello of that number; `sender` is what it calls the session. `None`: the answer is of no use.
    pub fn accept(
        &mut self,
        now: Time,
        from: SocketAddr,
        (number, sender): (u32, u32),
        datagram: &[u8],
        config: &ClientConfig,
    ) -> Option<Accepted> {
        let greeting = self.greeting.as_mut().filter(|greeting| greeting.number == number)?;
        let (sent_at, _) = greeting.sent()?;
        let (secrets, about) = greeting.initiator.finish(datagram).ok()?;
        if about.slab_pages as usize != config.slab_size.pages() || about.server != self.info.id {
            return Some(Accepted::Incompatible);
        }
        let mut session = Session::client(&secrets, sender);
        if let Some(datagrams) = config.rekey_every {
            session.rekey_every(datagrams);
        }
        // Who has several addresses may answer from one that is not known: then it is where it was.
        if self.addresses().contains(&from) {
            self.addr = from;
        }
        let before = self.epoch.replace(about.epoch);
        (self.session, self.number, self.greeting) = (Some(session), number, None);
        self.write_credits = about.write_credits;
        self.overflow_disk = about.overflow_disk;
        self.trip.sample(now.since(sent_at));
        self.timeouts = 0;
        self.path.begin(config.datagram_max);
        // Every candidate for a slab until the first reply says otherwise.
        self.free_slabs = ROOM_UNREPORTED;
        Some(Accepted::Session { is_restarted: before.is_some_and(|epoch| epoch != about.epoch) })
    }

    /// Its keys are used up, and no new session is on its way.
    pub fn needs_session(&self) -> bool {
        self.reach == Reach::Up && !self.is_greeted() && self.session.as_ref().is_some_and(Session::is_worn_out)
    }

    /// Where it was heard last, where it is listed, and where it said that it is.
    fn addresses(&self) -> [SocketAddr; 3] {
        [self.addr, self.info.addr, self.hint.map_or(self.addr, |(addr, _)| addr)]
    }

    /// Where the next hello goes: each address in turn.
    pub(super) fn next_address(&self) -> SocketAddr {
        let addresses = self.addresses();
        let Some((_, last)) = self.greeting.as_ref().and_then(Greeting::sent) else { return self.addr };
        let after = addresses.iter().position(|address| *address == last).map_or(0, |at| at + 1);
        let in_turn = addresses.iter().cycle().skip(after).take(addresses.len());
        in_turn.copied().find(|address| *address != last).unwrap_or(self.addr)
    }
}
