//! Slabs on a disk, because no other server takes them.

use super::*;

/// Longer than a client is without news of a server's load.
const NEWS: Duration = Duration::from_secs(3);

fn free(pool: &Pool) -> Vec<usize> {
    pool.servers.iter().map(Server::free_slabs).collect()
}

#[test]
fn a_disk_takes_what_no_memory_does() {
    let mut pool = Pool::with(2, 1, 1, Some(1));
    assert_eq!(pool.write(0, 1), Ok(()));
    assert_eq!(free(&pool), [0, 1], "memory comes first");
    assert_eq!(pool.write(8, 2), Ok(()));
    assert_eq!(free(&pool), [0, 0]);
    assert_eq!(pool.write(16, 3), Err(Failure::Declined), "the disk is full, too");
    assert_eq!([pool.read(0), pool.read(8), pool.read(9)], [Ok(1), Ok(2), Ok(0)]);
}

#[test]
fn what_is_on_a_disk_goes_to_memory_as_soon_as_there_is_some() {
    for copies in [1, 2] {
        let mut pool = Pool::with(3, copies, 2, Some(2));
        (0..2).for_each(|server| pool.servers[server].set_pressure(Pressure::Yellow));
        pool.pass(NEWS);
        assert_eq!(pool.write(0, 1), Ok(()));
        assert_eq!(free(&pool), [2, 2, 1], "one copy is enough for a write to end");
        (0..2).for_each(|server| pool.servers[server].set_pressure(Pressure::None));
        pool.pass(NEWS);
        assert_eq!(pool.client.in_sync(pool.space), (1, 1));
        assert_eq!((free(&pool)[2], free(&pool)[0] + free(&pool)[1]), (2, 4 - copies));
        assert_eq!(pool.read(0), Ok(1));
    }
}

#[test]
fn an_only_copy_goes_to_a_disk_before_its_server_ends() {
    let mut pool = Pool::with(2, 1, 2, Some(1));
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.servers[0].begin_drain();
    pool.pass(NEWS);
    assert!(pool.servers[0].is_drained());
    pool.deaf = vec![0];
    assert_eq!(pool.read(0), Ok(1));
    assert_eq!(free(&pool)[1], 1);
}

/// The second of two copies is not worth the disk's time.
#[test]
fn a_copy_that_is_not_the_only_one_does_not_go_to_a_disk() {
    let mut pool = Pool::with(3, 2, 2, Some(2));
    assert_eq!(pool.write(0, 1), Ok(()));
    assert_eq!(free(&pool), [1, 1, 2]);
    pool.servers[0].set_pressure(Pressure::Orange);
    pool.pass(NEWS);
    assert_eq!(free(&pool), [1, 1, 2]);
}

#[test]
fn who_has_a_disk_of_its_own_is_declined() {
    let mut pool = Pool::with(2, 1, 1, Some(1));
    pool.client.pool.config.uses_overflow_disk = false;
    assert_eq!(pool.write(0, 1), Ok(()));
    assert_eq!(pool.write(8, 2), Err(Failure::Declined));
}
