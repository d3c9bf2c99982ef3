//! One connection to a monitor: greeting, commands, and the events in between.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde_json::{Value, json};

use super::events::Events;

/// How long an answer is waited for.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// Lines read for one answer: events may come in between, and QEMU is not trusted to ever stop.
const LINES_MAX: usize = 1000;
/// Longest line.
const LINE_MAX: u64 = 1 << 20;

/// QEMU understood the command and does not execute it.
#[derive(Debug, thiserror::Error)]
#[error("{desc}")]
pub struct Refused {
    /// QMP's class of the error, such as `DeviceNotActive`.
    pub class: String,
    /// QEMU's sentence.
    pub desc: String,
}

/// See the module.
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
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(&*self.stream, "{request}").context("write to the monitor")?;
        self.answer(events).with_context(|| format!("execute {command}"))
    }

    fn answer(&mut self, events: &mut Events) -> Result<Value> {
        for _ in 0..LINES_MAX {
            let mut line = self.read_line()?;
            if let Some(value) = line.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = line.get("error") {
                let text = |key| error.get(key).and_then(Value::as_str).unwrap_or("unknown").to_owned();
                return Err(Refused { class: text("class"), desc: text("desc") }.into());
            }
            note(&line, events);
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
            note(&line, events);
        }
        Ok(())
    }

    fn is_readable(&self) -> Result<bool> {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(rustix::event::poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&now))? > 0)
    }

    fn read_line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if std::io::Read::take(&mut self.reader, LINE_MAX).read_line(&mut line).context("read from the monitor")? == 0 {
            bail!("the monitor was closed");
        }
        serde_json::from_str(&line).context("parse the monitor's answer")
    }
}

fn note(line: &Value, events: &mut Events) {
    match line.get("event").and_then(Value::as_str) {
        Some("RESET") => {
            events.resets += 1;
            events.shutdown = None;
        }
        Some("SHUTDOWN") => events.shutdown = Some(Instant::now()),
        Some("BALLOON_CHANGE") => events.balloon_changes += 1,
        _ => {}
    }
}
