//! Polls for the end of a page-in before it sleeps.
//!
//! A CPU that went idle takes its time to come back: some microseconds on a bare host, 20 and more where the host is a VM
//! itself and a halted CPU is the hypervisor's (measured: a read of 4 KiB takes 56-63 us on a CPU kept awake, 76-86 else).
//! The engine and the thread whose fault it serves sleep at the same time, so what polling takes is what nobody uses,
//! and it ends:
//!
//! * after [`BUSY_POLL_DEFAULT`], or what the user says. It does not begin where page-ins usually take longer than that.
//! * when something else wants this CPU: then there is no polling at all for [`CROWDED_PAUSE`].
//!
//! KVM polls on halt for the same reason and as long (`kvm.halt_poll_ns`).

use std::time::{Duration, Instant};

/// As `kvm.halt_poll_ns` and the guest's `haltpoll` by default.
pub const BUSY_POLL_DEFAULT: Duration = Duration::from_micros(200);
/// Longer than any page-in for which a wake-up matters.
pub const BUSY_POLL_MAX: Duration = Duration::from_millis(1);
/// Giving way took so long: another thread ran meanwhile. An interrupt takes a few microseconds.
const CROWDED: Duration = Duration::from_micros(50);
/// For so long after that nothing is polled: a tick of the scheduler or two.
const CROWDED_PAUSE: Duration = Duration::from_millis(10);
/// Weight of the newest page-in in the usual time: one in 16, so that a burst of slow ones is forgiven.
const SMOOTHING: u32 = 16;

/// When the engine polls, and for how long.
#[derive(Debug)]
pub struct BusyPoll {
    max: Duration,
    /// How long page-ins take.
    usual: Duration,
    paused_until: Option<Instant>,
}

impl BusyPoll {
    /// Polls for at most `max` at a time; zero: never.
    pub fn new(max: Duration) -> BusyPoll {
        BusyPoll { max, usual: max / 2, paused_until: None }
    }

    /// A page-in took so long, from its fault to its answer.
    pub fn note(&mut self, took: Duration) {
        // One stalled request says little about the next.
        let took = took.min(4 * self.max);
        self.usual = (self.usual * (SMOOTHING - 1) + took) / SMOOTHING;
    }

    fn is_worth_it(&self, now: Instant) -> bool {
        self.usual < self.max && self.paused_until.is_none_or(|until| now >= until)
    }

    /// Waits for `is_due`, and gives up as the module says. Only while a page-in of a single page is under way.
    pub fn poll(&mut self, mut is_due: impl FnMut() -> bool) {
        let start = Instant::now();
        if !self.is_worth_it(start) {
            return;
        }
        let mut before = start;
        while !is_due() {
            std::thread::yield_now();
            let now = Instant::now();
            if now - before > CROWDED {
                self.paused_until = Some(now + CROWDED_PAUSE);
                return;
            }
            if now - start > self.max {
                return;
            }
            before = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_page_ins_take_long_nothing_is_polled() {
        let mut poll = BusyPoll::new(BUSY_POLL_MAX);
        assert!(poll.is_worth_it(Instant::now()));
        (0..100).for_each(|_| poll.note(Duration::from_millis(5)));
        let mut looks = 0;
        poll.poll(|| {
            looks += 1;
            true
        });
        assert_eq!(looks, 0);
        (0..100).for_each(|_| poll.note(Duration::from_micros(50)));
        assert!(poll.is_worth_it(Instant::now()));
    }

    #[test]
    fn a_user_can_forbid_it() {
        let poll = BusyPoll::new(Duration::ZERO);
        assert!(!poll.is_worth_it(Instant::now()));
    }

    #[test]
    fn what_never_comes_is_given_up() {
        let mut poll = BusyPoll::new(BUSY_POLL_DEFAULT);
        poll.poll(|| false);
    }
}
