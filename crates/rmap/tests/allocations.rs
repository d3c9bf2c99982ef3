//! A client that serves a disk needs no memory once it runs: whoever swaps to that disk has none to give. Slabs never written to,
//! repair and reservations are no exception; the handshake with a server that comes back is the only one.
//!
//! The servers are real ones, on a network that loses nothing; only what the client allocates is looked at.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use aws_lc_rs::rand::{SecureRandom, SystemRandom};
use pagoda_sys::allocations::{Counting, Found, take_found, watching};
use rmap::client::{Client, ClientConfig, Event, SPARES_MAX, ServerInfo, SpaceRef, SpaceSpec, SpareTable};
use rmap::control::ControlReply;
use rmap::crypto::{Entropy, KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig, Transmit};
use rmap::units::{BootEpoch, Class, Generation, PAGE_SIZE, Page, PageNo, ServerId, SlabSize, SpaceId, Time};
use rmap::wire::message::Pressure;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SLAB_PAGES: u32 = 64;
const SLABS: u64 = 96;
const SERVERS: usize = 4;
/// More than are ever needed before somebody has none left.
const SERVER_SLABS: usize = 200;
const RESERVED: usize = 20;

/// What is found is found in the program, so one test at a time looks.
static LOOKING: Mutex<()> = Mutex::new(());

struct Pool {
    client: Client,
    servers: Vec<Server>,
    space: SpaceRef,
    now: Time,
    /// The server, by its index, that no datagram reaches.
    deaf: Option<usize>,
    /// What servers allocate counts, too.
    looks_at_servers: bool,
    /// Nobody makes the tables that the client wants to have ready.
    no_spares: bool,
    /// What is under way, as all of these are, has its room before anything is watched.
    out: Vec<u8>,
    page: Box<Page>,
    results: Vec<Event>,
}

/// As that of `rmap-io`, which clients run with.
#[derive(Debug, Default)]
struct SystemEntropy(SystemRandom);

impl Entropy for SystemEntropy {
    fn fill(&mut self, bytes: &mut [u8]) {
        self.0.fill(bytes).unwrap();
    }
}

fn addr(node: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 100 + node as u16))
}

fn slab_size() -> SlabSize {
    SlabSize::new(SLAB_PAGES).unwrap()
}

fn server(node: usize, client: &Keypair, pool: &PoolKey, epoch: u64) -> Server {
    let config = ServerConfig {
        id: ServerId(node as u32),
        keys: Keypair::from_private([node as u8 + 1; KEY_SIZE]),
        pool: pool.clone(),
        admitted: vec![client.public()],
        slabs: SERVER_SLABS,
        slab_size: slab_size(),
        quota: u32::MAX,
        epoch: BootEpoch(epoch),
        medium: None,
    };
    Server::new(config, Box::new(SystemEntropy::default())).unwrap()
}

fn keys() -> (Keypair, PoolKey) {
    (Keypair::from_private([50; KEY_SIZE]), PoolKey::new([1; KEY_SIZE]))
}

fn content(page: u64) -> Page {
    let mut bytes = [0; PAGE_SIZE];
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 * 7 + page * 13 + 1) as u8);
    bytes
}

impl Pool {
    fn new() -> Pool {
        let (own, pool) = keys();
        let mut config = ClientConfig::new(own.clone(), pool.clone());
        config.slab_size = slab_size();
        let mut client = Client::new(config, Box::new(SystemEntropy::default()));
        let servers: Vec<Server> = (0..SERVERS).map(|node| server(node, &own, &pool, 1)).collect();
        for node in 0..SERVERS {
            let key = Keypair::from_private([node as u8 + 1; KEY_SIZE]).public();
            let info =
                ServerInfo { id: ServerId(node as u32), addr: addr(node), key, zone: node as u32 % 3, announcer: None };
            client.add_server(Time(0), info).unwrap();
        }
        let pages = SLABS * u64::from(SLAB_PAGES);
        let spec = SpaceSpec { id: SpaceId(1), pages, copies: 2, reserve: RESERVED, key: [2; KEY_SIZE] };
        let space = client.attach(&spec, Generation(1), &[]).unwrap();
        Pool {
            client,
            servers,
            space,
            now: Time(1),
            deaf: None,
            looks_at_servers: false,
            no_spares: false,
            out: Vec::with_capacity(1 << 20),
            page: Box::new([0; PAGE_SIZE]),
            results: Vec::with_capacity(1024),
        }
    }

    /// What everybody has to say now. `false` if that is nothing.
    fn step(&mut self) -> bool {
        let mut any = false;
        // Somebody else makes them.
        let wanted = if self.no_spares { 0 } else { self.client.wanted_spares() };
        for _ in 0..wanted {
            self.client.add_spare(SpareTable::new(slab_size()));
        }
        while let Some(transmit) = watching(|| self.client.poll_transmit(self.now, &mut self.out)) {
            any = true;
            self.deliver(addr(99), transmit);
        }
        for node in 0..self.servers.len() {
            while let Some(transmit) = self.of_server(|pool| pool.servers[node].poll_transmit(&mut pool.out)) {
                any = true;
                self.deliver(addr(node), transmit);
            }
        }
        while let Some((id, _)) = watching(|| self.client.poll_control(self.now)) {
            any = true;
            watching(|| self.client.on_control(self.now, id, ControlReply::Done));
        }
        while let Some(event) = watching(|| self.client.poll_event(&mut self.page)) {
            self.results.push(event);
            if let Event::Read { token, result: Ok(()) } = event {
                assert!(*self.page == content(token) || *self.page == [0; PAGE_SIZE], "page {token}");
            }
        }
        any
    }

    fn of_server<T>(&mut self, act: impl FnOnce(&mut Pool) -> T) -> T {
        if self.looks_at_servers { watching(|| act(self)) } else { act(self) }
    }

    fn deliver(&mut self, from: SocketAddr, transmit: Transmit) {
        let to = usize::from(transmit.to.port()) - 100;
        for datagram in self.out.chunks_mut(transmit.segment) {
            match self.servers.get_mut(to) {
                Some(_) if self.deaf == Some(to) => {}
                Some(server) if self.looks_at_servers => watching(|| server.on_datagram(self.now, from, datagram)),
                Some(server) => server.on_datagram(self.now, from, datagram),
                None => watching(|| self.client.on_datagram(self.now, from, datagram)),
            }
        }
        self.out.clear();
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = self.now + Duration::from_micros(500);
            watching(|| self.client.poll_timeout(self.now));
            watching(|| self.client.on_timeout(self.now));
            self.of_server(|pool| pool.servers.iter_mut().for_each(|server| server.on_timeout(pool.now)));
            while self.step() {}
        }
    }

    /// Until there is a result of all that was begun.
    fn finish(&mut self, begun: usize) {
        for _ in 0..10_000 {
            if self.results.len() == begun {
                let failed = |event: &&Event| {
                    matches!(event, Event::Read { result: Err(_), .. } | Event::Written { result: Err(_), .. })
                };
                assert_eq!(self.results.iter().find(failed), None);
                self.results.clear();
                return;
            }
            self.pass(Duration::from_millis(1));
        }
        panic!("{} of {begun} results", self.results.len());
    }

    /// The same for some pages of each of these slabs, all at once.
    fn each(&mut self, slabs: std::ops::Range<u64>, pages: u64, begin: impl Fn(&mut Client, Time, SpaceRef, PageNo)) {
        // No more at a time than a client takes of writes.
        const AT_A_TIME: usize = 128;
        let mut begun = 0;
        for slab in slabs {
            for page in 0..pages {
                let page = PageNo(slab * u64::from(SLAB_PAGES) + page);
                watching(|| begin(&mut self.client, self.now, self.space, page));
                begun += 1;
                if begun == AT_A_TIME {
                    self.finish(std::mem::take(&mut begun));
                }
            }
        }
        self.finish(begun);
    }

    fn write(&mut self, slabs: std::ops::Range<u64>, pages: u64) {
        self.each(slabs, pages, |client, now, space, page| {
            client.write(now, space, page, Class::Demand, &content(page.0), page.0).unwrap();
        });
    }

    fn read(&mut self, slabs: std::ops::Range<u64>, pages: u64) {
        self.each(slabs, pages, |client, now, space, page| {
            client.read(now, space, page, Class::Demand, page.0).unwrap();
        });
    }

    fn trim(&mut self, slabs: std::ops::Range<u64>, pages: u64) {
        self.each(slabs, pages, |client, now, space, page| {
            client.trim(now, space, page, Class::Demand, page.0).unwrap();
        });
    }

    /// How many slabs have all copies, and how many have some.
    fn in_sync(&self) -> (usize, usize) {
        self.client.in_sync(self.space)
    }

    fn repair(&mut self) {
        for _ in 0..2000 {
            if self.in_sync().0 == self.in_sync().1 {
                return;
            }
            self.pass(Duration::from_millis(5));
        }
        panic!("{:?}", self.in_sync());
    }
}

/// Nothing but what a handshake needs, and that is little.
fn check(what: &str) {
    const HANDSHAKE_BYTES_MAX: usize = 1024;
    let (handshakes, others): (Vec<Found>, Vec<Found>) =
        take_found().into_iter().partition(|found| found.backtrace.contains("crypto/handshake.rs"));
    for Found { bytes, backtrace } in others.iter().take(5) {
        eprintln!("{bytes} bytes:\n{backtrace}");
    }
    assert!(others.is_empty(), "{what}: {} allocations", others.len());
    let bytes: usize = handshakes.iter().map(|found| found.bytes).sum();
    assert!(bytes <= HANDSHAKE_BYTES_MAX, "{what}: {bytes} bytes in handshakes");
}

#[test]
fn a_client_at_work_allocates_nothing() {
    let _looking = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut pool = Pool::new();
    pool.pass(Duration::from_secs(3));
    pool.write(0..2, 4);
    pool.read(0..2, 4);
    take_found();

    // As many at once as there are tables ready.
    pool.write(2..60, 2);
    check("writes to new slabs");
    pool.read(0..80, 4);
    check("reads");
    pool.trim(2..20, 2);
    pool.write(2..20, 8);
    check("trims, and writes over them");
    pool.pass(Duration::from_secs(12));
    assert!(pool.client.reserved(pool.space).is_settled);
    check("time, and a look at reservations");

    // Reads of what it had go elsewhere, and it is replaced; what was reserved there is reserved elsewhere.
    pool.deaf = Some(0);
    pool.read(0..60, 8);
    pool.write(60..70, 2);
    check("a server that dies");
    pool.repair();
    check("repair");
    pool.pass(Duration::from_secs(12));
    assert_eq!(pool.in_sync(), (70, 70));
    check("a server that is away");

    // It comes back empty, and is used again.
    let (own, key) = keys();
    pool.servers[0] = server(0, &own, &key, 2);
    pool.deaf = None;
    pool.pass(Duration::from_secs(2));
    pool.write(70..80, 2);
    check("a server that comes back");

    // What it has is to be moved away.
    pool.servers[1].set_pressure(Pressure::Orange);
    pool.pass(Duration::from_secs(2));
    pool.repair();
    pool.write(80..90, 2);
    pool.read(0..90, 2);
    check("a server that is short of memory");
    assert!(pool.client.stats().slabs_transferred > 0 && pool.client.stats().pages_copied > 0);
}

/// What the test above finds where there is something to be found: a table for each slab beyond those that are ready.
#[test]
fn tables_beyond_the_spares_need_memory() {
    let _looking = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut pool = Pool::new();
    pool.pass(Duration::from_secs(3));
    pool.no_spares = true;
    take_found();
    let slabs = SPARES_MAX as u64 + 3;
    pool.write(0..slabs, 2);
    let found = take_found();
    assert_eq!(found.iter().map(|found| found.bytes).collect::<Vec<_>>(), [8 * SLAB_PAGES as usize; 3]);
    pool.read(0..slabs, 4);
    check("reads");
}

/// With the pages that may be under way at a time, and a handshake at either end.
const SESSION_ALLOCATIONS: usize = 66;

/// Nor does a server, which may be what its host's memory is short for: pages, slabs that are granted and given back, and copies to
/// another server.
#[test]
fn a_server_at_work_allocates_nothing() {
    let _looking = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut pool = Pool::new();
    pool.pass(Duration::from_secs(3));
    pool.write(0..2, 4);
    take_found();

    pool.looks_at_servers = true;
    pool.write(2..30, u64::from(SLAB_PAGES));
    check("slabs that are granted");
    pool.read(0..30, 4);
    pool.trim(2..20, 2);
    pool.write(2..20, 8);
    check("reads, writes, trims");
    pool.servers[1].set_pressure(Pressure::Orange);
    pool.pass(Duration::from_secs(2));
    pool.repair();
    pool.pass(Duration::from_secs(12));
    // A slab that is copied takes a session between the two servers and room for what is under way, however many pages it has.
    let copied = pool.client.stats().slabs_transferred as usize;
    let found = take_found().len();
    assert!(copied > 0 && found <= copied * (SESSION_ALLOCATIONS + 10), "{found} allocations for {copied} slabs");
}
