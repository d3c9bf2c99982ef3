//! Rules that a run can break on purpose. The oracle has to notice each, by what it breaks.

use crate::plan::{Fault, Phase};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// The destination runs the VM when its note is on its way to the disk, and not there.
    RunsBeforeNote,
    /// The source sends the grant when its note is on its way to the disk, and not there.
    GrantsBeforeNote,
    /// What an earlier attempt or connection still had on its way is taken for this one's.
    ForgetsAttempt,
    /// The source forgets a page of the tail when it has sent it.
    FreesBeforeAcknowledged,
    /// A copy counts although a direct I/O in flight began before the page's protection.
    TrustsCopyUnderDma,
    /// What was written between the last look and the stop is not looked for.
    LosesLastWrites,
    /// A destination that starts again runs what it finds, without a grant.
    RunsAfterRestart,
    /// A source without an answer runs the VM again after a while.
    TakesBackByItself,
    /// A page of the tail that arrives twice is stored twice.
    StoresTwice,
    /// A round is acknowledged when it has come by one of the streams.
    AcknowledgesEarly,
    /// A destination that does not reach the arbiter runs the VM as if that had named it.
    RunsUnanswered,
}

impl Mistake {
    pub const ALL: [Mistake; 11] = [
        Mistake::RunsBeforeNote,
        Mistake::GrantsBeforeNote,
        Mistake::ForgetsAttempt,
        Mistake::FreesBeforeAcknowledged,
        Mistake::TrustsCopyUnderDma,
        Mistake::LosesLastWrites,
        Mistake::RunsAfterRestart,
        Mistake::TakesBackByItself,
        Mistake::StoresTwice,
        Mistake::AcknowledgesEarly,
        Mistake::RunsUnanswered,
    ];
}

impl Mistake {
    /// Where a fault makes the mistake show soon, if it needs one.
    pub fn trigger(self) -> Option<(Phase, Fault)> {
        match self {
            Mistake::RunsBeforeNote => Some((Phase::FirstInstruction, Fault::KillDaemon(1))),
            Mistake::GrantsBeforeNote => Some((Phase::GrantSent, Fault::KillDaemon(0))),
            Mistake::RunsAfterRestart => Some((Phase::LaterRound, Fault::KillDaemon(1))),
            Mistake::TakesBackByItself | Mistake::RunsUnanswered => Some((Phase::GrantHere, Fault::CutBoth)),
            Mistake::ForgetsAttempt | Mistake::StoresTwice => Some((Phase::Tail, Fault::CutBoth)),
            _ => None,
        }
    }

    /// What the oracle says.
    pub fn shows(self, violation: &str) -> bool {
        let expected = match self {
            Mistake::RunsBeforeNote
            | Mistake::GrantsBeforeNote
            | Mistake::RunsAfterRestart
            | Mistake::TakesBackByItself
            | Mistake::RunsUnanswered => "two VMs run",
            _ => "page ",
        };
        violation.contains(expected)
    }
}
