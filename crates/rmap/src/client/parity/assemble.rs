//! Reads the pages of a stripe and puts together what is missing.

use super::stripe::{Job, Purpose, Source, Sources, Stripes};
use crate::client::copies::Copy;
use crate::client::exchange::{Answer, Exchange, Request, Role};
use crate::client::index::{CopyIndex, GroupIndex, OpIndex, PeerIndex, SpaceIndex, StripeIndex};
use crate::client::map::Map;
use crate::client::ops::{Kind, Operation, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::peer::PeerSet;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::{Phase, Space};
use crate::client::{Failure, Fault};
use crate::units::{Class, PAGE_SIZE, SEALED_SIZE, SlabNo};
use crate::wire::message::{Op as Wire, Status};

impl Redundancy {
    /// A server is silent: pages that others are put together from, or that are copied from it, are not waited for. Another may
    /// have them, or be what they are put together from.
    pub(in crate::client) fn interrupt_sources_at(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        peer: PeerIndex,
    ) {
        let is_source = |role| matches!(role, Role::Strip { .. } | Role::CopyRead { .. });
        while let Some(exchange) = pool.sessions.exchanges.find(|e| e.peer == peer && is_source(e.role)) {
            self.cancel(pool, pages, parity, exchange.id);
        }
    }
}

impl Parity {
    /// Servers fell silent, or a copy is none any more: what was asked there does not come.
    pub(in crate::client) fn stripe_interrupted(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        stripe: StripeIndex,
    ) {
        let Some(job) = self.end_stripe(pool, stripe) else { return };
        match job.purpose {
            Purpose::Read { op } => {
                pages.op_exchange_ended(op);
                self.stripes.begin_anew(op);
            }
            Purpose::Copy { copy } => redundancy.copy_failed(pool, copy),
        }
    }

    /// A group has no parity any more, and may be written to: its reads ask the copies.
    pub(in crate::client::parity) fn interrupt_stripes_of(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        space: SpaceIndex,
        group: GroupIndex,
    ) {
        let layout = pool.map.spaces[space].layout;
        for stripe in self.stripes.of_reads() {
            let is_of_group = |job: Job| job.space == space && layout.group(job.slab) == Some(group);
            if self.stripes.get(stripe).is_some_and(is_of_group) {
                self.stripe_interrupted(pool, pages, redundancy, stripe);
            }
        }
    }

    /// A page of a stripe came.
    pub(in crate::client) fn strip_answered(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        stripe: StripeIndex,
        exchange: &Exchange,
        Answer { status, version, payload }: Answer<'_>,
    ) {
        let Exchange { space, page, peer, .. } = *exchange;
        let Some(column) = pool.map.slab_of(page) else { return };
        if status != Status::Ok || pool.map.is_another_copy(space, version) {
            self.stripe_interrupted(pool, pages, redundancy, stripe);
            return redundancy.copy_lost(pool, pages, self, space, column, peer);
        }
        let layout = pool.map.spaces[space].layout;
        // Whoever made parity may have made it as a later life of the slab (`cold.rs`).
        let is_later = layout.is_parity(column) && version > exchange.version;
        let right = (version == exchange.version || is_later) && payload.len() == SEALED_SIZE;
        let mut content = [0; PAGE_SIZE];
        // Nobody can tell of parity alone whether it is right: what it comes to is opened.
        let opens = layout.is_parity(column)
            || right && pool.map.spaces[space].key.open(page, version, payload, &mut content).is_ok();
        if !right || !opens {
            pool.stats.bad_pages += 1;
            return self.stripe_is_bad(pool, pages, redundancy, stripe);
        }
        let leaves_out = pool.has(Fault::LeavesMembersOut);
        let is_read = |job: &Job| matches!(job.purpose, Purpose::Read { .. });
        let counts = |job: &Job, is_last| !(leaves_out && is_last && is_read(job));
        if let Some(job) = self.stripes.add(stripe, payload, counts) {
            self.stripe_is_whole(pool, pages, redundancy, stripe, job);
        }
    }

    fn stripe_is_whole(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        redundancy: &mut Redundancy,
        stripe: StripeIndex,
        job: Job,
    ) {
        let Job { purpose, space, slab, index, version, .. } = job;
        let page = pool.map.size.page(slab, index);
        let key = &pool.map.spaces[space].key;
        match purpose {
            Purpose::Read { op } => {
                let opened = key.open(page, version, self.stripes.sum(stripe), pages.ops.content(op));
                self.end_stripe(pool, stripe);
                pages.op_exchange_ended(op);
                pool.stats.degraded += u64::from(opened.is_ok());
                pool.stats.bad_pages += u64::from(opened.is_err());
                pages.finish_read(pool, self, op, opened.map(|()| true).map_err(|_| Failure::Corrupt));
            }
            Purpose::Copy { copy } => {
                let mut content = [0; PAGE_SIZE];
                let is_parity = pool.map.spaces[space].layout.is_parity(slab);
                if !is_parity && key.open(page, version, self.stripes.sum(stripe), &mut content).is_err() {
                    pool.stats.bad_pages += 1;
                    return self.stripe_is_bad(pool, pages, redundancy, stripe);
                }
                redundancy.copies.buffer(copy).copy_from_slice(self.stripes.sum(stripe));
                self.end_stripe(pool, stripe);
                redundancy.copy_was_read(pool, copy, version);
            }
        }
    }

    /// Something of it is not what was sealed, at the only copy that there is.
    fn stripe_is_bad(&mut self, pool: &mut Pool, pages: &mut Pages, redundancy: &mut Redundancy, stripe: StripeIndex) {
        let Some(Job { purpose, space, slab, .. }) = self.end_stripe(pool, stripe) else { return };
        match purpose {
            Purpose::Read { op } => {
                pages.op_exchange_ended(op);
                pages.finish_read(pool, self, op, Err(Failure::Corrupt));
            }
            Purpose::Copy { copy } => {
                // As it is, this slab cannot be made anew. Another map, or another reader, may change that.
                pool.map.spaces[space].slabs[slab].is_stuck =
                    pool.map.is_grouped(space, slab) || pool.map.spaces[space].layout.is_parity(slab);
                redundancy.copy_failed(pool, copy);
            }
        }
    }
}

impl Redundancy {
    /// Makes what a slab in the making has at `index`, for a copy that has its slot already.
    pub(in crate::client) fn begin_stripe_copy(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        copy: CopyIndex,
        space: SpaceIndex,
        slab: SlabNo,
        index: usize,
    ) -> bool {
        let version = pool.map.spaces[space].slabs[slab].version(index);
        if !version.has_content() {
            // Trimmed: that is all there is to know of it.
            self.copy_was_read(pool, copy, version);
            return true;
        }
        let job = Job { purpose: Purpose::Copy { copy }, space, slab, index, version };
        let sources = pool.sources(space, slab, index);
        sources.is_some_and(|sources| parity.begin_stripe(pool, Stripes::of_copy(copy), job, &sources, Class::Rebuild))
    }

    /// Nothing more is copied to a slab, nor put together for it.
    pub(in crate::client::parity) fn end_copies(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        self.end_copies_where(pool, parity, |job| (job.space, job.slab) == (space, slab));
    }

    /// The same for one copy of it: what is still to be read for that comes to nothing.
    pub(in crate::client) fn end_copies_to(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        target: PeerIndex,
    ) {
        self.end_copies_where(pool, parity, |job| (job.space, job.slab, job.target) == (space, slab, target));
    }

    fn end_copies_where(&mut self, pool: &mut Pool, parity: &mut Parity, ends: impl Fn(Copy) -> bool) {
        for copy in self.copies.indices() {
            if self.copies.get(copy).is_some_and(&ends) {
                parity.end_stripe(pool, Stripes::of_copy(copy));
                let ours = |role| role == Role::CopyRead { copy } || role == Role::CopyWrite { copy };
                while let Some(exchange) = pool.sessions.exchanges.find(|exchange| ours(exchange.role)) {
                    pool.sessions.end_exchange(exchange.id);
                }
                self.copies.end(copy);
            }
        }
    }
}

impl Pages {
    /// Asks for a page of a group that has parity: its own copy, if that can be asked, else those that it can be put together
    /// from. Where neither can be, the read waits for a server or for another map.
    pub(in crate::client) fn ask_group(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex, slab: SlabNo) {
        let Operation { space, sent, is_bad_itself, exchanges, .. } = *self.ops.peek(op);
        let copies = pool.copies_to_ask(space, slab);
        let near = |peer: &PeerIndex| (sent.has(*peer), pool.sessions.peers[*peer].round_trip());
        let up = copies.iter().filter(|peer| !is_bad_itself && !pool.sessions.peers[*peer].is_down()).min_by_key(near);
        if let Some(peer) = up {
            return self.ask_copy(pool, op, peer);
        }
        if self.read_degraded(pool, parity, op) {
            return;
        }
        if !is_bad_itself {
            if !self.queue_read(pool, parity, op) {
                self.ops.activate(op);
            }
            return;
        }
        let is_gone = |column: SlabNo| {
            let state = &pool.map.spaces[space].slabs[column];
            pool.sessions.peers_of(&state.entry).minus(state.failed).is_empty()
        };
        if exchanges == 0 && pool.map.other_columns(space, slab).any(is_gone) {
            self.finish_read(pool, parity, op, Err(Failure::Corrupt));
        } else if exchanges == 0 && pool.others_are_out_of_reach(space, slab) {
            self.finish_read(pool, parity, op, Err(Failure::Silent));
        }
    }

    /// Something has changed: reads that wait may have somebody to ask.
    pub(in crate::client::parity) fn retry_reads(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let size = pool.map.size;
        let waits = |op: &Operation| op.stage == Stage::Active && op.kind == Kind::Read && op.exchanges == 0;
        for op in self.ops.select(|op| waits(op) && op.space == space && size.slab(op.page) == Some(slab)) {
            if !parity.stripes.is_waiting(op) {
                self.ask_for_page(pool, parity, op);
            }
        }
    }

    /// Reads a page whose own copy cannot be asked, or is bad. `false` if not all of the others can be read now.
    pub(in crate::client) fn read_degraded(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) -> bool {
        let (space, page, class, version) = {
            let op = self.ops.peek(op);
            (op.space, op.page, op.class, op.version)
        };
        let (Some(slab), index) = (pool.map.slab_of(page), pool.map.size.index(page)) else { return false };
        if !pool.can_reconstruct(space, slab) {
            return false;
        }
        self.ops.activate(op);
        // Of a read that was asked elsewhere before: the page may have been written meanwhile, and others have to fit what it is now.
        let version = version.max(pool.map.spaces[space].slabs[slab].version(index));
        if !version.has_content() {
            self.finish_read(pool, parity, op, Ok(false));
            return true;
        }
        self.ops.get(op).version = version;
        if parity.stripes.of_read(op).is_some() {
            return true;
        }
        let free = parity.stripes.free_for_read();
        let begun = free.zip(pool.sources(space, slab, index)).is_some_and(|(stripe, sources)| {
            let job = Job { purpose: Purpose::Read { op }, space, slab, index, version };
            parity.begin_stripe(pool, stripe, job, &sources, class)
        });
        if begun {
            self.ops.get(op).exchanges += 1;
        } else {
            parity.stripes.wait(op);
        }
        true
    }

    /// Reads that can be put together now.
    pub(in crate::client::parity) fn begin_waiting_stripes(&mut self, pool: &mut Pool, parity: &mut Parity) {
        for _ in 0..parity.stripes.waiting() {
            let Some(op) = parity.stripes.next_waiting() else { return };
            let about = *self.ops.peek(op);
            let waits = about.stage == Stage::Active && about.kind == Kind::Read;
            if waits && !self.is_answer_coming(pool, parity, op) {
                self.ask_for_page(pool, parity, op);
            }
        }
    }

    /// Whether a read has asked somebody who answers. What a silent server was asked does not come, though it may be under way for long.
    pub(in crate::client) fn is_answer_coming(&self, pool: &Pool, parity: &Parity, op: OpIndex) -> bool {
        let asks = |e: &Exchange| e.role == Role::Read { op } && !pool.sessions.peers[e.peer].is_down();
        self.ops.peek(op).exchanges > 0
            && (pool.sessions.exchanges.find(asks).is_some() || parity.stripes.of_read(op).is_some())
    }

    /// No answer is wanted any more to a read.
    pub(in crate::client) fn drop_stripe(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        if let Some(stripe) = parity.stripes.of_read(op)
            && parity.end_stripe(pool, stripe).is_some()
        {
            self.op_exchange_ended(op);
        }
    }
}

impl Parity {
    fn begin_stripe(
        &mut self,
        pool: &mut Pool,
        stripe: StripeIndex,
        job: Job,
        sources: &Sources,
        class: Class,
    ) -> bool {
        let left = sources.iter().flatten().count();
        if left == 0 {
            return false;
        }
        self.stripes.begin(stripe, job, left);
        for Source { peer, page, version } in sources.iter().flatten().copied() {
            let (role, op, space) = (Role::Strip { stripe }, Wire::Read, job.space);
            if !pool.ask(Request { role, peer, op, class, space, page, version }) {
                self.end_stripe(pool, stripe);
                return false;
            }
        }
        true
    }

    /// Ends a stripe with all that it asked.
    fn end_stripe(&mut self, pool: &mut Pool, stripe: StripeIndex) -> Option<Job> {
        let job = self.stripes.end(stripe)?;
        while let Some(exchange) = pool.sessions.exchanges.find(|exchange| exchange.role == Role::Strip { stripe }) {
            pool.sessions.end_exchange(exchange.id);
        }
        Some(job)
    }
}

impl Pool {
    /// Copies of a slab that can be asked: those that are not known to be worthless, at servers that know this reader.
    pub(in crate::client) fn copies_to_ask(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let Space { slabs, fenced_at, refusing, .. } = &self.map.spaces[space];
        self.sessions.peers_of(&slabs[slab].entry).minus(slabs[slab].failed).minus(*refusing).intersection(*fenced_at)
    }

    /// The nearest copy of a slab whose pages are known, at a server that answers.
    fn nearest(&self, space: SpaceIndex, slab: SlabNo) -> Option<PeerIndex> {
        let open = matches!(self.map.spaces[space].slabs[slab].phase, Phase::Open);
        let up = self.copies_to_ask(space, slab).iter().filter(|peer| open && !self.sessions.peers[*peer].is_down());
        up.min_by_key(|peer| self.sessions.peers[*peer].round_trip())
    }

    /// Whether all that a page of the slab is put together from can be read now.
    pub(in crate::client) fn can_reconstruct(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        let layout = self.map.spaces[space].layout;
        let group = layout.group(slab);
        let parity = group.is_some_and(|group| layout.is_parity(slab) || self.map.has_parity(space, group));
        parity && self.map.other_columns(space, slab).all(|column| self.nearest(space, column).is_some())
    }

    fn sources(&self, space: SpaceIndex, slab: SlabNo, index: usize) -> Option<Sources> {
        let mut sources = Sources::default();
        let mut free = sources.iter_mut();
        for column in self.map.other_columns(space, slab) {
            let peer = self.nearest(space, column)?;
            let version = self.map.spaces[space].slabs[column].version(index);
            if version.has_content() {
                let page = self.map.size.page(column, index);
                *free.next()? = Some(Source { peer, page, version });
            }
        }
        Some(sources)
    }
}

impl Map {
    /// Columns of a slab's group that hold something, but the slab itself.
    pub(in crate::client) fn other_columns(&self, space: SpaceIndex, slab: SlabNo) -> impl Iterator<Item = SlabNo> {
        let spaces = &self.spaces;
        let layout = spaces[space].layout;
        let columns = layout.group(slab).into_iter().flat_map(move |group| layout.columns(group));
        columns.filter(move |column| *column != slab && spaces[space].slabs.get(*column).is_some_and(|s| s.is_held()))
    }
}
