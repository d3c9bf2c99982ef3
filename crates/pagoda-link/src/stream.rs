//! A stream between two hosts: a TCP connection with a handshake behind it. Threads that may wait read and write it.
//!
//! The order at the called end: the handshake -> the caller's first record, which cannot be made by somebody who only sends a
//! hello once more -> a look whether it trusts the caller's key -> its own first record, which says "come in", or why not. The
//! caller waits for that record. So it never takes a stream for open that the other end does not want. Both records have the
//! version that is spoken.
//!
//! A thread waits for at most twice [`STALL_MAX`] in anything here, however slowly bytes come or go.

use std::io::{BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rmap::crypto::{Keypair, PublicKey};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use thiserror::Error;

use crate::handshake::{self, ANSWER_SIZE, Caller, HELLO_SIZE, NoHandshake, Secrets};
use crate::record::{LEN_SIZE, RECORD_MAX, Seal, sealed_len};

/// How long the other host may take to answer in a handshake, and to be connected.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// A record comes and goes within this, from its first byte to its last, and is followed by the next one. Who waits for longer asks
/// [`Receiver::wait`] first.
const STALL_MAX: Duration = Duration::from_secs(30);
/// An idle connection is asked for its other end so often.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEPALIVE_TRIES: u32 = 3;
/// Read at a time. Longer records pass it by.
const READ_BUFFER: usize = 64 << 10;
/// Why a host is not let in, at most.
const REFUSAL_MAX: usize = 512;
/// The first byte of the called one's first record.
const COME_IN: u8 = 1;
const REFUSED: u8 = 0;

/// A stream cannot be had, or has ended.
#[derive(Debug, Error)]
pub enum LinkError {
    #[error("{0} has no address")]
    NoAddress(String),
    #[error(transparent)]
    Handshake(#[from] NoHandshake),
    /// By the other host, in its words.
    #[error("it refuses: {0}")]
    Refused(String),
    #[error("what came is not what the other host sent: something between the two changes it")]
    NotAuthentic,
    #[error("the other host has closed the connection")]
    Closed,
    #[error("the other host does not answer")]
    Silent,
    #[error("the other host says something that this version does not understand")]
    NotUnderstood,
    #[error(transparent)]
    Io(std::io::Error),
}

impl From<std::io::Error> for LinkError {
    fn from(error: std::io::Error) -> LinkError {
        match error.kind() {
            // What a time-out of a socket is called.
            ErrorKind::WouldBlock | ErrorKind::TimedOut => LinkError::Silent,
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => LinkError::Closed,
            _ => LinkError::Io(error),
        }
    }
}

/// Both directions of a stream.
#[derive(Debug)]
pub struct Link {
    pub sender: Sender,
    pub receiver: Receiver,
    /// Whose it is at the other end.
    pub peer: PublicKey,
}

impl Link {
    /// Calls the host with this key. `address` is `HOST:PORT`.
    ///
    /// # Errors
    /// It does not answer, is another one, or refuses.
    pub fn connect(own: &Keypair, called: &PublicKey, address: &str) -> Result<Link, LinkError> {
        let mut last = LinkError::NoAddress(address.to_owned());
        for at in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&at, ANSWER_MAX) {
                Ok(stream) => return Link::call(own, called, stream),
                Err(error) => last = error.into(),
            }
        }
        Err(last)
    }

    fn call(own: &Keypair, called: &PublicKey, mut stream: TcpStream) -> Result<Link, LinkError> {
        set_up(&stream, ANSWER_MAX)?;
        let (caller, hello) = Caller::begin(own, called)?;
        write_all(&mut stream, &hello, ANSWER_MAX)?;
        let mut answer = [0; ANSWER_SIZE];
        read_all(&mut stream, &mut answer, ANSWER_MAX)?;
        let Secrets { from_caller, to_caller, version } = caller.end(&answer)?;
        let mut link = Link::of(stream, Seal::new(&from_caller), Seal::new(&to_caller), *called)?;
        link.sender.send(&[&[version]])?;
        match link.receiver.receive_within(ANSWER_MAX)?.split_first() {
            Some((&COME_IN, said)) if said == [version] => {}
            Some((&REFUSED, why)) => return Err(LinkError::Refused(readable(why))),
            _ => return Err(LinkError::NotAuthentic),
        }
        link.set_patience(STALL_MAX)?;
        Ok(link)
    }

    /// Answers a caller. `trusts` says why one with this key is not let in.
    ///
    /// # Errors
    /// It does not know this host's key, says nothing, or is not let in, which it is told.
    pub fn answer(
        own: &Keypair,
        mut stream: TcpStream,
        trusts: impl FnOnce(&PublicKey) -> Result<(), String>,
    ) -> Result<Link, LinkError> {
        set_up(&stream, ANSWER_MAX)?;
        let mut hello = [0; HELLO_SIZE];
        read_all(&mut stream, &mut hello, ANSWER_MAX)?;
        let answer = handshake::answer(own, &hello)?;
        write_all(&mut stream, &answer.bytes, ANSWER_MAX)?;
        let (peer, Secrets { from_caller, to_caller, version }) = answer.then?;
        let mut link = Link::of(stream, Seal::new(&to_caller), Seal::new(&from_caller), peer)?;
        if link.receiver.receive_within(ANSWER_MAX)? != [version] {
            return Err(LinkError::NotAuthentic);
        }
        if let Err(mut why) = trusts(&peer) {
            let end = (0..=REFUSAL_MAX).rev().find(|at| why.is_char_boundary(*at)).unwrap_or(0);
            why.truncate(end);
            link.sender.send(&[&[REFUSED], why.as_bytes()])?;
            return Err(LinkError::Refused(why));
        }
        link.sender.send(&[&[COME_IN, version]])?;
        link.set_patience(STALL_MAX)?;
        Ok(link)
    }

    fn of(stream: TcpStream, seal: Seal, open: Seal, peer: PublicKey) -> Result<Link, LinkError> {
        let reader = stream.try_clone()?;
        Ok(Link {
            sender: Sender { stream, seal, frame: Vec::new() },
            receiver: Receiver { stream: BufReader::with_capacity(READ_BUFFER, reader), open, record: Vec::new() },
            peer,
        })
    }

    /// How long the other host may take for a piece of what it sends or is sent, in both directions, from now on.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn set_patience(&self, patience: Duration) -> Result<(), LinkError> {
        Ok(set_times(&self.sender.stream, patience)?)
    }

    /// What ends the stream while other threads send and receive.
    ///
    /// # Errors
    /// The kernel's.
    pub fn cutter(&self) -> Result<Cutter, LinkError> {
        Ok(Cutter(self.sender.stream.try_clone()?))
    }

    /// Where the other host is, as this one sees it.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn peer_address(&self) -> Result<SocketAddr, LinkError> {
        Ok(self.sender.stream.peer_addr()?)
    }
}

/// Ends a stream at both ends, also for threads that wait for it. The connection stays open until this is dropped, too.
#[derive(Debug)]
pub struct Cutter(TcpStream);

impl Cutter {
    pub fn cut(&self) {
        // It may have ended already.
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// Reads all of `bytes`. The stream's own time-out bounds each piece, `max` all of them.
fn read_all(stream: &mut impl Read, bytes: &mut [u8], max: Duration) -> Result<(), LinkError> {
    let (began, mut read) = (Instant::now(), 0);
    while read < bytes.len() {
        match stream.read(&mut bytes[read..]) {
            Ok(0) => return Err(LinkError::Closed),
            Ok(len) => read += len,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        if began.elapsed() > max && read < bytes.len() {
            return Err(LinkError::Silent);
        }
    }
    Ok(())
}

/// Writes all of `bytes`, with the same bounds.
fn write_all(stream: &mut impl Write, bytes: &[u8], max: Duration) -> Result<(), LinkError> {
    let (began, mut written) = (Instant::now(), 0);
    while written < bytes.len() {
        match stream.write(&bytes[written..]) {
            Ok(0) => return Err(LinkError::Closed),
            Ok(len) => written += len,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
        if began.elapsed() > max && written < bytes.len() {
            return Err(LinkError::Silent);
        }
    }
    Ok(())
}

fn set_up(stream: &TcpStream, patience: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_TRIES)?;
    sockopt::set_tcp_user_timeout(stream, STALL_MAX.as_millis() as u32)?;
    set_times(stream, patience)
}

fn set_times(stream: &TcpStream, patience: Duration) -> std::io::Result<()> {
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))
}

/// Text from another host, for a terminal.
fn readable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(REFUSAL_MAX)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The end of a stream that records go into.
pub struct Sender {
    stream: TcpStream,
    seal: Seal,
    /// The record that is made: its buffer is used again.
    frame: Vec<u8>,
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sender")
    }
}

impl Sender {
    /// Sends a record of these parts, one behind the other.
    ///
    /// # Errors
    /// The other host has gone, or does not take it in time. The stream is of no use any more.
    ///
    /// # Panics
    /// They are longer than [`RECORD_MAX`].
    pub fn send(&mut self, parts: &[&[u8]]) -> Result<(), LinkError> {
        let mut draft = self.draft();
        parts.iter().for_each(|part| draft.add(part));
        draft.send()
    }

    /// Begins a record that is made in place.
    pub fn draft(&mut self) -> Draft<'_> {
        self.frame.clear();
        self.frame.resize(LEN_SIZE, 0);
        Draft(self)
    }

    /// Says to the other end that nothing more comes. What was sent before still arrives.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn close(&mut self) -> Result<(), LinkError> {
        Ok(self.stream.shutdown(std::net::Shutdown::Write)?)
    }

    /// Ends the stream at both ends, also for a thread that waits for it.
    pub fn cut(&self) {
        // It may have ended already.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

/// A record that is being made.
#[derive(Debug)]
pub struct Draft<'a>(&'a mut Sender);

impl Draft<'_> {
    /// The bytes that there is still room for.
    pub fn room(&self) -> usize {
        RECORD_MAX + LEN_SIZE - self.0.frame.len()
    }

    pub fn add(&mut self, bytes: &[u8]) {
        self.0.frame.extend_from_slice(bytes);
    }

    /// So many bytes at its end, zero until they are filled.
    pub fn space(&mut self, len: usize) -> &mut [u8] {
        let at = self.0.frame.len();
        self.0.frame.resize(at + len, 0);
        &mut self.0.frame[at..]
    }

    /// Seals and sends it.
    ///
    /// # Errors
    /// The other host has gone, or does not take it in time.
    ///
    /// # Panics
    /// It is longer than [`RECORD_MAX`].
    pub fn send(self) -> Result<(), LinkError> {
        let Draft(Sender { stream, seal, frame }) = self;
        seal.seal(frame).map_err(|_| LinkError::NotAuthentic)?;
        write_all(stream, frame, STALL_MAX)
    }
}

/// The end of a stream that records come out of.
pub struct Receiver {
    stream: BufReader<TcpStream>,
    open: Seal,
    record: Vec<u8>,
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Receiver")
    }
}

impl Receiver {
    /// The next record. Its first byte may take 30 s, and the others as long.
    ///
    /// # Errors
    /// The stream has ended, or was changed on its way: it is of no use any more.
    pub fn receive(&mut self) -> Result<&[u8], LinkError> {
        self.receive_within(STALL_MAX)
    }

    fn receive_within(&mut self, max: Duration) -> Result<&[u8], LinkError> {
        let mut len = [0; LEN_SIZE];
        read_all(&mut self.stream, &mut len, max)?;
        let bytes = sealed_len(len).ok_or(LinkError::NotAuthentic)?;
        self.record.resize(bytes, 0);
        read_all(&mut self.stream, &mut self.record, max)?;
        self.open.open(len, &mut self.record).map_err(|_| LinkError::NotAuthentic)
    }

    /// Whether a record, or the end of the stream, begins to come within this time.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, at_most: Duration) -> Result<bool, LinkError> {
        if !self.stream.buffer().is_empty() {
            return Ok(true);
        }
        let began = Instant::now();
        loop {
            let left = at_most.saturating_sub(began.elapsed());
            let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 });
            match poll(&mut [PollFd::new(&self.stream.get_ref().as_fd(), PollFlags::IN)], Some(&left)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(std::io::Error::from(error).into()),
            }
        }
    }
}
