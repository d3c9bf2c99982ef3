//! How a move from here is shown to its user, in words.

use std::time::{Duration, Instant};

use pagoda_core::units::Bytes;
use pagoda_move::owner::End;
use pagoda_move::rounds::{self, Phase, Waits};

use super::progress::Progress;

/// How far an attempt is, before pages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Greeting,
    Reserving,
    /// Its disks are copied.
    Mirroring,
    /// What the VM borrows becomes its own, until then at the latest.
    Owning(Instant),
    Copying,
    /// An earlier daemon has given the VM away.
    Granted,
}

/// What is being done, before the grant.
pub const fn phase(stage: Stage, rounds: Option<&rounds::Progress>) -> &'static str {
    match (stage, rounds) {
        (Stage::Greeting, _) => "greeting",
        (Stage::Reserving, _) => "reserving",
        (Stage::Mirroring, _) => "disks",
        (Stage::Owning(_), _) => "preparing",
        (_, Some(rounds)) => match rounds.phase {
            Phase::Rounds => "copying",
            Phase::Stopping(_) => "stopping",
            Phase::Last(_) | Phase::Done => "finishing",
        },
        (Stage::Copying | Stage::Granted, None) => "ending",
    }
}

/// Takes in how far the rounds are, what has gone into the VM's remote tier, and why there is no connection.
pub fn update(
    shown: &mut Progress,
    rounds: Option<&rounds::Progress>,
    placed: Option<Bytes>,
    unreachable: Option<&str>,
) {
    shown.placed = placed.unwrap_or(shown.placed);
    shown.waits = match (unreachable, rounds) {
        (Some(why), _) => Some(format!("the destination cannot be reached: {why}")),
        (None, rounds) => rounds.and_then(|rounds| waits_for(rounds.waits)),
    };
    shown.write_delay = rounds.map_or(Duration::ZERO, |rounds| rounds.slowing.delay());
    if let Some(rounds) = rounds {
        (shown.sent, shown.left, shown.round) = (rounds.sent, rounds.left.bytes(), rounds.round.0);
        (shown.spared, shown.saved) = (rounds.spared.saturating_sub(shown.placed), rounds.saved);
        (shown.rate, shown.written_rate) = (rounds.rate, rounds.written_rate);
        (shown.eta, shown.expected_downtime) = (rounds.remaining, rounds.expected_downtime);
    }
}

/// Why it is not further than it is.
fn waits_for(waits: Waits) -> Option<String> {
    match waits {
        Waits::Nothing => None,
        Waits::Bandwidth => Some("the bandwidth that it may have is used".to_owned()),
        Waits::Acknowledgement => Some("the destination has not acknowledged an earlier round".to_owned()),
        Waits::DirectIo { pages } => Some(format!("direct I/O in flight may write to {} pages", pages.0)),
        Waits::Writers => Some("the guest writes as fast as the link sends".to_owned()),
    }
}

/// Why an attempt has ended so of which nobody has said more.
pub const fn reason_of(end: End) -> &'static str {
    match end {
        End::Moved => "it has moved",
        End::GivenUp => "the destination did not have all of it in time, or was away for too long",
        End::CameBack => "the destination has refused it, or the arbiter or an operator has decided so",
        End::Crashed => "its QEMU has ended",
        End::Superseded => "an operator has let the destination take it over, where it runs; what was here is ended",
        End::Lost => "an operator has given it up",
    }
}

pub fn size(bytes: Bytes) -> String {
    format!("{} MiB", bytes.0.div_ceil(1 << 20))
}
