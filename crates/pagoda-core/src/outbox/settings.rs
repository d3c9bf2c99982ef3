//! What an operator sets for one outbox, and what is refused before anything changes.

use std::time::Duration;

use crate::units::Bytes;

use super::slo::Slo;

/// The least min: the largest request of virtio-fs. A smaller space would never take a whole write.
pub const MIN_MIN: Bytes = Bytes::from_mib(1);
/// Windows are control periods. Shorter ones have no job, longer ones react to yesterday.
pub const WINDOW_MIN: Duration = Duration::from_secs(1);
/// A longer window would react to what was an hour ago.
pub const WINDOW_MAX: Duration = Duration::from_secs(3600);

/// The settings of one outbox whose size follows an SLO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpaceSettings {
    pub slo: Slo,
    pub min: Bytes,
    pub max: Bytes,
    /// Windows in which the SLO is kept or not; one control period each.
    pub window: Duration,
}

/// Why settings are refused. The messages are for the user who gave them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSpace {
    #[error("an outbox's min of {min} is above its max of {max}; lower the min or raise the max")]
    MinAboveMax { min: Bytes, max: Bytes },
    #[error("an outbox's min of {min} is below {MIN_MIN}, the size of one write; raise it")]
    MinTooSmall { min: Bytes },
    #[error(
        "an outbox of up to {max} is beyond the {pool} that the pool has for outboxes; lower its max or raise the pool"
    )]
    BeyondPool { max: Bytes, pool: Bytes },
    #[error(
        "the mins of all outboxes are {mins}, beyond the {pool} that the pool has for them; lower a min or raise the pool"
    )]
    MinsBeyondPool { mins: Bytes, pool: Bytes },
    #[error("a window of {} ms is out of range; give 1 s to 1 h", .window.as_millis())]
    Window { window: Duration },
}

impl SpaceSettings {
    /// Whether a pool that has `pool` for outboxes, of which other outboxes' mins are `other_mins`, can keep these.
    ///
    /// # Errors
    /// It cannot, or they contradict each other.
    pub fn check(&self, pool: Bytes, other_mins: Bytes) -> Result<(), InvalidSpace> {
        let SpaceSettings { min, max, window, .. } = *self;
        if min > max {
            return Err(InvalidSpace::MinAboveMax { min, max });
        }
        if min < MIN_MIN {
            return Err(InvalidSpace::MinTooSmall { min });
        }
        if max > pool {
            return Err(InvalidSpace::BeyondPool { max, pool });
        }
        match min.checked_add(other_mins) {
            Some(mins) if mins > pool => return Err(InvalidSpace::MinsBeyondPool { mins, pool }),
            None => return Err(InvalidSpace::MinsBeyondPool { mins: Bytes(u64::MAX), pool }),
            Some(_) => {}
        }
        if window < WINDOW_MIN || window > WINDOW_MAX {
            return Err(InvalidSpace::Window { window });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_kept_is_refused_by_name() {
        let mib = Bytes::from_mib;
        let good = SpaceSettings {
            slo: "p90 4.6s".parse().unwrap(),
            min: mib(4),
            max: mib(256),
            window: Duration::from_secs(60),
        };
        let check = |settings: SpaceSettings, pool, others, expected: &str| match settings.check(pool, others) {
            Ok(()) => assert_eq!(expected, ""),
            Err(error) => assert!(!expected.is_empty() && error.to_string().contains(expected), "{error}"),
        };
        check(good, mib(256), mib(252), "");
        check(SpaceSettings { min: mib(300), ..good }, mib(1000), mib(0), "300 MiB is above its max of 256 MiB");
        check(SpaceSettings { min: Bytes(4096), ..good }, mib(1000), mib(0), "below 1 MiB");
        check(good, mib(255), mib(0), "beyond the 255 MiB");
        check(good, mib(256), mib(253), "mins of all outboxes are 257 MiB");
        check(good, mib(256), Bytes(u64::MAX), "mins of all outboxes");
        check(SpaceSettings { window: Duration::ZERO, ..good }, mib(256), mib(0), "window of 0 ms");
        check(SpaceSettings { window: Duration::from_secs(3601), ..good }, mib(256), mib(0), "out of range");
    }
}
