//! Does what the parts of redundancy ask for.

use crate::client::context::Context;
use crate::client::exchange::{Answer, Exchange, Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ops::Stage;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::scrub::pass::{Verdict, judge};
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::control::MapEntry;
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::message::{Op, Status};

impl Redundancy {
    /// When a page is to be looked at next.
    pub fn scrub_due(&self, pool: &Pool) -> Option<Time> {
        pool.config.scrub_pass.and(self.scrub.due())
    }

    /// Looks at the next page, if it is time.
    pub fn poll_scrub(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, now: Time) {
        let Some(pass) = pool.config.scrub_pass else { return };
        let effects = self.scrub.poll(now, pass, &Context { pool, ops: &pages.ops });
        if let Some(id) = effects.cancel {
            self.cancel(pool, pages, parity, id);
        }
        if let Some(request) = effects.read {
            let exchange = pool.ask_for(request);
            self.scrub.was_asked(exchange);
        }
    }

    /// A copy returned what it has of a page.
    pub fn scrub_answered(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        asked: &Exchange,
        Answer { status, version, payload }: Answer<'_>,
    ) {
        let Some(slab) = pool.map.slab_of(asked.page) else { return };
        let verdict = judge(&Context { pool, ops: &pages.ops }, asked, slab, (status, version), payload);
        pool.stats.scrubbed += u64::from(matches!(verdict, Verdict::Right | Verdict::Bad { .. }));
        pool.stats.scrub_bad += u64::from(matches!(verdict, Verdict::Bad { .. }));
        if matches!(verdict, Verdict::Gone | Verdict::Bad { another_answers: true }) {
            self.copy_lost(pool, pages, parity, asked.space, slab, asked.peer);
        }
    }

    /// All copies in sync have another version of a page.
    pub fn set_version(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo, index: usize, version: Version) {
        let state = &mut pool.map.spaces[space].slabs[slab];
        let before = std::mem::replace(&mut state.versions[index], version);
        state.content.replace(before, version);
        if before.has_content() {
            self.note_empty(pool, space, slab);
        }
    }

    /// An owner's slab is open now.
    pub fn count_content(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        let state = &mut pool.map.spaces[space].slabs[slab];
        state.content.count(&state.versions);
        self.note_empty(pool, space, slab);
    }

    fn note_empty(&mut self, pool: &mut Pool, space: SpaceIndex, slab: SlabNo) {
        let Some(after) = pool.config.give_back_after else { return };
        let owned = pool.map.spaces[space].tenure == Tenure::Owner;
        let content = &mut pool.map.spaces[space].slabs[slab].content;
        if owned && content.is_empty() {
            self.vacating.became_empty(pool.now, after, (space, slab), content);
        }
    }

    /// Gives slabs back that have been without content for long enough.
    pub fn poll_vacating(&mut self, pool: &mut Pool, pages: &mut Pages, parity: &mut Parity, now: Time) {
        let Some(after) = pool.config.give_back_after else { return };
        while let Some((space, slab)) = self.vacating.poll(now, &Context { pool, ops: &pages.ops }) {
            let is_taken = pool.map.spaces[space].is_taken;
            let state = &mut pool.map.spaces[space].slabs[slab];
            state.content.left_queue();
            let is_open = matches!(state.phase, Phase::Open);
            // It is looked at again when its group has no parity any more.
            if is_taken || !state.content.is_empty() || !is_open || pool.map.is_in_frozen(space, slab) {
                continue;
            }
            let state = &pool.map.spaces[space].slabs[slab];
            let is_ripe = state.content.empty_for_at(after) <= now;
            // The number says when to look, the versions what there is.
            if is_ripe && state.versions.iter().any(|version| version.has_content()) {
                debug_assert!(false, "a slab with content was counted as empty");
                continue;
            }
            if is_ripe && pool.can_notify_all(space, slab) && self.begin_discard(pool, pages, parity, space, slab) {
                continue;
            }
            let content = &mut pool.map.spaces[space].slabs[slab].content;
            self.vacating.put_back(now, after, (space, slab), content);
        }
    }

    /// Has a slab leave the map. `false`, and nothing is done, if it cannot now.
    pub fn begin_discard(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) -> bool {
        let size = pool.map.size;
        let Some(state) = pool.map.spaces[space].slabs.get(slab) else { return false };
        let owned = pool.map.spaces[space].tenure == Tenure::Owner && !pool.map.spaces[space].is_taken;
        if !matches!(state.phase, Phase::Open) || state.pending.is_some() || !owned {
            return false;
        }
        let begun = |stage| matches!(stage, Stage::Waiting | Stage::Active);
        let busy = pages.ops.any(|op| begun(op.stage) && op.space == space && size.slab(op.page) == Some(slab));
        if busy || pages.any_queued_of(space, slab, size) || self.copies.any_of(space, slab) {
            return false;
        }
        if pool.map.is_in_frozen(space, slab) {
            parity.dissolve_for(pool, space, slab);
            return false;
        }
        parity.note_change(pool, pages, self, space, slab);
        // Now, and not when the map has changed: what is written from now on waits for the next life.
        let Some(epoch) = pool.map.spaces[space].next_version(false) else { return false };
        self.abort_repair(pool, pages, parity, space, slab);
        let state = &mut pool.map.spaces[space].slabs[slab];
        (state.phase, state.epoch) = (Phase::Leaving, epoch);
        state.doubt = None;
        pool.map.propose(space, slab, MapEntry::empty());
        true
    }

    /// Looks at the reservations that it is time for.
    pub fn poll_reservations(&mut self, pool: &mut Pool, pages: &Pages, now: Time) {
        while let Some((space, wanted)) = self.reservations.poll(now, &Context { pool, ops: &pages.ops }) {
            for (peer, slabs) in wanted {
                if pool.fence(space, peer) {
                    let (role, op, class) = (Role::Reserve, Op::Reserve, Class::Rebuild);
                    let (page, version) = (PageNo(0), Version::from_bits(slabs));
                    let exchange = pool.ask_for(Request { role, peer, op, class, space, page, version });
                    self.reservations.was_asked(space, peer, exchange);
                }
            }
        }
    }

    /// A server keeps what it was asked to keep, or cannot.
    pub fn reserve_answered(
        &mut self,
        pool: &mut Pool,
        space: SpaceIndex,
        peer: PeerIndex,
        slabs: u64,
        status: Status,
    ) {
        if !self.reservations.complete(space, peer, slabs, status) {
            pool.map.spaces[space].fenced_at.remove(peer);
        }
    }
}
