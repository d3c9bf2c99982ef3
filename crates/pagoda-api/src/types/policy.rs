//! What the API says of the memory policy: settings, targets and where they come from.
//!
//! The words are ESX's (Waldspurger, OSDI 2002): min, shares, active, target, entitlement, idle memory tax.

use serde::{Deserialize, Serialize};

use super::latency::RoundWait;
use super::spec::VmPatch;
use super::terms::Sampling;

/// A VM as the policy sees it; part of [`VmInfo`](super::VmInfo).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VmPolicy {
    pub min_bytes: u64,
    pub shares: u32,
    #[serde(default)]
    pub share_group: Option<String>,
    pub sampling: Sampling,
    /// What it costs beside its memory: the VMM's own memory and our tables, measured.
    pub overhead_bytes: u64,
    /// What is in DRAM, in swap, or shared: pages it has touched and still has.
    pub touched_bytes: u64,
    /// Estimated working set; `None` until the first sampling period has ended.
    #[serde(default)]
    pub active_bytes: Option<u64>,
    /// What the policy allots to it; `None` before the first plan.
    #[serde(default)]
    pub target_bytes: Option<u64>,
    /// The cap its engine keeps now: the smallest of its own, the policy's and its balloon's.
    pub limit_bytes: u64,
    /// Content in frames that it shares with others or with itself.
    #[serde(default)]
    pub shared_bytes: u64,
    /// DRAM saved by that: what is shared, less its part of the frames.
    #[serde(default)]
    pub saved_bytes: u64,
    /// `at_ease`, `squeezed`, `pinned`, `blocked`, ... as the policy names it.
    #[serde(default, rename = "standing", alias = "status")]
    pub status: String,
    #[serde(default, rename = "standing_since_s", alias = "status_since_s")]
    pub status_since_s: u64,
}

/// The host's memory policy; part of [`HostInfo`](super::HostInfo).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostPolicy {
    /// DRAM for VMs and what they cost, as set.
    pub pool_bytes: u64,
    /// The same while the host itself runs short: less.
    pub pool_now_bytes: u64,
    /// Why it is less, if so.
    #[serde(default)]
    pub pool_reason: Option<String>,
    pub used_bytes: u64,
    pub free_bytes: u64,
    /// The idle memory tax is in thousandths.
    pub idle_tax: u16,
    /// Free memory at which the states begin, per mille of the pool: high, soft, hard, low.
    pub thresholds: [u16; 4],
    /// `high`, `soft`, `hard` or `low`.
    pub state: String,
    pub state_since_s: u64,
    /// What is reserved of the pool by the guarantees and overheads of all VMs.
    pub reserved_bytes: u64,
    /// What is reserved of the swap disk.
    pub swap_reserved_bytes: u64,
    /// Why nothing moves although it should, if so.
    #[serde(default)]
    pub stuck: Option<String>,
    /// What guarantees lack because the host has less than the pool that was set.
    #[serde(default)]
    pub shortfall_bytes: u64,
    /// Sums over all VMs.
    #[serde(default)]
    pub shared_bytes: u64,
    #[serde(default)]
    pub saved_bytes: u64,
    #[serde(default)]
    pub ballooned_bytes: u64,
    #[serde(default)]
    pub swapped_bytes: u64,
    /// What the templates of snapshots take, which clones read. Part of what is used.
    #[serde(default)]
    pub template_bytes: u64,
    /// What the pool keeps for outboxes. Part of what is used.
    #[serde(default)]
    pub outbox_bytes: u64,
    #[serde(default)]
    pub round_wait: RoundWait,
}

/// `PATCH /v1/host`; what is `None` stays as it is. Lasts until the daemon ends or reads its configuration again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostPatch {
    /// DRAM for VMs, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<u64>,
    /// Per mille, below 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_tax: Option<u16>,
    /// Per mille of the pool: high, soft, hard, low.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thresholds: Option<[u16; 4]>,
    /// Whether this host is drained: then it takes no new VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<bool>,
}

/// `POST /v1/admit`: would such a VM be kept?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdmitRequest {
    pub memory_bytes: u64,
    #[serde(default)]
    pub dram: Option<u64>,
    #[serde(default)]
    pub min: u64,
}

/// The reply to [`AdmitRequest`] says whether the VM would be kept, and what it needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdmitReply {
    pub admitted: bool,
    /// What it would reserve: min, overhead and what copies on write may take.
    pub memory_needed_bytes: u64,
    /// Of the pool, after all that is reserved and kept free.
    pub memory_free_bytes: u64,
    pub swap_needed_bytes: u64,
    pub swap_free_bytes: u64,
    /// Empty if admitted: what is missing and what to do, in a sentence.
    #[serde(default)]
    pub missing: String,
}

// `POST /v1/vms/NAME/whatif`: with other settings, what would its target be, and how much would it page? A plain comment, for
// clap would take a doc comment for that of the command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::Args))]
#[serde(deny_unknown_fields)]
pub struct WhatIfRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(skip))]
    pub dram: Option<u64>,
    /// DRAM that it is guaranteed, such as 2G
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "SIZE", group = "if", value_parser = crate::parse_size))]
    pub min: Option<u64>,
    /// Its weight against the other VMs'; only ratios matter
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "clap", arg(long, value_name = "N", group = "if", value_parser = super::terms::option::shares))]
    pub shares: Option<u32>,
}

impl WhatIfRequest {
    /// The settings that are asked about.
    #[must_use]
    pub fn patch(&self) -> VmPatch {
        VmPatch { dram: self.dram, min: self.min, shares: self.shares, ..VmPatch::default() }
    }
}

/// The reply to [`WhatIfRequest`] compares the VM as it is with what would be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WhatIfReply {
    /// The first is the target now, the second the one that it would have.
    pub target_bytes: [u64; 2],
    /// Page-ins a second now, measured.
    pub page_ins_per_s: f64,
    /// Predicted from the miss-ratio curve; `None` while there is none.
    #[serde(default)]
    pub page_ins_per_s_then: Option<f64>,
    /// Miss ratio at the two targets.
    #[serde(default)]
    pub miss_ratio: Option<[f64; 2]>,
}

/// `GET /v1/vms/NAME/mrc` gives a VM's miss-ratio curve.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Mrc {
    /// Uses the curve stands on, after scaling; 0: nothing is known yet.
    pub accesses: f64,
    pub memory_bytes: u64,
    pub target_bytes: u64,
    /// Size and the part of uses that would miss with it.
    pub points: Vec<MrcPoint>,
}

/// A point of [`Mrc`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MrcPoint {
    pub dram_bytes: u64,
    pub miss_ratio: f64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PolicySettings;

    #[test]
    fn unknown_settings_are_refused_and_left_out_ones_kept() {
        assert!(serde_json::from_str::<HostPatch>(r#"{"taxx":1}"#).is_err());
        let patch = HostPatch { idle_tax: Some(0), ..HostPatch::default() };
        assert_eq!(serde_json::to_string(&patch).unwrap(), r#"{"idle_tax":0}"#);
        assert_eq!(serde_json::from_str::<PolicySettings>("{}").unwrap(), PolicySettings::default());
    }
}
