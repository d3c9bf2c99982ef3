//! Disks of a VM that leaves: its QEMU copies each to the QEMU that waits at the destination, while the guest runs.
//!
//! | step | QEMU here | the guest |
//! |---|---|---|
//! | 1 | gets a node for each disk there: NBD through a socket without a name, which this daemon carries in a stream of the move | runs |
//! | 2 | a mirror job for each disk copies all of it (blockdev-mirror, sync=full), and what is written meanwhile | runs |
//! | 3 | all jobs are ready: what is written is copied again and again. The rounds of pages begin | runs |
//! | 4 | the guest stands still; each job is ended without a change of nodes (block-job-cancel), which writes and flushes the rest | stands |
//! | 5 | the nodes go, and only then the device state is saved | stands |
//!
//! A thread does all of that and nobody else. The guest's own disk is the one here all the time: a job that fails, or is ended, changes
//! nothing for the guest. What an earlier daemon has left of it goes by [`clear`].

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::in_full;
use pagoda_core::units::Bytes;
use pagoda_link::Link;
use pagoda_move::units::{AttemptId, Rate};
use rustix::event::PollFlags;
use serde_json::{Value, json};

use super::input::Input;
use super::line::Called;
use super::progress::Copied;
use crate::disks::CopiedDisk;
use crate::moves::channel::disk::Carried;
use crate::moves::channel::{self, DiskOf};
use crate::moves::destination::exports::export_name;
use crate::moves::nameless::{self, path_of};
use crate::qmp::poll::wait_until;
use crate::qmp::{Held, Monitor};

/// What names of jobs and nodes begin with.
const JOB: &str = "pagoda-move-job-";
const NODE: &str = "pagoda-move-disk-";
/// Between two looks at jobs, and at jobs that are about to end.
const LOOK: Duration = Duration::from_millis(100);
const LOOK_CLOSER: Duration = Duration::from_millis(5);
/// How long QEMU may take to connect.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long a job may take to end that was told to.
const END_MAX: Duration = Duration::from_secs(10);

enum Ask {
    /// The guest stands still: the rest is copied, until then at the latest.
    Complete(Instant, Sender<Result<()>>),
    End,
}

/// See the module. When this is dropped, what QEMU has of it goes.
#[derive(Debug)]
pub struct Mirror {
    asks: Sender<Ask>,
    seen: Arc<Mutex<Copied>>,
    streams: Arc<Streams>,
    thread: Option<JoinHandle<()>>,
}

/// What completes a mirror, from another thread.
#[derive(Clone, Debug)]
pub struct Completer(Sender<Ask>);

impl Completer {
    /// Copies what is left of a guest that stands still.
    ///
    /// # Errors
    /// The disks are not there.
    pub fn complete(&self, deadline: Instant) -> Result<()> {
        let (asker, answer) = channel();
        let gone = "nobody copies its disks any more";
        self.0.send(Ask::Complete(deadline, asker)).ok().context(gone)?;
        answer.recv().ok().context(gone)?
    }
}

impl Mirror {
    /// Begins to copy. An input says when all is there, or that it has failed.
    ///
    /// # Errors
    /// No thread can be had.
    ///
    /// `dir`: where a socket may be made, which nobody else reaches.
    pub fn begin(
        (qmp, pid): (&Arc<Monitor>, u32),
        dir: &Path,
        called: &Called,
        attempt: AttemptId,
        disks: &[CopiedDisk],
        speed: Option<Rate>,
        inputs: &Sender<Input>,
    ) -> std::io::Result<Mirror> {
        let (asks, asked) = channel();
        let (seen, streams) = (Arc::default(), Arc::<Streams>::default());
        let worker = Worker {
            qmp: Arc::clone(qmp),
            pid,
            dir: dir.to_owned(),
            called: called.clone(),
            attempt,
            disks: disks.to_vec(),
            speed: speed.map(|speed| (speed.0 / disks.len().max(1) as u64).max(1)),
            asked,
            inputs: inputs.clone(),
            seen: Arc::clone(&seen),
            streams: Arc::clone(&streams),
        };
        let thread = thread::Builder::new().name("move-disks".into()).spawn(move || worker.run())?;
        Ok(Mirror { asks, seen, streams, thread: Some(thread) })
    }

    /// Nothing more is copied. A QEMU that waits for the other host waits no more.
    pub fn cut(&self) {
        self.streams.cut();
    }

    pub fn completer(&self) -> Completer {
        Completer(self.asks.clone())
    }

    pub fn copied(&self) -> Copied {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.cut();
        let _ = self.asks.send(Ask::End);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Worker {
    qmp: Arc<Monitor>,
    pid: u32,
    dir: PathBuf,
    called: Called,
    attempt: AttemptId,
    disks: Vec<CopiedDisk>,
    /// The most at which each disk is copied, in bytes a second; `None`: no limit.
    speed: Option<u64>,
    asked: Receiver<Ask>,
    inputs: Sender<Input>,
    seen: Arc<Mutex<Copied>>,
    streams: Arc<Streams>,
}

/// The streams of all disks.
#[derive(Debug, Default)]
struct Streams(Mutex<Carrying>);

#[derive(Debug, Default)]
struct Carrying {
    has_ended: bool,
    all: Vec<Carried>,
}

impl Streams {
    fn push(&self, stream: Carried) -> Result<()> {
        let mut carrying = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(!carrying.has_ended, "it is given up");
        carrying.all.push(stream);
        Ok(())
    }

    /// Ends them, and those to come.
    fn cut(&self) {
        let mut carrying = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        carrying.has_ended = true;
        carrying.all.clear();
    }
}

impl Worker {
    fn run(self) {
        let qmp = Arc::clone(&self.qmp);
        let monitor = Held::new(&*qmp);
        let begun = self.start(&monitor);
        let mut is_followed = begun.is_ok();
        if let Err(error) = begun {
            self.fail(&error);
        }
        let mut is_ready = false;
        loop {
            match self.asked.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) if is_followed => match self.look(&monitor) {
                    Ok(true) if !is_ready => {
                        is_ready = true;
                        let _ = self.inputs.send(Input::Disks(Ok(())));
                    }
                    Ok(_) => {}
                    Err(error) => {
                        is_followed = false;
                        self.fail(&error);
                    }
                },
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Ask::Complete(deadline, asker)) => {
                    let done = match is_ready && is_followed {
                        true => self.complete(&monitor, deadline),
                        false => Err(anyhow::anyhow!("its disks are not copied")),
                    };
                    is_followed = false;
                    self.cut();
                    let _ = asker.send(done);
                }
                Ok(Ask::End) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.cut();
        if let Err(error) = clear(&monitor) {
            tracing::warn!(vm = %self.called.vm, "what was left of copying its disks: {}", in_full(error.as_ref()));
        }
    }

    /// Without its stream QEMU has nothing in flight that the other host could keep, and waits for nothing of it.
    fn cut(&self) {
        self.streams.cut();
    }

    fn fail(&self, error: &anyhow::Error) {
        self.cut();
        let _ = self.inputs.send(Input::Disks(Err(in_full(error.as_ref()))));
    }

    fn start(&self, monitor: &Monitor) -> Result<()> {
        clear(monitor)?;
        let host = self.called.host()?.context("its destination is not trusted any more")?;
        for (disk, of) in self.disks.iter().enumerate() {
            let context = || format!("copy the disk {}", of.image.file);
            let stream = DiskOf { attempt: self.attempt, disk: u16::try_from(disk).context("the number of disks")? };
            let link = channel::connect_disk(&self.called.own, &host, stream).with_context(context)?;
            self.add_node(monitor, disk, link).with_context(context)?;
            self.add_job(monitor, disk, of).with_context(context)?;
        }
        Ok(())
    }

    /// QEMU connects once, and is let in once: a QEMU that tries again finds nobody, and its job fails.
    fn add_node(&self, monitor: &Monitor, disk: usize, link: Link) -> Result<()> {
        let (listener, socket) = nameless::listen(&self.dir, &format!("{:016x}.{disk}.disk", self.attempt.0))?;
        let added = monitor.execute_with_fd("add-fd", json!({}), socket.as_fd())?;
        let number =
            |field: &str| added.get(field).and_then(Value::as_i64).with_context(|| format!("{field} of add-fd"));
        let (set, fd) = (number("fdset-id")?, number("fd")?);
        let path = path_of(i32::try_from(fd).context("a descriptor of QEMU's")?);
        let target = json!({
            "driver": "nbd", "node-name": format!("{NODE}{disk}"), "export": export_name(disk),
            "server": { "type": "unix", "path": path },
            // Zeros need no room where that is up to QEMU.
            "discard": "unmap",
        });
        let (streams, pid) = (&*self.streams, self.pid);
        let done = thread::scope(|scope| {
            let carrying = scope.spawn(move || streams.push(Carried::begin(link, accept(&listener, pid)?)?));
            let added = monitor.execute_with("blockdev-add", target).map(drop);
            if added.is_err() {
                self.cut();
            }
            carrying.join().unwrap_or_else(|_| bail!("a thread of this daemon panicked")).and(added)
        });
        monitor.execute_with("remove-fd", json!({ "fdset-id": set }))?;
        done
    }

    fn add_job(&self, monitor: &Monitor, disk: usize, of: &CopiedDisk) -> Result<()> {
        let (node, job) = (format!("{NODE}{disk}"), format!("{JOB}{disk}"));
        // It stays until it is dismissed, so that nobody takes one that has failed for one that has ended well. An error pauses it,
        // and [`clear`] ends it. If it ended by itself while QEMU stops the guest, QEMU 7.2 would leave its filter over the disk for
        // good, and nothing could copy the disk any more (measured: QEMU 7.2.22, 2026-11-30).
        let mut mirror = json!({
            "job-id": job, "device": of.node(), "target": node, "sync": "full", "auto-dismiss": false,
            "on-source-error": "stop", "on-target-error": "stop",
        });
        if let Some(speed) = self.speed {
            mirror["speed"] = json!(speed);
        }
        monitor.execute_with("blockdev-mirror", mirror).map(drop)
    }

    /// Whether all jobs are ready.
    fn look(&self, monitor: &Monitor) -> Result<bool> {
        let jobs = jobs(monitor)?;
        ensure!(jobs.len() == self.disks.len(), "somebody else has ended the copy of a disk");
        let failed = jobs.iter().find_map(|job| job.why_ended(&self.disks));
        if let Some(why) = failed {
            bail!(why);
        }
        self.show(&jobs);
        Ok(jobs.iter().all(Job::is_ready))
    }

    fn show(&self, jobs: &[Job]) {
        let sum = |of: fn(&Job) -> u64| Bytes(jobs.iter().map(of).fold(0, u64::saturating_add));
        let copied = Copied { done: sum(|job| job.done), total: sum(|job| job.total) };
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = copied;
    }

    fn complete(&self, monitor: &Monitor, deadline: Instant) -> Result<()> {
        ensure!(self.look(monitor)?, "a disk is not ready any more");
        for disk in 0..self.disks.len() {
            let job = format!("{JOB}{disk}");
            // For what is left there is no limit.
            if self.speed.is_some() {
                monitor.execute_with("block-job-set-speed", json!({ "device": job, "speed": 0 }))?;
            }
            // One that is ready ends well, with all that was written at its target.
            monitor.execute_with("block-job-cancel", json!({ "device": job, "force": false }))?;
        }
        loop {
            let jobs = jobs(monitor)?;
            ensure!(jobs.len() == self.disks.len(), "somebody else has ended the copy of a disk");
            self.show(&jobs);
            if let Some(why) = jobs.iter().find_map(|job| job.error.clone()) {
                bail!("the last of a disk was not copied: {why}");
            }
            if jobs.iter().all(|job| job.status == "concluded") {
                break;
            }
            ensure!(Instant::now() < deadline, "the last of its disks was not copied in time");
            thread::sleep(LOOK_CLOSER);
        }
        clear(monitor)
    }
}

/// The one connection of this process.
fn accept(listener: &UnixListener, pid: u32) -> Result<UnixStream> {
    let deadline = Instant::now() + CONNECT_MAX;
    wait_until(listener, PollFlags::IN, deadline).context("wait for QEMU to connect")?;
    let (stream, _) = listener.accept().context("let QEMU in")?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).context("look who has connected")?.pid;
    ensure!(peer.as_raw_nonzero().get().cast_unsigned() == pid, "another process than QEMU has connected");
    Ok(stream)
}

/// A mirror job of QEMU's that a move has begun.
#[derive(Clone, Debug)]
struct Job {
    name: String,
    status: String,
    /// Why it has failed, or stands still.
    error: Option<String>,
    done: u64,
    total: u64,
}

impl Job {
    /// One of `query-block-jobs`, if it is ours.
    fn of(said: &Value) -> Option<Job> {
        let text = |field: &str| Some(said.get(field)?.as_str()?.to_owned());
        let number = |field: &str| said.get(field).and_then(Value::as_u64).unwrap_or(0);
        let name = text("device").filter(|id| id.starts_with(JOB))?;
        let paused_by = match said.get("io-status").and_then(Value::as_str) {
            None | Some("ok") => None,
            Some("nospace") => Some("No space left on device".to_owned()),
            Some(_) => Some("Input/output error".to_owned()),
        };
        let (done, total, error) = (number("offset"), number("len"), text("error").or(paused_by));
        Some(Job { name, status: text("status").unwrap_or_default(), error, done, total })
    }

    /// What is written is copied at once. QEMU pauses such a job now and then, which it calls `standby`.
    fn is_ready(&self) -> bool {
        matches!(self.status.as_str(), "ready" | "standby")
    }

    /// Why one has ended that nobody has ended.
    fn why_ended(&self, disks: &[CopiedDisk]) -> Option<String> {
        let is_under_way = matches!(self.status.as_str(), "created" | "running" | "paused") || self.is_ready();
        if is_under_way && self.error.is_none() {
            return None;
        }
        let disk = self.name.strip_prefix(JOB).and_then(|disk| disks.get(disk.parse::<usize>().ok()?));
        let file = disk.map_or("a disk", |disk| disk.image.file.as_str());
        let why = self.error.as_deref().unwrap_or("it was ended");
        Some(format!("copy {file}: {why}"))
    }
}

fn jobs(monitor: &Monitor) -> Result<Vec<Job>> {
    let answer = monitor.execute("query-block-jobs")?;
    let all = answer.as_array().context("the list of jobs")?;
    Ok(all.iter().filter_map(Job::of).collect())
}

/// Ends all of it that QEMU has. The guest notices nothing. May be called again, and for a VM that has nothing of it.
///
/// # Errors
/// QEMU's: to be called again.
pub fn clear(monitor: &Monitor) -> Result<()> {
    let deadline = Instant::now() + END_MAX;
    loop {
        let jobs = jobs(monitor)?;
        for job in &jobs {
            let ended = match job.status.as_str() {
                "concluded" => monitor.execute_with("job-dismiss", json!({ "id": job.name })),
                // Until it has taken effect, it may be said again.
                _ => monitor.execute_with("block-job-cancel", json!({ "device": job.name, "force": true })),
            };
            if let Err(error) = ended {
                tracing::debug!("end a job: {}", in_full(error.as_ref()));
            }
        }
        if jobs.is_empty() {
            break;
        }
        ensure!(Instant::now() < deadline, "jobs that copy disks do not end");
        thread::sleep(LOOK_CLOSER);
    }
    let answer = monitor.execute_with("query-named-block-nodes", json!({ "flat": true }))?;
    let nodes = answer.as_array().context("the list of block nodes")?;
    let name = |node: &Value| Some(node.get("node-name")?.as_str()?.to_owned());
    for node in nodes.iter().filter_map(name).filter(|name| name.starts_with(NODE)) {
        monitor.execute_with("blockdev-del", json!({ "node-name": node }))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_ends_by_itself_has_failed() {
        let job = |status: &str, error: Option<&str>| Job {
            name: format!("{JOB}0"),
            status: status.to_owned(),
            error: error.map(str::to_owned),
            done: 0,
            total: 1,
        };
        for status in ["created", "running", "paused", "ready", "standby"] {
            assert_eq!(job(status, None).why_ended(&[]), None, "{status}");
        }
        for status in ["aborting", "concluded", "null", "waiting", "pending", "new"] {
            assert!(job(status, None).why_ended(&[]).unwrap().contains("it was ended"), "{status}");
        }
        assert_eq!(job("concluded", Some("full")).why_ended(&[]).unwrap(), "copy a disk: full");
        assert!(job("ready", None).is_ready() && job("standby", None).is_ready() && !job("running", None).is_ready());
    }

    #[test]
    fn a_job_that_an_error_has_paused_has_failed() {
        let why = |status: &str, io: &str| {
            let said = json!({ "device": format!("{JOB}0"), "status": status, "io-status": io, "offset": 1, "len": 2 });
            let job = Job::of(&said).unwrap();
            assert_eq!((job.done, job.total), (1, 2));
            job.why_ended(&[])
        };
        assert_eq!(why("standby", "ok"), None);
        assert_eq!(why("standby", "failed").unwrap(), "copy a disk: Input/output error");
        assert_eq!(why("paused", "nospace").unwrap(), "copy a disk: No space left on device");
        assert!(Job::of(&json!({ "device": "somebody's", "status": "ready" })).is_none());
    }
}
