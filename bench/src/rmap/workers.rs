//! Workers of a server side by side, each on a thread, without the network: what they take from each other by the slabs
//! that they have in common.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rmap::crypto::entropy::SharedEntropy;
use rmap::crypto::handshake::Initiator;
use rmap::crypto::session::Session;
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, Class, Generation, PageNo, SEALED_SIZE, ServerId, SlabSize, SpaceId, Time, Version};
use rmap::wire::datagram::{Head, Versions};
use rmap::wire::message::{Direction, EPOCH_SIZE, Message, Op, Status};
use rmap::wire::{DATAGRAM_MAX, PROTOCOL_VERSION};
use rmap_io::SystemEntropy;

use super::{DATAGRAM, WINDOW};

/// 64 MiB of pages: more than the caches hold.
const PAGES: u64 = 16 * 1024;
const SLAB_PAGES: u32 = 1024;
/// Distance of the pages read one after another.
const STRIDE: u64 = 6151;
/// Requests that are made beforehand: a quarter of a second's work.
const REQUESTS: usize = 200_000;

/// A worker, and a client's session with it.
struct Worker {
    server: Server,
    session: Session,
}

/// What `workers` workers answer together, pages a second. Each has a core of its own, if there are as many.
///
/// # Errors
/// A request was not answered with a page.
pub fn pages_per_second(workers: usize) -> Result<f64> {
    let mut workers = start(workers)?;
    fill(&mut workers[0])?;
    let requests: Vec<Vec<u8>> = workers.iter_mut().zip(0..).map(|(worker, first)| worker.requests(first)).collect();
    let together = Barrier::new(workers.len());
    let times: Vec<Duration> = std::thread::scope(|scope| {
        let begin = |(worker, requests)| {
            let together = &together;
            scope.spawn(move || {
                together.wait();
                worker_time(worker, requests)
            })
        };
        let threads: Vec<_> = workers.iter_mut().zip(requests).map(begin).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a worker panicked"))).collect::<Result<_>>()
    })?;
    let read = workers[0].server.stats().pages_read;
    ensure!(read == (workers.len() * REQUESTS) as u64, "{read} pages were read");
    let slowest = times.into_iter().max().context("a worker")?;
    Ok(read as f64 / slowest.as_secs_f64())
}

fn worker_time(worker: &mut Worker, mut requests: Vec<u8>) -> Duration {
    let mut out = Vec::with_capacity(2 * DATAGRAM_MAX);
    let size = requests.len() / REQUESTS;
    let start = Instant::now();
    for batch in requests.chunks_mut(size * WINDOW) {
        batch.chunks_mut(size).for_each(|request| worker.server.on_datagram(Time(1), addr(), request));
        while worker.server.poll_transmit(&mut out).is_some() {
            out.clear();
        }
    }
    start.elapsed()
}

fn addr() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 9))
}

fn start(workers: usize) -> Result<Vec<Worker>> {
    let entropy = SharedEntropy::new(Box::new(SystemEntropy::default()));
    let (own, keys) = (Keypair::generate(&entropy), Keypair::generate(&entropy));
    let pool = PoolKey::new([1; KEY_SIZE]);
    let key = keys.public();
    let config = ServerConfig {
        id: ServerId(1),
        keys,
        pool: pool.clone(),
        admitted: vec![own.public()],
        slabs: PAGES as usize / SLAB_PAGES as usize,
        slab_size: SlabSize::new(SLAB_PAGES).context("slab size")?,
        quota: u32::MAX,
        epoch: BootEpoch(1),
        medium: None,
    };
    let servers = Server::with_workers(config, Box::new(SystemEntropy::default()), workers)?;
    let greet = |mut server: Server| {
        let versions = Versions { min: PROTOCOL_VERSION, max: PROTOCOL_VERSION };
        let mut hello = Initiator::new(&own, &key, &pool, Head::Hello { versions, sender: 9 }, &entropy);
        server.on_datagram(Time(0), addr(), &mut hello.hello.clone());
        let mut out = Vec::new();
        server.poll_transmit(&mut out).context("no answer to a hello")?;
        let Ok(Head::Accept { sender, .. }) = Head::decode(&out) else { return Err(anyhow!("not accepted")) };
        let (secrets, _) = hello.finish(&out)?;
        Ok(Worker { server, session: Session::client(&secrets, sender) })
    };
    servers.into_iter().map(greet).collect()
}

/// Of a slab's first life.
const NO_EPOCH: [u8; EPOCH_SIZE] = [0; EPOCH_SIZE];

fn fill(worker: &mut Worker) -> Result<()> {
    let content = [7; SEALED_SIZE];
    // A server lends to owners that it knows.
    worker.ask(Op::Fence, 0, &[])?;
    for slab in 0..PAGES / u64::from(SLAB_PAGES) {
        worker.ask(Op::Grant, slab * u64::from(SLAB_PAGES), &NO_EPOCH)?;
    }
    (0..PAGES).try_for_each(|page| worker.ask(Op::Write, page, &content))
}

impl Worker {
    fn request(op: Op, page: u64, payload: usize) -> Message {
        let version = if op == Op::Read { Version::NEVER } else { Version::new(Generation(1), 1 + page, false) };
        let direction = Direction::Request { cut: DATAGRAM as u16, generation: Generation(1) };
        let (class, space, page) = (Class::Demand, SpaceId(1), PageNo(page));
        Message { op, class, direction, id: page.0 + 1, space, page, version, payload: payload as u16 }
    }

    fn ask(&mut self, op: Op, page: u64, payload: &[u8]) -> Result<()> {
        let mut datagram = Vec::new();
        self.session.seal(&Worker::request(op, page, payload.len()), payload, DATAGRAM_MAX, &mut datagram);
        self.server.on_datagram(Time(0), addr(), &mut datagram);
        let mut out = Vec::new();
        self.server.poll_transmit(&mut out).context("no reply")?;
        let Ok(Head::Data { epoch, counter, .. }) = Head::decode(&out) else { return Err(anyhow!("no reply")) };
        let (reply, ..) = Message::decode(self.session.open(epoch, counter, &mut out)?)?;
        let Direction::Reply { status: Status::Ok, .. } = reply.direction else { return Err(anyhow!("{reply:?}")) };
        Ok(())
    }

    /// Reads of pages all over the memory, one behind the other.
    fn requests(&mut self, first: u64) -> Vec<u8> {
        let mut all = Vec::new();
        for number in 0..REQUESTS as u64 {
            let page = (first * 977 + number * STRIDE) % PAGES;
            self.session.seal(&Worker::request(Op::Read, page, 0), &[], DATAGRAM_MAX, &mut all);
        }
        all
    }
}
