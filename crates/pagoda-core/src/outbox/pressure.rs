//! Outboxes give memory to the host before VMs are paged out for it.
//!
//! The policy says what the host lacks ([`Pressure::round`]). Outboxes' part of the pool shrinks by that first, down to the
//! sum of their mins; what is left of it is for the VMs to give. A space that is made smaller frees what it has not filled
//! at once, and the rest as it drains. While it drains, the VMs are not asked for the same bytes. If it makes no progress,
//! because readers stand still, they are. The part comes back slowly when nothing has been lacking for a while.

use crate::units::Bytes;

/// Draining that has not got on for so long is not waited for.
pub const DRAIN_PATIENCE_MS: u64 = 5_000;
/// Nothing was lacking for so long before outboxes get memory back: a shortage seldom comes alone.
pub const CALM_MS: u64 = 30_000;
/// The part of what was set that comes back in a second, then.
const RESTORED_PER_S: f64 = 1.0 / 64.0;

/// What is known at a round of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// What the host's free memory lacks to its goal, with what VMs at their limit lack.
    pub missing: Bytes,
    /// What outboxes may have without pressure, and must have.
    pub configured: Bytes,
    pub mins: Bytes,
    /// What outboxes were promised by the last division, and what they hold beyond.
    pub given: Bytes,
    pub draining: Bytes,
}

/// What outboxes may have, and what the VMs have to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Yielded {
    pub pool: Bytes,
    /// Kept from outboxes because of the host.
    pub withheld: Bytes,
    /// Still lacking when outboxes have given.
    pub left: Bytes,
    /// Draining that is not waited for any more.
    pub is_stuck: bool,
}

/// The pressure of one host on its outboxes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    withheld: f64,
    last_ms: Option<u64>,
    lacked_ms: Option<u64>,
    /// The least that was left to drain, and since when.
    drained: Option<(Bytes, u64)>,
}

impl Pressure {
    /// What outboxes may have of `configured` as of the last round.
    pub fn pool(&self, configured: Bytes) -> Bytes {
        configured.saturating_sub(Bytes(self.withheld as u64))
    }

    /// Makes one round: says what outboxes may have, and what VMs have to give.
    pub fn round(&mut self, now_ms: u64, shortage: &Shortage) -> Yielded {
        let Shortage { missing, configured, mins, given, draining } = *shortage;
        let is_stuck = self.is_stuck(now_ms, draining);
        let coming = if is_stuck { Bytes::ZERO } else { draining };
        let lacking = missing.saturating_sub(coming);
        let most = configured.saturating_sub(mins);
        let passed_s = self.last_ms.map_or(0.0, |last| now_ms.saturating_sub(last) as f64 / 1000.0);
        self.last_ms = Some(now_ms);
        let mut freed = Bytes::ZERO;
        if missing > Bytes::ZERO {
            self.lacked_ms = Some(now_ms);
            // What was not promised to anybody is given first, and frees nothing.
            let pool = given.min(configured.saturating_sub(Bytes(self.withheld as u64)));
            let target = pool.saturating_sub(lacking).max(mins.min(configured));
            freed = pool.saturating_sub(target);
            if lacking > Bytes::ZERO {
                self.withheld = configured.saturating_sub(target).0 as f64;
            }
        } else if self.lacked_ms.is_none_or(|lacked| now_ms.saturating_sub(lacked) >= CALM_MS) {
            self.withheld -= configured.0 as f64 * RESTORED_PER_S * passed_s;
        }
        self.withheld = self.withheld.clamp(0.0, most.0 as f64);
        let withheld = Bytes(self.withheld as u64);
        Yielded { pool: configured.saturating_sub(withheld), withheld, left: lacking.saturating_sub(freed), is_stuck }
    }

    fn is_stuck(&mut self, now_ms: u64, draining: Bytes) -> bool {
        if draining == Bytes::ZERO {
            self.drained = None;
            return false;
        }
        match self.drained {
            Some((least, since)) if draining >= least => now_ms.saturating_sub(since) >= DRAIN_PATIENCE_MS,
            _ => {
                self.drained = Some((draining, now_ms));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mib(mib: u64) -> Bytes {
        Bytes::from_mib(mib)
    }

    fn shortage(missing: u64, given: u64, draining: u64) -> Shortage {
        Shortage {
            missing: mib(missing),
            configured: mib(1024),
            mins: mib(64),
            given: mib(given),
            draining: mib(draining),
        }
    }

    #[test]
    fn outboxes_give_first_and_get_back_later() {
        let mut pressure = Pressure::default();
        let mut check = |now_s: u64, shortage: Shortage, pool: u64, left: u64| {
            let yielded = pressure.round(now_s * 1000, &shortage);
            assert_eq!((yielded.pool, yielded.left), (mib(pool), mib(left)), "at {now_s} s: {yielded:?}");
            yielded
        };
        check(0, shortage(0, 1024, 0), 1024, 0);
        check(1, shortage(200, 1024, 0), 824, 0);
        // It drains: nobody is asked for the same again.
        check(2, shortage(200, 824, 200), 824, 0);
        check(3, shortage(150, 824, 150), 824, 0);
        // Readers stand still: the VMs give, and outboxes what they have.
        check(7, shortage(150, 824, 150), 824, 0);
        let stuck = check(8, shortage(150, 824, 150), 674, 0);
        assert!(stuck.is_stuck);
        // All that they may give is not enough.
        check(9, shortage(1000, 674, 0), 64, 390);
        check(10, shortage(390, 64, 0), 64, 390);
        // Nothing lacks: after a while they get it back, step by step.
        check(39, shortage(0, 64, 0), 64, 0);
        check(40, shortage(0, 64, 0), 80, 0);
        check(44, shortage(0, 80, 0), 144, 0);
        check(500, shortage(0, 144, 0), 1024, 0);
    }

    #[test]
    fn what_nobody_has_is_no_gift() {
        // 1024 MiB are set, of which 100 are given: the first 100 less frees 36, and 64 are the mins.
        let yielded = Pressure::default().round(0, &shortage(500, 100, 0));
        assert_eq!((yielded.pool, yielded.left), (mib(64), mib(464)));
    }

    proptest! {
        #[test]
        fn the_part_stays_within_its_limits(rounds in prop::collection::vec((0u64..5000, 0u64..2000, 0u64..2000, 0u64..500), 1..60)) {
            let mut pressure = Pressure::default();
            let mut now_ms = 0;
            for (step_ms, missing, given, draining) in rounds {
                now_ms += step_ms;
                let shortage = shortage(missing, given, draining);
                let yielded = pressure.round(now_ms, &shortage);
                prop_assert!(mib(64) <= yielded.pool && yielded.pool <= mib(1024));
                prop_assert_eq!(yielded.pool + yielded.withheld, mib(1024));
                prop_assert!(yielded.left <= shortage.missing);
                // VMs are asked only when outboxes have given what they can.
                let asked = yielded.left > Bytes::ZERO;
                prop_assert!(!asked || yielded.pool == mib(64));
            }
        }
    }
}
