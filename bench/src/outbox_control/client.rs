//! The client of a VM's outbox: takes one file after the other while they grow, and compares each byte with what the guest was to write.
//!
//! A rough one stalls in the middle of some files, and dies in the middle of others: then its connection is gone with all that is on its
//! way, and another one asks for the rest. Bytes that its host had acknowledged and that it had not read yet may have been given
//! back meanwhile: they are counted as lost by its death, and all others have to be there.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_guest::rng::Rng;
use pagoda_guest::stream::{BLOCK_BYTES, Stream};

use super::lab::TOKEN;
use super::link::Link;
use crate::outbox::client::{Head, line, open, skip};

/// Between two questions for a file that is not there yet.
const ASK_AGAIN: Duration = Duration::from_millis(5);
/// A file that does not come hangs. A guest that is overloaded begins a job every few seconds at the least.
const HANG: Duration = Duration::from_secs(60);
/// Of a rough client's files, in percent: those in which it stalls, and those in which it dies.
const STALLS_PERCENT: u64 = 10;
const DIES_PERCENT: u64 = 10;
/// How long it stalls at most. Writers wait for 30 s.
const STALL_MS_MAX: u64 = 3000;

/// How a client takes files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    Steady,
    Rough,
}

/// What it took. All of it was right.
#[derive(Debug, Clone, Copy, Default)]
pub struct Taken {
    pub files: u64,
    pub bytes: u64,
    pub stalls: u64,
    pub deaths: u64,
    /// Acknowledged by a host whose client died before it had read them.
    pub lost_bytes: u64,
}

/// A file that a client wants.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Its path below the server's root.
    pub path: String,
    /// Of its stream ([`pagoda_guest::jobs::file_number`]).
    pub number: u64,
    pub bytes: u64,
}

/// What happens in the middle of a file, and where.
#[derive(Debug, Clone, Copy)]
enum Mishap {
    Stall(u64),
    Death(u64),
}

/// What of a file has come.
enum Came {
    All,
    /// The client died here.
    Up(u64),
}

/// A client that takes files of one guest over one link, as the head of this module says.
pub struct Client {
    manner: Manner,
    chance: Rng,
    connection: Option<BufReader<TcpStream>>,
    check: Check,
    pub taken: Taken,
}

impl Client {
    pub fn new(manner: Manner, seed: u64) -> Client {
        Client { manner, chance: Rng::new(seed), connection: None, check: Check::default(), taken: Taken::default() }
    }

    /// Takes a file; `false`: it is not there, and by `is_over` it never will be.
    ///
    /// # Errors
    /// Wrong bytes, or it does not come.
    pub fn take(&mut self, wanted: &Wanted, is_over: impl Fn() -> bool) -> Result<bool> {
        let asked = Instant::now();
        loop {
            // Before the question: what comes between the two is asked for again.
            let was_over = is_over();
            let head = self.ask(wanted, None)?;
            match head.status {
                200 => {
                    if let Came::Up(offset) = self.first(wanted, &head)? {
                        self.rest(wanted, offset)?;
                    }
                    self.taken.files += 1;
                    return Ok(true);
                }
                404 => skip(self.connected()?, &head)?,
                status => bail!("GET {}: status {status}", wanted.path),
            }
            if was_over {
                return Ok(false);
            }
            ensure!(asked.elapsed() < HANG, "GET {}: it is never there", wanted.path);
            sleep(ASK_AGAIN);
        }
    }

    fn connected(&mut self) -> Result<&mut BufReader<TcpStream>> {
        if self.connection.is_none() {
            self.connection = Some(open(Link::server())?);
        }
        self.connection.as_mut().context("a connection")
    }

    fn ask(&mut self, wanted: &Wanted, from: Option<u64>) -> Result<Head> {
        let range = from.map_or(String::new(), |from| format!("Range: bytes={from}-\r\n"));
        let path = &wanted.path;
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {TOKEN}\r\n{range}\r\n", Link::server());
        let connection = self.connected()?;
        connection.get_mut().write_all(request.as_bytes()).context("ask for a file")?;
        Head::read(connection).with_context(|| format!("GET {path}"))
    }

    fn mishap(&mut self, bytes: u64) -> Option<Mishap> {
        if self.manner == Manner::Steady {
            return None;
        }
        let at = self.chance.below(bytes);
        match self.chance.below(100) {
            kind if kind < STALLS_PERCENT => Some(Mishap::Stall(at)),
            kind if kind < STALLS_PERCENT + DIES_PERCENT => Some(Mishap::Death(at)),
            _ => None,
        }
    }

    /// The body of the first reply.
    fn first(&mut self, wanted: &Wanted, head: &Head) -> Result<Came> {
        let mut mishap = self.mishap(wanted.bytes);
        self.check.begin(wanted.number, 0);
        let mut body = Body::new(self.connection.as_mut().context("a connection")?, head);
        let mut offset = 0;
        loop {
            match mishap {
                Some(Mishap::Stall(at)) if offset >= at => {
                    sleep(Duration::from_millis(self.chance.below(STALL_MS_MAX)));
                    self.taken.stalls += 1;
                    mishap = None;
                }
                Some(Mishap::Death(at)) if offset >= at => {
                    self.taken.deaths += 1;
                    self.connection = None;
                    return Ok(Came::Up(offset));
                }
                _ => {}
            }
            let bytes = body.next()?;
            let count = bytes.len();
            if count == 0 {
                break;
            }
            self.check.take(bytes).with_context(|| wanted.path.clone())?;
            body.took(count)?;
            offset += count as u64;
            self.taken.bytes += count as u64;
        }
        ensure!(offset == wanted.bytes, "{}: {offset} bytes came and not {}", wanted.path, wanted.bytes);
        Ok(Came::All)
    }

    /// What another client takes after one has died.
    fn rest(&mut self, wanted: &Wanted, mut offset: u64) -> Result<()> {
        let asked = Instant::now();
        self.check.begin(wanted.number, offset);
        while offset < wanted.bytes {
            ensure!(asked.elapsed() < HANG, "{}: its rest does not come", wanted.path);
            let head = self.ask(wanted, Some(offset))?;
            match (head.status, head.oldest) {
                (206, _) => {
                    let mut body = Body::new(self.connection.as_mut().context("a connection")?, &head);
                    loop {
                        let bytes = body.next()?;
                        let count = bytes.len();
                        if count == 0 {
                            break;
                        }
                        self.check.take(bytes).with_context(|| wanted.path.clone())?;
                        body.took(count)?;
                        offset += count as u64;
                        self.taken.bytes += count as u64;
                    }
                    ensure!(offset <= wanted.bytes, "{}: it is longer than what was written", wanted.path);
                }
                (416, Some(oldest)) => {
                    ensure!(oldest > offset, "{}: {offset} is refused, and {oldest} is the oldest", wanted.path);
                    skip(self.connected()?, &head)?;
                    self.taken.lost_bytes += oldest - offset;
                    offset = oldest;
                    self.check.begin(wanted.number, offset);
                }
                (416, None) => {
                    skip(self.connected()?, &head)?;
                    sleep(ASK_AGAIN);
                }
                (status, _) => bail!("GET {} from {offset} on: status {status}", wanted.path),
            }
        }
        Ok(())
    }
}

/// The body of a reply, as it comes.
struct Body<'a, R> {
    reader: &'a mut R,
    /// Of the body, or of the present chunk.
    left: u64,
    is_chunked: bool,
    is_over: bool,
}

impl<'a, R: BufRead> Body<'a, R> {
    fn new(reader: &'a mut R, head: &Head) -> Body<'a, R> {
        let is_chunked = head.length.is_none() && head.is_chunked;
        Body { reader, left: head.length.unwrap_or(0), is_chunked, is_over: false }
    }

    /// The next bytes; none at the end.
    fn next(&mut self) -> Result<&[u8]> {
        if self.left == 0 && self.is_chunked && !self.is_over {
            let size = line(self.reader)?;
            self.left = u64::from_str_radix(&size, 16).with_context(|| format!("no chunk: {size:?}"))?;
            if self.left == 0 {
                ensure!(line(self.reader)?.is_empty(), "a reply has more behind its end");
                self.is_over = true;
            }
        }
        if self.left == 0 {
            return Ok(&[]);
        }
        let bytes = self.reader.fill_buf().context("read what is delivered")?;
        ensure!(!bytes.is_empty(), "a reply was cut short");
        Ok(&bytes[..bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX))])
    }

    /// So many of them were looked at.
    fn took(&mut self, count: usize) -> Result<()> {
        self.reader.consume(count);
        self.left -= count as u64;
        if self.left == 0 && self.is_chunked {
            ensure!(line(self.reader)?.is_empty(), "a chunk was cut short");
        }
        Ok(())
    }
}

/// Compares bytes with a file's stream.
#[derive(Default)]
struct Check {
    stream: Stream,
    number: u64,
    offset: u64,
}

impl Check {
    /// From this byte of a file on.
    fn begin(&mut self, number: u64, offset: u64) {
        (self.number, self.offset) = (number, offset);
        self.stream.begin(number, offset / BLOCK_BYTES as u64);
        self.stream.next_block();
    }

    fn take(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let at = (self.offset % BLOCK_BYTES as u64) as usize;
            let count = bytes.len().min(BLOCK_BYTES - at);
            let (now, later) = bytes.split_at(count);
            ensure!(
                *now == self.stream.block()[at..at + count],
                "WRONG BYTES were delivered, between {} and {} of file number {}",
                self.offset,
                self.offset + count as u64,
                self.number
            );
            self.offset += count as u64;
            if self.offset.is_multiple_of(BLOCK_BYTES as u64) {
                self.stream.next_block();
            }
            bytes = later;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(number: u64, bytes: usize) -> Vec<u8> {
        let mut stream = Stream::new();
        stream.begin(number, 0);
        let mut all = Vec::new();
        while all.len() < bytes {
            all.extend_from_slice(stream.next_block());
        }
        all.truncate(bytes);
        all
    }

    #[test]
    fn each_byte_is_compared_from_wherever_it_begins() {
        let content = file(9, 2 * BLOCK_BYTES + 5000);
        for offset in [0, 1, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 4999] {
            let mut check = Check::default();
            check.begin(9, offset as u64);
            assert!(content[offset..].chunks(70_001).all(|part| check.take(part).is_ok()), "from {offset}");
            let mut wrong = content.clone();
            *wrong.last_mut().unwrap() ^= 1;
            check.begin(9, offset as u64);
            assert!(wrong[offset..].chunks(70_001).any(|part| check.take(part).is_err()), "from {offset}");
            check.begin(8, offset as u64 / 4096 * 4096);
            assert!(check.take(&content[offset / 4096 * 4096..]).is_err(), "another file's, from {offset}");
        }
    }

    #[test]
    fn bodies_end_where_they_say() {
        let check = |reply: &[u8], expected: Result<&[u8], &str>| {
            let mut reader = reply;
            let mut read = || -> Result<Vec<u8>> {
                let head = Head::read(&mut reader)?;
                let mut body = Body::new(&mut reader, &head);
                let mut all = Vec::new();
                loop {
                    let bytes = body.next()?.to_vec();
                    if bytes.is_empty() {
                        return Ok(all);
                    }
                    body.took(bytes.len())?;
                    all.extend(bytes);
                }
            };
            match (read(), expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, expected),
                (Err(error), Err(part)) => assert!(format!("{error:#}").contains(part), "{error:#}"),
                (got, expected) => panic!("{got:?} and not {expected:?}"),
            }
        };
        check(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcd", Ok(b"abc"));
        check(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", Ok(b"abc"));
        check(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", Err("cut short"));
        check(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", Err("was closed"));
        check(b"HTTP/1.1 206 OK\r\nContent-Length: 4\r\n\r\nabc", Err("cut short"));
    }
}
