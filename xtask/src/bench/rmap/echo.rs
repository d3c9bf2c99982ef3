//! The peer: asks with 80 bytes, is answered with the bytes of a page in as many datagrams as the protocol uses. Nothing is
//! encrypted, looked up or repeated.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rmap::server::Transmit;
use rmap::udp::{Port, Wait};
use rmap::wire::{OVERHEAD, PAYLOAD_MAX};

use super::{DATAGRAM, p50_us};

const FRAGMENTS: usize = PAYLOAD_MAX.div_ceil(DATAGRAM - OVERHEAD);
const REPLY: usize = PAYLOAD_MAX + FRAGMENTS * OVERHEAD;
/// An echo that takes so long was lost: the loopback drops only when a buffer is full.
const LOST: Duration = Duration::from_secs(2);

struct Echo {
    client: Port,
    server: SocketAddr,
    spin: bool,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
    received: usize,
}

pub(super) fn loopback() -> Result<Port> {
    Ok(Port::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?)
}

impl Echo {
    fn start(spin: bool) -> Result<Echo> {
        let mut port = loopback()?;
        let server = port.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || serve(&mut port, spin, &stopped));
        Ok(Echo { client: loopback()?, server, spin, stop, thread: Some(thread), received: 0 })
    }

    fn ask(&mut self) {
        self.client.send(Transmit { to: self.server, segment: OVERHEAD }, &[0; OVERHEAD]);
    }

    /// Waits for the bytes of one reply.
    fn answer(&mut self) -> Result<()> {
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
                    bail!("an echo was lost on the loopback");
                }
                if self.spin && began.elapsed() >= wait.spin {
                    self.client.wait(Some(Instant::now() + LOST))?;
                }
            }
        }
        self.received -= REPLY;
        Ok(())
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

fn serve(port: &mut Port, spin: bool, stop: &AtomicBool) -> Result<()> {
    const STOP_LOOK: Duration = Duration::from_millis(100);
    let wait = if spin { Wait::SPIN } else { Wait::BLOCK };
    let page = vec![1; REPLY];
    let mut active_at = Instant::now();
    let mut asked = Vec::with_capacity(1024);
    while !stop.load(Ordering::Relaxed) {
        if port.receive(|from, _| asked.push(from))? {
            active_at = Instant::now();
            asked.drain(..).for_each(|to| port.send(Transmit { to, segment: DATAGRAM }, &page));
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
pub fn latency_us(spin: bool, count: usize) -> Result<f64> {
    let mut echo = Echo::start(spin)?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        echo.ask();
        echo.answer()?;
        times.push(start.elapsed());
    }
    Ok(p50_us(times))
}

/// # Errors
/// A socket fails, or an echo is lost.
pub fn pages_per_second(window: usize, span: Duration) -> Result<f64> {
    let mut echo = Echo::start(true)?;
    (0..window).for_each(|_| echo.ask());
    let start = Instant::now();
    let mut pages = 0;
    while start.elapsed() < span {
        echo.answer()?;
        echo.ask();
        pages += 1;
    }
    Ok(f64::from(pages) / start.elapsed().as_secs_f64())
}
