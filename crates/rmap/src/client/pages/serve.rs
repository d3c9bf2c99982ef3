//! What is done for an operation: a page is read from the nearest copy that answers, and written to all of them.

use crate::client::exchange::{Exchange, Request, Role};
use crate::client::index::{OpIndex, PeerIndex, SpaceIndex};
use crate::client::ops::{Kind, Operation, Reported, Selected, Stage};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::sealed::Tenure;
use crate::client::slab::Phase;
use crate::client::{Client, Event, Failure, Fault, Refused, Token};
use crate::crypto::Rejected;
use crate::units::{Class, Page, PageNo, SealedPage, SlabNo, Time, Version};
use crate::wire::message::Op as Wire;

impl Client {
    pub(in crate::client) fn begin_read(
        &mut self,
        now: Time,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        token: Token,
    ) -> Result<(), Refused> {
        if page.0 >= self.pool.map.spaces[space].pages {
            return Err(Refused::BeyondEnd);
        }
        if !self.pages.begin_again(&mut self.pool, &mut self.parity, space, page, class, (token, now)) {
            return Err(Refused::Busy);
        }
        self.pool.stats.reads += 1;
        self.settle(now);
        Ok(())
    }

    pub(in crate::client) fn begin_write(
        &mut self,
        now: Time,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        content: Option<impl FnOnce(&mut Page)>,
        token: Token,
    ) -> Result<(), Refused> {
        if page.0 >= self.pool.map.spaces[space].pages {
            return Err(Refused::BeyondEnd);
        }
        if self.pool.map.spaces[space].tenure != Tenure::Owner {
            return Err(Refused::ReadOnly);
        }
        if !self.pages.ops.has_room_for_write() {
            return Err(Refused::Busy);
        }
        let version = self.pool.map.spaces[space].next_version(content.is_none()).ok_or(Refused::VersionsUsedUp)?;
        let kind = Kind::Write { trim: content.is_none() };
        let op = self.pages.ops.begin(kind, space, page, class, (token, now)).ok_or(Refused::Busy)?;
        self.pool.stats.writes += 1;
        self.pool.now = now;
        match content {
            Some(content) => self.pages.store_write(&mut self.pool, op, version, content),
            None => self.pages.ops.get(op).version = version,
        }
        self.pages.try_write(&mut self.pool, &mut self.redundancy, &mut self.parity, op);
        self.settle(now);
        Ok(())
    }
}

impl Pages {
    /// Begins a waiting operation if it can begin now.
    pub(in crate::client) fn try_op(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
    ) {
        match self.ops.peek(op).kind {
            _ if self.ops.peek(op).stage != Stage::Waiting => {}
            Kind::Read => self.try_read(pool, parity, op),
            Kind::Write { .. } => self.try_write(pool, redundancy, parity, op),
        }
    }

    fn try_write(&mut self, pool: &mut Pool, redundancy: &mut Redundancy, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        if pool.map.spaces[space].is_taken {
            return self.ops.finish(op, Err(Failure::Fenced));
        }
        let Some(number) = pool.map.slab_of(page) else { return };
        let is_lost = matches!(pool.map.spaces[space].slabs[number].phase, Phase::Lost);
        let waits = !is_lost && parity.waits_for_group(pool, self, redundancy, op, number);
        if !is_lost && pool.is_write_out_of_reach(space, number) && !self.ops.peek(op).is_own {
            return self.ops.finish(op, Err(Failure::Silent));
        }
        if waits {
            return;
        }
        match pool.map.spaces[space].slabs[number].phase {
            Phase::Lost => self.ops.finish(op, Err(Failure::Lost)),
            Phase::Vacant => pool.map.mark(space, number),
            Phase::Granting(_) | Phase::Leaving if pool.ends_unmapped() => pool.map.mark(space, number),
            Phase::Opening(_) if pool.map.waits_for_map(space, number) => pool.map.mark(space, number),
            Phase::Granting(_) | Phase::Opening(_) | Phase::Leaving | Phase::Followed => {}
            Phase::Open => {
                if pool.is_left_to_late_map(space, number) && !self.ops.peek(op).is_own {
                    pool.stats.unmapped += 1;
                    return self.ops.finish(op, Err(Failure::Silent));
                }
                // One write to a page at a time, in the order in which they came.
                if self.ops.begin_write(op) {
                    self.ops.activate(op);
                    self.send_write(pool, op);
                } else if pool.map.waits_for_map(space, number) {
                    pool.map.mark(space, number);
                }
            }
        }
    }

    /// A copy has the write, or the set of copies changed: is it done?
    pub(in crate::client) fn check_write(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
    ) {
        let Operation { space, page, version, sent, acked, stage, is_reported, .. } = *self.ops.peek(op);
        let Some(number) = pool.map.slab_of(page) else { return };
        let required = pool.required(space, number);
        let repair = pool.map.spaces[space].slabs[number].repair.as_ref();
        let joining = repair.and_then(|repair| repair.catches_up()).filter(|peer| sent.has(*peer));
        let wanted = required.union(joining.into_iter().collect());
        let enough = wanted.is_subset_of(acked) || (pool.has(Fault::AcksEarly) && !acked.is_empty());
        if stage == Stage::Active && !enough && !is_reported && pool.map.waits_for_map(space, number) {
            pool.map.mark(space, number);
        }
        if stage != Stage::Active || required.is_empty() || !enough {
            return;
        }
        let index = pool.map.size.index(page);
        redundancy.set_version(pool, space, number, index, version);
        parity.note_change(pool, self, redundancy, space, number);
        self.end_write(pool, redundancy, parity, op, Ok(()));
        if pool.map.spaces[space].slabs[number].repair.is_some() {
            pool.map.mark(space, number);
        }
    }

    pub(in crate::client) fn end_write(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        op: OpIndex,
        result: Result<(), Failure>,
    ) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        self.ops.end_write(op);
        self.ops.finish(op, result);
        if self.ops.any_waiting() {
            for next in self.ops.select(|o| o.stage == Stage::Waiting && o.space == space && o.page == page) {
                self.try_op(pool, redundancy, parity, next);
            }
        }
    }

    /// Operations of a slab that wait for it.
    pub(in crate::client) fn wake_ops(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        for op in self.waiting_for(pool, space, slab) {
            self.try_op(pool, redundancy, parity, op);
        }
    }

    /// The set of copies changed: writes may be done or have to go elsewhere, reads too.
    pub(in crate::client) fn map_settled(
        &mut self,
        pool: &mut Pool,
        redundancy: &mut Redundancy,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let size = pool.map.size;
        let of_slab = |page| size.slab(page).is_some_and(|s| s == slab);
        for op in self.ops.select(|o| o.stage == Stage::Active && o.space == space && of_slab(o.page)) {
            match self.ops.peek(op).kind {
                Kind::Read if !self.is_answer_coming(pool, parity, op) => self.ask_for_page(pool, parity, op),
                Kind::Read => {}
                Kind::Write { .. } => {
                    self.send_write(pool, op);
                    self.check_write(pool, redundancy, parity, op);
                }
            }
        }
        self.wake_ops(pool, redundancy, parity, space, slab);
    }
}

impl Pages {
    /// A read, from its beginning. `false`: there is no slot for it.
    pub(in crate::client) fn begin_again(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        asked: (Token, Time),
    ) -> bool {
        let look = if pool.map.is_followed(space) { pool.map.look_needed(space) } else { 0 };
        let op = self.ops.begin(Kind::Read, space, page, class, asked);
        op.is_some_and(|op| {
            self.ops.get(op).look = look;
            self.try_read(pool, parity, op);
            true
        })
    }

    /// What a write is to write, which is put where it is sealed.
    pub(in crate::client) fn store_write(
        &mut self,
        pool: &mut Pool,
        op: OpIndex,
        version: Version,
        content: impl FnOnce(&mut Page),
    ) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        self.ops.get(op).version = version;
        content(self.ops.content(op));
        pool.map.spaces[space].key.seal(page, version, self.ops.room(op));
    }

    fn try_read(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, .. } = *self.ops.peek(op);
        if pool.map.spaces[space].is_taken {
            return self.ops.finish(op, Err(Failure::Fenced));
        }
        if pool.map.is_followed(space) {
            return self.try_follow(pool, parity, op);
        }
        // The map that is being looked up decides.
        if pool.map.spaces[space].is_stale {
            return;
        }
        let Some(number) = pool.map.slab_of(page) else { return };
        let slab = &pool.map.spaces[space].slabs[number];
        match slab.phase {
            Phase::Lost => self.ops.finish(op, Err(Failure::Lost)),
            Phase::Vacant | Phase::Granting(_) | Phase::Leaving => self.read_zero(pool, op),
            Phase::Opening(_) if pool.is_out_of_reach(space, number) && !self.ops.get(op).is_own => {
                self.ops.finish(op, Err(Failure::Silent));
            }
            Phase::Opening(_) if pool.map.waits_for_map(space, number) => pool.map.mark(space, number),
            Phase::Opening(_) | Phase::Followed => {}
            Phase::Open => {
                // What is being written is as good as what was; and this is at hand.
                if let Some(writer) = self.ops.writer(space, page) {
                    return self.read_from_buffer(pool, op, writer);
                }
                let index = pool.map.size.index(page);
                if slab.is_disputed(index) {
                    pool.stats.bad_pages += 1;
                    return self.ops.finish(op, Err(Failure::Corrupt));
                }
                let version = slab.version(index);
                if !version.has_content() {
                    return self.read_zero(pool, op);
                }
                self.ops.get(op).version = version;
                self.ask_for_page(pool, parity, op);
            }
        }
    }

    pub(in crate::client) fn read_zero(&mut self, pool: &mut Pool, op: OpIndex) {
        pool.stats.reads_local += 1;
        self.ops.get(op).has_content = false;
        self.ops.finish(op, Ok(()));
    }

    fn read_from_buffer(&mut self, pool: &mut Pool, op: OpIndex, writer: OpIndex) {
        let Operation { space, page, version, kind, .. } = *self.ops.peek(writer);
        if kind == (Kind::Write { trim: true }) {
            return self.read_zero(pool, op);
        }
        let opened = match self.ops.content_and_sealed(op, writer) {
            Some((content, sealed)) => pool.map.spaces[space].key.open(page, version, &sealed[..], content),
            None => Err(Rejected::NotAuthentic),
        };
        pool.stats.reads_local += 1;
        self.ops.get(op).has_content = true;
        self.ops.finish(op, opened.map_err(|_| Failure::Corrupt));
    }

    /// Asks the nearest copy that was not asked yet; any copy, where all were.
    pub(in crate::client) fn ask_for_page(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        let Operation { space, page, sent, .. } = *self.ops.peek(op);
        let Some(number) = pool.map.slab_of(page) else { return };
        if pool.map.is_followed(space) {
            return self.ask_followed(pool, parity, op);
        }
        if pool.map.spaces[space].is_stale {
            return self.ops.activate(op);
        }
        if pool.map.is_grouped(space, number) {
            return self.ask_group(pool, parity, op, number);
        }
        let copies = pool.copies_to_read(space, number);
        let near = |peer: &PeerIndex| {
            (pool.sessions.peers[*peer].is_down(), sent.has(*peer), pool.sessions.peers[*peer].round_trip())
        };
        // Without a copy that can be trusted, the change of the map decides; one that is to be told of this reader is asked then.
        let Some(peer) = copies.iter().min_by_key(near) else {
            let unknown = pool.sound_copies(space, number);
            let is_away = !unknown.is_empty() && unknown.iter().all(|peer| pool.sessions.peers[peer].is_down());
            if self.ops.peek(op).is_own {
                self.put_back(pool, parity, op);
            } else if self.is_refused(pool, op, number) {
                pool.stats.bad_pages += 1;
                self.fail_read(pool, parity, op, Failure::Corrupt);
            } else if !(is_away && self.queue_read(pool, parity, op)) {
                self.ops.activate(op);
            }
            return pool.map.mark(space, number);
        };
        if pool.sessions.peers[peer].is_down() && self.queue_read(pool, parity, op) {
            return;
        }
        let asked = |e: &Exchange| e.peer == peer && e.role == Role::Read { op };
        if !sent.has(peer) || pool.sessions.exchanges.find(asked).is_none() {
            self.ask_copy(pool, op, peer);
        }
    }

    pub(in crate::client) fn ask_copy(&mut self, pool: &mut Pool, op: OpIndex, peer: PeerIndex) {
        let Operation { space, page, class, version, .. } = *self.ops.peek(op);
        let request = Request { role: Role::Read { op }, peer, op: Wire::Read, class, space, page, version };
        if pool.ask(request) {
            self.ops.activate(op);
            self.ops.get(op).exchanges += 1;
            self.ops.get(op).sent.insert(peer);
        }
    }

    /// To every copy that has not been sent it.
    pub(in crate::client) fn send_write(&mut self, pool: &mut Pool, op: OpIndex) {
        let Operation { space, page, class, version, sent, kind, is_reported, .. } = *self.ops.peek(op);
        let Some(number) = pool.map.slab_of(page) else { return };
        let mirror = pool.map.spaces[space].slabs[number].repair.as_ref().and_then(|repair| repair.mirror());
        let mut targets = pool.required(space, number).union(mirror.into_iter().collect()).minus(sent);
        if is_reported {
            // What asks for long takes no exchange from others; and who has lost the slab is not asked until the map says so, too.
            let failed = pool.map.spaces[space].slabs[number].failed;
            targets = targets.minus(failed).iter().filter(|peer| !pool.sessions.peers[*peer].is_down()).collect();
        }
        let wire = if kind == (Kind::Write { trim: true }) { Wire::Trim } else { Wire::Write };
        for peer in targets.iter() {
            let request = Request { role: Role::Write { op }, peer, op: wire, class, space, page, version };
            if pool.ask(request) {
                self.ops.get(op).sent.insert(peer);
                self.ops.get(op).exchanges += 1;
            }
        }
    }

    /// An exchange of an operation ended, whatever came of it.
    pub(in crate::client) fn op_exchange_ended(&mut self, op: OpIndex) {
        self.ops.get(op).exchanges -= 1;
        self.ops.free_if_over(op);
    }

    /// A page came: the version that a copy has, and where it was put together.
    pub(in crate::client) fn finish_read(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        op: OpIndex,
        result: Result<bool, Failure>,
    ) {
        if self.ops.peek(op).stage != Stage::Active {
            return;
        }
        self.ops.get(op).has_content = result == Ok(true);
        self.ops.finish(op, result.map(drop));
        self.drop_exchanges(pool, parity, op);
    }

    /// No answer is wanted any more: of a second copy, or of one that is away.
    pub(in crate::client) fn drop_exchanges(&mut self, pool: &mut Pool, parity: &mut Parity, op: OpIndex) {
        self.drop_stripe(pool, parity, op);
        while self.ops.peek(op).exchanges > 0 {
            let own = Role::Read { op };
            let found = pool.sessions.exchanges.find(|e| e.role == own || e.role == Role::Write { op });
            let Some(exchange) = found else { return };
            pool.sessions.end_exchange(exchange.id);
            self.op_exchange_ended(op);
        }
    }

    /// A copy is gone: should there be another one at the same server, it has nothing of what this one had.
    pub(in crate::client) fn unsend_writes(&mut self, pool: &Pool, space: SpaceIndex, slab: SlabNo, peer: PeerIndex) {
        let size = pool.map.size;
        let of_slab = |page| size.slab(page).is_some_and(|s| s == slab);
        self.ops.unsend(peer, |op| op.space == space && of_slab(op.page));
    }

    /// What cannot begin before something is known of a slab.
    pub(in crate::client) fn waiting_for(&self, pool: &Pool, space: SpaceIndex, slab: SlabNo) -> Selected {
        let of_slab = |page| pool.map.slab_of(page) == Some(slab);
        self.ops.select(|op| op.stage == Stage::Waiting && op.space == space && of_slab(op.page))
    }

    /// The next result. Of a read `take` is given the page, in room that may be exchanged for other; nothing if that is zero.
    pub(in crate::client) fn next_event(
        &mut self,
        pool: &mut Pool,
        parity: &mut Parity,
        take: impl FnOnce(Option<&mut Box<SealedPage>>),
    ) -> Option<Event> {
        if let Some(Reported { token, class, since }) = self.ops.next_told() {
            pool.stats.writes_took[class as usize].record(pool.now.since(since));
            pool.stats.unanswered += 1;
            self.resume_waiting(pool, parity);
            return Some(Event::Written { token, result: Err(Failure::Silent) });
        }
        if let Some(event) = self.confirms.next_event() {
            return Some(event);
        }
        let op = self.ops.next_done()?;
        let Operation { kind, token, stage, has_content, class, since, .. } = *self.ops.peek(op);
        let Stage::Done(result) = stage else { return None };
        if kind == Kind::Read {
            take(has_content.then(|| self.ops.page_of(op)));
        }
        let latencies = if kind == Kind::Read { &mut pool.stats.reads_took } else { &mut pool.stats.writes_took };
        latencies[class as usize].record(pool.now.since(since));
        pool.stats.unanswered += u64::from(result == Err(Failure::Silent));
        self.ops.let_go(op);
        self.resume_waiting(pool, parity);
        match kind {
            Kind::Read => Some(Event::Read { token, result }),
            Kind::Write { .. } => Some(Event::Written { token, result }),
        }
    }
}
