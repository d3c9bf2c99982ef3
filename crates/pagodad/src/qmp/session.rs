//! One connection to a monitor: greeting, commands, and the events in between.

use std::io::{BufRead, BufReader, ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};

use super::events::Events;
use super::poll::poll;

/// How long an answer is waited for, and one read or write within it.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// Lines read for one answer: events may come in between, and QEMU is not trusted to ever stop.
const LINES_MAX: usize = 1000;
/// The most bytes of one line from QEMU.
const LINE_MAX: usize = 1 << 20;

/// QEMU understood the command and does not execute it.
#[derive(Debug, thiserror::Error)]
#[error("{desc}")]
pub struct Refused {
    /// QMP's class of the error, such as `DeviceNotActive`.
    pub class: String,
    /// QEMU's sentence about what is wrong.
    pub desc: String,
}

/// A connection that has left the negotiation, and takes commands.
#[derive(Debug)]
pub struct Session {
    stream: Arc<UnixStream>,
    reader: BufReader<UnixStream>,
}

impl Session {
    /// Connects and leaves the negotiation mode.
    pub fn connect(path: &Path, events: &mut Events) -> Result<Session> {
        let stream = UnixStream::connect(path).with_context(|| format!("connect to the monitor {}", path.display()))?;
        stream.set_read_timeout(Some(ANSWER_WAIT))?;
        stream.set_write_timeout(Some(ANSWER_WAIT))?;
        let reader = BufReader::new(stream.try_clone()?);
        let mut session = Session { stream: Arc::new(stream), reader };
        if session.read_line()?.get("QMP").is_none() {
            bail!("the monitor did not greet as QMP");
        }
        session.execute("qmp_capabilities", json!({}), events)?;
        Ok(session)
    }

    pub fn stream(&self) -> &Arc<UnixStream> {
        &self.stream
    }

    pub fn execute(&mut self, command: &str, arguments: Value, events: &mut Events) -> Result<Value> {
        // In one piece: QEMU's monitor has a thread that wakes for each.
        let request = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        (&*self.stream).write_all(request.as_bytes()).context("write to the monitor")?;
        self.answer(events).with_context(|| format!("execute {command}"))
    }

    /// The same for a command that takes a descriptor, which goes with its first byte.
    pub fn execute_with_fd(
        &mut self,
        command: &str,
        arguments: Value,
        fd: BorrowedFd<'_>,
        events: &mut Events,
    ) -> Result<Value> {
        let request = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        let (bytes, fds) = (request.as_bytes(), [fd]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        ensure!(control.push(SendAncillaryMessage::ScmRights(&fds)), "no room for a descriptor");
        let sent = rustix::net::sendmsg(&*self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
        let rest = bytes.get(sent.context("write to the monitor")?..).unwrap_or_default();
        (&*self.stream).write_all(rest).context("write to the monitor")?;
        self.answer(events).with_context(|| format!("execute {command}"))
    }

    fn answer(&mut self, events: &mut Events) -> Result<Value> {
        let asked = Instant::now();
        for _ in 0..LINES_MAX {
            let mut line = self.read_line()?;
            if let Some(value) = line.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = line.get("error") {
                let text = |key| error.get(key).and_then(Value::as_str).unwrap_or("unknown").to_owned();
                return Err(Refused { class: text("class"), desc: text("desc") }.into());
            }
            events.note(&line);
            ensure!(asked.elapsed() < ANSWER_WAIT, "no answer within {} s", ANSWER_WAIT.as_secs());
        }
        bail!("only events, no answer")
    }

    /// Takes in what has come without being asked for.
    pub fn read_events(&mut self, events: &mut Events) -> Result<()> {
        for _ in 0..LINES_MAX {
            if self.reader.buffer().is_empty() && !self.is_readable()? {
                break;
            }
            let line = self.read_line()?;
            events.note(&line);
        }
        Ok(())
    }

    fn is_readable(&self) -> Result<bool> {
        Ok(poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Duration::ZERO)? > 0)
    }

    /// Reads one line, however many pieces it comes in.
    fn read_line(&mut self) -> Result<Value> {
        let (began, mut line) = (Instant::now(), Vec::new());
        loop {
            let piece = match self.reader.fill_buf() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                piece => piece.context("read from the monitor")?,
            };
            ensure!(!piece.is_empty(), "the monitor was closed");
            let end = piece.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(piece.len(), |at| at + 1);
            line.extend_from_slice(&piece[..taken]);
            self.reader.consume(taken);
            ensure!(line.len() <= LINE_MAX, "a line of more than {LINE_MAX} bytes");
            if end.is_some() {
                return serde_json::from_slice(&line).context("parse the monitor's answer");
            }
            ensure!(began.elapsed() < ANSWER_WAIT, "half a line, and no more within {} s", ANSWER_WAIT.as_secs());
        }
    }
}
