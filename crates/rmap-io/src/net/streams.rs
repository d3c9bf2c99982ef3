//! The same datagrams over TCP, for networks that let no UDP through: each behind its length, two bytes, little-endian.
//!
//! To the protocol a stream is a path like any other: what it loses, by breaking or because its other end does not read, is
//! sent again. Nobody is believed for having connected: a stream that no datagram was ever sent to, because its client could
//! not show any key, goes when another one needs its slot.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use rmap::wire::{DATAGRAM_MAX, datagram};

/// Streams at a time: clients by TCP are fewer than those by UDP, and each has 64 KiB for what comes in.
pub const STREAMS_MAX: usize = 128;
/// Bytes before a datagram.
const LENGTH_SIZE: usize = 2;
const FRAME_MAX: usize = LENGTH_SIZE + DATAGRAM_MAX;
/// Bytes that are read at once.
const INPUT_SIZE: usize = 16 * FRAME_MAX;
/// Bytes that wait for a stream to take them; what comes then is lost. A full window of pages.
const OUTPUT_MAX: usize = 256 * FRAME_MAX;
/// Connections that wait to be accepted, and that are at one turn.
const BACKLOG: i32 = 64;
/// A server that could not be reached is tried again after so long.
const DIAL_AGAIN: Duration = Duration::from_millis(100);
/// Reads of one stream before the next one has its turn.
const READS_A_TURN: usize = 8;
const LISTENER: u64 = u64::MAX;
/// What else is to be waited for.
const OTHER: u64 = u64::MAX - 1;

#[derive(Debug)]
struct Stream {
    socket: TcpStream,
    /// What the protocol calls it.
    addr: SocketAddr,
    /// Its place in the order in which streams began: the oldest that was never answered goes for a new one.
    number: u64,
    /// A datagram was sent to it.
    is_answered: bool,
    input: Vec<u8>,
    filled: usize,
    output: Vec<u8>,
    watches_output: bool,
}

/// The streams of a port.
#[derive(Debug)]
pub struct Streams {
    epoll: OwnedFd,
    listener: Option<TcpListener>,
    all: Vec<Option<Stream>>,
    numbers: u64,
    /// Servers that could not be reached, and when they are tried again.
    failed: Vec<(SocketAddr, Instant)>,
}

impl Streams {
    /// The streams of a server, which listens for clients.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn listen(addr: SocketAddr) -> io::Result<Streams> {
        let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&addr.into())?;
        socket.listen(BACKLOG)?;
        socket.set_nonblocking(true)?;
        let listener = TcpListener::from(socket);
        let mut streams = Streams::dial()?;
        epoll::add(&streams.epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        streams.listener = Some(listener);
        Ok(streams)
    }

    /// A client's: connects to whom something is sent.
    ///
    /// # Errors
    /// The system has no room to wait.
    pub fn dial() -> io::Result<Streams> {
        Ok(Streams {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            listener: None,
            all: (0..STREAMS_MAX).map(|_| None).collect(),
            numbers: 0,
            failed: Vec::new(),
        })
    }

    /// Readable whenever something is to be done here, or `other` is readable.
    ///
    /// # Errors
    /// The system has no room to wait.
    pub fn watch_too(&self, other: &impl AsFd) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, other, EventData::new_u64(OTHER), EventFlags::IN)?)
    }

    /// Hands over every datagram that is there now, as far as each stream's turn goes. `false` if there was none.
    ///
    /// # Errors
    /// The system cannot wait.
    pub fn receive(&mut self, mut on_datagram: impl FnMut(SocketAddr, &mut [u8])) -> io::Result<bool> {
        let mut ready: [std::mem::MaybeUninit<Event>; STREAMS_MAX] = [std::mem::MaybeUninit::uninit(); STREAMS_MAX];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let events = match epoll::wait(&self.epoll, &mut ready, Some(&now)) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let mut any = false;
        for event in events {
            match event.data.u64() {
                LISTENER => self.accept(),
                OTHER => {}
                slot => {
                    let slot = slot as usize;
                    let Some(stream) = &mut self.all[slot] else { continue };
                    let works = stream.read(&mut any, &mut on_datagram) && stream.write();
                    self.keep(slot, works);
                }
            }
        }
        Ok(any)
    }

    /// Sends a datagram. `false` if it goes another way: there is no such stream, and nobody is connected to from here.
    pub fn send(&mut self, to: SocketAddr, datagrams: std::slice::Chunks<'_, u8>) -> bool {
        let known = self.all.iter().position(|stream| stream.as_ref().is_some_and(|stream| stream.addr == to));
        let slot = match known {
            Some(slot) => slot,
            None if self.listener.is_some() => return is_stream(to),
            None => match self.connect(to) {
                Some(slot) => slot,
                None => return true,
            },
        };
        if let Some(stream) = &mut self.all[slot] {
            stream.is_answered = true;
            datagrams.for_each(|datagram| stream.queue(datagram));
            let works = stream.write();
            self.keep(slot, works);
        }
        true
    }

    fn accept(&mut self) {
        // Not for ever: strangers may come faster than they are accepted. Out of descriptors: they wait in the backlog.
        for _ in 0..BACKLOG {
            let Some(Ok((socket, _))) = self.listener.as_ref().map(TcpListener::accept) else { return };
            let Some(slot) = self.find_slot() else { continue };
            let addr = stream_addr(self.numbers);
            if socket.set_nonblocking(true).is_ok() {
                self.begin(slot, socket, addr);
            }
        }
    }

    /// Room for one more. The oldest of those that were never answered goes for it.
    fn find_slot(&mut self) -> Option<usize> {
        let free = self.all.iter().position(Option::is_none);
        free.or_else(|| {
            let numbered = |(slot, stream): (usize, &Option<Stream>)| {
                stream.as_ref().filter(|stream| !stream.is_answered).map(|stream| (stream.number, slot))
            };
            let (_, slot) = self.all.iter().enumerate().filter_map(numbered).min()?;
            self.all[slot] = None;
            Some(slot)
        })
    }

    fn connect(&mut self, to: SocketAddr) -> Option<usize> {
        let now = Instant::now();
        self.failed.retain(|(_, again)| *again > now);
        if self.failed.iter().any(|(addr, _)| *addr == to) {
            return None;
        }
        // Whatever comes of it, it is not tried again at once.
        self.failed.push((to, now + DIAL_AGAIN));
        let slot = self.find_slot()?;
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP)).ok()?;
        socket.set_nonblocking(true).ok()?;
        match socket.connect(&to.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
            Err(_) => return None,
        }
        self.begin(slot, socket.into(), to);
        self.all[slot].is_some().then_some(slot)
    }

    fn begin(&mut self, slot: usize, socket: TcpStream, addr: SocketAddr) {
        let _ = SockRef::from(&socket).set_tcp_nodelay(true);
        if epoll::add(&self.epoll, &socket, EventData::new_u64(slot as u64), EventFlags::IN).is_err() {
            return;
        }
        let number = self.numbers;
        self.numbers += 1;
        self.all[slot] = Some(Stream {
            socket,
            addr,
            number,
            is_answered: false,
            input: vec![0; INPUT_SIZE],
            filled: 0,
            output: Vec::new(),
            watches_output: false,
        });
    }

    /// A stream that does not work any more goes, and its descriptor with it; of one that does, its end is watched as far
    /// as something waits for it.
    fn keep(&mut self, slot: usize, works: bool) {
        let Some(stream) = &mut self.all[slot] else { return };
        let waits = !stream.output.is_empty();
        let mut wanted = EventFlags::IN;
        wanted.set(EventFlags::OUT, waits);
        let changes = waits != stream.watches_output;
        let data = EventData::new_u64(slot as u64);
        if !works || (changes && epoll::modify(&self.epoll, &stream.socket, data, wanted).is_err()) {
            self.all[slot] = None;
        } else {
            stream.watches_output = waits;
        }
    }
}

impl AsFd for Streams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Stream {
    /// `false` if it is over, or makes no sense.
    fn read(&mut self, any: &mut bool, on_datagram: &mut impl FnMut(SocketAddr, &mut [u8])) -> bool {
        for _ in 0..READS_A_TURN {
            match self.socket.read(&mut self.input[self.filled..]) {
                Ok(0) => return false,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
            let mut from = 0;
            while let Some(length) = self.input[from..self.filled].first_chunk() {
                let length = usize::from(u16::from_le_bytes(*length));
                if !(datagram::HEADER_SIZE..=DATAGRAM_MAX).contains(&length) {
                    return false;
                }
                let frame = from + LENGTH_SIZE..from + LENGTH_SIZE + length;
                if frame.end > self.filled {
                    break;
                }
                *any = true;
                on_datagram(self.addr, &mut self.input[frame.clone()]);
                from = frame.end;
            }
            self.input.copy_within(from..self.filled, 0);
            self.filled -= from;
        }
        true
    }

    fn queue(&mut self, datagram: &[u8]) {
        if self.output.len() + LENGTH_SIZE + datagram.len() <= OUTPUT_MAX {
            self.output.extend_from_slice(&(datagram.len() as u16).to_le_bytes());
            self.output.extend_from_slice(datagram);
        }
    }

    /// `false` if it broke.
    fn write(&mut self) -> bool {
        let mut sent = 0;
        let works = loop {
            if sent == self.output.len() {
                break true;
            }
            match self.socket.write(&self.output[sent..]) {
                Ok(count) => sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // While it is being connected, too.
                Err(error) => break matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::NotConnected),
            }
        };
        self.output.drain(..sent);
        works
    }
}

/// What the protocol calls an accepted stream: an address that no datagram comes from (RFC 6666), so that a client's UDP
/// port of the same number is never taken for it.
fn stream_addr(number: u64) -> SocketAddr {
    let part = |at: u32| (number >> (16 * at)) as u16;
    SocketAddr::from((Ipv6Addr::new(0x100, 0, 0, 0, part(3), part(2), part(1), part(0)), 0))
}

fn is_stream(addr: SocketAddr) -> bool {
    matches!(addr, SocketAddr::V6(v6) if v6.ip().segments()[..4] == [0x100, 0, 0, 0])
}
