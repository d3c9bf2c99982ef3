//! The control connection to the process of an outbox: one packet there, one back.
//!
//! Nothing here waits for longer than [`ANSWER_WAIT`], whatever the process does: it may accept nothing, say nothing, say
//! something else, or all at once. Of whatever comes but the answer the connection is closed, and made anew when it is asked
//! next, so nothing is taken for the answer to another question. Descriptors that come along are closed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_abi::attach::{JOBS_MAX, List, OutboxCounts, OutboxFigures, OutboxJob, Packet};
use pagoda_sys::socket::{Connection, Received};
use rustix::event::{PollFd, PollFlags};

use crate::qmp::poll::poll;

/// How long an answer is waited for.
pub const ANSWER_WAIT: Duration = Duration::from_secs(1);

/// The connection to one outbox's process, made when it is needed.
#[derive(Debug)]
pub struct Line {
    path: PathBuf,
    connection: Option<Connection>,
    seq: u64,
}

impl Line {
    /// To the process that listens there; nothing is connected yet.
    pub fn new(path: &Path) -> Line {
        Line { path: path.to_owned(), connection: None, seq: 0 }
    }

    pub fn hang_up(&mut self) {
        self.connection = None;
    }

    /// Asks, and gives the answer, of which nothing but its form is checked.
    ///
    /// # Errors
    /// No connection, no answer in time, or something else.
    pub fn ask(&mut self, question: impl Fn(u64) -> Packet) -> Result<OutboxFigures> {
        match self.exchange(question)? {
            Packet::Figures { figures, .. } => Ok(figures),
            _ => self.unexpected(),
        }
    }

    /// The same for the jobs behind the one with the number `after`.
    ///
    /// # Errors
    /// As [`Line::ask`]; an older process does not know the question, and breaks the connection.
    pub fn ask_jobs(&mut self, after: u64) -> Result<(OutboxCounts, List<OutboxJob, JOBS_MAX>)> {
        match self.exchange(|seq| Packet::Jobs { seq, after })? {
            Packet::JobsEnded { counts, jobs, .. } => Ok((counts, jobs)),
            _ => self.unexpected(),
        }
    }

    fn unexpected<T>(&mut self) -> Result<T> {
        self.hang_up();
        bail!("it answers something else")
    }

    fn exchange(&mut self, question: impl Fn(u64) -> Packet) -> Result<Packet> {
        let connection = match self.connection.take() {
            // It was asked nothing, so what is there is the end: it has closed a connection that was silent for long.
            Some(connection) if !connection.is_readable() => connection,
            Some(_) | None => Connection::connect_at_once(&self.path).context("connect to it")?,
        };
        self.seq += 1;
        let answer = ask_on(&connection, &question(self.seq), self.seq)?;
        self.connection = Some(connection);
        Ok(answer)
    }
}

fn ask_on(connection: &Connection, question: &Packet, seq: u64) -> Result<Packet> {
    let deadline = Instant::now() + ANSWER_WAIT;
    connection.send(question, &[]).context("ask it")?;
    loop {
        match connection.recv().context("hear its answer")? {
            Received::Message {
                packet: packet @ (Packet::Figures { seq: answered, .. } | Packet::JobsEnded { seq: answered, .. }),
                fds,
            } => {
                ensure!(answered == seq && fds.is_empty(), "it answers what it was not asked");
                return Ok(packet);
            }
            Received::Message { packet: Packet::Refused { text }, .. } => {
                let text: String = text.as_str().chars().filter(|character| !character.is_control()).collect();
                bail!("it refuses: {text}");
            }
            Received::Message { .. } => bail!("it answers something else"),
            Received::Closed => bail!("it has closed the connection"),
            Received::Nothing => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "no answer within {} s", ANSWER_WAIT.as_secs());
        match poll(&mut [PollFd::new(connection, PollFlags::IN)], left) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => bail!("wait for its answer: {error}"),
        }
    }
}
