//! etcd stopped, killed and restarted under owners: never two of them, never an acknowledged write lost.

use std::time::Duration;

use rmap::client::{Event, Failure};
use rmap::control::ControlPlane;
use rmap::units::{Generation, SpaceId};
use rmap_etcd::{EtcdError, Ownership};
use rustix::process::Signal;

use crate::data::{Owner, PAGES, Running};
use crate::relay::Relay;
use crate::rig::{EtcdProcess, Scheme, config, until};
use crate::store::new_space;

/// Long enough for what must not happen to happen, were it to.
const A_WHILE: Duration = Duration::from_secs(3);

fn space(etcd: &EtcdProcess) -> SpaceId {
    etcd.connect("maker").create_space(&new_space("disk")).unwrap().id
}

fn owner(etcd: &EtcdProcess, space: SpaceId, host: &str, servers: &[&Running]) -> (Owner, Generation) {
    let taken = etcd.connect(host).take_over(space).unwrap();
    let generation = taken.0;
    (Owner::open(etcd.config(host), space, taken, servers).greeted(), generation)
}

fn fill(owner: &mut Owner, value: u64) {
    (0..PAGES).for_each(|page| owner.write(page, value).unwrap());
}

fn check(owner: &mut Owner, value: u64) {
    (0..PAGES).for_each(|page| assert_eq!(owner.has(page, value), Ok(true), "page {page}"));
}

/// Two hosts reach for a space: one has it, and what the other still writes dies at the servers.
#[test]
fn of_two_owners_one_can_write() {
    let etcd = EtcdProcess::start();
    let (one, other) = (Running::start(1), Running::start(2));
    let servers = [&one, &other];
    let space = space(&etcd);
    for _ in 0..5 {
        // Both at once, from the same state.
        let mut taken: Vec<_> = std::thread::scope(|scope| {
            let reach = |host: &'static str| {
                let mut way = etcd.connect(host);
                scope.spawn(move || way.take_over(space))
            };
            let both = [reach("a"), reach("b")];
            both.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let today = etcd.connect("c").generation(space).unwrap();
        let won = taken.iter().filter(|result| result.as_ref().is_ok_and(|(generation, _)| *generation == today));
        assert_eq!(won.count(), 1, "{taken:?}");
        for lost in taken.extract_if(.., |result| result.as_ref().map(|(g, _)| *g).ok() != Some(today)) {
            // Beaten before it had it, or afterwards.
            assert!(matches!(&lost, Err(EtcdError::Raced { .. })) || lost.is_ok_and(|(g, _)| g < today));
        }
    }
    let (mut late, first) = owner(&etcd, space, "a", &servers);
    fill(&mut late, 1);
    assert_eq!(late.in_sync(), (4, 4));
    let (mut now, second) = owner(&etcd, space, "b", &servers);
    assert_eq!(second, Generation(first.0 + 1));
    check(&mut now, 1);
    now.write(0, 2).unwrap();
    // The first one was not told.
    assert_eq!(late.write(0, 3), Err(Failure::Fenced));
    assert_eq!(late.write(5, 3), Err(Failure::Fenced));
    assert_eq!((now.has(0, 2), now.has(5, 1)), (Ok(true), Ok(true)));
    let (late, now) = (late.health, now.health);
    until("it is said", || late.get().owned == [(space, first, Ownership::Taken { generation: second })]);
    until("it is said", || now.get().owned == [(space, second, Ownership::Owner)]);
}

/// etcd stands still, and is then killed, while hosts take a space from each other.
#[test]
fn etcd_fails_in_the_middle_of_take_overs() {
    let mut etcd = EtcdProcess::start();
    let space = space(&etcd);
    let mut last = Generation(0);
    for round in 0..6 {
        let contenders: Vec<_> = ["a", "b", "c"]
            .map(|host| {
                let mut config = etcd.config(host);
                // Each asks many times meanwhile, and every one of these requests may still arrive.
                config.request_timeout = Duration::from_millis(200);
                std::thread::spawn(move || {
                    let mut way = rmap_etcd::Etcd::connect(config).unwrap();
                    (0..8).filter_map(|_| Some(way.take_over(space).ok()?.0)).collect::<Vec<_>>()
                })
            })
            .into();
        for _ in 0..3 {
            etcd.signal(Signal::STOP);
            std::thread::park_timeout(Duration::from_millis(300));
            etcd.signal(Signal::CONT);
            std::thread::park_timeout(Duration::from_millis(20 * round));
            if round % 2 == 1 {
                etcd.kill();
                etcd.restart();
            }
        }
        let mut won: Vec<Generation> = contenders.into_iter().flat_map(|one| one.join().unwrap()).collect();
        won.sort_unstable();
        let unique = won.windows(2).all(|pair| pair[0] < pair[1]);
        assert!(unique && won.iter().all(|generation| *generation > last), "{won:?} after {last:?}");
        last = etcd.connect("d").generation(space).unwrap();
        assert!(won.iter().all(|generation| *generation <= last));
    }
}

/// A take-over whose request sits in a stopped etcd, and whose answers get lost, counts once.
#[test]
fn a_take_over_is_done_once() {
    let etcd = EtcdProcess::start();
    let space = space(&etcd);
    let relay = Relay::before(&etcd.endpoint());
    let mut settings = config(&relay.endpoint, Scheme::Plain, "a", None);
    settings.request_timeout = Duration::from_millis(300);
    let mut way = rmap_etcd::Etcd::connect(settings).unwrap();
    // The look passes, the change arrives, and nobody hears of it; then etcd stands still.
    relay.lose(1, 1);
    let reaching = std::thread::spawn(move || way.take_over(space));
    until("the change has arrived", || relay.is_done());
    etcd.signal(Signal::STOP);
    std::thread::park_timeout(A_WHILE);
    etcd.signal(Signal::CONT);
    let (generation, _) = reaching.join().unwrap().unwrap();
    assert_eq!(generation, Generation(1));
    assert_eq!(etcd.connect("b").generation(space).unwrap(), Generation(1));
}

/// A server dies while etcd is away: no write is acknowledged before the map says so, pages go on being read, and what
/// was acknowledged is there for the next owner.
#[test]
fn no_write_is_acknowledged_before_the_map_is_changed() {
    for kill in [false, true] {
        let mut etcd = EtcdProcess::start();
        let (one, other) = (Running::start(1), Running::start(2));
        let space = space(&etcd);
        let (mut first, _) = owner(&etcd, space, "a", &[&one, &other]);
        fill(&mut first, 1);
        assert_eq!(first.in_sync(), (4, 4));
        etcd.signal(Signal::STOP);
        let dead = one.info.clone();
        drop(one);
        first.begin_write(0, 2);
        let early = first.next(A_WHILE);
        assert_eq!(early, None, "acknowledged although the map still names the dead server");
        let health = first.health.clone();
        until("it is said", || {
            first.turn();
            !health.get().reachable && health.get().waiting > 0
        });
        // Reads go on, of other slabs too.
        (1..PAGES).for_each(|page| assert_eq!(first.has(page, 1), Ok(true), "page {page}"));
        assert_eq!(first.has(0, 2), Ok(true), "what is being written is what is read");
        if kill {
            etcd.kill();
            etcd.restart();
        } else {
            etcd.signal(Signal::CONT);
        }
        let done = first.next(crate::rig::HANG);
        assert_eq!(done, Some(Event::Written { token: 0, result: Ok(()) }));
        (1..PAGES).for_each(|page| first.write(page, 2).unwrap());
        until("it is said", || health.get().reachable && health.get().trouble.is_none());
        drop(first);
        // The dead server is in nobody's map, so the next owner does not miss it.
        let mut way = etcd.connect("b");
        let taken = way.take_over(space).unwrap();
        let named = taken.1.iter().flat_map(|(_, entry)| &entry.replicas).any(|copy| copy.server == dead.id);
        assert!(!named && taken.1.len() == 4, "{:?}", taken.1);
        let mut next = Owner::open(etcd.config("b"), space, taken, &[&other]).greeted();
        check(&mut next, 2);
    }
}

/// An owner that is cut off from etcd when another takes over does not write for long: the servers know.
#[test]
fn an_owner_that_etcd_forgot_is_fenced_by_the_servers() {
    let etcd = EtcdProcess::start();
    let (one, other) = (Running::start(1), Running::start(2));
    let servers = [&one, &other];
    let space = space(&etcd);
    let relay = Relay::before(&etcd.endpoint());
    let mut settings = config(&relay.endpoint, Scheme::Plain, "a", None);
    settings.request_timeout = Duration::from_millis(500);
    let taken = etcd.connect("a").take_over(space).unwrap();
    let generation = taken.0;
    let mut cut_off = Owner::open(settings, space, taken, &servers).greeted();
    fill(&mut cut_off, 1);
    relay.lose(0, u32::MAX);
    let health = cut_off.health.clone();
    until("it is not sure", || health.get().owned == [(space, generation, Ownership::Unsure)]);
    // It may go on: nobody else has the space, and the servers take its writes.
    cut_off.write(3, 2).unwrap();
    let (mut now, _) = owner(&etcd, space, "b", &servers);
    check_all_but(&mut now, 3, 1);
    assert_eq!(now.has(3, 2), Ok(true));
    assert_eq!(cut_off.write(3, 9), Err(Failure::Fenced));
    assert_eq!(now.has(3, 2), Ok(true));
}

fn check_all_but(owner: &mut Owner, left_out: u64, value: u64) {
    (0..PAGES).filter(|page| *page != left_out).for_each(|page| assert_eq!(owner.has(page, value), Ok(true)));
}

#[test]
fn etcd_remembers() {
    let mut etcd = EtcdProcess::start();
    let (one, other) = (Running::start(1), Running::start(2));
    let servers = [&one, &other];
    let space = space(&etcd);
    let (mut first, generation) = owner(&etcd, space, "a", &servers);
    fill(&mut first, 1);
    etcd.kill();
    // The data path does not need it.
    fill(&mut first, 2);
    check(&mut first, 2);
    let mut away = etcd.config("b");
    away.patience = Duration::ZERO;
    assert!(rmap_etcd::Etcd::connect(away).is_err_and(|error| error.is_transient()), "no take-over");
    etcd.restart();
    let (mut next, later) = owner(&etcd, space, "b", &servers);
    assert_eq!(later, Generation(generation.0 + 1));
    check(&mut next, 2);
}
