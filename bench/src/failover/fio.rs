//! fio with verify on a disk, while something is done to the servers under it: what it counts, and when each of its requests
//! was answered.
//!
//! It writes every page once, at random, and reads it back and verifies it a moment later, so that both are under way at any
//! time; then all pages are read and verified once more. Before that the disk is to be filled with what has none of
//! fio's headers: a page that is as old as that is wrong, too.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use pagoda_sys::toy::process::die_with_parent;
use serde_json::Value;
use testkit::undo::{Guard, Undo, start_ticks_of};

use crate::load::{Done, PAGE};

/// Pages that are written before as many are verified: little enough that both go on during a stall.
const VERIFY_EVERY: u32 = 64;
/// Room for what fio logs: with less it holds requests back while it gets more.
const LOG_ENTRIES: u32 = 1 << 20;
/// fio has begun by then.
const START_MAX: Duration = Duration::from_secs(60);
/// It has written and read everything by then.
const END_MAX: Duration = Duration::from_secs(300);
const COMPLAINTS_SHOWN: usize = 10;
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// An exported disk, and what fio has beside that.
#[derive(Debug)]
pub struct Disk<'a> {
    pub uri: &'a str,
    pub bytes: u64,
    /// How many requests are under way at a time.
    pub depth: usize,
    /// In what order it writes.
    pub seed: u64,
}

/// What came of writing and verifying.
#[derive(Debug)]
pub struct Verified {
    /// What fio counted while it wrote.
    pub done: Done,
    /// The longest that any request took, by fio's own account.
    pub longest_ms: f64,
    requests: Vec<Answered>,
}

/// A request, by fio's log.
#[derive(Debug)]
struct Answered {
    /// When it was answered, in milliseconds since 1970.
    at_ms: u64,
    took_ms: f64,
    write: bool,
}

/// A running fio and the directory with what it says; ended and deleted with this value.
struct Fio {
    child: Child,
    dir: PathBuf,
    _kill: Guard,
    _remove: Guard,
}

impl Disk<'_> {
    /// Writes and verifies for as long as that takes. `meanwhile` begins when fio has begun.
    ///
    /// # Errors
    /// fio is missing, fails, or does not end; those of `meanwhile`.
    pub fn verify_during<T>(&self, dir: &Path, meanwhile: impl FnOnce() -> Result<T>) -> Result<(Verified, T)> {
        let backlog = format!("--verify_backlog={VERIFY_EVERY}");
        let entries = format!("--log_entries={LOG_ENTRIES}");
        let log = ["--write_lat_log=bench", "--log_unix_epoch=1", "--disable_slat=1", "--disable_lat=1"];
        // fio says when it begins by the file that the output of this goes to.
        let more = ["--rw=randwrite", &backlog, &entries, "--exec_prerun=true"];
        let mut fio = self.start(dir, &[&more[..], &log].concat())?;
        fio.wait_begun()?;
        let result = meanwhile()?;
        let job = fio.end()?;
        let (written, read) = (number(&job["write"]["total_ios"])?, number(&job["read"]["total_ios"])?);
        ensure!(written == self.pages(), "fio has written {written} pages of {}", self.pages());
        let done = fio.done(&job)?;
        ensure!(read == written || done.errors > 0, "fio has verified {read} pages of {written}");
        let longest_ms = ["write", "read"].map(|side| job[side]["clat_ns"]["max"].as_f64().unwrap_or(0.0) / 1e6);
        let requests = fio.log()?;
        ensure!(requests.len() as u64 >= written, "fio has logged {} requests only", requests.len());
        Ok((Verified { done, longest_ms: longest_ms.into_iter().fold(0.0, f64::max), requests }, result))
    }

    /// Reads and verifies every page.
    ///
    /// # Errors
    /// fio is missing, fails, or does not end.
    pub fn verify_all(&self, dir: &Path) -> Result<Done> {
        let mut fio = self.start(dir, &["--rw=read"])?;
        let job = fio.end()?;
        let read = number(&job["read"]["total_ios"])?;
        ensure!(read == self.pages(), "fio has read {read} pages of {}", self.pages());
        fio.done(&job)
    }

    fn pages(&self) -> u64 {
        self.bytes / PAGE as u64
    }

    fn start(&self, parent: &Path, more: &[&str]) -> Result<Fio> {
        let dir = parent.join("fio");
        let remove = Guard::new(Undo::Directory { path: dir.clone() })?;
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).context("make a directory")?;
        let file = |name: &str| File::create(dir.join(name)).context("make a file for what fio says");
        let mut command = Command::new("fio");
        command
            // One process, which is ended as one.
            .args(["--name=bench", "--thread", "--output-format=json", "--ioengine=nbd"])
            .args([format!("--uri={}", self.uri), format!("--size={}", self.bytes)])
            .args([format!("--bs={PAGE}"), format!("--iodepth={}", self.depth), format!("--randseed={}", self.seed)])
            // It goes on after whatever is wrong, to count all of it.
            .args(["--verify=crc32c", "--verify_state_save=0", "--continue_on_error=all"])
            .args(more)
            .current_dir(&dir)
            .stdin(Stdio::null())
            .stdout(file("report")?)
            .stderr(file("complaints")?);
        die_with_parent(&mut command);
        let child = command.spawn().context("run fio (scripts/install-deps.sh test installs it)")?;
        let pid = child.id();
        let kill = Guard::new(Undo::Process { pid, start_ticks: start_ticks_of(pid).unwrap_or(0) })?;
        Ok(Fio { child, dir, _kill: kill, _remove: remove })
    }
}

impl Verified {
    /// The longest that a request took, of those answered before then.
    pub fn longest_before_ms(&self, then: SystemTime) -> Result<f64> {
        let then = unix_ms(then)?;
        let before = self.requests.iter().filter(|request| request.at_ms < then);
        Ok(before.map(|request| request.took_ms).fold(0.0, f64::max))
    }

    /// Requests a second, from the first to then.
    pub fn per_second_before(&self, then: SystemTime) -> Result<f64> {
        let then = unix_ms(then)?;
        let first = self.requests.iter().map(|request| request.at_ms).min().unwrap_or(then);
        ensure!(first < then, "fio had not begun");
        let count = self.requests.iter().filter(|request| request.at_ms < then).count();
        Ok(count as f64 / (Duration::from_millis(then - first).as_secs_f64()))
    }

    /// When the request was answered that took longest, in seconds after then; negative if it was before.
    pub fn longest_after_s(&self, then: SystemTime) -> Result<f64> {
        let then = unix_ms(then)?;
        let longest = self.requests.iter().max_by(|left, right| left.took_ms.total_cmp(&right.took_ms));
        Ok((longest.context("fio has logged nothing")?.at_ms as f64 - then as f64) / 1e3)
    }

    /// Whether it still wrote then.
    pub fn wrote_after(&self, then: SystemTime) -> Result<bool> {
        let then = unix_ms(then)?;
        Ok(self.requests.iter().any(|request| request.write && request.at_ms > then))
    }
}

impl Fio {
    fn wait_begun(&mut self) -> Result<()> {
        let begun = self.dir.join("bench.prerun.txt");
        let until = Instant::now() + START_MAX;
        while !begun.exists() {
            if self.child.try_wait().context("look after fio")?.is_some() || Instant::now() > until {
                bail!("fio does not begin: {}", self.complaints()?);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Waits for its end, and gives what it says of its one job.
    fn end(&mut self) -> Result<Value> {
        let until = Instant::now() + END_MAX;
        let status = loop {
            if let Some(status) = self.child.try_wait().context("look after fio")? {
                break status;
            }
            if Instant::now() > until {
                bail!("fio has not ended after {END_MAX:?}: {}", self.complaints()?);
            }
            std::thread::sleep(LOOK_EVERY);
        };
        ensure!(status.success(), "fio: {status}: {}", self.complaints()?);
        let said = fs::read_to_string(self.dir.join("report")).context("read what fio says")?;
        let mut report: Value =
            serde_json::from_str(&said[said.find('{').context("fio says nothing")?..]).context("read fio's report")?;
        Ok(report["jobs"][0].take())
    }

    /// fio counts what failed and what was wrong together, and names each block that was wrong.
    fn done(&self, job: &Value) -> Result<Done> {
        let both = number(&job["total_err"])?;
        let complaints = self.complaints()?;
        let wrong = wrong_blocks(&complaints);
        if both > 0 {
            let first: Vec<_> = complaints.lines().take(COMPLAINTS_SHOWN).collect();
            eprintln!("failover: fio counts {both} errors: {}", first.join("\n"));
        }
        Ok(Done { errors: both.saturating_sub(wrong), wrong, ..Done::default() })
    }

    fn complaints(&self) -> Result<String> {
        let bytes = fs::read(self.dir.join("complaints")).context("read fio's errors")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn log(&self) -> Result<Vec<Answered>> {
        let log = fs::read_to_string(self.dir.join("bench_clat.1.log")).context("read fio's log")?;
        log.lines().map(|line| Answered::parse(line).with_context(|| format!("understand fio's log: {line}"))).collect()
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Answered {
    /// When, nanoseconds, 0 for a read and 1 for a write, bytes, where.
    fn parse(line: &str) -> Option<Answered> {
        let mut fields = line.split(',').map(|field| field.trim().parse::<u64>());
        let mut next = || fields.next()?.ok();
        let (at_ms, took_ns, direction) = (next()?, next()?, next()?);
        Some(Answered { at_ms, took_ms: took_ns as f64 / 1e6, write: direction == 1 })
    }
}

/// Said once for each block, whether its header or its checksum is wrong.
fn wrong_blocks(complaints: &str) -> u64 {
    complaints.matches("(requested block: ").count() as u64
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().context("fio says no number")
}

fn unix_ms(time: SystemTime) -> Result<u64> {
    Ok(time.duration_since(SystemTime::UNIX_EPOCH).context("the clock is before 1970")?.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_words_are_understood() {
        let complaints = "crc32c: verify failed at file b.0.0 offset 8192, length 4096 (requested block: offset=8192, length=4096)\n       \
                          Expected CRC: 2318ffbf\n       Received CRC: 1f69365c\n\
                          verify: bad header offset 12288, wanted 20480 at file b.0.0 offset 20480, length 4096 (requested block: \
                          offset=20480, length=4096)\n";
        assert_eq!(wrong_blocks(complaints), 2);
        let answered = Answered::parse("1795641561077, 70555, 1, 4096, 0").unwrap();
        assert!(answered.at_ms == 1_795_641_561_077 && answered.write && (0.07..0.08).contains(&answered.took_ms));
        assert!(Answered::parse("fio").is_none());
    }
}
