//! Rounds over guests that do one job after the other, as their outboxes' processes would tell of them.

use super::*;
use crate::outbox::fluid::{JobSize, serve};
use crate::policy::explain::render;

const PERIOD: Duration = Duration::from_secs(60);
const MB: u64 = 1_000_000;

fn mb(mb: u64) -> Bytes {
    Bytes(mb * MB)
}

fn auto(slo: &str, weight: u32) -> Auto {
    Auto { slo: slo.parse().unwrap(), min: mb(4), max: None, weight: Shares::new(weight).unwrap() }
}

/// A guest whose jobs compute for half a second and write 20 MB, with a pause of a second, and an outbox that drains by 10 MB/s.
struct Guest {
    seen: Seen,
    at_s: f64,
    backlog: f64,
    counters: Counters,
}

impl Guest {
    fn new(id: u64, space: u64, auto: Option<Auto>) -> Guest {
        let seen =
            Seen { id: OutboxId(id), auto, space: mb(space), charged: mb(space), used: Bytes::ZERO, is_live: true };
        Guest { seen, at_s: 0.0, backlog: 0.0, counters: Counters::default() }
    }

    /// Jobs that end before `until_ms`.
    fn live(&mut self, until_ms: u64) -> Vec<Job> {
        let mut jobs = Vec::new();
        let ms = |s: f64| (s * 1000.0).round() as u64;
        let job = JobSize { compute_s: 0.5, output: 20e6 };
        loop {
            let served = serve(job, self.backlog, self.seen.space.0 as f64, 10e6);
            let ends_s = self.at_s + served.service_s;
            if ms(ends_s) > until_ms {
                return jobs;
            }
            jobs.push(Job {
                arrived_ms: ms(self.at_s),
                began_ms: ms(self.at_s),
                ended_ms: ms(ends_s),
                compute: Duration::ZERO,
                blocked: Duration::from_secs_f64(served.service_s - 0.5),
                output: mb(20),
                backlog: Bytes(self.backlog as u64),
            });
            self.at_s = ends_s + 1.0;
            self.backlog = (served.backlog - 10e6).max(0.0);
            self.counters.arrivals += 1;
            self.counters.acknowledged += mb(20);
            self.counters.sending += Duration::from_secs(2);
        }
    }
}

/// Lives through `periods` and carries out what is ordered.
fn run(sizing: &mut Sizing, guests: &mut [Guest], share: impl Fn(u64) -> HostShare, periods: std::ops::Range<u64>) {
    for guest in guests.iter() {
        sizing.heard(guest.seen.id, periods.start * 60_000, guest.counters, &[]);
    }
    for period in periods {
        let now_ms = (period + 1) * 60_000;
        for guest in guests.iter_mut() {
            let jobs = guest.live(now_ms);
            sizing.heard(guest.seen.id, now_ms, guest.counters, &jobs);
        }
        let seen: Vec<Seen> = guests.iter().map(|guest| guest.seen).collect();
        for order in sizing.round(now_ms, &share(period), &seen) {
            let guest = guests.iter_mut().find(|guest| guest.seen.id == order.id).unwrap();
            (guest.seen.space, guest.seen.charged) = (order.space, order.space);
        }
    }
}

fn plenty(_: u64) -> HostShare {
    HostShare { capacity: mb(500), spare: mb(400), yielded: None }
}

#[test]
fn a_space_grows_until_the_slo_is_kept_and_no_further() {
    let mut sizing = Sizing::new(PERIOD);
    let mut guests = [Guest::new(1, 4, Some(auto("p90 1.3s", 100)))];
    run(&mut sizing, &mut guests, plenty, 0..3);
    let view = sizing.view(OutboxId(1)).unwrap();
    assert_eq!(word(view.decision.as_ref()), "feasible");
    // (20 - B) / 10 seconds.
    let space = guests[0].seen.space;
    assert!((mb(7)..mb(12)).contains(&space), "{space}");
    run(&mut sizing, &mut guests, plenty, 3..12);
    let view = sizing.view(OutboxId(1)).unwrap();
    assert!(view.windows_kept.0 >= view.windows_kept.1 - 2 && view.windows_kept.1 == 12, "{view:?}");
    assert!(guests[0].seen.space < mb(14), "{}", guests[0].seen.space);
    let said = render(&sizing.explain(&guests[0].seen));
    assert!(said.contains("feasible:") && said.contains("of the last 12 windows"), "{said}");
    // Another promise: what was kept of the old one is no part of it.
    guests[0].seen.auto = Some(auto("p90 0.4s", 100));
    run(&mut sizing, &mut guests, plenty, 12..14);
    let view = sizing.view(OutboxId(1)).unwrap();
    assert_eq!((word(view.decision.as_ref()), view.windows_kept), ("infeasible", (0, 2)));
    let said = render(&sizing.explain(&guests[0].seen));
    assert!(said.contains("infeasible: no size keeps p90 400ms") && said.contains(" would"), "{said}");
}

#[test]
fn a_size_set_by_hand_is_left_alone_and_what_it_has_is_nobody_elses() {
    let mut sizing = Sizing::new(PERIOD);
    let mut guests = [Guest::new(1, 4, None), Guest::new(2, 4, Some(auto("p90 1.48s", 100)))];
    guests[0].seen.charged = mb(494);
    run(&mut sizing, &mut guests, plenty, 0..4);
    assert_eq!(guests[0].seen.space, mb(4));
    assert!(guests[1].seen.space > mb(4) && guests[1].seen.space <= mb(6), "6 MB are left of 500");
    assert!(sizing.explain(&guests[0].seen).is_empty());
    assert_eq!(sizing.view(OutboxId(1)).unwrap().decision, None);
    assert!(sizing.view(OutboxId(1)).unwrap().window.jobs > 0, "it has a profile all the same");
    // Its VM has ended: it cannot be told anything, and is charged as before.
    guests[1].seen.is_live = false;
    let before = guests[1].seen.space;
    run(&mut sizing, &mut guests, |_| HostShare { capacity: mb(4), spare: Bytes::ZERO, yielded: None }, 4..6);
    assert_eq!(guests[1].seen.space, before);
}

#[test]
fn growth_takes_free_memory_alone() {
    let mut sizing = Sizing::new(PERIOD);
    let mut guests = [Guest::new(1, 4, Some(auto("p90 1.3s", 100)))];
    let share =
        |period| HostShare { capacity: mb(500), spare: if period < 3 { Bytes::ZERO } else { mb(1) }, yielded: None };
    run(&mut sizing, &mut guests, share, 0..3);
    assert_eq!(guests[0].seen.space, mb(4));
    run(&mut sizing, &mut guests, share, 3..4);
    assert!(guests[0].seen.space <= mb(5) && guests[0].seen.space > mb(4));
}

#[test]
fn a_larger_weight_never_gets_less() {
    let share = |_| HostShare { capacity: mb(14), spare: mb(14), yielded: None };
    let spaces = |weights: [u32; 2]| {
        let mut sizing = Sizing::new(PERIOD);
        let mut guests = [0, 1].map(|nth| Guest::new(nth as u64, 4, Some(auto("p90 1.1s", weights[nth]))));
        run(&mut sizing, &mut guests, share, 0..8);
        assert!(guests.iter().map(|guest| guest.seen.space).sum::<Bytes>() <= mb(14));
        let said = render(&sizing.explain(&guests[1].seen));
        (guests.map(|guest| guest.seen.space), said)
    };
    let ([light, heavy], _) = spaces([100, 300]);
    assert!(heavy > light, "{light} {heavy}");
    assert!(light >= mb(4), "its min stays");
    let ([heavy, light], said) = spaces([300, 100]);
    assert!(heavy > light && said.contains("the pool"), "{light} {heavy} {said}");
}

#[test]
fn a_short_host_makes_them_smaller_at_once_down_to_their_mins() {
    let mut sizing = Sizing::new(PERIOD);
    let mut guests = [Guest::new(1, 100, Some(auto("p90 1.3s", 100))), Guest::new(2, 50, None)];
    run(&mut sizing, &mut guests, plenty, 0..1);
    let space = guests[0].seen.space;
    let seen: Vec<Seen> = guests.iter().map(|guest| guest.seen).collect();
    let short = |pool| {
        let yielded = Yielded { pool, withheld: mb(450).saturating_sub(pool), left: Bytes::ZERO, is_stuck: false };
        HostShare { capacity: mb(500), spare: Bytes::ZERO, yielded: Some(yielded) }
    };
    assert_eq!(sizing.round(61_000, &short(mb(400)), &seen), []);
    let [Order { id: OutboxId(1), space: less }] = sizing.round(62_000, &short(mb(20)), &seen)[..] else { panic!() };
    assert!(less <= mb(20) && less < space, "{less}");
    let draining = Seen { space: less, used: mb(60), charged: mb(60), ..seen[0] };
    let said = render(&sizing.explain(&draining));
    assert!(said.contains("because the host is short") && said.contains("no new bytes until it is sent"), "{said}");
    let orders = sizing.round(63_000, &short(Bytes::ZERO), &[draining, seen[1]]);
    assert_eq!(orders, [Order { id: OutboxId(1), space: MIN_MIN }]);
}

#[test]
fn an_outbox_that_is_silent_has_no_periods_and_one_that_is_gone_is_forgotten() {
    let mut sizing = Sizing::new(PERIOD);
    let mut guests = [Guest::new(1, 4, Some(auto("p90 1.3s", 100)))];
    run(&mut sizing, &mut guests, plenty, 0..2);
    let seen = guests[0].seen;
    for minute in 3..6 {
        sizing.round(minute * 60_000, &plenty(0), &[seen]);
    }
    assert_eq!(sizing.view(OutboxId(1)).unwrap().periods, 2);
    sizing.round(400_000, &plenty(0), &[]);
    assert_eq!(sizing.view(OutboxId(1)), None);
}

#[test]
fn settings_that_cannot_be_kept_are_refused_by_name() {
    let check = |auto: Auto, part: &str| {
        let said = auto.check(mb(100), mb(50), PERIOD).err().map_or(String::new(), |error| error.to_string());
        assert!(if part.is_empty() { said.is_empty() } else { said.contains(part) }, "{said}");
    };
    let good = auto("p90 1s", 1);
    check(good, "");
    check(Auto { max: Some(mb(101)), ..good }, "beyond the");
    check(Auto { max: Some(mb(3)), ..good }, "above its max");
    check(Auto { min: mb(60), ..good }, "mins of all outboxes");
    check(Auto { min: mb(200), ..good }, "beyond the");
}

/// Jobs of a real guest under TCG, as the process of its outbox told of them on 2026-11-30: milliseconds that each took, and of these
/// that it waited for room. Each wrote 16 MiB into a space of 1 MiB, two seconds after the one before, for a client of 8 MiB/s.
const RECORDED_MS: [(u64, u64); 14] = [
    (1696, 1469),
    (1287, 1141),
    (919, 853),
    (926, 837),
    (1826, 1584),
    (1744, 1677),
    (1748, 1686),
    (1691, 940),
    (1344, 880),
    (1543, 915),
    (1140, 473),
    (1542, 1157),
    (1745, 1133),
    (1630, 1466),
];

#[test]
fn recorded_jobs_give_the_size_that_they_need() {
    let run = |slo: &str| {
        let mut sizing = Sizing::new(PERIOD);
        let space = Bytes::from_mib(1);
        let auto = Auto { min: space, ..auto(slo, 100) };
        let seen = Seen { id: OutboxId(1), auto: Some(auto), space, charged: space, used: Bytes::ZERO, is_live: true };
        sizing.heard(seen.id, 0, Counters::default(), &[]);
        let mut at_ms = 0;
        let job = |&(took, blocked): &(u64, u64)| {
            let began_ms = at_ms + 2000;
            at_ms = began_ms + took;
            Job {
                arrived_ms: began_ms,
                began_ms,
                ended_ms: at_ms,
                compute: Duration::ZERO,
                blocked: Duration::from_millis(blocked),
                output: Bytes::from_mib(16),
                backlog: Bytes::ZERO,
            }
        };
        let jobs: Vec<Job> = RECORDED_MS.iter().map(job).collect();
        // What clients had acknowledged, and the time in which there was something to send, when ten of them had ended.
        let counters = Counters {
            arrivals: jobs.len() as u64,
            acknowledged: Bytes(153_354_240),
            sending: Duration::from_millis(14_243),
            ..Counters::default()
        };
        sizing.heard(seen.id, 60_000, counters, &jobs);
        let orders = sizing.round(60_000, &plenty(0), &[seen]);
        (orders, sizing.view(seen.id).unwrap())
    };
    let (orders, view) = run("p90 1s");
    let estimate = view.decision.as_ref().unwrap().estimate.as_ref().unwrap();
    let measured_s = view.window.response_mean_s.unwrap();
    assert!((estimate.now.mean_s / measured_s - 1.0).abs() < 0.1, "{} s and not {measured_s}", estimate.now.mean_s);
    assert_eq!(word(view.decision.as_ref()), "feasible");
    // 16.8 MB, of which 10.8 are sent in a second.
    let [Order { space, .. }] = orders[..] else { panic!("{orders:?}") };
    assert!((mb(5)..mb(9)).contains(&space), "{space}");
    let (_, view) = run("p90 50ms");
    assert_eq!(word(view.decision.as_ref()), "learning", "one period may be a burst");
}
