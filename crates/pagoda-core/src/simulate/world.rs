//! The host: time, the policy, and the guests that follow its plans.

use super::guest::{Limits, Step};
use super::host::Host;
use super::record::{HostPoint, Recording, Violations, VmPoint};
use super::replay::{Made, Observer, Replay};
use super::scenario::{ChangeKind, Scenario, ScenarioError, VmScript};
use super::vm::Vm;
use crate::chance::Chance;
use crate::policy::round::{PERIOD_MIN_MS, VmReport, overhead_with_room};
use crate::policy::{HostSettings, Plan, ReclaimState, Run, SettingsError, SwapSpace, VmId};
use crate::units::PageCount;

/// Where sharing goes before everything else, the search is so much faster.
const SHARE_FIRST: u64 = 4;
/// With up to so many VMs, a VM that comes near its limit has a round a tenth of a second later, as with the daemon. With more
/// it waits for the next second: a day of a hundred VMs is simulated in seconds.
const VMS_IN_TENTHS_MAX: usize = 16;

pub(super) struct World<'s> {
    scenario: &'s Scenario,
    replay: Replay,
    observer: Option<&'s mut dyn Observer>,
    /// When the last round was made.
    made_ms: Option<u64>,
    /// Something calls for a round before it is due.
    is_rung: bool,
    chance: Chance,
    host: Host,
    vms: Vec<Vm<'s>>,
    violations: Violations,
}

impl<'s> World<'s> {
    pub(super) fn new(
        scenario: &'s Scenario,
        mut observer: Option<&'s mut dyn Observer>,
    ) -> Result<World<'s>, ScenarioError> {
        let mut chance = Chance::new(scenario.seed);
        let seed = chance.draw();
        if let Some(observer) = &mut observer {
            observer.begin(&scenario.host, seed);
        }
        Ok(World {
            scenario,
            replay: Replay::new(scenario.host.clone(), seed)?,
            observer,
            made_ms: None,
            is_rung: false,
            chance,
            host: Host::new(scenario.host.pool),
            vms: Vec::new(),
            violations: Violations::default(),
        })
    }

    pub(super) fn run(mut self) -> Result<Recording, ScenarioError> {
        let mut recording = Recording::new(self.scenario);
        for now_s in 0..self.scenario.duration_s {
            self.change(now_s)?;
            self.stop(now_s, &mut recording);
            self.start(now_s, &mut recording);
            self.second(now_s);
            let state = self.plan().map_or(ReclaimState::High, |plan| plan.state);
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

    fn plan(&self) -> Option<&Plan> {
        self.replay.rounds.last().map(|last| &last.plan)
    }

    fn change(&mut self, now_s: u64) -> Result<(), ScenarioError> {
        let swap = unlimited_swap();
        for change in self.scenario.changes.iter().filter(|change| change.at_s == now_s) {
            self.is_rung = true;
            let policy = &mut self.replay.rounds.policy;
            let changed = match &change.what {
                ChangeKind::Tax(tax) => policy.set_host(HostSettings { tax: *tax, ..policy.host().clone() }, &swap),
                ChangeKind::Pool(pool) => {
                    self.host.spare(*pool);
                    Ok(())
                }
                ChangeKind::Vm(index, settings) => match self.vms.iter_mut().find(|vm| vm.index == *index) {
                    Some(vm) => {
                        vm.min = vm.min.min(settings.min);
                        let overhead = self.replay.rounds.overhead_with(vm.id(), settings);
                        self.replay.rounds.policy.set(vm.id(), settings.clone(), overhead, &swap)
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
            let overhead = overhead_with_room(script.overhead.overhead, &script.settings);
            if self.replay.rounds.policy.add(id, script.settings.clone(), overhead, &unlimited_swap()).is_err() {
                recording.refused.push(script.name.clone());
                continue;
            }
            let first_limit = self.replay.rounds.first_limit(id, PageCount::ZERO);
            self.vms.push(Vm::new(index, script, self.chance.draw(), first_limit));
            self.is_rung = true;
        }
    }

    fn stop(&mut self, now_s: u64, recording: &mut Recording) {
        let rounds = &mut self.replay.rounds;
        let before = self.vms.len();
        self.vms.retain(|vm| {
            let stops = vm.script.stop_s == Some(now_s);
            if stops {
                rounds.remove(vm.id());
                recording.finish(vm.index, &vm.guest.totals);
            }
            !stops
        });
        self.is_rung |= self.vms.len() != before;
    }

    /// Pages in DRAM, overheads included.
    fn used(&self) -> PageCount {
        let of = |vm: &Vm<'_>| vm.guest.kinds.resident() + vm.script.overhead.overhead;
        self.vms.iter().map(of).sum()
    }

    /// Rounds and guests, for a second.
    fn second(&mut self, now_s: u64) {
        let (mut now_ms, end_ms) = (now_s * 1000, now_s * 1000 + 1000);
        while now_ms < end_ms {
            let waited = self.made_ms.map(|made| now_ms - made);
            let is_due = waited.is_none_or(|waited| {
                waited >= self.replay.rounds.period_ms() || (self.is_rung && waited >= PERIOD_MIN_MS)
            });
            if is_due {
                self.round(now_ms);
            }
            let is_held = self.is_rung || self.vms.iter().any(|vm| vm.limit() < vm.script.settings.memory);
            let is_short = is_held && self.vms.len() <= VMS_IN_TENTHS_MAX;
            let ms = if is_short { PERIOD_MIN_MS } else { end_ms - now_ms };
            let step = Step { from_ms: now_ms, ms };
            self.step(step);
            self.check();
            now_ms = step.end_ms();
        }
    }

    /// One round, as the daemon makes it.
    fn round(&mut self, now_ms: u64) {
        (self.made_ms, self.is_rung) = (Some(now_ms), false);
        let host = self.host.report(now_ms, self.used());
        let policy = &self.replay.rounds.policy;
        let report = |vm: &mut Vm<'s>| Some(vm.report(now_ms, policy.settings(vm.id())?));
        let reports: Vec<VmReport> = self.vms.iter_mut().filter_map(report).collect();
        let made = match &mut self.observer {
            Some(observer) => self.replay.make_seen(&host, &reports, *observer),
            None => self.replay.make(&host, &reports),
        };
        let Some(Made { outcomes, last }) = made else { return };
        let plan = &last.plan;
        for ((vm, report), outcome) in self.vms.iter_mut().zip(&reports).zip(outcomes) {
            vm.follow(now_ms, report, outcome);
            if let Some(planned) = plan.vm(vm.id()) {
                vm.target = planned.terms.target;
                vm.working_set = planned.terms.estimate.working_set;
                self.violations.below_min += u64::from(vm.target < vm.min);
            }
        }
        let targets: PageCount = plan.vms.iter().map(|vm| vm.terms.target - vm.terms.lent).sum();
        self.violations.targets_beyond_pool += u64::from(targets > plan.budget + plan.shortfall);
    }

    /// Everybody lives for a step: memory is given back first, then taken.
    fn step(&mut self, step: Step) {
        let hardware = self.scenario.hardware;
        self.vms.iter_mut().for_each(|vm| vm.give(step, hardware.page_out));
        self.share_zeros(step.part(hardware.share_scan));
        let mut free = self.host.free(self.used());
        let count = self.vms.len();
        for turn in 0..count {
            // Nobody is always the first to take what is free.
            let vm = &mut self.vms[(turn + (step.from_ms / PERIOD_MIN_MS) as usize) % count];
            let before = vm.guest.kinds.resident();
            let limits = Limits {
                step,
                limit: vm.limit(),
                free,
                page_in: hardware.page_in,
                page_out: hardware.page_out,
                fault_us: hardware.fault_us,
            };
            vm.live(&limits);
            free = (free + before).saturating_sub(vm.guest.kinds.resident());
            self.is_rung |= vm.look_at_limit();
        }
    }

    /// Zero pages are found in proportion to how many of all resident pages they are.
    fn share_zeros(&mut self, scan: PageCount) {
        let first = self.plan().is_some_and(|plan| plan.state.allowed().share_first);
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
            self.violations.capped_below_min += u64::from(vm.limit() < vm.min);
        }
        self.violations.pool_overdrawn += u64::from(self.used() > self.scenario.host.pool);
    }

    fn record(&self, now_s: u64, recording: &mut Recording) {
        let sum = |pick: fn(&Vm<'s>) -> PageCount| self.vms.iter().map(pick).sum();
        let last = self.replay.rounds.last();
        let state = last.map_or(ReclaimState::High, |last| last.plan.state);
        let pool = last.map_or(self.scenario.host.pool, |last| last.pool.now);
        let free = pool.saturating_sub(self.used());
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
                runs: vm.run == Run::Run,
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
