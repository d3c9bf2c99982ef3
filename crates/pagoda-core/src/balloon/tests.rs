use proptest::prelude::*;

use super::*;

const MEMORY: Bytes = Bytes::from_mib(512);

fn mib(mib: u64) -> Bytes {
    Bytes::from_mib(mib)
}

/// A guest as the device and its statistics show it, moved by hand.
struct Bench {
    balloon: Balloon,
    now_ms: u64,
    sample: Sample,
    actions: Vec<Action>,
}

impl Bench {
    fn new() -> Bench {
        let device = Device::Present { actual: MEMORY };
        let sample = Sample { device, stats: None, resets: 0, paused: false };
        Bench { balloon: Balloon::new(MEMORY, None), now_ms: 0, sample, actions: Vec::new() }
    }

    /// With a driver that has just reported so much available.
    fn alive(target: Bytes, available: Bytes) -> Bench {
        let mut bench = Bench::new();
        bench.balloon.set_target(0, target);
        bench.pass(100);
        bench.report(available, 0);
        bench.pass(1000);
        bench
    }

    fn pass(&mut self, ms: u64) -> &mut Bench {
        self.now_ms += ms;
        self.actions = self.balloon.tick(self.now_ms, &self.sample);
        self
    }

    fn report(&mut self, available: Bytes, major_faults: u64) {
        let updated_s = self.sample.stats.map_or(1, |stats| stats.updated_s + 1);
        let (swap_in, swap_out) = (Bytes::ZERO, Bytes::ZERO);
        let stats = GuestStats { updated_s, free: available, available, major_faults, swap_in, swap_out };
        self.sample.stats = Some(stats);
    }

    /// With swap of its own, to which it has written so much.
    fn report_swapping(&mut self, available: Bytes, swap_out: Bytes) {
        self.report(available, 0);
        let (stats, swap_in) = (self.sample.stats.expect("just reported"), swap_out);
        self.sample.stats = Some(GuestStats { swap_in, swap_out, ..stats });
    }

    fn actual(&mut self, actual: Bytes) -> &mut Bench {
        self.sample.device = Device::Present { actual };
        self
    }

    fn phase(&self) -> Phase {
        self.balloon.view().phase
    }

    fn asked(&self) -> Bytes {
        self.balloon.view().asked.expect("asked")
    }

    /// Does what was asked until nothing more is, and reports what that leaves available of `free`.
    fn obey(&mut self, mut free: Bytes) {
        for round in 0..200 {
            let before = self.balloon.view().actual;
            let now = self.asked();
            free = Bytes(free.0 + now.0 - before.0);
            self.actual(now);
            if round % 10 == 0 {
                self.report(free, 0);
            }
            self.pass(TICK_MOVING_MS);
        }
    }
}

#[test]
fn an_idle_guest_gives_all_that_is_asked_in_growing_steps() {
    let mut bench = Bench::alive(mib(256), mib(450));
    assert_eq!(bench.actions, [Action::Ask(MEMORY.saturating_sub(STEP_MIN))]);
    let mut asked = vec![bench.asked()];
    while bench.phase() != Phase::Reached {
        let now = bench.asked();
        bench.actual(now).pass(TICK_MOVING_MS);
        asked.push(bench.asked());
    }
    let steps: Vec<u64> = asked.windows(2).map(|pair| (pair[0].0 - pair[1].0) >> 20).collect();
    assert_eq!(steps, [16, 32, 64, 128, 0], "doubled each time, up to the target");
    assert_eq!(bench.balloon.tick_ms(), TICK_REST_MS);
    assert!(!bench.balloon.view().is_paging);
}

#[test]
fn a_guest_keeps_its_reserve() {
    let mut bench = Bench::alive(mib(128), mib(200));
    bench.obey(mib(200));
    let view = bench.balloon.view();
    assert_eq!(view.phase, Phase::Resisted(Resistance::LowMemory));
    assert_eq!(
        view.actual,
        MEMORY.saturating_sub(mib(200)).0.checked_add(reserve(MEMORY).0).map(Bytes).expect("small")
    );
    assert!(view.retry_at_ms.is_some() && !view.is_paging);
    // Memory became free: the retry goes on.
    for _ in 0..60 {
        bench.report(mib(300), 0);
        bench.pass(TICK_REST_MS);
        let asked = bench.asked();
        bench.actual(asked);
    }
    assert_eq!((bench.phase(), bench.asked()), (Phase::Reached, mib(128)));
}

#[test]
fn a_guest_with_swap_of_its_own_pages_by_itself() {
    let mut bench = Bench::alive(mib(256), mib(8));
    let mut swapped = mib(1);
    for _ in 0..40 {
        bench.report_swapping(mib(8), swapped);
        bench.pass(TICK_REST_MS);
        let asked = bench.asked();
        // What it gives it has swapped out before.
        swapped = Bytes(swapped.0 + bench.balloon.view().actual.saturating_sub(asked).0);
        bench.actual(asked);
    }
    assert_eq!((bench.phase(), bench.asked()), (Phase::Reached, mib(256)));
    let resisted = bench.balloon.view().resisted;
    // At rest it writes nothing, and keeps what it has.
    for _ in 0..10 {
        bench.report_swapping(mib(8), swapped);
        bench.pass(TICK_REST_MS);
    }
    assert_eq!((bench.phase(), bench.balloon.view().resisted), (Phase::Reached, resisted));
}

#[test]
fn a_guest_whose_swap_is_full_gets_its_reserve_back() {
    let mut bench = Bench::alive(mib(256), mib(8));
    for _ in 0..10 {
        bench.report_swapping(mib(8), mib(64));
        bench.pass(TICK_REST_MS);
        if matches!(bench.phase(), Phase::Resisted(_)) {
            break;
        }
        let asked = bench.asked();
        bench.actual(asked);
    }
    assert_eq!(bench.phase(), Phase::Resisted(Resistance::LowMemory));
    assert!(bench.asked() >= bench.balloon.view().actual);
}

#[test]
fn a_guest_that_runs_short_gets_its_reserve_back() {
    let mut bench = Bench::alive(mib(256), mib(450));
    bench.obey(mib(450));
    assert_eq!(bench.phase(), Phase::Reached);
    bench.report(mib(10), 0);
    bench.pass(1000);
    assert_eq!(bench.phase(), Phase::Resisted(Resistance::LowMemory));
    assert_eq!(bench.actions, [Action::Ask(mib(256 + 32 - 10))]);
    // More trouble, more relief; never more than it has.
    bench.actual(mib(278));
    bench.report(mib(0), 0);
    assert_eq!(bench.pass(1000).actions, [Action::Ask(mib(278 + 32))]);
    assert_eq!(bench.balloon.view().resisted, 1);
}

#[test]
fn a_guest_that_pages_is_left_alone() {
    let mut bench = Bench::alive(mib(128), mib(450));
    let mut faults = 0;
    for burst in [FAULTS_PER_S_MAX + 50, 0, FAULTS_PER_S_MAX + 50] {
        faults += burst;
        bench.report(mib(450), faults);
        bench.pass(1000);
        assert_eq!(bench.phase(), Phase::Inflating, "one update says nothing");
    }
    bench.report(mib(450), faults + FAULTS_PER_S_MAX + 50);
    bench.pass(1000);
    assert_eq!(bench.phase(), Phase::Resisted(Resistance::Faults));
    // What it does anyway is no resistance the next time.
    for second in 0..40 {
        faults += 2 * FAULTS_PER_S_MAX;
        bench.report(mib(450), faults + 300);
        let asked = bench.asked();
        bench.actual(asked).pass(1000);
        if second > 30 {
            assert_ne!(bench.phase(), Phase::Resisted(Resistance::Faults));
        }
    }
}

#[test]
fn a_guest_that_takes_pages_back_is_not_fought() {
    let mut bench = Bench::alive(mib(256), mib(450));
    bench.obey(mib(450));
    bench.actual(mib(300)).pass(1000);
    assert_eq!(bench.phase(), Phase::Resisted(Resistance::TookBack));
    assert_eq!(bench.asked(), mib(300));
}

#[test]
fn who_does_not_answer_is_paged_out() {
    // Without a device it is paged out at once.
    let mut bench = Bench::new();
    bench.balloon.set_target(0, mib(256));
    bench.sample.device = Device::Absent;
    assert_eq!(bench.pass(100).actions, [Action::PageOut(mib(256))]);
    assert_eq!(bench.phase(), Phase::Unavailable(Missing::Device));
    // The target moves, and so does the cap.
    bench.balloon.set_target(bench.now_ms, mib(200));
    assert_eq!(bench.pass(100).actions, [Action::PageOut(mib(200))]);
    bench.balloon.set_target(bench.now_ms, MEMORY);
    assert_eq!(bench.pass(100).actions, [Action::EndPageOut]);
    assert!(bench.balloon.is_off());

    // No driver: a probe, and then.
    let mut bench = Bench::new();
    bench.balloon.set_target(0, mib(256));
    assert_eq!(bench.pass(100).actions, [Action::Ask(MEMORY.saturating_sub(PROBE))]);
    assert_eq!(bench.pass(PROBE_WAIT_MS).actions, [Action::PageOut(mib(256))]);
    assert_eq!(bench.phase(), Phase::Unavailable(Missing::Driver));
    // It has only booted slowly: the probe was taken.
    bench.actual(MEMORY.saturating_sub(PROBE)).pass(1000);
    assert_eq!(bench.phase(), Phase::Inflating);
    assert!(bench.balloon.view().is_paging, "until the balloon holds what was paged out");
}

#[test]
fn a_driver_that_gives_nothing_is_paged_out_and_tried_again() {
    let mut bench = Bench::alive(mib(256), mib(450));
    for _ in 0..12 {
        bench.report(mib(450), 0);
        bench.pass(1000);
    }
    assert_eq!(bench.phase(), Phase::Unavailable(Missing::Effect));
    assert!(bench.balloon.view().is_paging);
    for _ in 0..15 {
        bench.report(mib(450), 0);
        bench.pass(1000);
    }
    assert_eq!(bench.phase(), Phase::Inflating, "tried again");
}

#[test]
fn a_reset_pops_the_balloon() {
    let mut bench = Bench::alive(mib(256), mib(450));
    bench.obey(mib(450));
    assert_eq!(bench.phase(), Phase::Reached);
    bench.sample.resets = 1;
    // The device goes on saying 256 MiB, which is not so.
    assert_eq!(bench.pass(1000).actions, [Action::Ask(MEMORY.saturating_sub(PROBE)), Action::PageOut(mib(256))]);
    assert_eq!(bench.phase(), Phase::Unavailable(Missing::Driver));
    assert_eq!(bench.balloon.view().actual, MEMORY);
    // The new driver takes the probe and reports.
    bench.actual(MEMORY.saturating_sub(PROBE));
    bench.report(mib(440), 0);
    bench.pass(1000);
    assert_eq!(bench.phase(), Phase::Inflating);
    bench.obey(mib(440));
    assert_eq!(bench.phase(), Phase::Reached);
    assert!(!bench.balloon.view().is_paging);
}

#[test]
fn a_new_daemon_goes_on_where_the_old_one_was() {
    let mut bench = Bench::new();
    bench.balloon = Balloon::new(MEMORY, None);
    bench.balloon.set_target(0, mib(256));
    bench.report(mib(100), 0);
    // Half way, with old statistics: nothing is given back to the guest meanwhile.
    bench.actual(mib(384)).pass(100);
    assert_eq!(bench.asked(), mib(383));
    bench.report(mib(300), 0);
    bench.pass(1000);
    assert_eq!(bench.phase(), Phase::Inflating);

    // Statistics that may be as old as the VM say nothing of what the guest can give.
    let mut bench = Bench::new();
    bench.balloon.set_target(0, mib(128));
    bench.report(mib(450), 0);
    bench.actual(mib(384)).pass(100);
    bench.actual(mib(383)).pass(100);
    assert_eq!((bench.phase(), bench.asked()), (Phase::Inflating, mib(383)));

    // The guest is where it was asked to be: it need not be paged out any more.
    let mut bench = Bench::new();
    bench.balloon = Balloon::new(MEMORY, Some(mib(256)));
    bench.balloon.set_target(0, mib(256));
    bench.actual(mib(256)).pass(100);
    assert_eq!(bench.actions, [Action::Ask(mib(256)), Action::EndPageOut]);
    assert_eq!(bench.phase(), Phase::Reached);
}

#[test]
fn deflating_is_at_once_and_off_ends() {
    let mut bench = Bench::alive(mib(256), mib(450));
    bench.obey(mib(450));
    bench.balloon.set_target(bench.now_ms, mib(400));
    assert_eq!(bench.pass(100).actions, [Action::Ask(mib(400))]);
    assert_eq!(bench.phase(), Phase::Deflating);
    bench.actual(mib(400)).pass(100);
    assert_eq!(bench.phase(), Phase::Reached);
    bench.balloon.set_target(bench.now_ms, MEMORY);
    assert_eq!(bench.pass(100).actions, [Action::Ask(MEMORY)]);
    bench.actual(MEMORY).pass(100);
    assert!(bench.balloon.is_off());
    assert_eq!(bench.pass(100).actions, []);
}

#[test]
fn nothing_is_concluded_from_a_guest_that_stands_still() {
    let mut bench = Bench::alive(mib(256), mib(450));
    bench.sample.paused = true;
    for _ in 0..60 {
        assert_eq!(bench.pass(1000).actions, []);
    }
    bench.sample.paused = false;
    bench.pass(1000);
    assert_eq!(bench.phase(), Phase::Inflating);
}

#[derive(Clone, Debug)]
enum Step {
    Target(u64),
    Device(Option<u64>),
    Silent,
    Report {
        available_mib: u64,
        faults: u64,
    },
    Reset,
    Pause(bool),
    /// Does a part of what was asked.
    Obey(u64),
    Restart,
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (64_u64..=512).prop_map(Step::Target),
        2 => proptest::option::weighted(0.9, 0_u64..=600).prop_map(Step::Device),
        1 => Just(Step::Silent),
        4 => (0_u64..=512, 0_u64..2000)
            .prop_map(|(available_mib, faults)| Step::Report { available_mib, faults }),
        1 => Just(Step::Reset),
        1 => any::<bool>().prop_map(Step::Pause),
        6 => (0_u64..=100).prop_map(Step::Obey),
        1 => Just(Step::Restart),
        8 => prop_oneof![Just(100_u64), Just(1000), 0_u64..40_000].prop_map(Step::Pass),
    ]
}

/// What must hold whatever a guest or a device says.
fn check_all(steps: &[Step]) {
    let mut bench = Bench::new();
    let (mut target, mut paging) = (MEMORY, None);
    // The newest statistics, and the guest's memory when they came.
    let mut heard: Option<(GuestStats, Bytes)> = None;
    let (mut is_known, mut resets, mut known_s) = (false, 0, 0);
    for step in steps {
        match *step {
            Step::Target(mib_target) => {
                target = mib(mib_target);
                bench.balloon.set_target(bench.now_ms, target);
            }
            Step::Device(actual) => {
                bench.sample.device = actual.map_or(Device::Absent, |actual| Device::Present { actual: mib(actual) });
            }
            Step::Silent => bench.sample.device = Device::Silent,
            Step::Report { available_mib, faults } => {
                let before = bench.sample.stats.map_or(0, |stats| stats.major_faults);
                bench.report(mib(available_mib), before + faults);
            }
            Step::Reset => bench.sample.resets += 1,
            Step::Pause(paused) => bench.sample.paused = paused,
            Step::Obey(percent) => {
                if let (Device::Present { actual }, Some(asked)) = (bench.sample.device, bench.balloon.view().asked) {
                    let to = (actual.0 * (100 - percent) + asked.0 * percent) / 100 / PAGE_SIZE * PAGE_SIZE;
                    bench.actual(Bytes(to));
                }
            }
            Step::Restart => {
                bench.balloon = Balloon::new(MEMORY, paging);
                bench.balloon.set_target(bench.now_ms, target);
                bench.sample.resets = 0;
                (heard, is_known, resets, known_s) = (None, false, 0, 0);
            }
            Step::Pass(ms) => {
                let before = bench.balloon.view();
                bench.pass(ms);
                let view = bench.balloon.view();
                if !bench.sample.paused && matches!(bench.sample.device, Device::Present { .. }) {
                    // What comes first, or with a reset, may be of another boot.
                    let is_old = !is_known || resets != bench.sample.resets;
                    (is_known, resets) = (true, bench.sample.resets);
                    match bench.sample.stats {
                        Some(stats) if is_old => (known_s, heard) = (stats.updated_s, None),
                        Some(stats) if stats.updated_s != known_s => {
                            (known_s, heard) = (stats.updated_s, Some((stats, view.actual)));
                        }
                        _ => {}
                    }
                }
                for action in &bench.actions {
                    match *action {
                        Action::Ask(asked) => {
                            assert!(asked >= target && asked <= MEMORY && asked.is_multiple_of_page(), "{asked:?}");
                            let is_further = before.phase == Phase::Inflating
                                && view.phase == Phase::Inflating
                                && before.asked.is_some_and(|before| asked < before);
                            if let (true, Some((stats, actual))) = (is_further, heard) {
                                let room = stats.available.saturating_sub(reserve(MEMORY));
                                assert!(Bytes(asked.0 + room.0) >= actual.min(MEMORY), "into the reserve");
                            }
                        }
                        Action::PageOut(to) => {
                            assert_eq!(to, target);
                            assert!(paging.replace(to) != Some(to), "told twice");
                        }
                        Action::EndPageOut => assert!(paging.take().is_some(), "ended twice"),
                    }
                }
                assert_eq!(view.is_paging, paging.is_some());
                assert!(view.since_ms <= bench.now_ms);
                assert!(
                    target < MEMORY || paging.is_none() || bench.sample.device == Device::Silent || bench.sample.paused
                );
                match view.phase {
                    Phase::Unavailable(_) => assert!(view.is_paging),
                    Phase::Resisted(_) => assert!(!view.is_paging && view.retry_at_ms.is_some()),
                    Phase::Off | Phase::Reached => assert!(!view.is_paging || bench.actions.is_empty()),
                    Phase::Probing | Phase::Inflating | Phase::Deflating => {}
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_guest_says(steps in proptest::collection::vec(step(), 1..120)) {
        check_all(&steps);
    }
}

#[test]
fn a_target_that_moves_by_itself_leaves_a_guest_that_resists_alone() {
    let mut bench = Bench::alive(mib(128), mib(20));
    bench.report(mib(10), 0);
    bench.pass(1000);
    assert!(matches!(bench.phase(), Phase::Resisted(_)), "{}", bench.phase());
    let retry = bench.balloon.view().retry_at_ms;
    for step in 0..5 {
        bench.balloon.follow_target(bench.now_ms, mib(120 - step));
        bench.report(mib(10), 0);
        bench.pass(100);
        assert!(matches!(bench.phase(), Phase::Resisted(_)), "{}", bench.phase());
    }
    assert_eq!(bench.balloon.view().retry_at_ms, retry);
    // A request is tried at once.
    bench.balloon.set_target(bench.now_ms, mib(110));
    assert_eq!(bench.phase(), Phase::Inflating);
}

#[test]
fn a_target_that_moves_by_itself_does_not_hide_a_guest_that_does_not() {
    let mut bench = Bench::alive(mib(256), mib(400));
    for step in 0..(IGNORE_WAIT_MS / 1000 + 2) {
        bench.balloon.follow_target(bench.now_ms, mib(255 - step));
        bench.report(mib(400), 0);
        bench.pass(1000);
    }
    assert_eq!(bench.phase(), Phase::Unavailable(Missing::Effect));
    bench.balloon.follow_target(bench.now_ms, MEMORY);
    bench.pass(100);
    assert_eq!(bench.phase(), Phase::Off);
}
