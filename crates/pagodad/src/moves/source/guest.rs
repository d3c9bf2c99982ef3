//! The VM that leaves, as long as it is on this host: stopped, let run again, ended.
//!
//! From its stop on, three things let it run here and nothing else: [`Guest::let_run`], which only the machine's `Run` calls; a state
//! that could not be saved, before any grant; and a user's own `cont`, which [`Guest::check_still`] finds before the note is written.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::in_full;
use pagoda_core::policy::VmId;
use pagoda_core::units::Bytes;
use pagoda_image::limits::STATE_BYTES_MAX;
use pagoda_move::owner::STOPPED_MAX;
use pagoda_move::rounds::Slowing;
use pagoda_move::wire::limits::STATE_MAX;
use pagoda_pager::handle::{Command, Handle};

use super::input::Input;
use super::standing::{BeforeState, Outcome, Standing};
use crate::moves::start;
use crate::qmp::Monitor;
use crate::qmp::processors::processors;
use crate::qmp::state::{RunState, run_state, undo};
use crate::record::Record;
use crate::registry::Registry;
use crate::registry::operation::ImageThen;
use crate::remote::{Dirs, handover};

/// Between two tries to let it run at first, and later. It is tried for as long as it lives.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_LATER: Duration = Duration::from_secs(30);
const TRIES: u32 = 12;
/// How long writes to its remote tier are waited for when the move begins. Pages that are there are copied otherwise.
const HOLD_MAX: Duration = Duration::from_secs(1);
/// How long QEMU may take to end when it is told to. Then it is killed.
const QUIT_MAX: Duration = Duration::from_secs(10);
/// The pause between two looks whether QEMU has ended, or its tier is still.
const LOOK: Duration = Duration::from_millis(10);

#[derive(Debug)]
enum Stand {
    /// It runs, or its user has paused it.
    Runs,
    /// Its state is being saved.
    Stopping(Standing),
    /// It stands still. It ran before, or its user had paused it.
    Still(Standing, bool),
    /// It may stand still, and something may be left to be undone.
    Left,
}

/// The VM that leaves, and what the move has done to it.
#[derive(Debug)]
pub struct Guest {
    registry: Arc<Registry>,
    name: String,
    /// None if it has ended already.
    here: Option<(VmId, Arc<Monitor>, (u32, u64))>,
    /// It runs, unless the move has stopped it.
    runs: bool,
    /// By QMP `stop`: it may have been given away without its state (`superseded.rs`).
    may_be_paused: bool,
    stand: Stand,
    /// How its writers are slowed.
    slowing: Slowing,
}

impl Guest {
    /// A VM that has not been stopped.
    pub fn new(registry: &Arc<Registry>, name: &str, id: VmId, runs: bool) -> Guest {
        let here = registry.find_by_id(id, |vm| (id, Arc::clone(&vm.qmp), vm.record.pid));
        Guest {
            registry: Arc::clone(registry),
            name: name.to_owned(),
            here,
            runs,
            may_be_paused: false,
            stand: Stand::Runs,
            slowing: Slowing::NONE,
        }
    }

    /// One that was given away, by an earlier daemon or because its destination runs it.
    pub fn left(registry: &Arc<Registry>, name: &str) -> Guest {
        let found = {
            let vms = registry.lock();
            vms.get(name).map(|vm| {
                let here = (vm.governed.id, Arc::clone(&vm.qmp), vm.record.pid);
                (here, vm.record.operation.is_some_and(|operation| operation.resume))
            })
        };
        let runs = found.as_ref().is_some_and(|(_, runs)| *runs);
        let here = found.map(|(here, _)| here);
        Guest {
            registry: Arc::clone(registry),
            name: name.to_owned(),
            here,
            runs,
            may_be_paused: true,
            stand: Stand::Left,
            slowing: Slowing::NONE,
        }
    }

    /// Its QEMU has not ended.
    pub fn is_here(&self) -> bool {
        self.here.as_ref().is_some_and(|(id, ..)| self.registry.find_by_id(*id, |_| ()).is_some())
    }

    /// It runs, unless the move has stopped it.
    pub const fn runs(&self) -> bool {
        self.runs
    }

    /// Its state is being saved, which nobody can call back.
    pub const fn is_stopping(&self) -> bool {
        matches!(self.stand, Stand::Stopping(_))
    }

    pub fn engine(&self) -> Option<Arc<Handle>> {
        let (id, ..) = self.here.as_ref()?;
        self.registry.find_by_id(*id, |vm| vm.handle.clone())?
    }

    /// Slows its writers like this from now on. What the guest's processors are is asked each time: one may be new. If QEMU does not
    /// say so, nobody is slowed.
    pub fn slow(&mut self, slowing: Slowing) {
        if self.slowing == slowing {
            return;
        }
        self.slowing = slowing;
        let (Some(engine), Some((_, qmp, _))) = (self.engine(), &self.here) else { return };
        let threads = match slowing {
            Slowing::NONE => Vec::new(),
            _ => processors(qmp).unwrap_or_else(|error| {
                tracing::warn!(vm = %self.name, "its writers are not slowed: {}", in_full(error.as_ref()));
                Vec::new()
            }),
        };
        tracing::info!(
            vm = %self.name,
            delay_us = slowing.delay().as_micros() as u64,
            threads = threads.len(),
            "what each first write to a page waits while it moves"
        );
        engine.send(Command::SlowWriters { delay: slowing.delay(), threads });
    }

    /// Its monitor and its number, if it has not ended.
    pub fn monitor(&self) -> Option<(Arc<Monitor>, u32)> {
        self.here.as_ref().filter(|_| self.is_here()).map(|(_, qmp, (pid, _))| (Arc::clone(qmp), *pid))
    }

    /// Has it stopped, with its state. An input says what came of it.
    ///
    /// # Errors
    /// It has not been stopped.
    pub fn stop(&mut self, before: Option<BeforeState>, inputs: Sender<Input>) -> Result<()> {
        let (id, qmp, _) = self.here.as_ref().context("it has ended")?;
        let is_running = run_state(qmp)? == RunState::Running;
        ensure!(is_running == self.runs, "it was paused or let run meanwhile");
        ensure!(!self.is_stalled(), "it is stalled");
        let gate = self.registry.gate_of(*id).context("it has ended")?;
        let max = Bytes(STATE_MAX.0.min(STATE_BYTES_MAX.0));
        let report = move |outcome| drop(inputs.send(Input::Stopped(outcome)));
        let standing = Standing::begin(Arc::clone(qmp), gate, max, Instant::now() + STOPPED_MAX, before, report);
        self.stand = Stand::Stopping(standing.context("start a thread")?);
        Ok(())
    }

    /// Takes in what came of the stop.
    pub fn stopped(&mut self, outcome: &Outcome) {
        let Stand::Stopping(standing) = std::mem::replace(&mut self.stand, Stand::Left) else { return };
        self.stand = match outcome {
            Outcome::Saved { was_running, .. } => Stand::Still(standing, *was_running),
            Outcome::Failed { is_left: true, .. } => Stand::Left,
            Outcome::Failed { is_left: false, .. } => Stand::Runs,
        };
    }

    /// That it has stood still since its state was saved. What an earlier daemon stopped, it has looked at.
    ///
    /// # Errors
    /// It has not, or nobody can tell: it must not be given away.
    pub fn check_still(&self) -> Result<()> {
        match &self.stand {
            Stand::Still(standing, _) => {
                standing.check()?;
                self.record().map_or(Ok(()), |record| handover::let_go(&record))
            }
            // It is another host's already, and so is its tier.
            Stand::Left => {
                if let Some(record) = self.record() {
                    handover::lose(&record);
                }
                Ok(())
            }
            Stand::Runs | Stand::Stopping(_) => anyhow::bail!("it does not stand still"),
        }
    }

    fn record(&self) -> Option<Record> {
        let (id, ..) = self.here.as_ref()?;
        self.registry.find_by_id(*id, |vm| vm.record.clone())
    }

    /// Its remote tier is handed over: nothing in it changes from now on. `false`: it has none, or that is copied.
    ///
    /// # Errors
    /// Nobody owns the tier here.
    pub fn hold_tier(&self) -> Result<bool> {
        let record = self.record().context("it has ended")?;
        handover::hold(&record)?;
        let is_handed_over = handover::handed_over(&record).is_some();
        if let Some(engine) = self.engine().filter(|_| is_handed_over) {
            // The tier hears that it is held when its engine looks again.
            engine.send(Command::Refresh);
            let deadline = Instant::now() + HOLD_MAX;
            while !handover::is_still(&record) && Instant::now() < deadline {
                thread::sleep(LOOK);
            }
        }
        Ok(is_handed_over)
    }

    /// Its destination is told now what is in its tier.
    pub fn name_pages_of_tier(&self) {
        if let Some(record) = self.record() {
            handover::name_pages(&record);
        }
    }

    /// It stays here, and so does its tier.
    fn own_tier(&self) {
        let (Some(record), Some(engine)) = (self.record(), self.engine()) else { return };
        handover::own(&Dirs::of(&self.registry.config), &record, move || engine.send(Command::Refresh));
    }

    /// Lets it run, if it ran before. Whether that is done; if not, it is to be tried again.
    pub fn let_run(&mut self) -> bool {
        self.own_tier();
        let tried = match std::mem::replace(&mut self.stand, Stand::Left) {
            Stand::Runs => Ok(()),
            // Its user lets it run (`pagoda vm cont`).
            Stand::Still(standing, was_running) if !was_running || self.is_stalled() => {
                drop(standing);
                Ok(())
            }
            Stand::Still(standing, _) => standing.resume(),
            Stand::Stopping(_) | Stand::Left => self.undo(),
        };
        match tried {
            Ok(()) => self.stand = Stand::Runs,
            Err(error) if self.is_here() => {
                tracing::warn!(vm = %self.name, "let it run here again, tried again: {}", in_full(error.as_ref()));
            }
            Err(_) => self.stand = Stand::Runs,
        }
        matches!(self.stand, Stand::Runs)
    }

    fn undo(&self) -> Result<()> {
        let Some((id, qmp, _)) = self.here.as_ref().filter(|_| self.is_here()) else { return Ok(()) };
        let gate = self.registry.gate_of(*id).context("the agent in its process is away")?;
        let paused: &[RunState] = match (self.runs && !self.is_stalled(), self.may_be_paused) {
            (false, _) => &[],
            (true, false) => &[RunState::PostMigrate],
            (true, true) => &[RunState::PostMigrate, RunState::Paused],
        };
        undo(qmp, &gate, paused)
    }

    /// Its pages cannot be read or written: it stays paused until its user lets it run.
    fn is_stalled(&self) -> bool {
        let stalled = |(id, ..): &(VmId, _, _)| self.registry.find_by_id(*id, |vm| vm.stalled.is_some());
        self.here.as_ref().and_then(stalled).unwrap_or(false)
    }

    /// The move is over, and it stays here. Returns when it runs, or has ended.
    pub fn stay(&mut self) {
        for tries in 0_u32.. {
            if self.let_run() {
                break;
            }
            thread::sleep(if tries < TRIES { PAUSE } else { PAUSE_LATER });
        }
        if let Some(engine) = self.engine() {
            engine.send(Command::HurryMove(false));
            engine.send(Command::Move(false));
        }
        if let Some((id, ..)) = &self.here {
            self.registry.end_operation(*id, ImageThen::Kept);
        }
    }

    /// Ends its QEMU, and waits until nothing of it is here.
    ///
    /// The note that keeps it from running here goes afterwards. So this does not return before.
    pub fn discard(&mut self) {
        // Whoever keeps it lets go of the monitor.
        self.stand = Stand::Left;
        let Some((_, qmp, (pid, start))) = &self.here else { return };
        if self.is_here() {
            // QEMU may close the monitor before it answers. It is not spoken to again: one that gets a command while it ends may hang.
            let _ = qmp.execute("quit");
        }
        let told = Instant::now();
        while self.is_here() {
            thread::sleep(LOOK);
            if told.elapsed() > QUIT_MAX {
                tracing::warn!(vm = %self.name, "its QEMU was told to end, and has not: it is killed");
                start::kill(*pid, *start);
                thread::sleep(PAUSE);
            }
        }
    }
}
