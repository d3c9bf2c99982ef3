pub mod cluster;
mod moves;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pagoda_pool::aside::Control;
use pagoda_pool::connect;
use pagoda_pool::give_back::{GivenBack, give_leftovers_back};
use rmap::client::{Event, Failure};
use rmap::control::Today;
use rmap::crypto::Keypair;
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, Class, Generation, PAGE_SIZE, PageNo, ServerId, SlabSize, SpaceId};
use rmap_io::net::{Port, UdpClient, Wait, serve_until};

use super::open::{Before, MAP_PATIENCE, MISS_FOR, OpenedPool, missed};
use super::space::pool_of;
use super::*;
use crate::moves::Notes;

const PATIENCE: Duration = Duration::from_secs(20);
const SLABS: usize = 4;
/// Two slabs of the pool.
const REGIONS: [u64; 2] = [64 << 20, 64 << 20];

/// A pool's directory, and one for its pending releases; gone at the end.
struct Pool {
    dir: PathBuf,
    dirs: Dirs,
}

impl Pool {
    fn new(name: &str) -> Pool {
        let dir = std::env::temp_dir().join(format!("pagodad-far-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        store::make_dir(&dir).unwrap();
        let notes = Notes::below(&dir);
        Pool { dirs: Dirs { pool: dir.clone(), pending: dir.join("pending"), notes }, dir }
    }

    fn with_keys(name: &str) -> Pool {
        let pool = Pool::new(name);
        for key in ["node.key", "pool.key"] {
            store::create_secret(&pool.dir.join(key), &store::hex(&store::random_key())).unwrap();
        }
        pool
    }

    /// A remote tier for [`vm`].
    fn tier(&self, copies: u8) -> NewTier {
        new_tier(&self.dirs, "web1", &REGIONS, RemoteRequest { copies }).unwrap()
    }

    fn give_back(&self, record: &Record) -> Result<GivenBack> {
        pending_release::give_all_back(&self.dir, record, record.remote.as_ref().unwrap())
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.dir.join(file), text).unwrap();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A server of the pool on a thread, which ends with how many slabs it holds.
struct Lender {
    line: String,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<usize>,
}

impl Lender {
    fn start(pool: &Pool, id: u32) -> Lender {
        let (own, pool_key) = store::identity(&pool.dir).unwrap();
        let keys = Keypair::from_private(store::random_key());
        let mut port = Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let line = format!("{id} {} {:?} 0\n", port.local_addr().unwrap(), keys.public());
        let config = ServerConfig {
            id: ServerId(id),
            keys,
            pool: pool_key,
            admitted: vec![own.public()],
            slabs: SLABS,
            slab_size: SlabSize::default(),
            quota: u32::MAX,
            epoch: BootEpoch(1),
            medium: None,
        };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut server = Server::new(config, Box::new(SystemEntropy::default())).unwrap();
            serve_until(&mut server, &mut port, Wait::BLOCK, |_, _| stopped.load(Ordering::Relaxed)).unwrap();
            server.held_slabs()
        });
        Lender { line, stop, thread }
    }

    fn stop(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn vm(remote: Option<Remote>) -> Record {
    match remote {
        Some(remote) => debtor("web1", &REGIONS, &remote),
        None => Record::new("web1", Token([0; 16]), VmKind::Plain, &REGIONS, VmSpec::default()),
    }
}

/// Opens the VM's tier and waits for its servers: without any, a first write has no room.
/// Two servers, and the pool's list of them.
fn two_lenders(pool: &Pool) -> [Lender; 2] {
    let lenders = [1, 2].map(|id| Lender::start(pool, id));
    pool.write("servers", &lenders.iter().map(|lender| lender.line.as_str()).collect::<String>());
    lenders
}

fn open_in(dir: &Path, record: &Record, served: Served) -> Result<Option<OpenedPool>> {
    open_owner(dir, record, served, Before::Anybody)
}

fn opened(pool: &Pool, record: &Record) -> OpenedPool {
    let mut opened = open_in(&pool.dir, record, Served::No).unwrap().unwrap();
    assert!(connect::converse(&mut opened.client, PATIENCE, |client| connect::all_up(client)).unwrap());
    opened
}

fn write(opened: &mut OpenedPool, page: u64, byte: u8) -> Result<(), Failure> {
    let now = opened.client.now();
    opened.client.client.write(now, opened.space, PageNo(page), Class::Eviction, &[byte; PAGE_SIZE], 1).unwrap();
    match ended(opened) {
        (Event::Written { result, .. }, _) => result,
        other => panic!("{other:?}"),
    }
}

/// The byte that fills the page.
fn read(opened: &mut OpenedPool, page: u64) -> u8 {
    let now = opened.client.now();
    opened.client.client.read(now, opened.space, PageNo(page), Class::Demand, 2).unwrap();
    let page = finish(opened);
    assert!(page.iter().all(|byte| *byte == page[0]));
    page[0]
}

/// Waits for what was begun, which has to be good.
fn finish(opened: &mut OpenedPool) -> Box<[u8; PAGE_SIZE]> {
    match ended(opened) {
        (Event::Read { result: Ok(()), .. } | Event::Written { result: Ok(()), .. }, page) => page,
        (outcome, _) => panic!("{outcome:?}"),
    }
}

/// What came of what was begun.
fn ended(opened: &mut OpenedPool) -> (Event, Box<[u8; PAGE_SIZE]>) {
    let mut page = Box::new([0; PAGE_SIZE]);
    let mut outcome = None;
    connect::converse(&mut opened.client, PATIENCE, |client| {
        outcome = outcome.or_else(|| client.client.poll_event(&mut page));
        outcome.is_some()
    })
    .unwrap();
    (outcome.expect("it ends"), page)
}

#[test]
fn what_is_missing_is_said_before_anything_is_made() {
    let refused = |pool: &Pool, copies: u8, memory: u64, code: ErrorCode, parts: &[&str]| {
        let error = new_tier(&pool.dirs, "web1", &[memory], RemoteRequest { copies }).unwrap_err();
        let said = format!("{} {}", error.message, error.hint.unwrap_or_default());
        assert_eq!(error.code, code, "{said}");
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    };
    let pool = Pool::new("missing");
    refused(&pool, 1, 1 << 30, ErrorCode::Unsupported, &["node.key", "pagoda pool key init"]);
    let pool = Pool::with_keys("missing-servers");
    refused(&pool, 1, 1 << 30, ErrorCode::Unsupported, &["names no server", "pagoda pool serve", "--remote"]);
    let key = "5a".repeat(32);
    pool.write("servers", &format!("1 127.0.0.1:7070 {key} 0\n"));
    refused(&pool, 2, 1 << 30, ErrorCode::BadRequest, &["2 copies", "there are 1", "--remote pool:"]);
    refused(&pool, 1, SIZE_MAX + 4096, ErrorCode::BadRequest, &["16 TiB"]);
    pool.write("pool.toml", "cluster = \"etcd://127.0.0.1:1/lab\"\n");
    refused(&pool, 1, 1 << 30, ErrorCode::Unsupported, &["etcd at 127.0.0.1:1 does not answer", "--remote"]);
    pool.write("pool.toml", "");
    let [one, other] = [(); 2].map(|()| pool.tier(1).remote);
    assert!(one.copies == 1 && one.space != other.space && one.key != other.key);
    assert!(!pool.dir.join("registry").exists() && !pool.dirs.pending.exists(), "nothing is stored for it yet");
    assert!(open_in(&pool.dir, &vm(None), Served::No).unwrap().is_none());
}

#[test]
fn the_next_daemon_finds_the_pages_and_servers_get_their_memory_back() {
    let pool = Pool::with_keys("life");
    let lenders = two_lenders(&pool);
    let record = vm(Some(pool.tier(2).remote));

    let mut first = opened(&pool, &record);
    let now = first.client.now();
    first.client.client.write(now, first.space, PageNo(17), Class::Demand, &[0x5a; PAGE_SIZE], 1).unwrap();
    finish(&mut first);

    // Nobody has answered yet: what is asked waits.
    let mut next = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    let now = next.client.now();
    next.client.client.read(now, next.space, PageNo(17), Class::Demand, 2).unwrap();
    assert_eq!(*finish(&mut next), [0x5a; PAGE_SIZE]);

    assert!(matches!(pool.give_back(&record), Ok(GivenBack::All(_))));
    let space = SpaceId(record.remote.as_ref().unwrap().space);
    assert_eq!(store::registry(&pool.dir).unwrap().look(space).unwrap(), Today::default(), "it is forgotten");
    assert_eq!(lenders.map(Lender::stop), [0, 0]);
}

/// A VM ends while one of its servers is dead: the others get their memory back, and nothing is left for a next owner.
#[test]
fn a_dead_server_does_not_keep_the_others_memory() {
    let pool = Pool::with_keys("dead");
    let [dead, alive] = two_lenders(&pool);
    let record = vm(Some(pool.tier(2).remote));
    let mut first = opened(&pool, &record);
    for page in [0, 20_000] {
        let now = first.client.now();
        first.client.client.write(now, first.space, PageNo(page), Class::Demand, &[1; PAGE_SIZE], 1).unwrap();
        finish(&mut first);
    }
    assert_eq!(dead.stop(), 2);
    assert!(matches!(pool.give_back(&record), Ok(GivenBack::All(_))));
    assert_eq!(alive.stop(), 0);
}

#[test]
fn pages_that_only_an_unlisted_server_has_are_not_given_up() {
    let pool = Pool::with_keys("unlisted");
    let lender = Lender::start(&pool, 7);
    pool.write("servers", &lender.line);
    let record = vm(Some(pool.tier(1).remote));
    let mut first = opened(&pool, &record);
    let now = first.client.now();
    first.client.client.write(now, first.space, PageNo(0), Class::Demand, &[1; PAGE_SIZE], 1).unwrap();
    finish(&mut first);
    pool.write("servers", &lender.line.replacen('7', "8", 1));
    let said = format!("{:#}", open_in(&pool.dir, &record, Served::Before).unwrap_err());
    assert!(said.contains("remote tier of web1") && said.contains("not there: 7"), "{said}");
    assert_eq!(lender.stop(), 1, "it still has the slab");
}

/// Somebody else took the space over after it was looked at, and wrote to it: that is not given back.
#[test]
fn what_another_owner_took_meanwhile_stays() {
    let pool = Pool::with_keys("meanwhile");
    let lenders = two_lenders(&pool);
    let record = vm(Some(pool.tier(2).remote));
    let remote = record.remote.as_ref().unwrap();
    drop(opened(&pool, &record));
    let config = pool_of(&pool.dir, remote).unwrap();
    let mut plane = Plane::of(&config, "web1", None).unwrap();
    let seen = plane.look(SpaceId(remote.space)).unwrap();
    assert!(seen.today.generation > Generation(0) && seen.today.map.is_empty());

    let mut other = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    write(&mut other, 17, 0x5a).unwrap();
    let given = give_leftovers_back(&config, &mut plane, &spec(&record, remote), &seen.today);
    assert!(format!("{:#}", given.unwrap_err()).contains("another owner took it over"));

    let mut next = open_in(&pool.dir, &record, Served::Before).unwrap().unwrap();
    assert_eq!(read(&mut next, 17), 0x5a);
    // A server that is slow to answer, or to let an owner in, has its copy later.
    let both = |client: &mut UdpClient<Control>| client.client.in_sync(next.space) == (1, 1);
    assert!(connect::converse(&mut next.client, PATIENCE, both).unwrap());
    assert_eq!(lenders.map(Lender::stop), [1, 1]);
}

/// A machine that lends would pass its shortage on in a circle.
#[test]
fn a_machine_that_lends_has_no_remote_tiers() {
    let pool = Pool::with_keys("lends");
    let lender = Lender::start(&pool, 1);
    pool.write("servers", &lender.line);
    let lends = pagoda_pool::role::lend(&pool.dir).unwrap();
    let refused = new_tier(&pool.dirs, "web1", &REGIONS, RemoteRequest { copies: 1 }).unwrap_err();
    assert!(refused.message.contains("lends") && refused.message.contains("--also-borrow"), "{refused:?}");
    drop(lends);
    let tier = pool.tier(1);
    // Nor does it lend while it has some.
    let refused = pagoda_pool::role::lend(&pool.dir).unwrap_err();
    assert!(refused.to_string().contains("borrows"), "{refused:#}");
    tier.give_up(&pool.dirs);
    assert_eq!(lender.stop(), 0);
}
