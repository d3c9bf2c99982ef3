//! The memory policy at work: [`pagoda_core::policy`] decides, this brings it what is and carries out what it wants.
//!
//! [`Brain`] is what is remembered, behind one lock that is taken after the registry's, never before it, and never held
//! while an engine, a monitor or a file is waited for. [`governor`] says when a round is due, [`rounds`] makes it.
//!
//! What the guest sees when this thread hangs or the daemon dies: limits, balloons and blocked VMs stay as they are. The
//! next daemon knows a blocked VM by its record and lets it run as soon as a plan says so.

pub mod block;
pub mod governor;
pub mod host;
pub mod rounds;
pub mod settings;
pub mod tell;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pagoda_abi::record::{Kind, Record};
use pagoda_core::chance::Chance;
use pagoda_core::policy::growth::{Growth, Room, Wish, limit_for_min};
use pagoda_core::policy::{HostSample, Overhead, Plan, Policy, VmId, VmSettings};
use pagoda_core::units::{Bytes, PageCount};

use crate::config::PolicyConfig;
use governor::Bell;
use host::{Host, Memory, Pool};

/// Beside its memory, a VMM that was not measured yet is taken to have so much: QEMU with a few devices.
const QEMU_OVERHEAD: Bytes = Bytes::from_mib(64);
/// As [`QEMU_OVERHEAD`], of a program that only maps its RAM.
const PLAIN_OVERHEAD: Bytes = Bytes::from_mib(4);
/// And this part of its memory: page tables of 1/512 and ours, which are below 0.4 %.
const TABLES_PART: u64 = 256;

/// The policy of this daemon.
#[derive(Debug)]
pub struct Governor {
    brain: Mutex<Brain>,
    /// Rung when a round should come early.
    pub bell: Bell,
    started: Instant,
}

/// What is remembered between rounds.
#[derive(Debug)]
pub struct Brain {
    pub policy: Policy,
    pub config: PolicyConfig,
    pub host: Host,
    /// The host's, when it was last read.
    pub memory: Memory,
    pub growth: Growth,
    pub chance: Chance,
    /// What was measured of VMs, by kind: the most counts.
    pub overheads: BTreeMap<VmId, (Kind, PageCount)>,
    pub last: Option<Last>,
    next_id: u32,
}

/// The last round.
#[derive(Debug)]
pub struct Last {
    pub plan: Plan,
    pub host: HostSample,
    pub pool: Pool,
    pub wishes: Vec<Wish>,
    pub room: Room,
}

impl Governor {
    /// The policy as configured.
    ///
    /// # Errors
    /// Settings that cannot be used; the text says which.
    pub fn new(config: PolicyConfig) -> anyhow::Result<Governor> {
        let memory = Memory::read()?;
        let policy = Policy::new(settings::host_settings(&config, memory.total)?)?;
        let brain = Brain {
            policy,
            config,
            host: Host::default(),
            memory,
            growth: Growth::default(),
            chance: Chance::new(std::process::id().into()),
            overheads: BTreeMap::new(),
            last: None,
            next_id: 0,
        };
        Ok(Governor { brain: Mutex::new(brain), bell: Bell::default(), started: Instant::now() })
    }

    pub fn lock(&self) -> MutexGuard<'_, Brain> {
        self.brain.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The policy's clock.
    pub fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

/// What is reserved for a VM beside its min: its overhead, and the room above the min that page-out works in.
fn overhead_with_room(overhead: PageCount, settings: &VmSettings) -> Overhead {
    let limit = limit_for_min(settings.min).min(settings.cap);
    Overhead { overhead, reserve: limit.saturating_sub(settings.min) }
}

impl Brain {
    /// A number that no VM of this daemon had before.
    pub fn new_id(&mut self) -> VmId {
        self.next_id += 1;
        VmId(self.next_id)
    }

    /// What a VM that does not run yet will take beside its memory: as the largest of its kind that runs.
    pub fn expected_overhead(&self, kind: Kind, settings: &VmSettings) -> Overhead {
        let measured = self.overheads.values().filter(|(of, _)| *of == kind).map(|(_, overhead)| *overhead).max();
        let default = match kind {
            Kind::Qemu => QEMU_OVERHEAD,
            Kind::Plain => PLAIN_OVERHEAD,
        };
        let tables = PageCount(settings.memory.0 / TABLES_PART);
        overhead_with_room(measured.unwrap_or(default.pages_ceil()) + tables, settings)
    }

    /// What a VM takes beside its memory with other settings: what was measured, and other room above its min.
    pub fn overhead_with(&self, id: VmId, settings: &VmSettings) -> Overhead {
        let (Some(before), Some(now)) = (self.policy.settings(id), self.policy.overhead(id)) else {
            return Overhead::default();
        };
        let room = |settings: &VmSettings| overhead_with_room(PageCount::ZERO, settings).reserve;
        Overhead { reserve: now.reserve.saturating_sub(room(before)) + room(settings), ..now }
    }

    /// The limit of a VM that attaches with so much in DRAM, until the round that its coming causes: that and its part of
    /// what is free now.
    pub fn first_limit(&self, settings: &VmSettings, resident: PageCount) -> Option<PageCount> {
        let last = self.last.as_ref()?;
        let VmSettings { min, cap, .. } = *settings;
        let mut wishes = last.wishes.clone();
        wishes.push(Wish { resident, floor: min, target: min, cap });
        self.growth.clone().plan_limits(&wishes, &last.room).pop().filter(|limit| *limit < cap)
    }

    /// Takes in a VM that runs already, found by its record. What cannot be used of the record is left out, and said.
    pub fn readmit(&mut self, id: VmId, record: &Record) {
        let settings = settings::vm_settings(record, &self.config).unwrap_or_else(|error| {
            tracing::error!(vm = %record.name, "its settings are not used: {error}");
            VmSettings::new(settings::memory_of(record))
        });
        let overhead = self.expected_overhead(record.kind, &settings);
        if let Err(error) = self.policy.readmit(id, settings, overhead) {
            tracing::error!(vm = %record.name, "left out of the memory policy: {error}");
        }
    }

    pub fn remove(&mut self, id: VmId) {
        self.policy.remove(id);
        self.overheads.remove(&id);
    }
}
