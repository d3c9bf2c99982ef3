//! A VM that runs: its guest, an engine that holds it to a limit as the daemon's engine does, and what rounds remember of it.
//!
//! The engine reports what [`crate::fault::Machine`] would. It is armed while it has a limit below the VM's memory or pages in
//! swap. It pages out what the guest has beyond its limit less the headroom, at the disk's pace, and lets the guest grow to the
//! limit itself meanwhile. It reports once for each limit that the VM is near it.

use super::guest::{Guest, Limits, Step};
use super::scenario::VmScript;
use crate::fault::{headroom_at, headroom_max};
use crate::policy::growth::NearLimit;
use crate::policy::round::{Caps, EngineReport, Outcome, VmReport, VmRound, VmmKind};
use crate::policy::{Balloon, Run, VmId, VmSettings};
use crate::units::{Bytes, PageCount};

/// The least limit of a VM: what any VM needs to make progress, and a part of its memory (`pagoda_api::dram_bytes_min`).
const LIMIT_MIN: PageCount = Bytes::from_mib(64).pages_floor();
const LIMIT_MIN_PART: u64 = 64;
/// A VM that runs.
pub(super) struct Vm<'s> {
    /// Its place in the scenario.
    pub(super) index: usize,
    pub(super) script: &'s VmScript,
    pub(super) guest: Guest,
    /// What rounds remember of it.
    round: VmRound,
    /// What limits it beside the policy, as of the last report.
    caps: Caps,
    near_limit: NearLimit,
    /// Sampling periods that its engine has begun.
    sample_period: u64,
    /// Its balloon was asked for something: only then is it known whether there is a driver.
    is_balloon_driven: bool,
    pub(super) run: Run,
    pub(super) target: PageCount,
    pub(super) working_set: PageCount,
    /// The fewest pages page-out may leave it.
    pub(super) min: PageCount,
}

impl<'s> Vm<'s> {
    pub(super) fn new(index: usize, script: &'s VmScript, seed: u64, first_limit: Option<PageCount>) -> Vm<'s> {
        let settings = &script.settings;
        let mut vm = Vm {
            index,
            script,
            guest: Guest::new(script, seed),
            round: VmRound::default(),
            caps: caps(settings),
            near_limit: NearLimit::default(),
            sample_period: 0,
            is_balloon_driven: false,
            run: Run::Run,
            target: settings.cap,
            working_set: settings.memory,
            min: settings.min,
        };
        vm.round.set_first_limit(first_limit);
        vm.round.attached(vm.round.engine_limit(&vm.caps));
        vm
    }

    pub(super) fn id(&self) -> VmId {
        VmId(self.index as u32)
    }

    /// The limit that its engine enforces.
    pub(super) fn limit(&self) -> PageCount {
        self.round.sent()
    }

    /// Seconds since its start.
    fn age_s(&self, now_ms: u64) -> u64 {
        now_ms / 1000 - self.script.start_s
    }

    /// What the daemon would measure of it.
    pub(super) fn report(&mut self, now_ms: u64, settings: &VmSettings) -> VmReport {
        self.caps = caps(settings);
        let kinds = &self.guest.kinds;
        let engine = EngineReport {
            armed: self.limit() < settings.memory || kinds.swapped() > PageCount::ZERO,
            ram: kinds.resident(),
            resident: kinds.resident(),
            swapped: kinds.swapped(),
            sample: self.guest.sample_count(),
            sample_period: self.sample_period,
            ..EngineReport::default()
        };
        VmReport {
            id: self.id(),
            kind: self.script.balloon.map_or(VmmKind::Plain, |_| VmmKind::Qemu),
            memory: settings.memory,
            min: settings.min,
            round: self.round,
            engine: Some(engine),
            process: PageCount::ZERO,
            measured: Some(self.script.overhead.overhead),
            balloon: Some(self.balloon(now_ms)),
            pinned: false,
        }
    }

    fn balloon(&self, now_ms: u64) -> Balloon {
        match self.script.balloon {
            None => Balloon::Absent,
            Some(_) if !self.is_balloon_driven => Balloon::Inflated(PageCount::ZERO),
            Some(balloon) if self.age_s(now_ms) < balloon.after_s => Balloon::Absent,
            Some(_) => Balloon::Inflated(self.guest.kinds.balloon),
        }
    }

    /// Carries out what a round wants of it.
    pub(super) fn follow(&mut self, now_ms: u64, report: &VmReport, outcome: &Outcome) {
        if let Some(overhead) = report.measured {
            self.round.note_overhead(overhead);
        }
        if let Some(pages) = &outcome.sample {
            self.round.period_began(now_ms);
            self.sample_period += 1;
            self.guest.watch(pages);
        }
        let Some(orders) = &outcome.orders else { return };
        let steps = self.round.follow(orders, &self.caps, self.is_balloon_driven);
        if steps.send_limit {
            self.round.limit_sent(self.round.engine_limit(&self.caps));
        }
        self.is_balloon_driven |= steps.drive_balloon;
        self.run = steps.run;
    }

    /// Gives memory back, at the pace of its balloon driver and of its disk.
    pub(super) fn give(&mut self, step: Step, page_out: PageCount) {
        if let (Some(keeps), Balloon::Inflated(_)) = (self.round.keeps(), self.balloon(step.from_ms))
            && let Some(balloon) = self.script.balloon.filter(|_| self.is_balloon_driven)
        {
            let size = self.script.settings.memory.saturating_sub(keeps.pages_ceil());
            self.guest.balloon_to(size, step.part(balloon.rate));
        }
        self.page_out(step, page_out);
    }

    /// Lives for a step.
    pub(super) fn live(&mut self, limits: &Limits) {
        if self.run == Run::Block {
            self.guest.totals.blocked_ms += limits.step.ms;
            self.guest.speed = 0.0;
            return;
        }
        let phase = self.script.phase(self.age_s(limits.step.from_ms));
        self.guest.run(phase, self.script.reports_free, limits);
    }

    /// Keeps the headroom free below its limit.
    fn page_out(&mut self, step: Step, page_out: PageCount) {
        let (limit, resident) = (self.limit(), self.guest.kinds.resident());
        if limit < self.script.settings.memory {
            let over = (resident + self.headroom(limit)).saturating_sub(limit);
            self.guest.page_out(over.min(step.part(page_out)));
        }
    }

    /// What its engine keeps free below a limit: much while the guest boots, because whole chunks come in then, and little
    /// while it works, because it uses its working set at random.
    fn headroom(&self, limit: PageCount) -> PageCount {
        PageCount(headroom_at(limit.0, self.guest.is_booting()))
    }

    /// Whether its engine reports now that it is near its limit.
    pub(super) fn look_at_limit(&mut self) -> bool {
        let limit = self.limit();
        limit < self.script.settings.memory
            && self.near_limit.look(self.guest.kinds.resident(), limit, headroom_max(limit))
    }
}

/// What limits it beside the policy.
fn caps(settings: &VmSettings) -> Caps {
    let VmSettings { memory, cap, min, .. } = *settings;
    let least = PageCount(memory.0 / LIMIT_MIN_PART).max(LIMIT_MIN).min(memory);
    Caps { memory, cap, own: cap, min, least }
}
