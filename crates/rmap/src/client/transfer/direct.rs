//! Has servers copy a slab among themselves.

use super::{Instruction, PROGRESS_EVERY, Transfer, WORTH_PART};
use crate::client::Fault;
use crate::client::exchange::{Answer, Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::map::Map;
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::redundancy::Redundancy;
use crate::client::repair::{REPAIRS_MAX, Step};
use crate::crypto::KEY_SIZE;
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::copy::{CopyOrder, ORDER_SIZE, Progress, RATE_MIN};
use crate::wire::message::{Op as Wire, Status, VERSIONS_MAX};

impl Redundancy {
    /// Does what comes next, if that is not an answer.
    pub(in crate::client) fn advance_transfer(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        now: Time,
        (space, slab): (SpaceIndex, SlabNo),
        transfer: Transfer,
    ) {
        match transfer {
            Transfer::Wanted => {
                let source = pool.source_of(space, slab);
                match source.filter(|source| pool.admit(space, slab, Some(*source))) {
                    Some(source) => pool.map.set_step(space, slab, Step::Transferring(Transfer::Admitting { source })),
                    None => pool.map.copy_the_rest(space, slab),
                }
            }
            Transfer::Running { source, .. } if !pool.can_give(space, slab, source) => {
                self.end_transfer(pool, pages, parity, space, slab, source);
            }
            Transfer::Running { source, ask_at: Some(at) } if at <= now && pool.order(space, slab, source) => {
                pool.map.set_step(space, slab, Step::Transferring(Transfer::Running { source, ask_at: None }));
            }
            _ => {}
        }
    }

    fn end_transfer(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
        source: PeerIndex,
    ) {
        pool.cancel_order(space, slab);
        if pool.admit(space, slab, None) {
            pool.map.set_step(space, slab, Step::Transferring(Transfer::Ending { source }));
        } else {
            self.abort_repair(pool, pages, parity, space, slab);
        }
    }

    /// The target said whether it does as it was told.
    pub(in crate::client) fn admit_answered(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        now: Time,
        (space, slab): (SpaceIndex, SlabNo),
        status: Status,
    ) {
        match (pool.map.transfer_of(space, slab), status) {
            (Some(Transfer::Admitting { source }), Status::Ok) => {
                pool.map.set_step(space, slab, Step::Transferring(Transfer::Running { source, ask_at: Some(now) }));
                pool.map.mark(space, slab);
            }
            // It has no room for one more, or another idea of the slab, which its first write will show.
            (Some(Transfer::Admitting { .. }), _) => pool.map.copy_the_rest(space, slab),
            (Some(Transfer::Ending { source }), Status::Ok) => {
                if let Some(repair) = &mut pool.map.spaces[space].slabs[slab].repair {
                    repair.cursor = 0;
                    repair.step = Step::Transferring(Transfer::Listing { source });
                }
                self.ask_what_it_has(pool, pages, parity, space, slab);
            }
            (Some(Transfer::Ending { .. }), _) => self.abort_repair(pool, pages, parity, space, slab),
            _ => {}
        }
    }

    /// The source said how far it is.
    pub(in crate::client) fn order_answered(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        now: Time,
        (space, slab): (SpaceIndex, SlabNo),
        (status, progress): (Status, Version),
    ) {
        let Some(Transfer::Running { source, .. }) = pool.map.transfer_of(space, slab) else { return };
        if status != Status::Ok || progress.bits() != Progress::Running as u64 {
            return self.end_transfer(pool, pages, parity, space, slab, source);
        }
        let at = now + PROGRESS_EVERY;
        pool.map.set_step(space, slab, Step::Transferring(Transfer::Running { source, ask_at: Some(at) }));
        pool.map.mark_at(at, space, slab);
    }

    fn ask_what_it_has(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        slab: SlabNo,
    ) {
        let Some(repair) = &pool.map.spaces[space].slabs[slab].repair else { return };
        let page = pool.map.size.page(slab, repair.cursor);
        let (role, peer, version) = (Role::Listed, repair.peer, Version::NEVER);
        if !pool.ask(Request { role, peer, op: Wire::Versions, class: Class::Demand, space, page, version }) {
            self.abort_repair(pool, pages, parity, space, slab);
        }
    }

    /// The target said what it has of some pages.
    pub(in crate::client) fn listed_answered(
        &mut self,
        pool: &mut Pool,
        pages: &mut Pages,
        parity: &mut Parity,
        space: SpaceIndex,
        page: PageNo,
        Answer { status, version: grant, payload }: Answer<'_>,
    ) {
        let (Some(slab), size) = (pool.map.slab_of(page), pool.map.size) else { return };
        let Some(Transfer::Listing { source }) = pool.map.transfer_of(space, slab) else { return };
        let first = size.index(page);
        let due = VERSIONS_MAX.min(size.pages() - first);
        let about_it = |repair: &crate::client::repair::Repair| repair.grant == grant && repair.cursor == first;
        let right = pool.map.spaces[space].slabs[slab].repair.as_ref().is_some_and(about_it);
        if status != Status::Ok || !right || payload.len() != due * 8 {
            return self.abort_repair(pool, pages, parity, space, slab);
        }
        for (index, word) in (first..).zip(payload.chunks_exact(8)) {
            let mut bits = [0; 8];
            bits.copy_from_slice(word);
            let version = Version::from_bits(u64::from_le_bytes(bits));
            if !pages.was_issued(pool, space, slab, index, version) {
                // A server that was let in stored what nobody wrote, and it may be one that keeps what was written out.
                pool.sessions.peers[source].distrust();
                pool.stats.transfers_refused += 1;
                return self.abort_repair(pool, pages, parity, space, slab);
            }
            let version = if pool.has(Fault::TrustsSources) {
                pool.map.spaces[space].slabs[slab].version(index)
            } else {
                version
            };
            if let Some(repair) = &mut pool.map.spaces[space].slabs[slab].repair {
                repair.list[index] = repair.list[index].max(version);
            }
        }
        let Some(repair) = &mut pool.map.spaces[space].slabs[slab].repair else { return };
        repair.cursor = first + due;
        if repair.cursor < size.pages() {
            return self.ask_what_it_has(pool, pages, parity, space, slab);
        }
        repair.cursor = 0;
        pool.stats.slabs_transferred += 1;
        pool.map.copy_the_rest(space, slab);
    }
}

impl Pages {
    /// Whether a page can be somewhere in this version: in one that was acknowledged, an earlier one, or the one that is being
    /// written.
    pub(in crate::client) fn was_issued(
        &self,
        pool: &Pool,
        space: SpaceIndex,
        slab: SlabNo,
        index: usize,
        version: Version,
    ) -> bool {
        let page = pool.map.size.page(slab, index);
        let writer = self.ops.writer(space, page);
        version <= pool.map.spaces[space].slabs[slab].version(index)
            || pool.map.may_be_parity(space, slab, version)
            || writer.is_some_and(|op| self.ops.peek(op).version == version)
    }
}

impl Pool {
    /// What a request about a slab says beside its header: of which life it is, or which other server is meant.
    pub(in crate::client) fn instruction(
        &self,
        parity: &Parity,
        role: Role,
        space: SpaceIndex,
        page: PageNo,
        version: Version,
    ) -> Option<Instruction> {
        if !matches!(role, Role::Grant | Role::Admit { .. } | Role::Order) {
            return None;
        }
        let bytes: &[u8] = match role {
            Role::Grant if self.has(Fault::EpochsAtGrants) => &version.bits().to_le_bytes(),
            Role::Grant => &self.map.spaces[space].slabs[self.map.slab_of(page)?].epoch.bits().to_le_bytes(),
            Role::Admit { source: Some(source) } => &self.sessions.peers[source].info().key.0,
            // Zeros stand for nobody: the server takes its ticket back.
            Role::Admit { source: None } => &[0; KEY_SIZE],
            _ => {
                let slab = self.map.slab_of(page)?;
                let repair = self.map.spaces[space].slabs[slab].repair.as_ref()?;
                let target = &self.sessions.peers[repair.peer];
                let bytes_per_second = (self.rebuild_rate(parity) / REPAIRS_MAX as u64).max(RATE_MIN);
                let (key, addr, grant) = (target.info().key, target.addr(), repair.grant);
                &CopyOrder { key, addr, bytes_per_second, grant }.encode()
            }
        };
        let mut instruction = Instruction { bytes: [0; ORDER_SIZE], length: bytes.len() };
        instruction.bytes[..bytes.len()].copy_from_slice(bytes);
        Some(instruction)
    }
}

impl Pool {
    /// Who could copy a slab to its new place, if that is worth it.
    fn source_of(&self, space: SpaceIndex, slab: SlabNo) -> Option<PeerIndex> {
        let state = &self.map.spaces[space].slabs[slab];
        // What goes through the client is opened: the group still has what damaged pages can be put together from.
        if self.map.is_grouped(space, slab) {
            return None;
        }
        let content = state.versions.iter().filter(|version| version.has_content()).count();
        let is_worth_it = content >= (self.map.size.pages() / WORTH_PART).max(1);
        let mut copies = self.sessions.peers_of(&state.entry).iter();
        copies.find(|peer| is_worth_it && self.can_give(space, slab, *peer))
    }

    fn can_give(&self, space: SpaceIndex, slab: SlabNo, source: PeerIndex) -> bool {
        let state = &self.map.spaces[space].slabs[slab];
        let holds = self.sessions.peers_of(&state.entry).has(source) && !state.failed.has(source);
        holds && self.sessions.peers[source].is_up() && self.sessions.peers[source].is_trusted()
    }

    /// Tells the target who may fill the slab.
    fn admit(&mut self, space: SpaceIndex, slab: SlabNo, source: Option<PeerIndex>) -> bool {
        let Some(repair) = &self.map.spaces[space].slabs[slab].repair else { return false };
        let (peer, version) = (repair.peer, repair.grant);
        let (role, op, page) = (Role::Admit { source }, Wire::Admit, self.map.first_page(slab));
        self.ask(Request { role, peer, op, class: Class::Demand, space, page, version })
    }

    /// Has the source begin, or asks it how far it is.
    fn order(&mut self, space: SpaceIndex, slab: SlabNo, source: PeerIndex) -> bool {
        let id = self.sessions.peers[source].info().id;
        let replicas = &self.map.spaces[space].slabs[slab].entry.replicas;
        let Some(version) = replicas.iter().find(|replica| replica.server == id).map(|replica| replica.grant) else {
            return false;
        };
        let (role, op, page) = (Role::Order, Wire::Copy, self.map.first_page(slab));
        self.ask(Request { role, peer: source, op, class: Class::Demand, space, page, version })
    }

    /// Nothing is wanted of a source any more.
    pub(in crate::client) fn cancel_order(&mut self, space: SpaceIndex, slab: SlabNo) {
        let page = self.map.first_page(slab);
        let ours = self.sessions.exchanges.find(|e| e.role == Role::Order && e.space == space && e.page == page);
        if let Some(order) = ours {
            self.sessions.end_exchange(order.id);
        }
    }
}

impl Map {
    /// What is not at the target by now goes through the client.
    fn copy_the_rest(&mut self, space: SpaceIndex, slab: SlabNo) {
        self.set_step(space, slab, Step::Copying);
        self.mark(space, slab);
    }

    pub(in crate::client) fn transfer_of(&self, space: SpaceIndex, slab: SlabNo) -> Option<Transfer> {
        match self.spaces[space].slabs[slab].repair.as_ref()?.step {
            Step::Transferring(transfer) => Some(transfer),
            _ => None,
        }
    }
}
