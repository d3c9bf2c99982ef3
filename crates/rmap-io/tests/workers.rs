//! A server of several workers on real sockets: whether the kernel hands datagrams out as they are meant to be.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rmap::client::{Client, ClientConfig, Event, Reach, Refused, ServerInfo, SpaceSpec};
use rmap::control::{ControlReply, ControlRequest, MapEntry};
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig, ServerStats, WORKER_SHIFT, WORKERS_MAX, worker_of};
use rmap::units::{BootEpoch, Class, Generation, PAGE_SIZE, PageNo, ServerId, SlabNo, SlabSize, SpaceId, Time};
use rmap::wire::datagram::{HELLO_SIZE, Head, Versions};
use rmap_io::SystemEntropy;
use rmap_io::net::{Port, UdpClient, Wait, serve_workers};

const WORKERS: usize = 3;
/// So many that chance puts all of them on one worker once in fourteen million runs.
const CLIENTS: u64 = 16;
const SLAB_PAGES: u32 = 16;
const PAGES: u64 = 48;
/// A result that does not come is an error, not a hang.
const PATIENCE: Duration = Duration::from_secs(60);
const ANY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Which ports a datagram comes out of.
fn arrivals(ports: &mut [Port]) -> Vec<usize> {
    let mut workers = Vec::new();
    for (worker, port) in ports.iter_mut().enumerate() {
        port.receive(|_, _| workers.push(worker)).unwrap();
    }
    workers
}

fn head(head: Head, size: usize) -> Vec<u8> {
    let mut datagram = head.encode().to_vec();
    datagram.resize(size, 0);
    datagram
}

#[test]
fn sessions_find_their_worker_from_any_address() {
    for workers in [1, 2, 5, WORKERS_MAX] {
        let mut ports = Port::bind_workers(ANY, workers).unwrap();
        let addr = ports[0].local_addr().unwrap();
        for worker in 0..workers {
            let receiver = 0xdead_0000 | (worker as u32) << WORKER_SHIFT | 17;
            let data = head(Head::Data { version: 1, epoch: 2, receiver, counter: 3 }, 500);
            assert_eq!(worker_of(&data), Some(worker));
            for _ in 0..4 {
                let from = UdpSocket::bind(ANY).unwrap();
                from.send_to(&data, addr).unwrap();
                assert_eq!(arrivals(&mut ports), [worker], "of {workers}");
            }
        }
        // Of a worker that is not there, and none at all: some worker counts it.
        let none = head(Head::Data { version: 1, epoch: 2, receiver: u32::MAX, counter: 3 }, 500);
        for odd in [&none[..], &none[..1], &[]] {
            UdpSocket::bind(ANY).unwrap().send_to(odd, addr).unwrap();
            assert!(arrivals(&mut ports).len() <= 1, "of {workers}");
        }
    }
}

#[test]
fn hellos_of_an_address_find_one_worker() {
    let mut ports = Port::bind_workers(ANY, WORKERS).unwrap();
    let addr = ports[0].local_addr().unwrap();
    let mut used = BTreeSet::new();
    for sender in 0..32 {
        let hello = head(Head::Hello { versions: Versions { min: 1, max: 2 }, sender }, HELLO_SIZE);
        let from = UdpSocket::bind(ANY).unwrap();
        let workers: Vec<usize> = (0..3)
            .flat_map(|_| {
                from.send_to(&hello, addr).unwrap();
                arrivals(&mut ports)
            })
            .collect();
        assert!(workers.len() == 3 && workers.iter().all(|worker| *worker == workers[0]), "{workers:?}");
        used.insert(workers[0]);
    }
    assert!(used.len() > 1, "all on {used:?}");
}

/// Sockets that share an address must not make two servers share it.
#[test]
fn an_address_that_is_taken_is_an_error() {
    let ports = Port::bind_workers(ANY, 2).unwrap();
    let addr = ports[0].local_addr().unwrap();
    for workers in [1, 2] {
        assert_eq!(Port::bind_workers(addr, workers).unwrap_err().kind(), ErrorKind::AddrInUse);
    }
}

/// Numbers are given out for UDP without regard to TCP.
#[test]
fn a_number_is_found_that_both_have_free() {
    // Two of a hundred: that one try is enough 400 times happens once in five thousand runs.
    let taken: Vec<TcpListener> = (0..600).map(|_| TcpListener::bind(ANY).unwrap()).collect();
    for _ in 0..400 {
        let ports = Port::listen_workers(ANY, 1).unwrap();
        let addr = ports[0].local_addr().unwrap();
        assert_eq!(TcpListener::bind(addr).unwrap_err().kind(), ErrorKind::AddrInUse);
    }
    let addr = taken[0].local_addr().unwrap();
    let error = Port::listen_workers(addr, 1).unwrap_err();
    assert!(error.kind() == ErrorKind::AddrInUse && error.to_string().contains("by TCP"), "{error}");
}

struct Running {
    info: ServerInfo,
    drain: Arc<AtomicBool>,
    /// Says when it is drained.
    empty: Receiver<()>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(ServerStats, usize)>,
}

fn start(id: u32, client: &Keypair, pool: &PoolKey) -> Running {
    let keys = Keypair::from_private([id as u8 + 1; KEY_SIZE]);
    let key = keys.public();
    let config = ServerConfig {
        id: ServerId(id),
        keys,
        pool: pool.clone(),
        admitted: vec![client.public()],
        slabs: 2 * CLIENTS as usize * PAGES.div_ceil(u64::from(SLAB_PAGES)) as usize,
        slab_size: SlabSize::new(SLAB_PAGES).unwrap(),
        quota: u32::MAX,
        epoch: BootEpoch(1),
        medium: None,
    };
    let servers = Server::with_workers(config, Box::new(SystemEntropy::default()), WORKERS).unwrap();
    let mut workers: Vec<_> = servers.into_iter().zip(Port::bind_workers(ANY, WORKERS).unwrap()).collect();
    let addr = workers[0].1.local_addr().unwrap();
    let [drain, stop] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (drains, stops) = (Arc::clone(&drain), Arc::clone(&stop));
    let (empties, empty) = channel();
    let thread = std::thread::spawn(move || {
        serve_workers(&mut workers, Wait::BLOCK, |server, _| {
            if drains.load(Ordering::Relaxed) {
                server.begin_drain();
                // Said again and again: nobody may listen any more.
                let _ = server.is_drained().then(|| empties.send(()));
            }
            stops.load(Ordering::Relaxed)
        })
        .unwrap();
        (workers[0].0.stats(), workers[0].0.held_slabs())
    });
    Running { info: ServerInfo { id: ServerId(id), addr, key, zone: id, announcer: None }, drain, empty, stop, thread }
}

fn content(space: u64, page: u64, round: u64) -> [u8; PAGE_SIZE] {
    let mut bytes = [0; PAGE_SIZE];
    let word = (space << 32 | page << 8 | round) + 1;
    bytes.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&word.to_le_bytes()));
    bytes
}

/// Begins an operation, when there is a slot for it: writes keep theirs until a copy in the making has them, too.
fn begin<C: FnMut(&ControlRequest) -> ControlReply>(
    client: &mut UdpClient<C>,
    mut operation: impl FnMut(&mut Client, Time) -> Result<(), Refused>,
) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = client.now();
        match operation(&mut client.client, now) {
            Err(Refused::Busy) => assert!(Instant::now() < deadline, "no slot"),
            result => return result.unwrap(),
        }
        if !client.turn().unwrap() {
            std::thread::yield_now();
        }
        client.expire();
    }
}

/// Writes and reads its own space until `stop`, two rounds at least; says how many pages were right, all of them.
fn use_space(
    id: u64,
    servers: &[ServerInfo],
    keys: &Keypair,
    pool: &PoolKey,
    begun: &Sender<()>,
    stop: &AtomicBool,
) -> u64 {
    let mut config = ClientConfig::new(keys.clone(), pool.clone());
    config.slab_size = SlabSize::new(SLAB_PAGES).unwrap();
    // Machines that run tests are busy: a server that is late is not dead here.
    config.fail_after = Duration::from_secs(5);
    let mut client = Client::new(config, Box::new(SystemEntropy::default()));
    servers.iter().for_each(|server| client.add_server(Time(0), server.clone()).unwrap());
    let spec = SpaceSpec { id: SpaceId(id), pages: PAGES, copies: 2, reserve: 0, key: [id as u8; KEY_SIZE] };
    let space = client.attach(&spec, Generation(1), &[]).unwrap();
    let mut map: BTreeMap<SlabNo, MapEntry> = BTreeMap::new();
    let registry = move |request: &ControlRequest| {
        let ControlRequest::Change(change) = request else { return ControlReply::Gone };
        map.insert(change.slab, change.entry.clone());
        ControlReply::Done
    };
    let mut client = UdpClient::new(client, Port::bind(ANY).unwrap(), Wait::BLOCK, Instant::now(), registry);
    // Whoever writes before the servers are known is told that none has room.
    let deadline = Instant::now() + PATIENCE;
    while client.client.reach().any(|(_, reach)| reach != Reach::Up) {
        assert!(Instant::now() < deadline, "no session");
        client.turn().unwrap();
        let now = client.now();
        client.client.on_timeout(now);
        client.flush();
    }
    let mut round = 0;
    let mut right = 0;
    while round < 2 || !stop.load(Ordering::Relaxed) {
        for page in 0..PAGES {
            let content = content(id, page, round % 256);
            begin(&mut client, |client, now| client.write(now, space, PageNo(page), Class::Eviction, &content, page));
        }
        for _ in 0..PAGES {
            let (event, _) = client.next(PATIENCE).unwrap();
            assert!(matches!(event, Event::Written { result: Ok(()), .. }), "{event:?}");
        }
        for page in 0..PAGES {
            begin(&mut client, |client, now| client.read(now, space, PageNo(page), Class::Demand, page));
            let (event, got) = client.next(PATIENCE).unwrap();
            assert_eq!(event, Event::Read { token: page, result: Ok(()) });
            assert!(*got == content(id, page, round % 256), "space {id}, page {page}");
            right += 1;
        }
        round += 1;
        if round == 1 {
            begun.send(()).unwrap();
        }
    }
    right
}

/// Many clients write and read while one of three servers is drained: its slabs go to the others, from worker to
/// worker.
#[test]
fn clients_of_all_workers_keep_their_pages_while_a_server_is_drained() {
    let (keys, pool) = (Keypair::from_private([99; KEY_SIZE]), PoolKey::new([3; KEY_SIZE]));
    let servers: Vec<Running> = (0..3).map(|id| start(id, &keys, &pool)).collect();
    let infos: Vec<ServerInfo> = servers.iter().map(|server| server.info.clone()).collect();
    let stop = AtomicBool::new(false);
    let (begun, begins) = channel();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (1..=CLIENTS)
            .map(|id| {
                let (infos, keys, pool, begun, stop) = (&infos, &keys, &pool, begun.clone(), &stop);
                scope.spawn(move || use_space(id, infos, keys, pool, &begun, stop))
            })
            .collect();
        let all_begun = (0..CLIENTS).try_for_each(|_| begins.recv_timeout(PATIENCE));
        servers[0].drain.store(true, Ordering::Relaxed);
        let drained = all_begun.and_then(|()| servers[0].empty.recv_timeout(PATIENCE));
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            assert!(client.join().unwrap() >= 2 * PAGES);
        }
        drained.unwrap();
    });
    let ended = servers.into_iter().map(|server| {
        server.stop.store(true, Ordering::Relaxed);
        server.thread.join().unwrap()
    });
    for (id, (stats, held)) in ended.enumerate() {
        assert_eq!((stats.not_authentic, stats.throttled), (0, 0), "server {id}: {stats:?}");
        assert!(stats.pages_read > 0 && stats.pages_written > 0, "server {id}: {stats:?}");
        assert_eq!(held == 0, id == 0, "server {id} holds {held}");
    }
}
