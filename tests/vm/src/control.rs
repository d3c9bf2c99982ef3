//! The guest's second serial port: commands in, lines and one reply out.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_guest::lines::Line;

use crate::console::Console;
use crate::wait;

/// QEMU makes the socket within its first milliseconds.
const CONNECT_MAX: Duration = Duration::from_secs(300);

/// Gives a guest commands, and reads its replies.
#[derive(Debug)]
pub struct Control {
    port: UnixStream,
    lines: Console,
    at: usize,
    deadline: Instant,
}

impl Control {
    /// Connects and waits until the guest is ready.
    ///
    /// # Errors
    /// No socket, or no guest before the deadline.
    pub fn connect(path: &Path, deadline: Instant) -> Result<Self> {
        let mut control = Self::of_restored(path, deadline)?;
        control.wait_ready()?;
        Ok(control)
    }

    /// Connects to a guest that was made of a snapshot: it was ready before that was taken.
    ///
    /// # Errors
    /// No socket.
    pub fn of_restored(path: &Path, deadline: Instant) -> Result<Self> {
        let port = wait::until("the control port", CONNECT_MAX, || Ok(UnixStream::connect(path).ok()))?;
        let lines = Console::default();
        lines.collect(port.try_clone().context("duplicate the port")?, "");
        Ok(Self { port, lines, at: 0, deadline })
    }

    /// Waits until the guest is ready, once more after a reset.
    ///
    /// # Errors
    /// It is not before the deadline.
    pub fn wait_ready(&mut self) -> Result<()> {
        let ready = |text: &str| (Line::parse(text)?.kind == "ready").then_some(());
        (self.at, ()) = self.lines.wait("ready on the control port", self.at, self.deadline, ready)?;
        Ok(())
    }

    /// Sends a command without waiting for its reply.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn send(&mut self, command: &str) -> Result<()> {
        writeln!(self.port, "{command}").with_context(|| format!("send {command:?} to the guest"))
    }

    /// The guest may end the command that it is at work on, if that has a time: it does a part of a pass more, and replies.
    ///
    /// # Errors
    /// QEMU is gone.
    pub fn enough(&mut self) -> Result<()> {
        self.send("enough")
    }

    /// Waits for the reply to the last command; wrong pages are an error.
    ///
    /// # Errors
    /// The guest refused it, found wrong pages, or is gone.
    pub fn reply(&mut self) -> Result<Vec<String>> {
        let find = |text: &str| {
            let line = Line::parse(text)?;
            (line.kind == "reply").then(|| line.text().to_owned())
        };
        let (next, reply) = self.lines.wait("a reply on the control port", self.at, self.deadline, find)?;
        let lines = self.lines.lines(self.at);
        self.at = next;
        if reply.trim() != "ok bad=0" {
            bail!("the guest replied {reply:?} after {lines:#?}");
        }
        Ok(lines)
    }

    /// Waits until the command that was sent last is at work: it has said so for the first time, or for longer.
    ///
    /// # Errors
    /// The deadline is over.
    pub fn wait_progress(&mut self) -> Result<()> {
        let find = |text: &str| (Line::parse(text)?.kind == "progress").then_some(());
        self.lines.wait("progress on the control port", self.at, self.deadline, find).map(drop)
    }

    /// Has the guest's shell do something; what that says.
    ///
    /// # Errors
    /// As `reply`; and it failed.
    pub fn sh(&mut self, line: &str) -> Result<String> {
        let lines = self.run(&format!("sh {line}"))?;
        let said = lines.iter().filter_map(|line| Line::parse(line)).filter(|line| line.kind == "output");
        Ok(said.map(|line| line.text().to_owned() + "\n").collect())
    }

    /// Whether the reply to the last command has come already. Its QEMU has ended: all that it has said is looked at.
    pub fn has_replied(&self) -> bool {
        self.lines.wait_end();
        self.has_said("reply")
    }

    /// Whether a line of this kind has come since the last reply.
    pub fn has_said(&self, kind: &str) -> bool {
        let is_such = |text: &String| Line::parse(text).is_some_and(|line| line.kind == kind);
        self.lines.lines(self.at).iter().any(is_such)
    }

    /// Sends a command and waits for its reply.
    ///
    /// # Errors
    /// As `reply`.
    pub fn run(&mut self, command: &str) -> Result<Vec<String>> {
        self.send(command)?;
        self.reply().with_context(|| format!("command {command:?}"))
    }
}
