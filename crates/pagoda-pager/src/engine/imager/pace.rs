//! How often the engine works for an image while the VM runs.

use std::time::{Duration, Instant};

use pagoda_core::budget::Budget;
use pagoda_core::fault::{KEEPS_MAX, OpId};

/// As much as may be spent at once: a few steps, for each of which faults wait.
const BURST: Duration = Duration::from_millis(1);
/// While page-ins are waited for, nothing is done for an image, unless that has been so for this long. A VM that pages without
/// end would keep its frozen pages for ever.
const YIELDS_FOR: Duration = Duration::from_millis(50);
/// A step that takes so long has waited for the image's disk, and faults behind it: the kernel slows down whoever writes more
/// than the disk takes.
const SLOW: Duration = Duration::from_millis(5);
/// It counts so many times, which leaves the disk time.
const SLOW_COUNTS: u32 = 8;
/// When it is looked again for pages that can be copied, if there were none.
const BLOCKED_FOR: Duration = Duration::from_millis(100);

/// A part of the engine's time.
#[derive(Debug)]
pub struct Pace {
    budget: Budget,
    per_mille: u32,
    started: Instant,
    worked: Instant,
}

impl Pace {
    /// So many thousandths of the engine's time.
    pub fn new(per_mille: u32) -> Pace {
        let now = Instant::now();
        Pace { budget: Budget::new(BURST.as_nanos() as u64), per_mille, started: now, worked: now }
    }

    /// Whether a step may be done now. `faults`: page-ins are waited for.
    pub fn is_due(&mut self, faults: bool, now: Instant) -> bool {
        self.budget.earn(now.duration_since(self.started).as_nanos() as u64, self.per_mille);
        !self.budget.is_spent() && (!faults || now - self.worked >= YIELDS_FOR)
    }

    /// How long it is until a step may be done.
    pub fn wait(&self, faults: bool, now: Instant) -> Duration {
        let yields = if faults { YIELDS_FOR.saturating_sub(now - self.worked) } else { Duration::ZERO };
        yields.max(Duration::from_nanos(self.budget.wait_ns(self.per_mille)))
    }

    /// A step that began then is over.
    pub fn note_step(&mut self, begun: Instant) {
        self.worked = Instant::now();
        self.spend(self.worked - begun);
    }

    fn spend(&mut self, took: Duration) {
        let counts = if took < SLOW { took } else { took * SLOW_COUNTS };
        self.budget.spend(counts.as_nanos() as u64);
    }
}

/// When pages are to be copied into the image that do not change.
#[derive(Debug)]
pub struct Fills {
    pace: Pace,
    /// There was nothing to be done: the pages that are left are being read, or on their way.
    blocked_until: Option<Instant>,
    /// Reads for images that are under way.
    reads: Vec<OpId>,
    /// Reads that have ended since: each leaves room for another.
    ended: u32,
}

impl Fills {
    /// So many thousandths of the engine's time.
    pub fn new(per_mille: u32) -> Fills {
        Fills { pace: Pace::new(per_mille), blocked_until: None, reads: Vec::with_capacity(KEEPS_MAX), ended: 0 }
    }

    /// A read for an image has begun.
    pub fn begin_read(&mut self, op: OpId) {
        self.reads.push(op);
    }

    /// The buffer of a read is free. It may have been one for an image.
    pub fn end_read(&mut self, op: OpId) {
        let before = self.reads.len();
        self.reads.retain(|other| *other != op);
        self.ended += u32::from(self.reads.len() < before);
    }

    /// Whether a step may be done now. `faults`: page-ins are waited for.
    pub fn is_due(&mut self, faults: bool, now: Instant) -> bool {
        let is_blocked = self.ended == 0 && self.blocked_until.is_some_and(|until| now < until);
        !is_blocked && self.pace.is_due(faults, now)
    }

    /// How long it is until a step may be done.
    pub fn wait(&self, faults: bool, now: Instant) -> Duration {
        let blocked = self.blocked_until.filter(|_| self.ended == 0);
        let blocked = blocked.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        blocked.max(self.pace.wait(faults, now))
    }

    /// A step that began then is over. `is_blocked`: it found nothing to do.
    pub fn note_step(&mut self, begun: Instant, is_blocked: bool) {
        self.pace.note_step(begun);
        // While all pages that are left wait for reads, the whole page table would be looked through at each step for nothing.
        if is_blocked {
            (self.blocked_until, self.ended) = (Some(Instant::now() + BLOCKED_FOR), 0);
        } else if self.ended > 0 {
            self.ended -= 1;
        } else {
            self.blocked_until = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_takes_its_part_of_the_time_and_makes_way_for_faults() {
        let mut pace = Pace::new(250);
        let start = pace.started;
        assert!(!pace.is_due(false, start), "nothing is earned yet");
        let later = start + Duration::from_millis(10);
        assert!(pace.is_due(false, later) && !pace.is_due(true, later));
        assert!(pace.is_due(true, start + YIELDS_FOR), "a VM that pages without end");
        assert_eq!(pace.wait(true, later), YIELDS_FOR - Duration::from_millis(10));
        pace.budget.spend(BURST.as_nanos() as u64 + 100_000);
        assert!(!pace.is_due(false, later));
        let wait = pace.wait(false, later);
        assert!((Duration::from_micros(400)..Duration::from_micros(450)).contains(&wait), "{wait:?}");
    }

    #[test]
    fn a_slow_disk_is_left_time() {
        let mut pace = Pace::new(250);
        let later = pace.started + Duration::from_secs(1);
        assert!(pace.is_due(false, later));
        pace.spend(Duration::from_millis(100));
        let wait = pace.wait(false, later);
        assert!((Duration::from_millis(3190)..Duration::from_millis(3210)).contains(&wait), "{wait:?}");
    }

    #[test]
    fn a_read_that_ends_leaves_room_for_one_step() {
        let mut fills = Fills::new(1000);
        let now = Instant::now() + Duration::from_millis(10);
        fills.begin_read(OpId(3));
        assert!(fills.is_due(false, now));
        fills.note_step(Instant::now(), true);
        assert!(!fills.is_due(false, now) && fills.wait(false, now) > Duration::ZERO);
        fills.end_read(OpId(4));
        assert!(!fills.is_due(false, now), "another's read");
        fills.end_read(OpId(3));
        assert!(fills.is_due(false, now));
        fills.note_step(Instant::now(), false);
        assert!(!fills.is_due(false, now), "what is left was being read, and is");
        assert!(fills.is_due(false, now + BLOCKED_FOR));
    }
}
