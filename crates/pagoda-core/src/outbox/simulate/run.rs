//! Drives simulated VMs: a period of jobs, then the profile, then the decision.

use crate::chance::mix;
use crate::outbox::backpressure::Limits;
use crate::outbox::control::{Decision, Reason, Sizer};
use crate::outbox::orchestrate::{Claim, Division, divide};
use crate::outbox::profile::{Counters, Job, Profiler};
use crate::outbox::slo::Statistic;
use crate::policy::{Shares, VmId};
use crate::units::Bytes;

use super::plant::Plant;
use super::scenario::{PERIOD_S, Scenario};

/// One period of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct PeriodRecord {
    pub phase: usize,
    /// The space during the period.
    pub space: Bytes,
    /// Response times of the jobs that ended.
    pub responses: Vec<f64>,
    /// What was decided at its end.
    pub decision: Decision,
    /// So many writes were refused in the period.
    pub refused: u64,
}

impl PeriodRecord {
    /// A statistic of its jobs.
    pub fn statistic(&self, statistic: Statistic) -> Option<f64> {
        statistic.of(&mut self.responses.clone())
    }
}

/// A space that never changes.
#[derive(Clone, Copy, Debug)]
pub struct Static;

impl Sizer for Static {
    fn size(&mut self, _: &Profiler, space: Bytes) -> Decision {
        Decision { space, reason: Reason::Fixed, estimate: None }
    }
}

/// A VM in its scenario.
struct Vm<'s> {
    scenario: &'s Scenario,
    plant: Plant,
    profile: Profiler,
    space: Bytes,
    refused: u64,
    records: Vec<PeriodRecord>,
}

impl<'s> Vm<'s> {
    fn new(scenario: &'s Scenario, seed: u64) -> Vm<'s> {
        Vm {
            scenario,
            plant: Plant::new(seed, Limits::default()),
            profile: Profiler::new(0, Counters::default()),
            space: scenario.start,
            refused: 0,
            records: Vec::new(),
        }
    }

    fn live(&mut self, period: usize) -> Vec<Job> {
        let now_ms = (period as u64 + 1) * PERIOD_S * 1000;
        let phase = &self.scenario.phases[self.scenario.phase_at(period)];
        self.plant.live(now_ms, &phase.load, self.space);
        let mut jobs = self.plant.take_ended();
        jobs.retain(|job| job.ended_ms <= now_ms);
        self.profile.close_period(now_ms, self.space, self.plant.counters(), &jobs);
        jobs
    }

    fn claim(&self, nth: usize, weight: Shares, decision: &Decision) -> Claim {
        let settings = &self.scenario.settings;
        let curve = decision.estimate.as_ref().map(|estimate| (estimate.curve.clone(), settings.slo.limit_s()));
        Claim {
            id: VmId(nth as u32),
            weight,
            min: settings.min,
            max: settings.max,
            wanted: decision.space,
            has: self.space,
            used: self.plant.used(),
            curve,
        }
    }

    /// Keeps what happened; the VM has `space` from now on.
    fn record(&mut self, period: usize, jobs: &[Job], decision: Decision, space: Bytes) {
        let refused = self.plant.refused - self.refused;
        self.refused = self.plant.refused;
        self.records.push(PeriodRecord {
            phase: self.scenario.phase_at(period),
            space: self.space,
            responses: jobs.iter().map(Job::response_s).collect(),
            decision,
            refused,
        });
        self.space = space;
    }
}

/// Runs one VM through its scenario.
pub fn run(scenario: &Scenario, seed: u64, sizer: &mut dyn Sizer) -> Vec<PeriodRecord> {
    let mut vm = Vm::new(scenario, seed);
    for period in 0..scenario.periods() {
        let jobs = vm.live(period);
        let decision = sizer.size(&vm.profile, vm.space);
        let space = decision.space;
        vm.record(period, &jobs, decision, space);
    }
    vm.records
}

/// A VM on a pool that it shares.
#[expect(missing_debug_implementations, reason = "a sizer need not be printed")]
pub struct Tenant<'s> {
    pub scenario: &'s Scenario,
    pub weight: Shares,
    pub sizer: Box<dyn Sizer>,
}

/// What was made of a pool in one period.
#[derive(Debug)]
pub struct PoolRun {
    /// For each VM, its periods.
    pub records: Vec<Vec<PeriodRecord>>,
    pub divisions: Vec<Division>,
    /// The most that all outboxes held at the end of a period.
    pub held_max: Bytes,
}

/// Runs several VMs whose outboxes share `pool(period)`.
pub fn run_pool(tenants: Vec<Tenant<'_>>, pool: impl Fn(usize) -> Bytes, seed: u64) -> PoolRun {
    let periods = tenants.iter().map(|tenant| tenant.scenario.periods()).max().unwrap_or(0);
    let mut vms: Vec<(Vm<'_>, Shares, Box<dyn Sizer>)> = Vec::new();
    for (nth, tenant) in tenants.into_iter().enumerate() {
        vms.push((Vm::new(tenant.scenario, mix(seed ^ (nth as u64) << 32)), tenant.weight, tenant.sizer));
    }
    let (mut divisions, mut held_max) = (Vec::new(), Bytes::ZERO);
    for period in 0..periods {
        let mut asked = Vec::new();
        for (vm, _, sizer) in &mut vms {
            let jobs = vm.live(period);
            let decision = sizer.size(&vm.profile, vm.space);
            asked.push((jobs, decision));
        }
        held_max = held_max.max(vms.iter().map(|(vm, ..)| vm.plant.used()).sum());
        let claims: Vec<Claim> = vms
            .iter()
            .zip(&asked)
            .enumerate()
            .map(|(nth, ((vm, weight, _), (_, decision)))| vm.claim(nth, *weight, decision))
            .collect();
        let division = divide(pool(period), &claims);
        for (((vm, ..), (jobs, decision)), allotment) in vms.iter_mut().zip(asked).zip(&division.allotments) {
            vm.record(period, &jobs, decision, allotment.space);
        }
        divisions.push(division);
    }
    PoolRun { records: vms.into_iter().map(|(vm, ..)| vm.records).collect(), divisions, held_max }
}
