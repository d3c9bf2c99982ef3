//! The settings of a pre-copy, and the words for what it decides.

use std::time::Duration;

use pagoda_core::units::PageCount;

use super::slowing::Slowing;
use crate::map::PageRun;
use crate::units::{Moment, Rate};

/// Rounds without a new least of what is left, after which a move is stalled. One may be chance, and each costs a round.
pub const STALL_ROUNDS: u32 = 3;
/// A round that leaves at least an eighth less than any before has come forward.
pub(super) const PROGRESS_PART: u64 = 8;
/// What is left takes so many times the promised downtime: more than two doublings of what writers wait.
pub(super) const FAR: u32 = 8;
/// A round takes at least so long. What was written in less is less than a scan costs to find it: 0.35 ms per GiB.
pub const ROUND_MIN: Duration = Duration::from_millis(20);
/// The same while writers are slowed. A round that is shorter than the queue of the link (50 ms where that was seen) ends before its bytes are
/// acknowledged. It looks then as if no step helped, and the last one is reached before any has had time to.
pub const SLOWED_ROUND_MIN: Duration = Duration::from_millis(100);
/// What is left is so little that another round saves nothing: 1 MiB, 8 ms at 1 Gbit/s.
pub const LITTLE: PageCount = PageCount(256);
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All pages are sent before the VM runs at its destination.
    Precopy,
    /// No page is sent in rounds: all of them follow after the VM is stopped.
    Postcopy,
    /// Rounds as long as they come forward, and the rest afterwards.
    Hybrid,
}

/// What happens when a move has not ended in the time that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTimeout {
    Abort,
    /// Writers are slowed in steps, for as long again or a minute.
    SlowGuest,
    Postcopy,
}

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub mode: Mode,
    /// The VM is not stopped for longer, as far as that can be known before.
    pub downtime_max: Duration,
    /// What a stop, the device state and a start take without any page: some 20 ms.
    pub stop_cost: Duration,
    pub bandwidth_max: Option<Rate>,
    pub time_max: Option<Duration>,
    pub on_timeout: OnTimeout,
}

/// What to send now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Send(PageRun),
    /// The bandwidth's cap is reached until then.
    Wait(Moment),
    /// Nothing is left to send in this round.
    RoundEnd,
}

/// What follows a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Another round, with writers slowed like this.
    Round(Slowing),
    /// Nothing is worth a round before then. `decide` is asked again, after a new look at what was written.
    Wait(Moment),
    Stop(Handover),
    GiveUp(Hopeless),
}

/// How the VM goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// With all its pages.
    Whole,
    /// With a map of those that are missing.
    Missing,
}

/// Why a move is given up. The VM runs where it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Hopeless {
    #[error("the time is over: the VM would have to be stopped for {expected:?}, {promised:?} are promised")]
    TimeOver { expected: Duration, promised: Duration },
    #[error("the guest writes as fast as the link sends, although each first write to a page waits {:?}", Slowing::MOST.delay())]
    CannotSlow,
    #[error("its writers were slowed for {slowed:?}, and that is as long as they may be")]
    SlowTimeOver { slowed: Duration },
}
