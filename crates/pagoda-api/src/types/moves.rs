//! VMs that move between hosts.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::hosts::check_host_name;
use super::remote::REMOTE_COPIES_MAX;

/// How long a VM may stand still at the end of its move, unless its user says more or less.
pub const MOVE_DOWNTIME_MS_DEFAULT: u64 = 30;
/// A stop, the state of the devices and a start take some 20 ms without any page: with less no move would ever end.
pub const MOVE_DOWNTIME_MS_MIN: u64 = 25;
/// A VM that was stopped runs again at its source if it is not over after so long (docs/protocol/move.md).
pub const MOVE_DOWNTIME_MS_MAX: u64 = 5000;
/// The longest time that a move may be given: a week.
pub const MOVE_TIME_S_MAX: u64 = 7 * 86_400;

/// How a VM's memory goes over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum MoveMode {
    /// What suits the VM and risks nothing: today always precopy
    #[default]
    Auto,
    /// All of it is sent before the VM runs there; what the guest writes meanwhile is sent again. A host that is lost costs no VM
    Precopy,
    /// The VM runs there at once, and its memory follows: first what it waits for. Until all is there it needs both hosts
    Postcopy,
    /// As precopy for as long as each round sends less than the one before, then as postcopy. It always ends
    Hybrid,
}

/// What happens to a move that has not ended in the time that it was given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum MoveOnTimeout {
    /// The move is given up, and the VM runs on where it is
    #[default]
    Abort,
    /// The VM runs at its destination from then on, and the rest of its memory follows
    Postcopy,
    /// From then on the guest's writers are slowed, in steps, until what they write can be sent. After as long again, or a minute if
    /// that is more, the move is given up
    SlowGuest,
}

/// Where memory of a VM goes that does not fit into its DRAM at the destination: into its remote tier, which goes with it. Written as
/// `pool:`, or `pool:2` for a tier that keeps two copies of each page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MoveSplit {
    /// Copies that the tier has to keep. As many as it does if it is not said.
    pub copies: Option<u8>,
}

impl FromStr for MoveSplit {
    type Err = String;

    fn from_str(text: &str) -> Result<MoveSplit, String> {
        if let Some(host) = text.split(',').find(|word| !word.starts_with("pool:")) {
            return Err(format!(
                "a VM is split between its destination and a pool alone, and {host:?} is neither: a third host takes part as a server of \
                 the pool; write pool: or pool:2"
            ));
        }
        let copies = text.strip_prefix("pool:").unwrap_or_default();
        if copies.is_empty() {
            return Ok(MoveSplit::default());
        }
        match copies.parse() {
            Ok(copies) if (1..=REMOTE_COPIES_MAX).contains(&copies) => Ok(MoveSplit { copies: Some(copies) }),
            _ => Err(format!("{copies:?} is no number of copies in a pool: write pool: or pool:2")),
        }
    }
}

impl fmt::Display for MoveSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("pool:")?;
        self.copies.map_or(Ok(()), |copies| write!(f, "{copies}"))
    }
}

impl TryFrom<String> for MoveSplit {
    type Error = String;

    fn try_from(text: String) -> Result<MoveSplit, String> {
        text.parse()
    }
}

impl From<MoveSplit> for String {
    fn from(split: MoveSplit) -> String {
        split.to_string()
    }
}

/// `POST /v1/vms/NAME/move` begins a move, or only plans it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// A host that this one trusts, by the name that it has here.
    pub to: String,
    /// The most DRAM that the VM may have there, bytes. As much as here if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram: Option<u64>,
    /// The most that is sent while the VM runs, bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// The longest that the VM may stand still.
    #[serde(default = "downtime_ms_default")]
    pub downtime_ms: u64,
    /// How long the move may take; without an end if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_time_s: Option<u64>,
    #[serde(default)]
    pub on_timeout: MoveOnTimeout,
    #[serde(default)]
    pub mode: MoveMode,
    /// What does not fit into its DRAM there goes into its remote tier instead of over the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<MoveSplit>,
    /// The disks of the VM are the same ones at the same paths on both hosts.
    #[serde(default)]
    pub shared_disks: bool,
    /// Its disks are files of this host, and are copied to the same paths there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy_disks: bool,
    /// Only say what would come of it.
    #[serde(default)]
    pub dry_run: bool,
}

const fn downtime_ms_default() -> u64 {
    MOVE_DOWNTIME_MS_DEFAULT
}

impl MoveRequest {
    /// To a host, and all else as it is if nobody says it.
    #[must_use]
    pub fn new(to: impl Into<String>) -> MoveRequest {
        MoveRequest {
            to: to.into(),
            dram: None,
            bandwidth: None,
            downtime_ms: MOVE_DOWNTIME_MS_DEFAULT,
            max_time_s: None,
            on_timeout: MoveOnTimeout::default(),
            mode: MoveMode::default(),
            split: None,
            shared_disks: false,
            copy_disks: false,
            dry_run: false,
        }
    }

    /// Checks all that needs no knowledge of the VM or of its destination.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn check(&self) -> Result<(), String> {
        check_host_name(&self.to)?;
        if self.bandwidth == Some(0) {
            return Err("with a bandwidth of 0 nothing is ever sent".into());
        }
        if !(MOVE_DOWNTIME_MS_MIN..=MOVE_DOWNTIME_MS_MAX).contains(&self.downtime_ms) {
            return Err(format!(
                "a downtime of {} ms cannot be kept: {MOVE_DOWNTIME_MS_MIN} to {MOVE_DOWNTIME_MS_MAX} ms can be asked for",
                self.downtime_ms
            ));
        }
        if self.shared_disks && self.copy_disks {
            return Err("disks that both hosts have are not copied: leave shared disks or copied ones away".into());
        }
        match self.max_time_s {
            Some(time_s) if !(1..=MOVE_TIME_S_MAX).contains(&time_s) => {
                Err(format!("a move takes from 1 s up to a week ({MOVE_TIME_S_MAX} s), not {time_s} s"))
            }
            None if self.on_timeout == MoveOnTimeout::SlowGuest => {
                Err("writers are slowed when the time of a move is over: say how long it may take".into())
            }
            _ if self.on_timeout == MoveOnTimeout::SlowGuest
                && matches!(self.mode, MoveMode::Postcopy | MoveMode::Hybrid) =>
            {
                Err("a VM whose memory follows it need not be slowed: leave the mode or the slowing away".into())
            }
            _ => Ok(()),
        }
    }
}

/// The reply to [`MoveRequest`] is a plan, or says that the move has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MoveReply {
    /// What a move would come to. Nothing was done.
    Plan(MovePlan),
    /// The move has begun. `GET /v1/moves/NAME` says how far it is.
    Begun(MoveStatus),
}

/// What a move would come to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovePlan {
    pub vm: String,
    pub host: String,
    /// The destination has room for it.
    pub fits: bool,
    /// What it needs there, and what of that is not free.
    pub needs: MoveRoom,
    pub lacks: MoveRoom,
    /// What is reserved for it there, and what is free for that. What it needs beside that is no promise.
    #[serde(default)]
    pub reserves: MoveRoom,
    #[serde(default)]
    pub free: MoveRoom,
    /// Memory that is sent, and memory that is zero or was given back by the guest.
    pub sends_bytes: u64,
    pub spared_bytes: u64,
    /// Memory that goes into the VM's remote tier instead.
    #[serde(default)]
    pub pool_bytes: u64,
    /// Of disks that are copied. It counts in the time.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_bytes: u64,
    /// What the way carries, or what was asked for at most.
    pub bytes_per_second: u64,
    /// Absent if it would never end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_ms: Option<u64>,
    /// How long the VM would stand still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// That is no longer than what was asked for.
    pub keeps_downtime: bool,
    /// What becomes of its remote tier, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<MoveRemote>,
    /// Whether an arbiter would decide.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arbiter: Option<MoveArbiter>,
}

/// Whether an arbiter decides who owns a VM when its link is cut in the moment of the grant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveArbiter {
    pub decides: bool,
    /// What it has said, or why it does not decide, in words.
    pub says: String,
}

/// A remote tier of a VM that would move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRemote {
    /// Content that is in the pool.
    pub bytes: u64,
    pub fate: RemoteFate,
}

/// What becomes of a remote tier when its VM moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RemoteFate {
    /// It stays where it is, and nothing of it is sent.
    HandedOver,
    /// It is sent as all other memory is, and the VM has no remote tier at its destination.
    Copied,
}

/// Room at a destination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRoom {
    pub dram_bytes: u64,
    pub swap_bytes: u64,
}

/// Whether the VM leaves this host or comes to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveDirection {
    Out,
    In,
}

/// What a move is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MovePhase {
    /// The hosts compare what they have. The destination reserves memory and starts QEMU.
    Preparing,
    /// The VM runs at the source, and its disks are copied. Its memory comes next.
    Disks,
    /// The VM runs at the source, and its memory is sent.
    Copying,
    /// The VM stands still, and what is left of it is sent.
    Stopped,
    /// The source has given the VM away, and does not know yet whether the destination runs it.
    Granted,
    /// The VM runs at the destination, and a part of its memory is still at the source. It needs both hosts.
    Postcopy,
    /// It is decided where the VM runs, and all of it is there. The two hosts clean up.
    Settling,
    Over,
    /// One of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl MovePhase {
    /// The word for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            MovePhase::Preparing => "preparing",
            MovePhase::Disks => "disks",
            MovePhase::Copying => "copying",
            MovePhase::Stopped => "stopped",
            MovePhase::Granted => "granted",
            MovePhase::Postcopy => "postcopy",
            MovePhase::Settling => "settling",
            MovePhase::Over => "over",
            MovePhase::Unknown => "unknown",
        }
    }
}

/// How a move has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveOutcome {
    /// The move has not ended yet.
    None,
    /// The VM runs at the destination.
    Moved,
    /// It is not possible, and nothing was changed: the destination refuses the VM, or has no room for it.
    Refused,
    /// It was given up before the VM was given away. The VM runs at the source.
    GivenUp,
    /// The destination has refused the VM after it was given away, or an operator has decided so. The VM runs at the source.
    CameBack,
    /// QEMU has died at the host that owns the VM.
    Crashed,
    /// This host has lost the VM to the other one, where an operator has decided so.
    Superseded,
    /// An operator has given the VM up.
    Lost,
    /// One of a newer daemon.
    #[serde(other)]
    Unknown,
}

impl MoveOutcome {
    /// The word for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            MoveOutcome::None => "none",
            MoveOutcome::Moved => "moved",
            MoveOutcome::Refused => "refused",
            MoveOutcome::GivenUp => "given up",
            MoveOutcome::CameBack => "came back",
            MoveOutcome::Crashed => "crashed",
            MoveOutcome::Superseded => "superseded",
            MoveOutcome::Lost => "lost",
            MoveOutcome::Unknown => "unknown",
        }
    }
}

/// `GET /v1/moves/NAME`: how far a move is, or how it has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveStatus {
    pub vm: String,
    pub direction: MoveDirection,
    /// The other host, by the name that it has here.
    pub host: String,
    pub phase: MovePhase,
    /// Memory that was sent, as it went over the link; what was sent again counts again.
    pub sent_bytes: u64,
    /// Memory that was only named, because it is zeros.
    #[serde(default)]
    pub spared_bytes: u64,
    /// Memory that went into the VM's remote tier instead; what was written later counts too.
    #[serde(default)]
    pub pool_bytes: u64,
    /// By how much compression has made what was sent smaller.
    #[serde(default)]
    pub saved_bytes: u64,
    /// Memory that is to be sent, as far as is known now.
    pub left_bytes: u64,
    /// Memory of the VM.
    pub total_bytes: u64,
    /// The rounds count from 1. 0 before the first.
    pub round: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// How fast the guest writes, each page counted once in a round.
    pub written_bytes_per_second: u64,
    pub elapsed_ms: u64,
    /// Absent if it is not known, or never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eta_ms: Option<u64>,
    /// How long the VM would stand still if it were stopped now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_downtime_ms: Option<u64>,
    /// How long it has stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_ms: Option<u64>,
    /// What each first write of the guest to a page waits, because the move has not ended in its time. 0: writers are not slowed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub write_delay_us: u64,
    /// Of disks that are copied: what is to be copied, as far as is known now, and what of that is there. What the guest writes
    /// meanwhile comes on top of both.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_total_bytes: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_copied_bytes: u64,
    /// Files of disks that were copied. When the VM has moved, they stay at its source, and nobody uses them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disk_files: Vec<String>,
    /// What it waits for, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
    /// Whether an arbiter decides. Absent if it is not known any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arbiter: Option<MoveArbiter>,
    pub outcome: MoveOutcome,
    /// Why it has ended so, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde wants it so
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl MoveStatus {
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outcome != MoveOutcome::None
    }
}

/// `GET /v1/moves`: moves that are under way, and the last one of each VM that has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveList {
    pub moves: Vec<MoveStatus>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_checked() {
        let check = |change: fn(&mut MoveRequest), expected: &str| {
            let mut request = MoveRequest::new("host2");
            change(&mut request);
            let said = request.check().err().unwrap_or_default();
            assert!(if expected.is_empty() { said.is_empty() } else { said.contains(expected) }, "{said}");
        };
        check(|_| (), "");
        check(|of| of.to = "a/b".into(), "no name of a host");
        check(|of| of.bandwidth = Some(0), "nothing is ever sent");
        check(|of| of.bandwidth = Some(1), "");
        check(|of| of.downtime_ms = 24, "25 to 5000 ms");
        check(|of| of.downtime_ms = 5001, "25 to 5000 ms");
        check(|of| of.max_time_s = Some(0), "up to a week");
        check(|of| of.max_time_s = Some(600), "");
        check(|of| of.max_time_s = Some(u64::MAX), "up to a week");
        check(|of| of.on_timeout = MoveOnTimeout::SlowGuest, "say how long it may take");
        let slow = |of: &mut MoveRequest| (of.on_timeout, of.max_time_s) = (MoveOnTimeout::SlowGuest, Some(9));
        check(slow, "");
        check(|of| of.copy_disks = true, "");
        check(|of| (of.copy_disks, of.shared_disks) = (true, true), "are not copied");
        check(
            |of| (of.on_timeout, of.max_time_s, of.mode) = (MoveOnTimeout::SlowGuest, Some(9), MoveMode::Hybrid),
            "need not be slowed",
        );
    }

    #[test]
    fn a_move_is_split_with_a_pool_alone() {
        let check = |text: &str, expected: Result<Option<u8>, &str>| match (text.parse::<MoveSplit>(), expected) {
            (Ok(split), Ok(copies)) => assert_eq!((split.copies, split.to_string().as_str()), (copies, text)),
            (Err(said), Err(part)) => assert!(said.contains(part), "{text}: {said}"),
            (said, _) => panic!("{text}: {said:?}"),
        };
        check("pool:", Ok(None));
        check("pool:1", Ok(Some(1)));
        check("pool:2", Ok(Some(2)));
        for wrong in ["pool:0", "pool:3", "pool:two", "pool:copies=2", "pool:,pool:"] {
            check(wrong, Err("no number of copies"));
        }
        for (wrong, named) in
            [("host3", "\"host3\" is neither"), ("host3,pool:", "\"host3\""), ("pool:2,host4", "\"host4\"")]
        {
            check(wrong, Err(named));
        }
        check("", Err("neither"));
        let request: MoveRequest = serde_json::from_str(r#"{"to":"host2","split":"pool:2"}"#).unwrap();
        assert_eq!(request.split, Some(MoveSplit { copies: Some(2) }));
        assert!(serde_json::to_string(&request).unwrap().contains(r#""split":"pool:2""#));
        let error = serde_json::from_str::<MoveRequest>(r#"{"to":"host2","split":"host3"}"#).unwrap_err();
        assert!(error.to_string().contains("host3"), "{error}");
    }

    #[test]
    fn names_on_the_wire() {
        let request: MoveRequest = serde_json::from_str(r#"{"to":"host2"}"#).unwrap();
        assert_eq!(request, MoveRequest::new("host2"));
        // What is asked for and not understood is not left out.
        assert!(serde_json::from_str::<MoveRequest>(r#"{"to":"host2","compress":true}"#).is_err());
        assert!(serde_json::from_str::<MoveRequest>(r#"{"to":"host2","mode":"sideways"}"#).is_err());
        assert!(serde_json::from_str::<MoveRequest>(r#"{"to":"host2","on_timeout":"wait"}"#).is_err());
        let slow: MoveRequest = serde_json::from_str(r#"{"to":"host2","on_timeout":"slow_guest"}"#).unwrap();
        assert_eq!(slow.on_timeout, MoveOnTimeout::SlowGuest);

        let status = r#"{"vm":"web1","direction":"out","host":"host2","phase":"copying","sent_bytes":1,"left_bytes":2,
            "total_bytes":3,"round":4,"bytes_per_second":5,"written_bytes_per_second":6,"elapsed_ms":7,"eta_ms":8,
            "expected_downtime_ms":9,"outcome":"none"}"#;
        let status: MoveStatus = serde_json::from_str(status).unwrap();
        assert!(status.phase == MovePhase::Copying && !status.is_over() && status.downtime_ms.is_none(), "{status:?}");
        let reply = serde_json::to_string(&MoveReply::Begun(status.clone())).unwrap();
        assert!(reply.starts_with(r#"{"kind":"begun","vm":"web1","direction":"out","host":"host2""#), "{reply}");
        assert_eq!(serde_json::from_str::<MoveReply>(&reply).unwrap(), MoveReply::Begun(status.clone()));
        let newer = serde_json::to_string(&status).unwrap().replace("copying", "warping").replace("none", "split");
        let newer: MoveStatus = serde_json::from_str(&newer).unwrap();
        assert_eq!((newer.phase, newer.outcome, newer.is_over()), (MovePhase::Unknown, MoveOutcome::Unknown, true));
    }
}
