//! What a user wants of a move.

use std::time::Duration;

use anyhow::{Context, Result};
use pagoda_api::types::MoveSplit;
use pagoda_move::rounds::{Mode, OnTimeout, Settings};
use pagoda_move::units::{AttemptId, Rate};

use crate::random;

/// What a stop, the device state and a start take without any page.
pub const STOP_COST: Duration = Duration::from_millis(20);

/// What a user wants of a move.
#[derive(Clone, Debug)]
pub struct Request {
    pub vm: String,
    /// A host that this one trusts.
    pub to: String,
    /// The most DRAM that the VM may have there, bytes. As much as here if it is not said.
    pub dram: Option<u64>,
    /// Bytes a second, while the VM runs.
    pub bandwidth: Option<u64>,
    pub downtime: Duration,
    pub max_time: Option<Duration>,
    pub on_timeout: OnTimeout,
    pub mode: Mode,
    /// What does not fit into its DRAM there goes into its remote tier.
    pub split: Option<MoveSplit>,
    /// Both hosts have the VM's disks at the same paths.
    pub shared_disks: bool,
    /// They are files of this host, and are copied.
    pub copy_disks: bool,
}

impl Request {
    pub const fn settings(&self) -> Settings {
        Settings {
            mode: self.mode,
            downtime_max: self.downtime,
            stop_cost: STOP_COST,
            bandwidth_max: match self.bandwidth {
                Some(rate) => Some(Rate(rate)),
                None => None,
            },
            time_max: self.max_time,
            on_timeout: self.on_timeout,
        }
    }
}

/// The name of an attempt: random, and never 0.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn new_attempt() -> Result<AttemptId> {
    let bytes = random::bytes().context("make a name for the attempt")?;
    Ok(AttemptId((u128::from_le_bytes(bytes) as u64).max(1)))
}
