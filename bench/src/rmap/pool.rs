//! A server on a thread of its own and a client on this one, at two ends of a link, each page checked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rmap::client::{Client, ClientConfig, Event, Reach, ServerInfo, SpaceRef, SpaceSpec};
use rmap::control::{ControlReply, ControlRequest};
use rmap::crypto::entropy::SharedEntropy;
use rmap::crypto::{KEY_SIZE, Keypair, PoolKey};
use rmap::server::{Server, ServerConfig};
use rmap::units::{BootEpoch, Class, Generation, PAGE_SIZE, Page, PageNo, ServerId, SlabSize, SpaceId, Time};
use rmap_io::SystemEntropy;
use rmap_io::net::{UdpClient, Wait, serve};
use testkit::link::Ethernet;

use super::ports::{client_port, server_port};
use super::{DATAGRAM, p50_us};

/// 16 MiB of pages: more than the caches hold.
const PAGES: u64 = 4096;
const SLAB_PAGES: u32 = 1024;
/// A result that takes longer is a hang.
const PATIENCE: Duration = Duration::from_secs(10);
/// Distance of the pages read one after another: no two near each other.
const STRIDE: u64 = 1543;

type Registry = fn(&ControlRequest) -> ControlReply;

pub struct Pool {
    client: UdpClient<Registry>,
    space: SpaceRef,
    next: u64,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

fn content(page: u64) -> Page {
    let mut bytes = [0; PAGE_SIZE];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&(page + 1).to_le_bytes()));
    bytes
}

impl Pool {
    /// # Errors
    /// A socket cannot be made, or the pages cannot be stored.
    pub fn start(link: &Ethernet, spin: bool) -> Result<Pool> {
        let entropy = SharedEntropy::new(Box::new(SystemEntropy::default()));
        let (own, keys) = (Keypair::generate(&entropy), Keypair::generate(&entropy));
        let pool = PoolKey::new([1; KEY_SIZE]);
        let slab_size = SlabSize::new(SLAB_PAGES).context("slab size")?;
        let key = keys.public();
        let config = ServerConfig {
            id: ServerId(1),
            keys,
            pool: pool.clone(),
            admitted: vec![own.public()],
            slabs: PAGES as usize / SLAB_PAGES as usize,
            slab_size,
            quota: u32::MAX,
            epoch: BootEpoch(1),
            medium: None,
        };
        let wait = if spin { Wait::SPIN } else { Wait::BLOCK };
        let mut server = Server::new(config, Box::new(SystemEntropy::default()))?;
        let mut port = server_port(link)?;
        let addr = port.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&mut server, &mut port, wait, &stopped));
        let mut config = ClientConfig::new(own, pool);
        config.slab_size = slab_size;
        config.datagram_max = DATAGRAM;
        let mut client = Client::new(config, Box::new(SystemEntropy::default()));
        client.add_server(Time(0), ServerInfo { id: ServerId(1), addr, key, zone: 0, announcer: None })?;
        let spec = SpaceSpec { id: SpaceId(1), pages: PAGES, copies: 1, reserve: 0, key: [2; KEY_SIZE] };
        let space = client.attach(&spec, Generation(1), &[])?;
        let registry: Registry = |_| ControlReply::Done;
        let client = UdpClient::new(client, client_port(link)?, wait, Instant::now(), registry);
        let mut pool = Pool { client, space, next: 0, stop, thread: Some(thread) };
        pool.fill()?;
        Ok(pool)
    }

    fn fill(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.client.client.reach().any(|(_, reach)| reach != Reach::Up) {
            if Instant::now() > deadline {
                bail!("no session with the server");
            }
            self.client.turn()?;
            let now = self.client.now();
            self.client.client.on_timeout(now);
        }
        for page in 0..PAGES {
            let now = self.client.now();
            self.client.client.write(now, self.space, PageNo(page), Class::Eviction, &content(page), page)?;
            match self.client.next(PATIENCE)? {
                (Event::Written { result, .. }, _) => result?,
                (event, _) => bail!("{event:?} for a write"),
            }
        }
        Ok(())
    }

    fn ask(&mut self, pages: u64) -> Result<()> {
        for _ in 0..pages {
            self.next = (self.next + STRIDE) % PAGES;
            let now = self.client.now();
            self.client.client.read(now, self.space, PageNo(self.next), Class::Demand, self.next)?;
        }
        self.client.flush();
        Ok(())
    }

    fn answer(&mut self) -> Result<()> {
        let (event, page) = self.client.next(PATIENCE)?;
        let Event::Read { token, result } = event else { bail!("{event:?} for a read") };
        result?;
        let word = |at: usize| page[at..at + 8] == (token + 1).to_le_bytes();
        if !word(0) || !word(PAGE_SIZE - 8) {
            bail!("page {token} is wrong");
        }
        Ok(())
    }

    /// # Errors
    /// A page is wrong or does not come.
    pub fn latency_us(&mut self, count: usize) -> Result<f64> {
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let start = Instant::now();
            self.ask(1)?;
            self.answer()?;
            times.push(start.elapsed());
        }
        Ok(p50_us(times))
    }

    /// # Errors
    /// A page is wrong or does not come.
    pub fn pages_per_second(&mut self, window: u64, span: Duration) -> Result<f64> {
        self.ask(window)?;
        let start = Instant::now();
        let mut pages = 0;
        while start.elapsed() < span {
            // For all that came, as many are asked for at once.
            let mut came = 0;
            while came == 0 || self.client.client.has_event() {
                self.answer()?;
                came += 1;
            }
            self.ask(came)?;
            pages += came;
        }
        Ok(pages as f64 / start.elapsed().as_secs_f64())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
