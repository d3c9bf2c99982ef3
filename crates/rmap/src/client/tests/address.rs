//! Servers that are elsewhere than the client was told.

use super::*;
use crate::client::index::PeerIndex;

const ELSEWHERE: usize = 55;

fn hint(node: usize, at: usize) -> Hint {
    Hint { server: ServerId(node as u32), addr: addr(at), epoch: BootEpoch(1) }
}

/// A pool whose second server has a page, and is silent.
fn with_silent(copies: usize) -> Pool {
    let mut pool = Pool::new(2, copies, 4);
    pool.client.pool.config.error_after = None;
    for page in [0, 8, 16, 24] {
        assert_eq!(pool.write(page, 1 + page as u8), Ok(()));
    }
    assert!((0..4).any(|slab| pool.holders(SlabNo(slab)).contains(&1)));
    pool.at[1] = addr(ELSEWHERE);
    pool.pass(Duration::from_secs(3));
    assert!(pool.client.pool.sessions.peers[PeerIndex(1)].is_down());
    pool
}

fn reads_all(pool: &mut Pool) {
    for page in [0, 8, 16, 24] {
        assert_eq!(pool.read(page), Ok(1 + page as u8));
    }
}

#[test]
fn one_that_has_moved_is_greeted_where_it_says_it_is() {
    let mut pool = with_silent(1);
    assert!(pool.client.hint(pool.now, &hint(1, ELSEWHERE)));
    pool.pass(Duration::from_millis(50));
    assert!(pool.client.pool.sessions.peers[PeerIndex(1)].is_up());
    reads_all(&mut pool);
    // Back again, and nobody says so.
    pool.at[1] = addr(1);
    pool.pass(Duration::from_secs(5));
    assert!(pool.client.pool.sessions.peers[PeerIndex(1)].is_up());
    reads_all(&mut pool);
}

/// Nothing is lost by a hint that is wrong, whoever is there.
#[test]
fn a_wrong_hint_does_no_harm() {
    for nobody_or_another in [77, 0] {
        let mut pool = with_silent(1);
        assert!(pool.client.hint(pool.now, &hint(1, nobody_or_another)));
        pool.pass(Duration::from_secs(3));
        assert!(
            pool.client.pool.sessions.peers[PeerIndex(1)].is_down()
                && pool.client.pool.sessions.peers[PeerIndex(0)].is_up()
        );
        pool.at[1] = addr(1);
        pool.pass(Duration::from_secs(5));
        assert!(pool.client.pool.sessions.peers[PeerIndex(1)].is_up());
        reads_all(&mut pool);
        assert_eq!(pool.client.stats().servers_failed, 1);
    }
}

/// One that answers is left where it is.
#[test]
fn a_hint_moves_nobody_who_answers() {
    let mut pool = Pool::new(2, 2, 4);
    let sessions = pool.client.stats().sessions;
    for at in [77, 0, 1] {
        assert!(pool.client.hint(pool.now, &hint(1, at)));
        assert_eq!(pool.write(0, at as u8), Ok(()));
        pool.pass(Duration::from_secs(3));
    }
    assert_eq!((pool.client.stats().sessions, pool.client.stats().servers_failed), (sessions, 0));
    assert!(!pool.client.hint(pool.now, &hint(9, 77)), "nobody is made known by it");
}

/// Who has begun another life has forgotten this one: nobody waits for a second of idleness to find out.
#[test]
fn another_life_is_noticed_while_nothing_is_asked() {
    let mut pool = Pool::new(2, 2, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    pool.deaf = vec![1];
    assert!(pool.client.hint(pool.now, &Hint { epoch: BootEpoch(2), ..hint(1, 1) }));
    pool.pass(Duration::from_millis(60));
    assert!(pool.client.pool.sessions.peers[PeerIndex(1)].is_down());
}

/// Servers that copy to it are told where it is.
#[test]
fn copies_go_to_the_new_address() {
    let mut pool = Pool::new(3, 2, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    let holders = pool.holders(SlabNo(0));
    let third = (0..3).find(|node| !holders.contains(node)).unwrap();
    pool.at[third] = addr(ELSEWHERE);
    pool.pass(Duration::from_secs(3));
    assert!(pool.client.hint(pool.now, &hint(third, ELSEWHERE)));
    pool.pass(Duration::from_secs(1));
    pool.deaf = vec![holders[0]];
    pool.begin_write(0, 2);
    pool.pass(Duration::from_secs(1));
    pool.expect_written(1);
    assert!(pool.holders(SlabNo(0)).contains(&third));
    assert!(pool.sent_to_servers.contains(&(holders[1], third)), "{:?}", pool.sent_to_servers);
}
