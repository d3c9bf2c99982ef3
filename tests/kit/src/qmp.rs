//! A monitor of a QEMU for who tests or measures it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

const CONNECT_MAX: Duration = Duration::from_secs(300);
/// How long it waits before it tries again to connect.
const CONNECT_PAUSE: Duration = Duration::from_millis(2);
/// QEMU answers `stop` when its vCPUs stand still, and one of them may wait for a page on a slow disk.
const ANSWER_MAX: Duration = Duration::from_secs(300);

/// A QMP session with one QEMU, from the greeting on.
#[derive(Debug)]
pub struct Qmp {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects and leaves the negotiation mode.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn connect(path: &Path) -> Result<Self> {
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(_) if start.elapsed() < CONNECT_MAX => std::thread::sleep(CONNECT_PAUSE),
                Err(error) => return Err(error).with_context(|| format!("QEMU's monitor {}", path.display())),
            }
        };
        stream.set_read_timeout(Some(ANSWER_MAX)).context("set a time-out")?;
        let writer = stream.try_clone().context("duplicate the monitor")?;
        let mut qmp = Self { writer, reader: BufReader::new(stream), events: Vec::new() };
        ensure!(qmp.line()?.get("QMP").is_some(), "the monitor does not speak QMP");
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and gives its answer.
    ///
    /// # Errors
    /// QEMU refuses it, or does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        // In one piece: QEMU obeys a `quit` before the end of its line has come, and a second write would fail.
        let request = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.writer.write_all(request.as_bytes()).context("write to the monitor")?;
        loop {
            let mut line = self.line().with_context(|| format!("wait for the answer to {command}"))?;
            if let Some(error) = line.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if let Some(answer) = line.get_mut("return") {
                return Ok(answer.take());
            }
            self.events.push(line);
        }
    }

    /// The word of `query-status`: `running`, `paused`, ...
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn status(&mut self) -> Result<String> {
        let answer = self.execute("query-status", json!({}))?;
        Ok(answer["status"].as_str().context("a status")?.to_owned())
    }

    /// Waits for an event for which `is_wanted`; those before it are forgotten.
    ///
    /// # Errors
    /// QEMU says nothing for a long time.
    pub fn wait_event(&mut self, is_wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        loop {
            if let Some(at) = self.events.iter().position(&is_wanted) {
                return Ok(self.events.drain(..=at).next_back().unwrap_or_default());
            }
            let line = self.line().context("wait for an event")?;
            self.events.push(line);
        }
    }

    /// An event for which `is_wanted` that has come already.
    pub fn seen(&mut self, is_wanted: impl Fn(&Value) -> bool) -> Option<Value> {
        let at = self.events.iter().position(is_wanted)?;
        Some(self.events.remove(at))
    }

    fn line(&mut self) -> Result<Value> {
        let mut text = String::new();
        ensure!(self.reader.read_line(&mut text).context("read from the monitor")? > 0, "QEMU closed the monitor");
        serde_json::from_str(&text).with_context(|| format!("understand {text:?}"))
    }
}
