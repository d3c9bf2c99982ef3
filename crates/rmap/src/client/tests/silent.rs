//! Servers that say nothing more while copies are being made: others are not kept waiting.

use super::cold::kill;
use super::*;
use crate::client::index::SpaceIndex;
use crate::client::repair::REPAIRS_MAX;

const SLABS: u32 = 40;
/// All copies are made in that time, and nothing is waited for so long.
const LONG: Duration = Duration::from_secs(3);

/// A server has lost its copies, and while they are made anew another one falls silent for good. What only that one has waits for
/// it; the rest does not wait for its turn after that.
#[test]
fn what_waits_for_a_silent_server_takes_no_turn() {
    let mut most = 0;
    for steps in (0..200).step_by(20) {
        let mut pool = Pool::of(4, 2, 64, 8 * u64::from(SLABS), None);
        for slab in 0..u64::from(SLABS) {
            assert_eq!(pool.write(8 * slab, slab as u8), Ok(()));
        }
        kill(&mut pool, 0, 2);
        // It is noticed, and copies begin.
        while pool.client.pool.map.spaces[SpaceIndex(0)].slabs.iter().all(|slab| slab.repair.is_none()) {
            pool.now = pool.now + Duration::from_millis(1);
            pool.time_passes();
            pool.step();
        }
        (0..steps).for_each(|_| pool.single_step());
        pool.deaf = vec![1];
        pool.pass(LONG);
        let waits = |slab: &u32| pool.holders(SlabNo(*slab)) == [1];
        most = most.max((0..SLABS).filter(waits).count());
        for slab in (0..SLABS).filter(|slab| !waits(slab)) {
            let copies = pool.holders(SlabNo(slab));
            assert!(copies.len() == 2 && !copies.contains(&1), "after {steps} steps slab {slab} is at {copies:?}");
        }
    }
    assert!(most > REPAIRS_MAX, "only {most} have waited");
}
