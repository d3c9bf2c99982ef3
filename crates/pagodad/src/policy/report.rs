//! What the API says of the policy: terms, statuses, what is wrong.

use pagoda_api::types::{ExplainLine, HostPolicy, SHARES_DEFAULT, Sampling, VmKind, VmPolicy};
use pagoda_core::policy::explain::{self, Line};
use pagoda_core::policy::follow_up::{Deviation, DeviationOf};
use pagoda_core::policy::plan::StuckReason;
use pagoda_core::policy::{PolicyStatus, ReclaimState};
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::{PAGE_SIZE, PageCount};

use super::Governor;
use crate::registry::Vm;

/// A VM's status before the first plan.
const NOT_PLANNED: &str = "not_planned";

/// One word for tables and programs.
fn status_word(status: PolicyStatus) -> &'static str {
    match status {
        PolicyStatus::AtEase => "at_ease",
        PolicyStatus::Squeezed => "squeezed",
        PolicyStatus::Blocked => "blocked",
        PolicyStatus::Pinned => "pinned",
    }
}

/// Every word that a status can have.
pub const STATUSES: [&str; 5] = ["at_ease", "squeezed", "blocked", "pinned", NOT_PLANNED];

/// What of a plan has not come true, behind the VM's name.
fn deviation_text(deviation: &Deviation) -> String {
    let since_s = deviation.for_ms / 1000;
    match deviation.of {
        DeviationOf::Limit { wanted, found } => {
            format!(
                "has {} in DRAM, and its limit is {}, without progress for {since_s} s",
                found.bytes(),
                wanted.bytes()
            )
        }
        DeviationOf::Balloon { wanted, found } => format!(
            "has {} in its balloon, which should hold {}, without progress for {since_s} s: see `pagoda vm explain`",
            found.bytes(),
            wanted.bytes()
        ),
        DeviationOf::Runs => format!("runs, and should have been stopped {since_s} s ago"),
        DeviationOf::Suspended => format!("is stopped, and should have run on {since_s} s ago"),
    }
}

/// Why nothing moves although it should.
pub fn stuck_text(reason: StuckReason) -> &'static str {
    match reason {
        StuckReason::NothingToTake => "every VM is at its min or pinned; lower a min, stop a VM, or enlarge the pool",
        StuckReason::BalloonsDoNotMove => "balloons were asked for memory and do not move",
        StuckReason::PageOutDoesNotMove => "page-out was asked for and has no effect: look at the swap disk",
    }
}

/// What a VM has in frames.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sharing {
    /// Bytes of the VM's pages whose content is a frame.
    pub shared_bytes: u64,
    /// Its part of the DRAM that these frames take.
    pub part_bytes: u64,
}

impl Sharing {
    pub fn of(stats: &Stats) -> Sharing {
        let bytes = |metric| stats.get(metric) * PAGE_SIZE;
        Sharing { shared_bytes: bytes(Metric::Shared), part_bytes: bytes(Metric::SharedPart) }
    }

    /// DRAM that it would take more.
    pub fn saved_bytes(self) -> u64 {
        self.shared_bytes.saturating_sub(self.part_bytes)
    }
}

impl Governor {
    /// A VM as the policy sees it. Memory is in bytes: what is in its own part of DRAM and what is in swap.
    pub fn describe(&self, vm: &Vm, resident: u64, swapped: u64, sharing: Sharing) -> VmPolicy {
        let state = self.lock();
        let now_ms = self.now_ms();
        let planned = state.rounds.last().and_then(|last| last.plan.vm(vm.governed.id));
        let estimate = state.rounds.policy.estimate(vm.governed.id).filter(|estimate| estimate.known);
        let sampling = state.rounds.policy.settings(vm.governed.id).map(|settings| settings.sampling);
        let limit = if vm.handle.is_some() { vm.governed.round.sent() } else { vm.limit() };
        VmPolicy {
            min_bytes: vm.record.spec.policy.min,
            shares: vm.record.spec.policy.shares.unwrap_or(SHARES_DEFAULT),
            share_group: vm.record.spec.share_group.clone(),
            sampling: sampling.map_or_else(Sampling::default, |of| Sampling { pages: of.pages, period_s: of.period_s }),
            overhead_bytes: bytes(vm.governed.round.overhead()),
            touched_bytes: resident + swapped + sharing.shared_bytes,
            active_bytes: estimate.map(|estimate| bytes(estimate.working_set)),
            target_bytes: planned.map(|vm| bytes(vm.terms.target)),
            limit_bytes: bytes(limit),
            shared_bytes: sharing.shared_bytes,
            saved_bytes: sharing.saved_bytes(),
            status: planned.map_or(NOT_PLANNED, |vm| status_word(vm.status)).to_owned(),
            status_since_s: planned.map_or(0, |vm| now_ms.saturating_sub(vm.status_since_ms) / 1000),
        }
    }

    /// The host's policy. What is summed over VMs is left to who knows them.
    pub fn describe_host(&self) -> HostPolicy {
        let state = self.lock();
        let host = state.rounds.policy.host();
        let at = host.thresholds;
        let reserved = state.rounds.policy.reserved();
        let mut policy = HostPolicy {
            pool_bytes: bytes(host.pool),
            pool_now_bytes: bytes(host.pool),
            free_bytes: bytes(host.pool),
            idle_tax: host.tax.per_mille().0,
            thresholds: [at.high.0, at.soft.0, at.hard.0, at.low.0],
            state: ReclaimState::High.name().to_owned(),
            reserved_bytes: bytes(reserved.memory),
            swap_reserved_bytes: bytes(reserved.swap),
            template_bytes: bytes(state.rounds.policy.templates()),
            outbox_bytes: bytes(state.rounds.policy.outboxes()),
            round_wait: state.waits.describe(),
            ..HostPolicy::default()
        };
        if let Some(last) = state.rounds.last() {
            policy.pool_now_bytes = bytes(last.pool.now);
            policy.pool_reason = last.pool.reason.clone();
            policy.used_bytes = bytes(last.host.used);
            policy.free_bytes = bytes(last.plan.free);
            policy.state = last.plan.state.name().to_owned();
            policy.state_since_s = self.now_ms().saturating_sub(last.plan.state_since_ms) / 1000;
            policy.stuck = last.plan.stuck.map(|(_, reason)| stuck_text(reason).to_owned());
            policy.shortfall_bytes = bytes(last.plan.shortfall);
        }
        policy
    }

    /// Why a VM has the memory it has, term by term; nothing before the first plan.
    pub fn explain(&self, vm: &Vm) -> Vec<ExplainLine> {
        let state = self.lock();
        let Some(last) = state.rounds.last() else { return Vec::new() };
        let lines = explain::explain(&state.rounds.policy, &last.plan, vm.governed.id, self.now_ms());
        let mut lines: Vec<ExplainLine> = lines.into_iter().map(line).collect();
        let mut more = |term: &str, value: String, reason: &str| {
            lines.push(ExplainLine { term: term.to_owned(), value, reason: reason.to_owned() });
        };
        let overhead = vm.governed.round.overhead();
        if overhead > PageCount::ZERO {
            more("overhead", overhead.bytes().to_string(), "the VMM's own memory and our tables, measured");
        }
        if let Some(limit) = vm.governed.round.limit() {
            let reason = "what its engine may have now; raised as memory is free, and by plans";
            more("limit", vm.limit().max(limit).bytes().to_string(), reason);
        }
        let is_blocked = last.plan.vm(vm.governed.id).is_some_and(|vm| vm.status == PolicyStatus::Blocked);
        match (vm.record.blocked, vm.record.kind) {
            (true, _) => {
                let since = vm.governed.block.since.map(|since| format!("for {} s", since.elapsed().as_secs()));
                let value = since.unwrap_or_else(|| "since before this daemon".to_owned());
                more("blocked", value, "stopped (QMP `stop`) until memory is found; released by itself");
            }
            (false, VmKind::Plain) if is_blocked => {
                let reason = "it would be stopped until memory is found, but a plain program has no monitor for that";
                more("blocked", "no".to_owned(), reason);
            }
            _ => {}
        }
        lines
    }

    /// What of the policy needs somebody's attention.
    pub fn problems<'a>(&self, vms: impl Iterator<Item = &'a Vm>) -> Vec<String> {
        let state = self.lock();
        let now_ms = self.now_ms();
        let Some(last) = state.rounds.last() else { return Vec::new() };
        let plan = &last.plan;
        let mut problems = Vec::new();
        let mut squeezed = Vec::new();
        for vm in vms {
            let name = &vm.record.name;
            if vm.record.blocked {
                let since_s = vm.governed.block.since.map_or(0, |since| since.elapsed().as_secs());
                problems.push(format!("{name} is blocked since {since_s} s until memory is found"));
            }
            problems
                .extend(vm.governed.deviations.iter().map(|deviation| format!("{name} {}", deviation_text(deviation))));
            if plan.vm(vm.governed.id).is_some_and(|vm| vm.status == PolicyStatus::Squeezed) {
                squeezed.push(name.as_str());
            }
        }
        if plan.state >= ReclaimState::Hard {
            let since_s = now_ms.saturating_sub(plan.state_since_ms) / 1000;
            let who = if squeezed.is_empty() { "nobody".to_owned() } else { squeezed.join(", ") };
            problems.push(format!(
                "memory is short: state {} since {since_s} s, {} free; squeezed: {who}",
                plan.state,
                plan.free.bytes()
            ));
        }
        if let Some((since_ms, reason)) = plan.stuck {
            let since_s = now_ms.saturating_sub(since_ms) / 1000;
            problems.push(format!("nothing was reclaimed for {since_s} s: {}", stuck_text(reason)));
        }
        if plan.shortfall > PageCount::ZERO {
            let why = last.pool.reason.as_deref().unwrap_or("more was promised than the pool holds");
            problems.push(format!("guarantees lack {}: {why}", plan.shortfall.bytes()));
        }
        problems
    }
}

fn line(line: Line) -> ExplainLine {
    let sign = if line.is_loss { "-" } else { "" };
    let value = line.pages.map_or_else(String::new, |pages| format!("{sign}{}", pages.bytes()));
    ExplainLine { term: line.term.to_owned(), value, reason: line.text }
}

fn bytes(pages: PageCount) -> u64 {
    pages.0.saturating_mul(pagoda_core::units::PAGE_SIZE)
}
