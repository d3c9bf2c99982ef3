use std::collections::BTreeMap;

use pagoda_api::{VmKind, VmState};

use super::*;

/// A VM with counters as given and `resident_mib` in DRAM.
pub fn vm(resident_mib: u64, counters: &[(&str, u64)]) -> VmInfo {
    VmInfo {
        name: "demo".into(),
        kind: VmKind::Qemu,
        state: VmState::Running,
        pinned: None,
        memory_bytes: 768 * MIB,
        dram_limit_bytes: 192 * MIB,
        resident_bytes: resident_mib * MIB,
        swapped_bytes: 300 * MIB,
        zero_bytes: (468 - resident_mib) * MIB,
        swap_used_bytes: 0,
        armed: true,
        huge: false,
        pid: None,
        accelerator: None,
        uffds: 2,
        counters: counters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        latency: BTreeMap::new(),
        tiers: Vec::new(),
        remote: None,
        waits: None,
        balloon: None,
        policy: pagoda_api::VmPolicy::default(),
        spec: pagoda_api::VmSpec::default(),
        autosnapshot: None,
        loading: false,
        resumed_unix_us: None,
        outbox: None,
        moving: None,
    }
}

pub fn plan() -> Plan {
    Plan::new(768, 192, 10).unwrap()
}

fn say(model: &mut Model, at_s: u64, text: &str) {
    model.apply_line(Duration::from_secs(at_s), &Line::parse(&format!("PAGODA {text}")).unwrap());
}

fn look(model: &mut Model, at_ms: u64, resident_mib: u64, counters: &[(&str, u64)]) {
    let at = Duration::from_millis(at_ms);
    model.apply_sample(Sample { at, vm: vm(resident_mib, counters), ram_bytes: Some(resident_mib * MIB) });
}

/// A model in which the guest did everything.
pub fn finished() -> Model {
    let mut model = Model::new(plan());
    look(&mut model, 1000, 80, &[("pages_out", 0), ("pages_in", 0)]);
    say(&mut model, 4, "ready kernel=6.1 cpus=2 mem_kib=1 boot=0");
    look(&mut model, 5000, 190, &[("pages_out", 80_000), ("pages_in", 100), ("faults_zero", 900)]);
    say(&mut model, 6, "done phase=fill pages=122880 ops=122880 bad=0 us=2000000");
    look(&mut model, 10_000, 189, &[("pages_out", 160_000), ("pages_in", 100_100), ("faults_zero", 900)]);
    say(&mut model, 16, "done phase=seq pages=122880 ops=1228800 bad=0 us=10000000");
    say(&mut model, 26, "done phase=random pages=122880 ops=100000 bad=0 us=10000000");
    say(&mut model, 36, "done phase=hot pages=122880 ops=300000 bad=0 us=10000000");
    say(&mut model, 38, "done phase=verify pages=122880 ops=122880 bad=0 us=2000000");
    say(&mut model, 38, "result ok");
    model
}

#[test]
fn plans_work_over_more_than_twice_the_dram() {
    for (memory, dram, work) in [(768, 192, Some(480)), (768, 250, Some(512)), (768, 256, None), (100, 64, None)] {
        let plan = Plan::new(memory, dram, 1);
        assert_eq!(plan.as_ref().map(|plan| plan.work_mib).ok(), work, "{memory} {dram}");
        assert!(plan.is_err() || work.is_some_and(|work| work > 2 * dram));
    }
    assert_eq!(plan().guest_words(), "pagoda.work=seq,random,hot pagoda.seconds=10 pagoda.mib=480");
}

#[test]
fn phases_follow_the_guest() {
    let mut model = Model::new(plan());
    assert_eq!(model.current().unwrap().0.name, "boot");
    say(&mut model, 4, "ready kernel=6.1 cpus=2 mem_kib=1 boot=0");
    say(&mut model, 5, "progress phase=fill pass=1 mib=100 of=480 ops=25600 bad=0");
    let (step, phase) = model.current().unwrap();
    assert_eq!((step.name, phase.mib_done, phase.ops), ("fill", 100, 25_600));
    assert_eq!(phase.time(Duration::from_secs(5)), Duration::from_secs(1));
    say(&mut model, 6, "done phase=fill pages=122880 ops=122880 bad=0 us=2000000");
    assert_eq!(model.current().unwrap().0.name, "seq");
    assert_eq!(model.phases[1].ops_per_s(Duration::from_secs(60)), Some(61_440.0));
    let model = finished();
    assert!(model.current().is_none());
    assert_eq!((model.verdict.as_deref(), model.bad), (Some("ok"), 0));
}

#[test]
fn pages_count_for_the_phase_in_which_they_moved() {
    let model = finished();
    let moved: Vec<_> = model.phases.iter().map(|phase| (phase.pages_in(), phase.pages_out())).collect();
    assert_eq!(moved[..3], [(0, 0), (100, 80_000), (100_000, 80_000)]);
    let peaks: Vec<_> = model.phases.iter().map(|phase| phase.resident_bytes_max / MIB).collect();
    assert_eq!(peaks[..3], [80, 190, 189]);
    assert_eq!((model.pages_in_out(), model.resident_bytes_max), ((100_100, 160_000), 190 * MIB));
}

#[test]
fn wrong_pages_are_counted_once() {
    let mut model = Model::new(plan());
    say(&mut model, 1, "bad page=1 word=0 expected=0x1 got=0x0 in=memory kind=zero");
    assert_eq!(model.bad, 1);
    say(&mut model, 2, "progress phase=seq pass=1 mib=1 of=480 ops=256 bad=1");
    say(&mut model, 3, "done phase=seq pages=122880 ops=122880 bad=1 us=1000");
    say(&mut model, 4, "result bad 1");
    assert_eq!((model.bad, model.verdict.as_deref()), (1, Some("bad 1")));
}

#[test]
fn rates_are_over_a_second() {
    let mut model = Model::new(plan());
    for tick in 0..=40 {
        look(&mut model, tick * 50, 100, &[("pages_in", tick * 256), ("pages_out", 0), ("faults_minor", tick * 10)]);
    }
    // 256 pages are 1 MiB, twenty times a second.
    assert_eq!(model.swap_rate(), SwapRate { in_mib: 20.0, out_mib: 0.0 });
    let causes = model.causes();
    assert_eq!((causes.len(), causes[0].name.as_str(), causes[0].faults_per_s), (1, "minor", 200.0));
    assert_eq!(model.history.len(), 2);
}
