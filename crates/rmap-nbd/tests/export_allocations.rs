//! The thread that serves a disk, as `pagoda disk export` runs it: socket, driver, client and NBD. What it allocates once it runs is
//! looked at while new parts of the disk are written, and a server dies.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pagoda_sys::allocations::{Counting, Found, set_watching, take_found, unwatched, watching};
use rmap::client::{Client, ClientConfig, Reach, ServerInfo, SpaceSpec};
use rmap::control::{ControlReply, ControlRequest};
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, Generation, PAGE_SIZE, ServerId, SlabSize, SpaceId, Time};
use rmap_io::SystemEntropy;
use rmap_io::aside;
use rmap_io::net::{Port, UdpClient, Wait, serve};
use rmap_nbd::{Ended, Export, Listener, Server as Exporter};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A guard against a hang: far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
const SLAB_PAGES: u32 = 64;
const SLAB_BYTES: u64 = SLAB_PAGES as u64 * PAGE_SIZE as u64;
const SLABS: u64 = 64;
const SERVERS: u32 = 4;
/// Enough for parity, also when one has died.
const MANY: u32 = 6;
/// What is not written to for so long is cold.
const COLD: Duration = Duration::from_millis(300);

/// Of swap, eight pages.
const REQUEST: usize = 8 * PAGE_SIZE;
/// At a time: what is answered while the reader is not looked after has to fit into what a connection keeps room for, or it makes
/// more.
const READS: usize = 8;
const READ: u16 = 0;
const WRITE: u16 = 1;
const TRIM: u16 = 4;

struct Running {
    addr: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

fn keys(id: u32) -> Keypair {
    Keypair::from_private([id as u8 + 1; KEY_SIZE])
}

fn slab_size() -> SlabSize {
    SlabSize::new(SLAB_PAGES).unwrap()
}

impl Running {
    fn start(id: u32, client: &Keypair, pool: &PoolKey) -> Running {
        let config = ServerConfig {
            id: ServerId(id),
            keys: keys(id),
            pool: pool.clone(),
            admitted: vec![client.public()],
            slabs: 100,
            slab_size: slab_size(),
            quota: u32::MAX,
            epoch: BootEpoch(1),
            medium: None,
        };
        let mut server = Server::new(config, Box::new(SystemEntropy::default())).unwrap();
        let mut port = Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let addr = port.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&mut server, &mut port, Wait::BLOCK, &stopped).unwrap());
        Running { addr, stop, thread: Some(thread) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// What the exporter says of itself about once a second: slabs with all copies and with some, servers that do not answer, and groups
/// with parity.
type Views = Receiver<((usize, usize), usize, usize)>;

/// On a thread of its own, as the file and the cluster's store are.
fn registry() -> impl FnMut(&ControlRequest) -> ControlReply {
    let (mut asker, (requests, replies)) = aside::pair();
    std::thread::spawn(move || {
        for request in requests {
            // Nobody listens at the end.
            let _ = replies.send((request, ControlReply::Done));
        }
    });
    move |request| asker.ask(request)
}

/// The exporter on a thread of its own, until `stop` is dropped.
fn export(
    servers: &[Running],
    own: &Keypair,
    pool: &PoolKey,
    path: &Path,
    parity_after: Option<Duration>,
) -> (JoinHandle<Ended>, UnixStream, Views) {
    let mut config = ClientConfig::new(own.clone(), pool.clone());
    config.slab_size = slab_size();
    // The machine that runs the tests may be busy.
    config.fail_after = Duration::from_millis(500);
    config.error_after = Some(Duration::from_secs(1));
    config.parity_after = parity_after;
    let mut client = Client::new(config, Box::new(SystemEntropy::default()));
    for (id, server) in (0..).zip(servers) {
        let info =
            ServerInfo { id: ServerId(id), addr: server.addr, key: keys(id).public(), zone: id, announcer: None };
        client.add_server(Time(0), info).unwrap();
    }
    let pages = SLABS * u64::from(SLAB_PAGES);
    let spec = SpaceSpec { id: SpaceId(1), pages, copies: 2, reserve: 8, key: [5; KEY_SIZE] };
    let space = client.attach(&spec, Generation(1), &[]).unwrap();
    let port = Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    let client = UdpClient::new(client, port, Wait::BLOCK, Instant::now(), registry());
    let about = Export { name: "disk".to_owned(), space, size: SLABS * SLAB_BYTES, read_only: false };
    let mut exporter = Exporter::new(client, about, Listener::unix(path).unwrap(), Wait::BLOCK).unwrap();
    let (stop, stopped) = UnixStream::pair().unwrap();
    let (report, views) = mpsc::channel();
    let maintain = move |client: &mut Client, _: Time| {
        unwatched(|| {
            let down = client.reach().filter(|(_, reach)| *reach != Reach::Up).count();
            // Nobody listens at the end.
            let _ = report.send((client.in_sync(space), down, client.groups_with_parity(space)));
        });
    };
    let run = move || watching(|| exporter.run(stopped.as_fd(), maintain).unwrap());
    (std::thread::spawn(run), stop, views)
}

/// A client of the disk, of the plainest kind.
struct Disk(UnixStream);

impl Disk {
    fn connect(path: &Path) -> Disk {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert!(greeting.starts_with(b"NBDMAGICIHAVEOPT"));
        // Fixed newstyle, no zeros; EXPORT_NAME with the name of the default export.
        stream.write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &1u32.to_be_bytes(), &[0; 4]].concat()).unwrap();
        let mut size_and_flags = [0; 10];
        stream.read_exact(&mut size_and_flags).unwrap();
        assert_eq!(size_and_flags[..8], (SLABS * SLAB_BYTES).to_be_bytes());
        Disk(stream)
    }

    fn send(&mut self, command: u16, offset: u64, content: &[u8]) {
        let mut request = [&0x2560_9513u32.to_be_bytes()[..], &[0; 2], &command.to_be_bytes()].concat();
        request.extend_from_slice(&offset.to_be_bytes());
        request.extend_from_slice(&offset.to_be_bytes());
        request.extend_from_slice(&(REQUEST as u32).to_be_bytes());
        request.extend_from_slice(content);
        self.0.write_all(&request).unwrap();
    }

    /// The offset that an answer is about.
    fn answer(&mut self) -> u64 {
        let mut answer = [0; 16];
        self.0.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], "an answer without an error");
        u64::from_be_bytes(std::array::from_fn(|at| answer[8 + at]))
    }

    /// One request to each of these slabs, all under way together, or as many as may be read.
    fn each(&mut self, command: u16, slabs: std::ops::Range<u64>, holes: bool) {
        let together = if command == READ { READS } else { usize::MAX };
        for first in slabs.clone().step_by(together) {
            self.together(command, first..slabs.end.min(first.saturating_add(together as u64)), holes);
        }
    }

    fn together(&mut self, command: u16, slabs: std::ops::Range<u64>, holes: bool) {
        let content: Vec<u8> = (0..REQUEST).map(|at| (at % 251) as u8).collect();
        let zeros = vec![0; REQUEST];
        for slab in slabs.clone() {
            self.send(command, slab * SLAB_BYTES, if command == WRITE { &content } else { &[] });
        }
        for _ in slabs {
            let offset = self.answer();
            if command == READ {
                let mut got = vec![0; REQUEST];
                self.0.read_exact(&mut got).unwrap();
                assert!(got == if holes { &zeros[..] } else { &content[..] }, "what was read at {offset}");
            }
        }
    }
}

/// Waits for the exporter to say so.
fn until(views: &Views, what: &str, is: impl Fn((usize, usize), usize, usize) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    let mut last = None;
    while Instant::now() < deadline {
        let view = views.recv_timeout(PATIENCE).unwrap();
        if is(view.0, view.1, view.2) {
            return;
        }
        last = Some(view);
    }
    panic!("{what}: {last:?}");
}

/// Nothing but what a handshake needs.
fn check(what: &str) {
    let others = take_found().into_iter().filter(|found| !found.backtrace.contains("crypto/handshake.rs"));
    let others: Vec<Found> = others.collect();
    for Found { bytes, backtrace } in others.iter().take(5) {
        eprintln!("{bytes} bytes:\n{backtrace}");
    }
    assert!(others.is_empty(), "{what}: {} allocations", others.len());
}

/// What the allocator finds is of all threads that are watched: one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn the_thread_that_serves_a_disk_allocates_nothing() {
    let _one = ONE_AT_A_TIME.lock();
    set_watching(false);
    let (own, pool) = (Keypair::from_private([99; KEY_SIZE]), PoolKey::new([3; KEY_SIZE]));
    let mut servers: Vec<Running> = (0..SERVERS).map(|id| Running::start(id, &own, &pool)).collect();
    let path = std::env::temp_dir().join(format!("rmap-allocations-{}.sock", std::process::id()));
    let (exporter, stop, views) = export(&servers, &own, &pool, &path, None);
    let mut disk = Disk::connect(&path);
    until(&views, "servers that answer", |_, down, _| down == 0);
    disk.each(WRITE, 0..2, false);
    disk.each(READ, 0..2, false);
    set_watching(true);

    disk.each(WRITE, 2..40, false);
    check("writes to new slabs");
    disk.each(READ, 0..40, false);
    disk.each(READ, 40..48, true);
    disk.each(TRIM, 0..8, false);
    disk.each(READ, 0..8, true);
    disk.each(WRITE, 0..8, false);
    // Of what was never written.
    disk.each(TRIM, 48..56, false);
    check("reads and trims");
    until(&views, "time", |_, _, _| true);
    until(&views, "time", |_, _, _| true);
    check("a look at reservations");

    drop(servers.remove(0));
    disk.each(READ, 0..40, false);
    disk.each(WRITE, 0..48, false);
    check("a server that dies");
    until(&views, "copies made again", |(whole, held), down, _| down == 1 && (whole, held) == (48, 48));
    disk.each(READ, 0..48, false);
    check("repair");

    set_watching(false);
    drop(stop);
    assert_eq!(exporter.join().unwrap(), Ended::Stopped);
}

/// Nor does parity: made, read, made anew and gone again.
#[test]
fn parity_of_a_disk_needs_no_memory() {
    let _one = ONE_AT_A_TIME.lock();
    set_watching(false);
    let (own, pool) = (Keypair::from_private([99; KEY_SIZE]), PoolKey::new([3; KEY_SIZE]));
    let mut servers: Vec<Running> = (0..MANY).map(|id| Running::start(id, &own, &pool)).collect();
    let path = std::env::temp_dir().join(format!("rmap-allocations-parity-{}.sock", std::process::id()));
    let (exporter, stop, views) = export(&servers, &own, &pool, &path, Some(COLD));
    let mut disk = Disk::connect(&path);
    until(&views, "servers that answer", |_, down, _| down == 0);
    disk.each(WRITE, 0..4, false);
    disk.each(READ, 0..4, false);
    set_watching(true);

    disk.each(WRITE, 4..16, false);
    until(&views, "parity", |_, _, groups| groups == 4);
    check("parity that is made");
    disk.each(READ, 0..16, false);
    disk.each(WRITE, 2..10, false);
    disk.each(READ, 0..16, false);
    check("parity that goes");
    until(&views, "parity again", |_, _, groups| groups == 4);
    check("parity that is made again");

    drop(servers.remove(0));
    disk.each(READ, 0..16, false);
    check("pages that are put together");
    until(&views, "what is gone made anew", |(whole, held), down, _| down == 1 && whole == held);
    disk.each(READ, 0..16, false);
    disk.each(WRITE, 0..16, false);
    disk.each(READ, 0..16, false);
    check("what is gone made anew");

    set_watching(false);
    drop(stop);
    assert_eq!(exporter.join().unwrap(), Ended::Stopped);
}
