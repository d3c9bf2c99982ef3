use proptest::prelude::*;

use super::*;

fn room((dram_bytes, swap_bytes): (u64, u64)) -> MoveRoom {
    MoveRoom { dram_bytes, swap_bytes }
}

fn rooms(list: &[(u64, u64)]) -> Vec<MoveRoom> {
    list.iter().copied().map(room).collect()
}

/// VMs that take the same on all hosts.
fn same(vms: &[(u64, u64)], hosts: usize) -> Vec<Wanted> {
    vms.iter().map(|needs| vec![Ok(room(*needs)); hosts]).collect()
}

fn planned(vms: &[Wanted], free: &[MoveRoom]) -> Vec<Option<usize>> {
    plan(vms, free).into_iter().map(|place| place.map(|HostIdx(host)| host)).collect()
}

#[test]
fn vms_are_spread_and_fit_if_that_is_possible() {
    let check = |vms: &[(u64, u64)], hosts: &[(u64, u64)], expected: &[Option<usize>]| {
        assert_eq!(planned(&same(vms, hosts.len()), &rooms(hosts)), expected, "{vms:?} on {hosts:?}");
    };
    check(&[], &[(9, 9)], &[]);
    check(&[(1, 1)], &[], &[None]);
    check(&[(5, 1)], &[(5, 1)], &[Some(0)]);
    check(&[(5, 1)], &[(4, 9)], &[None]);
    check(&[(1, 5)], &[(9, 4)], &[None]);
    // Each to the host that is less full then.
    check(&[(2, 0), (2, 0), (2, 0), (2, 0)], &[(10, 1), (10, 1)], &[Some(0), Some(1), Some(0), Some(1)]);
    check(&[(1, 0), (3, 0)], &[(10, 1), (30, 1)], &[Some(0), Some(1)]);
    // Spreading would leave no room for the big one.
    check(&[(3, 0), (3, 0), (2, 0), (2, 0), (2, 0)], &[(6, 1), (6, 1)], &[Some(0), Some(0), Some(1), Some(1), Some(1)]);
    // One resource is enough to be full.
    check(&[(1, 6), (6, 1), (1, 6)], &[(7, 7), (7, 7)], &[Some(0), Some(1), Some(1)]);
    // As many as possible, if not all.
    check(&[(10, 0), (6, 0), (6, 0)], &[(12, 1)], &[None, Some(0), Some(0)]);
    check(&[(20, 0), (6, 0)], &[(12, 1)], &[None, Some(0)]);
}

#[test]
fn hosts_that_refuse_a_vm_do_not_get_it() {
    let no = || Err("it takes no VMs".to_owned());
    let vms = [vec![no(), Ok(room((1, 1)))], vec![Ok(room((1, 1))), no()], vec![no(), no()]];
    let free = rooms(&[(9, 9), (9, 9)]);
    assert_eq!(planned(&vms, &free), [Some(1), Some(0), None]);
    assert!(fits_alone(&vms[0], &free) && !fits_alone(&vms[2], &free));
    // What only one takes is left to those that can go nowhere else.
    let vms = [vec![Ok(room((5, 0))), Ok(room((5, 0)))], vec![Ok(room((4, 0))), no()]];
    assert_eq!(planned(&vms, &rooms(&[(6, 1), (5, 1)])), [Some(1), Some(0)]);
}

/// So many that no exact look ends.
#[test]
fn many_vms_are_planned_quickly_and_nothing_is_overbooked() {
    let vms: Vec<(u64, u64)> = (0..300).map(|vm| (10 + vm % 7, 3 + vm % 5)).collect();
    let free = rooms(&[(900, 400), (1200, 500), (900, 200)]);
    let places = planned(&same(&vms, 3), &free);
    check_room(&same(&vms, 3), &free, &places);
    assert!(places.iter().flatten().count() > 150, "{}", places.iter().flatten().count());
}

fn check_room(vms: &[Wanted], free: &[MoveRoom], places: &[Option<usize>]) {
    let mut left: Vec<(i128, i128)> =
        free.iter().map(|room| (i128::from(room.dram_bytes), i128::from(room.swap_bytes))).collect();
    for (vm, place) in vms.iter().zip(places) {
        let Some(host) = place else { continue };
        let needs = vm[*host].as_ref().expect("it goes where it can");
        left[*host].0 -= i128::from(needs.dram_bytes);
        left[*host].1 -= i128::from(needs.swap_bytes);
    }
    assert!(left.iter().all(|(dram, swap)| *dram >= 0 && *swap >= 0), "{left:?}");
}

/// The most VMs that have room, by trying each way.
fn most(vms: &[Wanted], free: &[MoveRoom]) -> usize {
    let ways = (free.len() + 1).pow(vms.len() as u32);
    let placed = |mut way: usize| {
        let mut left: Vec<MoveRoom> = free.to_vec();
        let mut count = 0;
        for vm in vms {
            let host = way % (free.len() + 1);
            way /= free.len() + 1;
            if host == free.len() {
                continue;
            }
            let needs = vm[host].as_ref().ok()?;
            left[host].dram_bytes = left[host].dram_bytes.checked_sub(needs.dram_bytes)?;
            left[host].swap_bytes = left[host].swap_bytes.checked_sub(needs.swap_bytes)?;
            count += 1;
        }
        Some(count)
    };
    (0..ways).filter_map(placed).max().unwrap_or(0)
}

fn needs() -> impl Strategy<Value = Result<MoveRoom, String>> {
    prop_oneof![
        9 => (0..12_u64, 0..12_u64).prop_map(|needs| Ok(room(needs))),
        1 => Just(Err("no".to_owned())),
    ]
}

fn case() -> impl Strategy<Value = (Vec<Wanted>, Vec<MoveRoom>)> {
    (0..4_usize, 0..7_usize).prop_flat_map(|(hosts, vms)| {
        let free = proptest::collection::vec((0..20_u64, 0..20_u64).prop_map(room), hosts);
        (proptest::collection::vec(proptest::collection::vec(needs(), hosts), vms), free)
    })
}

proptest! {
    #[test]
    fn as_many_have_a_place_as_can_have_one((vms, free) in case()) {
        let places = planned(&vms, &free);
        check_room(&vms, &free, &places);
        prop_assert_eq!(places.iter().flatten().count(), most(&vms, &free));
    }
}
