//! Rounds over VMs that are described by hand.

use super::*;
use crate::policy::{Change, HostSettings, SwapSpace};

const fn mib(mib: u64) -> PageCount {
    PageCount(mib << 8)
}

const ID: VmId = VmId(1);

fn host(now_s: u64, available_mib: u64) -> HostReport {
    let memory =
        HostMemory { total: Bytes::from_mib(16 << 10), available: Bytes::from_mib(available_mib), stalled: None };
    HostReport {
        now_ms: now_s * 1000,
        memory,
        available_min: None,
        templates: PageCount::ZERO,
        outboxes: PageCount::ZERO,
        outboxes_held: PageCount::ZERO,
        elastic: Elastic::default(),
    }
}

fn rounds(pool_mib: u64, vms: &[(VmId, VmSettings)]) -> Rounds {
    let mut rounds = Rounds::new(Policy::new(HostSettings::new(mib(pool_mib))).unwrap(), 1);
    for (id, settings) in vms {
        let overhead = rounds.expected_overhead(VmmKind::Qemu, settings);
        rounds.policy.add(*id, settings.clone(), overhead, &SwapSpace::empty(PageCount(u64::MAX))).unwrap();
    }
    rounds
}

fn report(id: VmId, memory_mib: u64, engine: EngineReport) -> VmReport {
    VmReport {
        id,
        kind: VmmKind::Qemu,
        memory: mib(memory_mib),
        min: PageCount::ZERO,
        round: VmRound { sent: mib(memory_mib), ..VmRound::default() },
        engine: Some(engine),
        process: PageCount::ZERO,
        measured: None,
        balloon: Some(Balloon::Absent),
        pinned: false,
    }
}

fn armed(resident_mib: u64) -> EngineReport {
    EngineReport { armed: true, resident: mib(resident_mib), ..EngineReport::default() }
}

fn caps(memory_mib: u64) -> Caps {
    let memory = mib(memory_mib);
    Caps { memory, cap: memory, own: memory, min: PageCount::ZERO, least: mib(64) }
}

fn orders(limit: PageCount, balloon: Option<PageCount>) -> Orders {
    let actions = VmActions { balloon, page_out_cap: limit, run: Run::Run };
    Orders { actions, limit, is_restrained: true }
}

#[test]
fn engines_get_the_limits_that_matter() {
    let check = |sent: u64, limit: u64, expected: bool| {
        let most = PageCount(1 << 20);
        assert_eq!(is_worth_sending(PageCount(sent), PageCount(limit), most), expected, "{sent} {limit}");
    };
    check(1 << 20, 1 << 20, false);
    check((1 << 20) - 1, 1 << 20, true);
    check(1000, 1000, false);
    check(1000, 999, true);
    check(1000, 1255, false);
    check(1000, 1256, true);
    check(640_000, 649_999, false);
    check(640_000, 650_000, true);
}

#[test]
fn an_engine_limit_leaves_what_a_vm_needs() {
    let limit = |limit: Option<u64>, caps: Caps| {
        let round = VmRound { limit: limit.map(mib), ..VmRound::default() };
        round.engine_limit(&caps)
    };
    assert_eq!(limit(None, caps(1024)), mib(1024));
    assert_eq!(limit(Some(512), caps(1024)), mib(512));
    assert_eq!(limit(Some(1), caps(1024)), mib(64), "what any VM needs");
    let own = Caps { own: mib(32), ..caps(1024) };
    assert_eq!(limit(Some(1), own), mib(32), "its user may go below that");
    let min = Caps { min: mib(256), ..caps(1024) };
    assert_eq!(limit(Some(1), min), limit_for_min(mib(256)));
}

#[test]
fn steps_are_only_what_changes_something() {
    let mut round = VmRound { sent: mib(1024), ..VmRound::default() };
    let none = Steps { send_limit: false, drive_balloon: false, run: Run::Run };
    assert_eq!(round.follow(&orders(mib(1024), None), &caps(1024), false), none);
    assert_eq!(round.keeps(), None, "nobody connects to a balloon that is not needed");

    let squeezed = orders(mib(512), Some(mib(256)));
    assert_eq!(round.follow(&squeezed, &caps(1024), false), Steps { send_limit: true, drive_balloon: true, ..none });
    round.limit_sent(mib(512));
    assert_eq!(round.follow(&squeezed, &caps(1024), true), none, "the same orders again");
    assert_eq!(round.keeps(), Some(mib(768).bytes()));

    // The driver does not answer for a moment: it stays asked while VMs are held, and is let go of when they are not.
    assert_eq!(round.follow(&orders(mib(512), None), &caps(1024), true), none);
    let free = Orders { is_restrained: false, ..orders(mib(1024), None) };
    assert_eq!(round.follow(&free, &caps(1024), true), Steps { send_limit: true, drive_balloon: true, ..none });
    assert_eq!((round.keeps(), round.limit()), (Some(mib(1024).bytes()), None));
}

/// Page-out keeps 2 MiB free below a limit of 512 MiB, so the balloon leaves the guest that much less. No guest is below its min
/// for that, and a VM that nothing holds is not asked.
#[test]
fn a_balloon_leaves_room_for_page_out() {
    let keeps = |cap: PageCount, balloon: PageCount, min: PageCount| {
        let mut round = VmRound { sent: mib(1024), ..VmRound::default() };
        let caps = Caps { min, ..caps(1024) };
        round.follow(&orders(cap, Some(balloon)), &caps, true);
        let limit = round.engine_limit(&caps);
        assert!(round.keeps().unwrap().pages_ceil() >= min.min(mib(1024) - balloon) && limit >= min);
        round.keeps()
    };
    assert_eq!(keeps(mib(512), mib(512), PageCount::ZERO), Some(mib(510).bytes()));
    assert_eq!(keeps(mib(512), mib(600), PageCount::ZERO), Some(mib(424).bytes()), "less than its limit already");
    assert_eq!(keeps(mib(512), mib(512), mib(512)), Some(mib(512).bytes()), "the headroom of a min is above it");
    assert_eq!(keeps(mib(1024), mib(1), PageCount::ZERO), Some(mib(1023).bytes()), "nothing holds it");
    assert_eq!(keeps(mib(20), mib(1004), PageCount::ZERO), Some(mib(20).bytes()), "any VM may have 64 MiB");
}

/// A limit that is a little too low is sent only if page-out would take from the guest what its balloon leaves it.
#[test]
fn a_limit_is_no_lower_than_the_balloon_makes_it() {
    let sent = |keeps: PageCount, limit: PageCount| {
        let mut round = VmRound { sent: mib(512), ..VmRound::default() };
        round.follow(&orders(limit, Some(mib(1024).saturating_sub(keeps))), &caps(1024), true).send_limit
    };
    assert!(!sent(mib(510), mib(514)), "2 MiB are free below the limit");
    assert!(sent(mib(511), mib(514)));
    assert!(!sent(mib(511), mib(512)), "nor is it sent again");
    assert!(sent(mib(400), mib(520)), "worth it in any case");
}

#[test]
fn who_is_near_its_limit_is_at_it() {
    let is_at_limit = |sent: u64, engine: EngineReport| {
        let round = VmRound { sent: mib(sent), ..VmRound::default() };
        VmReport { round, ..report(ID, 1024, engine) }.sample().unwrap().is_at_limit
    };
    assert!(is_at_limit(512, armed(512)) && is_at_limit(512, armed(480)), "twice its headroom of 16 MiB");
    assert!(!is_at_limit(512, armed(479)));
    assert!(!is_at_limit(1024, armed(1024)), "nothing holds it");
    assert!(!is_at_limit(512, EngineReport { pinned: true, ..armed(512) }));
}

#[test]
fn a_vm_without_an_engine_counts_by_its_process() {
    let check = |vm: VmReport, expected: PageCount| assert_eq!(vm.used(), expected, "{vm:?}");
    let overhead = VmRound { overhead: mib(50), ..VmRound::default() };
    let away = VmReport { engine: None, round: overhead, ..report(ID, 1024, armed(0)) };
    check(away, mib(50));
    check(VmReport { process: mib(300), ..away }, mib(300));
    check(VmReport { process: mib(30), ..away }, mib(50));
    let unarmed = EngineReport { ram: mib(200), resident: mib(999), ..EngineReport::default() };
    check(VmReport { engine: Some(unarmed), ..away }, mib(250));
    let sharing = EngineReport { shared_part: mib(7), ..armed(100) };
    check(VmReport { engine: Some(sharing), round: VmRound { sent: mib(1024), ..overhead }, ..away }, mib(157));
    check(VmReport { measured: Some(mib(60)), ..away }, mib(60));
}

#[test]
fn rounds_are_frequent_while_memory_is_short() {
    let mut rounds = rounds(2048, &[(ID, VmSettings::new(mib(1024)))]);
    assert_eq!(rounds.period_ms(), PERIOD_AT_EASE_MS, "before the first round");
    rounds.make(&host(0, 8192), &[report(ID, 1024, armed(100))]);
    assert_eq!(rounds.period_ms(), PERIOD_AT_EASE_MS);
    // The host has less than the VM may take.
    rounds.make(&host(5, 600), &[report(ID, 1024, armed(100))]);
    assert_eq!(rounds.period_ms(), PERIOD_SHORT_MS);
    let room = rounds.last().unwrap().pool.room;
    assert_eq!(room, mib(600 - 512), "1/32 of the host's memory stays");
}

#[test]
fn limits_are_backed_by_what_the_host_has() {
    let other = VmId(2);
    let settings = VmSettings::new(mib(1024));
    let mut rounds = rounds(4096, &[(ID, settings.clone()), (other, settings)]);
    let vms = [report(ID, 1024, armed(100)), report(other, 1024, armed(200))];
    let found = rounds.make(&host(0, 812), &vms);
    let limit = |outcome: &Outcome| outcome.orders.unwrap().limit;
    assert_eq!(limit(&found[0]) + limit(&found[1]), mib(300 + 300), "300 MiB are used, and 300 more are available");
    assert_eq!(rounds.first_limit(VmId(3), PageCount::ZERO), None, "not known");
    let first = rounds.first_limit(ID, mib(100)).unwrap();
    assert!(first < mib(1024) && first >= mib(100), "{first:?}");
}

#[test]
fn sampling_periods_begin_when_they_are_due() {
    let settings = VmSettings::new(mib(1024));
    let (pages, period_s) = (settings.sampling.pages as usize, u64::from(settings.sampling.period_s));
    let mut rounds = rounds(2048, &[(ID, settings)]);
    let mut vm = report(ID, 1024, armed(100));
    let mut sampled = |now_s: u64, vm: &VmReport| {
        let found = rounds.make(&host(now_s, 8192), std::slice::from_ref(vm));
        found[0].sample.as_ref().map(Vec::len)
    };
    assert_eq!(sampled(0, &vm), Some(pages));
    vm.round.period_began(0);
    assert_eq!(sampled(period_s - 1, &vm), None);
    assert_eq!(sampled(period_s, &vm), Some(pages));
    vm.round.attached(mib(1024));
    assert_eq!(sampled(1, &vm), Some(pages), "a new engine has sampled nothing");
    assert_eq!(sampled(period_s, &VmReport { engine: None, ..vm }), None);
    assert_eq!(sampled(period_s, &VmReport { id: VmId(9), ..vm }), None, "not known");
}

#[test]
fn counts_of_another_period_are_not_believed() {
    let sample = SampleCount { watched: 100, touched: 10 };
    let engine = EngineReport { sample, sample_period: 3, ..armed(100) };
    let mut vm = report(ID, 1024, engine);
    assert_eq!(vm.sample().unwrap().sample, SampleCount::default());
    vm.round.period = 3;
    assert_eq!(vm.sample().unwrap().sample, sample);
}

#[test]
fn overheads_of_a_kind_are_expected_of_the_next() {
    let settings = VmSettings::new(mib(1024));
    let tables = mib(4);
    let mut rounds = rounds(4096, &[(ID, settings.clone())]);
    let expected = |rounds: &Rounds, kind| rounds.expected_overhead(kind, &settings).overhead;
    assert_eq!(expected(&rounds, VmmKind::Qemu), mib(64) + tables);
    let vm = VmReport { measured: Some(mib(100) + tables), ..report(ID, 1024, armed(100)) };
    rounds.make(&host(0, 8192), &[vm]);
    assert_eq!(expected(&rounds, VmmKind::Qemu), mib(100) + tables);
    assert_eq!(expected(&rounds, VmmKind::Plain), mib(4) + tables);
    rounds.remove(ID);
    assert_eq!(expected(&rounds, VmmKind::Qemu), mib(64) + tables, "one that has gone is no measure");
}

#[test]
fn a_vm_that_is_not_all_reported_has_no_orders() {
    let mut rounds = rounds(2048, &[(ID, VmSettings::new(mib(1024)))]);
    let whole = report(ID, 1024, armed(100));
    let waits = VmReport { balloon: None, ..whole };
    let away = VmReport { engine: None, ..whole };
    for vm in [waits, away] {
        assert_eq!(rounds.make(&host(0, 8192), &[vm])[0].orders, None, "{vm:?}");
    }
    assert!(rounds.make(&host(1, 8192), &[whole])[0].orders.is_some());
}

/// Templates are in the pool and no VM's: what they take is neither free, nor dealt out, nor promised to a VM.
#[test]
fn templates_are_charged_and_take_nothing_from_vms() {
    let mut rounds = rounds(1024, &[(ID, VmSettings { min: mib(256), ..VmSettings::new(mib(512)) })]);
    let vm = report(ID, 512, armed(300));
    assert!(!rounds.has_room_for_template(mib(1)), "nobody knows yet what is free");
    rounds.make(&host(1, 8 << 10), &[vm]);
    let free = rounds.last().unwrap().plan.free;
    assert!(rounds.has_room_for_template(mib(400)) && !rounds.has_room_for_template(mib(700)), "{free:?}");
    rounds.policy.set_templates(mib(400));
    assert!(!rounds.has_room_for_template(mib(400)), "the first one is made since that round");
    rounds.make(&HostReport { templates: mib(400), ..host(2, 8 << 10) }, &[vm]);
    let last = rounds.last().unwrap();
    assert_eq!((last.plan.free, last.host.used), (free - mib(400), mib(700) + vm.overhead()));
    let promised = |rounds: &Rounds, min_mib: u64| {
        let asked = VmSettings { min: mib(min_mib), ..VmSettings::new(mib(512)) };
        let swap = SwapSpace::empty(PageCount(1 << 40));
        rounds.policy.admission(&Change::Add(&asked, Overhead::default()), &swap).is_admitted()
    };
    assert!(!promised(&rounds, 400), "a template is in use");
    let asked = VmSettings { min: mib(400), ..VmSettings::new(mib(512)) };
    let refused =
        rounds.policy.admission(&Change::Add(&asked, Overhead::default()), &SwapSpace::empty(PageCount(1 << 40)));
    let said = refused.verdict().unwrap_err().to_string();
    assert!(said.contains("templates of snapshots 400 MiB"), "{said}");
    rounds.policy.set_templates(PageCount::ZERO);
    assert!(promised(&rounds, 400));
    assert!(!rounds.has_room_for_template(mib(800)), "what a VM was promised is not there for templates");
}

/// What outboxes may take is charged whole, used or not, and is nobody else's. What they have not taken yet is the host's still.
#[test]
fn outboxes_are_charged_and_take_nothing_that_is_promised() {
    let settings = VmSettings { min: mib(256), ..VmSettings::new(mib(512)) };
    let mut rounds = rounds(1024, &[(ID, settings)]);
    let vm = report(ID, 512, armed(300));
    rounds.make(&host(1, 8 << 10), &[vm]);
    let before = rounds.last().unwrap().clone();
    let with = |held: u64| HostReport { outboxes: mib(400), outboxes_held: mib(held), ..host(2, 8 << 10) };
    rounds.make(&with(0), &[vm]);
    let last = rounds.last().unwrap();
    assert_eq!((last.plan.free, last.host.used), (before.plan.free - mib(400), before.host.used + mib(400)));
    assert_eq!(last.plan.budget, before.plan.budget - mib(400), "it is not divided");
    assert_eq!(last.pool.room, before.pool.room - mib(400), "they may take it");
    rounds.make(&with(400), &[vm]);
    assert_eq!(rounds.last().unwrap().pool.room, before.pool.room, "they have taken it");

    let swap = SwapSpace::empty(PageCount(1 << 40));
    let check = |rounds: &Rounds, mib_of_all: u64, expected: &str| {
        let said = rounds.policy.admission(&Change::Outboxes(mib(mib_of_all)), &swap).verdict();
        let said = said.err().map_or(String::new(), |refused| refused.to_string());
        assert!(if expected.is_empty() { said.is_empty() } else { said.contains(expected) }, "{mib_of_all}: {said}");
    };
    check(&rounds, 500, "");
    check(&rounds, 900, "outboxes 900 MiB");
    rounds.policy.set_outboxes(mib(950));
    check(&rounds, 900, "");
    check(&rounds, 951, "let the outbox have less");
    let asked = VmSettings { min: mib(64), ..VmSettings::new(mib(512)) };
    assert!(!rounds.policy.admission(&Change::Add(&asked, Overhead::default()), &swap).is_admitted());
    rounds.policy.set_outboxes(PageCount(u64::MAX));
    rounds.policy.set_templates(PageCount(u64::MAX));
    assert!(
        !rounds.policy.admission(&Change::Add(&asked, Overhead::default()), &swap).is_admitted(),
        "no sum overflows"
    );
}

/// What the host lacks is given by outboxes that can, before a VM is asked; and by VMs when these have nothing more, or readers of
/// them stand still.
#[test]
fn outboxes_give_before_vms_are_paged_out() {
    let with = |now_s: u64, elastic: Elastic| HostReport { outboxes: mib(400), elastic, ..host(now_s, 8 << 10) };
    let all = Elastic { spaces: mib(400), mins: mib(8), charged: mib(400) };
    let round = |rounds: &mut Rounds, resident: u64, host: &HostReport| {
        rounds.make(host, &[report(ID, 900, armed(resident))]);
        let last = rounds.last().unwrap();
        (last.plan.state, last.plan.need, last.yielded)
    };
    let new = || rounds(1024, &[(ID, VmSettings::new(mib(900)))]);

    let (state, need, yielded) = round(&mut new(), 600, &with(1, Elastic::default()));
    assert!(state > ReclaimState::High && need > PageCount::ZERO && yielded.is_none(), "a size set by hand stays");
    let mut rounds = new();
    let (state, none, yielded) = round(&mut rounds, 600, &with(1, all));
    assert_eq!((state, none), (ReclaimState::High, PageCount::ZERO));
    let yielded = yielded.unwrap();
    assert_eq!((yielded.withheld >= need.bytes(), yielded.left), (true, Bytes::ZERO), "{yielded:?}");
    // It drains, or was not told yet: nobody is asked again.
    let told = Elastic { spaces: yielded.pool.pages_floor(), ..all };
    for elastic in [all, told] {
        let (_, need, again) = round(&mut rounds, 600, &with(2, elastic));
        assert_eq!((need, again.unwrap().pool), (PageCount::ZERO, yielded.pool), "{elastic:?}");
    }
    // The outboxes have let go of what was asked for.
    let gone = Elastic { charged: told.spaces, ..told };
    let host_after = HostReport { outboxes: told.spaces, ..with(3, gone) };
    assert_eq!(round(&mut rounds, 600, &host_after).1, PageCount::ZERO);
    // Readers stand still: the VM gives what is still missing.
    let mut stuck = new();
    round(&mut stuck, 1000, &with(1, all));
    let least = Elastic { spaces: mib(8), ..all };
    assert!(round(&mut stuck, 1000, &with(2, least)).1 > PageCount::ZERO, "all of it would not be enough");
    let mut stuck = new();
    round(&mut stuck, 600, &with(1, all));
    for (now_s, is_asked) in [(2, false), (6, false), (7, true)] {
        let (_, need, yielded) = round(&mut stuck, 600, &with(now_s, Elastic { spaces: mib(8), ..all }));
        assert_eq!(need > PageCount::ZERO, is_asked, "at {now_s} s: {yielded:?}");
    }
}
