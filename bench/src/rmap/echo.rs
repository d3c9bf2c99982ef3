//! The peer: asks with 80 bytes, is answered with the bytes of a page in as many datagrams as the protocol uses. Nothing is
//! encrypted, looked up or repeated.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rmap::server::Transmit;
use rmap::wire::{OVERHEAD, PAYLOAD_MAX};
use rmap_io::net::{Port, Wait};
use testkit::link::Ethernet;

use super::ports::{client_port, server_port};
use super::{DATAGRAM, p50_us};

const FRAGMENTS: usize = PAYLOAD_MAX.div_ceil(DATAGRAM - OVERHEAD);
/// The bytes of a reply: fragments are equally long.
pub const REPLY: usize = FRAGMENTS * (PAYLOAD_MAX.div_ceil(FRAGMENTS) + OVERHEAD);
/// Datagrams of one `sendmsg` (UDP_MAX_SEGMENTS before Linux 6.9), and pages: an IP packet has 64 KiB.
const BATCH: usize = 64;
const PAGES_A_CALL: usize = 64_000 / REPLY;
/// An echo that takes so long was lost: the link drops only when a buffer is full.
const LOST: Duration = Duration::from_secs(2);

/// A server at one end of a link, and a client of it at the other. Ends with this value.
pub struct Echo {
    client: Port,
    server: SocketAddr,
    spin: bool,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
    received: usize,
}

impl Echo {
    /// # Errors
    /// A socket cannot be made.
    pub fn start(link: &Ethernet, spin: bool, batch: bool) -> Result<Echo> {
        let mut port = server_port(link)?;
        let server = port.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&mut port, spin, batch, &stopped));
        Ok(Echo { client: client_port(link)?, server, spin, stop, thread: Some(thread), received: 0 })
    }

    /// Where others find the server.
    pub fn addr(&self) -> SocketAddr {
        self.server
    }

    fn ask(&mut self, pages: usize) {
        let requests = vec![0; pages * OVERHEAD];
        for some in requests.chunks(BATCH * OVERHEAD) {
            self.client.send(Transmit { to: self.server, segment: OVERHEAD }, some);
        }
    }

    /// Waits for the bytes of one reply; gives how many came.
    fn answer(&mut self) -> Result<usize> {
        let began = Instant::now();
        let wait = if self.spin { Wait::SPIN } else { Wait::BLOCK };
        while self.received < REPLY {
            if !self.spin {
                self.client.wait(Some(began + LOST))?;
            }
            let mut bytes = 0;
            let any = self.client.receive(|_, datagram| bytes += datagram.len())?;
            self.received += bytes;
            if !any {
                if began.elapsed() > LOST {
                    bail!("an echo was lost on the link");
                }
                if self.spin && began.elapsed() >= wait.spin {
                    self.client.wait(Some(Instant::now() + LOST))?;
                }
            }
        }
        let came = self.received / REPLY;
        self.received %= REPLY;
        Ok(came)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// With `batch`, pages that are asked for at once go to the kernel in as few calls as possible.
fn serve(port: &mut Port, spin: bool, batch: bool, stop: &AtomicBool) -> Result<()> {
    const STOP_LOOK: Duration = Duration::from_millis(100);
    let wait = if spin { Wait::SPIN } else { Wait::BLOCK };
    let pages = vec![1; PAGES_A_CALL * REPLY];
    let mut active_at = Instant::now();
    let mut asked = Vec::with_capacity(1024);
    while !stop.load(Ordering::Relaxed) {
        if port.receive(|from, _| asked.push(from))? {
            active_at = Instant::now();
            // There is one client.
            let at_once = if batch { PAGES_A_CALL } else { 1 };
            for some in asked.chunks(at_once) {
                port.send(Transmit { to: some[0], segment: REPLY / FRAGMENTS }, &pages[..some.len() * REPLY]);
            }
            asked.clear();
        }
        if active_at.elapsed() >= wait.spin {
            port.wait(Some(Instant::now() + STOP_LOOK))?;
            active_at = Instant::now();
        }
    }
    Ok(())
}

/// # Errors
/// A socket fails, or an echo is lost.
pub fn latency_us(link: &Ethernet, spin: bool, count: usize) -> Result<f64> {
    let mut echo = Echo::start(link, spin, false)?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        echo.ask(1);
        echo.answer()?;
        times.push(start.elapsed());
    }
    Ok(p50_us(times))
}

/// # Errors
/// A socket fails, or an echo is lost.
pub fn pages_per_second(link: &Ethernet, window: usize, batch: bool, span: Duration) -> Result<f64> {
    let mut echo = Echo::start(link, true, batch)?;
    echo.ask(window);
    let start = Instant::now();
    let mut pages = 0;
    while start.elapsed() < span {
        let came = echo.answer()?;
        echo.ask(came);
        pages += came;
    }
    Ok(pages as f64 / start.elapsed().as_secs_f64())
}
