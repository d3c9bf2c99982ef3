//! Servers are told of the owner of a space before they are asked for anything of it.
//!
//! An owner and a keeper tell each server that has a copy before they count on that copy. A server that still has what it was
//! told never says to them that it does not know their generation. The copy of one that says so counts as lost.
//!
//! A reader of a sealed space may have begun when a server was away. Such a server answers that it does not know the reader's
//! generation. That says nothing of its copy. So the reader tells it, asks it nothing until then, and then asks it again. A copy
//! is lost only if its server does not hold the slab, has another grant of it, or has begun a new life.
//!
//! A server that has something of a space never forgets its owner. If it says that it does not know the generation, is told, and
//! says so once more, it is not to be relied on. Its copies count as lost. So nobody is told and asked over and over.
//!
//! A server may say to a reader that the space has a newer generation. The reader then asks for the map, and believes the server
//! if the map says so, too. If the map does not, the server *refuses*: the other copies are asked, and this server again after a
//! while. It loses no copy for that, because honest servers say so, too, if a control plane was restored from a backup.

use crate::client::Client;
use crate::client::exchange::{EXCHANGES_MAX, Exchange, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::sealed::{Tenure, Watch};
use crate::wire::message::Status;

impl Role {
    /// What a reader asks of a copy that a server is thought to have.
    fn is_about_copy(self) -> bool {
        matches!(self, Role::Read { .. } | Role::Strip { .. } | Role::Scrub | Role::Versions | Role::Check)
    }
}

impl Client {
    pub(in crate::client) fn fence_answered(&mut self, space: SpaceIndex, peer: PeerIndex, status: Status) {
        let state = &mut self.pool.map.spaces[space];
        state.fencing.remove(peer);
        let was_asked = state.unknown_at.has(peer);
        if status == Status::Ok {
            self.pool.was_let_in(space, peer);
        } else {
            self.redundancy.was_not_let_in(&mut self.pool, &mut self.parity, space, peer);
        }
        self.pool.map.spaces[space].unknown_at.remove(peer);
        self.redundancy.owner_was_told(space);
        self.pool.map.mark_all_of(space);
        if was_asked && status == Status::Ok {
            self.pages.ask_again(&mut self.pool, &mut self.parity, space);
        } else if was_asked {
            self.redundancy.has_nothing(&mut self.pool, &mut self.pages, &mut self.parity, space, peer);
        }
    }

    /// A server that was asked for something of a copy does not know this reader. `true`: it will be told, and asked again. `false`: it
    /// was told for that already, or by an owner or keeper.
    pub(in crate::client) fn is_to_be_notified(&mut self, exchange: &Exchange) -> bool {
        let Exchange { role, space, peer, .. } = *exchange;
        let state = &mut self.pool.map.spaces[space];
        let is_reader = state.tenure == Tenure::Reader;
        if !is_reader || !role.is_about_copy() || state.notified_again.has(peer) {
            return false;
        }
        self.pool.stats.notified_again += 1;
        state.notified_again.insert(peer);
        state.unknown_at.insert(peer);
        state.fenced_at.remove(peer);
        self.redundancy.is_not_asked(&mut self.pool, &mut self.pages, &mut self.parity, exchange);
        // What else is under way there would be answered so, too, and may be so after it was told.
        for slot in 0..EXCHANGES_MAX {
            let ours = |e: &Exchange| e.space == space && e.peer == peer && e.role.is_about_copy();
            if let Some(other) = self.pool.sessions.exchanges.at(slot).filter(ours) {
                self.pool.sessions.end_exchange(other.id);
                self.redundancy.is_not_asked(&mut self.pool, &mut self.pages, &mut self.parity, &other);
            }
        }
        self.pool.fence(space, peer);
        true
    }

    /// A server says that another client has a newer generation of the space. Of a sealed one the map tells whether that is so.
    pub(in crate::client) fn says_newer(&mut self, space: SpaceIndex, peer: PeerIndex) {
        let state = &mut self.pool.map.spaces[space];
        if matches!(state.tenure, Tenure::Reader | Tenure::Keeper) {
            state.accused.insert(peer);
            // What is being looked up may be from before.
            state.watch.iter_mut().for_each(Watch::looks_again);
        }
        self.space_taken(space);
    }
}
