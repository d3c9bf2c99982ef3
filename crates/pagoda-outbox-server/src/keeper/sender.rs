//! The transmitter as the keeper sees it: a process beside the worker's, started again whenever it has ended and the worker has not.
//!
//! Order: it has ended, and its descriptors with it -> another worker begins. For what it was given of a file stays only as long as the
//! worker that gave it knows of its readers.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use pagoda_sys::process::Child;
use rustix::event::Timespec;

use super::backoff::Backoff;

#[derive(Debug, Default)]
pub struct Sender {
    running: Option<(Child, Instant)>,
    backoff: Backoff,
    /// When the next one is to be started, if none runs.
    due: Option<Instant>,
}

impl Sender {
    /// There is another worker, and so there is to be one of these.
    pub fn want(&mut self) {
        *self = Sender { due: Some(Instant::now()), ..Sender::default() };
    }

    /// Readable when it has ended.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.running.as_ref().map(|(child, _)| child.pidfd())
    }

    pub fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= Instant::now())
    }

    /// How long there is nothing to be started. `None`: for ever.
    pub fn patience(&self) -> Option<Timespec> {
        let left = self.due?.saturating_duration_since(Instant::now());
        // A part of a millisecond more, so that it is due then.
        let left = left + Duration::from_millis(1);
        Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
    }

    pub fn note_started(&mut self, child: Child) {
        self.running = Some((child, Instant::now()));
        self.due = None;
    }

    /// It could not be started.
    pub fn put_off(&mut self) {
        self.due = Some(Instant::now() + self.backoff.after(Duration::ZERO));
    }

    /// It has ended by itself, or somebody has ended it.
    pub fn note_ended(&mut self) -> io::Result<()> {
        let Some((child, began)) = self.running.take() else { return Ok(()) };
        child.wait()?;
        self.due = Some(Instant::now() + self.backoff.after(began.elapsed()));
        Ok(())
    }

    /// Ends it, and waits until it has.
    pub fn end(&mut self) -> io::Result<()> {
        self.due = None;
        let Some((child, _)) = self.running.take() else { return Ok(()) };
        child.kill();
        child.wait().map(drop)
    }
}
