//! One run of a program that reads a disk's file, with limits: time, output, and one at a time for each file.
//!
//! A file system that hangs keeps the program in the kernel, where nothing ends it. Nobody waits for it then, and none is started for
//! that file again before it has ended.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};

/// What a program may say of its failure, in bytes.
const ERRORS_MAX: usize = 64 << 10;
/// How long one may take to end that was killed, and does not hang in the kernel.
const KILLED_MAX: Duration = Duration::from_secs(1);
/// The pause between two looks whether it has ended.
const LOOK: Duration = Duration::from_millis(1);

/// What there is for a file.
#[derive(Debug)]
enum Slot {
    Running,
    /// It was killed, and has not ended.
    Hangs(Child),
}

static SLOTS: Mutex<BTreeMap<PathBuf, Slot>> = Mutex::new(BTreeMap::new());
static FREED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, BTreeMap<PathBuf, Slot>> {
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to run a program for a file.
#[derive(Debug)]
struct Turn<'a>(&'a Path);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut slots = lock();
        if matches!(slots.get(self.0), Some(Slot::Running)) {
            slots.remove(self.0);
        }
        FREED.notify_all();
    }
}

/// Waits for the one that runs for this file, if there is one.
fn take_turn(file: &Path, deadline: Instant) -> Result<Turn<'_>> {
    let mut slots = lock();
    loop {
        match slots.get_mut(file) {
            None => break,
            Some(Slot::Hangs(child)) => match child.try_wait() {
                Ok(None) => bail!(
                    "process {} waits for {} since it was killed, and no other one is started before it has ended: look after the \
                     file system",
                    child.id(),
                    file.display()
                ),
                _ => break,
            },
            Some(Slot::Running) => {
                let left = deadline.saturating_duration_since(Instant::now());
                ensure!(!left.is_zero(), "others are looking at {} for too long", file.display());
                slots = FREED.wait_timeout(slots, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
    slots.insert(file.to_owned(), Slot::Running);
    Ok(Turn(file))
}

/// What a reader has made of the output.
#[derive(Debug)]
pub enum Wanted<T> {
    /// What was made of all output. The program has to succeed.
    All(T),
    /// What was made of a part of it. The rest is of no interest, and neither is how the program ends.
    Part(T),
}

/// Runs a program for a file and has its output read, for so long and no longer.
///
/// # Errors
/// It fails, in its own words; it takes too long; one that did so before has not ended.
pub fn run<T>(
    command: &mut Command,
    file: &Path,
    max: Duration,
    read: impl FnOnce(&mut dyn Read) -> Result<Wanted<T>>,
) -> Result<T> {
    let deadline = Instant::now() + max;
    let turn = take_turn(file, deadline)?;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().with_context(|| format!("start {}", command.get_program().display()))?;
    let mut child = Running { child: Some(child), turn };
    let pipes = child.child.as_mut().and_then(|child| child.stdout.take().zip(child.stderr.take()));
    let (out, errors) = pipes.context("the output of a program")?;
    let mut output = Output { out, errors: Some(errors), said: Vec::new(), deadline };
    let done = match read(&mut output) {
        Ok(Wanted::Part(done)) => return Ok(done),
        Ok(Wanted::All(done)) => Ok(done),
        Err(error) => Err(error),
    };
    // What it says of itself tells more than that its output is cut.
    output.drain();
    let too_long = || anyhow!("{} has not ended within {} s", command.get_program().display(), max.as_secs());
    match child.wait(deadline).ok_or_else(too_long)? {
        true => done,
        false => Err(anyhow!("{}", output.errors())),
    }
}

/// A child, which is killed with this if it has not ended.
#[derive(Debug)]
struct Running<'a> {
    child: Option<Child>,
    turn: Turn<'a>,
}

impl Running<'_> {
    /// Whether it succeeded. `None`: it has not ended.
    fn wait(&mut self, deadline: Instant) -> Option<bool> {
        let child = self.child.as_mut()?;
        loop {
            match child.try_wait() {
                Ok(Some(status)) => {
                    self.child = None;
                    return Some(status.success());
                }
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOOK),
                _ => return None,
            }
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
        self.wait(Instant::now() + KILLED_MAX);
        if let Some(child) = self.child.take() {
            lock().insert(self.turn.0.to_owned(), Slot::Hangs(child));
        }
    }
}

/// What a child says. Its errors are kept meanwhile, or it would wait for somebody to read them.
#[derive(Debug)]
struct Output {
    out: ChildStdout,
    errors: Option<ChildStderr>,
    said: Vec<u8>,
    deadline: Instant,
}

impl Read for Output {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut polled = vec![PollFd::new(&self.out, PollFlags::IN)];
            polled.extend(self.errors.as_ref().map(|errors| PollFd::new(errors, PollFlags::IN)));
            wait(&mut polled, self.deadline)?;
            let is_ready = |of: Option<&PollFd<'_>>| of.is_some_and(|of| !of.revents().is_empty());
            let (has_output, has_errors) = (is_ready(polled.first()), is_ready(polled.get(1)));
            if has_errors {
                self.take_errors()?;
            }
            if has_output {
                return self.out.read(buffer);
            }
        }
    }
}

fn wait(polled: &mut [PollFd<'_>], deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) };
        match rustix::event::poll(polled, Some(&left)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

impl Output {
    fn take_errors(&mut self) -> io::Result<()> {
        let Some(errors) = &mut self.errors else { return Ok(()) };
        let mut part = [0; 4096];
        match errors.read(&mut part)? {
            0 => self.errors = None,
            len => {
                let room = ERRORS_MAX.saturating_sub(self.said.len()).min(len);
                self.said.extend_from_slice(&part[..room]);
            }
        }
        Ok(())
    }

    /// Reads what is left, of which nothing is kept but errors.
    fn drain(&mut self) {
        let mut rest = [0; 4096];
        while matches!(self.read(&mut rest), Ok(len) if len > 0) {}
        while self.errors.is_some() {
            let Some(errors) = &self.errors else { return };
            let is_there = wait(&mut [PollFd::new(errors, PollFlags::IN)], self.deadline).is_ok();
            if !is_there || self.take_errors().is_err() {
                return;
            }
        }
    }

    fn errors(&self) -> String {
        let said = String::from_utf8_lossy(&self.said).trim().replace('\n', "; ");
        match said.is_empty() {
            true => "it failed and does not say why".to_owned(),
            false => said.strip_prefix("qemu-img: ").unwrap_or(&said).to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than it takes to run a shell, also on a machine that is busy.
    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    fn all(output: &mut dyn Read) -> Result<Wanted<String>> {
        let mut text = String::new();
        output.read_to_string(&mut text)?;
        Ok(Wanted::All(text))
    }

    #[test]
    fn output_is_read_and_errors_are_told() {
        let file = Path::new("/output");
        assert_eq!(run(&mut shell("echo a; echo b >&2; echo c"), file, LONG, all).unwrap(), "a\nc\n");
        let failed = run(&mut shell("echo a; echo 'qemu-img: why' >&2; echo not >&2; exit 1"), file, LONG, all);
        assert_eq!(failed.unwrap_err().to_string(), "why; not");
        let silent = run(&mut shell("exit 1"), file, LONG, all).unwrap_err().to_string();
        assert!(silent.contains("does not say why"), "{silent}");
        // More errors than a pipe holds, before any output.
        let many = "i=0; while [ $i -lt 20000 ]; do echo 0123456789 >&2; i=$((i+1)); done; echo done";
        assert_eq!(run(&mut shell(many), file, LONG, all).unwrap(), "done\n");
    }

    #[test]
    fn who_has_read_enough_does_not_wait() {
        let enough = |output: &mut dyn Read| {
            let mut byte = [0];
            output.read_exact(&mut byte)?;
            Ok(Wanted::Part(byte[0]))
        };
        let file = Path::new("/enough");
        assert_eq!(run(&mut shell("echo a; exec sleep 1000"), file, LONG, enough).unwrap(), b'a');
        assert_eq!(run(&mut shell("echo b"), file, LONG, all).unwrap(), "b\n");
    }

    #[test]
    fn no_second_one_is_started_while_one_hangs() {
        let file = Path::new("/hangs");
        let late = run(&mut shell("exec sleep 1000"), file, Duration::from_millis(50), all).unwrap_err();
        assert!(!lock().contains_key(file), "{late}: one that can be killed is gone");
        // One that cannot be killed.
        let child = shell("exec sleep 1000").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        lock().insert(file.to_owned(), Slot::Hangs(child));
        for _ in 0..2 {
            let refused = run(&mut shell("echo a"), file, LONG, all).unwrap_err().to_string();
            assert!(refused.contains("/hangs") && refused.contains(&pid.as_raw_nonzero().to_string()), "{refused}");
        }
        assert_eq!(run(&mut shell("echo a"), Path::new("/other"), LONG, all).unwrap(), "a\n");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let deadline = Instant::now() + LONG;
        while run(&mut shell("echo a"), file, LONG, all).is_err() {
            assert!(Instant::now() < deadline, "it has ended");
        }
    }

    #[test]
    fn two_for_one_file_take_turns() {
        let file = Path::new("/turns");
        let first = take_turn(file, Instant::now()).unwrap();
        take_turn(file, Instant::now()).unwrap_err();
        let second = std::thread::spawn(move || run(&mut shell("echo a"), file, LONG, all));
        drop(first);
        assert_eq!(second.join().unwrap().unwrap(), "a\n");
    }
}
