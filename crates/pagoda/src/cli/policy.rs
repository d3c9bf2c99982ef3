//! Options of the memory policy, shared by the commands that take them.

use clap::{ArgGroup, Args};
use pagoda_api::{HostPatch, Sampling, WhatIfRequest};

use super::caps::{DramLimit, dram};
use crate::units::{parse_per_mille, parse_size};

// Plain comments on what is flattened: clap would take a doc comment for that of the command.

// How a VM's working set is estimated. What is not given stays as it is.
#[derive(Debug, Clone, Default, Args)]
pub struct SamplingOptions {
    /// Random pages that are watched in each sampling period
    ///
    /// A watched page costs a fault at its next use; more of them make ACTV steadier.
    #[arg(long, value_name = "N")]
    pub sample_pages: Option<u32>,
    /// Seconds of a sampling period
    #[arg(long, value_name = "SECONDS")]
    pub sample_period: Option<u32>,
}

impl SamplingOptions {
    /// The sampling that is `now`, with what is given in its place; `None` if nothing is.
    pub fn over(&self, now: Sampling) -> Option<Sampling> {
        (self.sample_pages.is_some() || self.sample_period.is_some()).then(|| Sampling {
            pages: self.sample_pages.unwrap_or(now.pages),
            period_s: self.sample_period.unwrap_or(now.period_s),
        })
    }
}

/// Change the host's memory policy
///
/// What is set here lasts until the daemon ends or reads its configuration again; to keep it, write it into
/// pagoda.toml.
#[derive(Debug, Clone, Args)]
#[command(arg_required_else_help = true)]
#[command(group = ArgGroup::new("host_change").required(true).multiple(true).args(["idle_tax", "pool", "thresholds"]))]
#[command(after_help = "\
Examples:
  pagoda host set --pool 48G             VMs and what they cost may have 48 GiB
  pagoda host set --idle-tax 0%          shares alone count, used or not
  pagoda host set --idle-tax 75%         an idle page costs its VM four times as much as a used one
  pagoda host set --thresholds 6,4,2,1   the default")]
pub struct HostSet {
    /// The most of its idle pages that a VM may lose to others, below 100%
    #[arg(long, value_name = "PART", value_parser = parse_per_mille)]
    pub idle_tax: Option<u16>,
    /// DRAM for all VMs and what they cost beside their memory, such as 48G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub pool: Option<u64>,
    /// Free memory, in percent of the pool, below which the state is no longer high, soft, hard; and low
    #[arg(long, value_name = "HIGH,SOFT,HARD,LOW", value_parser = thresholds)]
    pub thresholds: Option<Thresholds>,
}

/// Per mille of the pool: high, soft, hard, low. A type of its own, for clap takes no arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds(pub [u16; 4]);

impl HostSet {
    pub fn patch(&self) -> HostPatch {
        let thresholds = self.thresholds.map(|Thresholds(parts)| parts);
        HostPatch { pool: self.pool, idle_tax: self.idle_tax, thresholds, draining: None }
    }
}

/// Ask whether a VM would be admitted
///
/// Nothing is started or reserved. A VM is admitted if its min, what it costs beside its memory and what copies on
/// write may take fit the pool beside the promises that were made before, and the rest of its memory fits the swap
/// disk.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  pagoda admit --memory 8G --min 2G
  pagoda admit --memory 8G --min 2G && pagoda run --name db --min 2G -- qemu-system-x86_64 -m 8G ...

Exit status: 0 it would be admitted, 5 it would not; else as of every command.")]
pub struct Admit {
    /// Memory of the VM
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: u64,
    /// DRAM that it is guaranteed
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    pub min: u64,
    /// The most DRAM it may have [default: all of its memory]
    #[arg(long, value_name = "SIZE|all", value_parser = dram)]
    pub dram: Option<DramLimit>,
}

/// Say what a VM would get with other settings
///
/// Nothing is changed. The target is that of the daemon's own policy, with all other VMs as they are; page-ins are
/// predicted from the VM's miss-ratio curve (`pagoda vm mrc`), once there is one.
#[derive(Debug, Clone, Args)]
#[command(arg_required_else_help = true)]
#[command(group = ArgGroup::new("if").required(true).multiple(true).args(["dram"]))]
#[command(after_help = "\
Examples:
  pagoda whatif db --dram 2G
  pagoda whatif db --shares 4000 --min 3G")]
pub struct WhatIf {
    pub name: String,
    /// The most DRAM it may have, such as 2G, or all
    #[arg(long, value_name = "SIZE|all", value_parser = dram)]
    pub dram: Option<DramLimit>,
    #[command(flatten)]
    pub request: WhatIfRequest,
}

fn thresholds(text: &str) -> Result<Thresholds, String> {
    let advice = || format!("{text:?} are not four falling percentages above 0, such as 6,4,2,1");
    let percent = |part: &str| parse_per_mille(&format!("{}%", part.trim().trim_end_matches('%')));
    let parts = text.split(',').map(percent).collect::<Result<Vec<u16>, String>>().map_err(|_| advice())?;
    let parts: [u16; 4] = parts.try_into().map_err(|_| advice())?;
    let fall = parts.windows(2).all(|pair| pair[0] > pair[1]);
    if fall && parts[3] > 0 { Ok(Thresholds(parts)) } else { Err(advice()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_fall() {
        let check = |text: &str, expected: Option<[u16; 4]>| {
            assert_eq!(thresholds(text).ok(), expected.map(Thresholds), "{text}");
        };
        check("6,4,2,1", Some([60, 40, 20, 10]));
        check("6.5%, 4%, 2%, 0.5%", Some([65, 40, 20, 5]));
        check("6,4,2", None);
        check("6,4,2,1,0.5", None);
        check("6,4,4,1", None);
        check("1,2,4,6", None);
        check("6,4,2,0", None);
        check("6,4,2,x", None);
        check("", None);
    }

    #[test]
    fn sampling_keeps_what_is_not_named() {
        let now = Sampling { pages: 200, period_s: 60 };
        let check = |sample_pages, sample_period, expected: Option<(u32, u32)>| {
            let options = SamplingOptions { sample_pages, sample_period };
            assert_eq!(options.over(now).map(|sampling| (sampling.pages, sampling.period_s)), expected);
        };
        check(None, None, None);
        check(Some(50), None, Some((50, 60)));
        check(None, Some(5), Some((200, 5)));
        check(Some(50), Some(5), Some((50, 5)));
    }
}
