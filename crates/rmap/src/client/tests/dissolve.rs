//! A group is to lose its parity before it is written to, and the control plane does not say that it has.

use super::cold::{assert_right, cold};
use super::*;
use crate::client::index::{GroupIndex, SpaceIndex};
use crate::units::SlabNo;

/// As long as the control plane may be silent.
const PATIENCE: Duration = Duration::from_secs(3);
/// A group has its second copies again by then.
const LONG: Duration = Duration::from_millis(700);
/// Questions are asked again by then.
const ANSWERED: Duration = Duration::from_secs(2);
/// What is asked of a control plane that is silent waits for so long, and a little.
const GRACE: Duration = Duration::from_millis(1010);
/// Pages of two slabs of the first group.
const PAGES: [u64; 2] = [3, 20];

/// What the control plane has no answer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    /// May the parity of the first group leave?
    OfParity,
    /// Any question: not even the second copies get into the map.
    OfEverything,
}

impl Silence {
    fn begins(self, pool: &mut Pool) {
        let parity = pool.client.pool.map.spaces[SpaceIndex(0)].layout.parity(GroupIndex(0));
        match self {
            Silence::OfParity => pool.no_control_of = Some(parity),
            Silence::OfEverything => pool.no_control = true,
        }
    }
}

fn speaks(pool: &mut Pool) {
    (pool.no_control, pool.no_control_of) = (false, None);
    pool.pass(ANSWERED);
}

fn results(pool: &mut Pool) -> Vec<Event> {
    std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).collect()
}

fn unanswered(writes: usize) -> Vec<Event> {
    vec![Event::Written { token: 1, result: Err(Failure::Silent) }; writes]
}

/// Two groups with parity. The first is written to, and nobody says that it has none any more.
fn dissolving(silence: Silence) -> Pool {
    let mut pool = cold(5);
    pool.client.set_parity_after(None);
    pool.client.pool.config.error_after = Some(PATIENCE);
    silence.begins(&mut pool);
    PAGES.into_iter().for_each(|page| pool.begin_write(page, 200));
    pool.pass(LONG);
    assert_eq!(
        pool.client.pool.map.is_parting(SpaceIndex(0), SlabNo(0)),
        silence == Silence::OfParity,
        "its slabs are safe without it"
    );
    assert_eq!(results(&mut pool), [], "{silence:?}");
    pool
}

/// What was there before can be read for as long as it takes; once there are answers, what is written then is.
#[test]
fn writes_to_a_group_end_if_nobody_says_that_its_parity_has_left() {
    for silence in [Silence::OfParity, Silence::OfEverything] {
        let mut pool = dissolving(silence);
        pool.pass(PATIENCE - LONG - Duration::from_millis(100));
        assert_eq!(results(&mut pool), [], "{silence:?}");
        pool.pass(LONG);
        assert_eq!(results(&mut pool), unanswered(2), "{silence:?}");
        assert_right(&mut pool, &[]);
        // At once from now on, in all slabs of the group.
        [3, 10, 20, 31].into_iter().for_each(|page| pool.begin_write(page, 201));
        pool.client.on_timeout(pool.now);
        assert_eq!((results(&mut pool), pool.client.stats().unmapped), (unanswered(4), 6), "{silence:?}");
        assert_eq!((pool.client.stats().groups_dissolved, pool.client.parity(pool.space).with_parity), (0, 2));
        speaks(&mut pool);
        assert_eq!(results(&mut pool), []);
        assert_right(&mut pool, &[]);
        assert_eq!((pool.client.stats().groups_dissolved, pool.client.parity(pool.space).with_parity), (1, 1));
        PAGES.into_iter().for_each(|page| assert_eq!(pool.write(page, 202), Ok(()), "{silence:?}"));
        PAGES.into_iter().for_each(|page| assert_eq!(pool.read(page), Ok(202)));
        assert_right(&mut pool, &PAGES);
        assert!(pool.client.is_idle() && pool.client.pages.ops.has_no_writer());
    }
}

/// A shorter silence fails nothing: what waited is written.
#[test]
fn writes_to_a_group_go_on_when_its_parity_has_left() {
    for silence in [Silence::OfParity, Silence::OfEverything] {
        let mut pool = dissolving(silence);
        pool.pass(PATIENCE / 2);
        assert_eq!(results(&mut pool), [], "{silence:?}");
        speaks(&mut pool);
        pool.expect_written(2);
        PAGES.into_iter().for_each(|page| assert_eq!(pool.read(page), Ok(200)));
        assert_right(&mut pool, &PAGES);
        assert_eq!((pool.client.stats().unmapped, pool.client.stats().groups_dissolved), (0, 1), "{silence:?}");
    }
}

/// A slab that nobody has yet is given to nobody before its group is free.
#[test]
fn a_write_to_a_new_slab_of_a_group_ends_too() {
    for silence in [Silence::OfParity, Silence::OfEverything] {
        let mut pool = cold(5);
        pool.client.pool.config.error_after = Some(PATIENCE);
        let parity = pool.client.pool.map.spaces[SpaceIndex(0)].layout.parity(GroupIndex(1));
        silence.begins(&mut pool);
        pool.no_control_of = pool.no_control_of.map(|_| parity);
        pool.begin_write(56, 200);
        pool.pass(PATIENCE / 2);
        assert_eq!(results(&mut pool), [], "{silence:?}");
        pool.pass(PATIENCE);
        assert_eq!(results(&mut pool), unanswered(1), "{silence:?}");
        assert_eq!(pool.holders(SlabNo(7)), []);
        speaks(&mut pool);
        assert_eq!((results(&mut pool), pool.read(56)), (vec![], Ok(0)));
        assert_eq!((pool.write(56, 201), pool.read(56)), (Ok(()), Ok(201)), "{silence:?}");
        assert_right(&mut pool, &[56]);
    }
}

/// Nor does it help them that others are answered, or harm others.
#[test]
fn one_group_without_an_answer_fails_alone() {
    let mut pool = dissolving(Silence::OfParity);
    pool.begin_write(40, 201);
    pool.pass(LONG);
    pool.expect_written(1);
    pool.pass(PATIENCE);
    assert_eq!((results(&mut pool), pool.read(40)), (unanswered(2), Ok(201)));
    assert_eq!(pool.client.stats().groups_dissolved, 1);
    assert_right(&mut pool, &[40]);
    pool.begin_write(41, 202);
    pool.expect_written(1);
}

/// Nothing was asked about another group yet: whether there are answers shows within a second.
#[test]
fn the_first_write_to_another_group_is_waited_for() {
    for silence in [Silence::OfParity, Silence::OfEverything] {
        let mut pool = dissolving(silence);
        pool.pass(PATIENCE);
        assert_eq!(results(&mut pool), unanswered(2));
        pool.begin_write(40, 201);
        pool.pass(GRACE);
        let (writes, byte) = match silence {
            Silence::OfParity => (vec![Event::Written { token: 1, result: Ok(()) }], 201),
            Silence::OfEverything => (unanswered(1), 41),
        };
        assert_eq!((results(&mut pool), pool.read(40)), (writes, Ok(byte)), "{silence:?}");
        assert_right(&mut pool, &[40]);
    }
}
