//! What the demo knows: the plan, where the guest is in it, and what the daemon says meanwhile.
//! Lines and samples come in, numbers come out. No terminal, no process, no clock.

use std::collections::VecDeque;
use std::time::Duration;

use pagoda_api::{VmInfo, counter};
use pagoda_guest::lines::Line;

const MIB: u64 = 1 << 20;
/// Rates are over this time: shorter ones flicker, longer ones lag behind the phases.
const RATE_WINDOW: Duration = Duration::from_secs(1);
/// How many seconds of history are kept.
pub const HISTORY_LEN: usize = 12;

/// The guest's own need besides the memory under test: kernel, initramfs, page tables.
const GUEST_RESERVE_MIB: u64 = 256;

/// What the guest is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub memory_mib: u64,
    pub dram_mib: u64,
    /// Memory that the guest's program writes and verifies.
    pub work_mib: u64,
    pub seconds: u64,
}

impl Plan {
    /// # Errors
    /// A sentence about sizes with which the guest cannot work over more than twice its DRAM.
    pub fn new(memory_mib: u64, dram_mib: u64, seconds: u64) -> Result<Self, String> {
        let room_mib = memory_mib.saturating_sub(GUEST_RESERVE_MIB);
        if room_mib <= dram_mib * 2 {
            let memory_min_mib = dram_mib * 2 + GUEST_RESERVE_MIB;
            return Err(format!(
                "with {memory_mib} MiB of memory and {dram_mib} MiB of DRAM the guest cannot work over more than twice \
                 its DRAM: give it more than {memory_min_mib}M of --memory, or less --dram"
            ));
        }
        Ok(Self { memory_mib, dram_mib, work_mib: (dram_mib * 5 / 2).min(room_mib), seconds })
    }

    /// The guest's part of the kernel command line.
    pub fn guest_words(&self) -> String {
        let Self { work_mib, seconds, .. } = self;
        let steps: Vec<String> = STEPS.iter().filter(|step| step.kind == Kind::Timed).map(|s| s.name.into()).collect();
        format!("pagoda.work={} pagoda.seconds={seconds} pagoda.mib={work_mib}", steps.join(","))
    }
}

/// How a phase ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// When the guest says that it is ready.
    Boot,
    /// When each page has been visited.
    Sweep,
    /// After so many seconds.
    Timed,
}

#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub name: &'static str,
    pub kind: Kind,
    pub does: &'static str,
}

/// In the order in which the guest does them; filling and verifying it does by itself.
const STEPS: [Step; 6] = [
    Step { name: "boot", kind: Kind::Boot, does: "an unmodified Debian kernel" },
    Step { name: "fill", kind: Kind::Sweep, does: "write every page" },
    Step { name: "seq", kind: Kind::Timed, does: "check, rewrite in order" },
    Step { name: "random", kind: Kind::Timed, does: "check, rewrite at random" },
    Step { name: "hot", kind: Kind::Timed, does: "a tenth gets 90 %" },
    Step { name: "verify", kind: Kind::Sweep, does: "check every word" },
];

/// How far a phase is, or how it went.
#[derive(Debug, Clone, Default)]
pub struct Phase {
    /// When it began and ended, since the VM's start.
    pub began: Option<Duration>,
    pub ended: Option<Duration>,
    pub ops: u64,
    /// How much a sweep has done, in MiB; a timed phase has none.
    pub mib_done: u64,
    pub bad: u64,
    pub resident_bytes_max: u64,
    /// Counters when it began, and the latest.
    swap_before: Swap,
    swap_after: Swap,
    /// By the guest's own clock.
    guest_us: u64,
}

impl Phase {
    pub fn pages_in(&self) -> u64 {
        self.swap_after.pages_in.saturating_sub(self.swap_before.pages_in)
    }

    pub fn pages_out(&self) -> u64 {
        self.swap_after.pages_out.saturating_sub(self.swap_before.pages_out)
    }

    pub fn time(&self, now: Duration) -> Duration {
        let Some(began) = self.began else { return Duration::ZERO };
        self.ended.unwrap_or(now).saturating_sub(began)
    }

    /// By the guest's own clock once it ended, before by ours.
    pub fn ops_per_s(&self, now: Duration) -> Option<f64> {
        let seconds = if self.guest_us > 0 { self.guest_us as f64 / 1e6 } else { self.time(now).as_secs_f64() };
        (self.ops > 0 && seconds > 0.0).then(|| self.ops as f64 / seconds)
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Swap {
    pages_in: u64,
    pages_out: u64,
}

/// The daemon's word at one moment.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Since the VM's start.
    pub at: Duration,
    pub vm: VmInfo,
    /// DRAM in the RAM file by the kernel's own account.
    pub ram_bytes: Option<u64>,
}

impl Sample {
    fn counter(&self, name: &str) -> u64 {
        self.vm.counters.get(name).copied().unwrap_or(0)
    }

    fn swap(&self) -> Swap {
        Swap { pages_in: self.counter(counter::PAGES_IN), pages_out: self.counter(counter::PAGES_OUT) }
    }
}

/// Faults of one cause.
#[derive(Debug, Clone, PartialEq)]
pub struct Cause {
    /// Such as `swap page`.
    pub name: String,
    pub faults: u64,
    pub faults_per_s: f64,
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
}

/// Pages from and to swap, in MiB per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SwapRate {
    pub in_mib: f64,
    pub out_mib: f64,
}

#[derive(Debug)]
pub struct Model {
    pub plan: Plan,
    pub phases: [Phase; STEPS.len()],
    pub guest_kernel: Option<String>,
    /// The guest's last word: `ok`, `bad N` or `error`.
    pub verdict: Option<String>,
    /// What it says of an error.
    pub guest_error: Option<String>,
    pub bad: u64,
    pub resident_bytes_max: u64,
    pub ram_bytes_max: u64,
    /// One a second, the newest last.
    pub history: VecDeque<SwapRate>,
    history_at: Duration,
    samples: VecDeque<Sample>,
}

impl Model {
    pub fn new(plan: Plan) -> Self {
        let mut phases: [Phase; STEPS.len()] = Default::default();
        phases[0].began = Some(Duration::ZERO);
        Self {
            plan,
            phases,
            guest_kernel: None,
            verdict: None,
            guest_error: None,
            bad: 0,
            resident_bytes_max: 0,
            ram_bytes_max: 0,
            history: VecDeque::new(),
            history_at: Duration::ZERO,
            samples: VecDeque::new(),
        }
    }

    pub fn steps(&self) -> impl Iterator<Item = (Step, &Phase)> {
        STEPS.into_iter().zip(&self.phases)
    }

    /// The phase that runs now.
    pub fn current(&self) -> Option<(Step, &Phase)> {
        self.steps().find(|(_, phase)| phase.began.is_some() && phase.ended.is_none())
    }

    /// Takes a line that the guest reported at `now`.
    pub fn apply_line(&mut self, now: Duration, line: &Line<'_>) {
        let number = |key| line.number(key).unwrap_or(0);
        match line.kind {
            "ready" => {
                self.guest_kernel = line.get("kernel").map(str::to_owned);
                self.end_phase(0, now);
            }
            "progress" => {
                let Some(index) = index_of(line) else { return };
                self.phases[index].ops = number("ops");
                self.phases[index].mib_done = number("mib");
                self.bad = self.bad.max(number("bad"));
            }
            "done" => {
                let Some(index) = index_of(line) else { return };
                let phase = &mut self.phases[index];
                (phase.ops, phase.bad, phase.guest_us) = (number("ops"), number("bad"), number("us"));
                self.bad = self.bad.max(self.phases.iter().map(|phase| phase.bad).sum());
                self.end_phase(index, now);
            }
            "bad" => self.bad += 1,
            "error" => self.guest_error = Some(line.text().to_owned()),
            "result" => self.verdict = line.result().map(str::to_owned),
            _ => {}
        }
    }

    fn end_phase(&mut self, index: usize, now: Duration) {
        self.phases[index].ended = Some(now);
        let swap = self.samples.back().map(Sample::swap).unwrap_or_default();
        if let Some(next) = self.phases.get_mut(index + 1) {
            next.began = Some(now);
            (next.swap_before, next.swap_after) = (swap, swap);
        }
    }

    /// Takes what the daemon says.
    pub fn apply_sample(&mut self, sample: Sample) {
        self.resident_bytes_max = self.resident_bytes_max.max(sample.vm.resident_bytes);
        self.ram_bytes_max = self.ram_bytes_max.max(sample.ram_bytes.unwrap_or(0));
        let running = self.phases.iter_mut().find(|phase| phase.began.is_some() && phase.ended.is_none());
        if let Some(phase) = running {
            phase.resident_bytes_max = phase.resident_bytes_max.max(sample.vm.resident_bytes);
            phase.swap_after = sample.swap();
        }
        let at = sample.at;
        self.samples.push_back(sample);
        // One sample at least as old as the window stays.
        while self.samples.get(1).is_some_and(|second| at.saturating_sub(second.at) >= RATE_WINDOW) {
            self.samples.pop_front();
        }
        if at.saturating_sub(self.history_at) >= RATE_WINDOW {
            self.history_at = at;
            self.history.push_back(self.swap_rate());
            if self.history.len() > HISTORY_LEN {
                self.history.pop_front();
            }
        }
    }

    /// The daemon's latest word.
    pub fn vm(&self) -> Option<&VmInfo> {
        self.samples.back().map(|sample| &sample.vm)
    }

    pub fn swap_rate(&self) -> SwapRate {
        let mib = |name| self.rate(name) * counter::PAGE_BYTES as f64 / MIB as f64;
        SwapRate { in_mib: mib(counter::PAGES_IN), out_mib: mib(counter::PAGES_OUT) }
    }

    /// All causes, in the daemon's order.
    pub fn causes(&self) -> Vec<Cause> {
        let Some(vm) = self.vm() else { return Vec::new() };
        let causes = vm.counters.iter().filter_map(|(key, faults)| {
            let name = key.strip_prefix(counter::FAULTS_PREFIX)?;
            let latency = vm.latency.get(key);
            Some(Cause {
                name: name.replace('_', " "),
                faults: *faults,
                faults_per_s: self.rate(key),
                p50_us: latency.map(|latency| latency.p50_us),
                p99_us: latency.map(|latency| latency.p99_us),
            })
        });
        causes.collect()
    }

    /// Pages read and written since the start.
    pub fn pages_in_out(&self) -> (u64, u64) {
        let swap = self.samples.back().map(Sample::swap).unwrap_or_default();
        (swap.pages_in, swap.pages_out)
    }

    fn rate(&self, name: &str) -> f64 {
        let (Some(old), Some(new)) = (self.samples.front(), self.samples.back()) else { return 0.0 };
        let seconds = new.at.saturating_sub(old.at).as_secs_f64();
        let delta = new.counter(name).saturating_sub(old.counter(name));
        if seconds > 0.0 { delta as f64 / seconds } else { 0.0 }
    }
}

fn index_of(line: &Line<'_>) -> Option<usize> {
    let name = line.get("phase")?;
    STEPS.iter().position(|step| step.name == name)
}

#[cfg(test)]
#[path = "model_tests.rs"]
pub mod tests;
