//! What a writer does when the space is full: it waits in short slices up to a bound, and then gets "no space"
//! (ENOSPC).
//!
//! The simulator calls [`decide`] when a write arrives and at the end of each slice. The file server of
//! `pagoda-outbox-server` does not call it: its writers wait in slices too, with limits of their own, and nobody can
//! tell it that one was killed. Metadata takes no room and never waits.

use std::time::Duration;

use crate::units::Bytes;

/// The limits bound how long writers wait, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest wait before the server looks again: whether the writer was killed, and whether there is room.
    pub slice: Duration,
    /// The longest wait in all. Well below the 120 s after which a Linux guest reports a hung task.
    pub bound: Duration,
    /// Writers that may wait at a time: each has a thread of the server, and the others must find one.
    pub waiting_max: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { slice: Duration::from_millis(100), bound: Duration::from_secs(30), waiting_max: 16 }
    }
}

/// The space as a request finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceView {
    /// What the VM may use.
    pub budget: Bytes,
    /// Written and not freed, and sent and not acknowledged.
    pub used: Bytes,
    /// What writers want that have waited for longer than this one.
    pub ahead: Bytes,
    /// So many other writers wait.
    pub waiting: u32,
}

/// A request of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Anything that takes no room: lookup, create, rename, unlink, statfs.
    Metadata,
    /// `new` bytes that the space does not hold yet: an overwrite of unsent bytes takes none.
    Write { new: Bytes, waited: Duration, is_interrupted: bool },
}

/// Why a write is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSpace {
    /// It has waited as long as it may.
    Bound,
    /// As many wait as may.
    TooManyWait,
}

/// What the server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The request has room or needs none, and is carried out.
    Proceed,
    /// Ask again when room is freed, and after this time at the latest.
    Wait(Duration),
    /// The write fails with ENOSPC, for this reason.
    NoSpace(NoSpace),
    /// EINTR: the writer was killed.
    Interrupted,
}

/// Whether a request goes through now.
pub fn decide(request: Request, space: &SpaceView, limits: &Limits) -> Answer {
    let Request::Write { new, waited, is_interrupted } = request else { return Answer::Proceed };
    if is_interrupted {
        return Answer::Interrupted;
    }
    let taken = u128::from(space.used.0) + u128::from(space.ahead.0) + u128::from(new.0);
    if new == Bytes::ZERO || taken <= u128::from(space.budget.0) {
        return Answer::Proceed;
    }
    let Some(left) = limits.bound.checked_sub(waited).filter(|left| !left.is_zero()) else {
        return Answer::NoSpace(NoSpace::Bound);
    };
    // One that waits already has its thread.
    if waited.is_zero() && space.waiting >= limits.waiting_max {
        return Answer::NoSpace(NoSpace::TooManyWait);
    }
    Answer::Wait(limits.slice.min(left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SLICE: Duration = Duration::from_millis(100);

    fn write(new: u64, waited_ms: u64) -> Request {
        Request::Write { new: Bytes(new), waited: Duration::from_millis(waited_ms), is_interrupted: false }
    }

    fn space(budget: u64, used: u64, ahead: u64, waiting: u32) -> SpaceView {
        SpaceView { budget: Bytes(budget), used: Bytes(used), ahead: Bytes(ahead), waiting }
    }

    #[test]
    fn a_writer_waits_and_then_gets_no_space() {
        let check = |request, space, expected| {
            assert_eq!(decide(request, &space, &Limits::default()), expected, "{request:?} {space:?}");
        };
        check(write(10, 0), space(100, 90, 0, 0), Answer::Proceed);
        check(write(11, 0), space(100, 90, 0, 0), Answer::Wait(SLICE));
        check(write(10, 0), space(100, 90, 1, 1), Answer::Wait(SLICE));
        check(write(0, 0), space(100, 200, 0, 99), Answer::Proceed);
        check(Request::Metadata, space(0, 200, 0, 99), Answer::Proceed);
        check(write(1, 29_950), space(100, 100, 0, 0), Answer::Wait(Duration::from_millis(50)));
        check(write(1, 30_000), space(100, 100, 0, 0), Answer::NoSpace(NoSpace::Bound));
        check(write(1, 30_000), space(101, 100, 0, 0), Answer::Proceed);
        check(write(1, 0), space(100, 100, 0, 16), Answer::NoSpace(NoSpace::TooManyWait));
        check(write(1, 100), space(100, 100, 0, 16), Answer::Wait(SLICE));
        check(write(u64::MAX, 0), space(u64::MAX, 1, 0, 0), Answer::Wait(SLICE));
        // Made smaller than what is in it: no new bytes until it has drained.
        check(write(1, 0), space(50, 90, 0, 0), Answer::Wait(SLICE));
        let killed = Request::Write { new: Bytes(1), waited: SLICE, is_interrupted: true };
        check(killed, space(100, 0, 0, 0), Answer::Interrupted);
    }

    proptest! {
        /// Whatever is asked in whatever order, the space never holds more than its budget, every writer has an answer
        /// by the bound, and the one that waits longest goes first.
        #[test]
        fn the_budget_is_kept_and_everybody_is_answered(
            writes in prop::collection::vec((1u64..40, 0u64..3000), 1..40),
            budgets in prop::collection::vec(10u64..100, 1..8),
            drain in 0u64..4,
        ) {
            let limits = Limits { bound: Duration::from_millis(1000), waiting_max: 4, ..Limits::default() };
            let mut due: Vec<(u64, u64)> = writes.iter().map(|&(new, at)| (at / 100 * 100, new)).collect();
            due.sort_unstable();
            let mut waiting: Vec<(u64, u64)> = Vec::new();
            let (mut used, mut answered) = (0u64, 0);
            for now in (0..5000u64).step_by(100) {
                let budget = budgets[(now / 700) as usize % budgets.len()];
                used = used.saturating_sub(drain);
                let arrived = due.partition_point(|(at, _)| *at <= now);
                let asking: Vec<_> = waiting.drain(..).chain(due.drain(..arrived)).collect();
                for (since, new) in asking {
                    let ahead = waiting.iter().map(|(_, new)| new).sum();
                    let view = space(budget, used, ahead, waiting.len() as u32);
                    match decide(write(new, now - since), &view, &limits) {
                        Answer::Proceed => {
                            used += new;
                            answered += 1;
                            prop_assert!(used <= budget, "{used} of {budget}");
                        }
                        Answer::Wait(slice) => {
                            prop_assert!(slice <= SLICE && now - since < 1000);
                            waiting.push((since, new));
                        }
                        Answer::NoSpace(_) => answered += 1,
                        Answer::Interrupted => prop_assert!(false),
                    }
                    prop_assert!(waiting.len() <= 4);
                }
            }
            prop_assert_eq!(answered, writes.len());
        }
    }
}
