//! Servers with too much to do say so to what can wait.

use super::super::exchange::WINDOW_MAX;
use super::cold::{assert_right, cold};
use super::*;
use crate::client::index::PeerIndex;
use crate::crypto::handshake::Initiator;
use crate::crypto::session::Session;
use crate::units::Version;
use crate::wire::datagram::{Head, Versions};
use crate::wire::message::{Direction, Message, Op};
use crate::wire::{DATAGRAM_MIN_MAX, OVERHEAD, PROTOCOL_VERSION};

/// Replies that wait at a server when it is busy for what can wait.
const REPLIES: usize = 2048;
/// A server is crowded for so long.
const WHILE: Duration = Duration::from_millis(10);
/// Everything that was busy is asked again by then, one request a timeout.
const LONG: Duration = Duration::from_secs(1);
const SLAB: u64 = 8;
/// Of whom [`addr`] is the other client's.
const OTHER: usize = 98;

/// Another client of the servers, which asks more of them than they can answer at once.
struct Crowd {
    /// The session with each server, by the server's index.
    sessions: Vec<Session>,
}

impl Crowd {
    fn new(pool: &mut Pool) -> Crowd {
        let keys = Keypair::from_private([60; KEY_SIZE]);
        let entropy = SharedEntropy::new(Box::new(Counting(77)));
        let versions = Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION };
        let mut sessions = Vec::new();
        for (node, server) in pool.servers.iter_mut().enumerate() {
            server.admit(vec![pool.client.pool.config.keys.public(), keys.public()]).unwrap();
            let head = Head::Hello { versions, sender: node as u32 };
            let key = pool.client.pool.sessions.peers[PeerIndex(node)].info().key;
            let mut initiator = Initiator::new(&keys, &key, &PoolKey::new([1; KEY_SIZE]), head, &entropy);
            let mut out = Vec::new();
            server.on_datagram(pool.now, addr(OTHER), &mut initiator.hello.clone());
            server.poll_transmit(&mut out).expect("an answer");
            let Ok(Head::Accept { sender, .. }) = Head::decode(&out) else { panic!("not accepted") };
            let (secrets, _) = initiator.finish(&out).unwrap();
            sessions.push(Session::client(&secrets, sender));
        }
        Crowd { sessions }
    }

    /// Is answered before anything else, when the server is next asked for what it has to say.
    fn comes_to(&mut self, pool: &mut Pool, node: usize) {
        if pool.deaf.contains(&node) {
            return;
        }
        let message = Message {
            op: Op::Probe,
            class: Class::Demand,
            direction: Direction::Request { cut: DATAGRAM_MIN_MAX as u16, generation: Generation(1) },
            id: 1,
            space: SpaceId(9),
            page: PageNo(0),
            version: Version::NEVER,
            payload: 0,
        };
        let mut datagram = Vec::with_capacity(OVERHEAD);
        for _ in 0..REPLIES {
            datagram.clear();
            self.sessions[node].seal(&message, &[], DATAGRAM_MIN_MAX, &mut datagram);
            pool.servers[node].on_datagram(pool.now, addr(OTHER), &mut datagram);
        }
    }

    fn comes(&mut self, pool: &mut Pool) {
        (0..pool.servers.len()).for_each(|node| self.comes_to(pool, node));
    }

    /// Is there all the time.
    fn stays(&mut self, pool: &mut Pool, time: Duration) {
        self.comes(pool);
        let until = pool.now + time;
        while pool.now < until {
            pool.now = pool.now + Duration::from_millis(1);
            pool.time_passes();
            pool.receive_client();
            for node in 0..pool.servers.len() {
                pool.receive_server(node);
                self.comes_to(pool, node);
            }
            pool.receive_control();
        }
        pool.step();
    }
}

/// How often servers were busy.
fn busy(pool: &Pool) -> u64 {
    pool.servers.iter().map(|server| server.stats().answered[Status::Busy as usize]).sum()
}

fn prefetch(pool: &mut Pool, pages: impl Iterator<Item = u64>) {
    for page in pages {
        pool.client.read(pool.now, pool.space, PageNo(page), Class::Prefetch, page).unwrap();
    }
}

/// What was read: pages that are filled with their number.
fn expect_read(pool: &mut Pool) -> Vec<u64> {
    let mut content = [0; PAGE_SIZE];
    let mut tokens = Vec::new();
    while let Some(event) = pool.client.poll_event(&mut content) {
        let Event::Read { token, result: Ok(()) } = event else { panic!("{event:?} for a read") };
        assert_eq!(content, [token as u8; PAGE_SIZE]);
        tokens.push(token);
    }
    tokens.sort_unstable();
    tokens
}

/// With all of its pages filled with their number.
fn filled(servers: usize, copies: usize) -> Pool {
    let mut pool = Pool::new(servers, copies, 32);
    (0..64).for_each(|page| assert_eq!(pool.write(page, page as u8), Ok(())));
    pool
}

/// Until that is noticed, and nothing is done about it yet.
fn falls_silent(pool: &mut Pool, node: usize) {
    pool.deaf = vec![node];
    while !pool.client.pool.sessions.peers[PeerIndex(node)].is_down() {
        while pool.step() {}
        pool.now = pool.now + Duration::from_millis(1);
        pool.time_passes();
    }
}

fn assert_whole(pool: &mut Pool) {
    let stats = pool.client.stats();
    assert_eq!((stats.slabs_lost, stats.bad_pages), (0, 0));
    assert_eq!(pool.client.in_sync(pool.space), (8, 8));
    (0..64).for_each(|page| assert_eq!(pool.read(page), Ok(page as u8)));
    assert!(pool.client.is_idle());
}

#[test]
fn what_is_busy_is_asked_again() {
    let mut pool = filled(1, 1);
    let mut crowd = Crowd::new(&mut pool);
    prefetch(&mut pool, 5..6);
    crowd.comes(&mut pool);
    let sent = pool.client.stats().sent;
    while pool.step() {}
    assert_eq!((busy(&pool), expect_read(&mut pool)), (1, vec![]));
    let timeout = pool.client.pool.sessions.peers[PeerIndex(0)].timeout();
    pool.now = pool.now + (timeout - Duration::from_micros(1));
    pool.client.on_timeout(pool.now);
    while pool.step() {}
    assert_eq!(pool.client.stats().sent, sent + 1, "not before the timeout");
    pool.now = pool.now + Duration::from_micros(1);
    pool.client.on_timeout(pool.now);
    while pool.step() {}
    assert_eq!((pool.client.stats().sent, expect_read(&mut pool)), (sent + 2, vec![5]));
    assert_whole(&mut pool);
}

/// More often than there is room for replies.
#[test]
fn what_was_busy_for_long_is_read() {
    for copies in [1, 2] {
        let mut pool = filled(2, copies);
        let mut crowd = Crowd::new(&mut pool);
        while busy(&pool) < 2 * WINDOW_MAX as u64 {
            prefetch(&mut pool, 0..64);
            crowd.stays(&mut pool, WHILE);
            assert_eq!(expect_read(&mut pool), []);
            pool.pass(LONG);
            assert_eq!(expect_read(&mut pool), (0..64).collect::<Vec<_>>());
        }
        assert_whole(&mut pool);
        assert_eq!((pool.client.stats().copies_left, pool.client.stats().servers_failed), (0, 0));
    }
}

/// The room for its reply is a fault's meanwhile.
#[test]
fn what_is_busy_is_in_nobodys_way() {
    let mut pool = filled(1, 1);
    let mut crowd = Crowd::new(&mut pool);
    let window = pool.client.pool.sessions.exchanges.window as u64;
    prefetch(&mut pool, 0..window);
    crowd.comes(&mut pool);
    pool.step();
    assert_eq!(busy(&pool), window);
    pool.client.read(pool.now, pool.space, PageNo(60), Class::Demand, 60).unwrap();
    crowd.comes(&mut pool);
    pool.step();
    assert_eq!(expect_read(&mut pool), [60]);
    pool.pass(LONG);
    assert_eq!(expect_read(&mut pool), (0..window).collect::<Vec<_>>());
}

/// A dead server's copies are made anew when the others have time for it: by them, or through the client.
#[test]
fn copies_are_made_when_servers_are_busy_no_more() {
    for through_client in [false, true] {
        let mut pool = filled(3, 2);
        let mut crowd = Crowd::new(&mut pool);
        pool.client.pool.sessions.peers.iter_mut().filter(|_| through_client).for_each(Peer::distrust);
        let held = (0..8).filter(|slab| pool.holders(SlabNo(*slab)).contains(&2)).count();
        falls_silent(&mut pool, 2);
        crowd.stays(&mut pool, WHILE);
        assert!(busy(&pool) > 20, "{} were busy", busy(&pool));
        assert_eq!((pool.client.stats().pages_copied, pool.client.stats().copies_joined), (0, 0));
        pool.pass(LONG);
        assert_eq!((pool.client.stats().copies_left, pool.client.stats().copies_joined), (held as u64, held as u64));
        let copied = if through_client { SLAB * held as u64 } else { 0 };
        assert_eq!((pool.client.stats().pages_copied, pool.client.stats().transfers_refused), (copied, 0));
        assert_whole(&mut pool);
    }
}

/// What a dead server has of a group is put together from the others when they have time.
#[test]
fn what_is_gone_of_a_group_is_made_when_servers_are_busy_no_more() {
    let mut pool = cold(6);
    let mut crowd = Crowd::new(&mut pool);
    let node = pool.holders(SlabNo(1))[0];
    let copied = pool.client.stats().pages_copied;
    falls_silent(&mut pool, node);
    crowd.stays(&mut pool, WHILE);
    assert!(busy(&pool) > 20, "{} were busy", busy(&pool));
    assert_eq!((pool.client.stats().pages_copied, pool.holders(SlabNo(1))), (copied, vec![node]));
    pool.pass(LONG);
    let stats = pool.client.stats();
    assert_eq!((stats.groups_dissolved, stats.slabs_lost, stats.bad_pages), (0, 0, 0));
    assert_eq!(pool.client.parity(pool.space).whole, 2);
    assert!(pool.holders(SlabNo(1)) != [node] && stats.pages_copied > copied);
    assert_right(&mut pool, &[]);
}

/// As large datagrams as before get through to a server that had no time; to one that does not answer, they may not.
#[test]
fn a_busy_server_is_no_narrow_path() {
    let mut pool = filled(1, 1);
    let mut crowd = Crowd::new(&mut pool);
    let cut = pool.client.pool.sessions.peers[PeerIndex(0)].view().datagram;
    prefetch(&mut pool, 5..6);
    crowd.stays(&mut pool, 2 * WHILE);
    assert!(busy(&pool) > 8, "{} were busy", busy(&pool));
    assert_eq!(pool.client.pool.sessions.peers[PeerIndex(0)].view().datagram, cut);
    pool.pass(LONG);
    assert_eq!(expect_read(&mut pool), [5]);
    prefetch(&mut pool, 5..6);
    pool.slow = Some(0);
    pool.pass(Duration::from_millis(29));
    assert!(
        pool.client.pool.sessions.peers[PeerIndex(0)].is_up()
            && pool.client.pool.sessions.peers[PeerIndex(0)].view().datagram < cut
    );
    pool.deliver_late();
    assert_eq!(expect_read(&mut pool), [5]);
}

/// What the protocol does not let a server say: it puts off what somebody waits for.
fn puts_writes_off(pool: &mut Pool, node: usize) {
    pool.servers[node].inject(Some(ServerFault::PutsWritesOff));
}

/// Longer than a server is waited for that does not answer for a page, and is heard.
const PATIENCE: Duration = Duration::from_secs(8);

/// One server answers everything but writes. They end all the same, where the other one has them.
#[test]
fn a_server_that_puts_writes_off_is_not_waited_for_without_end() {
    let mut pool = filled(2, 2);
    puts_writes_off(&mut pool, 0);
    // As many as can be begun, in all of the slabs; reads go on meanwhile.
    for write in 0..192 {
        pool.begin_write(write % 64, 99);
    }
    pool.pass(PATIENCE / 2);
    assert_eq!(pool.client.poll_event(&mut [0; PAGE_SIZE]), None, "it may have been slow only");
    let mut written = 0;
    for _ in 0..20 {
        pool.pass(PATIENCE / 40);
        prefetch(&mut pool, 0..8);
        while pool.step() {}
        while let Some(event) = pool.client.poll_event(&mut [0; PAGE_SIZE]) {
            assert!(matches!(event, Event::Written { result: Ok(()), .. } | Event::Read { result: Ok(()), .. }));
            written += usize::from(matches!(event, Event::Written { .. }));
        }
    }
    assert_eq!(written, 192);
    assert!(pool.client.pool.sessions.peers[PeerIndex(0)].is_up(), "it is heard");
    assert_eq!((pool.client.in_sync(pool.space), pool.client.stats().slabs_lost), ((0, 8), 0));
    // Nor does it get new copies, which would keep writes waiting again.
    for _ in 0..10 {
        pool.begin_write(3, 98);
        pool.pass(Duration::from_millis(10));
        pool.expect_written(1);
    }
    pool.servers[0].inject(None);
    pool.pass(Duration::from_secs(65));
    pool.run();
    assert_eq!(pool.client.in_sync(pool.space), (8, 8), "later it does");
    (0..64).for_each(|page| assert_eq!(pool.read(page), Ok(if page == 3 { 98 } else { 99 })));
}

/// Where it has the only copy in sync, it is waited for: nothing is given up.
#[test]
fn the_only_copy_is_not_given_up_for_being_busy() {
    for copies in [1, 2] {
        let mut pool = filled(2, copies);
        (0..2).for_each(|node| puts_writes_off(&mut pool, node));
        pool.begin_write(0, 99);
        pool.pass(4 * PATIENCE);
        if copies == 1 {
            assert_eq!(pool.client.poll_event(&mut [0; PAGE_SIZE]), None);
            assert_eq!(pool.client.in_sync(pool.space), (8, 8));
        }
        assert_eq!((pool.client.in_sync(pool.space).1, pool.client.stats().slabs_lost), (8, 0));
        (0..2).for_each(|node| pool.servers[node].inject(None));
        pool.pass(Duration::from_secs(1));
        pool.expect_written(1);
        assert_eq!((pool.read(0), pool.read(1)), (Ok(99), Ok(1)));
    }
}
