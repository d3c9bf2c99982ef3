//! What outlives the process that serves, and what the keeper knows of that process.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_outbox::Ino;
use pagoda_outbox::limits::NODES_MAX;
use pagoda_sys::process::Child;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::line::{Line, Told};
use super::message::receive;
use crate::inflight::Table;
use crate::left::Left;

/// Memories that a worker may have kept: those of files, and of some that went a moment ago.
const KEPT_MAX: usize = NODES_MAX + 1024;
/// So long is waited for requests of a ring that stops; QEMU stands still meanwhile. Almost all of them end within a few milliseconds. A write that
/// waits for room does not, and a page that comes from a slow disk may not.
const SETTLE_MAX: Duration = Duration::from_millis(100);
/// How often it is looked whether they have ended.
const LOOK_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

/// Memory that outlives the processes that serve.
#[derive(Debug)]
pub struct Kept {
    pub memory: HashMap<Ino, OwnedFd>,
    pub journal: [File; 2],
    pub table_file: File,
    /// `None` in a process that is to have no part in it.
    pub table: Option<Table>,
}

#[derive(Debug)]
pub struct Worker {
    pub child: Child,
    pub line: Line,
    /// `None`: QEMU has gone, and it knows.
    pub vhost: Option<UnixStream>,
    pub began: Instant,
    /// Rings that are woken when it has answered a question of ours, each: by then it has heard what was said before.
    pub woken: VecDeque<usize>,
    /// The keeper has ended it, over no request.
    pub is_stopped: bool,
}

impl Kept {
    pub fn table(&self) -> &Table {
        self.table.as_ref().expect("the keeper has it mapped")
    }

    /// For a worker, in its own process.
    pub fn leave(&mut self, line: Line) -> io::Result<(Left, Table)> {
        let memory = self.memory.drain().map(|(ino, memory)| (ino, File::from(memory))).collect();
        let [first, second] = &self.journal;
        let journal = [first.try_clone()?, second.try_clone()?];
        Ok((Left { journal, memory, line }, Table::map(self.table_file.try_clone()?)?))
    }

    /// Takes in what the worker has said of files' memory. Whether there may be more.
    pub fn hear(&mut self, worker: &Worker) -> Result<bool> {
        match worker.line.hear().context("hear the process that serves")? {
            Told::Keep(ino, memory) => {
                if self.memory.len() >= KEPT_MAX {
                    // None of ours asks for so much.
                    worker.child.kill();
                }
                self.memory.insert(ino, memory);
            }
            Told::Forget(ino) => drop(self.memory.remove(&ino)),
            Told::Ended => return Ok(false),
        }
        Ok(true)
    }

    /// Until an answer that QEMU has had already was given again. Meanwhile files' memory is heard of. Whether it came.
    pub fn wait_answer(&mut self, worker: &Worker, vhost: &UnixStream) -> Result<bool> {
        loop {
            let mut polled = [PollFd::new(vhost, PollFlags::IN), PollFd::new(&worker.line, PollFlags::IN)];
            rustix::io::retry_on_intr(|| poll(&mut polled, None)).context("wait for the process that serves")?;
            let [answered, told] = polled.map(|fd| !fd.revents().is_empty());
            if told && !self.hear(worker)? {
                return Ok(false);
            }
            if answered {
                return Ok(matches!(receive(vhost), Ok(Some(_))));
            }
        }
    }

    /// Returns when nothing more is written for a ring out of which nothing is taken any more. The worker may have ended then.
    ///
    /// # Errors
    /// It is not known that it is so.
    pub fn settle(&mut self, worker: &mut Worker, ring: usize) -> Result<()> {
        let began = Instant::now();
        while self.table().is_busy(ring) {
            if began.elapsed() >= SETTLE_MAX {
                return worker.end_now();
            }
            let ends = worker.child.pidfd();
            let mut polled = [PollFd::new(&ends, PollFlags::IN), PollFd::new(&worker.line, PollFlags::IN)];
            rustix::io::retry_on_intr(|| poll(&mut polled, Some(&LOOK_INTERVAL))).context("wait for requests")?;
            let [ended, told] = polled.map(|fd| !fd.revents().is_empty());
            if ended {
                return Ok(());
            }
            // A request may wait until the memory of its file is kept.
            if told && !self.hear(worker)? {
                return worker.end_now();
            }
        }
        Ok(())
    }
}

impl Worker {
    /// Ends it, and returns when it has ended.
    ///
    /// # Errors
    /// It is not known whether it has.
    pub fn end_now(&mut self) -> Result<()> {
        self.child.kill();
        // Readable when the last of its threads has let go of its memory (pidfd_open(2)).
        let ends = self.child.pidfd();
        rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&ends, PollFlags::IN)], None))
            .context("wait for the end of the process that serves")?;
        self.is_stopped = true;
        Ok(())
    }
}
