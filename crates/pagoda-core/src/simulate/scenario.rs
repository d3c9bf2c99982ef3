//! What is simulated: a host, VMs that behave by a script, and changes of settings.

use crate::policy::{HostSettings, InvalidSettings, Overhead, SettingsError, TaxRate, VmSettings};
use crate::units::{Bytes, PageCount};

/// A week: longer runs say nothing that this does not.
pub const DURATION_S_MAX: u64 = 7 * 86_400;
/// Points that are kept of a run: more than a plot has pixels.
pub const RECORDS_MAX: u64 = 20_000;

/// A scenario describes one run of the simulator.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The title says what the run shows.
    pub title: String,
    /// Length in virtual seconds.
    pub duration_s: u64,
    /// All chance in the run follows from this seed.
    pub seed: u64,
    /// The host when it starts.
    pub host: HostSettings,
    /// What the hardware does.
    pub hardware: Hardware,
    /// The VMs, in any order.
    pub vms: Vec<VmScript>,
    /// Changes of settings, in any order.
    pub changes: Vec<Change>,
    /// Seconds between two points that are kept.
    pub record_s: u64,
}

/// Speeds of the host.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// Pages a second that a VM's swap is read with. Shared by nobody: each VM has its own file and queue.
    pub page_in: PageCount,
    /// Pages a second that a VM's pages are written out with, if it is told to.
    pub page_out: PageCount,
    /// Microseconds that a fault on a swapped page takes.
    pub fault_us: u64,
    /// Pages a second, over all VMs, that are looked at in search of zero pages; four times as many where sharing goes
    /// before all else.
    pub share_scan: PageCount,
}

impl Default for Hardware {
    /// One NVMe disk: 400 MiB/s each way, 100 us a fault. The scan takes 16 MiB/s, a quarter of a percent of a core.
    fn default() -> Hardware {
        let mib = |mib| Bytes::from_mib(mib).pages_floor();
        Hardware { page_in: mib(400), page_out: mib(400), fault_us: 100, share_scan: mib(16) }
    }
}

/// A VM and how its guest behaves.
#[derive(Clone, Debug)]
pub struct VmScript {
    /// The VM has this name in what people read, and no other VM has it.
    pub name: String,
    /// As an operator sets them.
    pub settings: VmSettings,
    /// The VM takes so much beside its memory.
    pub overhead: Overhead,
    /// When it is started.
    pub start_s: u64,
    /// When it ends; never, if not said.
    pub stop_s: Option<u64>,
    /// What it does at first.
    pub boot: Boot,
    /// Its balloon, if it has one.
    pub balloon: Option<BalloonScript>,
    /// What it does then, by time since its start.
    pub phases: Vec<Phase>,
    /// The phases begin anew after so many seconds.
    pub repeat_s: Option<u64>,
    /// What it does not use any more it gives back by free page reporting; else it keeps it as cache.
    pub reports_free: bool,
}

/// A guest's boot. Windows writes zeros to all its memory (ESX section 6.3).
#[derive(Clone, Copy, Debug)]
pub struct Boot {
    /// Pages that are touched.
    pub touches: PageCount,
    /// It touches so many pages a second.
    pub rate: PageCount,
}

/// A guest's balloon driver.
#[derive(Clone, Copy, Debug)]
pub struct BalloonScript {
    /// Seconds after the VM's start until the driver is there.
    pub after_s: u64,
    /// Pages a second that it moves at most.
    pub rate: PageCount,
}

/// A time of one behaviour.
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    /// The phase begins so many seconds after the VM's start.
    pub at_s: u64,
    /// The working set has so many pages.
    pub active: PageCount,
    /// Pages of it that are touched a second, with all of them in DRAM.
    pub rate: PageCount,
    /// Pages with content, the working set among them, where that is known as of a recorded VM. Else what the guest has
    /// used stays its cache.
    pub touched: Option<PageCount>,
}

/// A change of settings.
#[derive(Clone, Debug)]
pub struct Change {
    /// The change comes at this second of the run.
    pub at_s: u64,
    /// This is changed at that time.
    pub what: ChangeKind,
}

/// The kind says which setting is changed, and to what.
#[derive(Clone, Debug)]
pub enum ChangeKind {
    /// The idle memory tax.
    Tax(TaxRate),
    /// What the host can spare, as when it runs short itself; the setting stays.
    Pool(PageCount),
    /// A VM's settings, by its index in [`Scenario::vms`].
    Vm(usize, VmSettings),
}

/// Why a scenario cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScenarioError {
    #[error("a duration of {duration_s} s; give 1 to {DURATION_S_MAX}")]
    Duration { duration_s: u64 },
    #[error("{records} points would be kept; keep at most {RECORDS_MAX}, by a longer record period")]
    Records { records: u64 },
    #[error("there is no VM; add one")]
    NoVm,
    #[error("two VMs are named {name:?}; rename one")]
    NameTaken { name: String },
    #[error("VM {name:?}: {source}")]
    Vm { name: String, source: InvalidSettings },
    #[error("VM {name:?} has a {what} of more than its memory of {}; lower it", memory.bytes())]
    BeyondMemory { name: String, what: &'static str, memory: PageCount },
    #[error("VM {name:?} has a {what} of 0; give at least one page a second")]
    ZeroRate { name: String, what: &'static str },
    #[error("VM {name:?}: phases must begin one after the other, the one at {at_s} s does not")]
    PhaseOrder { name: String, at_s: u64 },
    #[error("VM {name:?} uses more at {at_s} s than it has touched; raise what is touched")]
    ActiveUntouched { name: String, at_s: u64 },
    #[error("VM {name:?} stops before it starts; correct one of them")]
    StopsFirst { name: String },
    #[error("the change at {at_s} s is of VM number {index}, which there is not")]
    NoSuchVm { at_s: u64, index: usize },
    #[error("the change at {at_s} s: {source}")]
    Change { at_s: u64, source: SettingsError },
    #[error("host: {0}")]
    Host(#[from] InvalidSettings),
}

impl Scenario {
    /// Whether it can be run.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), ScenarioError> {
        self.host.check()?;
        if self.duration_s == 0 || self.duration_s > DURATION_S_MAX {
            return Err(ScenarioError::Duration { duration_s: self.duration_s });
        }
        let records = self.duration_s.checked_div(self.record_s).unwrap_or(u64::MAX);
        if records > RECORDS_MAX {
            return Err(ScenarioError::Records { records });
        }
        if self.vms.is_empty() {
            return Err(ScenarioError::NoVm);
        }
        for (index, vm) in self.vms.iter().enumerate() {
            if self.vms[..index].iter().any(|other| other.name == vm.name) {
                return Err(ScenarioError::NameTaken { name: vm.name.clone() });
            }
            vm.check()?;
        }
        self.changes.iter().try_for_each(|change| self.check_change(change))
    }

    fn check_change(&self, change: &Change) -> Result<(), ScenarioError> {
        let at_s = change.at_s;
        match &change.what {
            ChangeKind::Tax(_) | ChangeKind::Pool(_) => Ok(()),
            ChangeKind::Vm(index, _) if *index >= self.vms.len() => {
                Err(ScenarioError::NoSuchVm { at_s, index: *index })
            }
            ChangeKind::Vm(_, settings) => {
                settings.check().map_err(|source| ScenarioError::Change { at_s, source: source.into() })
            }
        }
    }
}

impl VmScript {
    fn check(&self) -> Result<(), ScenarioError> {
        let name = || self.name.clone();
        self.settings.check().map_err(|invalid| ScenarioError::Vm { name: name(), source: invalid })?;
        let memory = self.settings.memory;
        let beyond = |what| ScenarioError::BeyondMemory { name: name(), what, memory };
        let zero = |what| ScenarioError::ZeroRate { name: name(), what };
        if self.boot.touches > memory {
            return Err(beyond("boot"));
        }
        if self.boot.rate == PageCount::ZERO {
            return Err(zero("rate of its boot"));
        }
        if self.balloon.is_some_and(|balloon| balloon.rate == PageCount::ZERO) {
            return Err(zero("rate of its balloon"));
        }
        if self.stop_s.is_some_and(|stop_s| stop_s <= self.start_s) {
            return Err(ScenarioError::StopsFirst { name: name() });
        }
        for (index, phase) in self.phases.iter().enumerate() {
            if phase.active > memory {
                return Err(beyond("working set"));
            }
            if phase.touched.is_some_and(|touched| touched > memory) {
                return Err(beyond("touched memory"));
            }
            if phase.touched.is_some_and(|touched| touched < phase.active) {
                return Err(ScenarioError::ActiveUntouched { name: name(), at_s: phase.at_s });
            }
            if phase.active > PageCount::ZERO && phase.rate == PageCount::ZERO {
                return Err(zero("rate of a phase"));
            }
            if index > 0 && self.phases[index - 1].at_s >= phase.at_s {
                return Err(ScenarioError::PhaseOrder { name: name(), at_s: phase.at_s });
            }
        }
        Ok(())
    }

    /// What the guest does so many seconds after its start: nothing before the first phase.
    pub(super) fn phase(&self, since_start_s: u64) -> Option<Phase> {
        let at_s = self.repeat_s.filter(|repeat| *repeat > 0).map_or(since_start_s, |repeat| since_start_s % repeat);
        // A recorded VM has thousands; they are in order.
        let begun = self.phases.partition_point(|phase| phase.at_s <= at_s);
        self.phases[..begun].last().copied()
    }
}
