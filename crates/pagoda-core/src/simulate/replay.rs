//! Makes rounds: those of a simulation, and those of a recording again.

use crate::policy::changes::Changes;
use crate::policy::round::{HostReport, Last, Outcome, Rounds, VmReport};
use crate::policy::{HostSettings, InvalidSettings, Policy, SettingsError};

/// Sees each round of a simulation, as a recorder in the daemon does.
pub trait Observer {
    /// The rounds begin, with these settings and this seed of the pages that are sampled.
    fn begin(&mut self, host: &HostSettings, seed: u64);

    /// A round is about to be made.
    fn before(&mut self, policy: &Policy);

    /// The round was made, with this result.
    fn after(&mut self, policy: &Policy, host: &HostReport, vms: &[VmReport], made: Made<'_>);
}

/// What a round made of its input.
#[derive(Clone, Copy, Debug)]
pub struct Made<'a> {
    /// In the order of the reports.
    pub outcomes: &'a [Outcome],
    /// The plan, and what it was made from.
    pub last: &'a Last,
}

/// Rounds whose inputs come from elsewhere: from a recording, or from a simulated world.
#[derive(Debug)]
pub struct Replay {
    pub(super) rounds: Rounds,
    outcomes: Vec<Outcome>,
}

impl Replay {
    /// The rounds of a host that has no VM yet. `seed`: of the pages that are sampled.
    ///
    /// # Errors
    /// The settings cannot be used.
    pub fn new(host: HostSettings, seed: u64) -> Result<Replay, InvalidSettings> {
        Ok(Replay { rounds: Rounds::new(Policy::new(host)?, seed), outcomes: Vec::new() })
    }

    /// Sets what was set.
    ///
    /// # Errors
    /// Settings that cannot be used.
    pub fn change(&mut self, changes: &Changes) -> Result<(), SettingsError> {
        changes.apply(&mut self.rounds)
    }

    /// Makes a round of this input, and gives what it made of it.
    pub fn make(&mut self, host: &HostReport, vms: &[VmReport]) -> Option<Made<'_>> {
        self.outcomes = self.rounds.make(host, vms);
        self.rounds.last().map(|last| Made { outcomes: &self.outcomes, last })
    }

    /// As [`Self::make`], and shows the round to an observer.
    pub(super) fn make_seen(
        &mut self,
        host: &HostReport,
        vms: &[VmReport],
        observer: &mut dyn Observer,
    ) -> Option<Made<'_>> {
        observer.before(&self.rounds.policy);
        self.make(host, vms)?;
        let made = Made { outcomes: &self.outcomes, last: self.rounds.last()? };
        observer.after(&self.rounds.policy, host, vms, made);
        Some(made)
    }
}
