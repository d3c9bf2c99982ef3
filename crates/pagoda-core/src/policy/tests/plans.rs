//! Plans for known situations.

use super::super::explain::{explain, render};
use super::super::plan::{CeilingReason, StuckReason};
use super::super::settings::{Sampling, Thresholds};
use super::super::*;
use crate::chance::Chance;
use crate::units::{Bytes, PageCount};

pub fn mib(mib: u64) -> PageCount {
    Bytes::from_mib(mib).pages_floor()
}

pub fn shares(shares: u32) -> Shares {
    Shares::new(shares).unwrap()
}

fn vm(id: u32, resident: u64, swapped: u64) -> VmSample {
    VmSample {
        id: VmId(id),
        resident: mib(resident),
        swapped: mib(swapped),
        shared: PageCount::ZERO,
        is_at_limit: false,
        balloon: Balloon::Absent,
        sample: SampleCount::default(),
        pinned: false,
    }
}

fn host(now_s: u64, pool: u64, samples: &[VmSample]) -> PoolSample {
    PoolSample { now_ms: now_s * 1000, pool: mib(pool), used: samples.iter().map(|sample| sample.resident).sum() }
}

/// More swap than anybody wants.
pub fn plenty() -> SwapSpace {
    SwapSpace::empty(PageCount(u64::MAX))
}

fn set(policy: &mut Policy, id: u32, settings: VmSettings) -> Result<(), SettingsError> {
    let overhead = policy.overhead(VmId(id)).unwrap_or_default();
    policy.set(VmId(id), settings, overhead, &plenty())
}

/// A policy with VMs of 256 MiB, the first idle, the others in full use.
fn policy(pool: u64, vms: u32, tax: u16) -> Policy {
    let tax = TaxRate::new(PerMille(tax)).unwrap();
    let mut policy = Policy::new(HostSettings { tax, ..HostSettings::new(mib(pool)) }).unwrap();
    let mut chance = Chance::new(1);
    for id in 0..vms {
        policy.add(VmId(id), VmSettings::new(mib(256)), Overhead::default(), &plenty()).unwrap();
        policy.start_period(VmId(id), &mut chance);
    }
    let settled = |id: u32| SampleCount { watched: 100, touched: if id == 0 { 10 } else { 100 } };
    let samples: Vec<VmSample> = (0..vms).map(|id| VmSample { sample: settled(id), ..vm(id, 1, 0) }).collect();
    policy.tick(&host(0, pool, &samples), &samples);
    for id in 0..vms {
        policy.start_period(VmId(id), &mut chance);
    }
    policy
}

#[test]
fn without_pressure_nothing_is_held_back() {
    let mut policy = policy(2048, 3, 750);
    let samples = [vm(0, 256, 0), vm(1, 100, 0), vm(2, 3, 0)];
    let plan = policy.tick(&host(1, 2048, &samples), &samples);
    assert_eq!((plan.state, plan.restrained, plan.need), (ReclaimState::High, false, PageCount::ZERO));
    for vm in &plan.vms {
        assert_eq!(vm.actions, VmActions { balloon: None, page_out_cap: mib(256), run: Run::Run });
        assert_eq!((vm.status, vm.terms.bound), (PolicyStatus::AtEase, Bound::Ceiling));
    }
    let reasons: Vec<_> =
        plan.vms.iter().map(|vm| (vm.terms.ceiling.bytes().0 >> 20, vm.terms.ceiling_reason)).collect();
    use CeilingReason::*;
    assert_eq!(reasons, [(256, Memory), (105, Demand), (5, Demand)]);
}

#[test]
fn two_equal_vms_split_equally_without_a_tax() {
    let mut policy = policy(386, 2, 0);
    let samples = [vm(0, 179, 77), vm(1, 179, 77)];
    let plan = policy.tick(&host(1, 386, &samples), &samples);
    let targets: Vec<u64> = plan.vms.iter().map(|vm| vm.terms.target.bytes().0 >> 20).collect();
    assert_eq!(targets, [179, 179]);
    assert!(plan.restrained);
}

#[test]
fn with_the_tax_idle_memory_goes_where_it_is_used() {
    let mut policy = policy(386, 2, 750);
    let samples = [vm(0, 179, 77), vm(1, 179, 77)];
    let plan = policy.tick(&host(1, 386, &samples), &samples);
    // 25.6 + 4 * (P - 25.6) = 358.98 - P gives 87.2, but VM 1 has only 256 MiB.
    let targets: Vec<u64> = plan.vms.iter().map(|vm| vm.terms.target.bytes().0 >> 20).collect();
    assert_eq!(targets, [102, 256]);
    assert_eq!(plan.vms[1].actions.page_out_cap, mib(256));
    assert_eq!(plan.vms[0].actions.page_out_cap, mib(179), "free memory suffices: nothing is taken yet");

    let samples = [vm(0, 179, 77), vm(1, 200, 56)];
    let plan = policy.tick(&host(2, 386, &samples), &samples);
    assert_eq!(plan.state, ReclaimState::Hard);
    assert!(plan.vms[0].actions.page_out_cap < mib(179), "{:?}", plan.vms[0].actions);
    assert_eq!(plan.vms[0].status, PolicyStatus::Squeezed);

    let text = render(&explain(&policy, &plan, VmId(0), 5_000));
    for part in [
        "target",
        "entitlement",
        "179.",
        "lost",
        "idle tax of 75 %",
        "working set",
        "2000 shares instead of 1000 would",
        "squeezed",
        "hard: reclaiming by page-out",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let text = render(&explain(&policy, &plan, VmId(1), 5_000));
    assert!(text.contains("gained") && text.contains("it has all the guest can see"), "{text}");
    assert!(explain(&policy, &plan, VmId(7), 0).is_empty());
}

/// A limit holds a VM before it makes free memory short. Without this, who is above its target would keep it, and who is
/// held below its target would page.
#[test]
fn what_a_vm_lacks_at_its_limit_is_taken_from_who_is_above_its_target() {
    let mut policy = policy(386, 2, 0);
    let (above, below) = (vm(0, 197, 0), vm(1, 168, 32));
    let mut plan = |now_s: u64, below: VmSample| {
        let samples = [above, below];
        policy.tick(&host(now_s, 386, &samples), &samples)
    };
    let calm = plan(1, below);
    assert_eq!((calm.state, calm.need), (ReclaimState::High, PageCount::ZERO), "it may grow into free memory: 21 MiB");
    let held = plan(2, VmSample { is_at_limit: true, ..below });
    assert_eq!((held.state, held.free), (ReclaimState::High, mib(21)), "free memory is not short");
    let lack = held.vms[1].terms.target - mib(168);
    assert_eq!(held.need, host(0, 386, &[]).pool - held.budget - held.free + lack);
    assert!(held.vms[0].actions.page_out_cap <= mib(180), "{:?}", held.vms[0].actions);
    assert_eq!(held.vms[0].actions.run, Run::Run, "nobody is suspended for it");
    // Without pages in swap it does not page, and page-out's headroom is no lack.
    let near = VmSample { is_at_limit: true, ..vm(1, 172, 0) };
    assert_eq!(plan(3, near).need, PageCount::ZERO);
    assert!(plan(4, VmSample { swapped: mib(28), ..near }).need > PageCount::ZERO);
    // Once both have their targets, nothing is taken any more.
    let samples = [vm(0, 179, 21), VmSample { is_at_limit: true, ..vm(1, 179, 21) }];
    let settled = policy.tick(&host(5, 386, &samples), &samples);
    assert_eq!((settled.state, settled.need), (ReclaimState::High, PageCount::ZERO));
}

/// Limits that hold many VMs do not make memory look short: the means stay those of the state soft.
#[test]
fn what_is_lacked_suspends_nobody() {
    let mut policy = policy(400, 2, 0);
    let samples = [vm(0, 330, 0), VmSample { is_at_limit: true, ..vm(1, 10, 100) }];
    let plan = policy.tick(&host(1, 400, &samples), &samples);
    let lack = plan.vms[1].terms.target - mib(10);
    assert!(lack > plan.free && plan.need > PageCount::ZERO, "{lack:?} of {:?}", plan.free);
    assert_eq!(plan.state, ReclaimState::High);
    assert!(plan.vms.iter().all(|vm| vm.actions.run == Run::Run));
}

#[test]
fn in_low_vms_above_their_target_stop() {
    let mut policy = policy(400, 2, 750);
    let samples = [vm(0, 200, 0), vm(1, 198, 0)];
    let plan = policy.tick(&host(1, 400, &samples), &samples);
    assert_eq!(plan.state, ReclaimState::Low);
    assert_eq!(plan.vms.iter().map(|vm| vm.actions.run).collect::<Vec<_>>(), [Run::Block, Run::Run]);
    assert_eq!(plan.vms[0].status, PolicyStatus::Blocked);
    let samples = [vm(0, 170, 30), vm(1, 198, 0)];
    let plan = policy.tick(&host(2, 400, &samples), &samples);
    assert_eq!((plan.state, plan.vms[0].actions.run), (ReclaimState::High, Run::Run));
}

#[test]
fn a_host_that_runs_short_keeps_the_guarantees_and_says_what_is_missing() {
    let mut policy = Policy::new(HostSettings::new(mib(1000))).unwrap();
    for id in 0..3 {
        let settings = VmSettings { min: mib(200), ..VmSettings::new(mib(500)) };
        policy.add(VmId(id), settings, Overhead { overhead: mib(20), reserve: PageCount::ZERO }, &plenty()).unwrap();
    }
    let samples = [vm(0, 250, 0), vm(1, 250, 0), vm(2, 250, 0)];
    let plan = policy.tick(&host(1, 500, &samples), &samples);
    assert!(plan.vms.iter().all(|vm| vm.terms.target == mib(200) && vm.actions.page_out_cap >= mib(200)));
    assert_eq!(plan.shortfall, mib(600) - (mib(500) - PerMille(70).of_ceil(mib(500))));
    assert_eq!(plan.state, ReclaimState::Low);
}

#[test]
fn a_pool_that_shrank_takes_all_but_the_guarantees() {
    let mut policy = policy(2048, 2, 750);
    set(&mut policy, 1, VmSettings { min: mib(64), ..VmSettings::new(mib(256)) }).unwrap();
    let samples = [vm(0, 200, 0), vm(1, 256, 0)];
    for (pool, need) in [(400, 456 - 400 + 28), (0, 456)] {
        let plan = policy.tick(&PoolSample { pool: mib(pool), ..host(1 + pool, 2048, &samples) }, &samples);
        assert_eq!(plan.state, ReclaimState::Low, "{pool}");
        assert_eq!(plan.need, mib(need), "what is in use beyond the pool of {pool} MiB, and the goal");
        let caps: PageCount = plan.vms.iter().map(|vm| vm.actions.page_out_cap).sum();
        assert_eq!(caps, mib(pool.saturating_sub(28).max(64)), "{:?}", plan.vms);
        assert!(plan.vms[1].actions.page_out_cap >= mib(64) && plan.vms[1].terms.target >= mib(64));
    }
}

#[test]
fn promises_beyond_the_pool_are_refused_and_change_nothing() {
    let mut policy = Policy::new(HostSettings::new(mib(1000))).unwrap();
    let with_min = |min: u64| VmSettings { min: mib(min), ..VmSettings::new(mib(950)) };
    policy.add(VmId(1), with_min(500), Overhead { overhead: mib(30), reserve: mib(10) }, &plenty()).unwrap();
    let check = |result: Result<(), SettingsError>, expected: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    check(
        policy.clone().add(VmId(2), with_min(400), Overhead::default(), &plenty()),
        "lower its min or another VM's by 10 MiB",
    );
    check(policy.clone().add(VmId(1), with_min(0), Overhead::default(), &plenty()), "number 1 already");
    check(set(&mut policy, 1, with_min(891)), "lower a min by 1 MiB");
    check(set(&mut policy, 9, with_min(1)), "no VM with number 9");
    check(policy.set_host(HostSettings::new(mib(580)), &plenty()), "cannot keep the guarantees");
    let thresholds = Thresholds { soft: PerMille(0), ..settings::THRESHOLDS_DEFAULT };
    check(policy.set_host(HostSettings { thresholds, ..HostSettings::new(mib(1000)) }, &plenty()), "out of order");
    assert_eq!((policy.host().pool, policy.settings(VmId(1)).unwrap().min), (mib(1000), mib(500)));
    assert_eq!(set(&mut policy, 1, with_min(890)), Ok(()));

    let admission = policy.admission(&Change::Add(&with_min(100), Overhead::default()), &SwapSpace::empty(mib(500)));
    assert_eq!(admission.missing(), Reservation { memory: mib(100), swap: mib(850 + 60 - 500) });
}

#[test]
fn what_if_answers_for_other_settings() {
    let mut policy = policy(386, 2, 0);
    let samples = [vm(0, 179, 77), vm(1, 179, 77)];
    policy.tick(&host(1, 386, &samples), &samples);
    let ask = |change: fn(&mut VmSettings)| {
        let mut settings = policy.settings(VmId(0)).unwrap().clone();
        change(&mut settings);
        policy.what_if(VmId(0), &settings).map(|target| target.bytes().0 >> 20)
    };
    assert_eq!(ask(|_| ()), Some(179));
    assert_eq!(ask(|settings| settings.shares = shares(2000)), Some(239));
    assert_eq!(ask(|settings| settings.cap = mib(100)), Some(100));
    assert_eq!(ask(|settings| settings.min = mib(220)), Some(220));
    assert_eq!(policy.what_if(VmId(5), &VmSettings::new(mib(1))), None);
}

#[test]
fn standing_still_is_noticed() {
    let mut policy = policy(400, 2, 750);
    // Pinned VMs cannot give anything.
    let samples = [VmSample { pinned: true, ..vm(0, 200, 0) }, VmSample { pinned: true, ..vm(1, 195, 0) }];
    let stuck: Vec<_> = (1..60).map(|second| policy.tick(&host(second, 400, &samples), &samples).stuck).collect();
    assert!(stuck[..29].iter().all(Option::is_none));
    assert_eq!(stuck[35], Some((1_000, StuckReason::NothingToTake)));
    let samples = [vm(0, 200, 0), vm(1, 195, 0)];
    let last = (60..100).map(|second| policy.tick(&host(second, 400, &samples), &samples).stuck).last().unwrap();
    assert_eq!(last.map(|(_, reason)| reason), Some(StuckReason::PageOutDoesNotMove));
}

#[test]
fn sampling_settings_take_effect_with_the_next_period() {
    let mut policy = policy(1000, 1, 750);
    let sampling = Sampling { pages: 7, period_s: 5 };
    policy.set_sampling(VmId(0), sampling).unwrap();
    assert_eq!(policy.start_period(VmId(0), &mut Chance::new(3)).len(), 7);
    assert_eq!(policy.start_period(VmId(4), &mut Chance::new(3)).len(), 0);
    assert!(policy.estimate(VmId(0)).unwrap().known);
    policy.remove(VmId(0));
    assert_eq!(policy.estimate(VmId(0)), None);
}

#[test]
fn absurd_numbers_are_bounded_not_added_up() {
    let mut policy = policy(1000, 2, 750);
    let most = PageCount(u64::MAX);
    let absurd =
        VmSample { resident: most, swapped: most, shared: most, balloon: Balloon::Inflated(most), ..vm(0, 0, 0) };
    let host = PoolSample { now_ms: 1_000, pool: most, used: most };
    let plan = policy.tick(&host, &[absurd, absurd, VmSample { id: VmId(99), ..absurd }]);
    assert_eq!((plan.vms.len(), plan.state), (1, ReclaimState::Low));
    assert!(plan.vms[0].terms.target <= mib(256));
    let overhead = Overhead { overhead: most, reserve: most };
    policy.set_overhead(VmId(0), overhead);
    policy.set_overhead(VmId(1), overhead);
    assert!(!policy.admission(&Change::Add(&VmSettings::new(mib(1)), overhead), &plenty()).is_admitted());
    assert!(policy.add(VmId(5), VmSettings::new(mib(1)), overhead, &plenty()).is_err());
    let held = SwapSpace { free: most, held: [(VmId(0), most), (VmId(1), most)].into() };
    assert!(policy.add(VmId(5), VmSettings::new(mib(1)), overhead, &held).is_err());
}
