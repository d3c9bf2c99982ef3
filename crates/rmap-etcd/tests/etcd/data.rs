//! Servers and clients on real sockets, for what etcd's failures do to pages.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rmap::client::{Client, ClientConfig, Event, Failure, Reach, ServerInfo, SpaceRef, SpaceSpec};
use rmap::control::{ControlReply, ControlRequest, Map};
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, Class, Generation, PAGE_SIZE, Page, PageNo, ServerId, SlabSize, SpaceId, Time};
use rmap_etcd::{Control, EtcdConfig, HealthView};
use rmap_io::SystemEntropy;
use rmap_io::net::{Port, UdpClient, UdpClientError, Wait, serve};

use crate::rig::HANG;

const SLAB_PAGES: u32 = 16;
pub const PAGES: u64 = 64;
/// A slow machine is not a dead server.
const FAIL_AFTER: Duration = Duration::from_millis(500);

pub fn slab_size() -> SlabSize {
    SlabSize::new(SLAB_PAGES).unwrap()
}

fn pool_key() -> PoolKey {
    PoolKey::new([3; KEY_SIZE])
}

fn client_keys() -> Keypair {
    Keypair::from_private([99; KEY_SIZE])
}

/// A server on a thread of its own, until it is dropped.
pub struct Running {
    pub info: ServerInfo,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub fn start(id: u32) -> Running {
        let keys = Keypair::from_private([id as u8 + 1; KEY_SIZE]);
        let key = keys.public();
        let config = ServerConfig {
            id: ServerId(id),
            keys,
            pool: pool_key(),
            admitted: vec![client_keys().public()],
            slabs: 16,
            slab_size: slab_size(),
            quota: u32::MAX,
            epoch: BootEpoch(1),
            medium: None,
        };
        let mut server = Server::new(config, Box::new(SystemEntropy::default())).unwrap();
        let mut port = Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let info = ServerInfo { id: ServerId(id), addr: port.local_addr().unwrap(), key, zone: id, announcer: None };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&mut server, &mut port, Wait::BLOCK, &stopped).unwrap());
        Running { info, stop, thread: Some(thread) }
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

type Driver = UdpClient<Box<dyn FnMut(&ControlRequest) -> ControlReply>>;

/// An owner of a space, with etcd behind it.
pub struct Owner {
    driver: Driver,
    space: SpaceRef,
    pub health: HealthView,
}

impl Owner {
    pub fn open(config: EtcdConfig, space: SpaceId, taken: (Generation, Map), servers: &[&Running]) -> Owner {
        let (generation, map) = taken;
        let mut settings = ClientConfig::new(client_keys(), pool_key());
        (settings.slab_size, settings.fail_after) = (slab_size(), FAIL_AFTER);
        let mut client = Client::new(settings, Box::new(SystemEntropy::default()));
        for server in servers {
            client.add_server(Time(0), server.info.clone()).unwrap();
        }
        let spec = SpaceSpec { id: space, pages: PAGES, copies: 2, reserve: 0, key: [5; KEY_SIZE] };
        let opened = client.attach(&spec, generation, &map).unwrap();
        let mut control = Control::start(config).unwrap();
        control.guard(space, generation);
        let health = control.health();
        let port = Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let ask = Box::new(move |request: &ControlRequest| control.ask(request));
        let driver = UdpClient::new(client, port, Wait::BLOCK, Instant::now(), ask as _);
        Owner { driver, space: opened, health }
    }

    /// Until it has a session with each server, so that both are there to be chosen.
    pub fn greeted(mut self) -> Owner {
        let began = Instant::now();
        while self.driver.client.reach().any(|(_, reach)| reach != Reach::Up) {
            assert!(began.elapsed() < HANG, "no session");
            self.turn();
        }
        self
    }

    /// Lets it do what it has to do.
    pub fn turn(&mut self) {
        self.driver.turn().unwrap();
        let now = self.driver.now();
        self.driver.client.on_timeout(now);
        self.driver.flush();
    }

    pub fn begin_write(&mut self, page: u64, value: u64) {
        let now = self.driver.now();
        self.driver.client.write(now, self.space, PageNo(page), Class::Demand, &content(page, value), page).unwrap();
    }

    /// The next result, if there is one in time.
    pub fn next(&mut self, patience: Duration) -> Option<Event> {
        match self.driver.next(patience) {
            Ok((event, _)) => Some(event),
            Err(UdpClientError::NoResult { .. }) => None,
            Err(error) => panic!("{error}"),
        }
    }

    pub fn write(&mut self, page: u64, value: u64) -> Result<(), Failure> {
        self.begin_write(page, value);
        match self.next(HANG) {
            Some(Event::Written { token, result }) if token == page => result,
            other => panic!("{other:?}"),
        }
    }

    /// Whether the page has this value.
    pub fn has(&mut self, page: u64, value: u64) -> Result<bool, Failure> {
        let now = self.driver.now();
        self.driver.client.read(now, self.space, PageNo(page), Class::Demand, page).unwrap();
        let (event, got) = self.driver.next(HANG).unwrap();
        match event {
            Event::Read { token, result } if token == page => result.map(|()| *got == content(page, value)),
            other => panic!("{other:?}"),
        }
    }

    /// Slabs with two copies in sync, and with any.
    pub fn in_sync(&self) -> (usize, usize) {
        self.driver.client.in_sync(self.space)
    }
}

fn content(page: u64, value: u64) -> Page {
    let mut bytes = [0; PAGE_SIZE];
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 * 7 + page * 13 + value * 29 + 1) as u8);
    bytes[..8].copy_from_slice(&page.to_le_bytes());
    bytes[8..16].copy_from_slice(&value.to_le_bytes());
    bytes
}
