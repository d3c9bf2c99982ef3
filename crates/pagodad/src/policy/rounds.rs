//! One round: measures the host and all VMs, has [`pagoda_core::policy::round`] plan, and carries out what that wants.
//!
//! Everything that is waited for, a fresh status of each engine above all, is waited for without a lock. Between the report
//! and the action a VM may have gone, or another may have its name: VMs are known by their numbers.

use pagoda_api::in_full;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use pagoda_api::types::VmKind;
use pagoda_core::policy::follow_up::Comparison;
use pagoda_core::policy::round::{EngineReport, HostReport, Last, Orders, Outcome, VmReport};
use pagoda_core::policy::{Balloon, ReclaimState, Run};
use pagoda_core::simulate::replay::{Made, Observer};
use pagoda_core::stats::Metric;
use pagoda_core::units::{Bytes, PageCount};
use pagoda_pager::handle::{Command, Handle, Status};

use super::governed::Governed;
use super::round_wait::timed;
use super::{host, settings, vmm_kind};
use crate::balloon;
use crate::outboxes::Charged;
use crate::record::Record;
use crate::registry::templates::Wanted;
use crate::registry::{Registry, Vm};

/// The reading of the host's memory, in health.
const HOST_MEMORY: &str = "host memory";
/// How often a VMM is measured: its memory grows slowly.
const OVERHEAD_PERIOD: Duration = Duration::from_secs(10);
/// A balloon of which an earlier daemon's record tells is waited for; a monitor that others keep busy is not.
const BALLOON_WAIT: Duration = Duration::from_secs(10);

/// A VM whose report is being made, without the registry.
struct Reported {
    report: VmReport,
    pid: u32,
    handle: Option<Arc<Handle>>,
    is_measured: bool,
    status: Option<Arc<Status>>,
}

/// Makes one round: measures, plans, and carries the plan out.
pub fn make(registry: &Arc<Registry>) {
    let governor = &registry.governor;
    let mut recording = governor.recording.lock().unwrap_or_else(PoisonError::into_inner);
    recording.open(&registry.parts);
    let mut waited = Duration::ZERO;
    let vms = report_all(registry, &mut waited);
    let reports: Vec<VmReport> = vms.iter().map(|vm| vm.report).collect();
    let read = host::read_memory();
    let templates = registry.count_templates();
    let mut state = timed(&mut waited, || registry.governor.lock());
    match read {
        Ok(memory) => {
            registry.parts.works(HOST_MEMORY);
            state.memory = memory;
        }
        // As it was last: no VM loses memory to a host that cannot be measured.
        Err(error) => {
            registry.parts.failed(HOST_MEMORY, &format!("it cannot be read, and counts as it was last: {error}"));
        }
    }
    let now_ms = registry.governor.now_ms();
    // Under the policy's lock, under which charges rise: nobody is promised meanwhile what an outbox was given.
    let Charged { charged: outboxes, held: outboxes_held } = registry.outboxes.charged();
    let elastic = registry.outboxes.elastic();
    let (memory, available_min) = (state.memory, state.config.host_available_min);
    let host = HostReport { now_ms, memory, available_min, templates, outboxes, outboxes_held, elastic };
    let before = state.rounds.last().map(|last| (last.plan.state, last.plan.stuck.is_some()));
    recording.begin(state.rounds.policy.host(), governor.seed);
    recording.before(&state.rounds.policy);
    let outcomes = state.rounds.make(&host, &reports);
    if let Some(last) = state.rounds.last() {
        let made = Made { outcomes: &outcomes, last };
        recording.after(&state.rounds.policy, &host, &reports, made);
        log(before, last);
    }
    let wanted = state.rounds.last().map_or(Wanted::NotNow, Wanted::by);
    drop(state);
    if registry.drop_templates(wanted) && wanted == Wanted::Now {
        // What VMs are told below is as if it were still there; the next round knows better, and comes at once.
        registry.governor.doorbell.ring();
    }
    let mut locked = timed(&mut waited, || registry.lock());
    for vm in locked.values_mut() {
        if let Some(index) = reports.iter().position(|report| report.id == vm.governed.id) {
            note(vm, &vms[index], &outcomes[index], now_ms);
            if let Some(orders) = &outcomes[index].orders {
                carry_out(registry, vm, orders);
            }
        }
    }
    drop(locked);
    registry.governor.lock().waits.record(waited);
    recording.flush(&registry.parts);
}

/// Measures all VMs. Asks all engines first, so that they answer at the same time.
fn report_all(registry: &Registry, waited: &mut Duration) -> Vec<Reported> {
    let mut vms: Vec<Reported> = timed(waited, || registry.lock()).values().map(begin_report).collect();
    let asked: Vec<u64> = vms.iter().map(|vm| vm.handle.as_ref().map_or(0, |handle| handle.ask_status())).collect();
    for (vm, asked) in vms.iter_mut().zip(asked) {
        vm.status = vm.handle.as_ref().map(|handle| handle.status_after(asked));
        finish_report(vm);
    }
    vms
}

fn begin_report(vm: &Vm) -> Reported {
    let Governed { id, round, measured, .. } = vm.governed;
    let report = VmReport {
        id,
        kind: vmm_kind(vm.record.kind),
        memory: settings::memory_of(&vm.record),
        min: Bytes(vm.record.spec.policy.min).pages_ceil(),
        round,
        engine: None,
        process: PageCount::ZERO,
        measured: None,
        balloon: balloon_of(vm),
        pinned: vm.record.spec.pinned.is_some(),
    };
    let is_measured = measured.is_some_and(|at| at.elapsed() < OVERHEAD_PERIOD);
    Reported { report, pid: vm.record.pid.0, handle: vm.handle.clone(), is_measured, status: None }
}

/// What is known of a VM's balloon; `None`: it has to be waited for.
fn balloon_of(vm: &Vm) -> Option<Balloon> {
    if vm.record.kind == VmKind::Plain {
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

fn finish_report(vm: &mut Reported) {
    let Some(status) = &vm.status else {
        // A VM whose agent is away is known by its process alone.
        if vm.pid != 0 {
            vm.report.process = Bytes(pagoda_sys::process::rss(vm.pid).unwrap_or(0)).pages_ceil();
        }
        return;
    };
    vm.report.engine = Some(engine_report(status));
    // A process that has just ended is forgotten in a moment.
    if !vm.is_measured
        && let Ok(own) = pagoda_sys::process::own_memory(vm.pid)
    {
        // What it has written of what it borrows is guest memory, and counted as that.
        let private = PageCount(status.stats.get(Metric::PrivatePages)).bytes().0;
        vm.report.measured = Some(Bytes(own.saturating_sub(private) + status.table_bytes).pages_ceil());
    }
}

fn engine_report(status: &Status) -> EngineReport {
    let pages = |metric| PageCount(status.stats.get(metric));
    EngineReport {
        armed: status.armed,
        ram: Bytes(status.ram_bytes).pages_ceil(),
        resident: pages(Metric::Resident),
        swapped: pages(Metric::Swapped),
        shared: pages(Metric::Shared),
        shared_part: pages(Metric::SharedPart),
        share_burst: pages(Metric::ShareBurst),
        sample: status.sample,
        sample_period: status.sample_period,
        pinned: status.pinned.is_some(),
    }
}

fn log(before: Option<(ReclaimState, bool)>, last: &Last) {
    let plan = &last.plan;
    let (state, was_stuck) = before.unwrap_or((ReclaimState::High, false));
    if state != plan.state {
        tracing::info!("memory of the pool: {state} -> {}, {} free", plan.state, plan.free.bytes());
    }
    if let Some((_, reason)) = plan.stuck
        && !was_stuck
    {
        tracing::warn!("reclamation is stuck: {}", super::report::stuck_text(reason));
    }
}

/// Remembers what was measured, and begins a sampling period if one is due.
fn note(vm: &mut Vm, reported: &Reported, outcome: &Outcome, now_ms: u64) {
    let governed = &mut vm.governed;
    if let Some(overhead) = reported.report.measured {
        governed.round.note_overhead(overhead);
        governed.measured = Some(Instant::now());
    }
    let (Some(status), Some(handle)) = (&reported.status, &reported.handle) else { return };
    governed.note_page_ins(status.stats.get(Metric::PagesIn));
    let comparison = comparison(&reported.report, &vm.record, outcome);
    governed.compare(now_ms, &comparison);
    let is_same = vm.handle.as_ref().is_some_and(|now| Arc::ptr_eq(now, handle));
    if let Some(pages) = outcome.sample.as_ref().filter(|_| is_same) {
        governed.round.period_began(now_ms);
        handle.send(Command::Sample(pages.clone()));
    }
}

/// What the rounds before wanted of a VM that an engine serves, and what it has now. Where page-out stands in for its balloon,
/// that is known and no deviation.
fn comparison(report: &VmReport, record: &Record, outcome: &Outcome) -> Comparison {
    let engine = report.engine.unwrap_or_default();
    let is_limited = engine.armed && !report.pinned && !engine.pinned;
    let asked_for = record.spec.balloon_target.map(Bytes).into_iter().chain(report.round.keeps()).min();
    let balloon = match (report.balloon, asked_for) {
        (Some(Balloon::Inflated(size)), Some(keeps)) if !record.paged_out => {
            Some((report.memory.saturating_sub(keeps.pages_ceil()), size))
        }
        _ => None,
    };
    let wants = outcome.orders.map(|orders| orders.actions.run == Run::Block);
    Comparison {
        memory: report.memory,
        limit: if is_limited { report.round.sent() } else { report.memory },
        resident: if is_limited { engine.resident + engine.shared_part } else { PageCount::ZERO },
        balloon,
        suspended: (wants.unwrap_or(record.blocked), record.blocked),
    }
}

/// Brings one VM to where the plan wants it.
fn carry_out(registry: &Arc<Registry>, vm: &mut Vm, orders: &Orders) {
    let caps = settings::caps_of(&vm.record);
    let steps = vm.governed.round.follow(orders, &caps, vm.balloon.is_some());
    if steps.send_limit {
        registry.send_limit(vm);
    }
    if steps.drive_balloon
        && let Err(error) = registry.follow_plan(vm)
    {
        tracing::warn!(vm = %vm.record.name, "drive its balloon: {error}", error = in_full(error.as_ref()));
    }
    super::block::follow(registry, vm, steps.run);
}
