use super::*;
use crate::chance::Chance;
use crate::policy::settings::{PerMille, Shares, Thresholds};
use crate::policy::{Policy, SettingsError};

fn mib(mib: u64) -> PageCount {
    Bytes::from_mib(mib).pages_floor()
}

fn vm(memory: u64, cap: u64, min: u64) -> VmSettings {
    VmSettings { cap: mib(cap), min: mib(min), ..VmSettings::new(mib(memory)) }
}

fn beside(overhead: u64, reserve: u64) -> Overhead {
    Overhead { overhead: mib(overhead), reserve: mib(reserve) }
}

/// A host with a pool of 1000 MiB, of which 70 are kept free.
fn host(pool: u64) -> HostSettings {
    HostSettings::new(mib(pool))
}

fn swap(free: u64) -> SwapSpace {
    SwapSpace::empty(mib(free))
}

/// The pool holds all caps: 300 + 300 of 930 MiB, so both are promised 500 - 300 of swap.
fn two_of_500(free: u64) -> Policy {
    let mut policy = Policy::new(host(1000)).unwrap();
    for id in [1, 2] {
        policy.add(VmId(id), vm(500, 300, 100), Overhead::default(), &swap(free)).unwrap();
    }
    policy
}

#[track_caller]
fn refused(result: Result<(), SettingsError>, expected: &[&str]) {
    let Err(error @ SettingsError::NotAdmitted(_)) = result else { panic!("{result:?}") };
    let message = error.to_string();
    assert!(expected.iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn min_in_memory_and_the_rest_in_swap() {
    let (settings, overhead) = (vm(256, 256, 128), beside(30, 2));
    assert_eq!(Reservation::of(&settings, overhead), Reservation { memory: mib(160), swap: mib(128) });
    assert_eq!(Reservation::at_cap(&settings, overhead), Reservation { memory: mib(160), swap: mib(0) });
    let reserved = VmSettings { reserve_swap: true, ..settings };
    assert_eq!(Reservation::of(&reserved, overhead).swap, mib(256), "the file is allocated whatever the min is");
    assert_eq!(Reservation::at_cap(&reserved, overhead).swap, mib(256));
}

#[test]
fn a_vm_that_comes_is_told_what_is_missing() {
    let add = |min: u64, free: u64| {
        let mut policy = Policy::new(host(1000)).unwrap();
        policy.add(VmId(1), vm(900, 900, 700), beside(30, 10), &swap(1000))?;
        policy.add(VmId(2), vm(256, 256, min), beside(30, 2), &swap(free))
    };
    assert_eq!(add(158, 200 + 98), Ok(()));
    let memory =
        ["not admitted: 1 MiB of memory are missing", "reserved 740 MiB of 930 MiB", "or another VM's by 1 MiB"];
    refused(add(159, 1000), &memory);
    refused(add(200, 1000), &["42 MiB of memory are missing", "`pagoda host set --pool 1046M`"]);
    let swap = ["1 MiB of swap are missing", "raise its min", "free 1 MiB in the swap directory"];
    refused(add(158, 297), &swap);
    refused(add(200, 100), &["42 MiB of memory are missing", "156 MiB of swap are missing"]);
}

/// What is asked before a VM ends is what is said when it has.
#[test]
fn a_vm_that_takes_the_place_of_another_needs_what_it_would_need_without_it() {
    let policy = || {
        let mut policy = Policy::new(host(1000)).unwrap();
        for id in [1, 2] {
            policy.readmit(VmId(id), vm(500, 300, 100), Overhead::default()).unwrap();
        }
        policy
    };
    let mut chance = Chance::new(7);
    let (mut admitted, mut refused) = (0, 0);
    for _ in 0..1000 {
        let cap = 1 + chance.below(900);
        let comes = vm(cap + chance.below(500), cap, chance.below(cap));
        let comes = VmSettings { reserve_swap: chance.below(2) == 0, ..comes };
        let (overhead, held, free) = (beside(chance.below(50), 0), mib(chance.below(700)), mib(chance.below(900)));
        let space = SwapSpace { free, held: [(VmId(1), held), (VmId(2), mib(50))].into() };
        let before = policy().admission(&Change::Replace(VmId(1), &comes, overhead), &space).verdict();
        let mut without = policy();
        without.remove(VmId(1));
        let after = SwapSpace { free: free + held, held: [(VmId(2), mib(50))].into() };
        let then = without.admission(&Change::Add(&comes, overhead), &after).verdict();
        assert_eq!(before.is_ok(), then.is_ok(), "{comes:?} {space:?}");
        assert_eq!(before.as_ref().ok(), then.as_ref().ok());
        *(if before.is_ok() { &mut admitted } else { &mut refused }) += 1;
    }
    assert!(admitted > 100 && refused > 100, "{admitted} {refused}");
}

#[test]
fn advice_that_is_followed_helps() {
    for pool in [300, 640, 645, 646, 999] {
        let policy = two_of_500(400);
        let least = least_pool(mib(600), &host(pool));
        let fits = |pool: PageCount| {
            let host = HostSettings { pool, ..host(1) };
            policy.admission(&Change::Host(&host), &swap(400)).is_admitted()
        };
        assert!(fits(least) && !fits(least - PageCount(1)), "{least}");
    }
}

#[test]
fn a_smaller_pool_that_squeezes_vms_needs_their_swap_first() {
    let mut policy = two_of_500(400);
    // 646 MiB less 7 % hold both caps; with 644 each VM may be squeezed to 100 MiB.
    assert_eq!(policy.set_host(host(646), &swap(400)), Ok(()));
    let expected = [
        "the pool of 644 MiB cannot keep the guarantees: 400 MiB of swap are missing (reserved 800 MiB of 400 MiB)",
        "give the pool 646 MiB (`pagoda host set --pool 646M`)",
        "free 400 MiB in the swap directory",
    ];
    refused(policy.set_host(host(644), &swap(400)), &expected);
    refused(policy.set_host(host(644), &swap(799)), &["1 MiB of swap are missing"]);
    assert_eq!(policy.host().pool, mib(646), "refused, and yet changed");
    assert_eq!(policy.set_host(host(644), &swap(800)), Ok(()));
    refused(policy.set_host(host(200), &swap(800)), &["14 MiB of memory are missing", "--pool 216M"]);
}

#[test]
fn thresholds_that_keep_more_free_squeeze_as_a_smaller_pool_does() {
    let mut policy = two_of_500(400);
    policy.set_host(host(646), &swap(400)).unwrap();
    let thresholds = Thresholds { high: PerMille(63), ..host(646).thresholds };
    let more_free = HostSettings { thresholds, ..host(646) };
    refused(policy.set_host(more_free.clone(), &swap(799)), &["1 MiB of swap are missing"]);
    assert_eq!(policy.set_host(more_free, &swap(800)), Ok(()));
}

#[test]
fn a_dram_cap_that_changes_is_a_change_of_swap() {
    let set = |cap: u64, free: u64| {
        let mut policy = two_of_500(400);
        policy.set_host(host(850), &swap(400)).unwrap();
        policy.set(VmId(1), vm(500, cap, 100), Overhead::default(), &swap(free))
    };
    // A lower cap leaves more in swap.
    refused(
        set(299, 400),
        &["1 MiB of swap are missing (needs 201 MiB, reserved 200 MiB of 400 MiB)", "raise a DRAM cap"],
    );
    assert_eq!(set(299, 401), Ok(()));
    // With a higher one the pool no longer holds all caps, so that both may be squeezed.
    refused(set(500, 400), &["400 MiB of swap are missing (needs 400 MiB, reserved 400 MiB of 400 MiB)"]);
    assert_eq!(set(500, 800), Ok(()));
}

#[test]
fn a_min_that_changes_is_looked_at_in_memory_and_swap() {
    let mut policy = two_of_500(800);
    policy.set_host(host(500), &swap(800)).unwrap();
    let mut set = |min: u64, free: u64| policy.set(VmId(1), vm(500, 300, min), Overhead::default(), &swap(free));
    refused(set(99, 800), &["1 MiB of swap are missing"]);
    assert_eq!(set(99, 801), Ok(()));
    assert_eq!(set(300, 801), Ok(()));
    refused(
        policy.set(VmId(2), vm(500, 300, 166), Overhead::default(), &swap(801)),
        &["1 MiB of memory are missing", "lower a min by 1 MiB"],
    );
}

#[test]
fn what_is_proposed_and_what_it_would_replace_are_both_kept() {
    let mut policy = two_of_500(800);
    policy.set_host(host(500), &swap(800)).unwrap();
    let before = policy.admission(&Change::Nothing, &swap(800));
    let add =
        |policy: &Policy, min, free| policy.clone().add(VmId(3), vm(400, 400, min), Overhead::default(), &swap(free));
    let propose = |policy: &mut Policy, min| {
        policy.propose(VmId(1), vm(500, 300, min), Overhead::default(), &swap(2000)).unwrap();
    };
    // Of 465 MiB 200 are promised. While VM 1 may go from 100 down to 20, nobody gets the difference, in memory or in swap.
    propose(&mut policy, 20);
    assert_eq!(policy.settings(VmId(1)).unwrap().min, mib(100), "it is not accepted yet");
    assert_eq!(policy.admission(&Change::Nothing, &swap(800)), before, "how it stands has not changed");
    refused(add(&policy, 266, 2000), &["1 MiB of memory are missing"]);
    refused(add(&policy, 265, 480 + 400 + 134), &["1 MiB of swap are missing"]);
    assert_eq!(add(&policy, 265, 480 + 400 + 135), Ok(()));
    policy.withdraw(VmId(1));
    assert_eq!(add(&policy, 265, 400 + 400 + 135), Ok(()));
    // While it may go up to 300, nobody gets that.
    propose(&mut policy, 300);
    refused(add(&policy, 66, 2000), &["1 MiB of memory are missing"]);
    refused(add(&policy, 65, 400 + 400 + 334), &["1 MiB of swap are missing"]);
    assert_eq!(add(&policy, 65, 400 + 400 + 335), Ok(()));
    policy.accept(VmId(1));
    assert_eq!(policy.settings(VmId(1)).unwrap().min, mib(300));
    refused(add(&policy, 66, 2000), &["1 MiB of memory are missing"]);
    assert_eq!(add(&policy, 65, 200 + 400 + 335), Ok(()));
    // Nothing is left to accept.
    policy.accept(VmId(1));
    assert_eq!(policy.settings(VmId(1)).unwrap().min, mib(300));
}

#[test]
fn what_settings_cost_beside_memory_is_looked_at() {
    let mut policy = two_of_500(400);
    let settings = vm(500, 300, 100);
    refused(policy.set(VmId(1), settings.clone(), beside(300, 31), &swap(400)), &["400 MiB of swap are missing"]);
    refused(policy.set(VmId(1), settings.clone(), beside(700, 31), &swap(1000)), &["1 MiB of memory are missing"]);
    assert_eq!(policy.set(VmId(1), settings, beside(300, 30), &swap(400)), Ok(()));
}

#[test]
fn a_vm_that_comes_makes_others_need_swap() {
    let mut policy = two_of_500(400);
    let third = vm(331, 331, 0);
    refused(policy.add(VmId(3), third.clone(), Overhead::default(), &swap(1130)), &["1 MiB of swap are missing"]);
    assert_eq!(policy.add(VmId(3), third, Overhead::default(), &swap(1131)), Ok(()));
    // It goes, and takes its part with it.
    policy.remove(VmId(3));
    assert_eq!(policy.reserved().swap, mib(400));
}

#[test]
fn shares_and_sampling_change_no_promise() {
    let mut policy = two_of_500(400);
    let shares = VmSettings { shares: Shares::new(7).unwrap(), ..vm(500, 300, 100) };
    assert_eq!(policy.set(VmId(1), shares, Overhead::default(), &swap(400)), Ok(()));
}

#[test]
fn swap_in_a_vms_own_file_is_its_own() {
    let held = |held: u64, free: u64| SwapSpace { free: mib(free), held: [(VmId(1), mib(held))].into() };
    let set = |space: &SwapSpace| two_of_500(400).set(VmId(2), vm(500, 250, 100), Overhead::default(), space);
    // 200 + 250 MiB are promised: what VM 1 has of its 200 already is not wanted again, and more than that is not for VM 2.
    assert_eq!(set(&held(150, 300)), Ok(()));
    refused(set(&held(150, 299)), &["1 MiB of swap are missing"]);
    refused(set(&held(500, 249)), &["1 MiB of swap are missing"]);
    assert_eq!(set(&held(500, 250)), Ok(()));
    // A file that is allocated up front is promised whole, so that its min is not lent to others.
    let mut policy = Policy::new(host(1000)).unwrap();
    let reserved = VmSettings { reserve_swap: true, ..vm(300, 300, 300) };
    policy.add(VmId(1), reserved, Overhead::default(), &swap(300)).unwrap();
    let space = held(300, 99);
    refused(policy.add(VmId(2), vm(300, 200, 0), Overhead::default(), &space), &["1 MiB of swap are missing"]);
}

#[test]
fn what_was_lost_already_keeps_nobody_from_making_it_better() {
    // After a restart with a smaller pool: nothing fits, and everybody is kept.
    let mut policy = Policy::new(host(200)).unwrap();
    for id in [1, 2] {
        policy.readmit(VmId(id), vm(500, 300, 100), Overhead::default()).unwrap();
    }
    let space = swap(100);
    let stands = policy.admission(&Change::Nothing, &space);
    assert_eq!(stands.missing(), Reservation { memory: mib(14), swap: mib(700) });
    let message = stands.verdict().unwrap_err().to_string();
    assert!(message.contains("14 MiB of memory are missing") && message.contains("700 MiB of swap"), "{message}");
    let set = |policy: &mut Policy, cap, min| policy.set(VmId(1), vm(500, cap, min), Overhead::default(), &space);
    assert_eq!(set(&mut policy, 300, 100), Ok(()), "nothing becomes worse");
    refused(set(&mut policy, 300, 101), &["15 MiB of memory are missing"]);
    refused(set(&mut policy, 300, 99), &["701 MiB of swap are missing"]);
    refused(policy.set_host(host(199), &space), &["memory are missing"]);
    assert_eq!(policy.set_host(host(201), &space), Ok(()));
    refused(policy.add(VmId(3), vm(1, 1, 0), Overhead::default(), &space), &["memory", "swap"]);
}

/// Admission as it is told in the specification, in plain numbers.
#[derive(Clone, Debug, Default)]
struct Naive {
    pool: u64,
    free_per_mille: u64,
    swap_free: u64,
    /// memory, cap, min, beside, in its file, allocated up front.
    vms: BTreeMap<u32, (u64, u64, u64, u64, u64, bool)>,
}

impl Naive {
    /// What is missing of memory and of swap.
    fn missing(&self) -> (u64, u64) {
        let kept = (self.pool * self.free_per_mille).div_ceil(1000);
        let mut memory = kept;
        let mut at_caps = kept;
        for (_, cap, min, beside, ..) in self.vms.values() {
            memory += min + beside;
            at_caps += cap + beside;
        }
        let mut swap = 0;
        for (size, cap, min, _, held, reserve) in self.vms.values() {
            let stays = if at_caps <= self.pool { *cap } else { *min };
            let promised = if *reserve { *size } else { size - stays };
            swap += promised.saturating_sub(*held);
        }
        (memory.saturating_sub(self.pool), swap.saturating_sub(self.swap_free))
    }

    fn space(&self) -> SwapSpace {
        let held = self.vms.iter().map(|(id, vm)| (VmId(*id), PageCount(vm.4))).collect();
        SwapSpace { free: PageCount(self.swap_free), held }
    }
}

struct World {
    chance: Chance,
    policy: Policy,
    naive: Naive,
    next: u32,
}

impl World {
    fn new(seed: u64) -> World {
        let policy = Policy::new(HostSettings::new(PageCount(1000))).unwrap();
        let naive = Naive { pool: 1000, free_per_mille: 70, swap_free: 1500, ..Naive::default() };
        World { chance: Chance::new(seed), policy, naive, next: 0 }
    }

    fn sizes(&mut self, memory: u64) -> (u64, u64, u64) {
        let cap = self.chance.within(1, memory);
        (cap, self.chance.below(cap + 1), self.chance.below(20))
    }

    fn any(&mut self) -> Option<u32> {
        let count = self.naive.vms.len() as u64;
        (count > 0).then(|| *self.naive.vms.keys().nth(self.chance.below(count) as usize).unwrap())
    }

    /// A command; whether it was obeyed, and what should be then.
    fn command(&mut self) -> Option<(Result<(), SettingsError>, Naive)> {
        let space = self.naive.space();
        let mut then = self.naive.clone();
        let done = match self.chance.below(8) {
            0..=2 => {
                let memory = self.chance.within(2, 400);
                let ((cap, min, beside), reserve_swap) = (self.sizes(memory), self.chance.per_mille(200));
                self.next += 1;
                then.vms.insert(self.next, (memory, cap, min, beside, 0, reserve_swap));
                let settings = settings(memory, cap, min, reserve_swap);
                self.policy.add(VmId(self.next), settings, overhead(beside), &space)
            }
            3..=5 => {
                let id = self.any()?;
                let (memory, .., held, reserve_swap) = self.naive.vms[&id];
                let (cap, min, beside) = self.sizes(memory);
                then.vms.insert(id, (memory, cap, min, beside, held, reserve_swap));
                // What cannot be changed is not taken from what is asked.
                let settings = settings(memory, cap, min, self.chance.per_mille(500));
                self.policy.set(VmId(id), settings, overhead(beside), &space)
            }
            _ => {
                then.pool = self.chance.within(1, 2000);
                let high = self.chance.within(50, 300) as u16;
                then.free_per_mille = u64::from(high) + 10;
                let host = HostSettings::new(PageCount(then.pool));
                let thresholds = Thresholds { high: PerMille(high), ..host.thresholds };
                self.policy.set_host(HostSettings { thresholds, ..host }, &space)
            }
        };
        Some((done, then))
    }

    /// What nobody asks for and nobody can refuse, and that breaks no promise: VMs that page within theirs, and that end.
    fn harmless(&mut self) {
        let Some(id) = self.any() else { return };
        if self.chance.per_mille(300) {
            self.naive.swap_free += self.naive.vms.remove(&id).unwrap().4;
            self.policy.remove(VmId(id));
            return;
        }
        let before = self.naive.missing().1;
        let free = self.naive.swap_free;
        let vm = self.naive.vms.get_mut(&id).unwrap();
        let held = if vm.5 { vm.0 } else { self.chance.below(vm.0 + 1) };
        let was = vm.4;
        if held <= was + free {
            (vm.4, self.naive.swap_free) = (held, free + was - held);
        }
        if self.naive.missing().1 > before {
            self.naive.vms.get_mut(&id).unwrap().4 = was;
            self.naive.swap_free = free;
        }
    }

    /// Facts that do break promises: others fill the disk, VMMs grow, a daemon begins with another pool.
    fn bad_luck(&mut self) {
        match self.chance.below(3) {
            0 => self.naive.swap_free = self.chance.below(1500),
            1 => {
                let Some(id) = self.any() else { return };
                let beside = self.chance.below(200);
                self.naive.vms.get_mut(&id).unwrap().3 = beside;
                self.policy.set_overhead(VmId(id), overhead(beside));
            }
            _ => {
                self.naive.pool = self.chance.within(1, 1500);
                self.naive.free_per_mille = 70;
                let mut next = Policy::new(HostSettings::new(PageCount(self.naive.pool))).unwrap();
                for (id, (memory, cap, min, beside, _, reserve_swap)) in &self.naive.vms {
                    let settings = settings(*memory, *cap, *min, *reserve_swap);
                    next.readmit(VmId(*id), settings, overhead(*beside)).unwrap();
                }
                self.policy = next;
            }
        }
    }
}

fn settings(memory: u64, cap: u64, min: u64, reserve_swap: bool) -> VmSettings {
    let (cap, min) = (PageCount(cap), PageCount(min));
    VmSettings { cap, min, reserve_swap, ..VmSettings::new(PageCount(memory)) }
}

fn overhead(beside: u64) -> Overhead {
    // In two parts, which are one promise.
    Overhead { overhead: PageCount(beside / 2), reserve: PageCount(beside - beside / 2) }
}

/// Whatever is asked for, in whatever order: no more is promised than there is, or lacks, where something was lost, more
/// than it did before.
#[test]
fn no_command_breaks_a_promise() {
    let (mut obeyed, mut refused, mut lacked) = (0, 0, 0);
    for seed in 0..400 {
        let mut world = World::new(seed);
        let has_bad_luck = seed % 2 == 1;
        for step in 0..200 {
            let before = world.naive.missing();
            let is_new = world.next;
            if let Some((done, then)) = world.command() {
                let after = then.missing();
                let is_add = world.next > is_new;
                let fits = |before: u64, after: u64| after == 0 || (after <= before && !is_add);
                let expected = fits(before.0, after.0) && fits(before.1, after.1);
                assert_eq!(done.is_ok(), expected, "seed {seed}, step {step}: {before:?} -> {after:?}, {done:?}");
                if expected {
                    world.naive = then;
                    obeyed += 1;
                } else {
                    refused += 1;
                }
            }
            world.harmless();
            if has_bad_luck && world.chance.per_mille(100) {
                world.bad_luck();
            }
            let missing = world.naive.missing();
            assert!(has_bad_luck || missing == (0, 0), "seed {seed}, step {step}: promised and not there: {missing:?}");
            lacked += u32::from(missing != (0, 0));
            let stands = world.policy.admission(&Change::Nothing, &world.naive.space()).missing();
            assert_eq!((stands.memory.0, stands.swap.0), missing, "seed {seed}, step {step}: said as it is");
        }
    }
    assert!(obeyed > 5000 && refused > 5000 && lacked > 1000, "{obeyed} {refused} {lacked}");
}
