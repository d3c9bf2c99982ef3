use super::super::slowing::SLOW_DELAYS_US;
use super::*;

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn delays_double_and_are_bounded() {
    assert_eq!(Slowing::NONE.delay(), Duration::ZERO);
    assert!(Slowing::MOST.delay() <= Duration::from_millis(2));
    assert!(SLOW_DELAYS_US[1..].windows(2).all(|pair| pair[1] == 2 * pair[0]), "else a step less may undo two");
    assert_eq!((Slowing::NONE.less(), Slowing::MOST.more()), (Slowing::NONE, Slowing::MOST));
}

/// What the rounds leave, and the steps that follow from that.
#[test]
fn a_step_more_for_hardly_less_and_a_step_less_for_half() {
    let check_at = |is_far: bool, rounds: &[(u64, u8)]| {
        let mut slower = Slower::default();
        for (index, (left, step)) in rounds.iter().enumerate() {
            let now = Moment(Duration::from_secs(index as u64));
            assert_eq!(
                slower.end_round(now, PageCount(*left), is_far, HOUR),
                Ok(Slowing(*step)),
                "{index} of {rounds:?}"
            );
            assert_eq!(slower.step(), Slowing(*step));
        }
    };
    let check = |rounds: &[(u64, u8)]| check_at(false, rounds);
    // The first round behind the limit has nothing to be compared with.
    check(&[(1000, 1), (1000, 2), (900, 3), (700, 3), (350, 2), (349, 3)]);
    check(&[(1000, 1), (875, 2), (765, 2)]);
    // Half because it is slower says nothing.
    check(&[(1000, 1), (400, 1), (200, 0), (100, 0), (99, 1)]);
    check(&[(0, 1), (0, 2)]);
    check(&[(9, 1), (9, 2), (9, 3), (9, 4), (9, 5), (9, 6), (9, 6), (9, 6), (5, 6), (9, 6)]);
    // Far from what was promised: two steps more, and one less.
    check_at(true, &[(1000, 2), (1000, 4), (400, 4), (200, 3), (199, 5), (199, 6), (199, 6)]);
}

#[test]
fn it_is_given_up_when_no_step_is_left_or_the_time_is_over() {
    let mut slower = Slower::default();
    let mut last = Ok(Slowing::NONE);
    let mut rounds = 0;
    while last.is_ok() {
        rounds += 1;
        last = slower.end_round(Moment(Duration::from_secs(rounds)), PageCount(1000), false, HOUR);
    }
    assert_eq!((last, rounds), (Err(Hopeless::CannotSlow), 6 + u64::from(STALL_ROUNDS)));

    let check = |time_max: u64, allowed: u64| {
        let mut slower = Slower::default();
        let mut end = |second, left| {
            slower.end_round(Moment(Duration::from_secs(second)), PageCount(left), false, Duration::from_secs(time_max))
        };
        assert!(end(500, 1000).is_ok() && end(499 + allowed, 700).is_ok());
        let slowed = Duration::from_secs(allowed);
        assert_eq!(end(500 + allowed, 100), Err(Hopeless::SlowTimeOver { slowed }));
    };
    check(10, 60);
    check(60, 60);
    check(600, 600);
}

#[test]
fn a_cut_lets_writers_run_and_gives_no_more_time() {
    let mut slower = Slower::default();
    for second in 0..3 {
        slower.end_round(Moment(Duration::from_secs(second)), PageCount(1000), false, HOUR).unwrap();
    }
    slower.stop();
    assert_eq!(slower.step(), Slowing::NONE);
    assert_eq!(slower.end_round(Moment(Duration::from_secs(9)), PageCount(10), false, HOUR), Ok(Slowing(1)));
    assert!(slower.end_round(Moment(HOUR), PageCount(10), false, HOUR).is_err());
}

/// A guest that would write as fast as it can: what a round leaves is what it writes while that is sent. From any speed on that a step
/// can hold below half of the link's, the rounds come down to what the link sends in 30 ms.
#[test]
fn rounds_converge_whatever_the_speeds() {
    let mut ended = 0;
    for link in [500_u64, 2_000, 10_000, 30_000] {
        for (processors, fault_us, set) in
            [1_u64, 4, 16].into_iter().flat_map(|n| [(n, 10_u64, 2_000_u64), (n, 100, 2_000), (n, 10, 200_000)])
        {
            let short = link * 30 / 1000;
            let (mut slower, mut left, mut now) = (Slower::default(), set, Duration::ZERO);
            let mut given_up = None;
            while left > short && given_up.is_none() {
                let span_us = (left * 1_000_000 / link).max(20_000);
                now += Duration::from_micros(span_us);
                left = (span_us * processors / (fault_us + slower.step().delay().as_micros() as u64)).min(set);
                given_up = slower.end_round(Moment(now), PageCount(left), left > 8 * short, HOUR * 24).err();
            }
            let case = format!("{link} {processors} {fault_us} {set}: {given_up:?} after {now:?}");
            let slowest = processors * 1_000_000 / (fault_us + 1600);
            assert!(given_up.is_none() || given_up == Some(Hopeless::CannotSlow), "{case}");
            assert!(given_up.is_none() || slowest * 2 > link, "{case}");
            assert!(given_up.is_some() || slowest * 2 <= link * 3, "{case}");
            ended += u32::from(given_up.is_none());
        }
    }
    assert!((12..36).contains(&ended), "{ended}");
}
