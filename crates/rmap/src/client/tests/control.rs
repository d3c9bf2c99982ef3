//! The control plane is silent, or says what cannot be.

use super::*;
use crate::control::Replica;
use crate::units::Version;

const MAP_PATIENCE: Duration = Duration::from_millis(400);

fn results(pool: &mut Pool) -> Vec<Event> {
    std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).collect()
}

fn declined(writes: usize) -> Vec<Event> {
    vec![Event::Written { token: 1, result: Err(Failure::Declined) }; writes]
}

/// Who has another place for its pages is told in time that nothing says where they are to go; slabs that somebody has are
/// written to as ever.
#[test]
fn what_a_silent_control_plane_holds_up_is_declined() {
    let mut pool = Pool::new(2, 2, 4);
    pool.client.config.map_patience = Some(MAP_PATIENCE);
    assert_eq!([pool.write(0, 1), pool.write(8, 1)], [Ok(()); 2]);
    pool.no_control = true;
    pool.begin_write(16, 2);
    pool.pass(MAP_PATIENCE / 2);
    assert_eq!(results(&mut pool), []);
    assert!(pool.client.control_silent_for(pool.now).is_some_and(|silent| silent >= MAP_PATIENCE / 4));
    pool.pass(MAP_PATIENCE);
    assert_eq!(results(&mut pool), declined(1));
    // At once from now on: in the same slab, in one that nobody has asked for, in one that is being given back.
    assert!(pool.client.discard_slab(pool.now, pool.space, SlabNo(1)));
    [17, 24, 8].into_iter().for_each(|page| pool.begin_write(page, 2));
    pool.client.on_timeout(pool.now);
    assert_eq!((results(&mut pool), pool.client.stats().unmapped), (declined(3), 4));
    pool.begin_write(0, 3);
    pool.expect_written(1);
    pool.no_control = false;
    pool.pass(Duration::from_secs(2));
    assert_eq!(pool.client.control_silent_for(pool.now), None);
    // What was declined has never come to be.
    assert_eq!([pool.read(0), pool.read(8), pool.read(16), pool.read(17)], [Ok(3), Ok(0), Ok(0), Ok(0)]);
    assert_eq!([pool.write(17, 4), pool.write(24, 4), pool.write(8, 4)], [Ok(()); 3]);
    assert_eq!([pool.read(17), pool.read(24), pool.read(8)], [Ok(4); 3]);
}

/// Who has none waits, however long it takes.
#[test]
fn what_has_nowhere_else_to_go_waits() {
    let mut pool = Pool::new(1, 1, 4);
    pool.no_control = true;
    pool.begin_write(0, 1);
    pool.pass(Duration::from_secs(60));
    assert_eq!(results(&mut pool), []);
    pool.no_control = false;
    pool.pass(Duration::from_secs(2));
    pool.expect_written(1);
}

/// Without copies a slab is empty only if that is said.
#[test]
fn what_cannot_be_is_no_zeros() {
    let copy = Replica { server: ServerId(0), grant: Version::new(Generation(1), 1, false) };
    let of = |lost, empty, replicas: &[Replica]| MapEntry { revision: 1, replicas: replicas.into(), lost, empty };
    for (entry, expected) in [
        (of(false, true, &[]), Ok(0)),
        (of(true, false, &[]), Err(Failure::Lost)),
        (of(false, false, &[]), Err(Failure::Lost)),
        (of(true, true, &[]), Err(Failure::Lost)),
        (of(true, false, &[copy]), Err(Failure::Lost)),
        (of(false, true, &[copy]), Err(Failure::Lost)),
    ] {
        let mut pool = Pool::new(1, 1, 4);
        let spec = SpaceSpec { id: SpaceId(2), pages: 8, copies: 1, reserve: 0, key: [2; KEY_SIZE] };
        pool.space = pool.client.attach(&spec, Generation(2), &[(SlabNo(0), entry.clone())]).unwrap();
        assert_eq!(pool.read(3), expected, "{entry:?}");
        assert_eq!(entry.is_sound(), entry.empty != entry.lost && entry.replicas.is_empty(), "{entry:?}");
    }
    assert!(of(false, false, &[copy]).is_sound());
}
