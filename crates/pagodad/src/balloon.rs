//! Ballooning of one VM: a thread that brings what the device and the guest say to
//! [`pagoda_core::balloon::Balloon`], and carries out what it decides.
//!
//! The thread begins with the first target and ends with the VM; without a target it waits and holds no connection. It alone
//! talks to the device ([`device`]); the monitor is shared. What is to survive the daemon is in the VM's record (the target,
//! and whether the VM is paged out instead) and in the device (the size of the balloon).
//!
//! What the guest sees when the monitor does not answer: nothing changes, and the thread tries again.

mod device;

use pagoda_api::in_full;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use pagoda_api::types::{BalloonInfo, GuestMemory};
use pagoda_core::balloon::{Action, Balloon, Device, Missing, Phase, View};
use pagoda_core::units::Bytes;
use pagoda_sys::process::Wake;

use crate::qmp::{Held, Monitor};
use device::BalloonDevice;

/// Without a target there is nothing to look at; a new one wakes the thread.
const WAIT_OFF: Duration = Duration::from_secs(3600);

/// Caps the VM's DRAM, or no longer.
pub type PageOut = Box<dyn Fn(Option<Bytes>) + Send>;
/// Whether the guest's faults may fill holes with large folios. They would bring back what is in the balloon beside the page
/// that is touched. `false`: nobody was there to be told.
pub type AllowLargeFolios = Box<dyn Fn(bool) -> bool + Send>;

/// What a VM's balloon is about.
pub struct Parts {
    pub name: String,
    pub memory: Bytes,
    /// `None`: the device is looked at, and nothing asked, until there is a target.
    pub target: Option<Bytes>,
    /// An earlier daemon has paged it out in the balloon's place.
    pub paging_to: Option<Bytes>,
    pub monitor: Arc<Monitor>,
    pub page_out: PageOut,
    pub allow_large_folios: AllowLargeFolios,
}

/// What is known of a balloon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// The monitor has not answered yet.
    Nothing,
    /// No device, or no driver behind it.
    Absent,
    /// It has this size.
    Inflated(Bytes),
}

/// What the thread is told.
#[derive(Debug, Clone, Copy)]
enum Target {
    /// A user's target: tried at once.
    Set(Bytes),
    /// The policy's, which moves by itself.
    Follow(Bytes),
}

/// What others may look at.
#[derive(Debug, Clone, Copy)]
struct Report {
    view: View,
    /// What QEMU last said of the device.
    device: Device,
    at: Instant,
    now_ms: u64,
    target: Bytes,
}

/// The daemon's end; the thread ends when it is dropped.
#[derive(Debug)]
pub struct Handle {
    targets: Option<Sender<Target>>,
    wake: Wake,
    board: Arc<Mutex<Report>>,
    memory: Bytes,
}

impl Handle {
    /// Sets the memory that the guest should keep.
    pub fn set_target(&self, target: Bytes) {
        self.send(Target::Set(target));
    }

    /// As [`Handle::set_target`], but a guest that fights back is left alone for as long as it was to be.
    pub fn follow_target(&self, target: Bytes) {
        self.send(Target::Follow(target));
    }

    /// The device and its driver, as last seen.
    pub fn seen(&self) -> Seen {
        let report = *self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let size = |actual| Seen::Inflated(self.memory.saturating_sub(actual));
        match (report.view.phase, report.device) {
            (Phase::Unavailable(Missing::Device | Missing::Driver), _) => Seen::Absent,
            (_, Device::Silent) => Seen::Nothing,
            // Looked at again when there is a target.
            (Phase::Off, Device::Absent) => size(self.memory),
            (_, Device::Absent) => Seen::Absent,
            // Before the first target nothing but the device is asked.
            (Phase::Off, Device::Present { actual }) => size(actual),
            (_, Device::Present { .. }) => size(report.view.actual),
        }
    }

    fn send(&self, target: Target) {
        if let Some(targets) = &self.targets {
            // The thread ends only after this end is dropped.
            let _ = targets.send(target);
            self.wake.wake();
        }
    }

    /// What the API says of the balloon, as of the thread's last report.
    pub fn info(&self) -> BalloonInfo {
        let report = *self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let view = report.view;
        let now_ms = report.now_ms + millis(report.at.elapsed());
        BalloonInfo {
            target_bytes: report.target.0,
            asked_bytes: view.asked.map(|asked| asked.0),
            ballooned_bytes: self.memory.saturating_sub(view.actual).0,
            state: view.phase.word().to_owned(),
            reason: view.phase.to_string(),
            since_s: now_ms.saturating_sub(view.since_ms) / 1000,
            paged_out: view.is_paging,
            retry_in_s: view.retry_at_ms.map(|at| at.saturating_sub(now_ms) / 1000),
            resisted: view.resisted,
            fallbacks: view.fallbacks,
            guest: view.stats.map(|stats| GuestMemory {
                free_bytes: stats.free.0,
                available_bytes: stats.available.0,
                major_faults: stats.major_faults,
                swap_in_bytes: stats.swap_in.0,
            }),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.targets = None;
        self.wake.wake();
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Starts a VM's thread.
///
/// # Errors
/// No thread or no eventfd is to be had.
pub fn spawn(parts: Parts) -> Result<Handle> {
    let (sender, targets) = channel();
    let wake = Wake::new().context("make an eventfd")?;
    let started = Instant::now();
    let mut balloon = Balloon::new(parts.memory, parts.paging_to);
    if let Some(target) = parts.target {
        balloon.set_target(0, target);
    }
    let target = parts.target.unwrap_or(parts.memory);
    let report = Report { view: balloon.view(), device: Device::Silent, at: started, now_ms: 0, target };
    let board = Arc::new(Mutex::new(report));
    let handle = Handle {
        targets: Some(sender),
        wake: wake.try_clone().context("duplicate an eventfd")?,
        board: Arc::clone(&board),
        memory: parts.memory,
    };
    let mut worker = Worker {
        name: parts.name,
        memory: parts.memory,
        target,
        has_target: parts.target.is_some(),
        seen: Device::Silent,
        device: BalloonDevice::new(Arc::clone(&parts.monitor)),
        monitor: parts.monitor,
        held: None,
        page_out: parts.page_out,
        allow_large_folios: parts.allow_large_folios,
        allowed: None,
        balloon,
        targets,
        wake,
        board,
        started,
    };
    std::thread::Builder::new()
        .name("balloon".into())
        .spawn(move || worker.run())
        .context("start the balloon thread")?;
    Ok(handle)
}

struct Worker {
    name: String,
    memory: Bytes,
    target: Bytes,
    /// Somebody has said what is wanted.
    has_target: bool,
    /// What QEMU last said of the device.
    seen: Device,
    device: BalloonDevice,
    monitor: Arc<Monitor>,
    /// The monitor's connection, which is kept while there is something to look at.
    held: Option<Held<Arc<Monitor>>>,
    page_out: PageOut,
    allow_large_folios: AllowLargeFolios,
    /// What was last said of them.
    allowed: Option<bool>,
    balloon: Balloon,
    targets: Receiver<Target>,
    wake: Wake,
    board: Arc<Mutex<Report>>,
    started: Instant,
}

impl Worker {
    fn run(&mut self) {
        self.hold();
        while self.take_targets() {
            if !self.has_target {
                self.look();
            } else if !self.balloon.is_off() {
                self.tick();
            }
            self.publish();
            if self.balloon.is_off() && self.has_target {
                self.device.leave();
                self.held = None;
                self.monitor.wait(&self.wake, WAIT_OFF);
            } else {
                self.monitor.wait(&self.wake, Duration::from_millis(self.balloon.tick_ms()));
            }
        }
        self.held = None;
    }

    fn hold(&mut self) {
        self.held.get_or_insert_with(|| Held::new(Arc::clone(&self.monitor)));
    }

    fn now_ms(&self) -> u64 {
        millis(self.started.elapsed())
    }

    /// `false` when the VM is no longer ours.
    fn take_targets(&mut self) -> bool {
        loop {
            match self.targets.try_recv() {
                Ok(target) => {
                    let now_ms = self.now_ms();
                    let is_first = !std::mem::replace(&mut self.has_target, true);
                    match target {
                        Target::Follow(target) if !is_first => {
                            self.target = target;
                            self.balloon.follow_target(now_ms, target);
                        }
                        // What an earlier daemon had asked for ends, even if nothing is wanted now.
                        Target::Set(target) | Target::Follow(target) => {
                            self.target = target;
                            self.balloon.set_target(now_ms, target);
                        }
                    }
                    self.hold();
                }
                Err(std::sync::mpsc::TryRecvError::Empty) => return true,
                Err(std::sync::mpsc::TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Looks at the device alone.
    fn look(&mut self) {
        let device = self.device.device();
        if device != Device::Silent {
            self.seen = device;
        }
    }

    fn tick(&mut self) {
        let sample = self.device.look();
        if sample.device != Device::Silent {
            self.seen = sample.device;
        }
        let before = self.balloon.view().phase;
        let actions = self.balloon.tick(self.now_ms(), &sample);
        if let Device::Present { actual } = sample.device {
            self.choose_folios(actual);
        }
        let after = self.balloon.view().phase;
        if before != after {
            self.log(after);
        }
        for action in actions {
            match action {
                Action::Ask(memory) => {
                    // A guest that does not hear it is taken for one that ignores it, and is tried again.
                    if let Err(error) = self.device.ask(memory) {
                        tracing::warn!(vm = %self.name, "balloon: {error}", error = in_full(error.as_ref()));
                    }
                }
                Action::PageOut(to) => (self.page_out)(Some(to)),
                Action::EndPageOut => (self.page_out)(None),
            }
        }
    }

    /// Before the guest gives anything up, and after it has all of it back.
    fn choose_folios(&mut self, actual: Bytes) {
        let asked = self.balloon.view().asked;
        let allowed = actual >= self.memory && asked.is_none_or(|asked| asked >= self.memory);
        if self.allowed != Some(allowed) && (self.allow_large_folios)(allowed) {
            self.allowed = Some(allowed);
        }
    }

    fn log(&self, phase: Phase) {
        let target = self.target;
        match phase {
            Phase::Resisted(_) => tracing::info!(vm = %self.name, %target, "balloon: {phase}; tried again later"),
            Phase::Unavailable(_) => {
                tracing::info!(vm = %self.name, %target, "balloon: {phase}; paged out to its target instead");
            }
            _ => tracing::debug!(vm = %self.name, %target, "balloon: {phase}"),
        }
    }

    fn publish(&self) {
        let (at, now_ms) = (Instant::now(), self.now_ms());
        let report = Report { view: self.balloon.view(), device: self.seen, at, now_ms, target: self.target };
        *self.board.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}
