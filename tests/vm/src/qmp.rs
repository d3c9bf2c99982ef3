//! The test's own monitor of a QEMU.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::wait;

const CONNECT_MAX: Duration = crate::wait::HANG;
/// QEMU answers `stop` when its vCPUs stand still, and one of them may wait for a page on a slow disk.
const ANSWER_MAX: Duration = crate::wait::HANG;

/// A QMP session.
#[derive(Debug)]
pub struct Qmp {
    writer: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects and leaves the negotiation mode.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn connect(path: &Path) -> Result<Self> {
        let stream = wait::until("QEMU's monitor", CONNECT_MAX, || Ok(UnixStream::connect(path).ok()))?;
        stream.set_read_timeout(Some(ANSWER_MAX)).context("set a time-out")?;
        let writer = stream.try_clone().context("duplicate the monitor")?;
        let mut qmp = Self { writer, reader: BufReader::new(stream) };
        ensure!(qmp.line()?.get("QMP").is_some(), "the monitor does not speak QMP");
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Executes a command and gives its answer.
    ///
    /// # Errors
    /// QEMU refuses it, or does not answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.writer, "{request}").context("write to the monitor")?;
        loop {
            let mut line = self.line().with_context(|| format!("wait for the answer to {command}"))?;
            if let Some(error) = line.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if let Some(answer) = line.get_mut("return") {
                return Ok(answer.take());
            }
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

    fn line(&mut self) -> Result<Value> {
        let mut text = String::new();
        ensure!(self.reader.read_line(&mut text).context("read from the monitor")? > 0, "QEMU closed the monitor");
        serde_json::from_str(&text).with_context(|| format!("understand {text:?}"))
    }
}
