use std::collections::BTreeMap;

use pagoda_api::{Latency, RemoteInfo, RemoteLatency};
use pagoda_core::stats::{METRICS, Metric};

use super::*;

fn vm() -> VmInfo {
    VmInfo {
        name: "web1".into(),
        kind: VmKind::Qemu,
        state: VmState::Stalled { reason: "swap disk full".into(), since_s: 7 },
        pinned: None,
        memory_bytes: 4 << 30,
        dram_limit_bytes: 1 << 30,
        resident_bytes: 1 << 29,
        swapped_bytes: 3 << 30,

        zero_bytes: 1 << 29,
        swap_used_bytes: 3 << 30,
        armed: true,
        huge: false,
        pid: Some(42),
        accelerator: Some("kvm".into()),
        uffds: 4,
        counters: CATALOGUE.iter().zip(100..).map(|(def, value)| (def.name.to_owned(), value)).collect(),
        latency: BTreeMap::from([
            ("faults_minor".into(), Latency { count: 9, p50_us: 2.5, p99_us: 1000.0 }),
            ("faults_zero".into(), Latency::default()),
        ]),
        tiers: vec![tier()],
        remote: Some(remote()),
        waits: None,
        balloon: Some(pagoda_api::BalloonInfo {
            target_bytes: 2 << 30,
            asked_bytes: Some(3 << 30),
            ballooned_bytes: 1 << 30,
            state: "inflating".into(),
            reason: "the guest is giving memory up".into(),
            since_s: 3,
            paged_out: true,
            retry_in_s: None,
            resisted: 5,
            fallbacks: 1,
            guest: None,
        }),
        policy: pagoda_api::VmPolicy {
            min_bytes: 1 << 28,
            shares: 2000,
            overhead_bytes: 64 << 20,
            touched_bytes: 7 << 29,
            active_bytes: Some(1 << 30),
            target_bytes: Some(3 << 29),
            limit_bytes: 1 << 30,
            status: "squeezed".into(),
            status_since_s: 11,
            ..pagoda_api::VmPolicy::default()
        },
        spec: pagoda_api::VmSpec::default(),
        autosnapshot: Some(pagoda_api::AutosnapshotInfo { next_in_s: 31, failures: 2, taken: 9, ..Default::default() }),
        loading: false,
        resumed_unix_us: None,
        outbox: Some(outbox()),
        moving: Some(Box::new(moving())),
    }
}

fn moving() -> pagoda_api::MoveStatus {
    let text = r#"{"vm":"web1","direction":"out","host":"host2","phase":"copying","sent_bytes":7340032,"left_bytes":1048576,
        "total_bytes":8388608,"round":2,"written_bytes_per_second":4096,"elapsed_ms":1500,"expected_downtime_ms":25,"outcome":"none"}"#;
    serde_json::from_str(text).expect("a move")
}

fn outbox() -> pagoda_api::OutboxInfo {
    let figures = pagoda_api::OutboxFigures {
        used_bytes: 48 << 20,
        written_bytes: 1 << 40,
        acknowledged_bytes: 1 << 39,
        readers: 3,
        refused_changes: 4,
        blocked_ms: 1250,
        ..Default::default()
    };
    pagoda_api::OutboxInfo {
        vm: "web1".into(),
        state: pagoda_api::OutboxState::Serving,
        problem: None,
        space_bytes: 32 << 20,
        charged_bytes: 48 << 20,
        pid: Some(43),
        figures: Some(figures),
        auto: None,
        profile: Some(Box::new(pagoda_api::OutboxProfile {
            jobs_begun: 12,
            jobs_ended: 11,
            arrivals_per_s: 0.25,
            response_p90_s: Some(4.5),
            verdict: Some("infeasible".into()),
            sending_ms: 1500,
            ..Default::default()
        })),
    }
}

fn tier() -> TierInfo {
    let read = Latency { count: 5, p50_us: 90.0, p99_us: 400.0 };
    TierInfo {
        name: "swap".into(),
        pages: 41,
        memory_bytes: 0,
        disk_bytes: 41 << 12,
        pages_in: 42,
        pages_out: 43,
        declined_pages: 44,
        read,
        write: Latency::default(),
    }
}

fn remote() -> RemoteInfo {
    let took = Latency { count: 7, p50_us: 128.0, p99_us: 2048.0 };
    let silent = RemoteServer { id: 2, datagram_bytes: 1200, ..RemoteServer::default() };
    let up =
        RemoteServer { id: 1, up: true, round_trip_us: 45, free_bytes: 1 << 30, pressure: 1, datagram_bytes: 1472 };
    let pool = RemotePool {
        held_bytes: 1 << 30,
        short_bytes: 1 << 26,
        window_pages: 256,
        requests: 21,
        resent: 22,
        hedged_reads: 23,
        dropped_datagrams: 24,
        bad_pages: 25,
        servers_given_up: 26,
        copies_left: 27,
        copies_joined: 28,
        lost_slabs: 29,
        given_back_slabs: 30,
        unmapped_pages: 31,
        latency: vec![RemoteLatency { op: "read".into(), class: "demand".into(), took }],
        servers: vec![up, silent],
    };
    RemoteInfo { copies: 2, pool_bytes: 1 << 29, pool: Some(pool) }
}

fn created() -> VmInfo {
    VmInfo {
        tiers: Vec::new(),
        remote: None,
        autosnapshot: None,
        outbox: None,
        moving: None,
        name: "db.2".into(),
        state: VmState::Created,
        pinned: Some("vfio".into()),
        accelerator: None,
        kind: VmKind::Plain,
        counters: BTreeMap::new(),
        latency: BTreeMap::new(),
        balloon: None,
        policy: pagoda_api::VmPolicy { status: "not_planned".into(), shares: 1000, ..pagoda_api::VmPolicy::default() },
        ..vm()
    }
}

fn host() -> HostInfo {
    HostInfo {
        draining: false,
        version: "0.1.0".into(),
        hostname: "a\"b\\c\nd".into(),
        kernel: "6.18.0".into(),
        memory_total_bytes: 64 << 30,
        memory_available_bytes: 32 << 30,
        state_dir: "/s".into(),
        swap_dir: "/w".into(),
        swap_free_bytes: 1 << 40,
        uffd_permission: "device".into(),
        large_folios: "1 MiB".into(),
        vms: 2,
        policy: pagoda_api::HostPolicy {
            pool_bytes: 48 << 30,
            pool_now_bytes: 40 << 30,
            used_bytes: 39 << 30,
            free_bytes: 1 << 30,
            idle_tax: 750,
            state: "soft".into(),
            state_since_s: 5,
            reserved_bytes: 2 << 30,
            stuck: Some("why".into()),
            round_wait: pagoda_api::RoundWait { rounds: 9, p50_us: 0.5, p99_us: 25.0, max_us: 4000.0 },
            ..pagoda_api::HostPolicy::default()
        },
        snapshots: Some(HostSnapshots {
            dir: "/i".into(),
            begun: 1,
            filled: 2,
            durable: 3,
            lost: 4,
            damaged: 5,
            own_bytes: 6 << 30,
        }),
    }
}

fn text() -> String {
    render(vec![vm(), created()], host(), ProcessInfo { resident_bytes: 12 << 20, cpu_seconds: 1.5 })
}

#[test]
fn the_text_is_the_golden_one() {
    let golden = include_str!("golden.txt");
    let text = text();
    if std::env::var_os("PAGODA_WRITE_DOCS").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/metrics/golden.txt"), &text).unwrap();
        return;
    }
    for (line, (ours, expected)) in text.lines().zip(golden.lines()).enumerate() {
        assert_eq!(ours, expected, "line {}", line + 1);
    }
    assert_eq!(text, golden);
}

#[test]
fn every_metric_has_help_and_type_once_and_samples_that_belong_to_it() {
    let text = text();
    let mut families: Vec<&str> = Vec::new();
    let mut samples = 0;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let name = rest.split(' ').next().unwrap();
            assert!(!families.contains(&name), "{name} twice");
            families.push(name);
        } else if !line.starts_with('#') {
            let name = line.split(['{', ' ']).next().unwrap();
            let family = families.last().unwrap();
            assert!(name == *family || name.strip_suffix("_total") == Some(family), "{line}");
            let value = line.rsplit(' ').next().unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            samples += 1;
        }
    }
    assert!(samples > METRICS);
    assert_eq!(text.matches("# HELP ").count(), families.len());
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn faults_by_cause_are_counters_of_the_catalogue() {
    let name = CATALOGUE[Metric::FaultsSwapChunk as usize].name;
    let value = vm().counters[name];
    assert!(text().contains(&format!("pagoda_vm_{name}_total{{vm=\"web1\"}} {value}\n")));
}

#[test]
fn docs_metrics_md_is_in_step_with_the_catalogue() {
    let written = include_str!("../../../../docs/metrics.md");
    assert_eq!(written, catalogue_table(), "run: pagodad --list-metrics > docs/metrics.md");
}

#[test]
fn the_own_process_is_measured() {
    let now = ProcessInfo::now();
    assert!(now.resident_bytes > 0);
}
