//! Reads the pages of a stripe and puts together what is missing.

use crate::client::exchange::{Answer, Exchange, Request, Role};
use crate::client::index::{GroupIndex, SpaceIndex, StripeIndex};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::stripe::{Job, Purpose, Source, Sources};
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::{Failure, Fault};
use crate::units::{Class, PAGE_SIZE, SEALED_SIZE};
use crate::wire::message::{Op as Wire, Status};

impl Parity {
    /// Asks for the pages of a stripe. `false`, and it does not begin, if there are none or too much is asked already.
    pub fn begin_stripe(
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
    pub fn end_stripe(&mut self, pool: &mut Pool, stripe: StripeIndex) -> Option<Job> {
        let job = self.stripes.end(stripe)?;
        while let Some(exchange) = pool.sessions.exchanges.find(|exchange| exchange.role == Role::Strip { stripe }) {
            pool.sessions.end_exchange(exchange.id);
        }
        Some(job)
    }

    /// A page of a stripe came.
    pub fn strip_answered(
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

    /// Servers fell silent, or a copy is none any more: what was asked there does not come.
    pub fn stripe_interrupted(
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
    pub fn interrupt_stripes_of(
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
}
