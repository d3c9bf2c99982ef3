//! Pages that come back in another state than they were stored.

use super::*;

/// Both lies are of servers that answer with authentic datagrams.
#[test]
fn a_server_that_lies_is_found_out() {
    for lie in [ServerFault::FlipsBits, ServerFault::LosesWrites] {
        let mut pool = Pool::new(1, 1, 4);
        assert_eq!(pool.write(0, 1), Ok(()));
        // An old page where the write was dropped, a damaged one where bits were flipped.
        pool.servers[0].inject(Some(lie));
        let _ = pool.write(0, 2);
        pool.servers[0].inject(Some(lie));
        assert_eq!(pool.read(0), Err(Failure::Corrupt), "{lie:?}");

        let mut pool = Pool::new(2, 2, 4);
        assert_eq!(pool.write(0, 1), Ok(()));
        pool.servers[0].inject(Some(lie));
        let _ = pool.write(0, 2);
        pool.servers[0].inject(Some(lie));
        for _ in 0..4 {
            assert_eq!(pool.read(0), Ok(2), "{lie:?}: the other copy has it");
        }
    }
}

/// Nor is a whole slab given up for it.
#[test]
fn a_bad_page_is_an_error_where_no_other_copy_answers() {
    let mut pool = Pool::new(2, 2, 4);
    pool.client.pool.config.scrub_pass = None;
    assert_eq!((pool.write(0, 1), pool.write(1, 1)), (Ok(()), Ok(())));
    pool.servers[0].inject(Some(ServerFault::LosesWrites));
    assert_eq!(pool.write(0, 2), Ok(()));
    pool.servers[0].inject(None);
    (pool.deaf, pool.no_control) = (vec![1], true);
    // Nothing is asked of it but a sign of life, every second.
    pool.pass(Duration::from_secs(2));
    assert!(pool.client.reach().any(|(_, reach)| matches!(reach, Reach::Down { .. })));
    assert_eq!(pool.read(0), Err(Failure::Corrupt));
    assert_eq!(pool.read(1), Ok(1));
}
