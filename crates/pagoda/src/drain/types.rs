//! What a drain plans, and how its moves end.

use pagoda_api::{MoveOutcome, MoveRoom, MoveStatus};
use serde::Serialize;

/// Where each VM is to go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DrainPlan {
    /// All of them have a place.
    pub fits: bool,
    /// The VMs, those without a place first.
    pub vms: Vec<PlannedVm>,
    pub hosts: Vec<PlannedHost>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedVm {
    pub vm: String,
    /// Absent: it would stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// What is reserved for it there.
    pub takes: MoveRoom,
    pub sends_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_ms: Option<u64>,
    /// Why it would stay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlannedHost {
    pub host: String,
    pub vms: u32,
    pub free: MoveRoom,
    /// What the planned VMs take of that.
    pub takes: MoveRoom,
}

/// How the move of a VM has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ended {
    pub vm: String,
    pub host: String,
    pub outcome: Outcome,
    /// Why it is not there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What was known of it last. Absent if it never began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<MoveStatus>,
}

/// Where a VM is, as far as that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Moved,
    /// The VM runs on this host.
    Stayed,
    Crashed,
    /// Nobody knows here which host runs it.
    Undecided,
}

impl Outcome {
    pub const fn of(outcome: MoveOutcome) -> Outcome {
        match outcome {
            MoveOutcome::Moved => Outcome::Moved,
            MoveOutcome::Refused | MoveOutcome::GivenUp | MoveOutcome::CameBack => Outcome::Stayed,
            MoveOutcome::Crashed => Outcome::Crashed,
            MoveOutcome::None | MoveOutcome::Superseded | MoveOutcome::Lost | MoveOutcome::Unknown => {
                Outcome::Undecided
            }
        }
    }

    pub const fn word(self) -> &'static str {
        match self {
            Outcome::Moved => "moved",
            Outcome::Stayed => "stays",
            Outcome::Crashed => "crashed",
            Outcome::Undecided => "undecided",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_of_moves() {
        for (outcome, expected) in [
            (MoveOutcome::Moved, Outcome::Moved),
            (MoveOutcome::Refused, Outcome::Stayed),
            (MoveOutcome::GivenUp, Outcome::Stayed),
            (MoveOutcome::CameBack, Outcome::Stayed),
            (MoveOutcome::Crashed, Outcome::Crashed),
            (MoveOutcome::Superseded, Outcome::Undecided),
            (MoveOutcome::Lost, Outcome::Undecided),
            (MoveOutcome::Unknown, Outcome::Undecided),
        ] {
            assert_eq!(Outcome::of(outcome), expected, "{outcome:?}");
        }
    }
}
