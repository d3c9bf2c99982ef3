//! The metrics that are not counted by an engine: each row has what a scrape shows and where it comes from.

use pagoda_api::{
    AutosnapshotInfo, BalloonInfo, HostInfo, HostPolicy, HostSnapshots, MoveStatus, OutboxFigures, OutboxInfo,
    OutboxProfile, RemotePool, RemoteServer, TierInfo, VmInfo, VmPolicy, VmState,
};
use pagoda_core::stats::{MetricDef, MetricKind};

use super::value::{ProcessInfo, Value};

/// The head of `docs/metrics.md`, above the table of metrics.
pub(super) const INTRODUCTION: &str = "\
# Metrics

`curl localhost:9464/metrics`, or the same path on the control socket, gives all of these as OpenMetrics text, which
Prometheus reads. Every fault is counted under exactly one of the `faults_*` causes, so their sum is the number of
faults. Counters of a VM start at zero when a daemon attaches it, so also when the daemon is replaced. `pagoda vm show
--json` has the same names without `pagoda_vm_` and `_total`.

Metrics of VMs that were renamed are exported under their old names as well, in this version only: `pagoda_vm_far_*` for
`pagoda_vm_remote_*`, `pagoda_vm_standing*` (label `standing`) for `pagoda_vm_status*`. Their help text says that they are
deprecated. The same holds for the counters in JSON.

This page is what `pagodad --list-metrics` prints; a test compares the two.

| name | kind | labels | unit | what it is |
|---|---|---|---|---|
";

/// One metric of a `T`.
pub(super) struct Row<T> {
    pub def: MetricDef,
    pub value: fn(&T) -> Value,
}

const fn gauge(name: &'static str, unit: &'static str, help: &'static str) -> MetricDef {
    MetricDef { name, kind: MetricKind::Gauge, unit, help }
}

/// The metrics of each VM, with the prefix `pagoda_vm_`.
pub(super) const VM: &[Row<VmInfo>] = &[
    Row { def: gauge("memory_bytes", "bytes", "Memory the guest has."), value: |vm| Value::Count(vm.memory_bytes) },
    Row {
        def: gauge("dram_limit_bytes", "bytes", "Most DRAM the VM may have."),
        value: |vm| Value::Count(vm.dram_limit_bytes),
    },
    Row { def: gauge("resident_bytes", "bytes", "Content in DRAM."), value: |vm| Value::Count(vm.resident_bytes) },
    Row {
        def: gauge("swapped_bytes", "bytes", "Content that is only in swap."),
        value: |vm| Value::Count(vm.swapped_bytes),
    },
    Row {
        def: gauge("zero_bytes", "bytes", "Memory that is nowhere, because it is all zero."),
        value: |vm| Value::Count(vm.zero_bytes),
    },
    Row {
        def: gauge("swap_used_bytes", "bytes", "Allocated on the swap disk, clean copies of resident pages included."),
        value: |vm| Value::Count(vm.swap_used_bytes),
    },
    Row {
        def: gauge("armed", "", "1 if registered with userfaultfd; a VM under no pressure is not."),
        value: |vm| Value::Count(u64::from(vm.armed)),
    },
    Row {
        def: gauge("huge", "", "1 if mapped by huge pages throughout."),
        value: |vm| Value::Count(u64::from(vm.huge)),
    },
    Row {
        def: gauge("pinned", "", "1 if nothing of the VM is ever evicted; `pagoda vm explain` says why."),
        value: |vm| Value::Count(u64::from(vm.pinned.is_some())),
    },
    Row {
        def: gauge("stalled_seconds", "seconds", "How long the VM has been stopped by Pagoda; 0 if it is not."),
        value: |vm| match vm.state {
            VmState::Stalled { since_s, .. } => Value::Count(since_s),
            _ => Value::Count(0),
        },
    },
];

const fn counter(name: &'static str, unit: &'static str, help: &'static str) -> MetricDef {
    MetricDef { name, kind: MetricKind::Counter, unit, help }
}

/// Of each VM with a timetable of snapshots, with the prefix `pagoda_vm_`.
pub(super) const AUTOSNAPSHOT: &[Row<AutosnapshotInfo>] = &[
    Row {
        def: counter("autosnapshots", "", "Snapshots taken by the VM's timetable."),
        value: |snapshots| Value::Count(snapshots.taken),
    },
    Row {
        def: counter("autosnapshot_failures", "", "Snapshots that were due by the VM's timetable and were not taken."),
        value: |snapshots| Value::Count(snapshots.failures),
    },
    Row {
        def: gauge(
            "autosnapshot_next_seconds",
            "seconds",
            "Until the next snapshot by the VM's timetable; 0 if it waits.",
        ),
        value: |snapshots| Value::Count(snapshots.next_in_s),
    },
];

/// Of each VM that has or had a balloon target, with the prefix `pagoda_vm_`.
pub(super) const BALLOON: &[Row<BalloonInfo>] = &[
    Row {
        def: gauge("balloon_target_bytes", "bytes", "Memory the guest should keep; all of it if its balloon is off."),
        value: |balloon| Value::Count(balloon.target_bytes),
    },
    Row {
        def: gauge("ballooned_bytes", "bytes", "Memory the guest has given up to its balloon."),
        value: |balloon| Value::Count(balloon.ballooned_bytes),
    },
    Row {
        def: gauge("balloon_paged_out", "", "1 if the VM is paged out to its balloon target, for no driver answers."),
        value: |balloon| Value::Count(u64::from(balloon.paged_out)),
    },
    Row {
        def: counter("balloon_resisted", "", "Times the guest fought back and was left alone for a while."),
        value: |balloon| Value::Count(balloon.resisted),
    },
    Row {
        def: counter("balloon_fallbacks", "", "Times paging out had to take the balloon's place."),
        value: |balloon| Value::Count(balloon.fallbacks),
    },
    Row {
        def: gauge(
            "guest_available_bytes",
            "bytes",
            "Memory the guest could give without paging, as it says; 0 if it does not.",
        ),
        value: |balloon| Value::Count(balloon.guest.map_or(0, |guest| guest.available_bytes)),
    },
    Row {
        def: gauge("guest_free_bytes", "bytes", "Memory free in the guest, as it says; 0 if it does not."),
        value: |balloon| Value::Count(balloon.guest.map_or(0, |guest| guest.free_bytes)),
    },
];

/// Of each VM that moves, from this host or to it, with the prefix `pagoda_vm_move_`.
pub(super) const MOVE: &[Row<MoveStatus>] = &[
    Row {
        def: gauge(
            "sent_bytes",
            "bytes",
            "Memory that the VM's move has sent so far; what was sent again counts again.",
        ),
        value: |of| Value::Count(of.sent_bytes),
    },
    Row {
        def: gauge("left_bytes", "bytes", "Memory that is still to be sent, as far as is known now."),
        value: |of| Value::Count(of.left_bytes),
    },
    Row {
        def: gauge("round", "", "The round that is under way; 0 before the first."),
        value: |of| Value::Count(of.round.into()),
    },
    Row {
        def: gauge("elapsed_seconds", "seconds", "Since the move began."),
        value: |of| Value::Real(of.elapsed_ms as f64 / 1000.0),
    },
    Row {
        def: gauge(
            "expected_downtime_seconds",
            "seconds",
            "How long the VM would stand still if it were stopped now; 0 if nobody knows.",
        ),
        value: |of| Value::Real(of.expected_downtime_ms.unwrap_or(0) as f64 / 1000.0),
    },
];

/// Of each VM with an outbox, with the prefix `pagoda_vm_outbox_`.
pub(super) const OUTBOX: &[Row<OutboxInfo>] = &[
    Row {
        def: gauge("space_bytes", "bytes", "Space that the VM's outbox is to have."),
        value: |outbox| Value::Count(outbox.space_bytes),
    },
    Row {
        def: gauge(
            "charged_bytes",
            "bytes",
            "What the pool keeps for the outbox: more than its space while it drains.",
        ),
        value: |outbox| Value::Count(outbox.charged_bytes),
    },
];

/// Of each VM whose outbox tells of jobs, with the same prefix.
pub(super) const OUTBOX_PROFILE: &[Row<OutboxProfile>] = &[
    Row {
        def: counter("jobs_begun", "", "Files that the guest began to write."),
        value: |profile| Value::Count(profile.jobs_begun),
    },
    Row {
        def: counter("jobs_ended", "", "Files that the guest has written and published."),
        value: |profile| Value::Count(profile.jobs_ended),
    },
    Row {
        def: counter("jobs_given_up", "", "Files that were removed before they were published."),
        value: |profile| Value::Count(profile.jobs_given_up),
    },
    Row {
        def: counter("jobs_lost", "", "Jobs of which the daemon knows no times."),
        value: |profile| Value::Count(profile.jobs_lost),
    },
    Row {
        def: counter("refused_writes", "", "Writes that got no space."),
        value: |profile| Value::Count(profile.refused_writes),
    },
    Row {
        def: counter("writer_waits_seconds", "seconds", "Time in which at least one write waited for room."),
        value: |profile| Value::Real(profile.blocked_ms as f64 / 1000.0),
    },
    Row {
        def: counter("sending_seconds", "seconds", "Time in which a client or a writer waited for the network."),
        value: |profile| Value::Real(profile.sending_ms as f64 / 1000.0),
    },
    Row {
        def: counter(
            "reading_seconds",
            "seconds",
            "Time in which clients had something to read, summed over clients: acknowledged bytes by it are the goodput of one.",
        ),
        value: |profile| Value::Real(profile.reading_ms as f64 / 1000.0),
    },
    Row {
        def: gauge("arrivals_per_second", "", "Jobs that begin in a second, of the periods that are kept."),
        value: |profile| Value::Real(profile.arrivals_per_s),
    },
    Row {
        def: gauge("compute_mean_seconds", "seconds", "Mean time of a job without its waits; 0 if none is known."),
        value: |profile| Value::Real(profile.compute_mean_s.unwrap_or(0.0)),
    },
    Row {
        def: gauge("output_mean_bytes", "bytes", "Mean size of what a job writes; 0 if none is known."),
        value: |profile| Value::Count(profile.output_mean_bytes.unwrap_or(0)),
    },
    Row {
        def: gauge("response_mean_seconds", "seconds", "Mean time of a job; 0 if none is known."),
        value: |profile| Value::Real(profile.response_mean_s.unwrap_or(0.0)),
    },
    Row {
        def: gauge("response_p90_seconds", "seconds", "What nine jobs of ten do not exceed; 0 if none is known."),
        value: |profile| Value::Real(profile.response_p90_s.unwrap_or(0.0)),
    },
    Row {
        def: gauge(
            "drain_bytes_per_second",
            "",
            "How fast the space drains while there is something to send; 0 if unknown.",
        ),
        value: |profile| Value::Count(profile.drain_bytes_per_s.unwrap_or(0)),
    },
    Row {
        def: gauge("wanted_bytes", "bytes", "Space that the SLO needs by the last decision; 0 without one."),
        value: |profile| Value::Count(profile.wanted_bytes.unwrap_or(0)),
    },
    Row {
        def: gauge("windows", "", "Windows with jobs of which it is known whether they kept the SLO, at most 30."),
        value: |profile| Value::Count(profile.windows),
    },
    Row {
        def: gauge("windows_kept", "", "Those of them that kept it."),
        value: |profile| Value::Count(profile.windows_kept),
    },
    Row {
        def: gauge("infeasible", "", "1 if no size keeps the SLO, else 0."),
        value: |profile| Value::Count(u64::from(profile.verdict.as_deref() == Some("infeasible"))),
    },
];

/// Of each VM whose outbox answers, with the same prefix.
pub(super) const OUTBOX_FIGURES: &[Row<OutboxFigures>] = &[
    Row {
        def: gauge("used_bytes", "bytes", "Memory that files have."),
        value: |outbox| Value::Count(outbox.used_bytes),
    },
    Row {
        def: counter("written_bytes", "bytes", "Bytes that the guest has written into the outbox."),
        value: |outbox| Value::Count(outbox.written_bytes),
    },
    Row {
        def: counter("acknowledged_bytes", "bytes", "Bytes that clients' TCP has acknowledged."),
        value: |outbox| Value::Count(outbox.acknowledged_bytes),
    },
    Row {
        def: counter("blocked_seconds", "seconds", "How long writes have waited for room, summed over writes."),
        value: |outbox| Value::Real(outbox.blocked_ms as f64 / 1000.0),
    },
    Row { def: gauge("readers", "", "Clients that read now."), value: |outbox| Value::Count(outbox.readers) },
    Row {
        def: counter("refused_changes", "", "Changes of bytes that were sent already, which were refused."),
        value: |outbox| Value::Count(outbox.refused_changes),
    },
];

/// Of each VM, by the memory policy, with the prefix `pagoda_vm_`.
pub(super) const POLICY: &[Row<VmPolicy>] = &[
    Row { def: gauge("min_bytes", "bytes", "DRAM guaranteed to the VM."), value: |vm| Value::Count(vm.min_bytes) },
    Row {
        def: gauge("shares", "", "Weight of the VM against the others."),
        value: |vm| Value::Count(u64::from(vm.shares)),
    },
    Row {
        def: gauge("overhead_bytes", "bytes", "What the VM costs beside its memory: its VMM's own and our tables."),
        value: |vm| Value::Count(vm.overhead_bytes),
    },
    Row {
        def: gauge("touched_bytes", "bytes", "Memory the VM has touched and still has, in DRAM or in swap."),
        value: |vm| Value::Count(vm.touched_bytes),
    },
    Row {
        def: gauge("limit_bytes", "bytes", "The cap the VM's engine keeps now: its own, the policy's, its balloon's."),
        value: |vm| Value::Count(vm.limit_bytes),
    },
    Row {
        def: gauge("shared_bytes", "bytes", "Content in frames that are shared."),
        value: |vm| Value::Count(vm.shared_bytes),
    },
    Row {
        def: gauge("saved_bytes", "bytes", "DRAM saved by sharing, the VM's part of the frames deducted."),
        value: |vm| Value::Count(vm.saved_bytes),
    },
    Row {
        def: gauge("status_seconds", "seconds", "How long the VM's status has been what it is."),
        value: |vm| Value::Count(vm.status_since_s),
    },
];

/// The metric of each VM that the policy has planned for.
pub(super) const TARGET: MetricDef =
    gauge("pagoda_vm_target_bytes", "bytes", "DRAM that the memory policy allots to the VM.");

/// The metric of each VM whose first sampling period is over.
pub(super) const ACTIVE: MetricDef = gauge("pagoda_vm_active_bytes", "bytes", "Estimated working set of the VM.");

/// Its label `status` has every status, with 1 for the VM's.
pub(super) const STATUS: MetricDef =
    gauge("pagoda_vm_status", "", "1 for how the VM stands with the memory policy, 0 for the others.");

/// Its label `state` has every state, with 1 for the host's.
pub(super) const HOST_STATE: MetricDef =
    gauge("pagoda_host_state", "", "1 for the state of reclamation, 0 for the others.");

/// The longest wait has the quantile 1.
pub(super) const ROUND_WAIT: MetricDef = gauge(
    "pagoda_policy_round_wait_seconds",
    "seconds",
    "How long rounds of the memory policy waited for the daemon's locks, since the daemon started: the quantile, by round.",
);

/// Of the host, by the memory policy, with the prefix `pagoda_host_`.
pub(super) const HOST_POLICY: &[Row<HostPolicy>] = &[
    Row {
        def: gauge("pool_bytes", "bytes", "DRAM for VMs and what they cost, as set."),
        value: |host| Value::Count(host.pool_bytes),
    },
    Row {
        def: gauge("pool_now_bytes", "bytes", "The pool now: less than set while the host itself runs short."),
        value: |host| Value::Count(host.pool_now_bytes),
    },
    Row {
        def: gauge("pool_used_bytes", "bytes", "What VMs, their outboxes and templates of snapshots take of the pool."),
        value: |host| Value::Count(host.used_bytes),
    },
    Row { def: gauge("pool_free_bytes", "bytes", "Free in the pool."), value: |host| Value::Count(host.free_bytes) },
    Row {
        def: gauge("idle_tax_ratio", "", "Idle memory tax."),
        value: |host| Value::Real(f64::from(host.idle_tax) / 1000.0),
    },
    Row {
        def: gauge("state_seconds", "seconds", "How long the state of reclamation has been what it is."),
        value: |host| Value::Count(host.state_since_s),
    },
    Row {
        def: gauge("reserved_bytes", "bytes", "Reserved of the pool by guarantees and overheads."),
        value: |host| Value::Count(host.reserved_bytes),
    },
    Row {
        def: gauge("swap_reserved_bytes", "bytes", "Reserved of the swap disk by all VMs."),
        value: |host| Value::Count(host.swap_reserved_bytes),
    },
    Row {
        def: gauge("shortfall_bytes", "bytes", "What guarantees lack because the host has less than the pool."),
        value: |host| Value::Count(host.shortfall_bytes),
    },
    Row {
        def: gauge("stuck", "", "1 if memory should be reclaimed and none is; `GET /v1/host` says why."),
        value: |host| Value::Count(u64::from(host.stuck.is_some())),
    },
    Row {
        def: gauge("ballooned_bytes", "bytes", "Memory that all guests have given up to their balloons."),
        value: |host| Value::Count(host.ballooned_bytes),
    },
    Row {
        def: gauge("template_bytes", "bytes", "DRAM of the templates of snapshots, which clones read."),
        value: |host| Value::Count(host.template_bytes),
    },
    Row {
        def: gauge("outbox_bytes", "bytes", "What the pool keeps for outboxes, also of VMs that have ended."),
        value: |host| Value::Count(host.outbox_bytes),
    },
];

/// Of each tier of a VM, with the prefix `pagoda_vm_tier_`.
pub(super) const TIER: &[Row<TierInfo>] = &[
    Row { def: gauge("pages", "pages", "Pages that the tier holds."), value: |tier| Value::Count(tier.pages) },
    Row {
        def: gauge("memory_bytes", "bytes", "Memory of this machine that the tier takes."),
        value: |tier| Value::Count(tier.memory_bytes),
    },
    Row {
        def: gauge("disk_bytes", "bytes", "Disk of this machine that the tier takes."),
        value: |tier| Value::Count(tier.disk_bytes),
    },
    Row { def: counter("in_pages", "pages", "Pages read from the tier."), value: |tier| Value::Count(tier.pages_in) },
    Row {
        def: counter("out_pages", "pages", "Pages written to the tier."),
        value: |tier| Value::Count(tier.pages_out),
    },
    Row {
        def: counter("declined_pages", "pages", "Pages that the tier did not take, so that the next one was asked."),
        value: |tier| Value::Count(tier.declined_pages),
    },
];

/// Its label `op` is read or write.
pub(super) const TIER_LATENCY: MetricDef = gauge(
    "pagoda_vm_tier_latency_seconds",
    "seconds",
    "How long a tier's part of a page-in or page-out took, since the VM attached: the quantile.",
);

/// Of each VM with a remote tier, by its client of the pool, with the prefix `pagoda_vm_remote_`.
pub(super) const REMOTE: &[Row<RemotePool>] = &[
    Row {
        def: gauge("held_bytes", "bytes", "Parts of the VM's memory that servers have, each counted once."),
        value: |remote| Value::Count(remote.held_bytes),
    },
    Row {
        def: gauge("short_bytes", "bytes", "Of these, parts with fewer copies in sync than the VM is to have."),
        value: |remote| Value::Count(remote.short_bytes),
    },
    Row {
        def: gauge("window_pages", "pages", "Pages of answers that may be under way: fewer after losses."),
        value: |remote| Value::Count(remote.window_pages),
    },
    Row {
        def: counter("requests", "requests", "Requests sent to servers."),
        value: |remote| Value::Count(remote.requests),
    },
    Row {
        def: counter(
            "resent",
            "requests",
            "Requests sent again: no answer in time, or later ones were answered before.",
        ),
        value: |remote| Value::Count(remote.resent),
    },
    Row {
        def: counter("hedged_reads", "pages", "Reads that took long and were asked of a second copy as well."),
        value: |remote| Value::Count(remote.hedged_reads),
    },
    Row {
        def: counter(
            "dropped_datagrams",
            "datagrams",
            "Datagrams that were malformed, not authentic, replayed, or late.",
        ),
        value: |remote| Value::Count(remote.dropped_datagrams),
    },
    Row {
        def: counter("bad_pages", "pages", "Pages that came back damaged or old, and were read elsewhere."),
        value: |remote| Value::Count(remote.bad_pages),
    },
    Row {
        def: counter("servers_given_up", "servers", "Servers that fell silent."),
        value: |remote| Value::Count(remote.servers_given_up),
    },
    Row {
        def: counter("copies_left", "slabs", "Copies of slabs that are no more in sync."),
        value: |remote| Value::Count(remote.copies_left),
    },
    Row {
        def: counter("copies_joined", "slabs", "Copies of slabs that were made anew."),
        value: |remote| Value::Count(remote.copies_joined),
    },
    Row {
        def: counter("lost_slabs", "slabs", "Slabs whose last copy is gone."),
        value: |remote| Value::Count(remote.lost_slabs),
    },
    Row {
        def: counter("given_back_slabs", "slabs", "Slabs that went back to their servers: the VM has nothing in them."),
        value: |remote| Value::Count(remote.given_back_slabs),
    },
    Row {
        def: counter(
            "unmapped_pages",
            "pages",
            "Pages that went to the swap file because nothing said in time which servers are to have them.",
        ),
        value: |remote| Value::Count(remote.unmapped_pages),
    },
];

/// Of each server that a VM's client of the pool knows, with the prefix `pagoda_vm_remote_server_`.
pub(super) const REMOTE_SERVER: &[Row<RemoteServer>] = &[
    Row {
        def: gauge("up", "0 or 1", "Whether the server answers the VM's client."),
        value: |server| Value::Count(server.up.into()),
    },
    Row {
        def: gauge("round_trip_seconds", "seconds", "To the server and back, smoothed."),
        value: |server| Value::Real(server.round_trip_us as f64 / 1e6),
    },
    Row {
        def: gauge("free_bytes", "bytes", "What the server may still lend, as its last answer said."),
        value: |server| Value::Count(server.free_bytes),
    },
    Row {
        def: gauge("pressure", "level", "0 none, 1 yellow, 2 orange (also while it is drained), 3 red."),
        value: |server| Value::Count(server.pressure.into()),
    },
    Row {
        def: gauge("datagram_bytes", "bytes", "The largest datagram that gets through."),
        value: |server| Value::Count(server.datagram_bytes),
    },
];

/// Its label `op` is read or write, its label `class` what it was for.
pub(super) const REMOTE_LATENCY: MetricDef = gauge(
    "pagoda_vm_remote_latency_seconds",
    "seconds",
    "How long reads from the pool and writes to it took, to the next power of two: the quantile, by class.",
);

/// Its label `state` has every state, with 1 for the one the VM is in.
pub(super) const VM_STATE: MetricDef = gauge("pagoda_vm_state", "", "1 for the state the VM is in, 0 for the others.");

/// Its label `cause` is that of the `faults_*` counters.
pub(super) const FAULT_LATENCY: MetricDef = gauge(
    "pagoda_vm_fault_latency_seconds",
    "seconds",
    "From reading a fault to answering it, since the VM attached: the quantile, by cause.",
);

pub(super) const VM_INFO: MetricDef = gauge("pagoda_vm_info", "", "What the VM is, in its labels; always 1.");

pub(super) const HOST_INFO: MetricDef =
    gauge("pagoda_host_info", "", "What the daemon and the host are, in the labels; always 1.");

/// The metrics of the host, with the prefix `pagoda_host_`.
pub(super) const HOST: &[Row<HostInfo>] = &[
    Row {
        def: gauge("memory_total_bytes", "bytes", "Memory of the host."),
        value: |host| Value::Count(host.memory_total_bytes),
    },
    Row {
        def: gauge("memory_available_bytes", "bytes", "Memory of the host that is free or easily freed."),
        value: |host| Value::Count(host.memory_available_bytes),
    },
    Row {
        def: gauge("swap_free_bytes", "bytes", "Free on the file system of the swap directory."),
        value: |host| Value::Count(host.swap_free_bytes),
    },
    Row { def: gauge("vms", "", "VMs the daemon has."), value: |host| Value::Count(u64::from(host.vms)) },
];

/// Its label `stage` has every stage; an image that is damaged has that as its stage.
pub(super) const SNAPSHOTS: MetricDef = gauge(
    "pagoda_host_snapshots",
    "",
    "Snapshots by stage: begun and filled are volatile; damaged is what cannot be used, whatever it was.",
);

/// Of all snapshots of the host, with the prefix `pagoda_host_`.
pub(super) const HOST_SNAPSHOTS: &[Row<HostSnapshots>] = &[Row {
    def: gauge("snapshot_bytes", "bytes", "What all snapshots take on the disk."),
    value: |snapshots| Value::Count(snapshots.own_bytes),
}];

/// Of the daemon's process, by the names every Prometheus client library gives them.
pub(super) const PROCESS: &[Row<ProcessInfo>] = &[
    Row {
        def: gauge("resident_memory_bytes", "bytes", "Memory of the daemon, VMs' RAM that it has mapped included."),
        value: |process| Value::Count(process.resident_bytes),
    },
    Row {
        def: MetricDef {
            name: "cpu_seconds",
            kind: MetricKind::Counter,
            unit: "seconds",
            help: "CPU time of the daemon, user and system.",
        },
        value: |process| Value::Real(process.cpu_seconds),
    },
];
