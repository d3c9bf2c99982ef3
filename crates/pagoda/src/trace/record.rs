//! Makes a scenario of what the daemon says of its VMs, poll by poll. It reads no clock, and touches no file.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use pagoda_api::{HostPolicy, VmInfo, VmState};

use crate::simulate::file;
use crate::units::{format_exact, format_per_mille};

/// Pages a second that a guest's balloon driver is held to move: what the policy asks of one at most.
const BALLOON_RATE: &str = "256M";

/// What has been seen so far.
pub struct Recorder {
    title: String,
    interval_s: u64,
    /// The time of the last poll, in seconds.
    at_s: u64,
    /// At the first poll and at the last.
    host: Option<[HostPolicy; 2]>,
    /// The largest pool that was set, which is the scenario's; what there was at times are changes.
    pool_bytes: u64,
    vms: Vec<Recorded>,
    /// The VM of a name that is there now.
    current: BTreeMap<String, usize>,
    changes: Vec<file::ChangeEntry>,
}

struct Recorded {
    pid: Option<u32>,
    start_s: u64,
    settings: Settings,
    entry: file::Vm,
}

/// What an operator may change of a running VM.
#[derive(Clone, PartialEq, Eq)]
struct Settings {
    dram_bytes: u64,
    min_bytes: u64,
    shares: Option<u32>,
}

impl Settings {
    fn of(vm: &VmInfo) -> Settings {
        Settings {
            dram_bytes: vm.dram_limit_bytes,
            min_bytes: vm.policy.min_bytes.min(vm.dram_limit_bytes),
            // A daemon that has no policy says 0.
            shares: Some(vm.policy.shares).filter(|shares| *shares > 0),
        }
    }
}

impl Recorder {
    pub fn new(hostname: &str, interval_s: u64) -> Self {
        Self {
            title: format!("Recorded on {hostname}, every {interval_s} s"),
            interval_s,
            at_s: 0,
            host: None,
            pool_bytes: 0,
            vms: Vec::new(),
            current: BTreeMap::new(),
            changes: Vec::new(),
        }
    }

    /// VMs and points so far.
    pub fn counts(&self) -> (usize, usize) {
        (self.vms.len(), self.vms.iter().map(|vm| vm.entry.series.len()).sum())
    }

    /// Takes what the daemon says `at_s` seconds after the recording began.
    pub fn poll(&mut self, at_s: u64, host: &HostPolicy, vms: &[VmInfo]) {
        self.at_s = at_s;
        self.poll_host(at_s, host);
        let attached: Vec<&VmInfo> = vms.iter().filter(|vm| vm.state != VmState::Created).collect();
        let recorded = &mut self.vms;
        self.current.retain(|name, index| {
            let runs = attached.iter().any(|vm| vm.name == *name && vm.pid == recorded[*index].pid);
            if !runs {
                // A scenario's VM stops after it starts.
                recorded[*index].entry.stop = Some(seconds(at_s.max(recorded[*index].start_s + 1)));
            }
            runs
        });
        for vm in attached {
            self.poll_vm(at_s, vm);
        }
    }

    fn poll_host(&mut self, at_s: u64, now: &HostPolicy) {
        self.pool_bytes = self.pool_bytes.max(now.pool_bytes);
        let Some([_, last]) = &mut self.host else {
            self.host = Some([now.clone(), now.clone()]);
            self.pool_change(at_s, now);
            return;
        };
        let tax = (last.idle_tax != now.idle_tax).then(|| part(now.idle_tax));
        let is_other_pool = last.pool_now_bytes != now.pool_now_bytes;
        *last = now.clone();
        if tax.is_some() {
            let change = file::ChangeEntry { at: seconds(at_s), idle_tax: tax, ..file::ChangeEntry::default() };
            self.changes.push(change);
        }
        if is_other_pool {
            self.pool_change(at_s, now);
        }
    }

    fn pool_change(&mut self, at_s: u64, now: &HostPolicy) {
        let pool = Some(format_exact(now.pool_now_bytes));
        self.changes.push(file::ChangeEntry { at: seconds(at_s), pool, ..file::ChangeEntry::default() });
    }

    fn poll_vm(&mut self, at_s: u64, vm: &VmInfo) {
        let settings = Settings::of(vm);
        let index = match self.current.get(&vm.name) {
            Some(index) => *index,
            None => {
                self.vms.push(Recorded {
                    pid: vm.pid,
                    start_s: at_s,
                    settings: settings.clone(),
                    entry: entry(self.free_name(&vm.name), at_s, vm, &settings),
                });
                self.current.insert(vm.name.clone(), self.vms.len() - 1);
                self.vms.len() - 1
            }
        };
        let recorded = &mut self.vms[index];
        if recorded.settings != settings {
            recorded.settings = settings.clone();
            // All of them: in a scenario, what a change does not name is as at the start.
            self.changes.push(file::ChangeEntry {
                at: seconds(at_s),
                vm: Some(recorded.entry.name.clone()),
                shares: settings.shares,
                min: Some(format_exact(settings.min_bytes)),
                dram: Some(format_exact(settings.dram_bytes)),
                ..file::ChangeEntry::default()
            });
        }
        if vm.balloon.is_some() && recorded.entry.balloon.is_none() {
            let after = seconds(at_s - recorded.start_s);
            recorded.entry.balloon = Some(file::BalloonEntry { after, rate: BALLOON_RATE.into() });
        }
        let [active, touched] = use_mib(vm);
        if recorded.entry.series.last().is_none_or(|point| point[1..] != [active, touched]) {
            recorded.entry.series.push([at_s - recorded.start_s, active, touched]);
        }
    }

    /// A VM that was started anew is another one, by another name.
    fn free_name(&self, name: &str) -> String {
        let taken = |name: &str| self.vms.iter().any(|vm| vm.entry.name == name);
        let names = (2_u32..).map(|nth| format!("{name}.{nth}"));
        std::iter::once(name.to_owned()).chain(names).find(|name| !taken(name)).unwrap_or_default()
    }

    /// The scenario file so far.
    ///
    /// # Errors
    /// Nothing was polled yet.
    pub fn scenario(&self) -> Result<String> {
        let [first, _] = self.host.as_ref().context("the daemon was not asked yet")?;
        let threshold = |nth: usize| Some(part(first.thresholds[nth]));
        let file = file::File {
            title: self.title.clone(),
            duration: seconds(self.at_s + self.interval_s),
            host: file::Host {
                pool: format_exact(self.pool_bytes),
                idle_tax: Some(part(first.idle_tax)),
                thresholds: Some(file::ThresholdsEntry {
                    high: threshold(0),
                    soft: threshold(1),
                    hard: threshold(2),
                    low: threshold(3),
                    hysteresis: None,
                }),
                ..file::Host::default()
            },
            vms: self.vms.iter().map(|vm| vm.entry.clone()).collect(),
            changes: self.changes.clone(),
            ..file::File::default()
        };
        toml::to_string(&file).context("write the scenario as TOML")
    }
}

fn entry(name: String, at_s: u64, vm: &VmInfo, settings: &Settings) -> file::Vm {
    file::Vm {
        name,
        memory: format_exact(vm.memory_bytes),
        dram: Some(format_exact(settings.dram_bytes)),
        min: Some(format_exact(settings.min_bytes)),
        shares: settings.shares,
        share_group: vm.policy.share_group.clone(),
        sample_pages: Some(vm.policy.sampling.pages),
        sample_period: Some(seconds(vm.policy.sampling.period_s.into())),
        overhead: Some(format_exact(vm.policy.overhead_bytes)),
        start: Some(seconds(at_s)),
        ..file::Vm::default()
    }
}

/// MiB in use and touched, rounded to the nearest. Until the first sampling period has ended, all that is touched is
/// held to be in use, as by the policy.
fn use_mib(vm: &VmInfo) -> [u64; 2] {
    let mib = |bytes: u64| (bytes.min(vm.memory_bytes) + (1 << 19)) >> 20;
    let memory_mib = vm.memory_bytes >> 20;
    let touched = mib(vm.policy.touched_bytes.max(vm.resident_bytes + vm.swapped_bytes)).min(memory_mib);
    let active = vm.policy.active_bytes.map_or(touched, mib).min(touched);
    [active, touched]
}

fn seconds(seconds: u64) -> String {
    format!("{seconds}s")
}

/// Per mille as a scenario reads them.
fn part(per_mille: u16) -> String {
    format_per_mille(per_mille).replace(' ', "")
}

#[cfg(test)]
mod tests {
    use pagoda_core::simulate;

    use super::*;
    use crate::show::tests::squeezed;
    use crate::simulate::file::parse;

    const MIB: u64 = 1 << 20;

    fn host() -> HostPolicy {
        HostPolicy {
            pool_bytes: 6 << 30,
            pool_now_bytes: 6 << 30,
            idle_tax: 750,
            thresholds: [60, 40, 20, 10],
            ..HostPolicy::default()
        }
    }

    fn vm(name: &str, pid: u32, active_mib: u64, touched_mib: u64) -> VmInfo {
        let mut vm = squeezed(name);
        vm.pid = Some(pid);
        vm.resident_bytes = touched_mib * MIB;
        vm.swapped_bytes = 0;
        vm.policy.touched_bytes = touched_mib * MIB;
        vm.policy.active_bytes = Some(active_mib * MIB);
        vm
    }

    #[test]
    fn a_recording_is_a_scenario() {
        let mut recorder = Recorder::new("host1", 5);
        let mut web = vm("web", 1, 100, 300);
        recorder.poll(0, &host(), &[web.clone(), vm("db", 2, 500, 900)]);
        // Nothing new; then settings change, a VM is started anew and the host runs short.
        recorder.poll(5, &host(), &[web.clone(), vm("db", 2, 500, 900)]);
        web.policy.shares = 4000;
        web.policy.active_bytes = Some(200 * MIB);
        let short = HostPolicy { pool_now_bytes: 5 << 30, idle_tax: 0, ..host() };
        recorder.poll(10, &short, &[web.clone(), vm("db", 3, 50, 60)]);
        recorder.poll(15, &short, &[web.clone()]);
        assert_eq!(recorder.counts(), (3, 4));

        let text = recorder.scenario().unwrap();
        let scenario = parse(&text).unwrap();
        assert_eq!((scenario.duration_s, scenario.vms.len()), (20, 3), "{text}");
        let phases = |nth: usize| -> Vec<(u64, u64, u64)> {
            let mib = |pages: pagoda_core::units::PageCount| pages.bytes().0 >> 20;
            let vm = &scenario.vms[nth];
            vm.phases.iter().map(|p| (p.at_s, mib(p.active), mib(p.touched.unwrap()))).collect()
        };
        assert_eq!(phases(0), [(0, 100, 300), (10, 200, 300)]);
        assert_eq!(phases(2), [(0, 50, 60)]);
        let lives: Vec<_> = scenario.vms.iter().map(|vm| (vm.name.as_str(), vm.start_s, vm.stop_s)).collect();
        assert_eq!(lives, [("web", 0, None), ("db", 0, Some(10)), ("db.2", 10, Some(15))]);
        assert_eq!(scenario.vms[0].settings.shares.get(), 2000);
        let recording = simulate::run(&scenario).unwrap();
        assert_eq!((recording.refused.len(), recording.violations), (0, Default::default()));
        let web = recording.vms[0].points.last().unwrap();
        assert_eq!(web.active.bytes().0, 200 * MIB);
        assert_eq!((web.resident + web.swapped).bytes().0, 300 * MIB);
    }

    #[test]
    fn what_was_used_stays_within_what_was_touched() {
        let check = |active: Option<u64>, touched: u64, expected: [u64; 2]| {
            let mut vm = vm("a", 1, 0, touched);
            vm.policy.active_bytes = active.map(|mib| mib * MIB);
            assert_eq!(use_mib(&vm), expected);
        };
        check(Some(10), 20, [10, 20]);
        check(Some(30), 20, [20, 20]);
        check(None, 20, [20, 20]);
        check(Some(9000), 9000, [4096, 4096]);
    }
}
