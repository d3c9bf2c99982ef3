//! What was set between two rounds, so that rounds can be recorded and made again.
//!
//! [`Known`] is what a recorder knows of a policy's settings. [`Known::changes`] says what is different now, and
//! [`Changes::apply`] brings other [`Rounds`] to the same settings without asking for admission: it was asked for already.

use std::collections::BTreeMap;

use super::round::Rounds;
use super::{HostSettings, Overhead, Policy, SettingsError, VmId, VmSettings};

/// The settings of a policy at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    host: HostSettings,
    vms: BTreeMap<VmId, (VmSettings, Overhead)>,
}

/// What is different from settings that were known before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Other settings of the host.
    pub host: Option<HostSettings>,
    /// VMs that came, or that have other settings or another overhead.
    pub vms: Vec<(VmId, VmSettings, Overhead)>,
    /// These VMs have gone.
    pub gone: Vec<VmId>,
}

impl Known {
    /// The settings of a policy that has no VM.
    pub fn without_vms(host: HostSettings) -> Known {
        Known { host, vms: BTreeMap::new() }
    }

    /// The settings as they are.
    pub fn of(policy: &Policy) -> Known {
        let vms = policy.vms().map(|(id, settings, overhead)| (id, (settings.clone(), overhead))).collect();
        Known { host: policy.host().clone(), vms }
    }

    /// What is different now.
    pub fn changes(&self, policy: &Policy) -> Changes {
        let is_new = |id: VmId, settings: &VmSettings, overhead: Overhead| {
            self.vms.get(&id).is_none_or(|(before, beside)| before != settings || *beside != overhead)
        };
        let now = policy.vms().filter(|(id, settings, overhead)| is_new(*id, settings, *overhead));
        Changes {
            host: (self.host != *policy.host()).then(|| policy.host().clone()),
            vms: now.map(|(id, settings, overhead)| (id, settings.clone(), overhead)).collect(),
            gone: self.vms.keys().copied().filter(|id| policy.settings(*id).is_none()).collect(),
        }
    }
}

impl Changes {
    /// Makes the same changes.
    ///
    /// # Errors
    /// Settings that cannot be used. Those before them are changed.
    pub fn apply(&self, rounds: &mut Rounds) -> Result<(), SettingsError> {
        self.gone.iter().for_each(|id| rounds.remove(*id));
        if let Some(host) = &self.host {
            rounds.policy.restore_host(host.clone())?;
        }
        for (id, settings, overhead) in &self.vms {
            settings.check()?;
            match rounds.policy.settings(*id) {
                Some(before) if before.memory == settings.memory => {
                    rounds.policy.restore(*id, settings.clone(), *overhead)?;
                }
                Some(_) => return Err(SettingsError::VmExists { id: id.0 }),
                None => rounds.policy.readmit(*id, settings.clone(), *overhead)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Shares, SwapSpace, TaxRate};
    use crate::units::PageCount;

    const MEMORY: PageCount = PageCount(1 << 18);

    #[test]
    fn other_rounds_get_the_same_settings() {
        let host = HostSettings::new(PageCount(1 << 20));
        let swap = SwapSpace::empty(PageCount(u64::MAX));
        let mut rounds = Rounds::new(Policy::new(host.clone()).unwrap(), 1);
        let mut others = Rounds::new(Policy::new(host.clone()).unwrap(), 1);
        let mut known = Known::without_vms(host.clone());
        let mut follow = |rounds: &Rounds, expected: (bool, usize, usize)| {
            let changes = known.changes(&rounds.policy);
            assert_eq!((changes.host.is_some(), changes.vms.len(), changes.gone.len()), expected);
            changes.apply(&mut others).unwrap();
            known = Known::of(&rounds.policy);
            assert_eq!(Known::of(&others.policy), known);
        };
        follow(&rounds, (false, 0, 0));
        for id in 0..3 {
            rounds.policy.add(VmId(id), VmSettings::new(MEMORY), Overhead::default(), &swap).unwrap();
        }
        follow(&rounds, (false, 3, 0));
        follow(&rounds, (false, 0, 0));
        rounds.remove(VmId(1));
        let shares = VmSettings { shares: Shares::new(7).unwrap(), ..VmSettings::new(MEMORY) };
        rounds.policy.set(VmId(2), shares, Overhead::default(), &swap).unwrap();
        rounds.policy.set_overhead(VmId(0), Overhead { overhead: PageCount(9), reserve: PageCount(1) });
        rounds.policy.set_host(HostSettings { tax: TaxRate::NONE, ..host }, &swap).unwrap();
        follow(&rounds, (true, 2, 1));
    }

    #[test]
    fn settings_that_cannot_be_are_refused() {
        let mut rounds = Rounds::new(Policy::new(HostSettings::new(MEMORY)).unwrap(), 1);
        let mut apply = |settings: VmSettings| {
            Changes { vms: vec![(VmId(1), settings, Overhead::default())], ..Changes::default() }.apply(&mut rounds)
        };
        assert!(apply(VmSettings::new(PageCount(u64::MAX))).is_err());
        assert_eq!(apply(VmSettings::new(MEMORY)), Ok(()));
        assert!(apply(VmSettings::new(PageCount(1))).is_err(), "a VM's memory does not change");
        let host = Changes { host: Some(HostSettings::new(PageCount::ZERO)), ..Changes::default() };
        assert!(host.apply(&mut rounds).is_err());
    }
}
