//! Reads of a space that another client writes (`../follow.rs`): each waits for a look at the map, and then asks the copies that it
//! names.

use crate::client::exchange::{Answer, Exchange, Request, Role};
use crate::client::follow::{PAUSED, SEEN_PATIENCE, is_paused};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::slab::Slab;
use crate::client::{Failure, Fault};
use crate::control::MapEntry;
use crate::units::{SlabNo, Time, Version};
use crate::wire::message::{Op as Wire, Status};

impl Pages {
    /// Begins a read, or goes on with one that waited.
    pub fn try_follow(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, look, .. } = *self.ops.peek(op);
        if pool.is_look_overdue(space) {
            pool.stats.unmapped += 1;
            return self.fail_read(pool, parity, op, Failure::Silent);
        }
        let is_mapped = |slab: SlabNo| !pool.map.spaces[space].slabs[slab].entry.replicas.is_empty();
        let is_careless = pool.has(Fault::FollowsOldMaps) && pool.map.slab_of(page).is_some_and(is_mapped);
        if look <= pool.map.spaces[space].following.answered() || is_careless {
            self.ask_followed(pool, parity, op);
        } else if look != PAUSED {
            pool.map.look_at_map(space);
        }
    }

    /// Asks the nearest copy that was not asked yet, by a map that is new enough for this read. Where there is none, what was
    /// answered decides.
    pub fn ask_followed(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, class, sent, acked, bad, version, .. } = *self.ops.peek(op);
        let Some(number) = pool.map.slab_of(page) else { return };
        if std::mem::take(&mut self.ops.get(op).has_paused) && self.ends_as_lost(pool, op, number) {
            return self.fail_read(pool, parity, op, Failure::Lost);
        }
        let slab = &pool.map.spaces[space].slabs[number];
        if slab.entry.empty || slab.entry == MapEntry::default() {
            self.drop_exchanges(pool, parity, op);
            return self.read_zero(pool, op);
        }
        if !slab.entry.is_sound() || slab.entry.lost && !pool.map.may_come_back(space, number) {
            return self.fail_read(pool, parity, op, Failure::Lost);
        }
        let near = |peer: &PeerIndex| pool.sessions.peers[*peer].round_trip();
        let Some(peer) = pool.copies_up(space, number).minus(sent).iter().min_by_key(near) else {
            if self.is_answer_coming(pool, parity, op) {
                return;
            }
            if acked.is_empty() || !bad.is_empty() {
                return self.pause_follow(pool, parity, op, number);
            }
            return self.end_follow(pool, parity, op, number, version);
        };
        let server = pool.sessions.peers[peer].info().id;
        let replica = slab.entry.replicas.iter().find(|replica| replica.server == server);
        let Some(version) = replica.map(|replica| replica.grant) else { return };
        let (role, wire) = (Role::Read { op }, Wire::ReadGranted);
        // Where too much is asked already, the slab is looked at again when there is room.
        if pool.ask(Request { role, peer, op: wire, class, space, page, version }) {
            self.ops.activate(op);
            let operation = self.ops.get(op);
            operation.exchanges += 1;
            operation.sent.insert(peer);
        }
    }

    /// A copy has answered a read of a page that another client writes.
    pub fn follow_answered(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        exchange: &Exchange,
        Answer { status, version, payload }: Answer<'_>,
    ) {
        let Exchange { role: Role::Read { op }, peer, space, page, .. } = *exchange else { return };
        self.op_exchange_ended(op);
        let operation = *self.ops.peek(op);
        if operation.stage != Stage::Active || operation.kind != Kind::Read {
            return;
        }
        let Some(number) = pool.map.slab_of(page) else { return };
        let index = pool.map.size.index(page);
        let seen = pool.map.spaces[space].slabs[number].version(index);
        // What an owner before today's had begun may have been undone: of that nothing was acknowledged.
        let is_kept =
            seen.generation() >= pool.map.spaces[space].generation && pool.now.since(operation.since) < SEEN_PATIENCE;
        if status != Status::Ok {
            pool.map.spaces[space].slabs[number].failed.insert(peer);
        } else if version.has_content() == payload.is_empty() || !self.opens_as(pool, op, version, payload) {
            pool.stats.bad_pages += 1;
            self.ops.get(op).bad.insert(peer);
        } else if version < seen && is_kept {
            // A write is under way that this copy does not have yet; or it lies.
        } else if version.has_content() {
            return self.end_follow(pool, parity, op, number, version);
        } else {
            self.ops.get(op).acked.insert(peer);
        }
        self.ask_followed(pool, parity, op);
    }

    fn opens_as(&mut self, pool: &mut Pool, op: OpIndex, version: Version, payload: &[u8]) -> bool {
        let Operation { space, page, .. } = *self.ops.peek(op);
        payload.is_empty() || pool.map.spaces[space].key.open(page, version, payload, self.ops.content(op)).is_ok()
    }

    fn end_follow(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex, slab: SlabNo, version: Version) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        let index = pool.map.size.index(page);
        if version.has_content() {
            let state = &mut pool.map.spaces[space].slabs[slab];
            state.make_table(&mut pool.map.tables);
            state.versions[index] = version;
        }
        pool.map.spaces[space].following.end_pauses();
        self.finish_read(pool, parity, op, Ok(version.has_content()));
    }

    /// What it asked is of no use any more.
    pub fn follow_anew(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        self.drop_exchanges(pool, parity, op);
        self.ops.wait_again(op);
        let operation = self.ops.get(op);
        (operation.acked, operation.bad, operation.version) = Default::default();
    }

    /// No copy has the page now. Whoever writes the space sees to that, and the next map may tell.
    fn pause_follow(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex, slab: SlabNo) {
        let Operation { space, bad, .. } = *self.ops.peek(op);
        if pool.is_each_copy_of(space, slab, bad) {
            return self.fail_read(pool, parity, op, Failure::Corrupt);
        }
        let Slab { entry, failed, .. } = &pool.map.spaces[space].slabs[slab];
        let copies = pool.sessions.peers_of(entry);
        if self.is_follow_overdue(pool, op) && !pool.is_each_copy_of(space, slab, *failed) {
            return self.fail_read(pool, parity, op, Failure::Silent);
        }
        pool.map.spaces[space].following.pause(pool.now);
        self.follow_anew(pool, parity, op);
        // Those of silent servers leave their slots to others.
        let silent = !copies.is_empty() && copies.iter().all(|peer| pool.sessions.peers[peer].is_down());
        if silent {
            pool.map.spaces[space].slabs[slab].failed = PeerSet::default();
        }
        if !(silent && self.queue_read(pool, parity, op)) {
            let operation = self.ops.get(op);
            (operation.look, operation.has_paused) = (PAUSED, true);
        }
    }

    /// A pause is over, and the map was looked at since. A server that does not have what the map still names has lost it: had it been
    /// given back, the map would say so. Whatever else copies said is asked again.
    fn ends_as_lost(&self, pool: &mut Pool, op: OpIndex, slab: SlabNo) -> bool {
        let space = self.ops.peek(op).space;
        let failed = pool.map.spaces[space].slabs[slab].failed;
        // Nobody sees to a space whose writer has ended.
        let is_lost = pool.is_each_copy_of(space, slab, failed) && self.is_follow_overdue(pool, op);
        if !is_lost {
            pool.map.spaces[space].slabs[slab].failed = PeerSet::default();
        }
        is_lost
    }

    fn is_follow_overdue(&self, pool: &Pool, op: OpIndex) -> bool {
        let since = self.ops.peek(op).since;
        pool.config.error_after.is_some_and(|error_after| pool.now.since(since) >= error_after)
    }

    /// Tries the reads again whose time for that has come.
    pub fn follow(&mut self, pool: &mut Pool, parity: &mut Parity, now: Time) {
        pool.now = now;
        for space in pool.map.spaces.indices() {
            if pool.map.spaces[space].following.begin_retry(now) {
                let look = pool.map.look_needed(space);
                for op in self.ops.select(|op| is_paused(op) && op.space == space) {
                    self.ops.get(op).look = look;
                    self.try_follow(pool, parity, op);
                }
                self.look_for_queued(pool, space);
            }
        }
    }

    /// The copies that queued reads wait for may not be the ones that count any more.
    fn look_for_queued(&self, pool: &mut Pool, space: SpaceIndex) {
        if !self.read_queue.any_in(space) {
            return;
        }
        pool.map.look_at_map(space);
        self.mark_queued(pool);
        pool.map.spaces[space].following.pause_anew(pool.now);
    }

    /// A slab is looked at: a server is back or gone, or something could not be asked.
    pub fn advance_followed(&mut self, pool: &mut Pool, parity: &mut Parity, space: SpaceIndex, slab: SlabNo) {
        if !self.ops.may_be_any_of(space, slab) {
            return;
        }
        let of_slab = |op: &Operation| op.space == space && pool.map.slab_of(op.page) == Some(slab);
        for op in self.ops.select(|op| op.kind == Kind::Read && of_slab(op)) {
            match self.ops.peek(op).stage {
                Stage::Waiting => self.try_follow(pool, parity, op),
                Stage::Active if !self.is_answer_coming(pool, parity, op) => self.ask_followed(pool, parity, op),
                _ => {}
            }
        }
    }

    /// A slab's copies are others: what was asked is to be asked of those, once all of the map is known.
    pub fn follow_elsewhere(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        entry: MapEntry,
    ) {
        let state = &mut pool.map.spaces[space].slabs[slab];
        if !entry.replicas.iter().any(|replica| state.entry.replicas.contains(replica)) {
            // It may be another life of the slab, in which what was trimmed in the last one was never written.
            pool.map.tables.give_back(std::mem::take(&mut state.versions).into());
        }
        (state.entry, state.failed) = (entry, PeerSet::default());
        let of_slab = |op: &Operation| op.space == space && pool.map.slab_of(op.page) == Some(slab);
        for op in self.ops.select(|op| of_slab(op) && (op.stage == Stage::Active || is_paused(op))) {
            if self.ops.peek(op).stage == Stage::Active {
                self.follow_anew(pool, parity, op);
            }
            self.ops.get(op).look = pool.map.spaces[space].following.answered();
        }
        // For those that are queued.
        pool.map.mark(space, slab);
    }
}
