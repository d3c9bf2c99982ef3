//! A cap on bandwidth: bytes are earned as time passes, and spent as pages are sent.

use std::time::Duration;

use pagoda_core::units::Bytes;

use crate::units::{Moment, Rate};

/// What is not used is kept for so long: a sender that was busy elsewhere catches up with no more than that.
const BURST: Duration = Duration::from_millis(20);

/// The last run may be sent on credit, which the next one waits for.
#[derive(Clone, Debug)]
pub struct Pace {
    cap: Option<Rate>,
    /// When all that was sent is paid for.
    paid_at: Moment,
}

impl Pace {
    pub const fn new(cap: Option<Rate>, now: Moment) -> Pace {
        Pace { cap, paid_at: now }
    }

    /// Until when nothing may be sent, if that is later than now.
    pub fn wait_until(&self, now: Moment) -> Option<Moment> {
        (self.paid_at > now + BURST).then(|| Moment(self.paid_at.0 - BURST))
    }

    pub fn spend(&mut self, now: Moment, bytes: Bytes) {
        if let Some(cap) = self.cap {
            self.paid_at = self.paid_at.max(now) + cap.time_ceil(bytes).unwrap_or(Duration::MAX);
        }
    }

    /// So many bytes that were spent were not sent.
    pub fn give_back(&mut self, bytes: Bytes) {
        if let Some(time) = self.cap.and_then(|cap| cap.time_ceil(bytes)) {
            self.paid_at = Moment(self.paid_at.0.saturating_sub(time));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_sent_than_the_cap_allows() {
        let second = Duration::from_secs(1);
        let mut pace = Pace::new(Some(Rate(100 << 20)), Moment(second));
        let (mut now, mut sent) = (Moment(second), 0);
        while now < Moment(second * 11) {
            match pace.wait_until(now) {
                Some(until) => now = until,
                None => {
                    pace.spend(now, Bytes(1 << 20));
                    sent += 1;
                }
            }
        }
        assert!((1000..1005).contains(&sent), "{sent} MiB in 10 s");
        // What was not sent after all can be sent soon.
        pace.spend(now, Bytes(1 << 30));
        assert!(pace.wait_until(now).is_some_and(|until| until > now + second * 9));
        pace.give_back(Bytes(1 << 30));
        assert!(pace.wait_until(now).is_none_or(|until| until < now + second));
        let mut free = Pace::new(None, now);
        free.spend(now, Bytes(1 << 50));
        assert_eq!(free.wait_until(now), None);
    }
}
