//! The parity of a group is to leave, and some of what the group has is gone, or damaged.

use super::cold::{AFTER, LONG, byte, cold, cold_without_room, hand_over, kill, read, write_and_dissolve};
use super::*;
use crate::client::index::SpaceIndex;
use crate::client::slab::Phase;
use crate::units::SlabNo;

/// As long as writes wait for a silent server to come back.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pages of the one group, but those that were written since.
fn assert_right(pool: &mut Pool, except: &[u64]) {
    for page in (0..32).filter(|page| !except.contains(page)) {
        assert_eq!(read(pool, page), Ok(byte(page)), "page {page}");
    }
}

fn with_parity(pool: &Pool) -> usize {
    pool.client.parity(pool.space).with_parity
}

fn next_event(pool: &mut Pool) -> Option<Event> {
    pool.client.poll_event(&mut [0; PAGE_SIZE])
}

/// A page that is had without waiting.
fn read_at_once(pool: &mut Pool, page: u64) -> Result<u8, Failure> {
    pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, 2).unwrap();
    while pool.step() {}
    let mut content = [0; PAGE_SIZE];
    match pool.client.poll_event(&mut content) {
        Some(Event::Read { token: 2, result }) => result.map(|()| content[0]),
        event => panic!("{event:?} for a read"),
    }
}

/// The server of another slab has died, and nobody has noticed: that slab is in the parity alone. It is made anew first, be it for
/// a write or since nobody who comes later could put the group together.
#[test]
fn parity_does_not_leave_for_a_copy_that_may_be_gone() {
    for is_written in [true, false] {
        let mut pool = cold_without_room();
        pool.client.set_parity_after(None);
        let node = pool.holders(SlabNo(1))[0];
        kill(&mut pool, node, 2);
        if is_written {
            pool.begin_write(3, 200);
        } else {
            let space = pool.space.0;
            let first = pool.client.pool.map.spaces[space].layout.table_page(SlabNo(0), 0);
            let ledger = pool.client.pool.map.slab_of(first).unwrap();
            pool.client.pool.map.spaces[space].slabs[ledger].phase = Phase::Lost;
            pool.client.pool.map.mark_group(space, SlabNo(0));
            pool.client.settle(pool.now);
            while pool.step() {}
        }
        assert_eq!(with_parity(&pool), 1);
        pool.pass(LONG);
        pool.expect_written(usize::from(is_written));
        let written = if is_written { 200 } else { byte(3) };
        assert_eq!((with_parity(&pool), read(&mut pool, 3)), (0, Ok(written)));
        assert_right(&mut pool, &[3]);
        let lost =
            pool.client.pool.map.spaces[pool.space.0].slabs.iter().take(4).filter(|slab| slab.entry.lost).count();
        assert_eq!(lost, 0);
    }
}

/// A server that is silent may be dead. Its slab is put together from the others until it is back, and where that takes too long the write
/// is declined.
#[test]
fn parity_does_not_leave_for_a_silent_server() {
    for comes_back in [true, false] {
        let mut pool = cold_without_room();
        pool.client.set_parity_after(None);
        pool.client.pool.config.grant_patience = PATIENCE;
        pool.deaf = pool.holders(SlabNo(1));
        pool.begin_write(3, 200);
        pool.pass(LONG);
        assert_eq!((next_event(&mut pool), with_parity(&pool)), (None, 1));
        assert_eq!(read_at_once(&mut pool, 8), Ok(byte(8)));
        if !comes_back {
            pool.pass(PATIENCE);
            assert_eq!(next_event(&mut pool), Some(Event::Written { token: 1, result: Err(Failure::Declined) }));
            assert_right(&mut pool, &[]);
        }
        pool.deaf.clear();
        pool.pass(Duration::from_secs(3));
        pool.expect_written(usize::from(comes_back));
        assert_eq!((with_parity(&pool), read(&mut pool, 3)), (0, Ok(if comes_back { 200 } else { byte(3) })));
        assert_right(&mut pool, &[3]);
        assert_eq!(pool.client.stats().slabs_lost, 0);
    }
}

/// A group of four slabs with parity, whose second slab has one page alone.
const ONLY: u64 = 12;

fn with_a_short_slab() -> Pool {
    let mut pool = Pool::new(7, 2, 32);
    pool.client.pool.config.scrub_pass = None;
    pool.client.set_parity_after(Some(AFTER));
    let written = (0..8).chain([ONLY]).chain(16..32);
    written.for_each(|page| assert_eq!(pool.write(page, byte(page)), Ok(())));
    pool.pass(LONG);
    assert_eq!(pool.client.parity(pool.space).whole, 1);
    pool.client.set_parity_after(None);
    pool
}

/// The server of a slab is gone, and one page that the slab would be made from is damaged: its other pages are read as long as there is
/// parity. So it stays, also where the slab had its copy until a moment ago.
#[test]
fn one_damaged_page_loses_no_slab() {
    for was_away in [false, true] {
        let mut pool = with_a_short_slab();
        let (gone, damaged) = (pool.holders(SlabNo(0))[0], pool.holders(SlabNo(1))[0]);
        [Some(ServerFault::FlipsBits), None].into_iter().for_each(|fault| pool.servers[damaged].inject(fault));
        if was_away {
            // The slab is made anew in vain, and then its server is back.
            pool.deaf = vec![gone];
            pool.pass(LONG);
            pool.deaf.clear();
            pool.pass(Duration::from_secs(2));
            assert!(pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].is_stuck);
        }
        kill(&mut pool, gone, 2);
        if !was_away {
            pool.pass(Duration::from_secs(2));
            assert!(
                pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry.lost
                    && pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].is_stuck
            );
        }
        for page in [9, 0] {
            pool.begin_write(page, 99);
            pool.pass(LONG);
            assert_eq!(next_event(&mut pool), Some(Event::Written { token: 1, result: Err(Failure::Declined) }));
        }
        assert_eq!((with_parity(&pool), pool.client.stats().slabs_lost), (1, 0));
        for hands_over in [false, true] {
            if hands_over {
                hand_over(&mut pool, false);
                pool.run();
            }
            for page in (0..8).filter(|page| *page != ONLY - 8).chain(16..32) {
                assert_eq!(read(&mut pool, page), Ok(byte(page)), "page {page}, {was_away}");
            }
            // The damaged page, and the one that it would be put together with.
            assert_eq!([read(&mut pool, ONLY), read(&mut pool, ONLY - 8)], [Err(Failure::Corrupt); 2]);
        }
    }
}

/// The server at which a slab was made anew has acknowledged its pages and has none of them. They are put together again for the slab's
/// second copy, and nobody asks that server for them over and over.
#[test]
fn what_a_server_dropped_is_put_together_again() {
    let mut pool = cold(6);
    pool.client.pool.config.scrub_pass = None;
    let node = pool.holders(SlabNo(0))[0];
    kill(&mut pool, node, 2);
    let target = loop {
        pool.now = pool.now + Duration::from_micros(100);
        pool.time_passes();
        pool.step();
        if let Some(repair) = &pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].repair {
            break repair.peer.0;
        }
    };
    pool.servers[target].inject(Some(ServerFault::LosesWrites));
    pool.pass(LONG);
    pool.servers[target].inject(None);
    assert_eq!(pool.holders(SlabNo(0)), [target]);
    write_and_dissolve(&mut pool);
    assert_eq!(read(&mut pool, 9), Ok(99));
    (0..32).filter(|page| *page != 9).for_each(|page| assert_eq!(read(&mut pool, page), Ok(byte(page)), "page {page}"));
    assert_eq!(pool.client.stats().slabs_lost, 0);
}
