//! Whether a client still owns a space.

use super::*;

/// As long as servers may be silent.
const PATIENCE: Duration = Duration::from_secs(5);

fn answers(pool: &mut Pool) -> Vec<(Token, Result<(), Failure>)> {
    let events = std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE]));
    let answer = |event| match event {
        Event::Written { token, result } => (token, result),
        event @ Event::Read { .. } => panic!("{event:?} for a question"),
    };
    events.map(answer).collect()
}

fn ask(pool: &mut Pool, token: Token) {
    pool.client.confirm(pool.now, pool.space, token).unwrap();
}

/// An answer is of a moment after each question that it is for.
#[test]
fn who_asks_together_shares_an_answer() {
    let mut pool = Pool::new(1, 1, 4);
    ask(&mut pool, 10);
    ask(&mut pool, 11);
    let (first, request) = pool.client.poll_control(pool.now).unwrap();
    assert_eq!(request, ControlRequest::Confirm { space: SpaceId(1), generation: Generation(1) });
    // What is on its way may have been answered by now.
    ask(&mut pool, 12);
    ask(&mut pool, 13);
    assert_eq!(pool.client.poll_control(pool.now), None, "one at a time");
    pool.client.on_control(pool.now, first, ControlReply::Done);
    assert_eq!(answers(&mut pool), [(10, Ok(())), (11, Ok(()))]);
    let (second, _) = pool.client.poll_control(pool.now).unwrap();
    assert!(!pool.client.is_idle());
    pool.client.on_control(pool.now, first, ControlReply::Done);
    assert_eq!(answers(&mut pool), [], "an answer that comes twice");
    pool.client.on_control(pool.now, second, ControlReply::Done);
    assert_eq!(answers(&mut pool), [(12, Ok(())), (13, Ok(()))]);
    assert!(pool.client.is_idle());
}

#[test]
fn an_owner_of_the_past_learns_that_it_is_one() {
    let mut pool = Pool::new(1, 1, 4);
    assert_eq!(pool.write(0, 1), Ok(()));
    ask(&mut pool, 10);
    let (id, _) = pool.client.poll_control(pool.now).unwrap();
    ask(&mut pool, 11);
    pool.client.on_control(pool.now, id, ControlReply::Fenced);
    assert_eq!(answers(&mut pool), [(10, Err(Failure::Fenced)), (11, Err(Failure::Fenced))]);
    assert!(pool.client.is_taken(pool.space));
    ask(&mut pool, 12);
    assert_eq!(answers(&mut pool), [(12, Err(Failure::Fenced))]);
    assert_eq!(pool.client.poll_control(pool.now), None);
}

/// Nobody waits for a silent control plane for longer than for silent servers, unless he says so.
#[test]
fn a_silent_control_plane_is_waited_for_as_by_writes() {
    for patience in [None, Some(PATIENCE)] {
        let mut pool = Pool::new(1, 1, 4);
        pool.client.pool.config.error_after = patience;
        pool.no_control = true;
        ask(&mut pool, 10);
        pool.pass(PATIENCE / 2);
        assert_eq!(answers(&mut pool), []);
        pool.pass(PATIENCE);
        if patience.is_some() {
            assert_eq!(answers(&mut pool), [(10, Err(Failure::Silent))]);
            ask(&mut pool, 11);
            assert_eq!(answers(&mut pool), [(11, Err(Failure::Silent))], "at once until there is an answer");
            assert_eq!((pool.client.stats().unmapped, pool.client.stats().unanswered), (2, 2));
        }
        pool.no_control = false;
        pool.pass(Duration::from_secs(2));
        let expected = if patience.is_none() { vec![(10, Ok(()))] } else { vec![] };
        assert_eq!(answers(&mut pool), expected);
        ask(&mut pool, 12);
        pool.run();
        assert_eq!(answers(&mut pool), [(12, Ok(()))]);
        assert!(pool.client.is_idle());
    }
}
