//! Goes through the pages that are looked at.

use std::time::Duration;

use super::{COUNT_EVERY, PACE_MAX, PACE_MIN, PASSED_OVER_MAX, Scrub};
use crate::client::Client;
use crate::client::exchange::{Exchange, Request, Role};
use crate::client::index::{ListIndex, PeerIndex, SpaceIndex};
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::units::{Class, PAGE_SIZE, SlabNo, Time, Version};
use crate::wire::message::{Op, Status};

impl Client {
    /// When a page is to be looked at next.
    pub(in crate::client) fn scrub_due(&self) -> Option<Time> {
        self.config.scrub_pass.and(self.scrub.due)
    }

    /// Looks at the next page, if it is time.
    pub(in crate::client) fn scrub(&mut self, now: Time) {
        let Some(pass) = self.config.scrub_pass else { return };
        let due = *self.scrub.due.get_or_insert(now + PACE_MAX.min(pass));
        if now < due {
            return;
        }
        if self.scrub.pace.is_zero() || now.since(self.scrub.paced_at) >= COUNT_EVERY {
            (self.scrub.pace, self.scrub.paced_at) = (self.pace(pass), now);
        }
        self.scrub.due = Some(now + self.scrub.pace);
        // One at a time: a server that has not answered the last one has enough to do.
        if self.is_scrubbing() {
            return;
        }
        for _ in 0..PASSED_OVER_MAX {
            if self.look_at_next() {
                return;
            }
        }
    }

    /// Whether a page that was asked for is still to come. One at a server that is away is not.
    fn is_scrubbing(&mut self) -> bool {
        let exchange = self.scrub.exchange.and_then(|id| self.exchanges.get(id)).copied();
        match exchange {
            Some(exchange) if self.peers[exchange.peer].is_down() => {
                self.cancel(exchange.id);
                false
            }
            Some(_) => true,
            None => false,
        }
    }

    /// For a look at everything in that time.
    fn pace(&self, pass: Duration) -> Duration {
        let kept = self.spaces.iter().filter(|space| space.tenure != Tenure::Follower);
        let slabs = kept.flat_map(|space| &space.slabs);
        let copies: usize = slabs.map(|slab| slab.entry.replicas.len()).sum();
        let pages = u32::try_from(copies * self.config.slab_size.pages());
        let pace = pages.map_or(PACE_MIN, |pages| pass.checked_div(pages).unwrap_or(PACE_MAX));
        pace.clamp(PACE_MIN, PACE_MAX)
    }

    /// Moves on by a copy of a page. `true` if it was asked for.
    fn look_at_next(&mut self) -> bool {
        let Scrub { space, slab, index, copy, .. } = self.scrub;
        let go_to = |scrub: &mut Scrub, space, slab, index| {
            (scrub.space, scrub.slab, scrub.index, scrub.copy) = (space, slab, index, 0);
            false
        };
        let Some(state) = self.spaces.get(space) else { return go_to(&mut self.scrub, SpaceIndex(0), SlabNo(0), 0) };
        if state.tenure == Tenure::Follower {
            return go_to(&mut self.scrub, space.next(), SlabNo(0), 0);
        }
        let Some(at) = state.slabs.get(slab) else { return go_to(&mut self.scrub, space.next(), SlabNo(0), 0) };
        let open = matches!(at.phase, Phase::Open) && !state.is_taken && !state.is_stale;
        if !open || index >= self.config.slab_size.pages() {
            return go_to(&mut self.scrub, space, slab.next(), 0);
        }
        let version = at.version(index);
        let peer = at.entry.replicas.get(copy).and_then(|replica| self.peer_of(replica.server));
        let Some(peer) = peer.filter(|_| version.has_content() && !at.is_disputed(index)) else {
            return go_to(&mut self.scrub, space, slab, index + 1);
        };
        let usable = self.peers[peer].is_up() && self.may_be_scrubbed(space, slab, peer);
        let usable = usable && !self.is_written(space, slab, index);
        self.scrub.copy += 1;
        if !usable {
            return false;
        }
        let page = self.config.slab_size.page(slab, index);
        let request = Request { role: Role::Scrub, peer, op: Op::Read, class: Class::Rebuild, space, page, version };
        self.scrub.exchange = self.ask_for(request);
        true
    }

    /// Not a copy that is worthless, nor a reader's at a server that does not know it yet.
    fn may_be_scrubbed(&self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) -> bool {
        let state = &self.spaces[space];
        let may_be_written = state.tenure == Tenure::Reader && state.layout.is_ledger(slab);
        let known = !may_be_written && (!self.is_grouped(space, slab) || state.fenced_at.has(peer));
        known && self.sound_copies(space, slab).has(peer) && !state.unknown_at.has(peer)
    }

    fn is_written(&self, space: SpaceIndex, slab: SlabNo, index: usize) -> bool {
        let page = self.config.slab_size.page(slab, index);
        self.ops.busy.contains_key(&Client::busy_key(space, page))
    }

    /// A copy returned what it has of a page.
    pub(in crate::client) fn scrub_answered(
        &mut self,
        asked: &Exchange,
        status: Status,
        version: Version,
        payload: &[u8],
    ) {
        let Exchange { space, page, peer, .. } = *asked;
        let Some(slab) = self.slab_of(page) else { return };
        if status != Status::Ok || self.is_another_copy(space, version) {
            return self.copy_lost(space, slab, peer);
        }
        let index = self.config.slab_size.index(page);
        let state = &self.spaces[space].slabs[slab];
        let copies = self.sound_copies(space, slab);
        // Written since, or being written: what came may be either. Or no copy of the slab any more.
        if state.version(index) != asked.version || self.is_written(space, slab, index) || !copies.has(peer) {
            return;
        }
        self.stats.scrubbed += 1;
        let mut content = [0; PAGE_SIZE];
        let key = &self.spaces[space].key;
        // Parity is under no seal of its own.
        let is_parity = self.spaces[space].layout.is_parity(slab);
        let is_later = is_parity && version > asked.version;
        let is_right = is_parity || key.open(page, version, payload, &mut content).is_ok();
        if (version == asked.version || is_later) && is_right {
            return;
        }
        self.stats.scrub_bad += 1;
        if copies.iter().any(|other| other != peer && self.peers[other].is_up()) {
            self.copy_lost(space, slab, peer);
        }
    }
}
