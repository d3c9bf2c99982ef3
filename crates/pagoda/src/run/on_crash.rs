//! `--on-crash restore`: stays as the parent of a VM's QEMU, and restores the VM when QEMU crashes.
//!
//! The child is this same command, which becomes QEMU as it does without the option; so the daemon sees nothing new, and
//! terminal, input and output are QEMU's. What asks to end (SIGTERM, SIGINT, SIGHUP) is passed on. The order behind a crash: the
//! daemon has let go of the VM, which includes that its last snapshot is filled -> the newest snapshot is chosen -> the child is
//! `pagoda vm restore`.
//!
//! **What counts as a crash**: QEMU ended by a signal that nobody passed on and that does not ask to end ([`ASK`]). A QEMU that
//! ends by itself, whatever its status, was ended by its guest or its user, or could not be started.
//!
//! **What is restored**: a snapshot that was taken since this command started, else the one that it started from. Never an older
//! one: a VM that is booted anew and crashes would become what it was long ago, with other disks and another command line.
//!
//! **What fails.** If this process is killed, QEMU gets SIGTERM from the kernel and ends in order: a VM that nobody watches would
//! not be restored, and nobody would have its exit status. If there is no daemon, it is waited for.

mod budget;
pub mod signals;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use pagoda_api::{Candidate, Client, ErrorCode, SnapshotName, in_full};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use self::budget::Budget;
pub use self::budget::CRASH_WINDOW;
use self::signals::Signals;
use crate::cli::OnCrash;

/// Tells the child whose it is.
pub const ENV_PARENT: &str = "PAGODA_PARENT";
/// Signals that ask a process to end: whoever sends them wants the VM to be over.
const ASK: [i32; 4] = [SIGTERM, SIGINT, SIGHUP, SIGQUIT];
/// How long the daemon may take to let go of a VM that has crashed: its last snapshot is filled from what it leaves.
const RELEASE_MAX: Duration = Duration::from_secs(600);
/// The pause between two looks whether the daemon has let go.
const LOOK: Duration = Duration::from_millis(10);

/// What a VM was started from, by `pagoda vm restore` and `rollback`.
#[derive(Debug, Clone)]
pub struct Origin {
    pub snapshot: SnapshotName,
    /// It is restored also if its disks have changed.
    pub force: bool,
    /// The words of the limit that its user gave.
    pub dram: Option<String>,
}

/// What the first child is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum First {
    /// This command with its own words.
    Own,
    /// `pagoda vm restore` from the origin's snapshot, which this process may have chosen.
    Restore,
}

/// What this process has to do about crashes: nothing, if it is the child of one that does it.
///
/// # Errors
/// Its parent has ended.
pub fn duty(option: Option<OnCrash>) -> Result<Option<OnCrash>> {
    let Some(parent) = std::env::var_os(ENV_PARENT) else { return Ok(option) };
    // It stays over execve(2): this process becomes QEMU.
    set_parent_process_death_signal(Some(Signal::TERM)).context("end with the parent")?;
    let is_there = getppid().is_some_and(|pid| parent == pid.as_raw_nonzero().to_string().as_str());
    ensure!(is_there, "{ENV_PARENT} is set, and that process is not this one's parent: unset it");
    Ok(None)
}

/// Runs this command in a child, again and again as long as its VM is restored. Ends this process with the status of QEMU.
///
/// # Errors
/// The daemon does not answer or does not allow it: nothing was started.
pub fn watch(client: &Client, on_crash: OnCrash, vm: &str, origin: Option<Origin>, first: First) -> Result<()> {
    let client = client.anchored().context("find the directory of this process")?;
    let known = client.snapshots().context("--on-crash restore")?.snapshots;
    let known = known.iter().filter(|of| of.vm == vm).map(|of| (of.name.clone(), of.taken_unix_ms)).collect();
    let program = std::env::current_exe().context("find this program")?;
    let first = origin.as_ref().filter(|_| first == First::Restore).map(|origin| origin.snapshot.clone());
    let mut watched = Watched {
        client,
        vm: vm.to_owned(),
        program,
        origin,
        known,
        budget: Budget::new(on_crash.restores_max),
        signals: Signals::handle()?,
    };
    let words = first.map_or_else(|| std::env::args_os().skip(1).collect(), |from| watched.restore_words(&from));
    watched.run(words)
}

struct Watched {
    client: Client,
    vm: String,
    program: PathBuf,
    origin: Option<Origin>,
    /// Snapshots that were there before: name and time.
    known: BTreeSet<(String, u64)>,
    budget: Budget,
    signals: Signals,
}

impl Watched {
    fn run(&mut self, mut words: Vec<OsString>) -> Result<()> {
        loop {
            let child = self.start(&words)?;
            let pid = child.id();
            let status = self.signals.pass_on_until_end(child)?;
            let Some(signal) = status.signal().filter(|signal| is_crash(*signal) && !self.signals.was_asked()) else {
                std::process::exit(code(status));
            };
            let name = signal_name(signal);
            match self.prepare(pid) {
                Ok(snapshot) => {
                    let vm = &self.vm;
                    eprintln!(
                        "pagoda: the QEMU of {vm} ended by {name}; {vm} is restored from {snapshot}{}",
                        self.budget
                    );
                    words = self.restore_words(&snapshot);
                }
                Err(error) => {
                    let why = in_full(error.as_ref());
                    eprintln!("pagoda: the QEMU of {} ended by {name}, and is not restored: {why}", self.vm);
                    std::process::exit(code(status));
                }
            }
        }
    }

    fn start(&self, words: &[OsString]) -> Result<Child> {
        let mut command = Command::new(&self.program);
        command.args(words).env(ENV_PARENT, getpid().as_raw_nonzero().to_string());
        command.spawn().with_context(|| format!("start {}", self.program.display()))
    }

    /// Behind a crash of the VM's process: what it is to be restored from.
    fn prepare(&mut self, pid: u32) -> Result<SnapshotName> {
        self.wait_until_released(pid)?;
        let snapshot = self.choose()?;
        let restores_max = self.budget.restores_max();
        ensure!(
            self.budget.spend(Instant::now()),
            "it was restored {restores_max} times within {} min: find out why it crashes",
            CRASH_WINDOW.as_secs() / 60
        );
        Ok(snapshot)
    }

    fn wait_until_released(&mut self, pid: u32) -> Result<()> {
        let deadline = Instant::now() + RELEASE_MAX;
        loop {
            match self.client.vm(&self.vm) {
                Err(error) if error.code() == Some(ErrorCode::NoSuchVm) => return Ok(()),
                // A daemon that has ended is followed by another one.
                Err(error) if error.code().is_some() => return Err(error.into()),
                Ok(vm) if vm.pid.is_some_and(|other| other != pid) => bail!("another process has become {}", self.vm),
                Ok(_) | Err(_) => {}
            }
            self.signals.look();
            ensure!(!self.signals.was_asked(), "it was asked to end");
            ensure!(Instant::now() < deadline, "the daemon did not let go of it in {} s", RELEASE_MAX.as_secs());
            std::thread::sleep(LOOK);
        }
    }

    fn choose(&self) -> Result<SnapshotName> {
        let force = self.origin.as_ref().is_some_and(|origin| origin.force);
        let mut restorable = match self.client.restorable(&self.vm) {
            Err(error) if error.code() == Some(ErrorCode::NoSuchSnapshot) => pagoda_api::Restorable::default(),
            restorable => restorable?,
        };
        restorable.candidates.retain(|of| !self.is_known(of));
        let (newest, passed_over) = restorable.newest(force);
        passed_over.iter().for_each(|(_, why)| eprintln!("pagoda: {why}"));
        match (newest, &self.origin) {
            (Some(newest), _) => Ok(SnapshotName::new(&*self.vm, &*newest.name)),
            (None, Some(origin)) => Ok(origin.snapshot.clone()),
            (None, None) => {
                bail!("no snapshot since it was started can be restored: `pagoda vm restore` takes older ones")
            }
        }
    }

    fn is_known(&self, snapshot: &Candidate) -> bool {
        self.known.contains(&(snapshot.name.clone(), snapshot.taken_unix_ms))
    }

    fn restore_words(&self, snapshot: &SnapshotName) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["--socket".into(), self.client.socket().into()];
        words.extend(["vm", "restore", &self.vm, "--from", &snapshot.to_string()].map(OsString::from));
        if let Some(origin) = &self.origin {
            words.extend(origin.dram.iter().flat_map(|dram| ["--dram", dram]).map(OsString::from));
            words.extend(origin.force.then(|| "--force".into()));
        }
        words
    }
}

/// Whether a process that this signal has ended did not end in order.
fn is_crash(signal: i32) -> bool {
    !ASK.contains(&signal)
}

/// The exit status that a shell would see.
fn code(status: ExitStatus) -> i32 {
    status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1)
}

fn signal_name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_asks_to_end_is_no_crash() {
        for signal in [signal_hook::consts::SIGSEGV, signal_hook::consts::SIGABRT, signal_hook::consts::SIGKILL] {
            assert!(is_crash(signal), "{signal}");
            assert_eq!(code(ExitStatus::from_raw(signal)), 128 + signal);
        }
        assert!(!ASK.iter().any(|signal| is_crash(*signal)));
        assert_eq!(code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!((signal_name(11), signal_name(35)), ("SIGSEGV".to_owned(), "signal 35".to_owned()));
    }
}
