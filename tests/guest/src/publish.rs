//! Publishes a stream that the host knows, into a file or to a socket, by the calls that any program makes, and watches how large a
//! file system is.

use std::fs::File;
use std::io::Write;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_guest::PAGES_PER_MIB;
use pagoda_guest::stream::Stream;

use crate::report::Report;

/// Before the address of a socket.
const SOCKET: &str = "tcp:";
/// Bytes of one write. Larger ones cost a socket no less (measured: 8.8 CPU-seconds a GiB, and 11.8 with 16 KiB).
const WRITE_BYTES: usize = 256 << 10;
/// Nobody has resized it.
const WATCH_MAX: Duration = Duration::from_secs(30);

/// Writes so many MiB, and says `published` when the last byte is written and the file closed. A line of the shell, if there is one,
/// runs from before the first byte, and its time is a step of its own.
pub fn publish(to: &str, mib: usize, beside: &str, report: &Report) -> Result<()> {
    let job = (!beside.is_empty()).then(|| Job::start(beside)).transpose()?;
    let mut stream = Stream::new();
    let start = Instant::now();
    let mut out: Box<dyn Write> = match to.strip_prefix(SOCKET) {
        Some(address) => Box::new(TcpStream::connect(address).with_context(|| format!("connect to {address}"))?),
        None => Box::new(File::create(to).with_context(|| format!("create {to}"))?),
    };
    for _ in 0..mib {
        for part in stream.next_block().chunks(WRITE_BYTES) {
            out.write_all(part).with_context(|| format!("write to {to}"))?;
        }
    }
    drop(out);
    let us = start.elapsed().as_micros();
    report.line(format_args!("published us={us}"));
    report.line(format_args!("done phase=publish pages={} bad=0 us={us}", mib * PAGES_PER_MIB));
    if let Some(job) = job {
        let us = job.wait()?.as_micros();
        report.line(format_args!("done phase=job bad=0 us={us}"));
    }
    Ok(())
}

/// A line of the shell that runs beside.
struct Job(JoinHandle<Result<Duration>>);

impl Job {
    fn start(line: &str) -> Result<Job> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", line]).env("PATH", "/bin").stdin(Stdio::null()).stdout(Stdio::null());
        let start = Instant::now();
        let mut child = command.spawn().context("start a shell: boot the image of a client")?;
        Ok(Job(std::thread::spawn(move || {
            let status = child.wait().context("wait for the job")?;
            ensure!(status.success(), "the job: {status}");
            Ok(start.elapsed())
        })))
    }

    fn wait(self) -> Result<Duration> {
        self.0.join().map_err(|_| anyhow!("the thread that waits for the job has panicked"))?
    }
}

/// Asks for the size of the file system at `path` as fast as it answers, from `watching` on until it has another one, and says
/// `resized`.
pub fn watch(path: &str, report: &Report) -> Result<()> {
    let before = blocks(path)?;
    let start = Instant::now();
    report.line(format_args!("watching"));
    let mut looks = 0_u32;
    while blocks(path)? == before {
        looks += 1;
        if start.elapsed() > WATCH_MAX {
            bail!("{path} had the same size for {} s", WATCH_MAX.as_secs());
        }
    }
    report.line(format_args!("resized"));
    let us = start.elapsed().as_micros();
    report.line(format_args!("done phase=watch ops={} bad=0 us={us}", looks + 1));
    Ok(())
}

/// What `df` shows as its size.
fn blocks(path: &str) -> Result<u64> {
    Ok(rustix::fs::statvfs(path).with_context(|| format!("ask for the size of {path}"))?.f_blocks)
}
