//! Who keeps a sealed space makes its parity.

use super::cold::{byte, kill, read};
use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::units::SlabNo;

/// Longer than anything takes for which there is room.
const LONG: Duration = Duration::from_secs(3);
/// A group of four slabs.
const PAGES: u64 = 32;
const SERVERS: usize = 6;

/// A sealed space with two copies of each slab.
fn sealed() -> Pool {
    let mut pool = Pool::of(SERVERS, 2, 32, PAGES, None);
    (0..PAGES).for_each(|page| assert_eq!(pool.write(page, byte(page)), Ok(())));
    let entries = pool.client.pool.map.spaces[SpaceIndex(0)].slabs.iter().map(|slab| slab.entry.clone());
    let map = (0..).map(SlabNo).zip(entries).collect();
    pool.today = Today { generation: Generation(2), sealed: true, map };
    pool.client.space_taken(SpaceIndex(0));
    let spec = SpaceSpec { id: SpaceId(1), pages: PAGES, copies: 2, reserve: 0, key: [2; KEY_SIZE] };
    pool.space = pool.client.attach_reader(&spec, &pool.today).unwrap();
    pool.run();
    pool
}

/// Servers that lend nothing. Their word rides in replies.
fn full(pool: &mut Pool, servers: impl Iterator<Item = usize>) {
    servers.for_each(|node| pool.servers[node].set_pressure(Pressure::Yellow));
    pool.pass(Duration::from_secs(2));
}

fn room_everywhere(pool: &mut Pool) {
    pool.servers.iter_mut().for_each(|server| server.set_pressure(Pressure::None));
    pool.pass(LONG);
}

fn ledger(pool: &Pool) -> SlabNo {
    let first = pool.client.pool.map.spaces[pool.space.0].layout.table_page(SlabNo(0), 0);
    pool.client.pool.map.slab_of(first).unwrap()
}

fn copies_of_members(pool: &Pool) -> usize {
    (0..4).map(|slab| pool.holders(SlabNo(slab)).len()).sum()
}

/// Any server may go, and then one that has the list of versions.
fn assert_safe(pool: &mut Pool) {
    assert_eq!(pool.client.parity(pool.space).whole, 1);
    for (node, life) in (0..SERVERS).zip(2..) {
        kill(pool, node, life);
        pool.pass(LONG);
        (0..PAGES).for_each(|page| assert_eq!(read(pool, page), Ok(byte(page)), "page {page} after {node}"));
    }
    assert_eq!((pool.client.tenure(pool.space), pool.client.parity(pool.space).whole), (Tenure::Keeper, 1));
}

/// The list of versions finds room at one server: it would be lost with that, and so would be what is put together.
#[test]
fn parity_waits_for_both_copies_of_the_ledger() {
    let mut pool = sealed();
    let holders: Vec<usize> = (0..4).flat_map(|slab| pool.holders(SlabNo(slab))).collect();
    let open = (0..SERVERS).min_by_key(|node| holders.iter().filter(|holder| *holder == node).count()).unwrap();
    full(&mut pool, (0..SERVERS).filter(|node| *node != open));
    pool.client.make_parity(pool.now, pool.space);
    pool.pass(LONG);
    assert_eq!((pool.client.tenure(pool.space), pool.holders(ledger(&pool))), (Tenure::Keeper, vec![open]));
    let view = pool.client.parity(pool.space);
    assert_eq!((view.groups, view.with_parity, copies_of_members(&pool)), (1, 0, 8));
    room_everywhere(&mut pool);
    assert_eq!(copies_of_members(&pool), 4);
    assert_safe(&mut pool);
}

/// It loses one of its copies when there is parity, and before members have dropped theirs: they keep them until it has two again.
#[test]
fn copies_stay_while_the_ledger_has_one() {
    let mut pool = sealed();
    pool.client.make_parity(pool.now, pool.space);
    while pool.client.parity(pool.space).with_parity == 0 {
        pool.now = pool.now + Duration::from_micros(100);
        pool.time_passes();
        pool.step();
    }
    let before = copies_of_members(&pool);
    assert!(before > 4);
    pool.servers.iter_mut().for_each(|server| server.set_pressure(Pressure::Yellow));
    let copies = pool.holders(ledger(&pool));
    let (space, gone) = (pool.space.0, copies[0]);
    let slab = ledger(&pool);
    pool.client.redundancy.copy_lost(
        &mut pool.client.pool,
        &mut pool.client.pages,
        &mut pool.client.parity,
        space,
        slab,
        PeerIndex(gone),
    );
    pool.client.settle(pool.now);
    pool.pass(LONG);
    assert_eq!(pool.holders(ledger(&pool)), copies[1..]);
    let after = copies_of_members(&pool);
    // One change of the group was asked for before that.
    assert!(after + 1 >= before && pool.client.parity(pool.space).whole == 0, "{after} of {before}");
    room_everywhere(&mut pool);
    assert_safe(&mut pool);
}
