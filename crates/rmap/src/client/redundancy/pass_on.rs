//! Begins, goes on with and ends copies that pass through the client.

use crate::client::copies::Copy;
use crate::client::exchange::{Request, Role};
use crate::client::index::{CopyIndex, PeerIndex, SpaceIndex};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::parity::stripe::{Job, Purpose, Stripes};
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::slab::{Phase, Space};
use crate::crypto::Rejected;
use crate::units::{Class, PAGE_SIZE, SEALED_SIZE, SlabNo, Version};
use crate::wire::message::Op as Wire;

impl Redundancy {
    /// Copies one page. Does nothing without room, which brings the slab up again when there is some.
    /// Without a source, the page is put together from others of its group.
    pub fn start_copy(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        (space, slab, index): (SpaceIndex, SlabNo, usize),
        source: Option<PeerIndex>,
        target: PeerIndex,
    ) -> bool {
        self.copies.is_copying(space, slab, index, target)
            || self.begin_copy(pool, parity, (space, slab, index), source, target, None)
    }

    /// The same for content that is to come after the target's trim: in the version that this owner has for that.
    pub fn renew(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        (space, slab, index): (SpaceIndex, SlabNo, usize),
        source: PeerIndex,
        target: PeerIndex,
    ) -> bool {
        let renewed = Version::taken_over(pool.map.spaces[space].generation);
        self.copies.is_copying(space, slab, index, target)
            || self.begin_copy(pool, parity, (space, slab, index), Some(source), target, Some(renewed))
    }

    /// `false` if there is no room.
    fn begin_copy(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        (space, slab, index): (SpaceIndex, SlabNo, usize),
        source: Option<PeerIndex>,
        target: PeerIndex,
        renewed: Option<Version>,
    ) -> bool {
        let Some(copy) = self.copies.free() else {
            self.copies.wait_for_room(space, slab);
            return false;
        };
        let page = pool.map.size.page(slab, index);
        let version = pool.map.spaces[space].slabs[slab].version(index);
        self.copies.set(copy, Copy { space, slab, index, target, version, renewed });
        let role = Role::CopyRead { copy };
        let begun = match source {
            Some(peer) => pool.ask(Request { role, peer, op: Wire::Read, class: Class::Rebuild, space, page, version }),
            None => self.begin_stripe_copy(pool, parity, copy, space, slab, index),
        };
        if !begun {
            self.copies.end(copy);
        }
        true
    }

    /// Makes what a slab in the making has at `index`, for a copy that has its slot already.
    fn begin_stripe_copy(
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

    /// Whether what a source has of a page is something that was written there, and not older than what it is known to have: a source that
    /// lacks what it listed or acknowledged would be asked for it over and over. A trim has no seal, and one that nobody made
    /// would stand before all that is written after it. Content is opened where it is to take the place of an earlier one, and
    /// where it could be put together from others.
    pub fn copy_is_right(&self, pool: &Pool, pages: &Pages, copy: CopyIndex, version: Version, payload: &[u8]) -> bool {
        let Some(Copy { space, slab, index, version: least, .. }) = self.copies.get(copy) else {
            return true;
        };
        if version < least || !pages.was_issued(pool, space, slab, index, version) {
            return false;
        }
        let Space { slabs, layout, key, .. } = &pool.map.spaces[space];
        let is_opening = matches!(slabs[slab].phase, Phase::Opening(_));
        let replaces = (is_opening || pool.map.is_grouped(space, slab)) && !layout.is_parity(slab);
        let page = pool.map.size.page(slab, index);
        payload.is_empty() || !replaces || key.open(page, version, payload, &mut [0; PAGE_SIZE]).is_ok()
    }

    /// The source made it up, or it is damaged there. A group that has parity puts it together from the others; elsewhere the source
    /// is not to be trusted, and where it has the only copy, it keeps that: the slab's other pages are there.
    pub fn copy_is_wrong(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        copy: CopyIndex,
        source: PeerIndex,
    ) {
        let Some(Copy { space, slab, index, target, .. }) = self.copies.end(copy) else { return };
        if pool.map.is_grouped(space, slab) && pool.can_reconstruct(space, slab) {
            pool.stats.bad_pages += 1;
            self.start_copy(pool, parity, (space, slab, index), None, target);
            return pool.map.mark(space, slab);
        }
        pool.sessions.peers[source].distrust();
        pool.stats.transfers_refused += 1;
        let state = &pool.map.spaces[space].slabs[slab];
        let others = pool.sessions.peers_of(&state.entry).minus(state.failed);
        let is_opening = matches!(state.phase, Phase::Opening(_));
        if is_opening || others.iter().any(|other| other != source && pool.sessions.peers[other].is_up()) {
            return self.copy_lost(pool, pages, parity, space, slab, source);
        }
        pool.map.spaces[space].slabs[slab].is_stuck = true;
        self.abort_repair(pool, pages, parity, space, slab);
    }

    /// The page is here (`has_content`), or is trimmed as of `version`.
    pub fn copy_was_read(&mut self, pool: &mut Pool, copy: CopyIndex, version: Version) {
        let Some(job) = self.copies.get(copy) else { return };
        debug_assert!(version >= job.version, "what is older was refused");
        let version = match job.renewed {
            Some(renewed) => {
                if self.seal_anew(pool, copy, (job.space, job.slab, job.index), version, renewed).is_err() {
                    return self.copy_failed(pool, copy);
                }
                renewed
            }
            None => version,
        };
        let page = pool.map.size.page(job.slab, job.index);
        let op = if version.has_content() { Wire::Write } else { Wire::Trim };
        self.copies.set(copy, Copy { version, ..job });
        let request = Request {
            role: Role::CopyWrite { copy },
            peer: job.target,
            op,
            class: Class::Rebuild,
            space: job.space,
            page,
            version,
        };
        if !pool.ask(request) {
            self.copies.end(copy);
        }
    }

    /// The target has it.
    pub fn copy_was_written(&mut self, pool: &mut Pool, copy: CopyIndex) {
        let Some(job) = self.copies.end(copy) else { return };
        pool.stats.pages_copied += 1;
        pool.map.copy_has(job.space, job.slab, job.target, job.index, job.version);
        pool.map.mark(job.space, job.slab);
    }

    /// It came to nothing.
    pub fn copy_failed(&mut self, pool: &mut Pool, copy: CopyIndex) {
        if let Some(job) = self.copies.end(copy) {
            pool.map.mark(job.space, job.slab);
        }
    }

    /// The content that a copy was asked for, in the version in which the other copy gets it.
    fn seal_anew(
        &mut self,
        pool: &Pool,
        copy: CopyIndex,
        (space, slab, index): (SpaceIndex, SlabNo, usize),
        version: Version,
        renewed: Version,
    ) -> Result<(), Rejected> {
        let page = pool.map.size.page(slab, index);
        let key = &pool.map.spaces[space].key;
        let room = self.copies.buffer(copy).first_chunk_mut::<SEALED_SIZE>().ok_or(Rejected::NotAuthentic)?;
        let mut content = [0; PAGE_SIZE];
        key.open(page, version, room, &mut content)?;
        room[..PAGE_SIZE].copy_from_slice(&content);
        key.seal(page, renewed, room);
        Ok(())
    }
}
