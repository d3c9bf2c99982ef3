//! The thread of the arbiter: it asks etcd, one question after the other, and looks now and then whether it is there.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_api::in_full;
use pagoda_move::owner::{Claim, Registered};
use pagoda_move::units::{AttemptId, Generation, HostKey, RegisterId};
use pagoda_pool::config::PoolConfig;
use rmap_etcd::{EtcdError, Register, Registers};

use super::{Job, unanswered};
use crate::registry::Registry;

const PART: &str = "arbiter of moves";
/// How often it is looked whether etcd is there while nothing is asked: a member that is away is not the one that is asked first.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Registers that could not be removed so far. Those beyond stay.
const REMOVALS_MAX: usize = 1024;

/// Starts the thread, if an arbiter is configured.
///
/// # Errors
/// No thread can be had.
pub fn start(registry: &Arc<Registry>) -> std::io::Result<()> {
    let arbiter = &registry.moves.arbiter;
    if !registry.config.moves.arbiter {
        return Ok(());
    }
    let (jobs, heard) = channel();
    arbiter.lock().is_configured = true;
    let mut worker = Worker { registry: Arc::clone(registry), registers: None, number: None, removals: Vec::new() };
    std::thread::Builder::new().name("arbiter".into()).spawn(move || worker.run(&heard))?;
    let _ = arbiter.jobs.set(jobs);
    Ok(())
}

struct Worker {
    registry: Arc<Registry>,
    /// `None` until the pool's configuration could be read.
    registers: Option<Registers>,
    /// Which registers these are, by the last look. `None`: it has not told.
    number: Option<RegisterId>,
    removals: Vec<(RegisterId, AttemptId)>,
}

impl Worker {
    fn run(&mut self, jobs: &Receiver<Job>) {
        let mut look_at = Instant::now();
        loop {
            match jobs.recv_timeout(look_at.saturating_duration_since(Instant::now())) {
                Ok(Job::Ask { vm, claim, answer }) => match self.answer(&vm, &claim) {
                    Ok(registered) => {
                        self.works();
                        answer(registered);
                    }
                    Err(error) => {
                        self.failed(&error);
                        answer(None);
                        // Each of them would wait as long as this one has. They are asked again.
                        for job in jobs.try_iter() {
                            self.defer(job);
                        }
                        look_at = Instant::now() + LOOK_EVERY;
                    }
                },
                Ok(removal @ Job::Remove(..)) => {
                    self.defer(removal);
                    look_at = Instant::now();
                }
                Err(RecvTimeoutError::Timeout) => {
                    match self.look().and_then(|()| self.remove()) {
                        Ok(()) => self.works(),
                        Err(error) => self.failed(&error),
                    }
                    look_at = Instant::now() + LOOK_EVERY;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn defer(&mut self, job: Job) {
        match job {
            Job::Remove(register, attempt) if self.removals.len() < REMOVALS_MAX => {
                self.removals.push((register, attempt));
            }
            job => unanswered(job),
        }
    }

    /// Finds out which registers these are.
    fn look(&mut self) -> Result<()> {
        self.number = None;
        let registers = match &mut self.registers {
            Some(registers) => registers,
            None => self.registers.insert(open(&self.registry)?),
        };
        self.number = RegisterId::of(registers.look()?);
        Ok(())
    }

    fn answer(&mut self, vm: &str, claim: &Claim) -> Result<Option<Registered>> {
        if self.number.is_none() {
            self.look()?;
        }
        let Some(registers) = self.registers.as_mut().filter(|_| self.number == Some(claim.register)) else {
            // That is no trouble of etcd's.
            tracing::warn!(
                vm,
                "its move was begun with the arbiter {}, which this host does not ask now",
                claim.register
            );
            return Ok(None);
        };
        let after = registers.change(claim.attempt.0, |before| {
            let before = before.map(|before| checked(before, vm, claim)).transpose()?;
            let after = claim.apply(before);
            Ok(after.filter(|after| before != Some(*after)).map(|after| register_of(vm, after)))
        });
        match after {
            Ok(after) => Ok(after.map(|after| registered_of(&after))),
            // The entry of this attempt alone is wrong.
            Err(error @ EtcdError::Garbage { .. }) => {
                tracing::error!(vm, "the arbiter decides nothing about its move: {error}");
                Ok(None)
            }
            Err(error) => {
                self.number = None;
                Err(error.into())
            }
        }
    }

    /// What is left to be removed of these registers. Others are gone, or are asked by another daemon.
    fn remove(&mut self) -> Result<()> {
        while let Some((register, attempt)) = self.removals.last() {
            if let Some(registers) = self.registers.as_mut().filter(|_| self.number == Some(*register)) {
                registers.remove(attempt.0)?;
            }
            self.removals.pop();
        }
        Ok(())
    }

    fn works(&self) {
        let mut standing = self.registry.moves.arbiter.lock();
        (standing.register, standing.trouble) = (self.number, None);
        drop(standing);
        self.registry.parts.works(PART);
    }

    fn failed(&self, error: &anyhow::Error) {
        let why = in_full(error.as_ref());
        let mut standing = self.registry.moves.arbiter.lock();
        (standing.register, standing.trouble) = (None, Some(why.clone()));
        drop(standing);
        let effect = "a move whose link is cut in the moment of the grant waits for the link";
        self.registry.parts.failed(PART, &format!("{why}; meanwhile {effect}"));
    }
}

fn open(registry: &Registry) -> Result<Registers> {
    let report = |what: &str| tracing::debug!("{PART}: {what}");
    let dir = &registry.config.pool_dir;
    let pool = PoolConfig::read(dir, None, report)?;
    let path = dir.join("pool.toml");
    let Some(etcd) = pool.etcd else {
        bail!("[moves] arbiter = \"etcd\" needs the address of etcd: `cluster` in {}", path.display());
    };
    Registers::open(etcd).with_context(|| format!("use the etcd of {}", path.display()))
}

/// What a register of this attempt can hold. Nobody keeps others from writing to etcd.
fn checked(register: &Register, vm: &str, claim: &Claim) -> Result<Registered, String> {
    let registered = registered_of(register);
    if register.vm != vm {
        return Err(format!("it is of the VM {}", register.vm));
    }
    if !claim.is_possible(registered) {
        return Err(format!("no host of this move can own it at generation {}", register.generation));
    }
    Ok(registered)
}

fn registered_of(register: &Register) -> Registered {
    Registered { generation: Generation(register.generation), owner: HostKey(register.owner) }
}

fn register_of(vm: &str, registered: Registered) -> Register {
    Register { vm: vm.to_owned(), generation: registered.generation.0, owner: registered.owner.0 }
}

#[cfg(test)]
mod tests;
