//! Peers over TCP: a page from memcached, and from nbdkit's memory plugin, both with Nagle's algorithm off, over the same link.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use testkit::link::{ETHERNET_ADDR, ETHERNET_LISTEN, ETHERNET_SERVER, Ethernet};
use testkit::undo::{Guard, Undo, start_ticks_of};

use super::p50_us;

const PAGE: usize = 4096;
const PAGES: u64 = 4096;
/// As the pages of the pool are read.
const STRIDE: u64 = 1543;
const START: Duration = Duration::from_secs(5);

/// A program that serves pages on a port, at the other end of the link.
struct Program {
    child: Child,
    stream: TcpStream,
    _kill: Guard,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `None` if the program is not installed.
fn start(link: &Ethernet, name: &str, arguments: impl Fn(&str) -> Vec<String>) -> Result<Option<Program>> {
    // A port that was free a moment ago.
    let addr = link.at_servers(|| Ok(TcpListener::bind(ETHERNET_LISTEN)?.local_addr()?))?;
    let quietly = |command: &mut Command| {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    };
    let mut version = Command::new(name);
    quietly(version.arg("--version"));
    if version.status().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        eprintln!("bench rmap: {name} is not installed, its row is left out (apt install {name})");
        return Ok(None);
    }
    // Not from a thread that ends in the namespace: nbdkit may end with whoever started it.
    let mut command = Command::new("ip");
    command.args(["netns", "exec", ETHERNET_SERVER, name]).args(arguments(&addr.port().to_string()));
    quietly(&mut command);
    let mut child = command.spawn().with_context(|| format!("run {name}"))?;
    let pid = child.id();
    let kill = Guard::new(Undo::Process { pid, start_ticks: start_ticks_of(pid).unwrap_or(0) })?;
    let began = Instant::now();
    loop {
        match TcpStream::connect(addr) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(Some(Program { child, stream, _kill: kill }));
            }
            Err(error) if began.elapsed() > START || child.try_wait()?.is_some() => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error).with_context(|| format!("connect to {name}"));
            }
            Err(_) => std::thread::yield_now(),
        }
    }
}

fn content(page: u64) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&(page + 1).to_be_bytes()));
    bytes
}

fn measure(count: usize, mut read: impl FnMut(u64) -> Result<()>) -> Result<f64> {
    let mut times = Vec::with_capacity(count);
    let mut page = 0;
    for _ in 0..count {
        page = (page + STRIDE) % PAGES;
        let start = Instant::now();
        read(page)?;
        times.push(start.elapsed());
    }
    Ok(p50_us(times))
}

/// `get` of memcached's text protocol.
///
/// # Errors
/// It cannot be run, or answers otherwise than agreed.
pub fn memcached_us(link: &Ethernet, count: usize) -> Result<Option<f64>> {
    let arguments = |port: &str| {
        ["-l", ETHERNET_ADDR, "-p", port, "-U", "0", "-u", "root", "-M", "-m", "128"].map(str::to_owned).to_vec()
    };
    let Some(mut program) = start(link, "memcached", arguments)? else { return Ok(None) };
    let mut buffer = [0; PAGE + 64];
    for page in 0..PAGES {
        let mut request = format!("set {page:08} 0 0 {PAGE}\r\n").into_bytes();
        request.extend_from_slice(&content(page));
        request.extend_from_slice(b"\r\n");
        program.stream.write_all(&request)?;
        program.stream.read_exact(&mut buffer[..8])?;
        if buffer[..8] != *b"STORED\r\n" {
            bail!("memcached did not store a page");
        }
    }
    let header = format!("VALUE {:08} 0 {PAGE}\r\n", 0).len();
    let length = header + PAGE + b"\r\nEND\r\n".len();
    measure(count, |page| {
        program.stream.write_all(format!("get {page:08}\r\n").as_bytes())?;
        program.stream.read_exact(&mut buffer[..length])?;
        if buffer[header..header + PAGE] != content(page) {
            bail!("memcached returned another page");
        }
        Ok(())
    })
    .map(Some)
}

/// A read through the NBD protocol (fixed newstyle, simple replies).
///
/// # Errors
/// It cannot be run, or answers otherwise than agreed.
pub fn nbdkit_us(link: &Ethernet, count: usize) -> Result<Option<f64>> {
    const READ: u16 = 0;
    const WRITE: u16 = 1;
    let arguments = |port: &str| ["-f", "-i", ETHERNET_ADDR, "-p", port, "memory", "16M"].map(str::to_owned).to_vec();
    let Some(mut program) = start(link, "nbdkit", arguments)? else { return Ok(None) };
    let stream = &mut program.stream;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    // Fixed newstyle, no padding after the export's size; then the export without a name.
    stream.write_all(&3_u32.to_be_bytes())?;
    stream.write_all(&[&b"IHAVEOPT"[..], &1_u32.to_be_bytes(), &0_u32.to_be_bytes()].concat())?;
    stream.read_exact(&mut [0; 10])?;
    let mut request = |kind: u16, page: u64, content: &[u8], room: &mut [u8]| -> Result<()> {
        let mut bytes = Vec::with_capacity(28 + content.len());
        bytes.extend_from_slice(&0x2560_9513_u32.to_be_bytes());
        bytes.extend_from_slice(&[0, 0]);
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&page.to_be_bytes());
        bytes.extend_from_slice(&(page * PAGE as u64).to_be_bytes());
        bytes.extend_from_slice(&(PAGE as u32).to_be_bytes());
        bytes.extend_from_slice(content);
        stream.write_all(&bytes)?;
        let mut reply = [0; 16];
        stream.read_exact(&mut reply)?;
        if reply[..8] != [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0] {
            bail!("nbdkit refused a request");
        }
        Ok(stream.read_exact(room)?)
    };
    for page in 0..PAGES {
        request(WRITE, page, &content(page), &mut [])?;
    }
    let mut room = [0; PAGE];
    measure(count, |page| {
        request(READ, page, &[], &mut room)?;
        if room != content(page) {
            bail!("nbdkit returned another page");
        }
        Ok(())
    })
    .map(Some)
}
