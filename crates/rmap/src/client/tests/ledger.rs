//! Many spaces depend on the ledger, and some of its servers are silent.

use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ledger::Table;
use crate::client::ops::OWN_MAX;
use crate::client::slab::Phase;
use crate::units::SlabNo;

/// As long as nothing is written to it, a slab is not cold; and longer than all takes until its group has parity.
const AFTER: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_millis(3000);
const SLAB: u64 = 8;
/// More than there are slots for their parts of the ledger.
const SLABS: u64 = 20;
/// Servers of a space.
const SERVERS: usize = 6;
/// As they are attached first.
const ONE: SpaceIndex = SpaceIndex(0);
const OTHER: SpaceIndex = SpaceIndex(1);

fn spec(space: SpaceIndex, pages: u64) -> SpaceSpec {
    SpaceSpec { id: SpaceId(space.0 as u64 + 1), pages, copies: 2, reserve: 0, key: [2; KEY_SIZE] }
}

fn byte(space: SpaceIndex, slab: u64) -> u8 {
    (100 * space.0 as u64 + slab) as u8 + 1
}

fn pressures(pool: &mut Pool, servers: std::ops::Range<usize>, pressure: Pressure) {
    servers.for_each(|node| pool.servers[node].set_pressure(pressure));
    // Its word rides in replies.
    pool.pass(Duration::from_secs(2));
}

/// Two spaces with parity, each of which has all that it has at six servers of its own.
fn two_cold() -> Pool {
    let mut pool = Pool::of(2 * SERVERS, 2, 32, SLABS * SLAB, None);
    pool.client.set_parity_after(Some(AFTER));
    pressures(&mut pool, SERVERS..2 * SERVERS, Pressure::Yellow);
    for space in [ONE, OTHER] {
        if space == OTHER {
            pressures(&mut pool, 0..SERVERS, Pressure::Yellow);
            pressures(&mut pool, SERVERS..2 * SERVERS, Pressure::None);
            pool.space = pool.client.attach(&spec(OTHER, SLABS * SLAB), Generation(1), &[]).unwrap();
        }
        (0..SLABS).for_each(|slab| assert_eq!(pool.write(slab * SLAB, byte(space, slab)), Ok(())));
        pool.pass(LONG);
        let groups = SLABS as usize / 4;
        let view = ParityView { groups, with_parity: groups, whole: groups, stuck: 0 };
        assert_eq!(pool.client.parity(pool.space), view);
    }
    let at = |pool: &Pool, space: SpaceIndex| -> Vec<usize> {
        let slabs = pool.client.pool.map.spaces[space].slabs.iter();
        slabs.flat_map(|slab| pool.client.pool.sessions.peers_of(&slab.entry).iter()).map(|peer| peer.0).collect()
    };
    assert!(at(&pool, ONE).iter().all(|node| *node < SERVERS) && at(&pool, OTHER).iter().all(|node| *node >= SERVERS));
    pool.client.set_parity_after(None);
    pool
}

/// Another owner of a space, whose place among the client's is returned.
fn take_over(pool: &mut Pool, space: SpaceIndex, pages: u64) -> SpaceIndex {
    let entries = pool.client.pool.map.spaces[space].slabs.enumerate().map(|(slab, state)| (slab, state.entry.clone()));
    let map: Vec<_> = entries.filter(|(_, entry)| entry.revision > 0).collect();
    let generation = Generation(pool.client.pool.map.spaces[space].generation.0 + 1);
    pool.client.space_taken(space);
    pool.space = pool.client.attach(&spec(space, pages), generation, &map).unwrap();
    // What the owner before left elsewhere is not looked for.
    (0..2 * SERVERS).for_each(|server| pool.client.pool.map.spaces[pool.space.0].looked_at.insert(PeerIndex(server)));
    pool.client.settle(pool.now);
    pool.space.0
}

fn tables_known(pool: &Pool, space: SpaceIndex) -> usize {
    let slabs = pool.client.pool.map.spaces[space].slabs.iter().take(SLABS as usize);
    slabs.filter(|slab| matches!(slab.phase, Phase::Open)).count()
}

fn assert_right(pool: &mut Pool, space: SpaceIndex, of: SpaceIndex) {
    pool.space = SpaceRef(space);
    (0..SLABS).for_each(|slab| assert_eq!(pool.read(slab * SLAB), Ok(byte(of, slab)), "slab {slab}"));
}

/// The servers of one space are silent when it is taken over: another one that is taken over opens, and the first does when they are
/// back.
#[test]
fn a_ledger_at_silent_servers_holds_up_nobody_elses() {
    let mut pool = two_cold();
    pool.client.pool.config.error_after = None;
    pool.deaf = (0..SERVERS).collect();
    let silent = take_over(&mut pool, ONE, SLABS * SLAB);
    pool.pass(2 * SILENCE);
    let other = take_over(&mut pool, OTHER, SLABS * SLAB);
    pool.pass(2 * SILENCE);
    assert_eq!((tables_known(&pool, silent), tables_known(&pool, other)), (0, SLABS as usize));
    assert_right(&mut pool, other, OTHER);
    assert!(!pool.client.is_idle() && pool.client.pages.ops.own_begun() == 0);
    pool.deaf.clear();
    pool.pass(Duration::from_secs(3));
    assert_right(&mut pool, silent, ONE);
    assert!(pool.client.is_idle());
}

/// They fall silent when all slots are taken by what they were asked.
#[test]
fn parts_at_a_server_that_falls_silent_give_their_slots_back() {
    for comes_back in [true, false] {
        let mut pool = two_cold();
        pool.client.pool.config.error_after = None;
        let silent = take_over(&mut pool, ONE, SLABS * SLAB);
        while pool.client.pages.ops.own_begun() < OWN_MAX {
            assert!(pool.step());
        }
        pool.deaf = (0..SERVERS).collect();
        let other = take_over(&mut pool, OTHER, SLABS * SLAB);
        pool.pass(3 * SILENCE);
        assert_eq!((tables_known(&pool, silent), tables_known(&pool, other)), (0, SLABS as usize));
        assert_right(&mut pool, other, OTHER);
        if comes_back {
            pool.deaf.clear();
        } else {
            pool.client.pool.config.error_after = Some(Duration::from_secs(1));
        }
        pool.pass(Duration::from_secs(3));
        if comes_back {
            assert_right(&mut pool, silent, ONE);
        } else {
            pool.space = SpaceRef(silent);
            assert_eq!(pool.read(0), Err(Failure::Silent));
            assert!(!pool.client.is_idle() && pool.client.pages.ops.own_begun() == 0);
            pool.deaf.clear();
            pool.pass(Duration::from_secs(3));
            assert_right(&mut pool, silent, ONE);
        }
        assert!(pool.client.is_idle());
    }
}

/// What nobody answers is not tried over and over.
#[test]
fn a_line_that_waits_begins_nothing() {
    let mut pool = two_cold();
    pool.client.pool.config.error_after = None;
    pool.deaf = (0..SERVERS).collect();
    take_over(&mut pool, ONE, SLABS * SLAB);
    pool.pass(2 * SILENCE);
    assert!(!pool.client.parity.maintain_ledger(
        &mut pool.client.pool,
        &mut pool.client.pages,
        &mut pool.client.redundancy
    ));
    pool.client.parity.wake();
    assert!(!pool.client.parity.maintain_ledger(
        &mut pool.client.pool,
        &mut pool.client.pages,
        &mut pool.client.redundancy
    ));
    // One that is somebody else's leaves nothing in line.
    pool.client.space_taken(pool.space.0);
    assert!(
        pool.client.parity.is_ledger_idle(&pool.client.pool)
            && !pool.client.parity.maintain_ledger(
                &mut pool.client.pool,
                &mut pool.client.pages,
                &mut pool.client.redundancy
            )
    );
}

#[test]
fn writes_leave_slots_to_reads() {
    let mut pool = Pool::of(2, 2, 8, SLABS * SLAB, None);
    (0..SLABS / 8).for_each(|slab| assert_eq!(pool.write(slab * SLAB, 1), Ok(())));
    pool.client.set_parity_after(Some(FOR_GOOD));
    pool.deaf = vec![0, 1];
    let size = pool.client.pool.config.slab_size;
    for slab in (0..SLABS as u32).map(SlabNo) {
        pool.client.pool.map.spaces[ONE].slabs[slab].make_table(&mut tables::Tables::new(size));
        pool.client.parity.write_table(&mut pool.client.pool, ONE, slab);
    }
    pool.client.settle(pool.now);
    assert_eq!((pool.client.pages.ops.own_writes(), pool.client.pages.ops.own_begun()), (OWN_MAX / 2, OWN_MAX / 2));
    pool.deaf.clear();
    pool.pass(Duration::from_secs(3));
    let tables = pool.client.pool.map.spaces[ONE].slabs.iter().take(SLABS as usize).map(|slab| slab.table);
    assert!(tables.clone().all(|table| table == Table::Known), "{:?}", tables.collect::<Vec<_>>());
    assert!(pool.client.is_idle());
}

/// Slabs whose versions take more than one page of the ledger.
const LARGE: u32 = 1024;

/// Two slabs of one group, a page in each half of both.
fn large() -> Pool {
    let size = SlabSize::new(LARGE).unwrap();
    let mut pool = Pool::sized(size, 4, 2, 4, 2 * u64::from(LARGE), None);
    for page in [0, 600, 1024, 2000] {
        assert_eq!(pool.write(page, page as u8 | 1), Ok(()));
    }
    pool.client.set_parity_after(Some(AFTER));
    pool.pass(LONG);
    assert_eq!(pool.client.parity(pool.space).whole, 1);
    pool.client.set_parity_after(None);
    pool.client.pool.config.error_after = None;
    pool
}

fn assert_large_is_right(pool: &mut Pool) {
    for page in [0, 600, 1024, 2000] {
        assert_eq!(pool.read(page), Ok(page as u8 | 1));
    }
    assert!(pool.client.is_idle());
}

/// Until all pages of both slabs' parts are asked for.
fn take_over_large(pool: &mut Pool) -> SpaceIndex {
    let space = take_over(pool, ONE, 2 * u64::from(LARGE));
    while pool.client.pages.ops.own_begun() < 4 {
        assert!(pool.step());
    }
    space
}

/// Some of the pages of a part have come, and others are asked for again: each counts once.
#[test]
fn a_part_is_known_when_all_of_its_pages_have_come() {
    let mut pool = large();
    let space = take_over_large(&mut pool);
    let got = |pool: &Pool, slab: u32| match pool.client.pool.map.spaces[space].slabs[SlabNo(slab)].table {
        Table::Asked { next: 2, got } => got,
        table => panic!("{table:?}"),
    };
    while got(&pool, 0) + got(&pool, 1) == 0 {
        pool.single_step();
    }
    pool.deaf = (0..4).collect();
    pool.pass(2 * SILENCE);
    assert_eq!((got(&pool, 0) + got(&pool, 1), pool.client.pages.ops.own_begun()), (1, 0));
    pool.deaf.clear();
    pool.pass(Duration::from_secs(3));
    assert_large_is_right(&mut pool);
}

/// What was asked for an earlier time is not taken for what is asked now.
#[test]
fn a_part_that_is_begun_anew_waits_for_what_was_asked_before() {
    for is_put_back in [false, true] {
        let mut pool = large();
        let space = take_over_large(&mut pool);
        if is_put_back {
            pool.deaf = (0..4).collect();
            pool.pass(2 * SILENCE);
        }
        pool.client.pool.map.spaces[space].slabs[SlabNo(0)].table = Table::Unknown;
        pool.client.parity.read_table(&mut pool.client.pool, &pool.client.pages, space, SlabNo(0));
        let begun = pool.client.pool.map.spaces[space].slabs[SlabNo(0)].table != Table::Unknown;
        assert_eq!(begun, is_put_back);
        let in_line = pool.client.parity.ledger_line().filter(|turn| turn.slab == SlabNo(0)).count();
        assert_eq!(in_line, usize::from(is_put_back), "the part, and none of its pages");
        pool.deaf.clear();
        pool.pass(Duration::from_secs(3));
        assert_large_is_right(&mut pool);
    }
}
