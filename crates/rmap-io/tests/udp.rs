//! Real sockets on the loopback: what the simulation cannot know about the kernel.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rmap::client::{Client, ClientConfig, Event, Failure, ServerInfo, SpaceRef, SpaceSpec};
use rmap::control::{ControlReply, ControlRequest, MapEntry};
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, Class, Generation, PAGE_SIZE, Page, PageNo, ServerId, SlabNo, SlabSize, SpaceId, Time};
use rmap_io::SystemEntropy;
use rmap_io::net::{Drained, Port, STREAMS_MAX, UdpClient, Wait, drain, serve};

/// Longer than any test takes; a result that does not come is an error, not a hang.
const PATIENCE: Duration = Duration::from_secs(20);
/// A guard against a hang.
const HANG: Duration = Duration::from_secs(300);
/// Long for a slab of this size, on a slow machine too.
const STUCK_AFTER: Duration = Duration::from_secs(3);
const SLAB_PAGES: u32 = 64;

type Map = BTreeMap<SlabNo, MapEntry>;

/// A server on a thread of its own, until it is dropped.
struct Running {
    addr: SocketAddr,
    key: Keypair,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<(Server, Port)>>,
}

/// A server and its socket.
fn server(id: u32, client: &Keypair, pool: &PoolKey) -> (Server, Port) {
    let config = ServerConfig {
        id: ServerId(id),
        keys: server_keys(id),
        pool: pool.clone(),
        admitted: vec![client.public()],
        slabs: 8,
        slab_size: SlabSize::new(SLAB_PAGES).unwrap(),
        quota: u32::MAX,
        epoch: BootEpoch(1),
        medium: None,
    };
    let server = Server::new(config, Box::new(SystemEntropy::default())).unwrap();
    let port = Port::listen_workers(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), 1).unwrap().remove(0);
    (server, port)
}

fn server_keys(id: u32) -> Keypair {
    Keypair::from_private([id as u8 + 1; KEY_SIZE])
}

impl Running {
    fn start(id: u32, client: &Keypair, pool: &PoolKey) -> Running {
        let key = server_keys(id);
        let (mut server, mut port) = server(id, client, pool);
        let addr = port.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            serve(&mut server, &mut port, Wait::BLOCK, &stopped).unwrap();
            (server, port)
        });
        Running { addr, key, stop, thread: Some(thread) }
    }

    /// Drains the server as its program does after SIGTERM: clients move their pages away before it ends.
    fn drain(&mut self) -> Drained {
        self.stop.store(true, Ordering::Relaxed);
        let (mut server, mut port) = self.thread.take().expect("it runs").join().unwrap();
        drain(&mut server, &mut port, Wait::BLOCK, STUCK_AFTER, &AtomicBool::new(false)).unwrap()
    }

    fn kill(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

fn registry() -> impl FnMut(&ControlRequest) -> ControlReply {
    let mut map = Map::new();
    move |request| {
        let ControlRequest::Change(change) = request else { return ControlReply::Gone };
        map.insert(change.slab, change.entry.clone());
        ControlReply::Done
    }
}

fn connect(
    servers: &[Running],
    keys: &Keypair,
    pool: &PoolKey,
) -> (UdpClient<impl FnMut(&ControlRequest) -> ControlReply + use<>>, SpaceRef) {
    let addrs: Vec<SocketAddr> = servers.iter().map(|server| server.addr).collect();
    connect_to(servers, &addrs, keys, pool, Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap())
}

fn connect_to(
    servers: &[Running],
    addrs: &[SocketAddr],
    keys: &Keypair,
    pool: &PoolKey,
    port: Port,
) -> (UdpClient<impl FnMut(&ControlRequest) -> ControlReply + use<>>, SpaceRef) {
    let mut config = ClientConfig::new(keys.clone(), pool.clone());
    config.slab_size = SlabSize::new(SLAB_PAGES).unwrap();
    // The machine that runs the tests may be busy: what is tested is that nothing gets lost, not how fast that is noticed.
    config.fail_after = Duration::from_millis(500);
    let mut client = Client::new(config, Box::new(SystemEntropy::default()));
    for (id, server) in servers.iter().enumerate() {
        let id = ServerId(id as u32);
        let info = ServerInfo { id, addr: addrs[id.0 as usize], key: server.key.public(), zone: id.0, announcer: None };
        client.add_server(Time(0), info).unwrap();
    }
    let spec = SpaceSpec { id: SpaceId(1), pages: 256, copies: servers.len().min(2), reserve: 0, key: [5; KEY_SIZE] };
    let space = client.attach(&spec, Generation(1), &[]).unwrap();
    let mut client = UdpClient::new(client, port, Wait::BLOCK, Instant::now(), registry());
    let deadline = Instant::now() + PATIENCE;
    while client.client.reach().any(|(_, reach)| reach != rmap::client::Reach::Up) {
        assert!(Instant::now() < deadline, "no session");
        client.turn().unwrap();
        let now = client.now();
        client.client.on_timeout(now);
        client.flush();
    }
    (client, space)
}

fn content(page: u64) -> Page {
    let mut bytes = [0; PAGE_SIZE];
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 * 7 + page * 13 + 1) as u8);
    bytes
}

/// Writes pages 0 to `count`, several at a time.
fn fill<C: FnMut(&ControlRequest) -> ControlReply>(client: &mut UdpClient<C>, space: SpaceRef, count: u64) {
    const AT_A_TIME: u64 = 32;
    for first in (0..count).step_by(AT_A_TIME as usize) {
        for page in first..(first + AT_A_TIME).min(count) {
            let now = client.now();
            client.client.write(now, space, PageNo(page), Class::Eviction, &content(page), page).unwrap();
        }
        for _ in first..(first + AT_A_TIME).min(count) {
            let (event, _) = client.next(PATIENCE).unwrap();
            assert!(matches!(event, Event::Written { result: Ok(()), .. }), "{event:?}");
        }
    }
}

fn check<C: FnMut(&ControlRequest) -> ControlReply>(client: &mut UdpClient<C>, space: SpaceRef, page: u64) {
    let now = client.now();
    client.client.read(now, space, PageNo(page), Class::Demand, page).unwrap();
    let (event, got) = client.next(PATIENCE).unwrap();
    assert_eq!(event, Event::Read { token: page, result: Ok(()) });
    assert!(*got == content(page), "page {page}");
}

#[test]
fn pages_come_back() {
    let (keys, pool) = (Keypair::from_private([99; KEY_SIZE]), PoolKey::new([3; KEY_SIZE]));
    let servers = [Running::start(0, &keys, &pool)];
    let (mut client, space) = connect(&servers, &keys, &pool);
    fill(&mut client, space, 200);
    (0..200).for_each(|page| check(&mut client, space, page));
    let now = client.now();
    client.client.read(now, space, PageNo(255), Class::Demand, 1).unwrap();
    let (event, got) = client.next(PATIENCE).unwrap();
    assert_eq!(event, Event::Read { token: 1, result: Ok(()) });
    assert!(got.iter().all(|byte| *byte == 0), "a page that was never written is zero");
}

#[test]
fn a_killed_server_loses_nothing_that_has_two_copies() {
    let (keys, pool) = (Keypair::from_private([98; KEY_SIZE]), PoolKey::new([4; KEY_SIZE]));
    let mut servers = [Running::start(0, &keys, &pool), Running::start(1, &keys, &pool)];
    let (mut client, space) = connect(&servers, &keys, &pool);
    fill(&mut client, space, 100);
    servers[0].kill();
    (0..100).for_each(|page| check(&mut client, space, page));
    fill(&mut client, space, 100);
    (0..100).for_each(|page| check(&mut client, space, page));
    assert_eq!(client.client.in_sync(space).0, 0, "one copy is left");
}

/// Where no UDP gets through. One of the servers dies, too.
#[test]
fn pages_come_back_by_tcp() {
    let (keys, pool) = (Keypair::from_private([94; KEY_SIZE]), PoolKey::new([7; KEY_SIZE]));
    let mut servers = [Running::start(0, &keys, &pool), Running::start(1, &keys, &pool)];
    let addrs = [servers[0].addr, servers[1].addr];
    let (mut client, space) = connect_to(&servers, &addrs, &keys, &pool, Port::dial().unwrap());
    fill(&mut client, space, 200);
    (0..200).for_each(|page| check(&mut client, space, page));
    servers[0].kill();
    (0..200).for_each(|page| check(&mut client, space, page));
    fill(&mut client, space, 200);
    (0..200).for_each(|page| check(&mut client, space, page));
}

/// Streams break in the middle of a datagram; others begin, and what was lost is asked for again.
#[test]
fn broken_streams_lose_nothing() {
    /// Bytes that a stream carries before it breaks, one way: some pages and a part of one.
    const BREAKS_AFTER: usize = 60_001;
    let (keys, pool) = (Keypair::from_private([93; KEY_SIZE]), PoolKey::new([8; KEY_SIZE]));
    let servers = [Running::start(0, &keys, &pool)];
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (addr, server) = (listener.local_addr().unwrap(), servers[0].addr);
    let broken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&broken);
    std::thread::spawn(move || {
        for from in listener.incoming() {
            let (from, to) = (from.unwrap(), TcpStream::connect(server).unwrap());
            for (from, mut to) in
                [(from.try_clone().unwrap(), to.try_clone().unwrap()), (to.try_clone().unwrap(), from)]
            {
                let count = Arc::clone(&count);
                std::thread::spawn(move || {
                    let carried = std::io::copy(&mut (&from).take(BREAKS_AFTER as u64), &mut to);
                    count.fetch_add(
                        usize::from(carried.is_ok_and(|bytes| bytes as usize == BREAKS_AFTER)),
                        Ordering::Relaxed,
                    );
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        }
    });
    let (mut client, space) = connect_to(&servers, &[addr], &keys, &pool, Port::dial().unwrap());
    for _ in 0..3 {
        fill(&mut client, space, 200);
        (0..200).for_each(|page| check(&mut client, space, page));
    }
    assert!(broken.load(Ordering::Relaxed) >= 20, "{} streams broke", broken.load(Ordering::Relaxed));
}

/// Whoever connects and shows no key takes nobody's slot.
#[test]
fn strangers_do_not_keep_clients_out() {
    let (keys, pool) = (Keypair::from_private([92; KEY_SIZE]), PoolKey::new([9; KEY_SIZE]));
    let servers = [Running::start(0, &keys, &pool)];
    let strangers: Vec<TcpStream> =
        (0..STREAMS_MAX + 10).map(|_| TcpStream::connect(servers[0].addr).unwrap()).collect();
    // What is no datagram ends its stream; what is one, and says nothing, is dropped.
    let (mut absurd, mut idle) = (&strangers[STREAMS_MAX], &strangers[STREAMS_MAX + 1]);
    absurd.write_all(&u16::MAX.to_le_bytes()).unwrap();
    idle.write_all(&[&100u16.to_le_bytes()[..], &[4; 100]].concat()).unwrap();
    let mut byte = [0];
    absurd.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(matches!(absurd.read(&mut byte), Ok(0) | Err(_)));
    idle.set_nonblocking(true).unwrap();
    assert_eq!(idle.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock, "it is still there");
    let (mut client, space) = connect_to(&servers, &[servers[0].addr], &keys, &pool, Port::dial().unwrap());
    fill(&mut client, space, 50);
    (0..50).for_each(|page| check(&mut client, space, page));
}

#[test]
fn a_node_that_is_not_admitted_gets_no_answer() {
    let (keys, pool) = (Keypair::from_private([97; KEY_SIZE]), PoolKey::new([5; KEY_SIZE]));
    let servers = [Running::start(0, &keys, &pool)];
    let stranger = Keypair::from_private([96; KEY_SIZE]);
    let mut config = ClientConfig::new(stranger, pool);
    config.slab_size = SlabSize::new(SLAB_PAGES).unwrap();
    let mut client = Client::new(config, Box::new(SystemEntropy::default()));
    let info =
        ServerInfo { id: ServerId(0), addr: servers[0].addr, key: servers[0].key.public(), zone: 0, announcer: None };
    client.add_server(Time(0), info).unwrap();
    let spec = SpaceSpec { id: SpaceId(1), pages: 8, copies: 1, reserve: 0, key: [5; KEY_SIZE] };
    let space = client.attach(&spec, Generation(1), &[]).unwrap();
    let port = Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let mut client = UdpClient::new(client, port, Wait::BLOCK, Instant::now(), registry());
    let now = client.now();
    client.client.write(now, space, PageNo(0), Class::Demand, &content(0), 1).unwrap();
    let (event, _) = client.next(PATIENCE).unwrap();
    assert_eq!(event, Event::Written { token: 1, result: Err(Failure::Declined) });
}

/// Its owners move what it has, while pages are read and written, and then it may end. What has nowhere to go is said, and
/// is not dropped.
#[test]
fn a_drained_server_ends_when_everything_has_moved() {
    let (keys, pool) = (Keypair::from_private([95; KEY_SIZE]), PoolKey::new([6; KEY_SIZE]));
    let mut servers = [0, 1, 2].map(|id| Running::start(id, &keys, &pool));
    let (mut client, space) = connect(&servers, &keys, &pool);
    fill(&mut client, space, 200);
    for (victim, moves) in [(0, true), (1, false)] {
        // Of two servers none can take what the other has; with both copies in sync, one is enough.
        let drained = std::thread::scope(|scope| {
            let draining = scope.spawn(|| servers[victim].drain());
            let began = Instant::now();
            while !draining.is_finished() {
                assert!(began.elapsed() < HANG, "it does not end");
                client.turn().unwrap();
                let now = client.now();
                client.client.on_timeout(now);
                client.flush();
                check(&mut client, space, began.elapsed().as_millis() as u64 % 200);
            }
            draining.join().unwrap()
        });
        assert_eq!(drained, Drained::Everything);
        assert_eq!(client.client.in_sync(space).0, if moves { 4 } else { 0 }, "slabs with two copies");
        (0..200).for_each(|page| check(&mut client, space, page));
    }
    // The last one has the only copies.
    let Drained::Left(left) = servers[2].drain() else { panic!("dropped") };
    assert_eq!((left.len(), left[0].space, left[0].slabs), (1, SpaceId(1), 4));
}
