//! Writers of a VM that are slowed while it moves: answers to their first writes come later.
//!
//! Only what is known to be a processor of the guest, by its thread, and a first write to a page in DRAM that needs nothing else, is
//! delayed. A thread waits in one fault at a time, so there are no more answers than processors. The loop goes on meanwhile. When
//! slowing ends, whyever, all answers are due at once; those that a daemon owes when it ends come from the next one, which wakes
//! every thread. The page may be another one by then: the machine is asked as if the fault had just come.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pagoda_core::fault::{Access, FaultKind};
use pagoda_core::stats::{Metric, Stats};
use pagoda_core::units::PageIdx;

/// No answer is owed longer than that, whatever is asked for.
pub const DELAY_MAX: Duration = Duration::from_millis(2);
/// As many processors as QEMU gives a VM, and more. Of more threads than that none is slowed, and no more answers are owed.
pub const THREADS_MAX: usize = 4096;

/// A fault of a thread of the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faulted {
    pub page: PageIdx,
    pub access: Access,
    pub kind: FaultKind,
    pub thread: u32,
}

#[derive(Clone, Copy, Debug)]
struct Owed {
    fault: Faulted,
    since: Instant,
    due: Instant,
}

/// Whose writes are slowed, and the answers that are not due yet.
#[derive(Debug, Default)]
pub struct Slowed {
    delay: Duration,
    /// Threads of the guest's processors, in order.
    threads: Vec<u32>,
    /// Answers that are owed, in the order in which they are due.
    owed: VecDeque<Owed>,
    writes: u64,
    waited: Duration,
}

impl Slowed {
    /// From now on first writes of these threads wait so long. What is owed already is due no later than that either.
    pub fn set(&mut self, delay: Duration, mut threads: Vec<u32>, now: Instant) {
        threads.sort_unstable();
        threads.dedup();
        threads.truncate(THREADS_MAX);
        (self.delay, self.threads) = (delay.min(DELAY_MAX), threads);
        self.owed.reserve(self.threads.len());
        let latest = now + self.delay;
        self.owed.iter_mut().for_each(|owed| owed.due = owed.due.min(latest));
    }

    /// Nobody is slowed any more.
    pub fn stop(&mut self, now: Instant) {
        self.set(Duration::ZERO, Vec::new(), now);
    }

    /// Writers are slowed, or answers are owed.
    pub fn is_on(&self) -> bool {
        !self.delay.is_zero() || !self.owed.is_empty()
    }

    /// Takes a first write that is to wait. False: it is to be answered.
    pub fn take(&mut self, fault: Faulted, now: Instant) -> bool {
        let is_slowed = !self.delay.is_zero() && self.threads.binary_search(&fault.thread).is_ok();
        if !is_slowed || self.owed.len() >= self.threads.len() {
            return false;
        }
        self.owed.push_back(Owed { fault, since: now, due: now + self.delay });
        true
    }

    /// A fault whose answer is due.
    pub fn next_due(&mut self, now: Instant) -> Option<Faulted> {
        let Owed { fault, since, .. } = self.owed.pop_front_if(|owed| owed.due <= now)?;
        self.writes += 1;
        self.waited += now.saturating_duration_since(since);
        Some(fault)
    }

    /// How long it is until an answer is due.
    pub fn wait(&self, now: Instant) -> Duration {
        self.owed.front().map_or(Duration::MAX, |owed| owed.due.saturating_duration_since(now))
    }

    pub fn add_to(&self, stats: &mut Stats) {
        stats.add(Metric::SlowedWrites, self.writes);
        stats.add(Metric::SlowedUs, self.waited.as_micros() as u64);
        stats.set(Metric::WriteDelay, self.delay.as_micros() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    fn fault(page: u64, thread: u32) -> Faulted {
        Faulted { page: PageIdx(page), access: Access::Write, kind: FaultKind::WriteProtected, thread }
    }

    fn due(slowed: &mut Slowed, now: Instant) -> Vec<u64> {
        std::iter::from_fn(|| slowed.next_due(now)).map(|fault| fault.page.0).collect()
    }

    #[test]
    fn only_known_threads_wait_and_each_in_one_fault() {
        let (mut slowed, now) = (Slowed::default(), Instant::now());
        assert!(!slowed.take(fault(1, 7), now) && !slowed.is_on(), "nobody is slowed");
        slowed.set(50 * US, vec![9, 7, 7], now);
        assert!(slowed.is_on() && !slowed.take(fault(1, 8), now), "another thread");
        assert!(slowed.take(fault(2, 7), now) && slowed.take(fault(3, 9), now + 10 * US));
        assert!(!slowed.take(fault(4, 7), now), "as many as threads wait already");
        assert_eq!((slowed.wait(now), slowed.wait(now + 70 * US)), (50 * US, Duration::ZERO));
        assert!(due(&mut slowed, now + 49 * US).is_empty());
        assert_eq!(due(&mut slowed, now + 50 * US), [2]);
        assert_eq!(due(&mut slowed, now + 60 * US), [3]);
        assert_eq!(slowed.wait(now), Duration::MAX);
        let mut stats = Stats::default();
        slowed.add_to(&mut stats);
        let values = [Metric::SlowedWrites, Metric::SlowedUs, Metric::WriteDelay].map(|metric| stats.get(metric));
        assert_eq!(values, [2, 100, 50]);
    }

    #[test]
    fn a_shorter_step_and_the_end_count_for_what_is_owed() {
        let (mut slowed, now) = (Slowed::default(), Instant::now());
        slowed.set(1600 * US, vec![1, 2, 3, 4], now);
        assert!(slowed.take(fault(1, 1), now) && slowed.take(fault(2, 2), now + 1500 * US));
        slowed.set(50 * US, vec![1, 2, 3, 4], now + 1500 * US);
        assert!(slowed.take(fault(3, 3), now + 1510 * US));
        // In order, although the second was to wait until 3100.
        assert_eq!(due(&mut slowed, now + 1550 * US), [1, 2]);
        slowed.set(1600 * US, vec![1, 2, 3, 4], now + 1555 * US);
        assert!(slowed.take(fault(4, 4), now + 1556 * US));
        slowed.stop(now + 1557 * US);
        assert!(slowed.is_on(), "answers are owed");
        assert_eq!(due(&mut slowed, now + 1557 * US), [3, 4]);
        assert!(!slowed.is_on() && !slowed.take(fault(5, 1), now));
    }

    #[test]
    fn the_delay_has_a_bound() {
        let (mut slowed, now) = (Slowed::default(), Instant::now());
        slowed.set(Duration::from_secs(9), vec![1], now);
        assert!(slowed.take(fault(1, 1), now));
        assert_eq!(slowed.wait(now), DELAY_MAX);
    }
}
