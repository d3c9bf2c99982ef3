//! Networks that lose much: what was lost is made up for, and who lives is not given up.

use super::*;
use crate::client::index::PeerIndex;
use crate::wire::{DATAGRAM_MIN_MAX, OVERHEAD};

/// By then a path is known to carry short datagrams only: twice what silence takes to become failure.
const NOTICED: Duration = Duration::from_millis(60);

fn read(pool: &mut Pool, page: u64) {
    pool.client.read(pool.now, pool.space, PageNo(page), Class::Demand, page).unwrap();
}

/// Until nobody has anything to say, without any time going by.
fn settle(pool: &mut Pool) {
    while pool.step() {}
}

/// Time goes by as the client asks for it, and not for longer than this.
fn run_for(pool: &mut Pool, time: Duration) {
    let until = pool.now + time;
    loop {
        settle(pool);
        match pool.client.poll_timeout(pool.now) {
            Some(due) if due < until => pool.now = pool.now.max(due),
            _ => break,
        }
        pool.time_passes();
    }
    pool.now = until;
}

fn answered(pool: &mut Pool) -> usize {
    std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE])).count()
}

/// Answers come at once, and the client knows it.
fn filled(pages: u64) -> Pool {
    let mut pool = Pool::of(1, 1, 64, 512, None);
    (0..pages).for_each(|page| assert_eq!(pool.write(page, 1), Ok(())));
    pool.client.pool.sessions.peers[PeerIndex(0)].usually_takes(Duration::ZERO);
    pool
}

/// A timeout repeats one request, after longer and longer. Each answer to another one makes up for one more.
#[test]
fn what_was_lost_at_once_is_repeated_as_answers_come() {
    const LOST: u64 = 3;
    let mut pool = filled(2 * LOST);
    pool.deaf = vec![0];
    (0..LOST).for_each(|page| read(&mut pool, page));
    run_for(&mut pool, Duration::from_millis(4));
    pool.deaf.clear();
    for page in LOST..2 * LOST {
        read(&mut pool, page);
        settle(&mut pool);
        assert_eq!(answered(&mut pool), 2);
    }
}

/// Where a queue has become long all answers come late, and in order: nearly nothing is sent again, which would only make it longer.
#[test]
fn what_is_only_late_is_not_repeated() {
    const QUEUED: u64 = 100;
    let between = Duration::from_micros(50);
    for usual in [Duration::from_micros(60), Duration::from_millis(1), Duration::from_millis(9)] {
        let mut pool = filled(QUEUED);
        pool.client.pool.sessions.peers[PeerIndex(0)].usually_takes(usual);
        pool.client.pool.sessions.exchanges.window = QUEUED as usize;
        (0..QUEUED).for_each(|page| read(&mut pool, page));
        pool.slow = Some(0);
        run_for(&mut pool, Duration::from_millis(9));
        let mut arrived = 0;
        while !pool.late.is_empty() {
            let mut datagram = pool.late.remove(0);
            pool.client.on_datagram(pool.now, addr(0), &mut datagram);
            arrived += 1;
            run_for(&mut pool, between);
        }
        let stats = *pool.client.stats();
        let again = stats.resent_timeout + stats.resent_overtaken;
        assert!(again <= QUEUED / 10, "{again} of {QUEUED} again, {arrived} datagrams, where {usual:?} is usual");
        assert_eq!(answered(&mut pool) as u64, QUEUED);
    }
}

/// Also the second time, long before its timeout; but not where the server has said that it has no time.
#[test]
fn what_others_overtake_is_repeated_at_once() {
    for (is_put_off, answers) in [(false, 4), (true, 3)] {
        let mut pool = filled(4);
        pool.client.pool.sessions.peers[PeerIndex(0)].usually_takes(Duration::from_millis(7));
        pool.deaf = vec![0];
        read(&mut pool, 0);
        settle(&mut pool);
        let id = *pool.client.pool.sessions.peers[PeerIndex(0)].in_flight().front().unwrap();
        while pool.client.pool.sessions.exchanges.get(id).unwrap().tries < 2 {
            run_for(&mut pool, Duration::from_micros(100));
        }
        let lost = pool.client.pool.sessions.exchanges.get(id).unwrap();
        if is_put_off {
            lost.excused = lost.tries;
        }
        pool.deaf.clear();
        for (page, overtaken) in [(1, 1), (2, 2)] {
            read(&mut pool, page);
            settle(&mut pool);
            let expected = if is_put_off { 0 } else { overtaken };
            assert_eq!(pool.client.pool.sessions.exchanges.get(id).unwrap().overtaken, expected);
        }
        read(&mut pool, 3);
        settle(&mut pool);
        assert_eq!(answered(&mut pool), answers, "put off: {is_put_off}");
    }
}

/// An answer to what is about to be sent again says nothing of what was sent after it.
#[test]
fn a_late_answer_overtakes_nothing() {
    let mut pool = filled(2);
    pool.slow = Some(0);
    read(&mut pool, 0);
    settle(&mut pool);
    pool.deaf = vec![0];
    read(&mut pool, 1);
    settle(&mut pool);
    while pool.client.pool.sessions.peers[PeerIndex(0)].waiting().1 == 0 {
        pool.now = pool.now.max(pool.client.poll_timeout(pool.now).unwrap());
        pool.client.on_timeout(pool.now);
    }
    assert_eq!(pool.client.pool.sessions.peers[PeerIndex(0)].in_flight().len(), 1);
    pool.deliver_late();
    assert_eq!(answered(&mut pool), 1);
    let later = *pool.client.pool.sessions.peers[PeerIndex(0)].in_flight().front().unwrap();
    assert_eq!(pool.client.pool.sessions.exchanges.get(later).unwrap().overtaken, 0);
}

/// Whoever loses every other datagram loses nearly every request that is several of them. Before it is given up, it is asked for
/// more than that, and often.
#[test]
fn a_server_is_given_up_after_many_signs_of_life_were_asked_for() {
    let mut pool = filled(1);
    let fail_after = pool.client.pool.config.fail_after;
    pool.deaf = vec![0];
    read(&mut pool, 0);
    settle(&mut pool);
    let mut pings = Vec::new();
    for _ in 0..2 {
        let (until, mut asked) = (pool.now + fail_after / 2, 0);
        while pool.now < until {
            let before = pool.client.pool.sessions.peers[PeerIndex(0)].pinged_at();
            run_for(&mut pool, Duration::from_micros(100));
            asked += usize::from(pool.client.pool.sessions.peers[PeerIndex(0)].pinged_at() != before);
        }
        pings.push(asked);
    }
    run_for(&mut pool, Duration::from_millis(1));
    assert!(pings[0] == 0 && (10..=16).contains(&pings[1]), "{pings:?}");
    assert!(pool.client.pool.sessions.peers[PeerIndex(0)].is_down());
}

/// A tunnel on the way that says nothing of what is too long for it. Neither what gets through beside it hides that, nor signs of life.
#[test]
fn a_path_that_becomes_narrow_is_noticed() {
    for trims_meanwhile in [false, true] {
        let mut pool = filled(40);
        assert!(pool.client.pool.sessions.peers[PeerIndex(0)].view().datagram > DATAGRAM_MIN_MAX);
        let sessions = pool.client.stats().sessions;
        pool.longest = DATAGRAM_MIN_MAX;
        let write = |pool: &mut Pool, page| {
            pool.client.write(pool.now, pool.space, PageNo(page), Class::Demand, &[3; PAGE_SIZE], 1).unwrap();
        };
        // What is asked for at the length that the path has lost already is repeated, too.
        (0..20).for_each(|page| write(&mut pool, page));
        let until = pool.now + NOTICED;
        let (mut written, mut trimmed) = (0, 0);
        while pool.now < until {
            for _ in 0..if trims_meanwhile { 4 } else { 0 } {
                let page = PageNo(20 + trimmed % 20);
                pool.client.trim(pool.now, pool.space, page, Class::Demand, 3).unwrap();
                trimmed += 1;
            }
            run_for(&mut pool, Duration::from_micros(500));
            let events = std::iter::from_fn(|| pool.client.poll_event(&mut [0; PAGE_SIZE]));
            written += events.filter(|event| *event == Event::Written { token: 1, result: Ok(()) }).count();
        }
        assert_eq!(
            (written, pool.client.pool.sessions.peers[PeerIndex(0)].view().datagram),
            (20, DATAGRAM_MIN_MAX),
            "with trims: {trims_meanwhile}"
        );
        assert_eq!(pool.client.stats().sessions, sessions, "it was not given up");
    }
}

/// A server that answers signs of life and nothing else is of no use.
#[test]
fn signs_of_life_alone_do_not_keep_a_server() {
    let mut pool = filled(1);
    pool.longest = OVERHEAD;
    pool.client.write(pool.now, pool.space, PageNo(0), Class::Eviction, &[3; PAGE_SIZE], 1).unwrap();
    let began = pool.now;
    while pool.client.stats().servers_failed == 0 {
        run_for(&mut pool, Duration::from_millis(1));
        assert!(pool.now.since(began) < Duration::from_secs(1));
    }
    assert!(pool.now.since(began) > 3 * pool.client.pool.config.fail_after, "for some time it is believed");
}
