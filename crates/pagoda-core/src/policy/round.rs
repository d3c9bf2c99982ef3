//! One round of the memory policy: everything between what is measured and what is done.
//!
//! 1. The caller measures the host ([`HostReport`]) and each VM ([`VmReport`]). Without a lock, because that takes time.
//! 2. [`Rounds::make`] plans, and returns an [`Outcome`] for each VM.
//! 3. The caller applies each outcome. [`VmRound::follow`] compares the orders with what the VM has, and returns the
//!    [`Steps`] that change something.
//! 4. [`Rounds::period_ms`] is the time until the next round. A round comes early when settings change, when a VM comes or
//!    goes, or when one reports that it is near its limit ([`super::growth::NearLimit`]), but no earlier than
//!    [`PERIOD_MIN_MS`] after the last one.
//!
//! Pure: time comes with the host's report, chance from a seed.

use std::collections::BTreeMap;

use super::growth::{Growth, LimitRequest, Room, charged_for_min, limit_for_min};
use super::host::{HostMemory, HostPressure, Pool};
use super::{
    Balloon, Overhead, Plan, Policy, PoolSample, ReclaimState, Run, SampleCount, VmActions, VmId, VmSample, VmSettings,
};
use crate::chance::Chance;
use crate::fault::{headroom_at, headroom_max};
use crate::outbox::pressure::{Pressure, Shortage, Yielded};
use crate::units::{Bytes, CHUNK_PAGES, PageCount, PageIdx};

/// Time between two rounds while memory is short or VMs are held to limits.
const PERIOD_SHORT_MS: u64 = 1000;
/// The same while memory suffices: what the policy knows is at most this old.
const PERIOD_AT_EASE_MS: u64 = 5000;
/// Least time between two rounds: a round costs a report of every VM.
pub const PERIOD_MIN_MS: u64 = 100;
/// Expected overhead of a QEMU that was not measured yet: one with a few devices.
const QEMU_OVERHEAD: Bytes = Bytes::from_mib(64);
/// Expected overhead of a program that only maps its RAM.
const PLAIN_OVERHEAD: Bytes = Bytes::from_mib(4);
/// Tables add this part of the VM's memory: page tables take 1/512, and ours less than 0.4 %.
const TABLES_PART: u64 = 256;
/// A higher limit is sent when it is higher by this part, and by a chunk at least.
const RAISE_PART: u64 = 64;

/// What kind of VMM a VM has. VMs of one kind are expected to have the same overhead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmmKind {
    /// The VMM is QEMU, whose devices and threads take memory too.
    Qemu,
    /// A program that maps its RAM and does nothing else for a guest.
    Plain,
}

/// The host at the time of a round.
#[derive(Clone, Copy, Debug)]
pub struct HostReport {
    /// Milliseconds of any steady clock.
    pub now_ms: u64,
    /// The host's memory was like this when it was measured.
    pub memory: HostMemory,
    /// Available memory below which the host is short; `None` stands for the default.
    pub available_min: Option<Bytes>,
    /// What the templates of snapshots take, which clones read and no VM has to itself. It is in the pool, and in use.
    pub templates: PageCount,
    /// What the pool keeps for outboxes, and of that, what they have. It is in use, for they may take the rest at any time.
    pub outboxes: PageCount,
    pub outboxes_held: PageCount,
    /// Of these, the ones that give memory when the host is short.
    pub elastic: Elastic,
}

/// Outboxes whose size follows an SLO, together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elastic {
    /// What they are to have, and at least.
    pub spaces: PageCount,
    pub mins: PageCount,
    /// What the pool keeps for them: more while they drain.
    pub charged: PageCount,
}

/// What a VM's engine reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct EngineReport {
    /// The VM is registered with userfaultfd. Only then do the counts of its pages mean something.
    pub armed: bool,
    /// Pages of the RAM files in DRAM.
    pub ram: PageCount,
    /// The VM's own pages in DRAM.
    pub resident: PageCount,
    /// Pages whose content is only in a tier.
    pub swapped: PageCount,
    /// Pages whose content is a frame of its share group.
    pub shared: PageCount,
    /// Its part of these frames.
    pub shared_part: PageCount,
    /// The most pages that were copied back between two counts of that part.
    pub share_burst: PageCount,
    /// What became of the pages of a sampling period.
    pub sample: SampleCount,
    /// The number of that period.
    pub sample_period: u64,
    /// The VM keeps all its memory in DRAM.
    pub pinned: bool,
}

/// A VM at the time of a round.
#[derive(Clone, Copy, Debug)]
pub struct VmReport {
    /// The report is about this VM.
    pub id: VmId,
    /// What kind of VMM it has.
    pub kind: VmmKind,
    /// What the guest sees.
    pub memory: PageCount,
    /// What it is guaranteed.
    pub min: PageCount,
    /// What rounds remember of it.
    pub round: VmRound,
    /// `None` if no engine serves it now.
    pub engine: Option<EngineReport>,
    /// Resident memory of its process. Counts only without an engine.
    pub process: PageCount,
    /// Its overhead, if that was measured for this round.
    pub measured: Option<PageCount>,
    /// `None` if that has to be waited for.
    pub balloon: Option<Balloon>,
    /// Its record says that it is pinned.
    pub pinned: bool,
}

/// What rounds remember of one VM. The caller keeps it.
#[derive(Clone, Copy, Debug, Default)]
pub struct VmRound {
    /// The policy's limit; `None` where only the user's settings hold.
    limit: Option<PageCount>,
    /// The limit that its engine enforces.
    sent: PageCount,
    /// What the guest is to keep beside its balloon; `None` before the first orders.
    keeps: Option<Bytes>,
    overhead: PageCount,
    /// Sampling periods begun with the present engine, and when the last one began.
    period: u64,
    period_ms: Option<u64>,
}

/// What rounds remember of one VM, open for whoever writes it down. The fields are those of [`VmRound`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmRoundParts {
    /// The policy's limit; `None` where only the user's settings hold.
    pub limit: Option<PageCount>,
    /// The limit that its engine enforces.
    pub sent: PageCount,
    /// What the guest is to keep.
    pub keeps: Option<Bytes>,
    /// What it takes beside its memory.
    pub overhead: PageCount,
    /// Sampling periods begun with the present engine.
    pub period: u64,
    /// When the last one began.
    pub period_ms: Option<u64>,
}

impl From<VmRound> for VmRoundParts {
    fn from(round: VmRound) -> VmRoundParts {
        let VmRound { limit, sent, keeps, overhead, period, period_ms } = round;
        VmRoundParts { limit, sent, keeps, overhead, period, period_ms }
    }
}

impl From<VmRoundParts> for VmRound {
    fn from(parts: VmRoundParts) -> VmRound {
        let VmRoundParts { limit, sent, keeps, overhead, period, period_ms } = parts;
        VmRound { limit, sent, keeps, overhead, period, period_ms }
    }
}

/// What limits a VM's DRAM beside the policy.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// What the guest sees.
    pub memory: PageCount,
    /// The user's DRAM cap.
    pub cap: PageCount,
    /// That cap, or what stands in for a balloon that does not work, if that is less.
    pub own: PageCount,
    /// So much is guaranteed to it.
    pub min: PageCount,
    /// What any VM needs to make progress.
    pub least: PageCount,
}

/// What a round wants of one VM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Orders {
    /// What the plan says.
    pub actions: VmActions,
    /// The plan's cap, as far as free memory backs it.
    pub limit: PageCount,
    /// VMs are held to their targets.
    pub is_restrained: bool,
}

impl Orders {
    /// What a guest keeps beside a balloon of this size that the plan asks for.
    fn guest_keeps(&self, size: PageCount, caps: &Caps) -> PageCount {
        let keeps = caps.memory.saturating_sub(size);
        let cap = self.actions.page_out_cap;
        let limit = caps.bound(cap);
        // A balloon that leaves more than page-out's headroom above the limit is on its way, or page-out stands in for it.
        let is_held = size > PageCount::ZERO && cap < caps.cap && keeps <= limit + headroom_max(limit);
        if is_held { keeps.min(caps.kept_below(cap)) } else { keeps }
    }
}

/// What a round found for one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// `None` for a VM that the plan leaves out: it is not known to the policy, or not all of its report was there.
    pub orders: Option<Orders>,
    /// A sampling period begins now, with these pages.
    pub sample: Option<Vec<PageIdx>>,
}

/// What has to be done so that a VM is as its orders want it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steps {
    /// Its engine gets another limit.
    pub send_limit: bool,
    /// Its balloon gets another target.
    pub drive_balloon: bool,
    /// Whether it may run.
    pub run: Run,
}

/// This keeps what the last round planned, and what that was made from.
#[derive(Clone, Debug)]
pub struct Last {
    /// The round made this plan.
    pub plan: Plan,
    /// What the plan was made from.
    pub host: PoolSample,
    /// This was the pool, with the room that VMs had in it.
    pub pool: Pool,
    /// Templates took so much of the pool.
    pub templates: PageCount,
    /// What the host's shortage leaves to outboxes that give; `None`: there are none.
    pub yielded: Option<Yielded>,
    requests: Vec<LimitRequest>,
    room: Room,
}

/// The policy with all that it remembers between two rounds.
#[derive(Debug)]
pub struct Rounds {
    /// Settings, estimates and targets.
    pub policy: Policy,
    pressure: HostPressure,
    outboxes: Pressure,
    growth: Growth,
    chance: Chance,
    /// Overheads that were measured, tables taken off. The largest of a kind is expected of the next VM.
    overheads: BTreeMap<VmId, (VmmKind, PageCount)>,
    last: Option<Last>,
}

impl VmReport {
    fn overhead(&self) -> PageCount {
        self.measured.unwrap_or(self.round.overhead)
    }

    /// Pages in DRAM as the engine's limit counts them, its part of shared frames included; and those that it counts as
    /// having.
    fn residents(&self, engine: &EngineReport) -> (PageCount, PageCount) {
        if !engine.armed {
            return (engine.ram, engine.ram);
        }
        let resident = engine.resident + engine.shared_part;
        let sent = self.round.sent;
        let is_limited = sent < self.memory && !engine.pinned;
        (resident, if is_limited { charged_for_min(resident, sent, self.min) } else { resident })
    }

    /// It is near its limit, as its engine reports it ([`super::growth::NearLimit`]).
    fn is_at_limit(&self, engine: &EngineReport) -> bool {
        let limit = self.round.sent;
        let resident = engine.resident + engine.shared_part;
        let headroom = headroom_max(limit);
        engine.armed && !engine.pinned && limit < self.memory && resident + headroom + headroom >= limit
    }

    /// What it takes of the pool, its overhead included.
    fn used(&self) -> PageCount {
        match &self.engine {
            Some(engine) => {
                let (resident, charged) = self.residents(engine);
                resident.max(charged) + self.overhead()
            }
            None => self.process.max(self.overhead()),
        }
    }

    fn sample(&self) -> Option<VmSample> {
        let engine = self.engine.as_ref()?;
        let is_current = engine.sample_period == self.round.period && self.round.period > 0;
        Some(VmSample {
            id: self.id,
            resident: self.residents(engine).1,
            swapped: engine.swapped,
            shared: engine.shared.saturating_sub(engine.shared_part),
            is_at_limit: self.is_at_limit(engine),
            balloon: self.balloon?,
            sample: if is_current { engine.sample } else { SampleCount::default() },
            pinned: self.pinned || engine.pinned,
        })
    }
}

impl EngineReport {
    /// Room for what is copied back from frames. The VM's own copy is charged at once, but the others' parts of the frame
    /// grow only when they are counted next, a second later.
    fn copy_back_reserve(&self) -> PageCount {
        self.share_burst.min(self.shared)
    }
}

impl Caps {
    /// A limit of the policy within what the user allows, and with what the VM needs in any case.
    fn bound(&self, limit: PageCount) -> PageCount {
        self.own.min(limit.max(self.least).max(limit_for_min(self.min)))
    }

    /// What a balloon leaves the guest of a VM that is held to `limit`: page-out keeps headroom free below a limit, and would
    /// take that again and again from a guest without cold pages. A min stays whole: its headroom is above it.
    fn kept_below(&self, limit: PageCount) -> PageCount {
        let limit = self.bound(limit);
        limit.saturating_sub(PageCount(headroom_at(limit.0, false))).max(self.min.min(limit))
    }
}

impl VmRound {
    /// The policy's limit. `None`: only the user's settings hold.
    pub fn limit(&self) -> Option<PageCount> {
        self.limit
    }

    /// The limit that its engine enforces.
    pub fn sent(&self) -> PageCount {
        self.sent
    }

    /// What the guest is to keep by the policy. `None`: no orders were given yet.
    pub fn keeps(&self) -> Option<Bytes> {
        self.keeps
    }

    /// What it takes beside its memory, as measured.
    pub fn overhead(&self) -> PageCount {
        self.overhead
    }

    /// The limit until the first round that knows the VM ([`Rounds::first_limit`]).
    pub fn set_first_limit(&mut self, limit: Option<PageCount>) {
        self.limit = limit;
    }

    /// A new engine begins with this limit. It has sampled nothing.
    pub fn attached(&mut self, sent: PageCount) {
        (self.sent, self.period, self.period_ms) = (sent, 0, None);
    }

    /// The engine got this limit.
    pub fn limit_sent(&mut self, limit: PageCount) {
        self.sent = limit;
    }

    /// The overhead was measured.
    pub fn note_overhead(&mut self, overhead: PageCount) {
        self.overhead = overhead;
    }

    /// The engine got the pages of a new sampling period ([`Outcome::sample`]).
    pub fn period_began(&mut self, now_ms: u64) {
        self.period += 1;
        self.period_ms = Some(now_ms);
    }

    fn is_period_due(&self, now_ms: u64, period_s: u32) -> bool {
        self.period_ms.is_none_or(|began| now_ms.saturating_sub(began) >= u64::from(period_s) * 1000)
    }

    /// The limit that its engine is to enforce: the least of its user's, what stands in for its balloon, and the policy's. The
    /// policy leaves a VM what any VM needs, and what keeps its min in DRAM, whatever its target is.
    pub fn engine_limit(&self, caps: &Caps) -> PageCount {
        self.limit.map_or(caps.own, |limit| caps.bound(limit))
    }

    /// Takes in the orders of a round. `has_balloon`: its balloon is driven already.
    pub fn follow(&mut self, orders: &Orders, caps: &Caps, has_balloon: bool) -> Steps {
        self.limit = (orders.limit < caps.cap).then_some(orders.limit);
        let all = caps.memory.bytes();
        let keeps = match orders.actions.balloon {
            Some(size) => orders.guest_keeps(size, caps).bytes(),
            // A driver that does not answer is asked again and again while its answer would matter.
            None if orders.is_restrained => self.keeps.unwrap_or(all),
            None => all,
        };
        // A VM without a balloon that needs none is not connected to for that.
        let drive_balloon = self.keeps != Some(keeps) && (keeps < all || has_balloon);
        if drive_balloon {
            self.keeps = Some(keeps);
        }
        let limit = self.engine_limit(caps);
        // Page-out would take from the guest what its balloon leaves it.
        let is_too_low =
            limit > self.sent && keeps.pages_ceil() + PageCount(headroom_at(self.sent.0, false)) > self.sent;
        let send_limit = is_too_low || is_worth_sending(self.sent, limit, caps.own);
        Steps { send_limit, drive_balloon, run: orders.actions.run }
    }
}

/// Whether an engine gets another limit. A lower one is always sent, because what all VMs keep beyond their limits is missing
/// elsewhere. A higher one is sent if it is worth another round, because an engine reports once for each limit that its VM is
/// near it. `most`: the limit of a VM that nothing holds back.
fn is_worth_sending(sent: PageCount, limit: PageCount, most: PageCount) -> bool {
    match limit {
        limit if limit == sent => false,
        limit if limit == most || limit < sent => true,
        limit => (limit - sent).0 >= (sent.0 / RAISE_PART).max(CHUNK_PAGES),
    }
}

/// What is reserved for a VM with this overhead beside its min: that, and the room above its min in which page-out works.
pub fn overhead_with_room(overhead: PageCount, settings: &VmSettings) -> Overhead {
    let limit = limit_for_min(settings.min).min(settings.cap);
    Overhead { overhead, reserve: limit.saturating_sub(settings.min) }
}

impl Rounds {
    /// Rounds of this policy, before the first one.
    pub fn new(policy: Policy, seed: u64) -> Rounds {
        Rounds {
            policy,
            pressure: HostPressure::default(),
            outboxes: Pressure::default(),
            growth: Growth::default(),
            chance: Chance::new(seed),
            overheads: BTreeMap::new(),
            last: None,
        }
    }

    /// The last round, if there was one.
    pub fn last(&self) -> Option<&Last> {
        self.last.as_ref()
    }

    /// The time until the next round, if nothing calls for an earlier one.
    pub fn period_ms(&self) -> u64 {
        let is_calm = self.last.as_ref().is_none_or(|last| {
            last.plan.state == ReclaimState::High && !last.plan.restrained && !self.growth.is_held()
        });
        if is_calm { PERIOD_AT_EASE_MS } else { PERIOD_SHORT_MS }
    }

    /// Makes a round. The outcomes are in the order of `vms`.
    pub fn make(&mut self, host: &HostReport, vms: &[VmReport]) -> Vec<Outcome> {
        vms.iter().for_each(|vm| self.note_overhead(vm));
        let of_vms: PageCount = vms.iter().map(VmReport::used).sum();
        self.policy.set_templates(host.templates);
        self.policy.set_outboxes(host.outboxes);
        let outboxes = self.policy.outboxes();
        let held = host.outboxes_held.min(outboxes);
        let used = of_vms + host.templates + outboxes;
        let set = self.policy.host().pool;
        // What outboxes do not have yet is available on the host, and not for VMs.
        let in_use = of_vms + host.templates + held;
        let pool = self.pressure.pool_at(host.now_ms, set, in_use, &host.memory, host.available_min);
        let pool = Pool { room: pool.room.saturating_sub(outboxes - held), ..pool };
        let (yielded, coming) = self.press_outboxes(host, pool.now, used);
        let used = used.saturating_sub(coming);
        let sample = PoolSample { now_ms: host.now_ms, pool: pool.now, used };
        let samples: Vec<VmSample> = vms.iter().filter_map(VmReport::sample).collect();
        let plan = self.policy.tick(&sample, &samples);

        let room = self.room(&pool, used);
        let requests = limit_requests(&plan, &samples);
        let limits = self.growth.plan_limits(&requests, &room);
        let outcomes = vms
            .iter()
            .map(|vm| {
                let planned = plan.vms.binary_search_by_key(&vm.id, |planned| planned.id).ok();
                let orders = planned.and_then(|index| {
                    let (actions, is_restrained) = (plan.vms[index].actions, plan.restrained);
                    Some(Orders { actions, limit: *limits.get(index)?, is_restrained })
                });
                Outcome { orders, sample: self.next_sample(host.now_ms, vm) }
            })
            .collect();
        self.last = Some(Last { plan, host: sample, pool, templates: host.templates, yielded, requests, room });
        outcomes
    }

    /// Has outboxes give what the pool lacks, before VMs are asked for it: what is left to them, and what of the lack will come from
    /// them.
    fn press_outboxes(&mut self, host: &HostReport, pool: PageCount, used: PageCount) -> (Option<Yielded>, PageCount) {
        let Elastic { spaces, mins, charged } = host.elastic;
        if spaces == PageCount::ZERO {
            self.outboxes = Pressure::default();
            return (None, PageCount::ZERO);
        }
        let of_others = self.policy.outboxes().saturating_sub(charged);
        let configured = self.policy.outboxes_max().saturating_sub(of_others).max(mins);
        // What they were asked for and have not been told yet, or have not let go of, is not asked for again.
        let given = spaces.bytes().min(self.outboxes.pool(configured.bytes()));
        let missing = self.policy.missing(pool, used).bytes();
        let shortage = Shortage {
            missing,
            configured: configured.bytes(),
            mins: mins.bytes(),
            given,
            draining: charged.bytes().saturating_sub(given),
        };
        let yielded = self.outboxes.round(host.now_ms, &shortage);
        (Some(yielded), missing.saturating_sub(yielded.left).pages_floor())
    }

    fn note_overhead(&mut self, vm: &VmReport) {
        // A VM that has gone meanwhile is no measure for others.
        let (Some(measured), Some(settings)) = (vm.measured, self.policy.settings(vm.id)) else { return };
        let Overhead { overhead, reserve } = overhead_with_room(measured, settings);
        let copy_back = vm.engine.as_ref().map_or(PageCount::ZERO, EngineReport::copy_back_reserve);
        self.policy.set_overhead(vm.id, Overhead { overhead, reserve: reserve + copy_back });
        let without_tables = measured.saturating_sub(PageCount(vm.memory.0 / TABLES_PART));
        self.overheads.insert(vm.id, (vm.kind, without_tables));
    }

    /// What can be dealt out as limits. The threshold `hard` is kept for what goes wrong.
    fn room(&self, pool: &Pool, used: PageCount) -> Room {
        let hard = self.policy.host().thresholds.hard.0;
        let kept = PageCount((u128::from(pool.now.0) * u128::from(hard) / 1000) as u64);
        let free = pool.now.saturating_sub(used + kept).min(pool.room);
        Room { free, for_mins: pool.room, pool: pool.now }
    }

    fn next_sample(&mut self, now_ms: u64, vm: &VmReport) -> Option<Vec<PageIdx>> {
        let period_s = self.policy.settings(vm.id)?.sampling.period_s;
        let is_due = vm.engine.is_some() && vm.round.is_period_due(now_ms, period_s);
        is_due.then(|| self.policy.start_period(vm.id, &mut self.chance))
    }

    /// The expected overhead of a VM that does not run yet: that of the largest of its kind, or a default.
    pub fn expected_overhead(&self, kind: VmmKind, settings: &VmSettings) -> Overhead {
        let measured = self.overheads.values().filter(|(of, _)| *of == kind).map(|(_, overhead)| *overhead).max();
        let default = match kind {
            VmmKind::Qemu => QEMU_OVERHEAD,
            VmmKind::Plain => PLAIN_OVERHEAD,
        };
        let tables = PageCount(settings.memory.0 / TABLES_PART);
        overhead_with_room(measured.unwrap_or(default.pages_ceil()) + tables, settings)
    }

    /// The overhead of a VM with other settings: what was measured, and the room above its new min.
    pub fn overhead_with(&self, id: VmId, settings: &VmSettings) -> Overhead {
        let (Some(before), Some(now)) = (self.policy.settings(id), self.policy.overhead(id)) else {
            return Overhead::default();
        };
        let room = |settings: &VmSettings| overhead_with_room(PageCount::ZERO, settings).reserve;
        Overhead { reserve: now.reserve.saturating_sub(room(before)) + room(settings), ..now }
    }

    /// The limit of a VM that attaches with `resident` pages in DRAM: these, and its part of what was free at the last round.
    pub fn first_limit(&self, id: VmId, resident: PageCount) -> Option<PageCount> {
        let VmSettings { min, cap, .. } = *self.policy.settings(id)?;
        let last = self.last.as_ref()?;
        let mut requests = last.requests.clone();
        requests.push(LimitRequest { resident, min, target: min, cap });
        self.growth.clone().plan_limits(&requests, &last.room).pop().filter(|limit| *limit < cap)
    }

    /// Whether there is room for one more template of this size: without taking memory from a VM, and beside all that VMs were
    /// promised. Before the first round nobody knows what is free.
    pub fn has_room_for_template(&self, pages: PageCount) -> bool {
        let Some(last) = &self.last else { return false };
        let since = self.policy.templates().saturating_sub(last.templates);
        let needed = since + pages;
        let free = last.plan.free.saturating_sub(self.policy.host().free_goal()).min(last.pool.room);
        let is_free = last.plan.state == ReclaimState::High && !last.plan.restrained && needed <= free;
        is_free && self.policy.keeps_promises_beside(pages)
    }

    /// Forgets a VM and the overhead that was measured of it.
    pub fn remove(&mut self, id: VmId) {
        self.policy.remove(id);
        self.overheads.remove(&id);
    }
}

/// In the order of the plan's VMs.
fn limit_requests(plan: &Plan, samples: &[VmSample]) -> Vec<LimitRequest> {
    let request = |vm: &super::VmPlan| {
        let sample = samples.iter().find(|sample| sample.id == vm.id)?;
        let cap = vm.actions.page_out_cap;
        // A pinned VM grows whatever its limit is.
        let min = if sample.pinned { cap } else { vm.terms.min };
        Some(LimitRequest { resident: sample.resident, min, target: vm.terms.target, cap })
    };
    plan.vms.iter().filter_map(request).collect()
}

#[cfg(test)]
mod tests;
