//! What `top` shows, as numbers: rates from two samples. It knows no terminal, and reads no clock.

use std::time::Duration;

use pagoda_api::{HostPolicy, Latency, VmInfo, counter};
use serde::Serialize;

use crate::policy::status;
use crate::show::state_words;

/// All VMs at one moment.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// When it was taken, since any fixed moment.
    pub at: Duration,
    pub host: HostPolicy,
    pub vms: Vec<VmInfo>,
}

/// One VM between two samples. A rate is `None` until there are two, and after a counter went back
/// because the VM or the daemon was started anew.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub name: String,
    pub state: String,
    /// Squeezed, pinned or blocked, and since when; `None` while nothing is kept from it.
    pub status: Option<String>,
    pub memory_bytes: u64,
    pub dram_limit_bytes: u64,
    pub resident_bytes: u64,
    pub touched_bytes: u64,
    /// Its working set; `None` until the first sampling period has ended.
    pub active_bytes: Option<u64>,
    /// What the policy allots to it; `None` before the first plan.
    pub target_bytes: Option<u64>,
    pub shared_bytes: u64,
    pub saved_bytes: u64,
    pub swapped_bytes: u64,
    pub zero_bytes: u64,
    /// Given up by the guest to its balloon, and what it should give up; `None` without a balloon target.
    pub ballooned_bytes: Option<u64>,
    pub balloon_wanted_bytes: Option<u64>,
    /// Of a VM with an outbox: its space; what of it is used and what its clients acknowledge, while its process says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox_used_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox_sent_bytes_per_s: Option<f64>,
    /// The part of its last period in which a writer waited for room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox_blocked: Option<f64>,
    /// Whether its SLO can be kept; nothing if its size is set by hand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outbox_slo: Option<String>,
    pub swap_read_bytes_per_s: Option<f64>,
    pub swap_write_bytes_per_s: Option<f64>,
    pub faults_per_s: Option<f64>,
    /// The latencies of the cause with the longest p99.
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
    pub causes: Vec<Cause>,
}

/// Faults of one cause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cause {
    pub cause: String,
    pub faults: u64,
    pub faults_per_s: Option<f64>,
    pub latency: Option<Latency>,
}

/// The rows for `now`, with rates since `before`.
pub fn rows(before: Option<&Sample>, now: &Sample) -> Vec<Row> {
    now.vms
        .iter()
        .map(|vm| {
            let old = before.and_then(|sample| {
                let same = |old: &&VmInfo| old.name == vm.name && old.pid == vm.pid;
                Some((sample.vms.iter().find(same)?, now.at.saturating_sub(sample.at)))
            });
            row(old, vm)
        })
        .collect()
}

fn row(old: Option<(&VmInfo, Duration)>, vm: &VmInfo) -> Row {
    let rate = |name: &str| {
        let (old, elapsed) = old?;
        let delta = value(vm, name).checked_sub(value(old, name))?;
        let seconds = elapsed.as_secs_f64();
        (seconds > 0.0).then(|| delta as f64 / seconds)
    };
    let bytes_rate = |name| rate(name).map(|pages| pages * counter::PAGE_BYTES as f64);
    let sent_per_s = || {
        let (old, elapsed) = old?;
        let [old, new] = [old, vm].map(|vm| vm.outbox.as_ref()?.figures);
        let (old, new) = (old?, new?);
        // Figures are as old as they say.
        let age = |ms: u64| Duration::from_millis(ms);
        let seconds = (elapsed + age(old.age_ms)).checked_sub(age(new.age_ms))?.as_secs_f64();
        let delta = new.acknowledged_bytes.checked_sub(old.acknowledged_bytes)?;
        (seconds > 0.0).then(|| delta as f64 / seconds)
    };
    let outbox_profile = vm.outbox.as_ref().and_then(|outbox| outbox.profile.as_deref());
    let outbox_figures = vm.outbox.as_ref().and_then(|outbox| outbox.figures);
    let causes: Vec<Cause> = vm
        .counters
        .keys()
        .filter_map(|name| Some((name, name.strip_prefix(counter::FAULTS_PREFIX)?)))
        .map(|(name, cause)| Cause {
            cause: cause.to_owned(),
            faults: value(vm, name),
            faults_per_s: rate(name),
            latency: vm.latency.get(name).or_else(|| vm.latency.get(cause)).copied(),
        })
        .collect();
    let slowest = vm.latency.values().filter(|latency| latency.count > 0).max_by(|a, b| a.p99_us.total_cmp(&b.p99_us));
    Row {
        name: vm.name.clone(),
        state: state_words(vm),
        status: status(&vm.policy),
        memory_bytes: vm.memory_bytes,
        dram_limit_bytes: vm.dram_limit_bytes,
        resident_bytes: vm.resident_bytes,
        touched_bytes: vm.policy.touched_bytes,
        active_bytes: vm.policy.active_bytes,
        target_bytes: vm.policy.target_bytes,
        shared_bytes: vm.policy.shared_bytes,
        saved_bytes: vm.policy.saved_bytes,
        swapped_bytes: vm.swapped_bytes,
        zero_bytes: vm.zero_bytes,
        ballooned_bytes: vm.balloon.as_ref().map(|balloon| balloon.ballooned_bytes),
        balloon_wanted_bytes: vm.balloon.as_ref().map(|balloon| vm.memory_bytes.saturating_sub(balloon.target_bytes)),
        outbox_bytes: vm.outbox.as_ref().map(|outbox| outbox.space_bytes),
        outbox_used_bytes: outbox_figures.map(|figures| figures.used_bytes),
        outbox_sent_bytes_per_s: sent_per_s(),
        outbox_blocked: outbox_profile.map(|profile| profile.blocked_share),
        outbox_slo: outbox_profile.and_then(|profile| profile.verdict.clone()),
        swap_read_bytes_per_s: bytes_rate(counter::PAGES_IN),
        swap_write_bytes_per_s: bytes_rate(counter::PAGES_OUT),
        // Every fault is counted under exactly one cause, so their sum is all.
        faults_per_s: causes.iter().map(|cause| cause.faults_per_s).sum(),
        p50_us: slowest.map(|latency| latency.p50_us),
        p99_us: slowest.map(|latency| latency.p99_us),
        causes,
    }
}

fn value(vm: &VmInfo, name: &str) -> u64 {
    vm.counters.get(name).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::tests::sample as vm;

    fn sample(at_s: u64, faults_minor: u64, pages_in: u64) -> Sample {
        let mut vm = vm("web1");
        vm.counters.insert("faults_minor".into(), faults_minor);
        vm.counters.insert("faults_zero".into(), 5);
        vm.counters.insert("pages_in".into(), pages_in);
        Sample { at: Duration::from_secs(at_s), vms: vec![vm], ..Sample::default() }
    }

    #[test]
    fn rates_come_from_two_samples() {
        let (old, new) = (sample(10, 100, 0), sample(12, 300, 512));
        let row = &rows(Some(&old), &new)[0];
        assert_eq!(row.faults_per_s, Some(100.0));
        assert_eq!(row.swap_read_bytes_per_s, Some(1_048_576.0));
        assert_eq!(row.swap_write_bytes_per_s, Some(0.0));
        assert_eq!(row.p99_us, Some(12.5));
        let causes: Vec<_> = row.causes.iter().map(|c| (c.cause.as_str(), c.faults_per_s)).collect();
        assert_eq!(causes, [("minor", Some(100.0)), ("zero", Some(0.0))]);
        assert_eq!(row.causes[0].latency.unwrap().count, 7);
    }

    #[test]
    fn what_outboxes_send() {
        let with = |at_s: u64, age_ms: u64, acknowledged_bytes: u64| {
            let mut sample = sample(at_s, 0, 0);
            let mut outbox = crate::outboxes::tests::sample("web1");
            outbox.figures = outbox.figures.map(|was| pagoda_api::OutboxFigures { age_ms, acknowledged_bytes, ..was });
            sample.vms[0].outbox = Some(outbox);
            sample
        };
        let rate = |old: &Sample, new: &Sample| rows(Some(old), new)[0].outbox_sent_bytes_per_s;
        assert_eq!(rate(&with(10, 500, 100), &with(12, 0, 350)), Some(100.0));
        assert_eq!(rate(&with(10, 0, 100), &with(10, 0, 100)), None);
        assert_eq!(rate(&with(10, 0, 100), &with(12, u64::MAX, 100)), None, "whatever it says");
        assert_eq!(rate(&with(10, 0, 100), &with(12, 0, 1)), None, "it was started anew");
        assert_eq!(rate(&sample(10, 0, 0), &with(12, 0, 1)), None);
    }

    #[test]
    fn no_rates_without_a_comparison() {
        let new = sample(12, 300, 512);
        assert_eq!(rows(None, &new)[0].faults_per_s, None);
        assert_eq!(rows(Some(&Sample::default()), &new)[0].faults_per_s, None);
        assert_eq!(rows(Some(&new), &new)[0].faults_per_s, None, "no time has passed");
        let restarted = sample(14, 1, 0);
        let row = &rows(Some(&new), &restarted)[0];
        assert_eq!((row.faults_per_s, row.swap_read_bytes_per_s), (None, None));
        let mut other_pid = sample(14, 400, 600);
        other_pid.vms[0].pid = Some(43);
        assert_eq!(rows(Some(&new), &other_pid)[0].faults_per_s, None);
    }
}
