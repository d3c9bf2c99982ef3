//! Damage that nobody has read yet.

use super::*;
use crate::client::index::SpaceIndex;
use crate::units::SlabNo;

/// All pages of these pools are looked at in this time.
const PASS: Duration = Duration::from_secs(10);

fn pool(servers: usize, copies: usize) -> Pool {
    let mut pool = Pool::new(servers, copies, 4);
    pool.client.pool.config.scrub_pass = Some(PASS / 2);
    (0..12).for_each(|page| assert_eq!(pool.write(page, page as u8 + 1), Ok(())));
    pool
}

/// Nobody but the scrub has read anything.
fn assert_unread(pool: &Pool) {
    assert_eq!((pool.client.stats().reads, pool.client.stats().bad_pages), (0, 0));
}

#[test]
fn every_copy_of_every_page_is_looked_at() {
    let mut pool = pool(2, 2);
    pool.pass(PASS);
    let once = pool.client.stats().scrubbed;
    assert!(once >= 24, "{once} looks");
    pool.pass(PASS);
    assert!(pool.client.stats().scrubbed >= once + 24, "it begins again");
    assert_eq!(pool.client.stats().scrub_bad, 0);
    assert_unread(&pool);
}

#[test]
fn a_damaged_copy_is_made_anew_before_anybody_reads_it() {
    for lie in [ServerFault::FlipsBits, ServerFault::LosesWrites] {
        let mut pool = pool(3, 2);
        let entry = &pool.client.pool.map.spaces[SpaceIndex(0)].slabs[SlabNo(0)].entry;
        let damaged = pool.client.pool.sessions.peers_of(entry).iter().next().unwrap().0;
        pool.servers[damaged].inject(Some(lie));
        // What it loses is a new version of a page that it has.
        assert_eq!(pool.write(0, 99), Ok(()));
        pool.servers[damaged].inject(None);
        pool.pass(PASS * 2);
        assert!(pool.client.stats().scrub_bad > 0, "{lie:?}");
        assert_eq!(pool.client.in_sync(pool.space), (2, 2), "{lie:?}");
        assert_unread(&pool);
        assert_eq!(pool.read(0), Ok(99), "{lie:?}");
        (1..12).for_each(|page| assert_eq!(pool.read(page), Ok(page as u8 + 1), "{lie:?}, page {page}"));
        let found = pool.client.stats().scrub_bad;
        pool.pass(PASS * 2);
        assert_eq!(pool.client.stats().scrub_bad, found, "{lie:?}: there is nothing more");
    }
}

#[test]
fn what_has_no_other_copy_is_counted_and_left_alone() {
    let mut pool = pool(1, 1);
    pool.servers[0].inject(Some(ServerFault::FlipsBits));
    pool.servers[0].inject(None);
    pool.pass(PASS);
    assert!(pool.client.stats().scrub_bad >= 12);
    assert_eq!(pool.client.in_sync(pool.space), (2, 2));
    assert_eq!(pool.read(0), Err(Failure::Corrupt));
}
