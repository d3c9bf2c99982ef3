//! What strangers and bad datagrams cost a server: no more than a counter.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::crypto::KEY_SIZE;
use crate::crypto::handshake::Initiator;
use crate::crypto::session::Session;
use crate::units::{Class, Generation, PageNo, SlabNo, SpaceId, Version};
use crate::wire::datagram::Versions;
use crate::wire::message::{DRAIN, DRAIN_OFF, Direction, EPOCH_SIZE, Message, Op, Status};
use crate::wire::report::Report;
use crate::wire::{DATAGRAM_MAX, DATAGRAM_MIN_MAX, OVERHEAD, PROTOCOL_VERSION};

mod copies;
mod sessions;

#[derive(Debug)]
struct Counting(u64);

impl Entropy for Counting {
    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *byte = (self.0 >> 56) as u8;
        }
    }
}

impl Server {
    /// Lends a slab, as if its owner had asked for it.
    pub(crate) fn lend(&mut self, space: SpaceId, slab: SlabNo, generation: Generation, grant: Version) -> Status {
        let store = &mut self.shared.state().store;
        assert_eq!(store.fence(space, generation, 0), Status::Ok);
        store.grant(space, slab, generation, (grant, Version::NEVER), true)
    }

    /// Has a page trimmed, as nobody has asked for.
    pub(crate) fn make_up_trim(&mut self, space: SpaceId, page: PageNo, owner: Generation, version: Version) {
        assert!(version != Version::NEVER && !version.has_content());
        let status = self.shared.state().store.write(space, page, owner, version, None);
        assert_eq!(status, Status::Ok);
    }

    /// What it has of a page.
    pub(crate) fn version_of(&mut self, space: SpaceId, page: PageNo, owner: Generation) -> Version {
        self.shared.state().store.read(space, page, owner).expect("it has the slab").version
    }

    /// A page comes that its owner sent long ago.
    pub(crate) fn write_late(&mut self, space: SpaceId, page: PageNo, owner: Generation, version: Version) -> Status {
        let sealed = [9; crate::units::SEALED_SIZE];
        self.shared.state().store.write(space, page, owner, version, Some(&sealed))
    }
}

fn addr() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 7))
}

fn client_keys() -> Keypair {
    Keypair::from_private([2; KEY_SIZE])
}

fn server() -> Server {
    workers(1).pop().unwrap()
}

fn workers(count: usize) -> Vec<Server> {
    Server::with_workers(tiny(), Box::new(Counting(1)), count).unwrap()
}

fn tiny() -> ServerConfig {
    ServerConfig {
        id: ServerId(1),
        keys: Keypair::from_private([1; KEY_SIZE]),
        pool: PoolKey::new([3; KEY_SIZE]),
        admitted: vec![client_keys().public()],
        slabs: 2,
        slab_size: SlabSize::new(8).unwrap(),
        quota: 2,
        epoch: BootEpoch(4),
        medium: None,
    }
}

fn hello(keys: &Keypair, pool: [u8; KEY_SIZE], versions: Versions) -> Initiator {
    // No two are the same.
    static HELLOS: AtomicU64 = AtomicU64::new(2);
    let entropy = SharedEntropy::new(Box::new(Counting(HELLOS.fetch_add(1, Ordering::Relaxed))));
    let server = Keypair::from_private([1; KEY_SIZE]).public();
    Initiator::new(keys, &server, &PoolKey::new(pool), Head::Hello { versions, sender: 9 }, &entropy)
}

const SPOKEN: Versions = Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION };

/// A session with `server`, as its client has it, to whom the space of [`request`] belongs.
fn session(server: &mut Server) -> Session {
    assert_eq!(server.shared.state().store.fence(request(Op::Fence).space, Generation(1), 0), Status::Ok);
    session_of(server, &client_keys())
}

fn session_of(server: &mut Server, keys: &Keypair) -> Session {
    greet(server, &mut hello(keys, [3; KEY_SIZE], SPOKEN))
}

fn greet(server: &mut Server, initiator: &mut Initiator) -> Session {
    greet_at(server, Time(0), initiator).expect("an answer")
}

/// `None` if the hello is not answered.
fn greet_at(server: &mut Server, now: Time, initiator: &mut Initiator) -> Option<Session> {
    let mut datagram = initiator.hello;
    server.on_datagram(now, addr(), &mut datagram);
    let mut out = Vec::new();
    server.poll_transmit(&mut out)?;
    assert!(out.len() <= datagram.len(), "an answer is not longer than the hello");
    let Ok(Head::Accept { sender, receiver: 9, .. }) = Head::decode(&out) else { panic!("not accepted") };
    let (secrets, about) = initiator.finish(&out).unwrap();
    assert_eq!((about.epoch, about.server, about.slab_pages), (BootEpoch(4), ServerId(1), 8));
    Some(Session::client(&secrets, sender))
}

/// Of a slab's first life.
const NO_EPOCH: [u8; EPOCH_SIZE] = [0; EPOCH_SIZE];

fn request(op: Op) -> Message {
    Message {
        op,
        class: Class::Demand,
        direction: Direction::Request { cut: DATAGRAM_MIN_MAX as u16, generation: Generation(1) },
        id: 5,
        space: SpaceId(6),
        page: PageNo(0),
        version: Version::NEVER,
        payload: if op == Op::Grant { EPOCH_SIZE as u16 } else { 0 },
    }
}

fn answer(server: &mut Server, session: &mut Session, message: &Message) -> (Status, Vec<u8>) {
    let mut datagram = Vec::new();
    session.seal(message, &NO_EPOCH[..usize::from(message.payload)], DATAGRAM_MAX, &mut datagram);
    server.on_datagram(Time(1_000_000), addr(), &mut datagram);
    let mut out = Vec::new();
    server.poll_transmit(&mut out).expect("a reply");
    let Ok(Head::Data { epoch, counter, .. }) = Head::decode(&out) else { panic!("no reply") };
    let body = session.open(epoch, counter, &mut out).unwrap();
    let (message, _, payload) = Message::decode(body).unwrap();
    let Direction::Reply { status, .. } = message.direction else { panic!("no reply") };
    (status, payload.to_vec())
}

fn status_of(server: &mut Server, session: &mut Session, message: &Message) -> Status {
    answer(server, session, message).0
}

#[test]
fn strangers_get_no_answer() {
    let stranger = Keypair::from_private([8; KEY_SIZE]);
    for (keys, pool, expected) in [
        (&client_keys(), [4; KEY_SIZE], ServerStats { strangers: 1, ..Default::default() }),
        (&stranger, [3; KEY_SIZE], ServerStats { not_admitted: 1, ..Default::default() }),
    ] {
        let mut server = server();
        let mut datagram = hello(keys, pool, SPOKEN).hello;
        server.on_datagram(Time(0), addr(), &mut datagram);
        assert_eq!(server.poll_transmit(&mut Vec::new()), None);
        assert_eq!(server.stats(), expected);
    }
}

#[test]
fn other_versions_are_refused_with_the_range_that_is_spoken() {
    let mut server = server();
    let versions = Versions { min: 7, max: 9 };
    let initiator = hello(&client_keys(), [3; KEY_SIZE], versions);
    let mut datagram = initiator.hello;
    server.on_datagram(Time(0), addr(), &mut datagram);
    let mut out = Vec::new();
    server.poll_transmit(&mut out).expect("a refusal");
    assert_eq!(Head::decode(&out), Ok(Head::Refuse { versions: SPOKEN, receiver: 9 }));
    assert!(PoolKey::new([3; KEY_SIZE]).admits_refusal(&out, &initiator.hello));
    assert!(!PoolKey::new([4; KEY_SIZE]).admits_refusal(&out, &initiator.hello));
}

/// As by a client that hears nothing of a server that has too much to do: one session comes of it, and nobody else's ends.
#[test]
fn a_hello_that_is_repeated_gets_the_same_answer() {
    let mut server = server();
    let mut other = session(&mut server);
    let mut initiator = hello(&client_keys(), [3; KEY_SIZE], SPOKEN);
    let mut answers: Vec<Vec<u8>> = Vec::new();
    for time in 0..50 {
        server.on_datagram(Time(time), addr(), &mut initiator.hello.clone());
        let mut out = Vec::new();
        server.poll_transmit(&mut out).expect("an answer");
        answers.push(out);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    assert_eq!((server.stats().accepted, server.stats().repeated, server.stats().throttled), (2, 49, 0));
    let Ok(Head::Accept { sender, .. }) = Head::decode(&answers[7]) else { panic!("not accepted") };
    let (secrets, _) = initiator.finish(&answers[7]).unwrap();
    let mut session = Session::client(&secrets, sender);
    for session in [&mut session, &mut other] {
        assert_eq!(status_of(&mut server, session, &request(Op::Read)), Status::UnknownSlab);
    }
    // One that comes late changes nothing for who uses the session.
    server.on_datagram(Time(2_000_000), addr(), &mut initiator.hello.clone());
    while server.poll_transmit(&mut Vec::new()).is_some() {}
    assert_eq!(status_of(&mut server, &mut session, &request(Op::Read)), Status::UnknownSlab);
}

/// As after a second in which the server had no CPU: whoever asks for the first time does not wait for those who asked again.
#[test]
fn hellos_that_are_repeated_are_no_handshakes() {
    let mut server = server();
    let initiators: Vec<Initiator> = (0..8).map(|_| hello(&client_keys(), [3; KEY_SIZE], SPOKEN)).collect();
    for _ in 0..50 {
        for initiator in &initiators {
            server.on_datagram(Time(0), addr(), &mut initiator.hello.clone());
        }
    }
    let mut sent = 0;
    while server.poll_transmit(&mut Vec::new()).is_some() {
        sent += 1;
    }
    // Once each, although all of them were asked for before any was sent.
    assert_eq!(sent, initiators.len());
    for _ in 0..500 {
        server.on_datagram(Time(0), addr(), &mut initiators[0].hello.clone());
        assert!(server.poll_transmit(&mut Vec::new()).is_some());
    }
    let mut new = hello(&client_keys(), [3; KEY_SIZE], SPOKEN).hello;
    server.on_datagram(Time(0), addr(), &mut new);
    let stats = server.stats();
    assert_eq!((stats.accepted, stats.repeated, stats.throttled), (9, 8 * 49 + 500, 0));
}

/// A recording of a hello is not to be a way to send more to others than handshakes would.
#[test]
fn hellos_that_come_from_elsewhere_are_throttled() {
    let mut server = server();
    let initiator = hello(&client_keys(), [3; KEY_SIZE], SPOKEN);
    server.on_datagram(Time(0), addr(), &mut initiator.hello.clone());
    let mut sent = 0;
    for port in 1000..2000 {
        let elsewhere = SocketAddr::new(addr().ip(), port);
        assert_ne!(elsewhere, addr());
        server.on_datagram(Time(0), elsewhere, &mut initiator.hello.clone());
        while server.poll_transmit(&mut Vec::new()).is_some() {
            sent += 1;
        }
    }
    assert!(sent <= 64, "{sent}");
    assert_eq!(server.stats().repeated + server.stats().throttled, 1000);
}

#[test]
fn hellos_are_throttled() {
    let mut server = server();
    for _ in 0..1000 {
        let mut datagram = hello(&client_keys(), [3; KEY_SIZE], SPOKEN).hello;
        server.on_datagram(Time(0), addr(), &mut datagram);
        while server.poll_transmit(&mut Vec::new()).is_some() {}
    }
    assert_eq!(server.stats().accepted + server.stats().throttled, 1000);
    assert!(server.stats().accepted <= 64, "{:?}", server.stats());
}

#[test]
fn replayed_and_damaged_datagrams_change_nothing() {
    let mut server = server();
    let mut session = session(&mut server);
    let mut datagram = Vec::new();
    session.seal(&request(Op::Fence), &[], DATAGRAM_MAX, &mut datagram);
    for at in 0..datagram.len() {
        let mut damaged = datagram.clone();
        damaged[at] ^= 0x10;
        server.on_datagram(Time(1), addr(), &mut damaged);
    }
    assert_eq!(server.stats().fragments, 0);
    server.on_datagram(Time(1), addr(), &mut datagram.clone());
    server.on_datagram(Time(1), addr(), &mut datagram.clone());
    assert_eq!((server.stats().fragments, server.stats().replayed), (1, 1));
    assert!(server.poll_transmit(&mut Vec::new()).is_some());
    assert!(server.poll_transmit(&mut Vec::new()).is_none());
}

#[test]
fn unknown_slabs_are_never_zeros() {
    let mut server = server();
    let mut session = session(&mut server);
    assert_eq!(status_of(&mut server, &mut session, &request(Op::Read)), Status::UnknownSlab);
    assert_eq!(status_of(&mut server, &mut session, &request(Op::Fence)), Status::Ok);
    assert_eq!(status_of(&mut server, &mut session, &request(Op::Read)), Status::UnknownSlab);
    assert_eq!(status_of(&mut server, &mut session, &request(Op::Versions)), Status::UnknownSlab);
}

#[test]
fn a_report_counts_what_is_here() {
    let mut server = server();
    let mut session = session(&mut server);
    let version = Version::new(Generation(1), 1, false);
    assert_eq!(status_of(&mut server, &mut session, &Message { version, ..request(Op::Grant) }), Status::Ok);
    assert_eq!(status_of(&mut server, &mut session, &request(Op::Read)), Status::Ok);
    assert_eq!(status_of(&mut server, &mut session, &request(Op::Trim)), Status::BadRequest);
    let trim = Message { version: Version::new(Generation(1), 2, true), ..request(Op::Trim) };
    assert_eq!(status_of(&mut server, &mut session, &trim), Status::Ok);
    let (status, payload) = answer(&mut server, &mut session, &request(Op::Report));
    let expected =
        Report { slabs: 2, held: 1, spaces: 1, sessions: 1, reads: 1, writes: 1, uptime_ms: 1, draining: false };
    assert_eq!((status, Report::decode(&payload)), (Status::Ok, Ok(expected)));
}

/// A client may use the server's memory; that does not make the server its own.
#[test]
fn only_those_who_may_have_a_server_drained() {
    let mut server = server();
    let mut session = session(&mut server);
    let mut ask = |server: &mut Server, word| {
        let message = Message { version: Version::from_bits(word), ..request(Op::Drain) };
        let status = status_of(server, &mut session, &message);
        let (_, payload) = answer(server, &mut session, &request(Op::Report));
        (status, Report::decode(&payload).unwrap().draining)
    };
    assert_eq!(ask(&mut server, DRAIN), (Status::Denied, false));
    assert_eq!(ask(&mut server, DRAIN_OFF), (Status::Denied, false));
    server.set_admins(vec![Keypair::from_private([8; KEY_SIZE]).public()]);
    assert_eq!(ask(&mut server, DRAIN), (Status::Denied, false));
    server.set_admins(vec![client_keys().public()]);
    assert_eq!(ask(&mut server, 2), (Status::BadRequest, false));
    assert_eq!(ask(&mut server, DRAIN), (Status::Ok, true));
    assert_eq!((server.drain_asked_by(), server.pressure()), (Some(client_keys().public()), Pressure::Orange));
    assert_eq!(ask(&mut server, DRAIN), (Status::Ok, true), "the same again");
    assert_eq!(ask(&mut server, DRAIN_OFF), (Status::Ok, false));
    assert_eq!((server.drain_asked_by(), server.pressure()), (None, Pressure::None));
    // Nor does it go on for somebody who has no right to it any more.
    assert_eq!(ask(&mut server, DRAIN), (Status::Ok, true));
    server.set_admins(Vec::new());
    assert_eq!((server.drain_asked_by(), server.pressure(), server.is_draining()), (None, Pressure::None, false));
    server.set_admins(vec![client_keys().public()]);
    // What the server's own machine has begun is not called off from elsewhere.
    server.begin_drain();
    assert_eq!(ask(&mut server, DRAIN), (Status::Ok, true));
    assert_eq!(ask(&mut server, DRAIN_OFF), (Status::Ok, true));
    // Nor does a request that was granted outlive the right to it.
    server.set_admins(Vec::new());
    assert_eq!(ask(&mut server, DRAIN), (Status::Denied, true));
}

/// Also in a worker that was idle when the list changed; and a hello that was sent before is no way back.
#[test]
fn who_is_admitted_no_more_has_no_session() {
    for mut servers in [workers(1), workers(2)] {
        let last = servers.len() - 1;
        let mut hello = hello(&client_keys(), [3; KEY_SIZE], SPOKEN);
        let mut session = greet(&mut servers[last], &mut hello);
        assert_eq!(status_of(&mut servers[last], &mut session, &request(Op::Fence)), Status::Ok);
        let other = Keypair::from_private([8; KEY_SIZE]).public();
        servers[0].admit(vec![client_keys().public(), other]).unwrap();
        assert_eq!(status_of(&mut servers[last], &mut session, &request(Op::Fence)), Status::Ok, "it may stay");
        servers[0].admit(vec![other]).unwrap();
        let server = &mut servers[last];
        let mut datagram = Vec::new();
        session.seal(&request(Op::Fence), &[], DATAGRAM_MAX, &mut datagram);
        server.on_datagram(Time(2), addr(), &mut datagram);
        assert!(server.poll_transmit(&mut Vec::new()).is_none());
        assert_eq!((server.stats().unknown_session, server.sessions.count()), (1, 0));
        server.on_datagram(Time(3), addr(), &mut hello.hello.clone());
        assert!(server.poll_transmit(&mut Vec::new()).is_none());
        assert_eq!(server.stats().not_admitted, 1);
    }
}

#[test]
fn keys_change_under_way() {
    let mut server = server();
    let mut session = session(&mut server);
    session.rekey_every(3);
    for _ in 0..20 {
        assert_eq!(status_of(&mut server, &mut session, &request(Op::Fence)), Status::Ok);
    }
}

#[test]
fn a_probe_is_answered_in_its_size() {
    let mut server = server();
    let mut session = session(&mut server);
    for size in crate::wire::DATAGRAM_SIZES {
        let payload = vec![0; size - OVERHEAD];
        let message = Message { payload: payload.len() as u16, ..request(Op::Probe) };
        let (mut datagram, mut out) = (Vec::new(), Vec::new());
        session.seal(&message, &payload, DATAGRAM_MAX, &mut datagram);
        server.on_datagram(Time(1), addr(), &mut datagram);
        assert_eq!(server.poll_transmit(&mut out).map(|transmit| transmit.segment), Some(size));
        assert_eq!(out.len(), size);
    }
}

/// Who is not waited for is told to come again; a fault is answered.
#[test]
fn a_crowded_server_is_busy_for_what_can_wait() {
    let mut server = server();
    let mut session = session(&mut server);
    let mut ask = |server: &mut Server, class| {
        let mut datagram = Vec::new();
        session.seal(&Message { class, ..request(Op::Read) }, &[], DATAGRAM_MAX, &mut datagram);
        server.on_datagram(Time(1), addr(), &mut datagram);
    };
    for _ in 0..5000 {
        ask(&mut server, Class::Rebuild);
    }
    (0..10).for_each(|_| ask(&mut server, Class::Demand));
    let mut replies = 0;
    while server.poll_transmit(&mut Vec::new()).is_some() {
        replies += 1;
    }
    let answered = server.stats().answered;
    // Beyond the room for replies there is silence, for faults too.
    assert_eq!(replies, 4096);
    assert_eq!(answered[Status::Busy as usize], 2048);
    assert_eq!(answered[Status::UnknownSlab as usize], 2048);
    ask(&mut server, Class::Demand);
    assert!(server.poll_transmit(&mut Vec::new()).is_some());
    assert_eq!(server.stats().answered[Status::UnknownSlab as usize], 2049);
}

/// Both kinds of what can wait are turned away, not executed, from the 2,048th reply on that waits; faults and writes are not.
#[test]
fn a_crowded_server_does_what_somebody_waits_for() {
    let mut server = server();
    let mut session = session(&mut server);
    let grant = |sequence| Message { version: Version::new(Generation(1), sequence, false), ..request(Op::Grant) };
    assert_eq!(status_of(&mut server, &mut session, &grant(1)), Status::Ok);
    let mut ask = |server: &mut Server, message: Message| {
        let mut datagram = Vec::new();
        session.seal(&message, &[], DATAGRAM_MAX, &mut datagram);
        server.on_datagram(Time(1), addr(), &mut datagram);
    };
    let trim = |class, page| Message {
        class,
        page: PageNo(page),
        version: Version::new(Generation(1), 2, true),
        ..request(Op::Trim)
    };
    (0..2047).for_each(|_| ask(&mut server, request(Op::Fence)));
    // The last that is done, whoever asks.
    ask(&mut server, trim(Class::Prefetch, 0));
    for (class, page) in [(Class::Prefetch, 1), (Class::Rebuild, 2), (Class::Eviction, 3), (Class::Demand, 4)] {
        ask(&mut server, trim(class, page));
        ask(&mut server, Message { class, page: PageNo(page), ..request(Op::Read) });
    }
    let is_done = |server: &Server, page: usize| {
        let mut state = server.shared.state();
        let (_, versions) = state.store.versions(SpaceId(6), PageNo(0), Generation(1)).unwrap();
        versions[page] != Version::NEVER
    };
    assert_eq!([0, 1, 2, 3, 4].map(|page| is_done(&server, page)), [true, false, false, true, true]);
    while server.poll_transmit(&mut Vec::new()).is_some() {}
    // A trim and a read of each.
    assert_eq!(server.stats().answered[Status::Busy as usize], 4);
    assert_eq!(server.stats().answered[Status::Ok as usize], 1 + 2047 + 1 + 4);
    ask(&mut server, trim(Class::Prefetch, 1));
    assert!(is_done(&server, 1), "it is crowded no more");
}

/// Another server may write to the one slab that its owner said, as long as that is the same grant of the same owner.
#[test]
fn a_ticket_is_for_one_grant_of_one_slab() {
    let (other, page) = (Keypair::from_private([8; KEY_SIZE]), [7; crate::units::SEALED_SIZE]);
    let mut server = server();
    let mut owner = session(&mut server);
    let version = |sequence| Version::new(Generation(1), sequence, false);
    let grant =
        |slab: u64, sequence| Message { page: PageNo(8 * slab), version: version(sequence), ..request(Op::Grant) };
    let admit = |slab, sequence| Message { op: Op::Admit, payload: KEY_SIZE as u16, ..grant(slab, sequence) };
    let ask = |server: &mut Server, session: &mut Session, at, message: &Message, payload: &[u8]| {
        let (mut datagrams, mut out) = (Vec::new(), Vec::new());
        let length = session.seal(message, payload, DATAGRAM_MIN_MAX, &mut datagrams);
        datagrams.chunks_mut(length).for_each(|datagram| server.on_datagram(Time(at), addr(), datagram));
        server.poll_transmit(&mut out)?;
        let Ok(Head::Data { epoch, counter, .. }) = Head::decode(&out) else { panic!("no reply") };
        let (reply, ..) = Message::decode(session.open(epoch, counter, &mut out).unwrap()).unwrap();
        let Direction::Reply { status, .. } = reply.direction else { panic!("no reply") };
        Some(status)
    };
    let key = other.public().0;
    assert_eq!(ask(&mut server, &mut owner, 1, &admit(0, 1), &key), Some(Status::UnknownSlab));
    assert_eq!(ask(&mut server, &mut owner, 1, &grant(0, 1), &NO_EPOCH), Some(Status::Ok));
    assert_eq!(ask(&mut server, &mut owner, 1, &grant(1, 2), &NO_EPOCH), Some(Status::Ok));
    assert_eq!(ask(&mut server, &mut owner, 1, &admit(0, 2), &key), Some(Status::BadRequest), "not the grant there is");
    let mut stranger = hello(&other, [3; KEY_SIZE], SPOKEN).hello;
    server.on_datagram(Time(1), addr(), &mut stranger);
    assert_eq!((server.poll_transmit(&mut Vec::new()), server.stats().not_admitted), (None, 1));
    assert_eq!(ask(&mut server, &mut owner, 1, &admit(0, 1), &key), Some(Status::Ok));
    let mut source = session_of(&mut server, &other);
    let write = |slab: u64, sequence, generation: u32| Message {
        page: PageNo(8 * slab),
        version: version(sequence),
        payload: page.len() as u16,
        direction: Direction::Request { cut: DATAGRAM_MIN_MAX as u16, generation: Generation(generation) },
        id: sequence,
        ..request(Op::Write)
    };
    let mut push = |server: &mut Server, at, message: &Message| ask(server, &mut source, at, message, &page);
    assert_eq!(push(&mut server, 2, &write(0, 5, 1)), Some(Status::Ok));
    // Older, or the same again: done, and changes nothing.
    assert_eq!(push(&mut server, 2, &write(0, 4, 1)), Some(Status::Ok));
    let mut state = server.shared.state();
    let (stored, _) = state.store.versions(SpaceId(6), PageNo(0), Generation(1)).map(|(g, v)| (v[0], g)).unwrap();
    drop(state);
    assert_eq!(stored, version(5));
    assert_eq!(push(&mut server, 2, &write(1, 5, 1)), Some(Status::Denied), "another slab");
    assert_eq!(push(&mut server, 2, &write(0, 6, 2)), Some(Status::NotFenced));
    for op in Op::ALL.into_iter().filter(|op| !matches!(op, Op::Probe | Op::Write | Op::Trim | Op::Admit | Op::Copy)) {
        let request = request(op);
        let denied = ask(&mut server, &mut source, 2, &request, &NO_EPOCH[..usize::from(request.payload)]);
        assert_eq!(denied, Some(Status::Denied), "{op:?} is for clients");
    }
    let own = ask(&mut server, &mut source, 2, &admit(1, 2), &key);
    assert_eq!(own, Some(Status::Denied), "a ticket does not give tickets");
    let copy = Message { payload: crate::wire::copy::ORDER_SIZE as u16, ..request(Op::Copy) };
    let own = ask(&mut server, &mut source, 2, &copy, &[1; crate::wire::copy::ORDER_SIZE]);
    assert_eq!(own, Some(Status::Denied), "nor can it have others written to");
    let mut push = |server: &mut Server, at, message: &Message| ask(server, &mut source, at, message, &page);
    let late = TICKET_LIFE.as_nanos() as u64 + 1;
    assert_eq!(push(&mut server, late, &write(0, 6, 1)), Some(Status::Denied), "its time is over");
    assert_eq!(ask(&mut server, &mut owner, late, &admit(0, 1), &key), Some(Status::Ok));
    assert_eq!(push(&mut server, late, &write(0, 6, 1)), Some(Status::Ok));
    // Taken back, and a request for it comes late.
    let nobody = [0; KEY_SIZE];
    assert_eq!(ask(&mut server, &mut owner, late, &Message { id: 8, ..admit(0, 1) }, &nobody), Some(Status::Ok));
    assert_eq!(push(&mut server, late, &write(0, 7, 1)), Some(Status::Denied));
    assert_eq!(ask(&mut server, &mut owner, late, &admit(0, 1), &key), Some(Status::Ok));
    assert_eq!(push(&mut server, late, &write(0, 7, 1)), Some(Status::Denied), "it was asked for before");
    assert_eq!(ask(&mut server, &mut owner, late, &Message { id: 9, ..admit(0, 1) }, &key), Some(Status::Ok));
    assert_eq!(push(&mut server, late, &write(0, 7, 1)), Some(Status::Ok));
    // Granted again: what was on its way to the grant before is not for this one.
    assert_eq!(ask(&mut server, &mut owner, late, &grant(0, 9), &NO_EPOCH), Some(Status::Ok));
    assert_eq!(push(&mut server, late, &write(0, 10, 1)), Some(Status::Denied));
    // Released, and then another owner.
    assert_eq!(ask(&mut server, &mut owner, late, &admit(0, 9), &key), Some(Status::Ok));
    assert_eq!(
        ask(&mut server, &mut owner, late, &Message { op: Op::Release, payload: 0, ..grant(0, 9) }, &[]),
        Some(Status::Ok)
    );
    assert_eq!(push(&mut server, late, &write(0, 11, 1)), Some(Status::UnknownSlab));
    assert_eq!(ask(&mut server, &mut owner, late, &grant(0, 12), &NO_EPOCH), Some(Status::Ok));
    assert_eq!(ask(&mut server, &mut owner, late, &admit(0, 12), &key), Some(Status::Ok));
    assert_eq!(server.shared.state().store.fence(SpaceId(6), Generation(2), 7), Status::Ok);
    assert_eq!(push(&mut server, late, &write(0, 13, 1)), Some(Status::StaleGeneration));
    assert_eq!(push(&mut server, late, &write(0, 13, 2)), Some(Status::Denied), "the ticket was the last owner's");
}

/// What was written by one worker is read by another, and the numbers are those of all.
#[test]
fn workers_have_the_same_pages() {
    let mut workers = workers(3);
    let mut sessions: Vec<Session> = workers.iter_mut().map(session).collect();
    let grant = Message { version: Version::from_bits(2), ..request(Op::Grant) };
    assert_eq!(status_of(&mut workers[0], &mut sessions[0], &grant), Status::Ok);
    let trimmed = Version::new(Generation(1), 2, true);
    let trim = Message { version: trimmed, ..request(Op::Trim) };
    assert_eq!(status_of(&mut workers[1], &mut sessions[1], &trim), Status::Ok);
    let (status, versions) = answer(&mut workers[2], &mut sessions[2], &request(Op::Versions));
    assert_eq!((status, &versions[..8]), (Status::Ok, &trimmed.bits().to_le_bytes()[..]));
    // A later owner, heard of by one worker, is known to all.
    let fence = Message {
        direction: Direction::Request { cut: DATAGRAM_MIN_MAX as u16, generation: Generation(2) },
        ..request(Op::Fence)
    };
    assert_eq!(status_of(&mut workers[2], &mut sessions[2], &fence), Status::Ok);
    assert_eq!(status_of(&mut workers[0], &mut sessions[0], &trim), Status::StaleGeneration);
    workers.iter_mut().for_each(|worker| assert_eq!(worker.poll_transmit(&mut Vec::new()), None));
    for worker in &workers {
        assert_eq!((worker.stats().accepted, worker.stats().fragments, worker.held_slabs()), (3, 5, 1));
    }
}

/// Whoever hands datagrams out finds the worker of a session without a key.
#[test]
fn a_sessions_number_says_its_worker() {
    let mut workers = workers(WORKERS_MAX);
    for (number, worker) in workers.iter_mut().enumerate() {
        let mut session = session(worker);
        let mut datagram = Vec::new();
        session.seal(&request(Op::Fence), &[], DATAGRAM_MAX, &mut datagram);
        assert_eq!((worker_of(&datagram), worker.worker()), (Some(number), number));
    }
    let hello = hello(&client_keys(), [3; KEY_SIZE], SPOKEN).hello;
    assert_eq!((worker_of(&hello), worker_of(&[4; 5]), worker_of(&[])), (None, None, None));
    let config = |workers| Server::with_workers(tiny(), Box::new(Counting(1)), workers).unwrap_err();
    assert_eq!(config(0), ConfigError::Workers { workers: 0 });
    assert_eq!(config(WORKERS_MAX + 1), ConfigError::Workers { workers: WORKERS_MAX + 1 });
}
