//! The operations that callers have asked for, from that moment until the caller is told the result.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use smallvec::SmallVec;

use super::outcome::{Failure, OPS_MAX, Token};
use super::peer::PeerSet;
use crate::client::index::{List, ListIndex, OpIndex, PeerIndex, SpaceIndex};
use crate::units::{Class, Page, PageNo, SEALED_SIZE, SealedPage, SlabNo, SlabSize, Time, Version};

/// Writes under way, by page.
type Busy = HashMap<(SpaceIndex, PageNo), OpIndex>;

/// Beside these, the client's own: pages of the ledger.
pub const OWN_MAX: usize = 16;
/// Writes that have failed and are under way all the same; more wait for an answer in the slots of others.
pub const REPORTED_MAX: usize = OPS_MAX;
const ALL: usize = OPS_MAX + OWN_MAX + REPORTED_MAX;
/// Slots of operations, in place: they are looked for where nothing may need memory.
pub type Selected = SmallVec<[OpIndex; ALL]>;
/// Slots that writes leave to reads. A write may keep its slot for long: until a copy in the making has it, too.
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
    pub space: SpaceIndex,
    pub page: PageNo,
    pub class: Class,
    pub token: Token,
    /// When the caller asked.
    pub since: Time,
    /// Of a write, its own. Of a read, the least that is right.
    pub version: Version,
    /// Its place in the order in which callers asked.
    pub order: u64,
    /// Of a read in a space that another client writes: the look at the map that it waits for.
    pub look: u64,
    /// Servers that were asked, and those that have it.
    pub sent: PeerSet,
    pub acked: PeerSet,
    /// Of a read in a space that another client writes: copies that were damaged.
    pub bad: PeerSet,
    /// Of such a read: no copy had the page by the last map.
    pub has_paused: bool,
    /// Exchanges of this operation that are not ended.
    pub exchanges: u32,
    /// Content sits in the buffer (a read that is done and not zero).
    pub has_content: bool,
    /// Of a read in a group with parity: its own copy came, and was damaged.
    pub is_bad_itself: bool,
    /// The client's own; no caller is told.
    pub is_own: bool,
    /// The caller was told that it failed, and it goes on; see `pages/silence.rs`.
    pub is_reported: bool,
}

/// A write that has failed as [`Failure::Silent`] before it has ended.
#[derive(Clone, Copy, Debug)]
pub struct Reported {
    pub token: Token,
    pub class: Class,
    pub since: Time,
}

/// The operations, and a page's room for each.
#[derive(Debug)]
pub struct Ops {
    all: List<OpIndex, Operation>,
    /// Of a write, the sealed page; of a read, what was in it.
    buffers: List<OpIndex, Box<SealedPage>>,
    free: Vec<OpIndex>,
    free_own: Vec<OpIndex>,
    /// Slots that come for those of writes that have failed and go on.
    spare: Vec<OpIndex>,
    reported: VecDeque<Reported>,
    done: VecDeque<OpIndex>,
    done_own: VecDeque<OpIndex>,
    order: u64,
    busy: Busy,
    waiting: usize,
    /// Writes that could not be told for want of a slot; and whether one has come since.
    untold: bool,
    has_spare_again: bool,
    /// Slots before this one have been used; others are not looked at.
    used: usize,
    /// How many operations there are of slabs, by what their numbers come to.
    of_slabs: Box<[u16; SLABS_KEPT_APART]>,
    size: SlabSize,
}

/// Slabs whose operations are counted apart from each other's.
const SLABS_KEPT_APART: usize = 1024;

impl Ops {
    /// `reports`: writes may fail and go on.
    pub fn new(size: SlabSize, reports: bool) -> Ops {
        let slots = OPS_MAX + OWN_MAX + if reports { REPORTED_MAX } else { 0 };
        let empty = Operation {
            kind: Kind::Read,
            stage: Stage::Free,
            space: SpaceIndex(0),
            page: PageNo(0),
            class: Class::Demand,
            token: 0,
            since: Time::default(),
            version: Version::NEVER,
            order: 0,
            look: 0,
            sent: PeerSet::default(),
            acked: PeerSet::default(),
            bad: PeerSet::default(),
            has_paused: false,
            exchanges: 0,
            has_content: false,
            is_bad_itself: false,
            is_own: false,
            is_reported: false,
        };
        Ops {
            all: (0..slots).map(|_| empty).collect(),
            buffers: (0..slots).map(|_| Box::new([0; SEALED_SIZE])).collect(),
            free: (0..OPS_MAX).rev().map(OpIndex).collect(),
            free_own: (OPS_MAX..OPS_MAX + OWN_MAX).map(OpIndex).collect(),
            spare: (OPS_MAX + OWN_MAX..slots).rev().map(OpIndex).collect(),
            reported: VecDeque::with_capacity(REPORTED_MAX),
            done: VecDeque::with_capacity(OPS_MAX),
            done_own: VecDeque::with_capacity(OWN_MAX),
            order: 0,
            busy: Busy::with_capacity(2 * OPS_MAX),
            waiting: 0,
            untold: false,
            has_spare_again: false,
            used: OPS_MAX + OWN_MAX,
            of_slabs: Box::new([0; SLABS_KEPT_APART]),
            size,
        }
    }

    pub fn is_idle(&self) -> bool {
        self.free.len() == OPS_MAX && self.free_own.len() == OWN_MAX && !self.any_reported() && self.reported.is_empty()
    }

    /// Whether a write that has failed goes on.
    pub fn any_reported(&self) -> bool {
        self.spare.len() < self.all.len() - OPS_MAX - OWN_MAX
    }

    /// The first of these pages to which a write that has failed goes on.
    pub fn first_reported(&self, space: SpaceIndex, pages: Range<u64>) -> Option<u64> {
        let used = if self.any_reported() { self.used } else { 0 };
        let reported =
            self.all.iter().take(used).filter(|op| op.is_reported && op.stage == Stage::Active && op.space == space);
        reported.map(|op| op.page.0).filter(|page| pages.contains(page)).min()
    }

    /// Whether there may be an operation of a slab.
    pub fn may_be_any_of(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.of_slabs[Ops::kept_apart(space, slab)] > 0
    }

    fn kept_apart(space: SpaceIndex, slab: SlabNo) -> usize {
        (slab.to_usize() + 61 * space.to_usize()) % SLABS_KEPT_APART
    }

    /// The count that an operation is in.
    fn of_slab(&mut self, op: OpIndex) -> Option<&mut u16> {
        let Operation { space, page, .. } = self.all[op];
        let slab = self.size.slab(page)?;
        self.of_slabs.get_mut(Ops::kept_apart(space, slab))
    }

    /// Of the client's own, those that are begun.
    pub fn own_begun(&self) -> usize {
        OWN_MAX - self.free_own.len()
    }

    /// Those of them that write.
    pub fn own_writes(&self) -> usize {
        let own = self.all.iter().skip(OPS_MAX).take(OWN_MAX);
        own.filter(|op| op.stage != Stage::Free && op.kind != Kind::Read).count()
    }

    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub fn has_done(&self) -> bool {
        !self.done.is_empty() || !self.reported.is_empty()
    }

    pub fn peek(&self, op: OpIndex) -> &Operation {
        &self.all[op]
    }

    pub fn get(&mut self, op: OpIndex) -> &mut Operation {
        &mut self.all[op]
    }

    /// Whether a write may begin.
    pub fn has_room_for_write(&self) -> bool {
        self.free.len() > READS_RESERVED
    }

    /// The write to a page that is under way; later ones wait behind it.
    pub fn writer(&self, space: SpaceIndex, page: PageNo) -> Option<OpIndex> {
        self.busy.get(&(space, page)).copied()
    }

    #[cfg(test)]
    pub fn has_no_writer(&self) -> bool {
        self.busy.is_empty()
    }

    /// A write is the one to its page that is under way, from now on. `false` if there is another one.
    pub fn begin_write(&mut self, op: OpIndex) -> bool {
        let Operation { space, page, .. } = self.all[op];
        *self.busy.entry((space, page)).or_insert(op) == op
    }

    /// A write is under way no more.
    pub fn end_write(&mut self, op: OpIndex) {
        let Operation { space, page, .. } = self.all[op];
        if self.writer(space, page) == Some(op) {
            self.busy.remove(&(space, page));
        }
    }

    /// Whether an operation waits.
    pub fn any_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// A copy is gone: writes under way that fit have not been sent there, and are not acknowledged by it.
    pub fn unsend(&mut self, peer: PeerIndex, fits: impl Fn(&Operation) -> bool) {
        let writes = |op: &Operation| op.stage == Stage::Active && op.kind != Kind::Read && fits(op);
        for op in self.all.iter_mut().take(self.used).filter(|op| writes(op)) {
            op.sent.remove(peer);
            op.acked.remove(peer);
        }
    }

    /// Where the content of a read is put, and the sealed page of the write to the same page.
    pub fn content_and_sealed(&mut self, read: OpIndex, writer: OpIndex) -> Option<(&mut Page, &SealedPage)> {
        let [content, sealed] = self.buffers.pair_mut(read, writer)?;
        Some((content.first_chunk_mut().expect("a page is smaller than a sealed one"), sealed))
    }

    /// Room for the page of a write, which is sealed where it is.
    pub fn room(&mut self, op: OpIndex) -> &mut SealedPage {
        &mut self.buffers[op]
    }

    /// The next write whose caller is told that it failed, and which goes on.
    pub fn next_told(&mut self) -> Option<Reported> {
        self.reported.pop_front()
    }

    /// The next operation that is done.
    pub fn next_done(&mut self) -> Option<OpIndex> {
        self.done.pop_front()
    }

    /// The page of a read that is done, in room that may be exchanged for other.
    pub fn page_of(&mut self, op: OpIndex) -> &mut Box<SealedPage> {
        &mut self.buffers[op]
    }

    /// The sealed page of a write.
    pub fn sealed(&self, op: OpIndex) -> &SealedPage {
        &self.buffers[op]
    }

    /// Where the page of a read is put.
    pub fn content(&mut self, op: OpIndex) -> &mut Page {
        self.buffers[op].first_chunk_mut().expect("a page is smaller than a sealed one")
    }

    /// Slots of the operations that fit, oldest first.
    pub fn select(&self, fits: impl Fn(&Operation) -> bool) -> Selected {
        let mut found: Selected =
            self.used().filter(|op| self.all[*op].stage != Stage::Free && fits(&self.all[*op])).collect();
        found.sort_unstable_by_key(|op| self.all[*op].order);
        found
    }

    fn used(&self) -> impl Iterator<Item = OpIndex> + use<> {
        (0..self.used).map(OpIndex)
    }

    pub fn any(&self, fits: impl Fn(&Operation) -> bool) -> bool {
        self.all.iter().take(self.used).any(|op| op.stage != Stage::Free && fits(op))
    }

    pub fn begin(
        &mut self,
        kind: Kind,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        asked: (Token, Time),
    ) -> Option<OpIndex> {
        let op = self.free.pop()?;
        self.begin_at(op, kind, space, page, class, asked);
        Some(op)
    }

    /// The same for the client itself.
    pub fn begin_own(
        &mut self,
        kind: Kind,
        space: SpaceIndex,
        page: PageNo,
        class: Class,
        asked: (Token, Time),
    ) -> Option<OpIndex> {
        let op = self.free_own.pop()?;
        self.begin_at(op, kind, space, page, class, asked);
        self.all[op].is_own = true;
        Some(op)
    }

    fn begin_at(
        &mut self,
        op: OpIndex,
        kind: Kind,
        space: SpaceIndex,
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
            look: 0,
            sent: PeerSet::default(),
            acked: PeerSet::default(),
            bad: PeerSet::default(),
            has_paused: false,
            exchanges: 0,
            has_content: false,
            is_bad_itself: false,
            is_own: false,
            is_reported: false,
        };
        self.of_slab(op).into_iter().for_each(|count| *count += 1);
    }

    /// It is somewhere else now.
    pub fn leave(&mut self, op: OpIndex) {
        if self.all[op].stage == Stage::Waiting {
            self.waiting -= 1;
        }
        self.release(op);
    }

    fn release(&mut self, op: OpIndex) {
        self.all[op].stage = Stage::Free;
        self.of_slab(op).into_iter().for_each(|count| *count -= 1);
        let free = match self.all[op] {
            Operation { is_own: true, .. } => &mut self.free_own,
            Operation { is_reported: true, .. } => {
                self.has_spare_again = self.untold;
                &mut self.spare
            }
            _ => &mut self.free,
        };
        free.push(op);
    }

    pub fn activate(&mut self, op: OpIndex) {
        if self.all[op].stage == Stage::Waiting {
            self.waiting -= 1;
        }
        self.all[op].stage = Stage::Active;
    }

    /// What it asked is of no use any more: it begins anew when its slab is there.
    pub fn wait_again(&mut self, op: OpIndex) {
        let op = &mut self.all[op];
        if op.stage == Stage::Active {
            self.waiting += 1;
            (op.stage, op.sent, op.is_bad_itself) = (Stage::Waiting, PeerSet::default(), false);
        }
    }

    /// Fails for its caller, and goes on: another slot comes for its own. `false` if there is none.
    pub fn report(&mut self, op: OpIndex) -> bool {
        let Some(slot) = self.spare.pop() else {
            self.untold = true;
            return false;
        };
        self.free.push(slot);
        self.used = self.used.max(slot.to_usize() + 1);
        let Operation { token, class, since, .. } = self.all[op];
        self.all[op].is_reported = true;
        self.reported.push_back(Reported { token, class, since });
        true
    }

    /// Whether writes that could not be told can be now.
    pub fn can_tell_more(&mut self) -> bool {
        let can = std::mem::take(&mut self.has_spare_again);
        self.untold &= !can;
        can
    }

    /// Ends for its caller, unless he was told already.
    pub fn finish(&mut self, op: OpIndex, result: Result<(), Failure>) {
        if self.all[op].stage == Stage::Waiting {
            self.waiting -= 1;
        }
        if self.all[op].is_reported {
            return self.let_go(op);
        }
        self.all[op].stage = Stage::Done(result);
        let done = if self.all[op].is_own { &mut self.done_own } else { &mut self.done };
        done.push_back(op);
    }

    /// A result of the client's own.
    pub fn next_own(&mut self) -> Option<OpIndex> {
        self.done_own.pop_front()
    }

    /// Its result was taken.
    pub fn let_go(&mut self, op: OpIndex) {
        self.all[op].stage = Stage::Lingering;
        self.free_if_over(op);
    }

    /// An exchange of it ended, or the caller was told: is it over?
    pub fn free_if_over(&mut self, op: OpIndex) {
        if self.all[op].stage == Stage::Lingering && self.all[op].exchanges == 0 {
            self.release(op);
        }
    }
}
