//! The settings of a VM: one struct that `pagoda run` fills, [`CreateVm`](super::CreateVm) carries, the daemon's record keeps
//! and the memory policy's settings are made from.
//!
//! A new setting is a field of [`VmSpec`], with its option, its default, its unit and its check; if it may change while the VM
//! runs, [`VmPatch`] has it too. Sizes are bytes. What is left out has its default. With the feature `clap` the doc comments
//! are the help of the options.

use serde::{Deserialize, Serialize};

use super::autosnapshot::{Autosnapshot, AutosnapshotChange};
use super::balloon::check_balloon_target;
use super::dram::check_dram;
use super::kind::VmKind;
use super::remote::RemoteRequest;
#[cfg(feature = "clap")]
use super::terms::option;
use super::terms::{Sampling, check_min, check_sampling, check_share_group, check_shares};

// Plain comments on what is flattened: clap would take a doc comment for that of the command.

// Every setting that a user can give, and that the daemon has to remember.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(default)]
pub struct VmSpec {
    /// The most DRAM it may have, such as 1G [default: all of its memory]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", value_parser = crate::parse_size))]
    pub dram: Option<u64>,
    #[cfg_attr(feature = "clap", command(flatten))]
    pub policy: PolicySettings,
    /// VMs of one group may share pages of the same content
    /// [default: it shares with no other VM]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "NAME", value_parser = option::share_group))]
    pub share_group: Option<String>,
    /// Allocate its whole swap file now, so that the swap disk cannot be full later
    #[cfg_attr(feature = "clap", arg(long))]
    pub reserve_swap: bool,
    /// Remote memory as the tier before its swap file: `pool:`, or `pool:copies=2`
    ///
    /// What does not fit into DRAM goes to servers that lend memory (`pagoda pool`); that pays where the disk is slower than the network.
    /// The swap file stays behind it, for what the pool has no room for. With one copy of each page, the default, a
    /// server that dies takes what it had with it: the VM is stopped with a message that says so, and those pages are
    /// lost. With copies=2 each page is at two servers, and one of them may die.
    #[serde(rename = "far", alias = "remote", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long = "remote", alias = "far", value_name = "pool:[copies=1|2]"))]
    pub remote: Option<RemoteRequest>,
    /// Why no page of it may ever be evicted, for example a device that does DMA to all of it [default: pages may be]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub pinned: Option<String>,
    /// Memory that the guest should keep, the rest being taken by its balloon [default: there is no target]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub balloon_target: Option<u64>,
    /// When snapshots of it are taken [default: when somebody asks]
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub autosnapshot: Option<Autosnapshot>,
}

// What the memory policy needs to know of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
pub struct PolicySettings {
    /// DRAM that it is guaranteed, such as 2G [default: 0]
    #[serde(default)]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", default_value = "0", hide_default_value = true,
        value_parser = crate::parse_size))]
    pub min: u64,
    /// Its weight against the other VMs'; only ratios matter [default: 1000]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", value_parser = option::shares))]
    pub shares: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", command(flatten))]
    pub sampling: Option<Sampling>,
}

// `PATCH /v1/vms/NAME`: the settings that may change while the VM runs; what is `None` stays as it is. Each option is in the
// group `change`, of which `pagoda vm set` needs one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(default, deny_unknown_fields)]
pub struct VmPatch {
    /// New DRAM cap; the size of the VM means all.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub dram: Option<u64>,
    /// Memory that the guest should keep, the rest being taken by its balloon; the size of the VM means all.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub balloon_target: Option<u64>,
    /// DRAM that it is guaranteed, such as 2G
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", group = "change", value_parser = crate::parse_size))]
    pub min: Option<u64>,
    /// Its weight against the other VMs'; only ratios matter
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", group = "change", value_parser = option::shares))]
    pub shares: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub sampling: Option<Sampling>,
    /// When snapshots of it are taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub autosnapshot: Option<AutosnapshotChange>,
}

impl VmSpec {
    /// The DRAM cap of a VM of `memory_bytes`.
    #[must_use]
    pub fn dram_of(&self, memory_bytes: u64) -> u64 {
        self.dram.unwrap_or(memory_bytes)
    }

    /// Checks all settings of a new VM.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn check(&self, kind: VmKind, memory_bytes: u64) -> Result<(), String> {
        self.dram.map_or(Ok(()), |dram| check_dram(dram, memory_bytes))?;
        check_min(self.policy.min, self.dram_of(memory_bytes))?;
        self.policy.shares.map_or(Ok(()), check_shares)?;
        self.policy.sampling.map_or(Ok(()), check_sampling)?;
        self.remote.map_or(Ok(()), |remote| remote.check())?;
        self.share_group.as_deref().map_or(Ok(()), check_share_group)?;
        self.autosnapshot.map_or(Ok(()), |timetable| timetable.check())?;
        if self.autosnapshot.is_some() && kind == VmKind::Plain {
            return Err(
                "only QEMU can save the state of a VM's devices: a program that is no QEMU has no snapshots".into()
            );
        }
        match self.balloon_target {
            Some(_) if kind == VmKind::Plain => Err("a program that is no QEMU has no balloon: give --dram".into()),
            target => target.map_or(Ok(()), |target| check_balloon_target(target, memory_bytes)),
        }
    }
}

impl VmPatch {
    /// The settings with this change. Checked is what it names, and what has to fit that.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn applied_to(&self, spec: &VmSpec, memory_bytes: u64) -> Result<VmSpec, String> {
        self.dram.map_or(Ok(()), |dram| check_dram(dram, memory_bytes))?;
        self.balloon_target.map_or(Ok(()), |target| check_balloon_target(target, memory_bytes))?;
        self.shares.map_or(Ok(()), check_shares)?;
        self.sampling.map_or(Ok(()), check_sampling)?;
        self.autosnapshot.and_then(AutosnapshotChange::timetable).map_or(Ok(()), |timetable| timetable.check())?;
        // A target of all memory stays, so that whichever daemon there is ends what is under way.
        let is_needed = |target: &u64| *target < memory_bytes || spec.balloon_target.is_some();
        let patched = VmSpec {
            dram: self.dram.or(spec.dram),
            balloon_target: self.balloon_target.filter(is_needed).or(spec.balloon_target),
            policy: PolicySettings {
                min: self.min.unwrap_or(spec.policy.min),
                shares: self.shares.or(spec.policy.shares),
                sampling: self.sampling.or(spec.policy.sampling),
            },
            autosnapshot: self.autosnapshot.map_or(spec.autosnapshot, AutosnapshotChange::timetable),
            ..spec.clone()
        };
        // Each against what the other will be.
        check_min(patched.policy.min, patched.dram_of(memory_bytes))?;
        Ok(patched)
    }
}

/// Reads values of options.
#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn what_is_left_out_has_its_default() {
        assert_eq!(serde_json::from_str::<VmSpec>("{}").unwrap(), VmSpec::default());
        let text = serde_json::to_string(&VmSpec::default()).unwrap();
        assert_eq!(text, r#"{"policy":{"min":0},"reserve_swap":false}"#);
    }

    #[test]
    fn a_patch_changes_what_it_names() {
        let spec = VmSpec {
            dram: Some(GIB),
            policy: PolicySettings { min: GIB / 2, shares: Some(7), sampling: None },
            share_group: Some("g".into()),
            ..VmSpec::default()
        };
        assert_eq!(VmPatch::default().applied_to(&spec, 2 * GIB), Ok(spec.clone()));
        let patch = VmPatch { min: Some(0), sampling: Some(Sampling::default()), ..VmPatch::default() };
        let policy = PolicySettings { min: 0, shares: Some(7), sampling: Some(Sampling::default()) };
        assert_eq!(patch.applied_to(&spec, 2 * GIB), Ok(VmSpec { policy, ..spec.clone() }));
        let dram = |dram| VmPatch { dram: Some(dram), ..VmPatch::default() };
        assert_eq!(dram(2 * GIB).applied_to(&spec, 2 * GIB).unwrap().dram, Some(2 * GIB));
        assert!(dram(GIB / 4).applied_to(&spec, 2 * GIB).unwrap_err().contains("lower --min or raise --dram"));
        assert!(dram(3 * GIB).applied_to(&spec, 2 * GIB).unwrap_err().contains("more than the VM's memory"));
    }

    #[test]
    fn a_balloon_target_of_all_memory_is_kept_where_there_was_one() {
        let check = |before: Option<u64>, target: u64, after: Option<u64>| {
            let spec = VmSpec { balloon_target: before, ..VmSpec::default() };
            let patch = VmPatch { balloon_target: Some(target), ..VmPatch::default() };
            assert_eq!(patch.applied_to(&spec, 2 * GIB).unwrap().balloon_target, after, "{before:?}");
        };
        check(None, 2 * GIB, None);
        check(None, GIB, Some(GIB));
        check(Some(GIB), 2 * GIB, Some(2 * GIB));
    }

    #[test]
    fn a_timetable_is_set_kept_and_ended() {
        let timetable = Autosnapshot { every_s: 60, keep: 3, disks: false };
        let patch = |change| VmPatch { autosnapshot: change, ..VmPatch::default() };
        let spec = patch(Some(AutosnapshotChange::On(timetable))).applied_to(&VmSpec::default(), GIB).unwrap();
        assert_eq!(spec.autosnapshot, Some(timetable));
        assert_eq!(patch(None).applied_to(&spec, GIB).as_ref(), Ok(&spec));
        assert_eq!(patch(Some(AutosnapshotChange::Off)).applied_to(&spec, GIB), Ok(VmSpec::default()));
        let bad = Autosnapshot { keep: 0, ..timetable };
        assert!(patch(Some(AutosnapshotChange::On(bad))).applied_to(&spec, GIB).unwrap_err().contains("1 to 15"));
        assert_eq!(spec.check(VmKind::Qemu, GIB), Ok(()));
        assert!(spec.check(VmKind::Plain, GIB).unwrap_err().contains("only QEMU"));
    }

    #[test]
    fn a_balloon_needs_qemu() {
        let spec = VmSpec { balloon_target: Some(GIB), ..VmSpec::default() };
        assert_eq!(spec.check(VmKind::Qemu, 2 * GIB), Ok(()));
        assert!(spec.check(VmKind::Plain, 2 * GIB).unwrap_err().contains("no balloon"));
        assert!(spec.check(VmKind::Qemu, GIB / 2).unwrap_err().contains("`off` gives it all"));
    }
}
