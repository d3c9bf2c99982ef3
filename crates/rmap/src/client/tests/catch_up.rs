//! Writes to a slab while a copy of it is being made at a server that is slower than the others.

use super::*;
use crate::client::index::{PeerIndex, SpaceIndex};
use crate::client::ops::READS_RESERVED;
use crate::client::repair::Step;
use crate::units::SlabNo;

/// A write that waits for nobody but the copy in the making, at server `new`, whose answers come late from now on.
fn write_behind() -> (Pool, usize) {
    let mut pool = Pool::new(2, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let old = usize::from(
        !pool
            .client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry)
            .has(PeerIndex(0)),
    );
    let new = 1 - old;
    pool.servers[old].set_pressure(crate::wire::message::Pressure::Orange);
    // Pages go through the client, which takes no answer of the new server.
    pool.client.pool.sessions.peers[PeerIndex(old)].distrust();
    pool.begin_write_only(2);
    while pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)]
        .repair
        .as_ref()
        .is_none_or(|repair| repair.step != Step::Copying)
    {
        assert!(pool.step());
    }
    pool.expect_written(1);
    pool.slow = Some(new);
    pool.begin_write_only(3);
    pool.pass(Duration::from_millis(5));
    assert!(!pool.late.is_empty() && !pool.client.has_event());
    (pool, new)
}

impl Pool {
    fn begin_write_only(&mut self, byte: u8) {
        self.client.write(self.now, self.space, PageNo(0), Class::Eviction, &[byte; PAGE_SIZE], 1).unwrap();
    }
}

/// Otherwise it would always lack what was written last, and the other server would never be rid of its copy.
#[test]
fn writes_wait_for_a_copy_that_lacks_nothing_else() {
    let (mut pool, new) = write_behind();
    pool.deliver_late();
    pool.pass(Duration::from_millis(5));
    pool.expect_written(1);
    pool.pass(FOR_GOOD);
    assert!(
        pool.client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry)
            .has(PeerIndex(new))
    );
    assert_eq!(pool.read(0), Ok(3));
}

#[test]
fn writes_wait_no_more_for_a_copy_that_is_given_up() {
    let (mut pool, new) = write_behind();
    (pool.deaf, pool.late) = (vec![new], Vec::new());
    pool.pass(FOR_GOOD);
    pool.expect_written(1);
    assert!(
        !pool
            .client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry)
            .has(PeerIndex(new))
    );
    assert_eq!(pool.read(0), Ok(3));
}

/// What servers copy among themselves may take long; writes are done without it, and keep their slots until it has
/// them.
#[test]
fn reads_have_room_beside_writes_that_a_copy_in_the_making_lacks() {
    let mut pool = Pool::new(2, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let old = usize::from(
        !pool
            .client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry)
            .has(PeerIndex(0)),
    );
    pool.servers[old].set_pressure(crate::wire::message::Pressure::Orange);
    pool.begin_write_only(2);
    while pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)]
        .repair
        .as_ref()
        .is_none_or(|repair| repair.mirror().is_none())
    {
        assert!(pool.step());
    }
    pool.expect_written(1);
    pool.slow = Some(1 - old);
    let mut begun = 0;
    while pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[3; PAGE_SIZE], 1).is_ok() {
        while pool.step() {}
        pool.expect_written(1);
        begun += 1;
    }
    assert_eq!(begun, OPS_MAX - READS_RESERVED);
    assert_eq!(pool.read(0), Ok(3));
    pool.deliver_late();
    pool.pass(FOR_GOOD);
    assert_eq!(pool.write(0, 4), Ok(()));
    assert_eq!(pool.read(0), Ok(4));
    assert!(
        pool.client
            .pool
            .sessions
            .peers_of(&pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry)
            .has(PeerIndex(1 - old))
    );
}
