//! What is kept of a run.

use super::guest::Totals;
use super::scenario::Scenario;
use crate::policy::ReclaimState;
use crate::units::PageCount;

/// The host at one moment.
#[derive(Clone, Copy, Debug)]
pub struct HostPoint {
    pub at_s: u64,
    pub state: ReclaimState,
    pub free: PageCount,
    /// This and what follows are sums over all VMs.
    pub resident: PageCount,
    pub active: PageCount,
    pub balloon: PageCount,
    pub swapped: PageCount,
    pub zero: PageCount,
}

/// A VM at one moment.
#[derive(Clone, Copy, Debug)]
pub struct VmPoint {
    pub at_s: u64,
    pub resident: PageCount,
    pub target: PageCount,
    /// The policy estimates this working set.
    pub working_set: PageCount,
    /// The working set really is this.
    pub active: PageCount,
    pub balloon: PageCount,
    pub swapped: PageCount,
    /// Touched, and a hole now.
    pub zero: PageCount,
    /// Work done, 1 being that without any fault.
    pub speed: f64,
    pub runs: bool,
}

/// What is kept of a VM.
#[derive(Clone, Debug)]
pub struct VmRecord {
    pub name: String,
    pub memory: PageCount,
    pub points: Vec<VmPoint>,
    pub totals: Totals,
}

/// Promises that were broken. Every number must be 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Violations {
    /// Targets below a VM's min.
    pub below_min: u64,
    /// Page-out below a VM's min.
    pub capped_below_min: u64,
    /// Targets of more than there is.
    pub targets_beyond_pool: u64,
    /// Seconds with more in DRAM than the pool.
    pub pool_overdrawn: u64,
    /// Guests whose pages do not add up to their memory.
    pub lost_pages: u64,
}

/// A recording is all that is kept of one run.
#[derive(Clone, Debug)]
pub struct Recording {
    pub title: String,
    pub duration_s: u64,
    pub pool: PageCount,
    pub host: Vec<HostPoint>,
    pub vms: Vec<VmRecord>,
    /// Seconds in each state, in the order of [`crate::policy::state::STATES`].
    pub state_s: [u64; 4],
    /// VMs that were not admitted.
    pub refused: Vec<String>,
    pub violations: Violations,
}

impl Recording {
    pub(super) fn new(scenario: &Scenario) -> Recording {
        let vm = |script: &super::scenario::VmScript| VmRecord {
            name: script.name.clone(),
            memory: script.settings.memory,
            points: Vec::new(),
            totals: Totals::default(),
        };
        Recording {
            title: scenario.title.clone(),
            duration_s: scenario.duration_s,
            pool: scenario.host.pool,
            host: Vec::new(),
            vms: scenario.vms.iter().map(vm).collect(),
            state_s: [0; 4],
            refused: Vec::new(),
            violations: Violations::default(),
        }
    }

    pub(super) fn finish(&mut self, index: usize, totals: &Totals) {
        self.vms[index].totals = *totals;
    }

    /// The part of all time in a state.
    pub fn state_ratio(&self, state: ReclaimState) -> f64 {
        self.state_s[state as usize] as f64 / self.duration_s.max(1) as f64
    }
}

impl VmRecord {
    /// The mean of something over the points from `from_s` to before `until_s`; nothing if there is no point.
    pub fn mean(&self, from_s: u64, until_s: u64, pick: impl Fn(&VmPoint) -> f64) -> Option<f64> {
        let values: Vec<f64> =
            self.points.iter().filter(|point| (from_s..until_s).contains(&point.at_s)).map(pick).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }
}
