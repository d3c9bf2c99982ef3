//! Where datagrams go out and come in: a UDP socket, TCP, or both.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::datagrams::Datagrams;
use super::steer;
use super::streams::Streams;
use rmap::transmit::Transmit;

/// Datagrams of one `sendmsg`: the kernel's UDP_MAX_SEGMENTS before Linux 6.9.
const BATCH_DATAGRAMS_MAX: usize = 64;
/// Bytes of one `sendmsg`: what fits into an IP packet, with room for its headers.
pub(super) const BATCH_BYTES_MAX: usize = 64_000;
/// Numbers of ports that are tried before it is an error that TCP has none of them free.
const NUMBERS_MAX: usize = 64;

/// How to wait for a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// Look again and again for so long before sleeping: a wake-up costs what ten looks cost (measured: 5 to 10 us).
    pub spin: Duration,
}

impl Wait {
    /// Sleeps at once, without looking again before: this costs the least CPU time.
    pub const BLOCK: Wait = Wait { spin: Duration::ZERO };
    /// As long as a round trip on a fast network takes.
    pub const SPIN: Wait = Wait { spin: Duration::from_micros(50) };
}

/// Sends and receives datagrams.
#[derive(Debug)]
pub struct Port {
    datagrams: Option<Datagrams>,
    streams: Option<Streams>,
}

impl AsFd for Port {
    /// Readable whenever [`Port::receive`] has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match (&self.streams, &self.datagrams) {
            (Some(streams), _) => streams.as_fd(),
            (None, Some(datagrams)) => datagrams.as_fd(),
            (None, None) => unreachable!("a port has one of them"),
        }
    }
}

impl Port {
    /// A port for one caller, by UDP alone.
    ///
    /// # Errors
    /// The address cannot be bound, or the socket not be set up.
    pub fn bind(addr: SocketAddr) -> io::Result<Port> {
        Ok(Port { datagrams: Some(Datagrams::bind(addr)?), streams: None })
    }

    /// A server's, one for each of its workers, by UDP alone.
    ///
    /// # Errors
    /// The address cannot be bound, or the sockets not be set up.
    pub fn bind_workers(addr: SocketAddr, workers: usize) -> io::Result<Vec<Port>> {
        let port = |socket| Ok(Port { datagrams: Some(Datagrams::new(socket)?), streams: None });
        steer::bind(addr, workers)?.into_iter().map(port).collect()
    }

    /// A client's, by TCP alone.
    ///
    /// # Errors
    /// The system has no room to wait.
    pub fn dial() -> io::Result<Port> {
        Ok(Port { datagrams: None, streams: Some(Streams::dial()?) })
    }

    /// A server's, for clients by UDP and by TCP, who come to the same number; those by TCP are the first worker's.
    /// Where the system is to choose the number, it is one that both have free.
    ///
    /// # Errors
    /// The address cannot be bound by one of them, or the sockets not be set up.
    pub fn listen_workers(addr: SocketAddr, workers: usize) -> io::Result<Vec<Port>> {
        for _ in 1..NUMBERS_MAX {
            match Port::listen_once(addr, workers) {
                // UDP chose it, and does not know what TCP has.
                Err(error) if addr.port() == 0 && error.kind() == io::ErrorKind::AddrInUse => {}
                result => return result,
            }
        }
        Port::listen_once(addr, workers)
    }

    fn listen_once(addr: SocketAddr, workers: usize) -> io::Result<Vec<Port>> {
        let mut ports = Port::bind_workers(addr, workers)?;
        let Port { datagrams: Some(datagrams), streams } = &mut ports[0] else { unreachable!("it was just bound") };
        let by_tcp = Streams::listen(datagrams.local_addr()?)
            .map_err(|error| io::Error::new(error.kind(), format!("by TCP: {error}")))?;
        by_tcp.watch_too(datagrams)?;
        *streams = Some(by_tcp);
        Ok(ports)
    }

    /// # Errors
    /// The socket is broken, or there is none: a client's by TCP has one for each server.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.datagrams.as_ref().ok_or(io::ErrorKind::NotConnected)?.local_addr()
    }

    /// How many datagrams the kernel takes in one call (GSO), and hands over in one buffer (GRO); `None` without UDP.
    pub fn batches(&self) -> Option<(usize, usize)> {
        self.datagrams.as_ref().map(Datagrams::batches)
    }

    /// Hands over the datagrams that are there now, as far as each socket's turn goes. `false` if there was none.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn receive(&mut self, mut on_datagram: impl FnMut(SocketAddr, &mut [u8])) -> io::Result<bool> {
        let mut any = false;
        if let Some(datagrams) = &mut self.datagrams {
            any |= datagrams.receive(&mut on_datagram)?;
        }
        if let Some(streams) = &mut self.streams {
            any |= streams.receive(&mut on_datagram)?;
        }
        Ok(any)
    }

    /// Sends what [`Transmit`] describes. What the system cannot send now is lost, like anything else on the way.
    pub fn send(&mut self, transmit: Transmit, contents: &[u8]) {
        let by_stream =
            self.streams.as_mut().is_some_and(|streams| streams.send(transmit.to, contents.chunks(transmit.segment)));
        if let Some(datagrams) = self.datagrams.as_mut().filter(|_| !by_stream) {
            datagrams.send(transmit, contents);
        }
    }

    /// Sends everything that `poll` appends to `out`, which is empty before and after. Datagrams of one size to one peer that
    /// follow one another, as the reads of a deep queue or their replies, go to the kernel in one call.
    pub fn send_all(&mut self, out: &mut Vec<u8>, mut poll: impl FnMut(&mut Vec<u8>) -> Option<Transmit>) {
        let mut batch: Option<Transmit> = None;
        loop {
            let start = out.len();
            let next = poll(out);
            let joins = |batch: Transmit, next: Transmit| {
                let same = (batch.to, batch.segment) == (next.to, next.segment);
                let whole = start.is_multiple_of(batch.segment.max(1));
                same && whole && out.len() <= BATCH_BYTES_MAX && out.len() <= BATCH_DATAGRAMS_MAX * batch.segment
            };
            match (batch, next) {
                (Some(before), Some(next)) if joins(before, next) => {}
                (before, next) => {
                    if let Some(before) = before {
                        self.send(before, &out[..start]);
                        out.drain(..start);
                    }
                    batch = next;
                }
            }
            if next.is_none() {
                return;
            }
        }
    }

    /// Waits until there may be a datagram, or until `until`.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn wait(&self, until: Option<Instant>) -> io::Result<()> {
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: left.subsec_nanos().into() }
        });
        match poll(&mut [PollFd::new(self, PollFlags::IN)], timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
