//! What the registry tells about VMs and the host.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use pagoda_api::types::{
    ApiError, BalloonInfo, Explain, ExplainLine, Health, HostInfo, Latency, MoveDirection, MoveStatus, OutboxInfo,
    OutboxState, RemoteInfo, TierInfo, VmInfo, VmState,
};
use pagoda_core::stats::{CATALOGUE, FAULT_CAUSES, Metric, Stats};
use pagoda_core::units::{Bytes, PAGE_SIZE};
use pagoda_pager::handle::{Handle, Status};
use pagoda_pager::latency::Histogram;
use pagoda_pager::tier::Report;
use pagoda_sys::host::FolioSize;

use super::{Registry, Vm};
use crate::balloon;
use crate::moves::board;
use crate::policy::host::read_memory;
use crate::policy::report::Sharing;
use crate::record::OperationKind;

impl Registry {
    /// All VMs, by name.
    pub fn list(&self) -> Vec<VmInfo> {
        let names: Vec<String> = self.lock().keys().cloned().collect();
        let moves = board::under_way(self);
        // One that ends meanwhile is left out, and nobody waits for its files.
        names.iter().filter_map(|name| self.find(name, &moves)).collect()
    }

    /// One VM, as of now.
    ///
    /// # Errors
    /// No such VM.
    pub fn get(&self, name: &str) -> Result<VmInfo, ApiError> {
        self.find(name, &board::under_way(self)).ok_or_else(|| self.missing(name))
    }

    fn find(&self, name: &str, moves: &[MoveStatus]) -> Option<VmInfo> {
        // The engine is asked without the lock: it may be waiting for its disk.
        let handle = self.lock().get(name)?.handle.clone();
        let status = handle.as_deref().map(Handle::fresh_status);
        let moving = moves.iter().find(|of| of.vm == name).cloned().map(Box::new);
        self.lock().get(name).map(|vm| VmInfo { moving, ..self.info(vm, status) })
    }

    fn info(&self, vm: &Vm, status: Option<Arc<Status>>) -> VmInfo {
        let memory_bytes: u64 = vm.record.memory();
        let attached = status.is_some();
        let status = status.unwrap_or_default();
        let gauge = |metric| status.stats.get(metric) * PAGE_SIZE;
        let resident_bytes = if status.armed { gauge(Metric::Resident) } else { status.ram_bytes };
        let swapped_bytes = gauge(Metric::Swapped);
        let shared_bytes = gauge(Metric::Shared);
        let borrowed_bytes = gauge(Metric::Borrowed);
        let counters = CATALOGUE.iter().zip(status.stats.values()).map(|(def, value)| (def.name.to_owned(), *value));
        let mut counters: BTreeMap<String, u64> = counters.collect();
        counters.insert("table_bytes".into(), status.table_bytes);
        let old = |(name, value): (&String, &u64)| Some((crate::metrics::old_names::of_counter(name)?, *value));
        let old: Vec<_> = counters.iter().filter_map(old).collect();
        counters.extend(old);
        VmInfo {
            name: vm.record.name.clone(),
            kind: vm.record.kind,
            state: state_of(vm, attached, &status),
            pinned: status.pinned.clone().or_else(|| vm.record.spec.pinned.clone()),
            memory_bytes,
            dram_limit_bytes: vm.record.dram(),
            resident_bytes,
            swapped_bytes,
            zero_bytes: memory_bytes.saturating_sub(resident_bytes + swapped_bytes + shared_bytes + borrowed_bytes),
            swap_used_bytes: status.swap_bytes,
            armed: status.armed,
            huge: attached && !status.armed && FolioSize::Huge.on_advice(),
            pid: (vm.record.pid.0 != 0).then_some(vm.record.pid.0),
            accelerator: vm.accelerator.clone(),
            uffds: if attached { crate::attach::UFFDS_PER_VM } else { 0 },
            counters,
            latency: latency_of(&status),
            tiers: status.tiers.iter().map(tier_of).collect(),
            remote: vm.record.remote.as_ref().map(|remote| RemoteInfo {
                copies: remote.copies,
                pool_bytes: status.stats.get(Metric::Remote) * PAGE_SIZE,
                pool: status.remote.as_ref().map(crate::remote::describe),
            }),
            waits: vm.refused.clone().or_else(|| status.waits.clone()),
            balloon: vm.balloon.as_ref().map(balloon::Handle::info),
            policy: self.governor.describe(vm, resident_bytes, swapped_bytes, Sharing::of(&status.stats)),
            spec: vm.record.spec.clone(),
            autosnapshot: vm.record.spec.autosnapshot.map(|_| self.timetables.info(vm.governed.id, Instant::now())),
            loading: vm.record.operation.is_some_and(|of| of.kind == OperationKind::Restore),
            resumed_unix_us: vm.resumed_unix_us,
            outbox: self.outbox_of(vm.record.token),
            moving: None,
        }
    }

    /// Why a VM has what it has, term by term.
    ///
    /// # Errors
    /// No such VM.
    pub fn explain(&self, name: &str) -> Result<Explain, ApiError> {
        let vm = self.get(name)?;
        let mut lines = self.lock().get(name).map_or_else(Vec::new, |vm| self.governor.explain(vm));
        let mut line = |term: &str, value: String, reason: &str| {
            lines.push(ExplainLine { term: term.to_owned(), value, reason: reason.to_owned() });
        };
        line("memory", Bytes(vm.memory_bytes).to_string(), "what the guest was given; its guest-physical RAM");
        let cap = if vm.dram_limit_bytes < vm.memory_bytes {
            "hard cap set with --dram; `pagoda vm set --dram` changes it"
        } else {
            "no cap: all of its memory may be in DRAM"
        };
        line("dram", Bytes(vm.dram_limit_bytes).to_string(), cap);
        line("resident", Bytes(vm.resident_bytes).to_string(), "pages in DRAM now");
        if let Some(of) = &vm.moving {
            let (value, reason) = move_words(of);
            line("move", value, &reason);
        }
        if let Some(outbox) = &vm.outbox {
            line("outbox", Bytes(outbox.charged_bytes).to_string(), &outbox_reason(outbox));
        }
        line("swapped", Bytes(vm.swapped_bytes).to_string(), "pages whose content is only in its swap file");
        if vm.policy.shared_bytes > 0 {
            let part = vm.counters.get("shared_part_pages").copied().unwrap_or(0) * PAGE_SIZE;
            let reason = format!("pages equal to others of its share group; {} of that counts as its own", Bytes(part));
            line("shared", Bytes(vm.policy.shared_bytes).to_string(), &reason);
        }
        line("zero", Bytes(vm.zero_bytes).to_string(), "never written, all zero, or given back by the guest: nowhere");
        line(
            "swap file",
            Bytes(vm.swap_used_bytes).to_string(),
            "on the disk, clean copies of resident pages included",
        );
        if let Some(remote) = &vm.remote {
            let reason = match remote.copies {
                1 => "in the pool's memory, before its swap file; one copy: a server that dies takes it with it",
                _ => "in the pool's memory, before its swap file; two copies: one server may die",
            };
            line("remote", Bytes(remote.pool_bytes).to_string(), reason);
        }
        match (&vm.pinned, vm.armed) {
            (Some(reason), _) => line("pinned", "yes".into(), &format!("nothing is evicted: {reason}")),
            (None, true) => line("armed", "yes".into(), "its cap is below its memory: Pagoda serves its page faults"),
            (None, false) => line(
                "armed",
                "no".into(),
                "no pressure: the kernel serves its faults, on huge pages where they are to be had",
            ),
        }
        explain_state(&vm.state, &mut line);
        if let Some(waits) = &vm.waits {
            line("waits", "yes".into(), &format!("it goes on by itself when this is over: {waits}"));
        }
        let counted = |name: &str| Bytes(vm.counters.get(name).copied().unwrap_or(0) * PAGE_SIZE);
        let (prefetched, used) = (counted("prefetched_pages"), counted("prefetched_used_pages"));
        if prefetched > Bytes::ZERO {
            let reason = format!("of its snapshot, because a VM of it needed them before; {used} was used since");
            line("prefetched", prefetched.to_string(), &reason);
        }
        if let Some(balloon) = &vm.balloon {
            explain_balloon(balloon, &mut line);
        }
        let waits = vm.counters.get("pin_waits").copied().unwrap_or(0);
        if waits > 0 {
            line(
                "pin waits",
                waits.to_string(),
                "times page-out waited for disk I/O of the VM that may hold pages pinned",
            );
        }
        Ok(Explain { lines })
    }

    /// The host as this daemon sees it.
    pub fn host(&self) -> HostInfo {
        let uname = rustix::system::uname();
        // Only shown: 0 stands for unknown here.
        let memory = read_memory().unwrap_or_default();
        let mut policy = self.governor.describe_host();
        let vms = self.lock();
        for vm in vms.values() {
            let stats = vm.handle.as_ref().map_or_else(Stats::default, |handle| handle.status().stats);
            let sharing = Sharing::of(&stats);
            policy.swapped_bytes += stats.get(Metric::Swapped) * PAGE_SIZE;
            policy.shared_bytes += sharing.shared_bytes;
            policy.saved_bytes += sharing.saved_bytes();
            policy.ballooned_bytes += vm.balloon.as_ref().map_or(0, |balloon| balloon.info().ballooned_bytes);
        }
        let count = vms.len() as u32;
        drop(vms);
        let folio = |size: FolioSize| size.setting().map_or("not offered by the kernel", |setting| setting.word());
        HostInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: uname.nodename().to_string_lossy().into_owned(),
            kernel: uname.release().to_string_lossy().into_owned(),
            memory_total_bytes: memory.total.0,
            memory_available_bytes: memory.available.0,
            state_dir: self.config.state_dir.clone(),
            swap_dir: self.config.swap_dir.clone(),
            swap_free_bytes: pagoda_sys::swapfile::fs_free(&self.config.swap_dir).unwrap_or(0),
            uffd_permission: self.permission.clone(),
            large_folios: format!("1 MiB: {}, 2 MiB: {}", folio(FolioSize::Chunk), folio(FolioSize::Huge)),
            vms: count,
            draining: self.draining.is_on(),
            policy,
            snapshots: self.images.counted(),
        }
    }

    /// Whether anything needs somebody's attention.
    pub fn health(&self) -> Health {
        let mut problems: Vec<String> = self
            .list()
            .iter()
            .filter_map(|vm| match &vm.state {
                VmState::Stalled { reason, since_s } => {
                    Some(format!("{} is stalled since {since_s} s: {reason}", vm.name))
                }
                VmState::Waiting => Some(format!("{} waits: the agent in its process is away", vm.name)),
                VmState::Unmanaged { pid, since_s } => Some(format!(
                    "{} is UNMANAGED since {since_s} s: process {pid} has its memory and has not handed it over",
                    vm.name
                )),
                VmState::Created | VmState::Running => None,
            })
            .collect();
        problems.extend(self.timetables.problems());
        problems.extend(self.governor.problems(self.lock().values()));
        problems.extend(self.promises_problem());
        problems.extend(self.outbox_problems());
        problems.extend(self.parts.problems());
        problems.extend(cgroup_problem());
        Health { ok: problems.is_empty(), problems }
    }
}

fn explain_state(state: &VmState, line: &mut impl FnMut(&str, String, &str)) {
    match state {
        VmState::Created => line("state", "created".into(), "no program has attached yet"),
        VmState::Unmanaged { pid, since_s } => line(
            "state",
            format!("UNMANAGED for {since_s} s"),
            &format!("process {pid} has its memory and has not handed it over: nothing limits it"),
        ),
        VmState::Running => line("state", "running".into(), "its page faults are answered"),
        VmState::Waiting => line("state", "waiting".into(), "the agent in its process is away; what it needs waits"),
        VmState::Stalled { reason, since_s } => line("state", format!("stalled for {since_s} s"), reason),
    }
}

/// Where a VM moves, and how far that is.
fn move_words(of: &MoveStatus) -> (String, String) {
    let way = if of.direction == MoveDirection::In { "from" } else { "to" };
    let mut words = vec![of.phase.word().to_owned()];
    if of.round > 0 {
        words.push(format!("round {}: {} sent, {} left", of.round, Bytes(of.sent_bytes), Bytes(of.left_bytes)));
    }
    words.extend(of.expected_downtime_ms.map(|ms| format!("it would stand still for {ms} ms")));
    words.extend(of.waits.as_ref().map(|waits| format!("waits: {waits}")));
    (format!("{way} {}", of.host), format!("{}; `pagoda moves show {}` has more", words.join("; "), of.vm))
}

/// Why an outbox costs what it does.
fn outbox_reason(outbox: &OutboxInfo) -> String {
    let what = "kept of the pool beside the VM's memory, for files that its guest writes and the host sends";
    match (outbox.state, outbox.figures) {
        (OutboxState::Ended, _) => "its process has ended, and what was in it is gone".to_owned(),
        (_, Some(figures)) if outbox.is_draining() => format!(
            "{what}; its space is {}, and it holds {}: no new bytes until drained",
            Bytes(outbox.space_bytes),
            Bytes(figures.used_bytes)
        ),
        (_, Some(figures)) => {
            format!("{what}; {} of it used; `pagoda outbox set` changes it", Bytes(figures.used_bytes))
        }
        (_, None) => format!("{what}; how much of it is used is not known"),
    }
}

/// A daemon that the kernel ends for memory leaves every VM waiting.
fn cgroup_problem() -> Option<String> {
    match pagoda_sys::host::memory_limit() {
        Ok(limit) => limit.map(|limit| {
            format!(
                "pagodad's cgroup may use {} ({}), and guest pages that it brings in count: at the limit the kernel would \
                 end it, and all VMs would wait. Give it no limit (systemd: MemoryMax=infinity, MemoryHigh=infinity)",
                Bytes(limit.bytes),
                limit.file.display()
            )
        }),
        Err(error) => Some(format!("the memory limit of pagodad's cgroup cannot be read: {error}")),
    }
}

fn explain_balloon(balloon: &BalloonInfo, line: &mut impl FnMut(&str, String, &str)) {
    let target = Bytes(balloon.target_bytes).to_string();
    line("balloon target", target, "what the guest should keep, set with --balloon-target; `off` gives it all back");
    let ballooned = Bytes(balloon.ballooned_bytes).to_string();
    line("ballooned", ballooned, "given up by the guest to its balloon driver: neither in DRAM nor in swap");
    let since = format!("{} for {} s", balloon.state, balloon.since_s);
    match balloon.retry_in_s {
        Some(retry_s) => line("balloon", since, &format!("{}; tried again in {retry_s} s", balloon.reason)),
        None => line("balloon", since, &balloon.reason),
    }
    if balloon.paged_out {
        let reason = "it is paged out to its balloon target, until its guest can be asked";
        line("paged out instead", "yes".into(), reason);
    }
    if let Some(guest) = &balloon.guest {
        let reason = "memory the guest could give without paging, by its own account";
        line("guest available", Bytes(guest.available_bytes).to_string(), reason);
    }
}

fn state_of(vm: &Vm, attached: bool, status: &Status) -> VmState {
    if let Some((reason, since)) = &vm.stalled {
        return VmState::Stalled { reason: reason.clone(), since_s: since.elapsed().as_secs() };
    }
    if let Some(reason) = &status.stalled {
        return VmState::Stalled { reason: reason.clone(), since_s: status.stalled_for.as_secs() };
    }
    if let (false, 0, Some(taken)) = (attached, vm.record.pid.0, vm.taken) {
        return VmState::Unmanaged { pid: taken.by.pid, since_s: taken.at.elapsed().as_secs() };
    }
    match (attached, vm.record.pid.0) {
        (true, _) if status.agent => VmState::Running,
        (false, 0) => VmState::Created,
        _ => VmState::Waiting,
    }
}

fn tier_of(report: &Report) -> TierInfo {
    let Report { name, counts, reads, writes } = report;
    TierInfo {
        name: (*name).to_owned(),
        pages: counts.pages,
        memory_bytes: counts.memory_bytes,
        disk_bytes: counts.disk_bytes,
        pages_in: counts.pages_in,
        pages_out: counts.pages_out,
        declined_pages: counts.declined,
        read: quantiles(reads),
        write: quantiles(writes),
    }
}

fn quantiles(histogram: &Histogram) -> Latency {
    let us = |duration: std::time::Duration| duration.as_nanos() as f64 / 1000.0;
    let (p50_us, p99_us) = (us(histogram.quantile(0.5)), us(histogram.quantile(0.99)));
    Latency { count: histogram.count(), p50_us, p99_us }
}

fn latency_of(status: &Status) -> BTreeMap<String, Latency> {
    let of =
        |(cause, histogram): (&Metric, &Histogram)| (CATALOGUE[*cause as usize].name.to_owned(), quantiles(histogram));
    FAULT_CAUSES.iter().zip(&status.latency).filter(|(_, histogram)| histogram.count() > 0).map(of).collect()
}
