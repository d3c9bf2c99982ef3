//! Guests by tables, and random scenarios whose promises must hold in every second.

use super::guest::{Guest, Kinds, Limits, Step};
use super::*;
use crate::chance::Chance;
use crate::policy::{HostSettings, Overhead, PerMille, Shares, TaxRate, VmSettings};
use crate::units::{Bytes, PageCount};

fn mib(mib: u64) -> PageCount {
    Bytes::from_mib(mib).pages_floor()
}

fn script(name: &str, memory: u64) -> VmScript {
    VmScript {
        name: name.to_owned(),
        settings: VmSettings::new(mib(memory)),
        overhead: Overhead::default(),
        start_s: 0,
        stop_s: None,
        boot: Boot { touches: mib(memory), rate: mib(100) },
        balloon: None,
        phases: vec![Phase { at_s: 0, active: mib(memory / 4), rate: mib(400), touched: None }],
        repeat_s: None,
        reports_free: false,
    }
}

fn scenario(pool: u64, vms: Vec<VmScript>) -> Scenario {
    Scenario {
        title: "test".into(),
        duration_s: 600,
        seed: 1,
        host: HostSettings::new(mib(pool)),
        hardware: Hardware::default(),
        vms,
        changes: Vec::new(),
        record_s: 1,
    }
}

const UNLIMITED: Limits = Limits {
    step: Step { from_ms: 0, ms: 1000 },
    limit: PageCount(1 << 30),
    free: PageCount(1 << 30),
    page_in: PageCount(1 << 20),
    page_out: PageCount(1 << 20),
    fault_us: 100,
};

fn booted(memory: u64) -> Guest {
    let mut guest = Guest::new(&script("a", memory), 1);
    (0..memory.div_ceil(100)).for_each(|_| guest.run(None, false, &UNLIMITED));
    assert_eq!(guest.kinds, Kinds { zero_in: mib(memory), ..Kinds::default() });
    guest
}

#[test]
fn a_guest_lives() {
    let mut guest = booted(400);
    let phase = |active: u64| Some(Phase { at_s: 0, active: mib(active), rate: mib(400), touched: None });
    guest.run(phase(100), false, &UNLIMITED);
    assert_eq!((guest.kinds.active_in, guest.kinds.zero_in, guest.speed), (mib(100), mib(300), 1.0));
    guest.run(phase(60), false, &UNLIMITED);
    assert_eq!((guest.kinds.active_in, guest.kinds.idle_in), (mib(60), mib(40)));
    // A twentieth of what leaves was in use: 10 MiB; zero pages leave without a write.
    guest.page_out(mib(200));
    assert_eq!(
        (guest.kinds.active_out, guest.kinds.zero_out, guest.kinds.resident()),
        (mib(10), PageCount(42918), mib(200))
    );
    assert_eq!(guest.totals.pages_out + guest.totals.zero_dropped, mib(200).0);
    let before = guest.totals.work_s;
    guest.run(phase(60), false, &UNLIMITED);
    assert!((0.3..0.4).contains(&guest.speed), "{}", guest.speed);
    assert!(guest.kinds.active_out < mib(10) && guest.totals.work_s > before && guest.totals.pages_in > 0);
    // The balloon takes what is not used first.
    guest.balloon_to(mib(300), mib(250));
    assert_eq!((guest.kinds.balloon, guest.kinds.zero_in + guest.kinds.zero_out), (mib(250), mib(50)));
    guest.balloon_to(mib(390), mib(400));
    assert_eq!(guest.kinds.all(), mib(400));
    guest.run(phase(60), false, &UNLIMITED);
    assert_eq!((guest.kinds.active(), guest.totals.short_ms), (mib(10), 1000), "the guest is short of memory");
    guest.balloon_to(PageCount::ZERO, mib(1000));
    guest.run(phase(60), true, &UNLIMITED);
    guest.run(phase(10), true, &UNLIMITED);
    assert_eq!((guest.kinds.active(), guest.kinds.idle_in), (mib(10), PageCount::ZERO), "given back");
}

#[test]
fn a_recorded_guest_holds_what_it_held() {
    let mut guest =
        Guest::new(&VmScript { boot: Boot { touches: PageCount::ZERO, rate: mib(1) }, ..script("a", 400) }, 1);
    let phase = |active: u64, touched: u64| {
        Some(Phase { at_s: 0, active: mib(active), rate: mib(400), touched: Some(mib(touched)) })
    };
    let (held, swapped) = (|guest: &Guest| guest.kinds.resident() + guest.kinds.swapped(), mib(100));
    guest.run(phase(50, 300), false, &UNLIMITED);
    assert_eq!((guest.kinds.active_in, held(&guest)), (mib(50), mib(300)));
    // What was swapped is still held, and what the guest frees leaves swap first.
    guest.page_out(swapped);
    assert_eq!((guest.kinds.swapped(), held(&guest)), (swapped, mib(300)));
    guest.run(phase(50, 220), false, &UNLIMITED);
    assert_eq!((guest.kinds.idle_out, held(&guest)), (guest.kinds.idle_out.min(swapped - mib(80)), mib(220)));
    assert_eq!(guest.kinds.all(), mib(400));
    // There is no room for more than the host has.
    let full = Limits { free: PageCount::ZERO, ..UNLIMITED };
    guest.run(phase(50, 400), false, &full);
    assert_eq!(held(&guest), mib(220));
}

#[test]
fn at_its_cap_a_guest_pages_against_itself() {
    let mut guest = booted(400);
    let limits = Limits { limit: mib(200), ..UNLIMITED };
    guest.page_out(mib(200));
    let phase = Some(Phase { at_s: 0, active: mib(150), rate: mib(400), touched: None });
    for _ in 0..30 {
        guest.run(phase, false, &limits);
        assert!(guest.kinds.resident() <= mib(200));
    }
    assert_eq!(guest.kinds.active_in, mib(150));
    let full = Limits { free: PageCount::ZERO, ..UNLIMITED };
    let mut guest = Guest::new(&script("a", 400), 1);
    guest.run(phase, false, &full);
    assert_eq!(guest.kinds.resident(), PageCount::ZERO, "without free memory it waits");
}

#[test]
fn the_steps_of_a_second_make_the_second() {
    for per_second in [0, 1, 7, 1000, 12_345] {
        let part = |from_ms: u64| Step { from_ms, ms: 100 }.part(PageCount(per_second));
        assert_eq!((20..30).map(|nth| part(nth * 100)).sum::<PageCount>(), PageCount(per_second));
    }
}

#[test]
fn a_balloon_takes_the_coldest_pages_first() {
    let mut guest = booted(400);
    let phase = |active: u64| Some(Phase { at_s: 0, active: mib(active), rate: mib(400), touched: None });
    guest.run(phase(400), false, &UNLIMITED);
    guest.run(phase(100), false, &UNLIMITED);
    guest.page_out(mib(100));
    let swapped = guest.kinds.idle_out;
    assert!(swapped >= mib(90) && guest.kinds.zero_in == PageCount::ZERO, "{:?}", guest.kinds);
    guest.balloon_to(swapped, mib(1000));
    assert_eq!((guest.kinds.idle_out, guest.kinds.resident()), (PageCount::ZERO, mib(300)));
}

#[test]
fn samples_show_the_working_set() {
    let mut guest = booted(1000);
    let pages: Vec<_> = (0..1000).map(|page| crate::units::PageIdx(page * 250)).collect();
    guest.watch(&pages);
    assert_eq!(guest.sample_count().touched, 0);
    let phase = Some(Phase { at_s: 0, active: mib(300), rate: mib(3000), touched: None });
    guest.run(phase, false, &UNLIMITED);
    let count = guest.sample_count();
    assert!((250..350).contains(&count.touched) && count.watched == 1000, "{count:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run_it = || {
        let recording = run(&scenario(300, vec![script("a", 256), script("b", 256)])).unwrap();
        recording
            .vms
            .iter()
            .flat_map(|vm| vm.points.iter().map(|point| (point.resident, point.working_set)))
            .collect::<Vec<_>>()
    };
    assert_eq!(run_it(), run_it());
}

#[test]
fn an_overcommitted_host_keeps_its_free_memory() {
    let recording = run(&scenario(400, vec![script("a", 256), script("b", 256)])).unwrap();
    assert_eq!(recording.violations, Default::default());
    let last = recording.host.last().unwrap();
    assert!(last.free >= mib(400 * 4 / 100) && last.swapped + last.zero > PageCount::ZERO, "{last:?}");
    let work = recording.vms.iter().map(|vm| vm.totals.work_s * 1000.0 / vm.totals.busy_ms as f64);
    assert!(work.fold(1.0, f64::min) > 0.9, "working sets fit, so everybody works");
}

#[test]
fn what_cannot_be_kept_is_not_started() {
    let mut vms = vec![script("a", 256), script("b", 256)];
    vms.iter_mut().for_each(|vm| vm.settings.min = mib(200));
    let recording = run(&scenario(300, vms)).unwrap();
    assert_eq!(recording.refused, ["b"]);
    assert!(recording.vms[1].points.is_empty());
}

#[test]
fn bad_scenarios_are_refused_by_name() {
    let check = |spoil: fn(&mut Scenario), expected: &str| {
        let mut bad = scenario(300, vec![script("a", 256), script("b", 256)]);
        spoil(&mut bad);
        let message = run(&bad).map(|_| ()).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    check(|s| s.duration_s = 0, "a duration of 0 s");
    check(|s| s.record_s = 0, "points would be kept");
    check(|s| s.vms.clear(), "no VM");
    check(|s| s.vms[1].name = "a".into(), "two VMs");
    check(|s| s.vms[0].settings.min = mib(300), "VM \"a\": a min of 300 MiB");
    check(|s| s.vms[0].boot.touches = mib(300), "a boot of more than its memory of 256 MiB");
    check(|s| s.vms[0].phases[0].active = mib(300), "a working set of more");
    check(|s| s.vms[0].phases[0].rate = PageCount(0), "a rate of a phase of 0");
    check(|s| s.vms[0].boot.rate = PageCount(0), "a rate of its boot of 0");
    check(|s| s.vms[0].phases = vec![s.vms[0].phases[0]; 2], "one after the other");
    check(|s| s.vms[0].stop_s = Some(0), "stops before it starts");
    check(|s| s.host.pool = PageCount(0), "host: a pool of 0 B");
    check(|s| s.changes.push(Change { at_s: 1, what: ChangeKind::Vm(2, VmSettings::new(mib(1))) }), "number 2");
    let min = |min: u64| ChangeKind::Vm(0, VmSettings { min: mib(min), ..VmSettings::new(mib(256)) });
    check(
        |s| s.changes.push(Change { at_s: 1, what: ChangeKind::Vm(0, VmSettings::new(PageCount(0))) }),
        "memory of 0 B",
    );
    let mut late = scenario(200, vec![script("a", 256)]);
    late.changes.push(Change { at_s: 5, what: min(250) });
    assert!(run(&late).map(|_| ()).unwrap_err().to_string().contains("the change at 5 s: the pool of 200 MiB"));
}

#[test]
fn promises_hold_in_random_scenarios() {
    for seed in 0..25 {
        let mut chance = Chance::new(seed);
        let vms = (0..chance.within(2, 9)).map(|index| random_vm(index, &mut chance)).collect();
        let mut random = Scenario { seed, ..scenario(chance.within(700, 2000), vms) };
        random.duration_s = 1200;
        for _ in 0..3 {
            let tax = TaxRate::new(PerMille(chance.below(1000) as u16)).unwrap();
            random.changes.push(Change { at_s: chance.below(1200), what: ChangeKind::Tax(tax) });
        }
        let pool = PageCount(random.host.pool.0 * chance.within(850, 1000) / 1000);
        random.changes.push(Change { at_s: chance.below(1200), what: ChangeKind::Pool(pool) });
        let recording = run(&random).unwrap();
        assert_eq!(recording.violations, Default::default(), "seed {seed}");
        for vm in &recording.vms {
            assert!(
                vm.totals.busy_ms < 300_000 || vm.totals.work_s > 0.0,
                "seed {seed}: {} makes no progress",
                vm.name
            );
        }
    }
}

fn random_vm(index: u64, chance: &mut Chance) -> VmScript {
    let memory = chance.within(64, 512);
    let mut vm = script(&format!("vm{index}"), memory);
    let size = |chance: &mut Chance, most: u64| PageCount(mib(memory).0 * chance.below(most) / 1000);
    vm.settings.min = size(chance, 400);
    vm.settings.shares = Shares::new(chance.within(1, 4000) as u32).unwrap();
    vm.start_s = chance.below(600);
    vm.stop_s = chance.per_mille(300).then(|| vm.start_s + chance.within(1, 600));
    vm.boot = Boot { touches: size(chance, 1001), rate: mib(chance.within(10, 400)) };
    let balloon = BalloonScript { after_s: chance.within(5, 60), rate: mib(chance.within(1, 100)) };
    vm.balloon = chance.per_mille(600).then_some(balloon);
    vm.reports_free = chance.per_mille(500);
    let memory = vm.settings.memory;
    let phase = |nth: u64, chance: &mut Chance| {
        let active = size(chance, 900);
        let touched = (nth % 2 == 1).then(|| (active + PageCount(active.0 / 4)).min(memory));
        Phase { at_s: nth * 100, active, rate: mib(chance.within(10, 1000)), touched }
    };
    vm.phases = (0..5).map(|nth| phase(nth, chance)).collect();
    vm
}
