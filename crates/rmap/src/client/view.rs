//! What callers can know of a client: its servers, its spaces, and whether it has something to do.

use std::time::Duration;

use crate::client::exchange::Role;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::parity::ParityView;
use crate::client::parity::layout::LEDGER_COPIES;
use crate::client::peer::{Peer, Reach, ServerView};
use crate::client::reserve::Reserved;
use crate::client::sealed::Tenure;
use crate::client::slab::{Phase, Slab};
use crate::client::{Client, SpaceRef, exchange, ops};
use crate::control::ControlRequest;
use crate::units::{PageNo, ServerId, SlabNo, Time};

/// Pages that follow one another and are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    pub pages: u64,
    /// Zero by what this owner knows: never written, or trimmed. What is being written may be either, but for what has failed as
    /// [`Failure::Silent`](super::Failure::Silent): its caller takes it for over, and it may be done yet. A newer owner may know better:
    /// who acknowledges a trim because of this asks [`Client::confirm`] first.
    pub hole: bool,
}

impl Client {
    /// What is known of each server, in the order they were added.
    pub fn servers(&self) -> impl Iterator<Item = ServerView> {
        self.pool.sessions.peers.iter().map(Peer::view)
    }

    /// Pages of replies that may be under way now: fewer after losses.
    pub fn window(&self) -> usize {
        self.pool.sessions.exchanges.window
    }

    /// Reads that wait for a server that is silent, at most [`QUEUED_READS_MAX`](super::QUEUED_READS_MAX): they keep no
    /// slot from others.
    pub fn queued(&self) -> usize {
        self.pages.queued()
    }

    /// How each server is reached, in the order they were added.
    pub fn reach(&self) -> impl Iterator<Item = (ServerId, Reach)> {
        self.pool.sessions.peers.iter().map(|peer| (peer.info().id, peer.reach()))
    }

    /// Smoothed round trip to a server.
    pub fn round_trip(&self, server: ServerId) -> Option<Duration> {
        self.pool.sessions.peers.of(server).map(|peer| self.pool.sessions.peers[peer].round_trip())
    }

    /// Slabs of a space that have all their copies in sync, and those that have some.
    pub fn in_sync(&self, space: SpaceRef) -> (usize, usize) {
        let held = self.pool.map.spaces[space.0].slabs.enumerate().filter(|(_, slab)| !slab.entry.replicas.is_empty());
        held.fold((0, 0), |(whole, held), (number, slab)| {
            let is_whole = slab.entry.replicas.len() >= self.parity.wanted_copies(&self.pool, space.0, number);
            (whole + usize::from(is_whole), held + 1)
        })
    }

    /// What this client may do with a space now.
    pub fn tenure(&self, space: SpaceRef) -> Tenure {
        self.pool.map.spaces[space.0].tenure
    }

    /// Whether another owner has the space, or there is none any more: all that is asked of it fails.
    pub fn is_taken(&self, space: SpaceRef) -> bool {
        self.pool.map.spaces[space.0].is_taken
    }

    /// Whether every copy of the map has the same, and nothing is under way that could change that: then it may be sealed.
    pub fn is_even(&self, space: SpaceRef) -> bool {
        let even = |slab: &Slab| matches!(slab.phase, Phase::Vacant | Phase::Open | Phase::Lost);
        let writes = self.pages.ops.any(|op| op.space == space.0 && op.kind != ops::Kind::Read);
        !writes && self.pool.map.spaces[space.0].slabs.iter().all(|slab| even(slab) && slab.pending.is_none())
    }

    /// How many pages from `page` on, at most `max`, are alike in being holes or not. Ends with the slab.
    pub fn page_run(&self, space: SpaceRef, page: PageNo, max: u64) -> PageRun {
        let (space_idx, space, size) = (space.0, &self.pool.map.spaces[space.0], self.pool.map.size);
        let Some(slab) = self.pool.map.slab_of(page).and_then(|slab| space.slabs.get(slab)) else {
            return PageRun { pages: max, hole: false };
        };
        let index = size.index(page);
        let pages = max.min((size.pages() - index) as u64);
        match slab.phase {
            _ if space.is_taken => PageRun { pages, hole: false },
            Phase::Vacant | Phase::Granting(_) | Phase::Leaving => PageRun { pages, hole: true },
            Phase::Opening(_) | Phase::Lost | Phase::Followed => PageRun { pages, hole: false },
            Phase::Open => {
                let number = page.0;
                let reported = self.pages.ops.first_reported(space_idx, number..number + pages);
                if reported == Some(number) {
                    return PageRun { pages: 1, hole: false };
                }
                let pages = reported.map_or(pages, |reported| reported - number);
                let is_hole = |index: usize| !slab.version(index).has_content() && !slab.is_disputed(index);
                let hole = is_hole(index);
                let pages = (index..index + pages as usize).take_while(|at| is_hole(*at) == hole).count() as u64;
                PageRun { pages, hole }
            }
        }
    }

    /// Whether nothing is under way: no operation, no copy, no question.
    pub fn is_idle(&self) -> bool {
        let transfers = |space: SpaceIndex, slab| {
            !self.pool.map.spaces[space].is_taken && self.pool.map.transfer_of(space, slab).is_some()
        };
        let transfers = self.pool.map.timed().any(|(space, slab)| transfers(space, slab));
        !transfers
            && self.pages.is_idle()
            && self.redundancy.copies.is_idle()
            && self.parity.stripes.is_idle()
            && self.parity.is_ledger_idle(&self.pool)
            && self.pool.map.questions.is_empty()
    }

    /// How long the control plane has not answered what was asked first of all that is open.
    pub fn control_silent_for(&self, now: Time) -> Option<Duration> {
        self.pool.map.questions.silent_for(now)
    }

    /// Whether no request to a server that answers and no question to the control plane is unanswered.
    pub fn is_settled(&self) -> bool {
        let open = self
            .pool
            .sessions
            .exchanges
            .find(|e| e.role != exchange::Role::Scrub && !self.pool.sessions.peers[e.peer].is_down());
        self.pool.map.questions.is_empty() && open.is_none() && !self.pool.sessions.is_returning()
    }

    /// How far the parity of a space is.
    pub fn parity(&self, space: SpaceRef) -> ParityView {
        let (space, state) = (space.0, &self.pool.map.spaces[space.0]);
        let mut view = ParityView::default();
        for group in state.layout.groups() {
            let columns: Vec<&Slab> = state.layout.columns(group).filter_map(|slab| state.slabs.get(slab)).collect();
            if state.layout.members(group).all(|slab| !state.slabs[slab].is_held()) {
                continue;
            }
            view.groups += 1;
            view.with_parity += usize::from(self.pool.map.has_parity(space, group));
            view.stuck += usize::from(columns.iter().any(|slab| slab.is_stuck || slab.table == Table::Refused));
            let copies = || columns.iter().flat_map(|slab| &slab.entry.replicas);
            let mut servers: Vec<u32> = copies().map(|replica| replica.server.0).collect();
            servers.sort_unstable();
            servers.dedup();
            let held = columns.iter().filter(|slab| slab.is_held()).count();
            let single = columns.iter().all(|slab| slab.entry.replicas.len() == usize::from(slab.is_held()));
            let copies = |slab: SlabNo| state.slabs.get(slab).map_or(0, |slab| slab.entry.replicas.len());
            let has_ledger = self.pool.map.ledger_slabs(space, group).all(|slab| copies(slab) >= LEDGER_COPIES);
            let is_whole = self.pool.map.has_parity(space, group) && single && servers.len() == held && has_ledger;
            view.whole += usize::from(is_whole);
        }
        view
    }

    /// Groups of a space whose parity is in the map.
    pub fn groups_with_parity(&self, space: SpaceRef) -> usize {
        self.pool.map.spaces[space.0].layout.groups().filter(|group| self.pool.map.has_parity(space.0, *group)).count()
    }

    /// What is kept for a space by servers that answer.
    pub fn reserved(&self, space: SpaceRef) -> Reserved {
        self.redundancy.reserved(space.0, &self.pool.sessions.peers)
    }

    /// Whether slabs are on their way back to servers that answer: nobody else knows of them.
    pub fn is_giving_back(&self) -> bool {
        let leaves = |request: &ControlRequest| matches!(request, ControlRequest::Change(change) if change.entry.empty);
        self.pool.map.questions.iter().any(|question| leaves(&question.request)) || self.pool.sessions.is_returning()
    }

    /// Whether everything that earlier owners left at servers that answer was found. It may still be on its way back.
    pub fn has_found_leftovers(&self, space: SpaceRef) -> bool {
        let is_asking = self
            .pool
            .sessions
            .exchanges
            .find(|e| e.space == space.0 && e.role == Role::Held && self.pool.sessions.peers[e.peer].is_up());
        let waits = |of: SpaceIndex, peer: PeerIndex| of == space.0 && self.pool.may_look(of, peer);
        is_asking.is_none()
            && self.pool.map.leftovers.count(waits) == 0
            && self.pool.sessions.peers.indices().all(|peer| !self.pool.is_to_be_looked_at(space.0, peer))
    }

    /// Servers that say that the space has a newer owner, and are not believed. What earlier owners left there is not known.
    pub fn disbelieved(&self, space: SpaceRef) -> Vec<ServerId> {
        self.pool.map.spaces[space.0].disbelieved.iter().map(|peer| self.pool.sessions.peers[peer].info().id).collect()
    }
}
