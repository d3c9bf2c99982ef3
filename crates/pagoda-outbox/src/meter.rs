//! For how long an outbox had something to send, and for how long writers waited: sums of time, for whoever has a clock.

/// Sums in microseconds, up to the last call of [`Meter::observe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Meter {
    at_us: u64,
    readers: u64,
    waits: bool,
    /// A reader had bytes to take, or a writer waited for room: then the network decided how fast the space drains.
    pub sending_us: u64,
    /// At least one writer waited for room.
    pub blocked_us: u64,
    /// Of readers that had bytes to take, summed over readers.
    pub reading_us: u64,
}

impl Meter {
    /// So it is from now on: this many readers have bytes to take, and `waits`: a writer waits for room. Until now it was as it was
    /// said before.
    pub fn observe(&mut self, now_us: u64, readers: usize, waits: bool) {
        // Two threads may have read the clock in another order than they came here.
        let passed = now_us.saturating_sub(self.at_us);
        self.at_us = self.at_us.max(now_us);
        self.reading_us = self.reading_us.saturating_add(passed.saturating_mul(self.readers));
        self.blocked_us += if self.waits { passed } else { 0 };
        self.sending_us += if self.waits || self.readers > 0 { passed } else { 0 };
        (self.readers, self.waits) = (readers as u64, waits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_of_what_was_said_before() {
        let mut meter = Meter::default();
        let mut check = |now, readers, waits, sums: (u64, u64, u64)| {
            meter.observe(now, readers, waits);
            assert_eq!((meter.sending_us, meter.blocked_us, meter.reading_us), sums, "at {now}");
        };
        check(100, 2, false, (0, 0, 0));
        check(150, 1, true, (50, 0, 100));
        check(140, 1, true, (50, 0, 100));
        check(160, 0, true, (60, 10, 110));
        check(170, 0, false, (70, 20, 110));
        check(900, 0, false, (70, 20, 110));
    }
}
