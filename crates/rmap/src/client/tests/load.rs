//! Servers whose load changes with everything that they say.

use super::many::filled;
use super::*;
use crate::client::index::PeerIndex;

const SLABS: u64 = 100;

/// The server says how it is, and is heard.
fn says(pool: &mut Pool, pressure: Pressure) {
    pool.servers[0].set_pressure(pressure);
    pool.client.pool.sessions.peers[PeerIndex(0)].ping();
    while pool.step() {}
    assert_eq!(pool.client.pool.sessions.peers[PeerIndex(0)].pressure(), pressure);
}

/// A reply is 80 bytes long. All slabs are looked at for the first, and for the rest together.
#[test]
fn load_that_changes_with_each_reply_is_looked_at_now_and_then() {
    let mut pool = filled(2, SLABS);
    pool.pass(Duration::from_secs(1));
    let before = pool.client.advanced;
    for reply in 0..1000 {
        says(&mut pool, if reply % 2 == 0 { Pressure::Orange } else { Pressure::None });
    }
    let looked_at = pool.client.advanced - before;
    assert!((SLABS..3 * SLABS).contains(&looked_at), "{looked_at}");
    // What was said last is not forgotten.
    says(&mut pool, Pressure::Orange);
    let before = pool.client.advanced;
    assert!(pool.client.pool.sessions.load_due().is_some());
    pool.pass(Duration::from_millis(200));
    assert!(pool.client.advanced - before >= SLABS);
    assert_eq!(pool.client.pool.sessions.load_due(), None);
}

/// Copies in the making are counted as they begin and end.
#[test]
fn copies_in_the_making_are_counted() {
    let mut pool = filled(3, 40);
    assert_eq!(
        (pool.client.redundancy.repairs_running(&pool.client.pool), pool.client.redundancy.repairs.len()),
        (0, 0)
    );
    pool.deaf = vec![2];
    let mut most = 0;
    for _ in 0..2000 {
        pool.now = pool.now + Duration::from_millis(1);
        pool.time_passes();
        while pool.step() {
            most = most.max(pool.client.redundancy.repairs_running(&pool.client.pool));
        }
    }
    assert_eq!(most, crate::client::repair::REPAIRS_MAX);
    assert_eq!(
        (pool.client.redundancy.repairs_running(&pool.client.pool), pool.client.redundancy.repairs.len()),
        (0, 0)
    );
    assert_eq!(pool.client.in_sync(pool.space).1, 40);
}
