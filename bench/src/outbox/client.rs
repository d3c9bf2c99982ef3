//! The client: it takes all bytes of a reply or of a connection, and keeps their digest.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aws_lc_rs::digest;
use pagoda_guest::stream::Stream;
use rustix::time::{ClockId, clock_gettime};
use xxhash_rust::xxh3::Xxh3Default;

/// Bytes that are read at once.
const BUFFER_BYTES: usize = 256 << 10;
/// The client asks again for a file that is not there yet after a tenth of the time for which it has asked already, between these: it is
/// soon there, or asking would be a part of what is measured.
const ASK_AGAIN: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(100)];
/// A file that does not come, or a connection on which nothing comes, hangs.
const HANG: Duration = Duration::from_secs(60);

/// What a client asks for.
#[derive(Debug, Clone)]
pub struct Source {
    pub server: SocketAddr,
    pub path: String,
    pub token: Option<&'static str>,
}

/// How bytes are compared: those of a long stream by a hash that costs next to nothing, for the client has the same CPUs as the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Digest {
    Xxh3(u128),
    Sha256(String),
}

impl Digest {
    /// Of a stream that a guest publishes.
    pub fn of_stream(mib: u64) -> Digest {
        let (mut stream, mut hash) = (Stream::new(), Xxh3Default::new());
        (0..mib).for_each(|_| hash.update(stream.next_block()));
        Digest::Xxh3(hash.digest128())
    }

    fn begin(&self) -> Hash {
        match self {
            Self::Xxh3(_) => Hash::Xxh3(Box::default()),
            Self::Sha256(_) => Hash::Sha256(Box::new(digest::Context::new(&digest::SHA256))),
        }
    }
}

enum Hash {
    Xxh3(Box<Xxh3Default>),
    Sha256(Box<digest::Context>),
}

impl Hash {
    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Xxh3(hash) => hash.update(bytes),
            Self::Sha256(hash) => hash.update(bytes),
        }
    }

    fn end(self) -> Digest {
        match self {
            Self::Xxh3(hash) => Digest::Xxh3(hash.digest128()),
            Self::Sha256(hash) => {
                Digest::Sha256(hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
            }
        }
    }
}

/// What came, and it is what was expected.
#[derive(Debug, Clone, Copy)]
pub struct Received {
    pub first: Instant,
    pub end: Instant,
    pub bytes: u64,
    /// CPU time of the client.
    pub cpu_s: f64,
}

/// What no figure outweighs.
#[derive(Debug)]
pub struct WrongBytes {
    bytes: u64,
    digest: Digest,
    expected: Digest,
}

impl fmt::Display for WrongBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WrongBytes { bytes, digest, expected } = self;
        write!(f, "WRONG BYTES were delivered: {bytes} with {digest:?} and not {expected:?}")
    }
}

impl std::error::Error for WrongBytes {}

/// Asks for a file, again and again while it is not there, and takes all of it.
///
/// # Errors
/// It does not come, is cut short, or has other bytes than expected.
pub fn fetch(source: &Source, expected: &Digest) -> Result<Received> {
    let cpu_before = thread_cpu_s();
    let mut reader = open(source.server)?;
    let asked = Instant::now();
    loop {
        reader.get_mut().write_all(source.request().as_bytes()).context("ask for a file")?;
        let head = Head::read(&mut reader)?;
        match head.status {
            200 => return Taking::new(expected).all_of(&mut reader, &head, cpu_before),
            404 => {}
            status => bail!("GET {}: status {status}", source.path),
        }
        skip(&mut reader, &head)?;
        ensure!(asked.elapsed() < HANG, "GET {}: it is never there", source.path);
        std::thread::sleep((asked.elapsed() / 10).clamp(ASK_AGAIN[0], ASK_AGAIN[1]));
    }
}

/// Takes what a connection brings up to its end.
///
/// # Errors
/// Nobody connects, or other bytes come than expected.
pub fn take(listener: &TcpListener, expected: &Digest) -> Result<Received> {
    let cpu_before = thread_cpu_s();
    let (stream, _) = listener.accept().context("accept the guest")?;
    let mut reader = patient(stream)?;
    let mut taking = Taking::new(expected);
    taking.up_to(&mut reader, u64::MAX)?;
    taking.end(cpu_before)
}

/// A connection to a server, which listens.
///
/// # Errors
/// It does not.
pub fn open(server: SocketAddr) -> Result<BufReader<TcpStream>> {
    patient(TcpStream::connect_timeout(&server, HANG).with_context(|| format!("connect to {server}"))?)
}

fn patient(stream: TcpStream) -> Result<BufReader<TcpStream>> {
    stream.set_read_timeout(Some(HANG)).context("set a timeout")?;
    stream.set_nodelay(true).context("prepare a connection")?;
    Ok(BufReader::with_capacity(BUFFER_BYTES, stream))
}

impl Source {
    fn request(&self) -> String {
        let authorization = self.token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
        format!("GET {} HTTP/1.1\r\nHost: {}\r\n{authorization}\r\n", self.path, self.server)
    }
}

/// What of a reply's head says where its body ends, and begins.
pub struct Head {
    pub status: u16,
    pub length: Option<u64>,
    pub is_chunked: bool,
    /// What was asked for was given back; the rest of the file begins here.
    pub oldest: Option<u64>,
}

impl Head {
    /// # Errors
    /// The connection ends, or this is no head.
    pub fn read(reader: &mut impl BufRead) -> Result<Head> {
        let first = line(reader)?;
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.with_context(|| format!("no HTTP: {first:?}"))?;
        let mut head = Head { status, length: None, is_chunked: false, oldest: None };
        loop {
            let text = line(reader)?.to_ascii_lowercase();
            let Some((name, value)) = text.split_once(':') else { break };
            match name {
                "content-length" => head.length = Some(value.trim().parse().context("a length")?),
                "x-outbox-oldest" => head.oldest = Some(value.trim().parse().context("an offset")?),
                "transfer-encoding" => head.is_chunked = value.trim() == "chunked",
                _ => {}
            }
        }
        ensure!(head.is_chunked || head.length.is_some(), "a reply without an end");
        Ok(head)
    }
}

/// The next line of a reply, without its end.
///
/// # Errors
/// The connection ends.
pub fn line(reader: &mut impl BufRead) -> Result<String> {
    let mut text = String::new();
    ensure!(reader.read_line(&mut text).context("read a reply")? > 0, "the connection was closed");
    Ok(text.trim_end().to_owned())
}

/// The body of a reply that is not wanted.
///
/// # Errors
/// It has no length.
pub fn skip(reader: &mut impl BufRead, head: &Head) -> Result<()> {
    let length = head.length.context("a short reply has a length")?;
    std::io::copy(&mut reader.take(length), &mut std::io::sink()).context("read a reply").map(drop)
}

/// Bytes as they come.
struct Taking<'a> {
    expected: &'a Digest,
    hash: Hash,
    first: Option<Instant>,
    bytes: u64,
}

impl<'a> Taking<'a> {
    fn new(expected: &'a Digest) -> Taking<'a> {
        Taking { expected, hash: expected.begin(), first: None, bytes: 0 }
    }

    fn all_of(mut self, reader: &mut impl BufRead, head: &Head, cpu_before: f64) -> Result<Received> {
        if let Some(length) = head.length {
            self.up_to(reader, length)?;
            ensure!(self.bytes == length, "{} of {length} bytes came", self.bytes);
            return self.end(cpu_before);
        }
        loop {
            let size = line(reader)?;
            let size = u64::from_str_radix(&size, 16).with_context(|| format!("no chunk: {size:?}"))?;
            let before = self.bytes;
            self.up_to(reader, size)?;
            ensure!(self.bytes - before == size && line(reader)?.is_empty(), "a chunk was cut short");
            if size == 0 {
                return self.end(cpu_before);
            }
        }
    }

    /// At most so many bytes more.
    fn up_to(&mut self, reader: &mut impl BufRead, most: u64) -> Result<()> {
        let mut left = most;
        while left > 0 {
            let bytes = reader.fill_buf().context("read what is delivered")?;
            if bytes.is_empty() {
                break;
            }
            self.first.get_or_insert_with(Instant::now);
            let count = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            self.hash.update(&bytes[..count]);
            reader.consume(count);
            self.bytes += count as u64;
            left -= count as u64;
        }
        Ok(())
    }

    fn end(self, cpu_before: f64) -> Result<Received> {
        let end = Instant::now();
        let (digest, bytes) = (self.hash.end(), self.bytes);
        if digest != *self.expected {
            return Err(WrongBytes { bytes, digest, expected: self.expected.clone() }.into());
        }
        Ok(Received { first: self.first.unwrap_or(end), end, bytes, cpu_s: thread_cpu_s() - cpu_before })
    }
}

fn thread_cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(reply: &[u8], expected: Result<u64, &str>) {
        let mut reader = reply;
        let wanted = Digest::Sha256("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".into());
        let got = Head::read(&mut reader).and_then(|head| Taking::new(&wanted).all_of(&mut reader, &head, 0.0));
        match (got, expected) {
            (Ok(received), Ok(bytes)) => assert_eq!(received.bytes, bytes),
            (Err(error), Err(part)) => assert!(format!("{error:#}").contains(part), "{error:#}"),
            (got, expected) => panic!("{got:?} and not {expected:?}"),
        }
    }

    #[test]
    fn only_the_whole_of_the_right_bytes_passes() {
        check(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", Ok(3));
        check(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", Ok(3));
        check(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabd", Err("WRONG BYTES"));
        check(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc", Err("3 of 4"));
        check(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", Err("was closed"));
        check(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabc", Err("cut short"));
        check(b"HTTP/1.1 200 OK\r\n\r\nabc", Err("without an end"));
        check(b"", Err("was closed"));
    }

    #[test]
    fn streams_of_other_lengths_differ() {
        assert_ne!(Digest::of_stream(1), Digest::of_stream(2));
    }
}
