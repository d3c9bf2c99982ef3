//! The callers' operations: from being asked for to being told.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use smallvec::SmallVec;

use super::exchange::{Exchange, Request, Role};
use super::peer::PeerSet;
use super::sealed::Tenure;
use super::slab::Phase;
use super::{Busy, Client, Event, Failure, Fault, Refused, Token};
use crate::crypto::Rejected;
use crate::units::{Class, PAGE_SIZE, Page, PageNo, SEALED_SIZE, Time, Version};
use crate::wire::message::Op as Wire;

/// Operations at a time, the paper's small bounded write buffer among them: 1 MiB, what a link of 10 Gbit/s carries in a
/// millisecond.
pub const OPS_MAX: usize = 256;
/// Beside these, the client's own: pages of the ledger.
pub const OWN_MAX: usize = 16;
const ALL: usize = OPS_MAX + OWN_MAX;
/// Places of operations, in place: they are looked for where nothing may need memory.
pub type Selected = SmallVec<[usize; ALL]>;
/// Places that writes leave to reads. A write may keep its place for long: until a copy in the making has it, too.
pub const READS_RESERVED: usize = OPS_MAX / 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    /// A trim has no content.
    Write {
        trim: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Free,
    /// For its slab, for another write to its page, for room.
    Waiting,
    Active,
    /// The caller may be told.
    Done(Result<(), Failure>),
    /// The caller was told; some copy still has to answer.
    Lingering,
}

#[derive(Clone, Copy, Debug)]
pub struct Operation {
    pub kind: Kind,
    pub stage: Stage,
    pub space: usize,
    pub page: PageNo,
    pub class: Class,
    pub token: Token,
    /// When the caller asked.
    pub since: Time,
    /// Of a write, its own. Of a read, the least that is right.
    pub version: Version,
    /// Order of submission.
    pub order: u64,
    /// Servers that were asked, and those that have it.
    pub sent: PeerSet,
    pub acked: PeerSet,
    /// Exchanges of this operation that are not ended.
    pub exchanges: u32,
    /// Content sits in the buffer (a read that is done and not zero).
    pub has_content: bool,
    /// Of a read in a group with parity: its own copy came, and was damaged.
    pub is_bad_itself: bool,
    /// The client's own; no caller is told.
    pub is_own: bool,
}

/// The operations, and a page's room for each.
#[derive(Debug)]
pub struct Ops {
    all: Vec<Operation>,
    /// Of a write, the sealed page; of a read, what was in it.
    buffers: Vec<Box<[u8; SEALED_SIZE]>>,
    free: Vec<usize>,
    free_own: Vec<usize>,
    done: VecDeque<usize>,
    done_own: VecDeque<usize>,
    order: u64,
    pub busy: Busy,
    waiting: usize,
}

impl Ops {
    pub fn new() -> Ops {
        let empty = Operation {
            kind: Kind::Read,
            stage: Stage::Free,
            space: 0,
            page: PageNo(0),
            class: Class::Demand,
            token: 0,
            since: Time::default(),
            version: Version::NEVER,
            order: 0,
            sent: PeerSet::default(),
            acked: PeerSet::default(),
            exchanges: 0,
            has_content: false,
            is_bad_itself: false,
            is_own: false,
        };
        Ops {
            all: vec![empty; ALL],
            buffers: (0..ALL).map(|_| Box::new([0; SEALED_SIZE])).collect(),
            free: (0..OPS_MAX).rev().collect(),
            free_own: (OPS_MAX..ALL).collect(),
            done: VecDeque::with_capacity(OPS_MAX),
            done_own: VecDeque::with_capacity(OWN_MAX),
            order: 0,
            busy: Busy::with_capacity(2 * OPS_MAX),
            waiting: 0,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.free.len() == OPS_MAX && self.free_own.len() == OWN_MAX
    }

    /// Of the client's own, those that are begun.
    pub fn own_begun(&self) -> usize {
        OWN_MAX - self.free_own.len()
    }

    /// Those of them that write.
    pub fn own_writes(&self) -> usize {
        let own = &self.all[OPS_MAX..];
        own.iter().filter(|op| op.stage != Stage::Free && op.kind != Kind::Read).count()
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    pub fn peek(&self, op: usize) -> &Operation {
        &self.all[op]
    }

    pub fn get(&mut self, op: usize) -> &mut Operation {
        &mut self.all[op]
    }

    /// The sealed page of a write.
    pub fn sealed(&self, op: usize) -> &[u8; SEALED_SIZE] {
        &self.buffers[op]
    }

    /// Where the page of a read is put.
    pub fn content(&mut self, op: usize) -> &mut Page {
        self.buffers[op].first_chunk_mut().expect("a page is smaller than a sealed one")
    }

    /// Places of the operations that fit, oldest first.
    pub fn select(&self, fits: impl Fn(&Operation) -> bool) -> Selected {
        let mut found: Selected =
            (0..self.all.len()).filter(|op| self.all[*op].stage != Stage::Free && fits(&self.all[*op])).collect();
        found.sort_unstable_by_key(|op| self.all[*op].order);
        found
    }

    pub fn any(&self, fits: impl Fn(&Operation) -> bool) -> bool {
        self.all.iter().any(|op| op.stage != Stage::Free && fits(op))
    }

    fn begin(&mut self, kind: Kind, space: usize, page: PageNo, class: Class, asked: (Token, Time)) -> Option<usize> {
        let op = self.free.pop()?;
        self.begin_at(op, kind, space, page, class, asked);
        Some(op)
    }

    /// The same for the client itself.
    pub fn begin_own(
        &mut self,
        kind: Kind,
        space: usize,
        page: PageNo,
        class: Class,
        asked: (Token, Time),
    ) -> Option<usize> {
        let op = self.free_own.pop()?;
        self.begin_at(op, kind, space, page, class, asked);
        self.all[op].is_own = true;
        Some(op)
    }

    fn begin_at(
        &mut self,
        op: usize,
        kind: Kind,
        space: usize,
        page: PageNo,
        class: Class,
        (token, since): (Token, Time),
    ) {
        self.order += 1;
        self.waiting += 1;
        self.all[op] = Operation {
            kind,
            stage: Stage::Waiting,
            space,
            page,
            class,
            token,
            since,
            version: Version::NEVER,
            order: self.order,
            sent: PeerSet::default(),
            acked: PeerSet::default(),
            exchanges: 0,
            has_content: false,
            is_bad_itself: false,
            is_own: false,
        };
    }

    /// It is somewhere else now.
    pub fn leave(&mut self, op: usize) {
        if self.all[op].stage == Stage::Waiting {
            self.waiting -= 1;
        }
        self.release(op);
    }

    fn release(&mut self, op: usize) {
        self.all[op].stage = Stage::Free;
        let free = if self.all[op].is_own { &mut self.free_own } else { &mut self.free };
        free.push(op);
    }

    pub fn activate(&mut self, op: usize) {
        if self.all[op].stage == Stage::Waiting {
            self.waiting -= 1;
        }
        self.all[op].stage = Stage::Active;
    }

    /// What it asked is of no use any more: it begins anew when its slab is there.
    pub fn wait_again(&mut self, op: usize) {
        let op = &mut self.all[op];
        if op.stage == Stage::Active {
            self.waiting += 1;
            (op.stage, op.sent, op.is_bad_itself) = (Stage::Waiting, PeerSet::default(), false);
        }
    }

    fn finish(&mut self, op: usize, result: Result<(), Failure>) {
        if self.all[op].stage == Stage::Waiting {
            self.waiting -= 1;
        }
        self.all[op].stage = Stage::Done(result);
        let done = if self.all[op].is_own { &mut self.done_own } else { &mut self.done };
        done.push_back(op);
    }

    /// A result of the client's own.
    pub fn next_own(&mut self) -> Option<usize> {
        self.done_own.pop_front()
    }

    /// Its result was taken.
    pub fn let_go(&mut self, op: usize) {
        self.all[op].stage = Stage::Lingering;
        self.free_if_over(op);
    }

    /// An exchange of it ended, or the caller was told: is it over?
    fn free_if_over(&mut self, op: usize) {
        if self.all[op].stage == Stage::Lingering && self.all[op].exchanges == 0 {
            self.release(op);
        }
    }
}

impl Client {
    pub(super) fn begin_read(
        &mut self,
        now: Time,
        space: usize,
        page: PageNo,
        class: Class,
        token: Token,
    ) -> Result<(), Refused> {
        if page.0 >= self.spaces[space].pages {
            return Err(Refused::BeyondEnd);
        }
        if !self.begin_again(space, page, class, (token, now)) {
            return Err(Refused::Busy);
        }
        self.stats.reads += 1;
        self.settle(now);
        Ok(())
    }

    /// A read, from its beginning. `false`: there is no place for it.
    pub(super) fn begin_again(&mut self, space: usize, page: PageNo, class: Class, asked: (Token, Time)) -> bool {
        let op = self.ops.begin(Kind::Read, space, page, class, asked);
        op.is_some_and(|op| {
            self.try_read(op);
            true
        })
    }

    pub(super) fn begin_write(
        &mut self,
        now: Time,
        space: usize,
        page: PageNo,
        class: Class,
        content: Option<&Page>,
        token: Token,
    ) -> Result<(), Refused> {
        if page.0 >= self.spaces[space].pages {
            return Err(Refused::BeyondEnd);
        }
        if self.spaces[space].tenure != Tenure::Owner {
            return Err(Refused::Sealed);
        }
        if self.ops.free.len() <= READS_RESERVED {
            return Err(Refused::Busy);
        }
        let version = self.spaces[space].next_version(content.is_none()).ok_or(Refused::VersionsUsedUp)?;
        let kind = Kind::Write { trim: content.is_none() };
        let op = self.ops.begin(kind, space, page, class, (token, now)).ok_or(Refused::Busy)?;
        self.stats.writes += 1;
        self.now = now;
        match content {
            Some(content) => self.store_write(op, version, content),
            None => self.ops.all[op].version = version,
        }
        self.try_write(op);
        self.settle(now);
        Ok(())
    }

    /// What a write is to write.
    pub(super) fn store_write(&mut self, op: usize, version: Version, content: &Page) {
        let Operation { space, page, .. } = self.ops.all[op];
        self.ops.all[op].version = version;
        self.spaces[space].key.seal(page, version, content, &mut self.ops.buffers[op][..]);
    }

    /// Somebody else keeps the space: the client's own write is not done.
    pub(super) fn fail_write(&mut self, op: usize) {
        if matches!(self.ops.all[op].stage, Stage::Waiting | Stage::Active) {
            self.end_write(op, Err(Failure::Fenced));
        }
        self.drop_exchanges(op);
    }

    /// Begins a waiting operation if it can begin now.
    pub(super) fn try_op(&mut self, op: usize) {
        match self.ops.all[op].kind {
            _ if self.ops.all[op].stage != Stage::Waiting => {}
            Kind::Read => self.try_read(op),
            Kind::Write { .. } => self.try_write(op),
        }
    }

    fn try_read(&mut self, op: usize) {
        let Operation { space, page, .. } = self.ops.all[op];
        if self.spaces[space].is_taken {
            return self.ops.finish(op, Err(Failure::Fenced));
        }
        // The map that is being looked up decides.
        if self.spaces[space].is_stale {
            return;
        }
        let Some(number) = self.slab_of(page) else { return };
        let slab = &self.spaces[space].slabs[number];
        match slab.phase {
            Phase::Lost => self.ops.finish(op, Err(Failure::Lost)),
            Phase::Vacant | Phase::Granting(_) | Phase::Leaving => self.read_zero(op),
            Phase::Opening(_) => {}
            Phase::Open => {
                // What is being written is as good as what was; and this is at hand.
                if let Some(&writer) = self.ops.busy.get(&Client::busy_key(space, page)) {
                    return self.read_from_buffer(op, writer);
                }
                let version = slab.version(self.config.slab_size.index(page));
                if !version.has_content() {
                    return self.read_zero(op);
                }
                self.ops.all[op].version = version;
                self.ask_for_page(op);
            }
        }
    }

    fn read_zero(&mut self, op: usize) {
        self.stats.reads_local += 1;
        self.ops.all[op].has_content = false;
        self.ops.finish(op, Ok(()));
    }

    fn read_from_buffer(&mut self, op: usize, writer: usize) {
        let Operation { space, page, version, kind, .. } = self.ops.all[writer];
        if kind == (Kind::Write { trim: true }) {
            return self.read_zero(op);
        }
        let opened = match self.ops.buffers.get_disjoint_mut([op, writer]) {
            Ok([content, sealed]) => {
                let (content, _) = content.split_first_chunk_mut().expect("a page is smaller than a sealed one");
                self.spaces[space].key.open(page, version, &sealed[..], content)
            }
            Err(_) => Err(Rejected::NotAuthentic),
        };
        self.stats.reads_local += 1;
        self.ops.all[op].has_content = true;
        self.ops.finish(op, opened.map_err(|_| Failure::Corrupt));
    }

    /// Asks the nearest copy that was not asked yet; any copy, where all were.
    pub(super) fn ask_for_page(&mut self, op: usize) {
        let Operation { space, page, sent, .. } = self.ops.all[op];
        let Some(number) = self.slab_of(page) else { return };
        if self.spaces[space].is_stale {
            return self.ops.activate(op);
        }
        if self.is_grouped(space, number) {
            return self.ask_group(op, number);
        }
        let copies = self.copies_to_read(space, number);
        let near = |peer: &usize| (self.peers[*peer].is_down(), sent.has(*peer), self.peers[*peer].trip.smoothed());
        // Without a copy that can be trusted, the change of the map decides; one that is to be told of this reader is asked then.
        let Some(peer) = copies.iter().min_by_key(near) else {
            let slab = &self.spaces[space].slabs[number];
            let unknown = self.peers_of(&slab.entry).minus(slab.failed);
            let is_away = !unknown.is_empty() && unknown.iter().all(|peer| self.peers[peer].is_down());
            if self.ops.all[op].is_own {
                self.put_back(op);
            } else if !(is_away && self.park(op)) {
                self.ops.activate(op);
            }
            return self.mark(space, number);
        };
        if self.peers[peer].is_down() && self.park(op) {
            return;
        }
        let asked = |e: &Exchange| e.peer == peer && e.role == Role::Read { op };
        if !sent.has(peer) || self.exchanges.find(asked).is_none() {
            self.ask_copy(op, peer);
        }
    }

    pub(super) fn ask_copy(&mut self, op: usize, peer: usize) {
        let Operation { space, page, class, version, .. } = self.ops.all[op];
        let request = Request { role: Role::Read { op }, peer, op: Wire::Read, class, space, page, version };
        if self.ask(request) {
            self.ops.activate(op);
            self.ops.all[op].exchanges += 1;
            self.ops.all[op].sent.insert(peer);
        }
    }

    fn try_write(&mut self, op: usize) {
        let Operation { space, page, .. } = self.ops.all[op];
        if self.spaces[space].is_taken {
            return self.ops.finish(op, Err(Failure::Fenced));
        }
        let Some(number) = self.slab_of(page) else { return };
        let is_lost = matches!(self.spaces[space].slabs[number].phase, Phase::Lost);
        if !is_lost && self.waits_for_group(op, number) {
            return;
        }
        match self.spaces[space].slabs[number].phase {
            Phase::Lost => self.ops.finish(op, Err(Failure::Lost)),
            Phase::Vacant => self.mark(space, number),
            Phase::Granting(_) | Phase::Leaving if self.config.map_patience.is_some() => self.mark(space, number),
            Phase::Granting(_) | Phase::Opening(_) | Phase::Leaving => {}
            Phase::Open => {
                let key = Client::busy_key(space, page);
                // One write to a page at a time, in the order in which they came.
                if let Entry::Vacant(place) = self.ops.busy.entry(key) {
                    place.insert(op);
                    self.ops.activate(op);
                    self.send_write(op);
                }
            }
        }
    }

    /// To every copy that has not been sent it.
    pub(super) fn send_write(&mut self, op: usize) {
        let Operation { space, page, class, version, sent, kind, .. } = self.ops.all[op];
        let Some(number) = self.slab_of(page) else { return };
        let mirror = self.spaces[space].slabs[number].repair.as_ref().and_then(|repair| repair.mirror());
        let targets = self.required(space, number).union(mirror.into_iter().collect()).minus(sent);
        let wire = if kind == (Kind::Write { trim: true }) { Wire::Trim } else { Wire::Write };
        for peer in targets.iter() {
            let request = Request { role: Role::Write { op }, peer, op: wire, class, space, page, version };
            if self.ask(request) {
                self.ops.all[op].sent.insert(peer);
                self.ops.all[op].exchanges += 1;
            }
        }
    }

    /// A copy has the write, or the set of copies changed: is it done?
    pub(super) fn check_write(&mut self, op: usize) {
        let Operation { space, page, version, sent, acked, stage, .. } = self.ops.all[op];
        let Some(number) = self.slab_of(page) else { return };
        let required = self.required(space, number);
        let repair = self.spaces[space].slabs[number].repair.as_ref();
        let joining = repair.and_then(|repair| repair.catches_up()).filter(|peer| sent.has(*peer));
        let wanted = required.union(joining.into_iter().collect());
        let enough = wanted.is_subset_of(acked) || (self.has(Fault::AcksEarly) && !acked.is_empty());
        if stage != Stage::Active || required.is_empty() || !enough {
            return;
        }
        let index = self.config.slab_size.index(page);
        self.set_version(space, number, index, version);
        self.note_change(space, number);
        self.end_write(op, Ok(()));
        if self.spaces[space].slabs[number].repair.is_some() {
            self.mark(space, number);
        }
    }

    fn end_write(&mut self, op: usize, result: Result<(), Failure>) {
        let Operation { space, page, .. } = self.ops.all[op];
        let key = Client::busy_key(space, page);
        if self.ops.busy.get(&key) == Some(&op) {
            self.ops.busy.remove(&key);
        }
        self.ops.finish(op, result);
        if self.ops.waiting > 0 {
            for next in self.ops.select(|o| o.stage == Stage::Waiting && o.space == space && o.page == page) {
                self.try_op(next);
            }
        }
    }

    /// An exchange of an operation ended, whatever came of it.
    pub(super) fn op_exchange_ended(&mut self, op: usize) {
        self.ops.all[op].exchanges -= 1;
        self.ops.free_if_over(op);
    }

    /// A page came: the version that a copy has, and where it was put together.
    pub(super) fn finish_read(&mut self, op: usize, result: Result<bool, Failure>) {
        if self.ops.all[op].stage != Stage::Active {
            return;
        }
        self.ops.all[op].has_content = result == Ok(true);
        self.ops.finish(op, result.map(drop));
        self.drop_exchanges(op);
    }

    /// No answer is wanted any more: of a second copy, or of one that is away.
    pub(super) fn drop_exchanges(&mut self, op: usize) {
        self.drop_stripe(op);
        while self.ops.all[op].exchanges > 0 {
            let own = Role::Read { op };
            let found = self.exchanges.find(|e| e.role == own || e.role == Role::Write { op });
            let Some(exchange) = found else { return };
            self.end_exchange(exchange.id);
            self.op_exchange_ended(op);
        }
    }

    /// Operations of a slab that wait for it.
    pub(super) fn wake_ops(&mut self, space: usize, slab: usize) {
        for op in self.waiting_for(space, slab) {
            self.try_op(op);
        }
    }

    /// The set of copies changed: writes may be done or have to go elsewhere, reads too.
    pub(super) fn map_settled(&mut self, space: usize, slab: usize) {
        let size = self.config.slab_size;
        let of_slab = |page| size.slab(page).is_some_and(|s| s.0 as usize == slab);
        for op in self.ops.select(|o| o.stage == Stage::Active && o.space == space && of_slab(o.page)) {
            match self.ops.all[op].kind {
                Kind::Read if !self.is_answer_coming(op) => self.ask_for_page(op),
                Kind::Read => {}
                Kind::Write { .. } => {
                    self.send_write(op);
                    self.check_write(op);
                }
            }
        }
        self.wake_ops(space, slab);
    }

    /// A copy is gone: should there be another one at the same server, it has nothing of what this one had.
    pub(super) fn unsend_writes(&mut self, space: usize, slab: usize, peer: usize) {
        let size = self.config.slab_size;
        let of_slab = |page| size.slab(page).is_some_and(|s| s.0 as usize == slab);
        for op in self.ops.all.iter_mut().filter(|o| o.stage == Stage::Active && o.space == space && of_slab(o.page)) {
            if op.kind != Kind::Read {
                op.sent.remove(peer);
                op.acked.remove(peer);
            }
        }
    }

    /// Ends operations of a space, or of one slab, that cannot be done.
    pub(super) fn fail_ops(&mut self, space: usize, slab: Option<usize>, failure: Failure) {
        let size = self.config.slab_size;
        let fits = |page| slab.is_none_or(|slab| size.slab(page).is_some_and(|s| s.0 as usize == slab));
        for op in self.ops.select(|o| o.space == space && fits(o.page)) {
            match (self.ops.all[op].stage, self.ops.all[op].kind) {
                (Stage::Waiting | Stage::Active, Kind::Read) => self.ops.finish(op, Err(failure)),
                (Stage::Waiting | Stage::Active, Kind::Write { .. }) => self.end_write(op, Err(failure)),
                _ => {}
            }
            self.drop_exchanges(op);
        }
    }

    /// No server took the slab: those of its writes that had begun by then are the caller's again. How many they are.
    pub(super) fn decline_ops(&mut self, space: usize, slab: usize, began_by: Time) -> usize {
        let mut waiting = self.waiting_for(space, slab);
        waiting.retain(|op| self.ops.get(*op).since <= began_by);
        waiting.iter().for_each(|op| self.ops.finish(*op, Err(Failure::Declined)));
        waiting.len()
    }

    /// What cannot begin before something is known of a slab.
    pub(super) fn waiting_for(&self, space: usize, slab: usize) -> Selected {
        let of_slab = |page| self.slab_of(page) == Some(slab);
        self.ops.select(|op| op.stage == Stage::Waiting && op.space == space && of_slab(op.page))
    }

    pub(super) fn next_event(&mut self, page: &mut Page) -> Option<Event> {
        let op = self.ops.done.pop_front()?;
        let Operation { kind, token, stage, has_content, class, since, .. } = self.ops.all[op];
        let Stage::Done(result) = stage else { return None };
        if kind == Kind::Read {
            if has_content {
                page.copy_from_slice(&self.ops.buffers[op][..PAGE_SIZE]);
            } else {
                page.fill(0);
            }
        }
        let latencies = if kind == Kind::Read { &mut self.stats.reads_took } else { &mut self.stats.writes_took };
        latencies[class as usize].record(self.now.since(since));
        self.ops.let_go(op);
        self.unpark_waiting();
        match kind {
            Kind::Read => Some(Event::Read { token, result }),
            Kind::Write { .. } => Some(Event::Written { token, result }),
        }
    }
}
