//! One round: what is, a plan, and what follows from it.
//!
//! Everything that is waited for, a fresh status of each engine above all, is waited for without a lock. Between the look
//! and the deed a VM may have gone, or another may have its name: VMs are known by their numbers.

use pagoda_api::in_full;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_abi::record::Kind;
use pagoda_core::policy::growth::{Room, Wish, charged_for_min};
use pagoda_core::policy::settings::Sampling;
use pagoda_core::policy::{Balloon, HostSample, Overhead, Plan, SampleCount, VmActions, VmId, VmSample};
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::{Bytes, CHUNK_PAGES, PageCount, PageIdx};
use pagoda_pager::handle::{Command, Handle, Status};

use super::host::Memory;
use super::{Brain, Last, settings};
use crate::balloon;
use crate::registry::{Registry, Vm, limit_of};

/// The look at the host's memory, in health.
const HOST_MEMORY: &str = "host memory";
/// How often a VMM is measured: its memory grows slowly.
const OVERHEAD_PERIOD: Duration = Duration::from_secs(10);
/// A balloon of which an earlier daemon's record tells is waited for; a monitor that others keep busy is not.
const BALLOON_WAIT: Duration = Duration::from_secs(10);
/// Page-ins are counted over at least so long.
const RATE_PERIOD: Duration = Duration::from_secs(4);
/// This part of the pool, per mille, is left when growth is dealt out: the threshold `hard` is for what goes wrong.
const fn kept_from_growth(pool: PageCount, hard: u16) -> PageCount {
    PageCount((pool.0 as u128 * hard as u128 / 1000) as u64)
}

/// What the policy remembers of a VM, beside its settings.
#[derive(Debug)]
pub struct Governed {
    pub id: VmId,
    /// Most that its engine may have by the policy; `None`: what its user allows.
    pub limit: Option<PageCount>,
    /// What its engine was told last.
    pub told: PageCount,
    /// What the guest should keep by the policy; `None`: no plan said anything yet.
    pub keeps: Option<Bytes>,
    /// Beside its memory, and when that was measured.
    overhead: PageCount,
    measured: Option<Instant>,
    /// Sampling periods begun with its present engine, and when the last began.
    period: u64,
    period_at: Option<Instant>,
    /// Page-ins at some moment, and the rate before it.
    page_ins: (u64, Instant),
    pub page_ins_per_s: f64,
    pub block: super::block::Block,
}

impl Governed {
    pub fn new(id: VmId) -> Governed {
        Governed {
            id,
            limit: None,
            told: PageCount::ZERO,
            keeps: None,
            overhead: PageCount::ZERO,
            measured: None,
            period: 0,
            period_at: None,
            page_ins: (0, Instant::now()),
            page_ins_per_s: 0.0,
            block: super::block::Block::default(),
        }
    }

    /// A new engine has begun with this limit: it has sampled nothing, and counts from zero.
    pub fn attached(&mut self, told: PageCount) {
        (self.told, self.period, self.period_at) = (told, 0, None);
        self.page_ins = (0, Instant::now());
    }

    /// What it takes beside its memory, as measured.
    pub fn overhead(&self) -> PageCount {
        self.overhead
    }

    fn note_page_ins(&mut self, count: u64) {
        let (before, at) = self.page_ins;
        let elapsed = at.elapsed();
        if elapsed >= RATE_PERIOD || count < before {
            self.page_ins_per_s = count.saturating_sub(before) as f64 / elapsed.as_secs_f64().max(1e-3);
            self.page_ins = (count, Instant::now());
        }
    }
}

/// What a round looks at without the registry.
struct Seen {
    id: VmId,
    kind: Kind,
    pid: u32,
    told: PageCount,
    min: PageCount,
    memory: PageCount,
    handle: Option<Arc<Handle>>,
    balloon: Option<Balloon>,
    period: u64,
    /// What it takes beside its memory, and whether that is new enough.
    overhead: PageCount,
    /// What copies back may take before it is charged.
    reserve: PageCount,
    is_measured: bool,
    is_new: bool,
    is_pinned: bool,
    asked: u64,
    status: Option<Arc<Status>>,
}

/// Makes one round.
pub fn make(registry: &Arc<Registry>) {
    let mut seen: Vec<Seen> = registry.lock().values().map(see).collect();
    for vm in &mut seen {
        vm.asked = vm.handle.as_ref().map_or(0, |handle| handle.ask_status());
    }
    for vm in &mut seen {
        vm.status = vm.handle.as_ref().map(|handle| handle.status_after(vm.asked));
        measure(vm);
    }
    let read = Memory::read();
    let mut brain = registry.governor.lock();
    let memory = match read {
        Ok(memory) => {
            registry.parts.works(HOST_MEMORY);
            brain.memory = memory;
            memory
        }
        // As it was last: no VM loses memory to a host that cannot be looked at.
        Err(error) => {
            registry.parts.failed(HOST_MEMORY, &format!("it cannot be read, and counts as it was last: {error}"));
            brain.memory
        }
    };
    let now_ms = registry.governor.now_ms();
    let planned = plan(&mut brain, now_ms, &memory, &seen);
    drop(brain);
    let mut vms = registry.lock();
    for ((vm, planned), seen) in vms_by_id(&mut vms, &seen, &planned) {
        note(registry, vm, seen);
        if let Some(planned) = planned {
            carry_out(registry, vm, seen, planned);
        }
    }
}

/// What a plan wants of a VM.
struct Planned {
    actions: VmActions,
    /// Backed by free memory.
    limit: PageCount,
    /// VMs are held to their targets.
    is_restrained: bool,
}

fn vms_by_id<'a>(
    vms: &'a mut std::collections::BTreeMap<String, Vm>,
    seen: &'a [Seen],
    planned: &'a [Option<Planned>],
) -> impl Iterator<Item = ((&'a mut Vm, &'a Option<Planned>), &'a Seen)> {
    vms.values_mut().filter_map(|vm| {
        let index = seen.iter().position(|seen| seen.id == vm.governed.id)?;
        Some(((vm, &planned[index]), &seen[index]))
    })
}

fn see(vm: &Vm) -> Seen {
    let governed = &vm.governed;
    Seen {
        id: governed.id,
        kind: vm.record.kind,
        pid: vm.record.pid.0,
        told: governed.told,
        min: Bytes(vm.record.min).pages_ceil(),
        memory: settings::memory_of(&vm.record),
        handle: vm.handle.clone(),
        balloon: balloon_of(vm),
        period: governed.period,
        overhead: governed.overhead,
        reserve: PageCount::ZERO,
        is_measured: governed.measured.is_some_and(|at| at.elapsed() < OVERHEAD_PERIOD),
        is_new: false,
        is_pinned: vm.record.pinned.is_some(),
        asked: 0,
        status: None,
    }
}

/// What is known of a VM's balloon; `None`: it has to be waited for.
fn balloon_of(vm: &Vm) -> Option<Balloon> {
    if vm.record.kind == Kind::Plain {
        return Some(Balloon::Absent);
    }
    let Some(handle) = &vm.balloon else {
        // Whether there is a driver is seen when it is asked for something.
        return Some(Balloon::Inflated(PageCount::ZERO));
    };
    match handle.seen() {
        balloon::Seen::Nothing if vm.created.elapsed() < BALLOON_WAIT => None,
        balloon::Seen::Nothing | balloon::Seen::Absent => Some(Balloon::Absent),
        balloon::Seen::Inflated(size) => Some(Balloon::Inflated(size.pages_floor())),
    }
}

/// Measures what a VM takes beside its memory, if that is due: the VMM's own memory and our tables.
fn measure(vm: &mut Seen) {
    let Some(status) = vm.status.as_ref().filter(|_| !vm.is_measured) else { return };
    // A process that has just ended is forgotten in a moment.
    let Ok(own) = pagoda_sys::process::own_memory(vm.pid) else { return };
    vm.overhead = Bytes(own + status.table_bytes).pages_ceil();
    vm.reserve = copy_back_reserve(&status.stats);
    (vm.is_measured, vm.is_new) = (true, true);
}

/// Room for what comes back to a VM from its frames. Its own copy is charged at once; that the others' parts of the frame
/// grow is only seen when they are counted next, a second later.
fn copy_back_reserve(stats: &Stats) -> PageCount {
    PageCount(stats.get(Metric::ShareBurst).min(stats.get(Metric::Shared)))
}

/// Pages of a VM that are in DRAM, its part of shared frames included, as the engine's limit counts them; and those that it
/// counts as having.
fn residents(vm: &Seen, status: &Status) -> (PageCount, PageCount) {
    if !status.armed {
        let resident = Bytes(status.ram_bytes).pages_ceil();
        return (resident, resident);
    }
    let resident = PageCount(status.stats.get(Metric::Resident) + status.stats.get(Metric::SharedPart));
    let is_limited = vm.told < vm.memory && status.pinned.is_none();
    (resident, if is_limited { charged_for_min(resident, vm.told, vm.min) } else { resident })
}

/// Pages of a VM that are in nobody's DRAM but that of the VMs it shares with.
fn shared(status: &Status) -> PageCount {
    PageCount(status.stats.get(Metric::Shared).saturating_sub(status.stats.get(Metric::SharedPart)))
}

fn sample(vm: &Seen) -> Option<VmSample> {
    let status = vm.status.as_ref()?;
    let is_current = status.sample_period == vm.period && vm.period > 0;
    Some(VmSample {
        id: vm.id,
        resident: residents(vm, status).1,
        swapped: PageCount(status.stats.get(Metric::Swapped)),
        shared: shared(status),
        balloon: vm.balloon?,
        sample: if is_current { status.sample } else { SampleCount::default() },
        pinned: vm.is_pinned || status.pinned.is_some(),
    })
}

/// What a VM takes of the pool, its overhead included. One whose agent is away is known by its process alone.
fn used(vm: &Seen) -> PageCount {
    let overhead = vm.overhead;
    match &vm.status {
        Some(status) => {
            let (resident, charged) = residents(vm, status);
            resident.max(charged) + overhead
        }
        None if vm.pid == 0 => overhead,
        None => Bytes(pagoda_sys::process::rss(vm.pid).unwrap_or(0)).pages_ceil().max(overhead),
    }
}

/// Makes a plan; for each VM what it says and the limit that is backed.
fn plan(brain: &mut Brain, now_ms: u64, memory: &Memory, seen: &[Seen]) -> Vec<Option<Planned>> {
    for vm in seen {
        // One that has gone meanwhile is no measure for others.
        if vm.is_new
            && let Some(settings) = brain.policy.settings(vm.id)
        {
            let Overhead { overhead, reserve } = super::overhead_with_room(vm.overhead, settings);
            brain.policy.set_overhead(vm.id, Overhead { overhead, reserve: reserve + vm.reserve });
            let own = vm.overhead.saturating_sub(PageCount(vm.memory.0 / super::TABLES_PART));
            brain.overheads.insert(vm.id, (vm.kind, own));
        }
    }
    let used: PageCount = seen.iter().map(used).sum();
    let pool = brain.host.look(now_ms, brain.policy.host().pool, used, memory, brain.config.host_available_min);
    let host = HostSample { now_ms, pool: pool.now, used };
    let samples: Vec<VmSample> = seen.iter().filter_map(sample).collect();
    let plan = brain.policy.tick(&host, &samples);
    let kept = kept_from_growth(pool.now, brain.policy.host().thresholds.hard.0);
    let free = pool.now.saturating_sub(used + kept).min(pool.room);
    let room = Room { free, for_floors: pool.room, pool: pool.now };
    let wishes: Vec<Wish> = plan
        .vms
        .iter()
        .filter_map(|vm| {
            let sample = samples.iter().find(|sample| sample.id == vm.id)?;
            let cap = vm.actions.page_out_cap;
            // What is pinned grows whatever it is told.
            let floor = if sample.pinned { cap } else { vm.terms.floor };
            Some(Wish { resident: sample.resident, floor, target: vm.terms.target, cap })
        })
        .collect();
    let limits = brain.growth.plan_limits(&wishes, &room);
    let of = |vm: &Seen| {
        let index = plan.vms.binary_search_by_key(&vm.id, |planned| planned.id).ok()?;
        let (actions, is_restrained) = (plan.vms[index].actions, plan.restrained);
        Some(Planned { actions, limit: *limits.get(index)?, is_restrained })
    };
    let found = seen.iter().map(of).collect();
    log(brain.last.as_ref(), &plan);
    brain.last = Some(Last { plan, host, pool, wishes, room });
    found
}

fn log(before: Option<&Last>, plan: &Plan) {
    let state = before.map_or(pagoda_core::policy::ReclaimState::High, |last| last.plan.state);
    if state != plan.state {
        tracing::info!("memory of the pool: {state} -> {}, {} free", plan.state, plan.free.bytes());
    }
    if let Some((_, reason)) = plan.stuck
        && before.is_none_or(|last| last.plan.stuck.is_none())
    {
        tracing::warn!("reclamation is stuck: {}", super::tell::stuck_text(reason));
    }
}

/// Takes down what was measured, and begins a sampling period if one is due.
fn note(registry: &Registry, vm: &mut Vm, seen: &Seen) {
    let governed = &mut vm.governed;
    if seen.is_new {
        (governed.overhead, governed.measured) = (seen.overhead, Some(Instant::now()));
    }
    let (Some(status), Some(handle)) = (&seen.status, &seen.handle) else { return };
    governed.note_page_ins(status.stats.get(Metric::PagesIn));
    let is_same = vm.handle.as_ref().is_some_and(|now| Arc::ptr_eq(now, handle));
    let mut brain = registry.governor.lock();
    let Some(Sampling { period_s, .. }) = brain.policy.settings(governed.id).map(|settings| settings.sampling) else {
        return;
    };
    let is_due = governed.period_at.is_none_or(|at| at.elapsed() >= Duration::from_secs(period_s.into()));
    if is_same && is_due {
        let Brain { policy, chance, .. } = &mut *brain;
        let pages: Vec<PageIdx> = policy.start_period(governed.id, chance);
        governed.period += 1;
        governed.period_at = Some(Instant::now());
        handle.send(Command::Sample(pages));
    }
}

/// Whether an engine hears of a limit: of every lower one, for what all VMs together keep beyond theirs is missing
/// elsewhere; of a higher one if that is worth another look, for an engine says for each limit when its VM comes near.
/// `most`: nothing holds the VM back.
fn is_worth_telling(told: PageCount, limit: PageCount, most: PageCount) -> bool {
    const RAISE_PART: u64 = 64;
    match limit {
        limit if limit == told => false,
        limit if limit == most || limit < told => true,
        limit => (limit - told).0 >= (told.0 / RAISE_PART).max(CHUNK_PAGES),
    }
}

/// What the plan wants of one VM.
fn carry_out(registry: &Arc<Registry>, vm: &mut Vm, seen: &Seen, planned: &Planned) {
    let Planned { actions, limit, is_restrained } = *planned;
    let cap = Bytes(vm.record.dram).pages_floor();
    vm.governed.limit = (limit < cap).then_some(limit);
    if is_worth_telling(vm.governed.told, vm.limit(), limit_of(&vm.record)) {
        registry.tell_limit(vm);
    }
    let all = seen.memory.bytes();
    let keeps = match actions.balloon {
        Some(size) => seen.memory.saturating_sub(size).bytes(),
        // A driver that does not answer goes on being asked while its answer would matter.
        None if is_restrained => vm.governed.keeps.unwrap_or(all),
        None => all,
    };
    // A VM without a balloon that needs none is not connected to for that.
    if vm.governed.keeps != Some(keeps) && (keeps < all || vm.balloon.is_some()) {
        vm.governed.keeps = Some(keeps);
        if let Err(error) = registry.follow_plan(vm) {
            tracing::warn!(vm = %vm.record.name, "drive its balloon: {error}", error = in_full(error.as_ref()));
        }
    }
    super::block::follow(registry, vm, actions.run);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_hear_of_what_matters() {
        let check = |told: u64, limit: u64, expected: bool| {
            let most = PageCount(1 << 20);
            assert_eq!(is_worth_telling(PageCount(told), PageCount(limit), most), expected, "{told} {limit}");
        };
        check(1 << 20, 1 << 20, false);
        check((1 << 20) - 1, 1 << 20, true);
        check(1000, 1000, false);
        check(1000, 999, true);
        check(1000, 1255, false);
        check(1000, 1256, true);
        check(640_000, 649_999, false);
        check(640_000, 650_000, true);
    }
}
