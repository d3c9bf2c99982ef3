//! Has servers copy a slab among themselves (`../transfer.rs`).
//!
//! Each step follows the answer to the one before. What comes of a step is returned: the copy in the making goes on, or it fails, and then
//! whoever began it ends it.

use crate::client::Fault;
use crate::client::exchange::{Answer, Request, Role};
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::pages::Pages;
use crate::client::parity::Parity;
use crate::client::pool::Pool;
use crate::client::repair::{REPAIRS_MAX, Repair, Step};
use crate::client::transfer::{Instruction, PROGRESS_EVERY, Transfer, WORTH_PART};
use crate::crypto::KEY_SIZE;
use crate::units::{Class, PageNo, SlabNo, Time, Version};
use crate::wire::copy::{CopyOrder, Progress, RATE_MIN};
use crate::wire::message::{Op as Wire, Pressure, Status, VERSIONS_MAX};

/// Copies that restore redundancy may use this part of the link: demand must not feel them, even where all clients of a
/// dead server copy at once. Each page comes in and goes out once.
const REBUILD_PERCENT: u64 = 30;
/// The same where a server asks to be relieved: somebody waits for its end, or for its memory.
const RELIEF_PERCENT: u64 = 60;
/// The same where a write waits until slabs have their second copies.
const DISSOLVE_PERCENT: u64 = 90;

/// What comes of a copy in the making.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    GoesOn,
    Fails,
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

    /// Does what comes next, if that is not an answer.
    pub fn advance_transfer(&mut self, now: Time, (space, slab): (SpaceIndex, SlabNo), transfer: Transfer) -> Outcome {
        match transfer {
            Transfer::Wanted => {
                let source = self.source_of(space, slab);
                match source.filter(|source| self.admit(space, slab, Some(*source))) {
                    Some(source) => self.map.set_step(space, slab, Step::Transferring(Transfer::Admitting { source })),
                    None => self.map.copy_the_rest(space, slab),
                }
            }
            Transfer::Running { source, .. } if !self.can_give(space, slab, source) => {
                return self.end_transfer(space, slab, source);
            }
            Transfer::Running { source, ask_at: Some(at) } if at <= now && self.order(space, slab, source) => {
                self.map.set_step(space, slab, Step::Transferring(Transfer::Running { source, ask_at: None }));
            }
            _ => {}
        }
        Outcome::GoesOn
    }

    fn end_transfer(&mut self, space: SpaceIndex, slab: SlabNo, source: PeerIndex) -> Outcome {
        self.cancel_order(space, slab);
        if self.admit(space, slab, None) {
            self.map.set_step(space, slab, Step::Transferring(Transfer::Ending { source }));
            Outcome::GoesOn
        } else {
            Outcome::Fails
        }
    }

    /// The target said whether it does as it was told.
    pub fn admit_answered(&mut self, now: Time, (space, slab): (SpaceIndex, SlabNo), status: Status) -> Outcome {
        match (self.map.transfer_of(space, slab), status) {
            (Some(Transfer::Admitting { source }), Status::Ok) => {
                self.map.set_step(space, slab, Step::Transferring(Transfer::Running { source, ask_at: Some(now) }));
                self.map.mark(space, slab);
            }
            // It has no room for one more, or another idea of the slab, which its first write will show.
            (Some(Transfer::Admitting { .. }), _) => self.map.copy_the_rest(space, slab),
            (Some(Transfer::Ending { source }), Status::Ok) => {
                if let Some(repair) = &mut self.map.spaces[space].slabs[slab].repair {
                    repair.cursor = 0;
                    repair.step = Step::Transferring(Transfer::Listing { source });
                }
                return self.ask_what_it_has(space, slab);
            }
            (Some(Transfer::Ending { .. }), _) => return Outcome::Fails,
            _ => {}
        }
        Outcome::GoesOn
    }

    /// The source said how far it is.
    pub fn order_answered(
        &mut self,
        now: Time,
        (space, slab): (SpaceIndex, SlabNo),
        (status, progress): (Status, Version),
    ) -> Outcome {
        let Some(Transfer::Running { source, .. }) = self.map.transfer_of(space, slab) else { return Outcome::GoesOn };
        if status != Status::Ok || progress.bits() != Progress::Running as u64 {
            return self.end_transfer(space, slab, source);
        }
        let at = now + PROGRESS_EVERY;
        self.map.set_step(space, slab, Step::Transferring(Transfer::Running { source, ask_at: Some(at) }));
        self.map.mark_at(at, space, slab);
        Outcome::GoesOn
    }

    fn ask_what_it_has(&mut self, space: SpaceIndex, slab: SlabNo) -> Outcome {
        let Some(repair) = &self.map.spaces[space].slabs[slab].repair else { return Outcome::GoesOn };
        let page = self.map.size.page(slab, repair.cursor);
        let (role, peer, version) = (Role::Listed, repair.peer, Version::NEVER);
        let is_asked = self.ask(Request { role, peer, op: Wire::Versions, class: Class::Demand, space, page, version });
        if is_asked { Outcome::GoesOn } else { Outcome::Fails }
    }

    /// The target said what it has of some pages.
    pub fn listed_answered(
        &mut self,
        pages: &Pages,
        space: SpaceIndex,
        page: PageNo,
        Answer { status, version: grant, payload }: Answer<'_>,
    ) -> Outcome {
        let (Some(slab), size) = (self.map.slab_of(page), self.map.size) else { return Outcome::GoesOn };
        let Some(Transfer::Listing { source }) = self.map.transfer_of(space, slab) else { return Outcome::GoesOn };
        let first = size.index(page);
        let due = VERSIONS_MAX.min(size.pages() - first);
        let about_it = |repair: &Repair| repair.grant == grant && repair.cursor == first;
        let right = self.map.spaces[space].slabs[slab].repair.as_ref().is_some_and(about_it);
        if status != Status::Ok || !right || payload.len() != due * 8 {
            return Outcome::Fails;
        }
        for (index, word) in (first..).zip(payload.chunks_exact(8)) {
            let mut bits = [0; 8];
            bits.copy_from_slice(word);
            let version = Version::from_bits(u64::from_le_bytes(bits));
            if !pages.was_issued(self, space, slab, index, version) {
                // A server that was let in stored what nobody wrote, and it may be one that keeps what was written out.
                self.sessions.peers[source].distrust();
                self.stats.transfers_refused += 1;
                return Outcome::Fails;
            }
            let version = if self.has(Fault::TrustsSources) {
                self.map.spaces[space].slabs[slab].version(index)
            } else {
                version
            };
            if let Some(repair) = &mut self.map.spaces[space].slabs[slab].repair {
                repair.list[index] = repair.list[index].max(version);
            }
        }
        let Some(repair) = &mut self.map.spaces[space].slabs[slab].repair else { return Outcome::GoesOn };
        repair.cursor = first + due;
        if repair.cursor < size.pages() {
            return self.ask_what_it_has(space, slab);
        }
        repair.cursor = 0;
        self.stats.slabs_transferred += 1;
        self.map.copy_the_rest(space, slab);
        Outcome::GoesOn
    }

    /// What a request about a slab says beside its header: of which life it is, or which other server is meant.
    pub fn instruction(
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
        Some(Instruction::new(bytes))
    }

    /// What new copies may use of the link, in bytes a second.
    pub fn rebuild_rate(&self, parity: &Parity) -> u64 {
        let relieves = self.sessions.peers.iter().any(|peer| peer.pressure() >= Pressure::Orange);
        let percent = match (parity.is_any_dissolving(), relieves) {
            (true, _) => DISSOLVE_PERCENT,
            (_, true) => RELIEF_PERCENT,
            _ => REBUILD_PERCENT,
        };
        self.config.link_bytes_per_second / 100 * percent
    }
}
