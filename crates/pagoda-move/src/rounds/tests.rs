use std::collections::BTreeSet;

use pagoda_core::chance::Chance;
use pagoda_core::units::PageIdx;

use super::*;

const PAGES: u64 = 1024;
const MS: Duration = Duration::from_millis(1);

fn settings() -> Settings {
    Settings {
        mode: Mode::Precopy,
        downtime_max: 30 * MS,
        stop_cost: 10 * MS,
        bandwidth_max: None,
        time_max: None,
        on_timeout: OnTimeout::Abort,
    }
}

fn rounds(settings: Settings) -> Rounds {
    let order = [3, 2, 1, 0].map(ChunkIdx).to_vec();
    Rounds::new(settings, PageCount(PAGES), order, IoEpoch(1), None, Moment::default())
}

fn map(pages: impl IntoIterator<Item = u64>) -> PageMap {
    let mut map = PageMap::empty(PageCount(PAGES));
    pages.into_iter().for_each(|page| map.insert(PageIdx(page)));
    map
}

/// A link of 100 MiB/s and a guest that writes so many pages in a round of any length, from the first page on.
struct Run {
    rounds: Rounds,
    now: Moment,
    epoch: u64,
    sent: Vec<u64>,
}

impl Run {
    fn new(settings: Settings) -> Run {
        let mut rounds = rounds(settings);
        rounds.set_oldest_io(IoEpoch::IDLE);
        Run { rounds, now: Moment::default(), epoch: 1, sent: Vec::new() }
    }

    fn send(&mut self) {
        loop {
            match self.rounds.next(self.now) {
                Next::Send(run) => {
                    self.now = self.now + Rate(100 << 20).time_ceil(run.count().bytes()).unwrap();
                    self.sent.extend(run.iter().map(|page| page.0));
                }
                Next::Wait(until) => self.now = until,
                Next::RoundEnd => break,
            }
        }
        let round = self.rounds.end_round();
        self.rounds.kept(round, self.now);
    }

    /// One round, after which so many pages were written.
    fn round(&mut self, written: u64) -> Step {
        self.send();
        self.epoch += 1;
        self.rounds.written(&map(0..written), IoEpoch(self.epoch));
        self.rounds.set_oldest_io(IoEpoch::IDLE);
        let step = self.rounds.decide(self.now);
        let Step::Wait(until) = step else { return step };
        self.now = until;
        self.rounds.decide(self.now)
    }

    /// Rounds until something else happens than a round at this speed.
    fn rounds(&mut self, written: impl Fn(usize) -> u64) -> (usize, Step) {
        let slowing = self.rounds.slowing(self.now);
        for round in 0..50 {
            let step = self.round(written(round));
            if step != Step::Round(slowing) {
                return (round, step);
            }
        }
        panic!("no end")
    }
}

#[test]
fn an_idle_vm_is_stopped_after_one_round() {
    let mut run = Run::new(settings());
    assert_eq!(run.round(0), Step::Stop(Handover::Whole));
    assert_eq!(run.sent.len() as u64, PAGES);
    // Chunks go in the order that was given, hottest first: 3 is the first, and 0 the last.
    assert_eq!((run.sent[0], run.sent[PAGES as usize - 1]), (768, 255));
    run.rounds.stopped(&map([5]), run.now);
    assert!(!run.rounds.is_complete());
    run.sent.clear();
    run.send();
    assert_eq!((run.sent.as_slice(), run.rounds.is_complete()), (&[5][..], true));
}

#[test]
fn a_page_is_copied_when_every_direct_io_is_younger_than_its_protection() {
    let mut rounds = rounds(settings());
    rounds.set_oldest_io(IoEpoch(0));
    assert_eq!(rounds.next(Moment::default()), Next::RoundEnd);
    assert_eq!(rounds.progress(Moment::default()).waits, Waits::DirectIo { pages: PageCount(PAGES) });
    rounds.set_oldest_io(IoEpoch(1));
    assert!(matches!(rounds.next(Moment::default()), Next::Send(_)));
    // Written and protected again: an I/O between the two may be writing into it.
    rounds.written(&map(0..PAGES), IoEpoch(7));
    rounds.set_oldest_io(IoEpoch(6));
    assert_eq!(rounds.next(Moment::default()), Next::RoundEnd);
    let round = rounds.end_round();
    rounds.kept(round, Moment(MS));
    assert_eq!(rounds.progress(Moment(MS)).left, PageCount(PAGES));
    rounds.set_oldest_io(IoEpoch(7));
    assert!(matches!(rounds.next(Moment::default()), Next::Send(_)));
}

#[test]
fn what_a_long_io_holds_is_sent_after_the_stop() {
    let mut rounds = rounds(settings());
    rounds.set_oldest_io(IoEpoch::IDLE);
    while let Next::Send(_) = rounds.next(Moment::default()) {}
    let now = Moment(100 * MS);
    let round = rounds.end_round();
    rounds.kept(round, now);
    rounds.written(&map([9]), IoEpoch(5));
    rounds.set_oldest_io(IoEpoch(3));
    assert_eq!(rounds.decide(now), Step::Stop(Handover::Whole));
    rounds.stopped(&map([]), now);
    assert!(matches!(rounds.next(now), Next::Send(run) if run.first() == PageIdx(9)));
}

#[test]
fn rounds_go_on_while_they_halve_what_is_left() {
    let mut run = Run::new(Settings { downtime_max: Duration::from_secs(1), ..settings() });
    let (rounds, step) = run.rounds(|round| [900, 400, 380][round]);
    assert_eq!((rounds, step), (2, Step::Stop(Handover::Whole)));
    assert_eq!(run.rounds.progress(run.now).rate.map(|rate| rate.0 >> 20), Some(100));
}

#[test]
fn a_stalled_move_goes_on_until_its_time_is_over_and_slows_nobody() {
    let mut run = Run::new(settings());
    for _ in 0..20 {
        assert_eq!(run.round(900), Step::Round(Slowing::NONE));
    }
    let progress = run.rounds.progress(run.now);
    assert_eq!((progress.waits, progress.phase, progress.slowing), (Waits::Writers, Phase::Rounds, Slowing::NONE));
    assert!(progress.expected_downtime.unwrap() > 40 * MS);
}

fn slow_guest() -> Settings {
    Settings { time_max: Some(300 * MS), on_timeout: OnTimeout::SlowGuest, ..settings() }
}

#[test]
fn from_the_limit_on_writers_are_slowed_until_what_is_left_is_short() {
    let mut run = Run::new(slow_guest());
    let (_, step) = run.rounds(|_| 900);
    assert!(run.now.0 >= 300 * MS, "{:?}", run.now);
    let first = run.rounds.slowing(run.now);
    assert_eq!((step, first.delay()), (Step::Round(first), Duration::from_micros(50)));
    assert!(run.round(900) == Step::Round(run.rounds.slowing(run.now)) && run.rounds.slowing(run.now) > first);
    // 400 pages take 16 ms and a stop 10: it need not become less.
    let slowed = run.rounds.slowing(run.now);
    assert_eq!((run.round(400), run.rounds.slowing(run.now)), (Step::Stop(Handover::Whole), slowed));
    run.rounds.stopped(&map([]), run.now);
    assert_eq!(run.rounds.slowing(run.now), Slowing::NONE);
}

/// Rounds of a few milliseconds, with what a stop costs beyond what was promised: writers do not wait longer and longer before
/// anything can come of it.
#[test]
fn a_step_has_time_to_help() {
    let mut run = Run::new(Settings { stop_cost: 29 * MS, ..slow_guest() });
    run.rounds(|_| 900);
    let (began, first) = (run.now, run.rounds.slowing(run.now));
    let mut rounds = 0;
    while matches!(run.round(50), Step::Round(_)) {
        rounds += 1;
    }
    let span = run.now.since(began);
    assert!(rounds >= 5 && span >= SLOWED_ROUND_MIN * rounds && first > Slowing::NONE, "{rounds} rounds in {span:?}");
}

#[test]
fn nobody_is_slowed_while_the_link_is_away_or_when_it_is_given_up() {
    let mut run = Run::new(slow_guest());
    run.rounds(|_| 900);
    assert!(run.rounds.slowing(run.now) > Slowing::NONE);
    // Not for longer than they may be, however long the round takes.
    let until = run.now + SLOW_TIME_MIN;
    assert!(run.rounds.slowing(until + MS) == Slowing::NONE && run.rounds.slowing(run.now) > Slowing::NONE);
    run.rounds.lost_link();
    assert_eq!(run.rounds.progress(run.now).slowing, Slowing::NONE);
    let step = (0..50).map(|_| run.round(900)).find(|step| !matches!(step, Step::Round(_)));
    assert_eq!((step, run.rounds.slowing(run.now)), (Some(Step::GiveUp(Hopeless::CannotSlow)), Slowing::NONE));
}

#[test]
fn the_time_is_over() {
    let over = |on_timeout| Settings { time_max: Some(300 * MS), on_timeout, ..settings() };
    let mut run = Run::new(over(OnTimeout::Abort));
    let (_, step) = run.rounds(|_| 900);
    assert!(matches!(step, Step::GiveUp(Hopeless::TimeOver { promised, .. }) if promised == 30 * MS), "{step:?}");
    assert!(run.now.0 >= 300 * MS);

    // At a low of what is left.
    let mut run = Run::new(over(OnTimeout::Postcopy));
    let (_, step) = run.rounds(|round| if round % 3 == 1 { 600 } else { 1000 });
    assert_eq!(step, Step::Stop(Handover::Missing));
    run.rounds.stopped(&map([0, 1000]), run.now);
    assert_eq!(run.rounds.missing().count(), PageCount(601));
    run.send();
    assert!(run.rounds.is_complete());

    let mut run = Run::new(slow_guest());
    let mut steps = Vec::new();
    for _ in 0..50 {
        match run.round(900) {
            Step::Round(slowing) => steps.push(slowing.delay().as_micros() as u32),
            step => {
                assert_eq!(step, Step::GiveUp(Hopeless::CannotSlow));
                break;
            }
        }
    }
    steps.dedup();
    assert_eq!(steps, SLOW_DELAYS_US);
}

#[test]
fn postcopy_sends_nothing_before_the_grant_and_hybrid_what_comes_forward() {
    let mut run = Run::new(Settings { mode: Mode::Postcopy, ..settings() });
    assert_eq!(run.round(3), Step::Stop(Handover::Missing));
    run.rounds.stopped(&map([]), run.now);
    run.send();
    assert!(run.sent.is_empty() && run.rounds.is_complete());
    assert_eq!(run.rounds.missing().count(), PageCount(PAGES));

    let mut run = Run::new(Settings { mode: Mode::Hybrid, ..settings() });
    let (rounds, step) = run.rounds(|round| [1000, 800, 790][round]);
    assert_eq!((rounds, step), (2, Step::Stop(Handover::Missing)));
}

/// A link of 4 MiB/s, with zeros and with compression to a quarter.
#[test]
fn the_link_and_the_cap_count_what_goes_over_the_wire() {
    let mib = Bytes::from_mib(1);
    let mut rounds = rounds(Settings { bandwidth_max: Some(Rate(mib.0)), ..settings() });
    rounds.set_oldest_io(IoEpoch::IDLE);
    let Next::Send(run) = rounds.next(Moment::default()) else { panic!("nothing is sent") };
    assert_eq!(run.count().bytes(), mib);
    assert!(matches!(rounds.next(Moment::default()), Next::Wait(until) if until > Moment(900 * MS)));
    // All of it was named: nothing is waited for.
    rounds.spare(mib);
    assert!(matches!(rounds.next(Moment::default()), Next::Send(_)));
    rounds.save(Bytes(mib.0 / 4 * 3));
    let Next::Wait(until) = rounds.next(Moment::default()) else { panic!("a quarter is waited for") };
    assert!(until > Moment(200 * MS) && until < Moment(250 * MS), "{until:?}");
    let progress = rounds.progress(Moment::default());
    assert_eq!((progress.sent, progress.spared, progress.saved), (Bytes(mib.0 / 4), mib, Bytes(mib.0 / 4 * 3)));

    // Downtime counts on the worse of the last two rounds.
    let mut rounds = self::rounds(settings());
    let mut now = Moment::default();
    let mut expected = |part: u64| {
        rounds.written(&map(0..PAGES), IoEpoch(rounds.round().0.into()));
        rounds.set_oldest_io(IoEpoch::IDLE);
        while let Next::Send(_) = rounds.next(Moment::default()) {}
        rounds.save(Bytes(4 * mib.0 * (4 - part) / 4));
        let round = rounds.end_round();
        now = now + 250 * MS * part as u32;
        rounds.kept(round, now);
        rounds.written(&map(0..PAGES), IoEpoch(u64::from(round.0) + 1));
        let progress = rounds.progress(now);
        assert_eq!(progress.rate, Some(Rate(4 * mib.0)));
        rounds.begin_round(now);
        progress.expected_downtime.expect("the link is known").as_millis()
    };
    // 10 ms without any page.
    assert_eq!([4, 1, 1, 2, 1, 1].map(&mut expected), [1010, 1010, 260, 510, 510, 260]);
}

#[test]
fn what_was_not_acknowledged_is_sent_again_after_a_cut() {
    let mut run = Run::new(settings());
    while let Next::Send(_) = run.rounds.next(run.now) {}
    let first = run.rounds.end_round();
    run.rounds.lost_link();
    assert_eq!(run.rounds.progress(run.now).left, PageCount(PAGES));
    run.send();
    // The acknowledgement of a round that came before the cut says nothing of what was sent after it.
    run.rounds.kept(first, run.now);
    assert_eq!(run.rounds.progress(run.now).left, PageCount::ZERO);
}

/// Buffers take every round at once; the link, of 4 MiB/s, brings each to the destination in its time.
#[test]
fn what_is_in_buffers_is_neither_there_nor_a_sign_of_a_fast_link() {
    let mut rounds = rounds(settings());
    let mut now = Moment::default();
    for (round, pages) in [(0, PAGES), (1, 512), (2, 512)] {
        rounds.set_oldest_io(IoEpoch::IDLE);
        while let Next::Send(_) = rounds.next(now) {}
        assert_eq!(rounds.end_round(), RoundNo(round));
        now = now + MS;
        let before = rounds.progress(now).expected_downtime;
        // 1 ms of each has gone by.
        let on_the_way = 10 * MS + Duration::from_secs(1) * pages as u32 / 1024;
        assert_eq!(before, (round > 0).then_some(on_the_way));
        now = now + (Duration::from_secs(1) * pages as u32 / 1024 - MS);
        rounds.kept(RoundNo(round), now);
        assert_eq!(rounds.progress(now).rate, Some(Rate(4 << 20)));
        rounds.written(&map(0..512), IoEpoch(u64::from(round) + 2));
        assert_eq!(rounds.progress(now).expected_downtime, Some(510 * MS));
        rounds.begin_round(now);
    }
}

#[test]
fn a_vm_of_which_nothing_has_to_be_sent_is_stopped() {
    let mut rounds = rounds(settings());
    rounds.set_oldest_io(IoEpoch::IDLE);
    while let Next::Send(run) = rounds.next(Moment::default()) {
        rounds.spare(run.count().bytes());
    }
    let round = rounds.end_round();
    rounds.kept(round, Moment(MS));
    assert_eq!(rounds.decide(Moment(MS)), Step::Stop(Handover::Whole));
}

/// Random writes, direct I/O, cuts and rounds, against a naive copy of the memory. Whatever happens, the destination has every
/// page's last content when the rounds are complete.
#[test]
fn the_destination_has_all_when_the_rounds_are_complete() {
    for seed in 0..200 {
        let chance = &mut Chance::new(seed);
        let mut source: Vec<u64> = (0..PAGES).collect();
        let mut destination = vec![u64::MAX; PAGES as usize];
        let mut rounds = rounds(Settings { downtime_max: Duration::from_secs(1), ..settings() });
        // Page, epoch of the beginning.
        let mut ios: Vec<(u64, u64)> = vec![(chance.below(PAGES), 0)];
        let (mut epoch, mut unseen, mut now, mut value) = (1, BTreeSet::new(), Moment::default(), PAGES);
        let mut is_stopped = false;
        while !rounds.is_complete() {
            now = now + MS;
            value += 1;
            match chance.below(if is_stopped { 4 } else { 10 }) {
                0..3 => {
                    let oldest = ios.iter().map(|(_, began)| IoEpoch(*began)).min();
                    rounds.set_oldest_io(oldest.unwrap_or(IoEpoch::IDLE));
                    if let Next::Send(run) = rounds.next(now) {
                        run.iter().for_each(|page| destination[page.0 as usize] = source[page.0 as usize]);
                    } else {
                        let round = rounds.end_round();
                        if chance.per_mille(900) {
                            rounds.kept(round, now);
                        }
                        if !is_stopped {
                            epoch += 1;
                            rounds.written(&map(std::mem::take(&mut unseen)), IoEpoch(epoch));
                            if let Step::Stop(_) = rounds.decide(now) {
                                // Ends every direct I/O.
                                for (page, _) in ios.drain(..) {
                                    source[page as usize] = value;
                                }
                                rounds.stopped(&map(std::mem::take(&mut unseen)), now);
                                is_stopped = true;
                            }
                        }
                    }
                }
                3 if chance.per_mille(100) => rounds.lost_link(),
                4 | 5 => {
                    let page = chance.below(PAGES);
                    unseen.insert(page);
                    source[page as usize] = value;
                }
                6 => {
                    // Begins with a fault, if the page is protected.
                    let page = chance.below(PAGES);
                    unseen.insert(page);
                    ios.push((page, epoch));
                }
                7 if !ios.is_empty() => {
                    let (page, _) = ios.swap_remove(chance.below(ios.len() as u64) as usize);
                    source[page as usize] = value;
                }
                8 if !ios.is_empty() => {
                    let (page, _) = ios[chance.below(ios.len() as u64) as usize];
                    source[page as usize] = value;
                }
                _ => {}
            }
        }
        assert_eq!(source, destination, "seed {seed}");
    }
}

#[test]
fn what_turns_out_to_be_hot_goes_first() {
    let mut rounds = rounds(settings());
    rounds.set_oldest_io(IoEpoch::IDLE);
    let next = |rounds: &mut Rounds| match rounds.next(Moment::default()) {
        Next::Send(run) => run.chunk,
        other => panic!("{other:?}"),
    };
    assert_eq!(next(&mut rounds), ChunkIdx(3));
    rounds.reorder([1, 3, 0, 2].map(ChunkIdx).to_vec());
    assert_eq!([(); 3].map(|()| next(&mut rounds)), [1, 0, 2].map(ChunkIdx), "3 has gone");
}
