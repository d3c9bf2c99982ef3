//! A bad network in front of a server: datagrams are lost, changed and overtaken, by a seed. Many kernels of virtual
//! machines have no netem.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_guest::rng::Rng;
use rmap::server::Transmit;
use rmap_io::net::Port;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Ethernet's 1500 bytes without the IP and UDP headers: what is larger is lost in any weather.
const DATAGRAM_MAX: usize = 1472;
/// How often it is looked whether to stop.
const STOP_LOOK: Duration = Duration::from_millis(20);
/// How long a datagram is held back that others overtake.
const HELD_MAX_US: u64 = 1000;

/// What happens to datagrams, in each direction, while it is bad.
#[derive(Debug, Clone, Copy)]
pub struct Weather {
    pub lost_percent: u32,
    /// One bit of them is another.
    pub corrupt_percent: u32,
    pub held_percent: u32,
}

/// A thread that carries datagrams between a server and its one client.
#[derive(Debug)]
pub struct Relay {
    /// Where the client finds the server.
    pub addr: SocketAddr,
    bad: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

/// A datagram on its way.
#[derive(Debug)]
struct Held {
    until: Instant,
    to_server: bool,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct Carrier {
    front: Port,
    back: Port,
    server: SocketAddr,
    /// Where the last datagram for the server came from.
    client: Option<SocketAddr>,
    weather: Weather,
    bad: Arc<AtomicBool>,
    rng: Rng,
    held: Vec<Held>,
}

impl Relay {
    /// # Errors
    /// A socket cannot be made.
    pub fn start(server: SocketAddr, weather: Weather, seed: u64) -> Result<Relay> {
        let bind = |addr: Ipv4Addr| Port::bind(SocketAddr::from((addr, 0))).context("make a socket");
        // Servers need not be on the loopback.
        let (front, back) = (bind(Ipv4Addr::LOCALHOST)?, bind(Ipv4Addr::UNSPECIFIED)?);
        let addr = front.local_addr()?;
        let (bad, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (rng, held, stopped) = (Rng::new(seed), Vec::new(), Arc::clone(&stop));
        let mut carrier = Carrier { front, back, server, client: None, weather, bad: Arc::clone(&bad), rng, held };
        let thread = std::thread::spawn(move || carrier.run(&stopped));
        Ok(Relay { addr, bad, stop, thread: Some(thread) })
    }

    /// Whether the weather is bad from now on. At first it is not.
    pub fn set_bad(&self, bad: bool) {
        self.bad.store(bad, Ordering::Relaxed);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("bench: the relay: {error}");
        }
    }
}

impl Carrier {
    fn run(&mut self, stop: &AtomicBool) -> io::Result<()> {
        while !stop.load(Ordering::Relaxed) {
            let Carrier { front, back, server, client, weather, bad, rng, held } = self;
            let bad = bad.load(Ordering::Relaxed);
            let mut pass = |port: &mut Port, to: Option<SocketAddr>, to_server: bool, bytes: &mut [u8]| {
                let Some(to) = to else { return };
                let fate = if bad { weather.meet(rng, bytes) } else { Fate::of_size(bytes) };
                match fate {
                    Fate::Lost => {}
                    Fate::Arrives => port.send(Transmit { to, segment: bytes.len() }, bytes),
                    Fate::Held(time) => {
                        held.push(Held { until: Instant::now() + time, to_server, bytes: bytes.to_vec() });
                    }
                }
            };
            front.receive(|from, bytes| {
                *client = Some(from);
                pass(back, Some(*server), true, bytes);
            })?;
            back.receive(|_, bytes| pass(front, *client, false, bytes))?;
            self.release();
            self.wait()?;
        }
        Ok(())
    }

    fn release(&mut self) {
        let now = Instant::now();
        for due in self.held.extract_if(.., |held| held.until <= now) {
            let (port, to) =
                if due.to_server { (&mut self.back, Some(self.server)) } else { (&mut self.front, self.client) };
            if let Some(to) = to {
                port.send(Transmit { to, segment: due.bytes.len() }, &due.bytes);
            }
        }
    }

    fn wait(&self) -> io::Result<()> {
        let next = self.held.iter().map(|held| held.until.saturating_duration_since(Instant::now())).min();
        let left = next.unwrap_or(STOP_LOOK);
        let timeout = Timespec { tv_sec: 0, tv_nsec: left.min(STOP_LOOK).subsec_nanos().into() };
        let ports = [&self.front, &self.back];
        match poll(&mut ports.map(|port| PollFd::new(port, PollFlags::IN)), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Lost,
    Arrives,
    Held(Duration),
}

impl Fate {
    fn of_size(bytes: &[u8]) -> Fate {
        if bytes.len() > DATAGRAM_MAX { Fate::Lost } else { Fate::Arrives }
    }
}

impl Weather {
    fn meet(&self, rng: &mut Rng, bytes: &mut [u8]) -> Fate {
        if rng.percent(self.lost_percent) {
            return Fate::Lost;
        }
        if rng.percent(self.corrupt_percent) && !bytes.is_empty() {
            let bit = rng.below(bytes.len() as u64 * 8);
            bytes[bit as usize / 8] ^= 1 << (bit % 8);
        }
        if rng.percent(self.held_percent) {
            return Fate::Held(Duration::from_micros(rng.below(HELD_MAX_US)));
        }
        Fate::of_size(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weather_is_as_it_is_set() {
        let weather = Weather { lost_percent: 20, corrupt_percent: 1, held_percent: 5 };
        let mut rng = Rng::new(7);
        let (mut lost, mut held, mut changed) = (0, 0, 0);
        for _ in 0..10_000 {
            let mut bytes = [0; 100];
            let fate = weather.meet(&mut rng, &mut bytes);
            lost += u32::from(fate == Fate::Lost);
            held += u32::from(matches!(fate, Fate::Held(_)));
            changed += u32::from(bytes.iter().map(|byte| byte.count_ones()).sum::<u32>() == 1);
        }
        assert!((1900..2100).contains(&lost) && (300..500).contains(&held) && (50..120).contains(&changed));
        assert_eq!(Fate::of_size(&[0; DATAGRAM_MAX + 1]), Fate::Lost);
    }
}
