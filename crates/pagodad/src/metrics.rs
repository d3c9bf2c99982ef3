//! All numbers as Prometheus text (OpenMetrics 1.0), and the table of them as documentation.
//!
//! Each metric is defined once: those of the engine in `pagoda_core::stats::CATALOGUE`, the others
//! in the tables of `catalogue`. Rendering is a pure function of what the daemon knows about its VMs, the host
//! and itself. A value that a VM does not have yet, for example before anything attached, is left out.

mod catalogue;
pub mod old_names;
mod value;

use std::fmt::{self, Write as _};

use pagoda_api::{
    HostInfo, HostSnapshots, Latency, RemotePool, RemoteServer, RoundWait, TierInfo, VmInfo, VmKind, VmState, counter,
};
use pagoda_core::policy::state::STATES;
use pagoda_core::stats::{CATALOGUE, MetricDef, MetricKind};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use self::catalogue::{
    ACTIVE, AUTOSNAPSHOT, BALLOON, FAULT_LATENCY, HOST, HOST_INFO, HOST_POLICY, HOST_SNAPSHOTS, HOST_STATE, MOVE,
    OUTBOX, OUTBOX_FIGURES, OUTBOX_PROFILE, POLICY, PROCESS, REMOTE, REMOTE_LATENCY, REMOTE_SERVER, ROUND_WAIT, Row,
    SNAPSHOTS, STATUS, TARGET, TIER, TIER_LATENCY, VM, VM_INFO, VM_STATE,
};
pub use self::value::ProcessInfo;
use self::value::Value;
use crate::policy::report::STATUSES;

/// What the reply to `GET /metrics` is, so that scrapers take the right parser.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The text of `GET /metrics`.
#[must_use]
pub fn render(vms: Vec<VmInfo>, host: HostInfo, process: ProcessInfo) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot { vms, host, process }));
    let mut text = String::new();
    // Writing to a String cannot fail; an encoder that did would leave what it wrote.
    let _ = prometheus_client::encoding::text::encode(&mut text, &registry);
    old_names::with_old_families(&text)
}

/// Every metric as a Markdown document: `docs/metrics.md`, and what `pagodad --list-metrics` prints.
#[must_use]
pub fn catalogue_table() -> String {
    let mut text = String::from(catalogue::INTRODUCTION);
    let mut row = |name: &str, kind: MetricKind, labels: &str, unit: &str, help: &str| {
        let (suffix, kind) = match kind {
            MetricKind::Counter => ("_total", "counter"),
            MetricKind::Gauge => ("", "gauge"),
        };
        let _ = writeln!(text, "| `{name}{suffix}` | {kind} | {labels} | {unit} | {help} |");
    };
    for def in CATALOGUE {
        row(&format!("pagoda_vm_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in VM {
        row(&format!("pagoda_vm_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in BALLOON {
        row(&format!("pagoda_vm_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in AUTOSNAPSHOT {
        row(&format!("pagoda_vm_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in MOVE {
        row(&format!("pagoda_vm_move_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in OUTBOX {
        row(&format!("pagoda_vm_outbox_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in OUTBOX_FIGURES {
        row(&format!("pagoda_vm_outbox_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in OUTBOX_PROFILE {
        row(&format!("pagoda_vm_outbox_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in POLICY {
        row(&format!("pagoda_vm_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in TIER {
        row(&format!("pagoda_vm_tier_{}", def.name), def.kind, "vm, tier", def.unit, def.help);
    }
    for Row { def, .. } in REMOTE {
        row(&format!("pagoda_vm_remote_{}", def.name), def.kind, "vm", def.unit, def.help);
    }
    for Row { def, .. } in REMOTE_SERVER {
        row(&format!("pagoda_vm_remote_server_{}", def.name), def.kind, "vm, server", def.unit, def.help);
    }
    for (def, labels) in [
        (TIER_LATENCY, "vm, tier, op, quantile"),
        (REMOTE_LATENCY, "vm, op, class, quantile"),
        (TARGET, "vm"),
        (ACTIVE, "vm"),
        (STATUS, "vm, status"),
        (HOST_STATE, "state"),
        (ROUND_WAIT, "quantile"),
        (VM_STATE, "vm, state"),
        (FAULT_LATENCY, "vm, cause, quantile"),
        (VM_INFO, "vm, kind, accelerator"),
        (HOST_INFO, "version, hostname, kernel, large_folios, uffd_permission"),
        (SNAPSHOTS, "stage"),
    ] {
        row(def.name, def.kind, labels, def.unit, def.help);
    }
    let of_host = HOST.iter().map(|row| &row.def).chain(HOST_POLICY.iter().map(|row| &row.def));
    for def in of_host.chain(HOST_SNAPSHOTS.iter().map(|row| &row.def)) {
        row(&format!("pagoda_host_{}", def.name), def.kind, "", def.unit, def.help);
    }
    for Row { def, .. } in PROCESS {
        row(&format!("process_{}", def.name), def.kind, "", def.unit, def.help);
    }
    text
}

/// What one scrape shows: the VMs, the host and this process.
#[derive(Debug)]
struct Snapshot {
    vms: Vec<VmInfo>,
    host: HostInfo,
    process: ProcessInfo,
}

impl Snapshot {
    /// Encodes the metrics of outboxes, for VMs that have one.
    fn encode_outboxes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for Row { def, value } in OUTBOX {
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), value(vm.outbox.as_ref()?))));
            encode_metric(encoder, &format!("pagoda_vm_outbox_{}", def.name), *def, values)?;
        }
        for Row { def, value } in OUTBOX_FIGURES {
            let figures = |vm: &VmInfo| vm.outbox.as_ref()?.figures;
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), value(&figures(vm)?))));
            encode_metric(encoder, &format!("pagoda_vm_outbox_{}", def.name), *def, values)?;
        }
        for Row { def, value } in OUTBOX_PROFILE {
            let profile = |vm: &VmInfo| vm.outbox.as_ref()?.profile.clone();
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), value(&*profile(vm)?))));
            encode_metric(encoder, &format!("pagoda_vm_outbox_{}", def.name), *def, values)?;
        }
        Ok(())
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for def in CATALOGUE {
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), Value::Count(*vm.counters.get(def.name)?))));
            encode_metric(&mut encoder, &format!("pagoda_vm_{}", def.name), *def, values)?;
        }
        for Row { def, value } in VM {
            let values = self.vms.iter().map(|vm| (of_vm(vm), value(vm)));
            encode_metric(&mut encoder, &format!("pagoda_vm_{}", def.name), *def, values)?;
        }
        for Row { def, value } in BALLOON {
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), value(vm.balloon.as_ref()?))));
            encode_metric(&mut encoder, &format!("pagoda_vm_{}", def.name), *def, values)?;
        }
        for Row { def, value } in AUTOSNAPSHOT {
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), value(vm.autosnapshot.as_ref()?))));
            encode_metric(&mut encoder, &format!("pagoda_vm_{}", def.name), *def, values)?;
        }
        for Row { def, value } in MOVE {
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), value(vm.moving.as_deref()?))));
            encode_metric(&mut encoder, &format!("pagoda_vm_move_{}", def.name), *def, values)?;
        }
        self.encode_outboxes(&mut encoder)?;
        for Row { def, value } in POLICY {
            let values = self.vms.iter().map(|vm| (of_vm(vm), value(&vm.policy)));
            encode_metric(&mut encoder, &format!("pagoda_vm_{}", def.name), *def, values)?;
        }
        for Row { def, value } in TIER {
            let values = self.vms.iter().flat_map(tiers).map(|(labels, tier)| (labels, value(tier)));
            encode_metric(&mut encoder, &format!("pagoda_vm_tier_{}", def.name), *def, values)?;
        }
        encode_metric(&mut encoder, TIER_LATENCY.name, TIER_LATENCY, self.vms.iter().flat_map(tier_latencies))?;
        for Row { def, value } in REMOTE {
            let values = self.vms.iter().filter_map(|vm| Some((of_vm(vm), value(remote_pool(vm)?))));
            encode_metric(&mut encoder, &format!("pagoda_vm_remote_{}", def.name), *def, values)?;
        }
        for Row { def, value } in REMOTE_SERVER {
            let values = self.vms.iter().flat_map(remote_servers).map(|(labels, server)| (labels, value(server)));
            encode_metric(&mut encoder, &format!("pagoda_vm_remote_server_{}", def.name), *def, values)?;
        }
        encode_metric(&mut encoder, REMOTE_LATENCY.name, REMOTE_LATENCY, self.vms.iter().flat_map(remote_latencies))?;
        let known = |of: fn(&VmInfo) -> Option<u64>| {
            self.vms.iter().filter_map(move |vm| Some((of_vm(vm), Value::Count(of(vm)?))))
        };
        encode_metric(&mut encoder, TARGET.name, TARGET, known(|vm| vm.policy.target_bytes))?;
        encode_metric(&mut encoder, ACTIVE.name, ACTIVE, known(|vm| vm.policy.active_bytes))?;
        encode_metric(&mut encoder, STATUS.name, STATUS, self.vms.iter().flat_map(statuses))?;
        encode_metric(&mut encoder, HOST_STATE.name, HOST_STATE, host_states(&self.host))?;
        encode_metric(&mut encoder, ROUND_WAIT.name, ROUND_WAIT, round_waits(&self.host.policy.round_wait))?;
        encode_metric(&mut encoder, VM_STATE.name, VM_STATE, self.vms.iter().flat_map(states))?;
        encode_metric(&mut encoder, FAULT_LATENCY.name, FAULT_LATENCY, self.vms.iter().flat_map(latencies))?;
        encode_metric(&mut encoder, VM_INFO.name, VM_INFO, self.vms.iter().map(|vm| (vm_info(vm), Value::Count(1))))?;
        encode_metric(&mut encoder, HOST_INFO.name, HOST_INFO, [(host_info(&self.host), Value::Count(1))])?;
        for Row { def, value } in HOST {
            let values = [(Labels::new(), value(&self.host))];
            encode_metric(&mut encoder, &format!("pagoda_host_{}", def.name), *def, values)?;
        }
        for Row { def, value } in HOST_POLICY {
            let values = [(Labels::new(), value(&self.host.policy))];
            encode_metric(&mut encoder, &format!("pagoda_host_{}", def.name), *def, values)?;
        }
        encode_metric(&mut encoder, SNAPSHOTS.name, SNAPSHOTS, self.host.snapshots.iter().flat_map(snapshot_stages))?;
        for Row { def, value } in HOST_SNAPSHOTS {
            let values = self.host.snapshots.iter().map(|snapshots| (Labels::new(), value(snapshots)));
            encode_metric(&mut encoder, &format!("pagoda_host_{}", def.name), *def, values)?;
        }
        for Row { def, value } in PROCESS {
            let values = [(Labels::new(), value(&self.process))];
            encode_metric(&mut encoder, &format!("process_{}", def.name), *def, values)?;
        }
        Ok(())
    }
}

const US_PER_S: f64 = 1e6;

type Labels = Vec<(&'static str, String)>;

/// One metric with the values it has for each set of labels.
fn encode_metric(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    def: MetricDef,
    values: impl IntoIterator<Item = (Labels, Value)>,
) -> fmt::Result {
    let kind = match def.kind {
        MetricKind::Counter => MetricType::Counter,
        MetricKind::Gauge => MetricType::Gauge,
    };
    let mut encoder = encoder.encode_descriptor(name, def.help, None, kind)?;
    for (labels, value) in values {
        // An empty set of labels would be written as a pair of braces.
        if labels.is_empty() {
            encode_value(&mut encoder, def.kind, value)?;
        } else {
            encode_value(&mut encoder.encode_family(&labels)?, def.kind, value)?;
        }
    }
    Ok(())
}

fn encode_value(encoder: &mut MetricEncoder<'_>, kind: MetricKind, value: Value) -> fmt::Result {
    match kind {
        MetricKind::Counter => encoder.encode_counter::<NoLabelSet, _, u64>(&value, None),
        MetricKind::Gauge => encoder.encode_gauge(&value),
    }
}

fn of_vm(vm: &VmInfo) -> Labels {
    vec![("vm", escape(&vm.name))]
}

/// One value per state, so that a graph shows when it changed.
fn states(vm: &VmInfo) -> impl Iterator<Item = (Labels, Value)> {
    let all = [
        VmState::Created,
        VmState::Unmanaged { pid: 0, since_s: 0 },
        VmState::Running,
        VmState::Waiting,
        VmState::Stalled { reason: String::new(), since_s: 0 },
    ];
    all.into_iter().map(|state| {
        let mut labels = of_vm(vm);
        labels.push(("state", state.word().to_owned()));
        (labels, Value::Count(u64::from(state.word() == vm.state.word())))
    })
}

/// The VM's status with the policy, as a metric for each status: see [`states`].
fn statuses(vm: &VmInfo) -> impl Iterator<Item = (Labels, Value)> {
    STATUSES.into_iter().map(|status| {
        let mut labels = of_vm(vm);
        labels.push(("status", status.to_owned()));
        (labels, Value::Count(u64::from(status == vm.policy.status)))
    })
}

/// The host's state with the policy, as a metric for each state: see [`states`].
fn host_states(host: &HostInfo) -> impl Iterator<Item = (Labels, Value)> {
    STATES.into_iter().map(|state| {
        (vec![("state", state.name().to_owned())], Value::Count(u64::from(state.name() == host.policy.state)))
    })
}

fn snapshot_stages(snapshots: &HostSnapshots) -> impl Iterator<Item = (Labels, Value)> {
    let HostSnapshots { begun, filled, durable, lost, damaged, .. } = *snapshots;
    let counts = [("begun", begun), ("filled", filled), ("durable", durable), ("lost", lost), ("damaged", damaged)];
    counts.into_iter().map(|(stage, count)| (vec![("stage", stage.to_owned())], Value::Count(count.into())))
}

fn round_waits(wait: &RoundWait) -> impl Iterator<Item = (Labels, Value)> {
    let quantiles = [("0.5", wait.p50_us), ("0.99", wait.p99_us), ("1", wait.max_us)];
    let is_known = wait.rounds > 0;
    quantiles
        .into_iter()
        .filter(move |_| is_known)
        .map(|(quantile, us)| (vec![("quantile", quantile.to_owned())], Value::Real(us / US_PER_S)))
}

fn latencies(vm: &VmInfo) -> impl Iterator<Item = (Labels, Value)> {
    vm.latency.iter().filter(|(_, latency)| latency.count > 0).flat_map(|(cause, latency)| {
        let cause = cause.strip_prefix(counter::FAULTS_PREFIX).unwrap_or(cause);
        quantiles(vm, &[("cause", cause)], latency)
    })
}

/// The quantiles of a latency, with the VM's labels and these.
fn quantiles(vm: &VmInfo, more: &[(&'static str, &str)], latency: &Latency) -> [(Labels, Value); 2] {
    [("0.5", latency.p50_us), ("0.99", latency.p99_us)].map(|(quantile, us)| {
        let mut labels = of_vm(vm);
        labels.extend(more.iter().map(|(label, value)| (*label, escape(value))));
        labels.push(("quantile", quantile.to_owned()));
        (labels, Value::Real(us / US_PER_S))
    })
}

fn tiers(vm: &VmInfo) -> impl Iterator<Item = (Labels, &TierInfo)> {
    vm.tiers.iter().map(|tier| {
        let mut labels = of_vm(vm);
        labels.push(("tier", escape(&tier.name)));
        (labels, tier)
    })
}

fn tier_latencies(vm: &VmInfo) -> impl Iterator<Item = (Labels, Value)> {
    let of = |tier: &TierInfo| {
        [("read", tier.read), ("write", tier.write)]
            .into_iter()
            .filter(|(_, latency)| latency.count > 0)
            .flat_map(|(op, latency)| quantiles(vm, &[("tier", &tier.name), ("op", op)], &latency))
            .collect::<Vec<_>>()
    };
    vm.tiers.iter().flat_map(of)
}

fn remote_pool(vm: &VmInfo) -> Option<&RemotePool> {
    vm.remote.as_ref()?.pool.as_ref()
}

fn remote_servers(vm: &VmInfo) -> impl Iterator<Item = (Labels, &RemoteServer)> {
    remote_pool(vm).into_iter().flat_map(|pool| &pool.servers).map(|server| {
        let mut labels = of_vm(vm);
        labels.push(("server", server.id.to_string()));
        (labels, server)
    })
}

fn remote_latencies(vm: &VmInfo) -> impl Iterator<Item = (Labels, Value)> {
    remote_pool(vm)
        .into_iter()
        .flat_map(|pool| &pool.latency)
        .flat_map(|latency| quantiles(vm, &[("op", &latency.op), ("class", &latency.class)], &latency.took))
}

fn vm_info(vm: &VmInfo) -> Labels {
    let kind = match vm.kind {
        VmKind::Qemu => "qemu",
        VmKind::Plain => "plain",
    };
    let mut labels = of_vm(vm);
    labels.extend([("kind", kind.to_owned()), ("accelerator", escape(vm.accelerator.as_deref().unwrap_or_default()))]);
    labels
}

fn host_info(host: &HostInfo) -> Labels {
    vec![
        ("version", escape(&host.version)),
        ("hostname", escape(&host.hostname)),
        ("kernel", escape(&host.kernel)),
        ("large_folios", escape(&host.large_folios)),
        ("uffd_permission", escape(&host.uffd_permission)),
    ]
}

/// What a label's value may not have as it is (the text format's rules); the encoder writes values unchanged.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests;
