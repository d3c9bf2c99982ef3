//! The host: time, the policy, and the guests that follow its plans.

use super::guest::{Guest, Limits};
use super::record::{HostPoint, Recording, Violations, VmPoint};
use super::scenario::{ChangeKind, Scenario, ScenarioError, VmScript};
use crate::chance::Chance;
use crate::policy::state::Levels;
use crate::policy::{
    Balloon, HostSettings, Plan, Policy, PoolSample, ReclaimState, Run, SettingsError, SwapSpace, VmActions, VmId,
    VmSample,
};
use crate::units::PageCount;

/// Seconds between two plans while memory suffices; else there is one each second.
const PLAN_PERIOD_S: u64 = 5;
/// Where sharing goes before everything else, the search is so much faster.
const SHARE_FIRST: u64 = 4;

/// A VM that runs.
struct Vm<'s> {
    index: usize,
    script: &'s VmScript,
    guest: Guest,
    actions: VmActions,
    target: PageCount,
    working_set: PageCount,
    /// The fewest pages page-out may leave it.
    min: PageCount,
}

pub(super) struct World<'s> {
    scenario: &'s Scenario,
    policy: Policy,
    chance: Chance,
    pool: PageCount,
    vms: Vec<Vm<'s>>,
    plan: Option<Plan>,
    replan: bool,
    violations: Violations,
}

impl<'s> World<'s> {
    pub(super) fn new(scenario: &'s Scenario) -> Result<World<'s>, ScenarioError> {
        Ok(World {
            scenario,
            policy: Policy::new(scenario.host.clone())?,
            chance: Chance::new(scenario.seed),
            pool: scenario.host.pool,
            vms: Vec::new(),
            plan: None,
            replan: true,
            violations: Violations::default(),
        })
    }

    pub(super) fn run(mut self) -> Result<Recording, ScenarioError> {
        let mut recording = Recording::new(self.scenario);
        for now_s in 0..self.scenario.duration_s {
            self.change(now_s)?;
            self.stop(now_s, &mut recording);
            self.start(now_s, &mut recording);
            self.sample(now_s);
            self.plan(now_s);
            self.step(now_s);
            self.check();
            let state = self.plan.as_ref().map_or(ReclaimState::High, |plan| plan.state);
            recording.state_s[state as usize] += 1;
            if now_s % self.scenario.record_s == 0 {
                self.record(now_s, &mut recording);
            }
        }
        while let Some(vm) = self.vms.pop() {
            recording.finish(vm.index, &vm.guest.totals);
        }
        recording.violations = self.violations;
        Ok(recording)
    }

    fn change(&mut self, now_s: u64) -> Result<(), ScenarioError> {
        let swap = unlimited_swap();
        for change in self.scenario.changes.iter().filter(|change| change.at_s == now_s) {
            self.replan = true;
            let changed = match &change.what {
                ChangeKind::Tax(tax) => {
                    self.policy.set_host(HostSettings { tax: *tax, ..self.policy.host().clone() }, &swap)
                }
                ChangeKind::Pool(pool) => {
                    self.pool = (*pool).min(self.scenario.host.pool);
                    Ok(())
                }
                ChangeKind::Vm(index, settings) => match self.vms.iter_mut().find(|vm| vm.index == *index) {
                    Some(vm) => {
                        vm.min = vm.min.min(settings.min);
                        self.policy.set(VmId(*index as u32), settings.clone(), vm.script.overhead, &swap)
                    }
                    None if refused_before(&self.scenario.vms[*index], now_s) => Ok(()),
                    None => Err(SettingsError::NoSuchVm { id: *index as u32 }),
                },
            };
            changed.map_err(|source| ScenarioError::Change { at_s: now_s, source })?;
        }
        Ok(())
    }

    fn start(&mut self, now_s: u64, recording: &mut Recording) {
        for (index, script) in self.scenario.vms.iter().enumerate().filter(|(_, script)| script.start_s == now_s) {
            let id = VmId(index as u32);
            if self.policy.add(id, script.settings.clone(), script.overhead, &unlimited_swap()).is_err() {
                recording.refused.push(script.name.clone());
                continue;
            }
            let settings = &script.settings;
            let actions = VmActions { balloon: None, page_out_cap: settings.cap, run: Run::Run };
            self.vms.push(Vm {
                index,
                script,
                guest: Guest::new(script, self.chance.draw()),
                actions,
                target: settings.cap,
                working_set: settings.memory,
                min: settings.min,
            });
            self.replan = true;
        }
    }

    fn stop(&mut self, now_s: u64, recording: &mut Recording) {
        let policy = &mut self.policy;
        let before = self.vms.len();
        self.vms.retain(|vm| {
            let stops = vm.script.stop_s == Some(now_s);
            if stops {
                policy.remove(VmId(vm.index as u32));
                recording.finish(vm.index, &vm.guest.totals);
            }
            !stops
        });
        self.replan |= self.vms.len() != before;
    }

    /// Begins the sampling periods that are due; VMs are staggered by their number.
    fn sample(&mut self, now_s: u64) {
        for vm in &mut self.vms {
            let id = VmId(vm.index as u32);
            let Some(settings) = self.policy.settings(id) else { continue };
            let period_s = u64::from(settings.sampling.period_s);
            if (now_s - vm.script.start_s).is_multiple_of(period_s) {
                let pages = self.policy.start_period(id, &mut self.chance);
                vm.guest.watch(&pages, &mut self.chance);
            }
        }
    }

    fn used(&self) -> PageCount {
        let of = |vm: &Vm<'_>| vm.guest.kinds.resident() + vm.script.overhead.overhead;
        self.vms.iter().map(of).sum()
    }

    fn plan(&mut self, now_s: u64) {
        let used = self.used();
        let levels = Levels::of(self.pool, &self.policy.host().thresholds);
        let state = self.policy.state();
        let crossed = state.next(self.pool.saturating_sub(used), &levels) != state;
        let due = now_s.is_multiple_of(PLAN_PERIOD_S) || state != ReclaimState::High;
        if !(due || crossed || self.replan) {
            return;
        }
        self.replan = false;
        let samples: Vec<VmSample> = self.vms.iter().map(|vm| vm.sample(now_s)).collect();
        let host = PoolSample { now_ms: now_s * 1000, pool: self.pool, used };
        let plan = self.policy.tick(&host, &samples);
        for vm in &mut self.vms {
            if let Some(planned) = plan.vm(VmId(vm.index as u32)) {
                vm.actions = planned.actions;
                vm.target = planned.terms.target;
                vm.working_set = planned.terms.estimate.working_set;
                self.violations.below_min += u64::from(vm.target < vm.min);
            }
        }
        let targets: PageCount = plan.vms.iter().map(|vm| vm.terms.target - vm.terms.lent).sum();
        self.violations.targets_beyond_pool += u64::from(targets > plan.budget + plan.shortfall);
        self.plan = Some(plan);
    }

    /// Everybody lives for a second: memory is given back first, then taken.
    fn step(&mut self, now_s: u64) {
        let hardware = self.scenario.hardware;
        for vm in &mut self.vms {
            if let (Some(size), Some(balloon)) = (vm.actions.balloon, vm.balloon_at(now_s)) {
                vm.guest.balloon_to(size, balloon);
            }
            let over = vm.guest.kinds.resident().saturating_sub(vm.actions.page_out_cap);
            vm.guest.page_out(over.min(hardware.page_out));
        }
        self.share_zeros(hardware.share_scan);
        let mut free = self.pool.saturating_sub(self.used());
        let count = self.vms.len();
        for turn in 0..count {
            // Nobody is always the first to take what is free.
            let vm = &mut self.vms[(turn + now_s as usize) % count];
            if vm.actions.run == Run::Block {
                vm.guest.totals.blocked_s += 1;
                vm.guest.speed = 0.0;
                continue;
            }
            let before = vm.guest.kinds.resident();
            let limits = Limits {
                cap: vm.actions.page_out_cap,
                free,
                page_in: hardware.page_in,
                page_out: hardware.page_out,
                fault_us: hardware.fault_us,
            };
            let phase = vm.script.phase(now_s - vm.script.start_s);
            vm.guest.run(phase, vm.script.reports_free, &limits);
            free = (free + before).saturating_sub(vm.guest.kinds.resident());
        }
    }

    /// Zero pages are found in proportion to how many of all resident pages they are.
    fn share_zeros(&mut self, scan: PageCount) {
        let first = self.plan.as_ref().is_some_and(|plan| plan.state.allowed().share_first);
        let scan = if first { scan.0 * SHARE_FIRST } else { scan.0 };
        let resident: PageCount = self.vms.iter().map(|vm| vm.guest.kinds.resident()).sum();
        for vm in &mut self.vms {
            let found = u128::from(scan) * u128::from(vm.guest.kinds.zero_in.0) / u128::from(resident.0.max(1));
            vm.guest.share_zeros(PageCount(found as u64));
        }
    }

    fn check(&mut self) {
        for vm in &self.vms {
            self.violations.lost_pages += u64::from(vm.guest.kinds.all() != vm.script.settings.memory);
            self.violations.capped_below_min += u64::from(vm.actions.page_out_cap < vm.min);
        }
        self.violations.pool_overdrawn += u64::from(self.used() > self.scenario.host.pool);
    }

    fn record(&self, now_s: u64, recording: &mut Recording) {
        let sum = |pick: fn(&Vm<'s>) -> PageCount| self.vms.iter().map(pick).sum();
        let (state, free) = self
            .plan
            .as_ref()
            .map_or((ReclaimState::High, self.pool), |plan| (plan.state, self.pool.saturating_sub(self.used())));
        recording.host.push(HostPoint {
            at_s: now_s,
            state,
            free,
            resident: sum(|vm| vm.guest.kinds.resident()),
            active: sum(|vm| vm.guest.kinds.active()),
            balloon: sum(|vm| vm.guest.kinds.balloon),
            swapped: sum(|vm| vm.guest.kinds.swapped()),
            zero: sum(|vm| vm.guest.kinds.zero_out),
        });
        for vm in &self.vms {
            let kinds = &vm.guest.kinds;
            recording.vms[vm.index].points.push(VmPoint {
                at_s: now_s,
                resident: kinds.resident(),
                target: vm.target,
                working_set: vm.working_set,
                active: kinds.active(),
                balloon: kinds.balloon,
                swapped: kinds.swapped(),
                zero: kinds.zero_out,
                speed: vm.guest.speed,
                runs: vm.actions.run == Run::Run,
            });
        }
    }
}

/// Swap is as large as is wanted: what is simulated is memory.
fn unlimited_swap() -> SwapSpace {
    SwapSpace::empty(PageCount(u64::MAX))
}

/// Whether a VM that does not run would, had it been admitted: then there is nothing to change.
fn refused_before(script: &VmScript, now_s: u64) -> bool {
    script.start_s < now_s && script.stop_s.is_none_or(|stop_s| now_s <= stop_s)
}

impl Vm<'_> {
    /// Pages a second its balloon driver moves, once there is one.
    fn balloon_at(&self, now_s: u64) -> Option<PageCount> {
        let balloon = self.script.balloon?;
        (now_s - self.script.start_s >= balloon.after_s).then_some(balloon.rate)
    }

    fn sample(&self, now_s: u64) -> VmSample {
        let kinds = &self.guest.kinds;
        let balloon = self.balloon_at(now_s).map_or(Balloon::Absent, |_| Balloon::Inflated(kinds.balloon));
        VmSample {
            id: VmId(self.index as u32),
            resident: kinds.resident(),
            swapped: kinds.swapped(),
            shared: PageCount::ZERO,
            balloon,
            sample: self.guest.sample_count(),
            pinned: false,
        }
    }
}
