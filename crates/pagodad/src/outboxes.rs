//! The outboxes of this host's VMs: which there are, what the pool keeps for each, what their processes say.
//!
//! Owns the directory `outboxes` of the state directory: for each outbox a record, by which the next daemon knows it again, and
//! the socket of its control connection. An outbox outlives its VM while files wait, so it has a record of its own and is known
//! by a number, not by its VM's name. It is charged from when its VM is admitted until its process has ended.
//!
//! A process of an outbox may be in its guest's hands. Its answers are bounded and checked ([`line`],
//! [`pagoda_core::outbox::charge`]), nobody waits for one for long, and a silent one is unknown and no more. If the daemon dies,
//! outboxes serve on.
//!
//! Order of locks: an outbox's line ([`Outbox::change`]), which is held while its process or the disk is waited for; the registry's; the
//! policy's; that of all outboxes; an outbox's state. Charges rise under the policy's lock alone.

mod hearing;
mod line;
mod record;
pub mod settings;
pub mod sizes;
#[cfg(test)]
mod tests;
pub mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use pagoda_abi::Token;
use pagoda_abi::attach::{OutboxFigures as Figures, Packet};
use pagoda_api::in_full;
use pagoda_api::types::{OutboxFigures, OutboxInfo, OutboxState};
use pagoda_core::outbox::charge::{Charge, Said};
use pagoda_core::outbox::round::{Auto, Sizing};
use pagoda_core::units::{Bytes, PageCount};
use pagoda_sys::socket::Listener;

use self::hearing::{Heard, Hearing};
use self::line::Line;
use self::record::{OutboxId, Record, record_path};

/// Outboxes of one host: each has a process.
const OUTBOXES_MAX: usize = 2048;
/// How long a process may take until it answers for the first time.
const START_MAX: Duration = Duration::from_secs(20);

/// The process of an outbox.
#[derive(Debug)]
enum Process {
    /// It has not come yet. What it will listen on.
    Expected(Option<Listener>),
    /// It runs; its process id and its start time.
    Runs(u32, u64),
    Ended,
}

#[derive(Debug)]
struct State {
    charge: Charge,
    process: Process,
    /// What it said last, if it answered when it was asked last.
    figures: Option<(Figures, Instant)>,
    /// Of its charge, what it had when it last said so.
    held: Bytes,
    has_answered: bool,
    /// Why there are no figures.
    problem: Option<String>,
    /// What its size follows; `None`: it is set by hand.
    auto: Option<Auto>,
    /// Its VM has ended, and it serves on.
    lingers: bool,
    hearing: Hearing,
}

impl State {
    /// It answers, so it can be told another size, and its VM uses it.
    fn is_live(&self) -> bool {
        matches!(self.process, Process::Runs(..)) && self.figures.is_some() && !self.lingers
    }
}

/// What an outbox had before a change ([`Changing::begin`]).
#[derive(Clone, Copy, Debug)]
pub struct Before {
    charge: Charge,
    auto: Option<Auto>,
}

/// The outbox of one VM, as this daemon knows it.
#[derive(Debug)]
pub struct Outbox {
    id: OutboxId,
    /// The name of the VM whose outbox this is.
    pub vm: String,
    pub vm_token: Token,
    /// The secret by which the outbox's process proves that it is the one.
    pub token: Token,
    dir: PathBuf,
    /// Locked for a whole change: one at a time, and no answer is taken in meanwhile.
    line: Mutex<Line>,
    since: Instant,
    state: Mutex<State>,
}

/// All outboxes of this host, by number.
#[derive(Debug)]
pub struct Outboxes {
    dir: PathBuf,
    all: Mutex<BTreeMap<OutboxId, Arc<Outbox>>>,
    /// Records that could not be read: what their outboxes have is not known.
    unreadable: Mutex<Vec<PathBuf>>,
    /// Profiles and sizes. Held for no other lock and no I/O.
    sizing: Mutex<Sizing>,
    started: Instant,
}

/// A control period, and the window of an SLO, where nothing else is configured.
pub const PERIOD_DEFAULT: Duration = Duration::from_secs(60);

/// What the pool keeps for all outboxes, and what they have of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charged {
    pub charged: PageCount,
    pub held: PageCount,
}

/// Why an outbox's space was not changed.
#[derive(Debug, thiserror::Error)]
pub enum Unchanged {
    #[error("write its record: {}", in_full(.0.as_ref()))]
    Record(anyhow::Error),
    /// The process did not say that it keeps to the new one. It is to have the one that it had.
    #[error("{}", in_full(.0.as_ref()))]
    Silent(anyhow::Error),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Outbox {
    fn new(dir: &Path, id: OutboxId, record: &Record, process: Process) -> Result<Outbox> {
        let charge =
            Charge::restored(Bytes(record.space), Bytes(record.charged)).context("its charge is below its space")?;
        let auto = record.auto.as_ref().map(settings::read).transpose().map_err(|what| anyhow!(what))?;
        let state = State {
            charge,
            process,
            figures: None,
            held: Bytes::ZERO,
            has_answered: false,
            problem: None,
            auto,
            lingers: false,
            hearing: Hearing::default(),
        };
        Ok(Outbox {
            id,
            vm: record.vm.clone(),
            vm_token: Token::from_hex(&record.vm_token).context("no token")?,
            token: Token::from_hex(&record.token).context("no token")?,
            dir: dir.to_owned(),
            line: Mutex::new(Line::new(&socket_path(dir, id))),
            since: Instant::now(),
            state: Mutex::new(state),
        })
    }

    fn record(&self) -> Record {
        let state = lock(&self.state);
        Record {
            vm: self.vm.clone(),
            vm_token: self.vm_token.to_hex(),
            token: self.token.to_hex(),
            space: state.charge.space().0,
            charged: state.charge.charged().0,
            pid: match state.process {
                Process::Runs(pid, start) => (pid, start),
                Process::Expected(_) | Process::Ended => (0, 0),
            },
            auto: state.auto.as_ref().map(settings::shown),
        }
    }

    /// Writes down that its process has come.
    ///
    /// # Errors
    /// The disk's.
    pub fn note_process(&self) -> Result<()> {
        let _alone = lock(&self.line);
        self.write_record()
    }

    fn write_record(&self) -> Result<()> {
        self.record().write(&record_path(&self.dir, self.id))
    }

    /// Nothing, once its process has ended.
    pub fn charged(&self) -> Charged {
        let state = lock(&self.state);
        match state.process {
            Process::Ended => Charged::default(),
            Process::Expected(_) | Process::Runs(..) => {
                Charged { charged: state.charge.charged().pages_ceil(), held: state.held.pages_ceil() }
            }
        }
    }

    /// The space that it is to have.
    pub fn space(&self) -> Bytes {
        lock(&self.state).charge.space()
    }

    /// When it came, among those of one name: the later is the larger.
    pub fn came_at(&self) -> u64 {
        match lock(&self.state).process {
            Process::Expected(_) => u64::MAX,
            Process::Runs(_, start) => start,
            Process::Ended => 0,
        }
    }

    /// Its process, if it runs as far as is known.
    pub fn process(&self) -> Option<(u32, u64)> {
        match lock(&self.state).process {
            Process::Runs(pid, start) => Some((pid, start)),
            Process::Expected(_) | Process::Ended => None,
        }
    }

    fn has_ended(&self) -> bool {
        matches!(lock(&self.state).process, Process::Ended)
    }

    /// Has nobody else change it until the guard is dropped.
    pub fn change(&self) -> Changing<'_> {
        Changing { outbox: self, line: lock(&self.line) }
    }

    /// Its process has ended. Nothing is charged for it any more.
    pub fn end(&self) {
        let mut state = lock(&self.state);
        (state.process, state.figures, state.held) = (Process::Ended, None, Bytes::ZERO);
        state.problem = Some("its process has ended, and what was in it is gone".to_owned());
    }

    /// As it is shown, without what its jobs do ([`Outboxes::info`]). `has_vm`: its VM has not ended.
    fn info(&self, has_vm: bool) -> OutboxInfo {
        let charged_bytes = self.charged().charged.bytes().0;
        let state = lock(&self.state);
        let is_starting = !state.has_answered && self.since.elapsed() < START_MAX;
        let shown = match state.process {
            Process::Ended => OutboxState::Ended,
            Process::Expected(_) => OutboxState::Starting,
            Process::Runs(..) if state.figures.is_none() && is_starting => OutboxState::Starting,
            Process::Runs(..) if state.figures.is_none() => OutboxState::Silent,
            Process::Runs(..) if has_vm => OutboxState::Serving,
            Process::Runs(..) => OutboxState::Lingering,
        };
        OutboxInfo {
            vm: self.vm.clone(),
            state: shown,
            problem: state.problem.clone().filter(|_| shown != OutboxState::Starting),
            space_bytes: state.charge.space().0,
            charged_bytes,
            pid: match state.process {
                Process::Runs(pid, _) => Some(pid),
                Process::Expected(_) | Process::Ended => None,
            },
            figures: state.figures.map(|(figures, at)| shown_figures(&figures, at.elapsed())),
            auto: None,
            profile: None,
        }
    }
}

/// An outbox that nobody else changes meanwhile, because its line is locked.
#[derive(Debug)]
pub struct Changing<'a> {
    outbox: &'a Outbox,
    line: MutexGuard<'a, Line>,
}

impl Changing<'_> {
    /// It is to have another space from now on, and what that needs is charged. The caller has the policy's lock, and has found
    /// that there is room. What it was before is for [`Self::carry_out`].
    pub fn begin(&self, space: Bytes, auto: Option<Auto>) -> Before {
        let mut state = lock(&self.outbox.state);
        let before = Before { charge: state.charge, auto: state.auto };
        (state.charge, state.auto) = (before.charge.begin(space), auto);
        before
    }

    /// What would be charged with this space beyond what is.
    pub fn growth(&self, space: Bytes) -> PageCount {
        let charge = lock(&self.outbox.state).charge;
        charge.begin(space).charged().pages_ceil() - charge.charged().pages_ceil()
    }

    /// Writes it down and has the process keep to it.
    ///
    /// # Errors
    /// It is to have the space that it had: the disk's, or the process does not answer.
    pub fn carry_out(&mut self, before: Before) -> Result<(), Unchanged> {
        if let Err(error) = self.outbox.write_record() {
            let mut state = lock(&self.outbox.state);
            (state.charge, state.auto) = (state.charge.withdrawn(before.charge), before.auto);
            return Err(Unchanged::Record(error));
        }
        self.look().map_err(|error| {
            let mut state = lock(&self.outbox.state);
            (state.charge, state.auto) = (state.charge.taken_back(before.charge), before.auto);
            drop(state);
            if let Err(error) = self.outbox.write_record() {
                tracing::warn!(vm = %self.outbox.vm, "write its outbox's record: {}", in_full(error.as_ref()));
            }
            Unchanged::Silent(error)
        })
    }

    /// Asks the process, and has it keep to its space if it does not.
    pub fn look(&mut self) -> Result<()> {
        let state = &self.outbox.state;
        let asked = self.ask();
        let charge_before = lock(state).charge;
        let taken = asked.and_then(|figures| {
            let said =
                Said { space: Bytes(figures.space), used: Bytes(figures.used), disposable: Bytes(figures.disposable) };
            Ok((figures, charge_before.after(&said)?))
        });
        if taken.is_err() {
            self.line.hang_up();
        }
        let mut state = lock(state);
        match taken {
            Ok((figures, charge)) => {
                (state.charge, state.held, state.has_answered) = (charge, Bytes(figures.used), true);
                (state.figures, state.problem) = (Some((figures, Instant::now())), None);
                drop(state);
                if charge != charge_before
                    && let Err(error) = self.outbox.write_record()
                {
                    // The next daemon keeps more for it than it has to.
                    tracing::warn!(vm = %self.outbox.vm, "write its outbox's record: {}", in_full(error.as_ref()));
                }
                Ok(())
            }
            Err(error) => {
                let problem = in_full(error.as_ref());
                state.figures = None;
                state.problem = Some(format!("its process does not answer as it should: {problem}"));
                Err(error)
            }
        }
    }

    /// Asks what became of its guest's jobs, if it may know.
    ///
    /// # Errors
    /// It does not answer, or says what cannot be. All else goes on.
    pub fn hear(&mut self, now_ms: u64) -> Result<Option<Heard>> {
        let cursor = {
            let state = lock(&self.outbox.state);
            if !state.hearing.is_worth_it() {
                return Ok(None);
            }
            state.hearing.cursor()
        };
        let asked = hearing::ask(&mut self.line, cursor);
        let mut state = lock(&self.outbox.state);
        match asked {
            Ok(answers) => Ok(state.hearing.take(now_ms, answers)),
            Err(error) => {
                state.hearing.miss();
                drop(state);
                self.line.hang_up();
                Err(error)
            }
        }
    }

    fn ask(&mut self) -> Result<Figures> {
        let wanted = self.outbox.space();
        let figures = self.line.ask(|seq| Packet::Look { seq })?;
        if Bytes(figures.space) == wanted {
            return Ok(figures);
        }
        let figures = self.line.ask(|seq| Packet::SetSpace { seq, bytes: wanted.0 })?;
        ensure!(
            Bytes(figures.space) == wanted,
            "it was told to keep to {wanted}, and keeps to {}",
            Bytes(figures.space)
        );
        Ok(figures)
    }
}

fn shown_figures(figures: &Figures, age: Duration) -> OutboxFigures {
    let kept = figures.used.saturating_sub(figures.disposable);
    OutboxFigures {
        age_ms: age.as_millis().try_into().unwrap_or(u64::MAX),
        space_bytes: figures.space,
        used_bytes: figures.used,
        delivered_bytes_kept: figures.disposable,
        available_bytes: figures.space.saturating_sub(kept),
        files: figures.files,
        readers: figures.readers,
        waiting_writes: figures.waiting,
        written_bytes: figures.written,
        acknowledged_bytes: figures.acknowledged,
        refused_changes: figures.refused,
        blocked_ms: figures.blocked_us / 1000,
    }
}

impl Outboxes {
    /// Those of this state directory, whose sizes are looked at once a `period`.
    pub fn new(state_dir: &Path, period: Duration) -> Outboxes {
        Outboxes {
            dir: dir(state_dir),
            all: Mutex::default(),
            unreadable: Mutex::default(),
            sizing: Mutex::new(Sizing::new(period)),
            started: Instant::now(),
        }
    }

    /// One that is about to be made, of a VM with this token. It has no place here yet.
    ///
    /// # Errors
    /// There are no random numbers.
    pub fn plan(&self, vm: &str, vm_token: Token, space: Bytes) -> Result<Arc<Outbox>> {
        let random = |what: &str| crate::random::bytes().with_context(|| format!("make {what}"));
        let id = random("an outbox's number")?;
        let record = Record {
            vm: vm.to_owned(),
            vm_token: vm_token.to_hex(),
            token: Token(random("a token")?).to_hex(),
            space: space.0,
            charged: space.0,
            pid: (0, 0),
            auto: None,
        };
        let id = OutboxId(u64::from_le_bytes(*id.first_chunk().context("make an outbox's number")?));
        Ok(Arc::new(Outbox::new(&self.dir, id, &record, Process::Expected(None))?))
    }

    /// What the pool keeps for all.
    pub fn charged(&self) -> Charged {
        self.all().iter().map(|outbox| outbox.charged()).fold(Charged::default(), |sum, one| Charged {
            charged: sum.charged + one.charged,
            held: sum.held + one.held,
        })
    }

    /// Takes one in: it is charged. The caller has the policy's lock, and has found that there is room.
    pub fn insert(&self, outbox: &Arc<Outbox>) {
        lock(&self.all).insert(outbox.id, Arc::clone(outbox));
    }

    pub fn is_full(&self) -> bool {
        lock(&self.all).len() >= OUTBOXES_MAX
    }

    /// Makes its record and what its process will listen on.
    ///
    /// # Errors
    /// The disk's.
    pub fn make(&self, outbox: &Outbox) -> Result<()> {
        outbox.write_record()?;
        let listener = Listener::bind(&socket_path(&self.dir, outbox.id)).context("make its control socket")?;
        lock(&outbox.state).process = Process::Expected(Some(listener));
        Ok(())
    }

    /// Its process has come: what it listens on.
    ///
    /// # Errors
    /// It has come before, or its VM was given up.
    pub fn take(&self, outbox: &Outbox, pid: u32, start: u64) -> Result<Listener> {
        // Under this lock it is not forgotten meanwhile.
        let all = lock(&self.all);
        ensure!(all.contains_key(&outbox.id), "its VM was given up");
        let mut state = lock(&outbox.state);
        let Process::Expected(listener) = &mut state.process else { bail!("its process has come before") };
        let listener = listener.take().context("it is not made yet")?;
        state.process = Process::Runs(pid, start);
        Ok(listener)
    }

    /// It gets nothing to listen on after all.
    pub fn refuse(&self, outbox: &Outbox, listener: Listener) {
        lock(&outbox.state).process = Process::Expected(Some(listener));
    }

    pub fn all(&self) -> Vec<Arc<Outbox>> {
        lock(&self.all).values().cloned().collect()
    }

    /// Records that could not be read when the daemon started, and are there still.
    pub fn unreadable(&self) -> Vec<PathBuf> {
        lock(&self.unreadable).iter().filter(|path| path.exists()).cloned().collect()
    }

    /// The one whose process has this token.
    pub fn by_token(&self, token: Token) -> Option<Arc<Outbox>> {
        lock(&self.all).values().find(|outbox| outbox.token == token).cloned()
    }

    /// The outbox of the VM with this token.
    pub fn of_vm(&self, vm_token: Token) -> Option<Arc<Outbox>> {
        lock(&self.all).values().find(|outbox| outbox.vm_token == vm_token).cloned()
    }

    /// Forgets that of a VM that is gone, if its process has not come. One whose process runs is watched until that ends.
    pub fn forget_expected(&self, vm_token: Token) {
        let mut all = lock(&self.all);
        let is_gone = |outbox: &Arc<Outbox>| {
            outbox.vm_token == vm_token && matches!(lock(&outbox.state).process, Process::Expected(_))
        };
        let Some(gone) = all.values().find(|outbox| is_gone(outbox)).cloned() else { return };
        all.remove(&gone.id);
        drop(all);
        self.remove_files(gone.id);
    }

    fn forget(&self, outbox: &Outbox) {
        // Who changes it now writes its record once more.
        let _alone = lock(&outbox.line);
        lock(&self.all).remove(&outbox.id);
        self.remove_files(outbox.id);
    }

    fn remove_files(&self, id: OutboxId) {
        // The record last: without it nobody would know the socket.
        for path in [socket_path(&self.dir, id), record_path(&self.dir, id)] {
            if let Err(error) = std::fs::remove_file(&path)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!("remove {}: {error}", path.display());
            }
        }
    }

    /// Takes in those of an earlier daemon. `has_vm`: the VM with this token runs.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn load(&self, has_vm: impl Fn(Token) -> bool) -> std::io::Result<()> {
        for (path, id, record) in record::list(&self.dir)? {
            let found = record.and_then(|record| {
                let (pid, start) = record.pid;
                let has_come = pid != 0;
                let process = match has_come && !crate::registry::has_ended(&record.vm, pid, start) {
                    true => Process::Runs(pid, start),
                    false => Process::Ended,
                };
                Ok((has_come, Outbox::new(&self.dir, id, &record, process)?))
            });
            match found {
                // Of a process that has not come, nobody has what it would listen on.
                Ok((has_come, outbox)) if outbox.has_ended() && !(has_come && has_vm(outbox.vm_token)) => {
                    self.remove_files(id);
                }
                Ok((_, outbox)) => {
                    if outbox.has_ended() {
                        outbox.end();
                    }
                    self.insert(&Arc::new(outbox));
                }
                Err(error) => {
                    let error = in_full(error.as_ref());
                    tracing::error!("{}: {error}; it is left alone, and its outbox is not charged", path.display());
                    lock(&self.unreadable).push(path);
                }
            }
        }
        Ok(())
    }
}

/// Where outboxes' records and sockets are: for the daemon's user alone.
pub fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join("outboxes")
}

fn socket_path(dir: &Path, id: OutboxId) -> PathBuf {
    dir.join(format!("{id}.sock"))
}
