//! Asks servers for slabs and reconciles what they have.

use smallvec::SmallVec;

use super::{ListStep, Listing};
use crate::client::exchange::{Answer, Exchange, Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::map::Map;
use crate::client::outcome::COPIES_MAX;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::{PeerSet, Reach};
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::repair::Step;
use crate::client::sealed::Tenure;
use crate::client::sessions::Sessions;
use crate::client::slab::{Candidate, Candidates, GrantStep, Phase};
use crate::client::{Client, Failure, Fault, trims};
use crate::control::{MapEntry, Replica};
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::message::{Op as Wire, Status, VERSIONS_MAX};

impl Client {
    /// Looks at a slab and does what comes next, whatever has happened to it.
    pub(in crate::client) fn advance(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) {
        #[cfg(test)]
        {
            self.advanced += 1;
        }
        if self.pool.map.spaces[space].is_taken || self.pool.map.spaces[space].is_stale {
            return;
        }
        if self.pool.map.is_followed(space) {
            return self.pages.advance_followed(&mut self.pool, &mut self.parity, space, slab);
        }
        self.pages.end_refusal(&mut self.pool, &mut self.parity, now, space);
        self.pool.notify_who_asked(space);
        if !self.pool.sessions.peers.long_silent().is_empty() || self.pages.ops.any_reported() {
            self.pages.maintain_unanswered(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
        self.pages.maintain_unmapped(&mut self.pool, &mut self.redundancy, &mut self.parity, now, space, slab);
        if self.parity.advance_grouped(&mut self.pool, &mut self.pages, &mut self.redundancy, now, space, slab) {
            return;
        }
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        if matches!(state.phase, Phase::Opening(_)) && state.entry.lost {
            state.phase = Phase::Lost;
        }
        match self.pool.map.spaces[space].slabs[slab].phase {
            Phase::Vacant => {
                let size = self.pool.map.size;
                let waits = |op: &crate::client::ops::Operation| {
                    op.stage == crate::client::ops::Stage::Waiting
                        && op.kind != crate::client::ops::Kind::Read
                        && op.space == space
                        && size.slab(op.page) == Some(slab)
                };
                let wanted = self.pages.ops.any(waits);
                if wanted && self.pool.map.is_in_frozen(space, slab) {
                    // It is of its group that it waits to be free.
                } else if wanted && self.pool.ends_unasked(now) && self.pages.ops.any(|op| waits(op) && !op.is_own) {
                    self.pages.end_unmapped(&mut self.pool, &mut self.redundancy, &mut self.parity, now, space, slab);
                } else if wanted {
                    self.pool.map.spaces[space].slabs[slab].phase = Phase::Granting(Candidates::default());
                    self.advance_granting(now, space, slab);
                }
            }
            Phase::Granting(_) => self.advance_granting(now, space, slab),
            Phase::Opening(_) => self.advance_opening(now, space, slab),
            Phase::Open if self.pool.map.spaces[space].tenure == Tenure::Reader => {
                self.pool.look_after(&self.parity, space, slab)
            }
            Phase::Open => {
                self.redundancy.advance_open(&mut self.pool, &mut self.pages, &mut self.parity, now, space, slab)
            }
            Phase::Leaving => {
                self.pages.wait_for_map(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab)
            }
            Phase::Followed => {}
            Phase::Lost => {
                self.pages.fail_ops(
                    &mut self.pool,
                    &mut self.redundancy,
                    &mut self.parity,
                    space,
                    Some(slab),
                    Failure::Lost,
                );
                self.pool.look_after_if_reader(&self.parity, space, slab);
            }
        }
    }

    fn advance_granting(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) {
        if self.pool.map.spaces[space].slabs[slab].pending.is_some() {
            return self.pages.wait_for_map(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
        let Phase::Granting(mut candidates) =
            std::mem::replace(&mut self.pool.map.spaces[space].slabs[slab].phase, Phase::Vacant)
        else {
            return;
        };
        let copies = self.parity.wanted_copies(&self.pool, space, slab);
        let silent = |c: &Candidate| self.pool.sessions.peers[c.peer].is_down() && c.step != GrantStep::Granted;
        let asked_in_vain: SmallVec<[Candidate; COPIES_MAX]> =
            candidates.asked.iter().filter(|c| silent(c) && c.step == GrantStep::Asked).copied().collect();
        candidates.refuse(silent);
        for candidate in asked_in_vain {
            self.redundancy.forget_grant(&mut self.pool, &mut self.pages, &mut self.parity, space, slab, candidate);
        }
        while candidates.asked.len() < copies {
            let taken = candidates.peers();
            let nobody_else = candidates.asked.is_empty() && !self.pool.sessions.someone_may_come();
            let picked = self.redundancy.pick_server(&mut self.pool, space, taken);
            let last = || if nobody_else { self.pool.overflow_disk(taken) } else { None };
            let Some(peer) = picked.or_else(last) else { break };
            let Some(grant) = self.pool.map.spaces[space].next_version(false) else { break };
            candidates.asked.push(Candidate { peer, grant, step: GrantStep::Fencing });
        }
        for candidate in &mut candidates.asked {
            if candidate.step == GrantStep::Fencing
                && self.pool.fence(space, candidate.peer)
                && self.pool.grant(space, slab, candidate.peer, candidate.grant)
            {
                candidate.step = GrantStep::Asked;
            }
        }
        if candidates.asked.is_empty() {
            // The phase is vacant again: the next write tries anew. A server that may still come is waited for.
            if self.pool.sessions.someone_may_come() {
                return;
            }
            return match self.pool.patience_ends(now) {
                Some(at) => self.pool.map.mark_at(at, space, slab),
                None => self.pages.decline_full(&mut self.pool, now, space, slab),
            };
        }
        let all_granted = candidates.asked.iter().all(|candidate| candidate.step == GrantStep::Granted);
        let replica = |c: &Candidate| Replica { server: self.pool.sessions.peers[c.peer].info().id, grant: c.grant };
        let entry = MapEntry::of(candidates.asked.iter().map(replica));
        self.pool.map.spaces[space].slabs[slab].phase = Phase::Granting(candidates);
        if all_granted {
            self.pool.map.propose(space, slab, entry);
            self.pages.wait_for_map(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        }
    }

    /// A server answered a request for a slab, for its first copies or for a new one.
    pub(in crate::client) fn grant_answered(
        &mut self,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
        grant: Version,
        status: Status,
    ) {
        self.pool.map.mark(space, slab);
        if status == Status::StaleGeneration {
            return self.space_taken(space);
        }
        if matches!(status, Status::NotFenced | Status::UnknownSlab) {
            return self.pool.map.grant_after_fence(space, slab, peer, grant);
        }
        if status != Status::Ok {
            self.pool.sessions.peers[peer].found_full();
        }
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        if let Phase::Granting(candidates) = &mut state.phase {
            let asked = |c: &Candidate| c.peer == peer && c.grant == grant && c.step == GrantStep::Asked;
            if status == Status::Ok {
                candidates.asked.iter_mut().filter(|c| asked(c)).for_each(|c| c.step = GrantStep::Granted);
            } else {
                candidates.refuse(asked);
            }
        }
        if let Some(repair) = &mut state.repair
            && repair.grant == grant
        {
            if status == Status::Ok {
                repair.granted(&mut self.pool.map.tables);
            } else {
                self.redundancy.end_repair(&mut self.pool, space, slab);
                self.parity.has_refused(&mut self.pool, space, slab, peer);
            }
        }
    }

    fn advance_opening(&mut self, now: Time, space: SpaceIndex, slab: SlabNo) {
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        let doubt = state.doubt.take();
        if state.pending.is_some() {
            return;
        }
        let Phase::Opening(mut listings) = std::mem::replace(&mut state.phase, Phase::Vacant) else { return };
        state.make_table(&mut self.pool.map.tables);
        let replicas = state.entry.replicas.clone();
        let present = |listing: &Listing| replicas.iter().any(|r| r.grant == listing.grant);
        if !listings.iter().all(present) {
            // A copy left. A page on its way from it to another may have arrived or not: ask once that is over.
            if self.redundancy.copies.any_of(space, slab) {
                self.pool.map.spaces[space].slabs[slab].phase = Phase::Opening(listings);
                return;
            }
            listings.clear();
        }
        for replica in &replicas {
            if let Some(peer) = self.pool.sessions.peers.of(replica.server)
                && !listings.iter().any(|listing| listing.peer == peer)
            {
                listings.push(Listing { peer, grant: replica.grant, step: ListStep::Fencing, list: Vec::new() });
            }
        }
        for listing in &mut listings {
            if self.pool.map.spaces[space].slabs[slab].failed.has(listing.peer) {
                listing.step = ListStep::Bad;
            }
            let refuses = self.pool.map.spaces[space].refusing.has(listing.peer);
            listing.step = match listing.step {
                ListStep::Fencing if refuses => ListStep::Refused,
                ListStep::Refused if !refuses => ListStep::Fencing,
                step => step,
            };
            if listing.step == ListStep::Fencing
                && self.pool.sessions.peers[listing.peer].is_up()
                && self.pool.fence(space, listing.peer)
                && self.pool.ask_versions(space, slab, listing.peer, 0)
            {
                listing.step = ListStep::Asked;
            }
        }
        let away =
            |listing: &Listing| self.pool.sessions.peers[listing.peer].is_down() && listing.step != ListStep::Bad;
        let waits = |listing: &Listing| {
            matches!(listing.step, ListStep::Fencing | ListStep::Asked)
                && !self.pool.sessions.peers[listing.peer].is_down()
        };
        let usable =
            |listing: &Listing| listing.step == ListStep::Done && !self.pool.sessions.peers[listing.peer].is_down();
        let waiting = listings.iter().any(waits);
        if self.pool.map.spaces[space].tenure == Tenure::Reader {
            if waiting {
                self.pool.map.spaces[space].slabs[slab].phase = Phase::Opening(listings);
            } else {
                self.pool.map.spaces[space].slabs[slab].phase = Phase::Opening(Vec::new());
                self.read_listings(space, slab, &listings);
            }
            return;
        }
        let is_good = |replica: &&Replica| listings.iter().any(|l| usable(l) && l.grant == replica.grant);
        let good = MapEntry::of(replicas.iter().filter(is_good).copied());
        let silent: PeerSet = listings.iter().filter(|l| away(l)).map(|listing| listing.peer).collect();
        let is_whole = !waiting && good.replicas.len() == replicas.len();
        let is_same = is_whole && self.redundancy.reconcile(&mut self.pool, &mut self.parity, space, slab, &listings);
        self.pool.map.spaces[space].slabs[slab].phase = Phase::Opening(listings);
        if is_same {
            return self.opens(space, slab);
        }
        if waiting || is_whole {
            return;
        }
        if good.replicas.is_empty() {
            if silent.is_empty() {
                self.pool.map.propose(space, slab, MapEntry::lost());
            }
        } else if self.pool.may_leave(now, (space, slab), doubt, silent, self.pool.sessions.peers_of(&good)) {
            self.pool.map.propose(space, slab, good);
        }
    }

    /// A copy told the versions of some of its pages.
    pub(in crate::client) fn versions_answered(
        &mut self,
        space: SpaceIndex,
        page: PageNo,
        peer: PeerIndex,
        Answer { status, version: grant, payload }: Answer<'_>,
    ) {
        let Some(slab) = self.pool.map.slab_of(page) else { return };
        self.pool.map.mark(space, slab);
        if status == Status::StaleGeneration {
            return self.space_taken(space);
        }
        let (size, generation) = (self.pool.map.size, self.pool.map.spaces[space].generation);
        // A reader is no owner: the keeper of today may have written the ledger.
        let by_keeper =
            self.pool.map.spaces[space].tenure == Tenure::Reader && self.pool.map.spaces[space].layout.is_ledger(slab);
        let first_own = Version::new(generation, if by_keeper { Version::SEQUENCE_MAX } else { 0 }, true);
        let Phase::Opening(listings) = &mut self.pool.map.spaces[space].slabs[slab].phase else { return };
        let Some(listing) = listings.iter_mut().find(|l| l.peer == peer && l.step == ListStep::Asked) else { return };
        let index = size.index(page);
        if index != listing.list.len() {
            return;
        }
        let due = VERSIONS_MAX.min(size.pages() - index);
        if status != Status::Ok || grant != listing.grant || payload.len() != due * 8 {
            listing.step = ListStep::Bad;
            return;
        }
        if listing.list.is_empty() {
            listing.list = self.pool.map.tables.take_empty();
        }
        for word in payload.chunks_exact(8) {
            let mut bits = [0; 8];
            bits.copy_from_slice(word);
            listing.list.push(Version::from_bits(u64::from_le_bytes(bits)));
        }
        let next = listing.list.len();
        if next >= size.pages() {
            // Nobody but this owner writes versions of its generation, and it has written nothing here but what it has taken over.
            let made_up = listing.list.iter().any(|version| *version >= first_own);
            listing.step = if made_up { ListStep::Bad } else { ListStep::Done };
        } else if !self.pool.ask_versions(space, slab, peer, next) {
            self.pool.map.list_again(space, slab, peer);
        }
    }

    fn opens(&mut self, space: SpaceIndex, slab: SlabNo) {
        let state = &mut self.pool.map.spaces[space].slabs[slab];
        if let Phase::Opening(listings) = std::mem::replace(&mut state.phase, Phase::Open) {
            listings.into_iter().for_each(|listing| self.pool.map.tables.give_back(listing.list));
        }
        self.pool.map.spaces[space].slabs[slab].table = Table::Unknown;
        self.redundancy.count_content(&mut self.pool, space, slab);
        self.parity.note_change(&mut self.pool, &mut self.pages, &mut self.redundancy, space, slab);
        self.pages.map_settled(&mut self.pool, &mut self.redundancy, &mut self.parity, space, slab);
        self.pool.map.mark(space, slab);
    }
}

impl Redundancy {
    /// Nobody waits for a server's answer any more whether it grants a slab. Should it have granted it, or do so yet, it is to know
    /// that nobody has it.
    pub(in crate::client) fn forget_grant(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        candidate: Candidate,
    ) {
        let Candidate { peer, grant, .. } = candidate;
        let asks = |e: &Exchange| e.role == Role::Grant && e.space == space && e.peer == peer && e.version == grant;
        if let Some(exchange) = pool.sessions.exchanges.find(asks) {
            self.cancel(pool, pages, parity, exchange.id);
        }
        pool.sessions.release(space, slab, peer, grant);
    }
}

impl Redundancy {
    /// The server that keeps the most room for the space; where none does, two servers at random, and of them the one with more
    /// room. In a zone that has no copy yet, if there is one.
    pub(in crate::client) fn pick_server(
        &self,
        pool: &mut Pool,
        space: SpaceIndex,
        taken: PeerSet,
    ) -> Option<PeerIndex> {
        let kept = |peer: &PeerIndex| {
            if pool.sessions.peers[*peer].keeps_promises() { self.room_kept(pool, space, *peer) } else { 0 }
        };
        let open = |peer: &PeerIndex| {
            let state = &pool.sessions.peers[*peer];
            !taken.has(*peer) && (state.can_lend() || kept(peer) > 0) && !state.has_overflow_disk()
        };
        let zone = |peer: PeerIndex| pool.sessions.peers[peer].info().zone;
        let all: PeerSet = pool.sessions.peers.indices().filter(open).collect();
        let apart: PeerSet = all.iter().filter(|peer| taken.iter().all(|other| zone(other) != zone(*peer))).collect();
        let choice = if apart.is_empty() { all } else { apart };
        if choice.is_empty() {
            return None;
        }
        // Not at random: as long as the rest is spread evenly, each slab finds room at as many servers as it has copies.
        if let Some(most) = choice.iter().max_by_key(kept).filter(|peer| kept(peer) > 0) {
            return Some(most);
        }
        let any = || choice.iter().nth((pool.entropy.next_u64() % choice.len() as u64) as usize);
        let (Some(one), Some(other)) = (any(), any()) else { return None };
        let pick =
            if pool.sessions.peers[one].free_slabs() >= pool.sessions.peers[other].free_slabs() { one } else { other };
        pool.sessions.peers[pick].take_slab();
        Some(pick)
    }

    /// Brings every copy to the greatest version of every page. `true` if all have that already. Writes that the last owner had
    /// not finished may so be finished or, where no copy has them, undone: either is right. Where that would be a trim that
    /// another copy has content beneath, `trims.rs` says what is done.
    fn reconcile(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        all: &[Listing],
    ) -> bool {
        let mut behind = false;
        let all = if pool.has(Fault::OpensUnreconciled) { &all[..1] } else { all };
        // The ledger is never trimmed, and who keeps the space writes it.
        let writes = pool.map.spaces[space].tenure == Tenure::Owner || pool.map.spaces[space].layout.is_ledger(slab);
        let mut disputed = Vec::new();
        for index in 0..pool.map.size.pages() {
            let Some(best) = all.iter().max_by_key(|listing| listing.list[index]) else { return false };
            let version = best.list[index];
            let beneath = trims::beneath(all.iter(), index).filter(|_| !pool.has(Fault::BelievesTrims));
            if let Some(kept) = beneath.filter(|_| writes) {
                behind = true;
                pool.map.spaces[space].slabs[slab].versions[index] = kept.list[index];
                if !self.renew(pool, parity, (space, slab, index), kept.peer, best.peer) {
                    return false;
                }
                continue;
            }
            let kept = beneath.map(|listing| listing.list[index]);
            if pool.map.spaces[space].slabs[slab].take_listed(index, version, kept) {
                disputed.push(index);
                continue;
            }
            for listing in all.iter().filter(|listing| listing.list[index] < version) {
                behind = true;
                if !self.start_copy(pool, parity, (space, slab, index), Some(best.peer), listing.peer) {
                    return false;
                }
            }
        }
        pool.map.spaces[space].slabs[slab].disputed = disputed;
        !behind
    }
}

impl Pages {
    /// No server has room, as each said when it was last heard of, which may be a while ago. A write is declined if all of them have
    /// answered something that was sent after it began; until then they are asked.
    fn decline_full(&mut self, pool: &mut Pool, now: Time, space: SpaceIndex, slab: SlabNo) {
        let up: PeerSet = pool.sessions.peers.indices().filter(|peer| pool.sessions.peers[*peer].is_up()).collect();
        let said_at = up.iter().map(|peer| pool.sessions.peers[peer].lived_at()).min();
        self.decline_ops(pool, space, slab, said_at.unwrap_or(now));
        let latest = self.waiting_for(pool, space, slab).into_iter().map(|op| self.ops.get(op).since).max();
        if let Some(began) = latest {
            let unheard: PeerSet = up.iter().filter(|peer| pool.sessions.peers[*peer].lived_at() < began).collect();
            unheard.iter().for_each(|peer| pool.sessions.peers[peer].ask_for_room(now, began));
        }
    }
}

impl Pool {
    pub(in crate::client) fn grant(
        &mut self,
        space: SpaceIndex,
        slab: SlabNo,
        peer: PeerIndex,
        grant: Version,
    ) -> bool {
        let page = self.map.first_page(slab);
        let request =
            Request { role: Role::Grant, peer, op: Wire::Grant, class: Class::Demand, space, page, version: grant };
        self.ask(request)
    }

    /// The nearest server that keeps its pages on a disk: the one on this machine, if there is one. A slab there is one that
    /// can be written, no more.
    pub(in crate::client) fn overflow_disk(&mut self, taken: PeerSet) -> Option<PeerIndex> {
        if !self.config.uses_overflow_disk {
            return None;
        }
        let open = |peer: &PeerIndex| {
            !taken.has(*peer) && self.sessions.peers[*peer].can_lend() && self.sessions.peers[*peer].has_overflow_disk()
        };
        let all = self.sessions.peers.indices().filter(open);
        let pick = all.min_by_key(|peer| self.sessions.peers[*peer].round_trip())?;
        self.sessions.peers[pick].take_slab();
        Some(pick)
    }

    /// Until when a server that fell silent may still come back and have room: a pause is no refusal. One that never answered
    /// may not know this node at all.
    pub(in crate::client) fn patience_ends(&self, now: Time) -> Option<Time> {
        let ends = self.sessions.peers.iter().filter_map(|peer| match peer.reach() {
            Reach::Down { since } if peer.epoch().is_some() => Some(since + self.config.grant_patience),
            _ => None,
        });
        ends.filter(|at| now < *at).max()
    }

    fn ask_versions(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, index: usize) -> bool {
        let page = self.map.size.page(slab, index);
        let (role, version) = (Role::Versions, Version::NEVER);
        self.ask(Request { role, peer, op: Wire::Versions, class: Class::Demand, space, page, version })
    }
}

impl Map {
    /// The server has forgotten this owner, of whom it had nothing.
    fn grant_after_fence(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex, grant: Version) {
        self.spaces[space].fenced_at.remove(peer);
        let state = &mut self.spaces[space].slabs[slab];
        if let Phase::Granting(candidates) = &mut state.phase {
            let asked = |c: &&mut Candidate| c.peer == peer && c.grant == grant && c.step == GrantStep::Asked;
            candidates.asked.iter_mut().filter(asked).for_each(|c| c.step = GrantStep::Fencing);
        }
        if let Some(repair) = state.repair.as_mut().filter(|repair| repair.grant == grant) {
            repair.step = Step::Fencing;
        }
    }

    /// What a copy was asked was taken back.
    pub(in crate::client) fn list_again(&mut self, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
        if let Phase::Opening(listings) = &mut self.spaces[space].slabs[slab].phase
            && let Some(listing) = listings.iter_mut().find(|l| l.peer == peer && l.step == ListStep::Asked)
        {
            listing.step = ListStep::Fencing;
            self.tables.give_back(std::mem::take(&mut listing.list));
        }
        self.mark(space, slab);
    }
}

impl Sessions {
    /// A server was not heard yet.
    pub(in crate::client) fn someone_may_come(&self) -> bool {
        self.peers.iter().any(|peer| matches!(peer.reach(), Reach::Connecting { .. }))
    }
}
