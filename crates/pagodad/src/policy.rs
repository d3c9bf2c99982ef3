//! The memory policy at work: [`pagoda_core::policy`] decides, this measures and carries out.
//!
//! [`State`] is what is remembered between rounds. Its lock is taken after the registry's, never before it, and never held
//! while an engine, a monitor or a file is waited for. [`governor`] waits until a round is due, [`rounds`] makes it,
//! and [`recording`] writes it down if that is configured.
//!
//! What the guest sees when this thread hangs or the daemon dies: limits, balloons and blocked VMs stay as they are. The
//! next daemon knows a blocked VM by its record and lets it run as soon as a plan says so.

pub mod block;
mod doorbell;
pub mod governed;
pub mod governor;
pub mod host;
mod recording;
pub mod report;
mod round_wait;
pub mod rounds;
pub mod settings;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pagoda_api::types::VmKind;
use pagoda_core::policy::host::HostMemory;
use pagoda_core::policy::round::{Rounds, VmmKind};
use pagoda_core::policy::{Policy, VmId, VmSettings};

use crate::config::PolicyConfig;
use crate::record::Record;
use doorbell::Doorbell;
use recording::Recording;
use round_wait::RoundWaits;

/// The policy of this daemon.
#[derive(Debug)]
pub struct Governor {
    state: Mutex<State>,
    /// Rung when a round should come early.
    pub doorbell: Doorbell,
    /// Locked for a whole round by the thread that makes it, and by nobody else.
    recording: Mutex<Recording>,
    /// The seed of the pages that rounds choose for samples.
    seed: u64,
    started: Instant,
}

/// What is remembered between rounds.
#[derive(Debug)]
pub struct State {
    pub rounds: Rounds,
    pub config: PolicyConfig,
    /// The host's memory, when it was last read.
    pub memory: HostMemory,
    /// How long rounds waited for locks.
    pub waits: RoundWaits,
    next_id: u32,
}

impl Governor {
    /// The policy as configured.
    ///
    /// # Errors
    /// Settings that cannot be used; the text says which.
    pub fn new(config: PolicyConfig) -> anyhow::Result<Governor> {
        let memory = host::read_memory()?;
        let policy = Policy::new(settings::host_settings(&config, memory.total)?)?;
        let seed = std::process::id().into();
        let rounds = Rounds::new(policy, seed);
        let recording = Mutex::new(Recording::new(config.recording.clone()));
        let state = Mutex::new(State { rounds, config, memory, waits: RoundWaits::default(), next_id: 0 });
        Ok(Governor { state, doorbell: Doorbell::default(), recording, seed, started: Instant::now() })
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The policy's clock: milliseconds since the daemon made it.
    pub fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

impl State {
    /// A number that no VM of this daemon had before.
    pub fn new_id(&mut self) -> VmId {
        self.next_id += 1;
        VmId(self.next_id)
    }

    /// Takes in a VM that runs already, found by its record. What cannot be used of the record is left out, and logged.
    pub fn readmit(&mut self, id: VmId, record: &Record) {
        let settings =
            settings::vm_settings(&record.spec, settings::memory_of(record), &self.config).unwrap_or_else(|error| {
                tracing::error!(vm = %record.name, "its settings are not used: {error}");
                VmSettings::new(settings::memory_of(record))
            });
        let overhead = self.rounds.expected_overhead(vmm_kind(record.kind), &settings);
        if let Err(error) = self.rounds.policy.readmit(id, settings, overhead) {
            tracing::error!(vm = %record.name, "left out of the memory policy: {error}");
        }
    }
}

/// The policy's word for the kind of a VMM.
pub fn vmm_kind(kind: VmKind) -> VmmKind {
    match kind {
        VmKind::Qemu => VmmKind::Qemu,
        VmKind::Plain => VmmKind::Plain,
    }
}
