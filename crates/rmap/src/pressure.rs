//! How short of memory a server's host is, from what the kernel says: pure, so that it can be tested; `rmap-io` reads it.
//!
//! | level | free memory below | stalled for memory above | what the server does |
//! |---|---|---|---|
//! | yellow | 10 % | 5 % of the time | gives no new slabs away, but those that it promised |
//! | orange | 5 % | 20 % | wants its slabs moved elsewhere; memory of free slabs goes back to the host |
//! | red | 2 % | - | copies that have another one in sync are dropped by their owners; a sole copy never is |
//!
//! Stalls alone never make it red: a cgroup at its own limit stalls while the host has room.

use std::time::Duration;

use crate::units::Time;
use crate::wire::message::Pressure;

/// Per thousand of the host's memory that is available, below which each level begins.
const FREE_BELOW: [(u64, Pressure); 3] = [(20, Pressure::Red), (50, Pressure::Orange), (100, Pressure::Yellow)];
/// Hundredths of a percent of the last ten seconds in which something waited for memory.
const STALLED_ABOVE: [(u32, Pressure); 2] = [(2000, Pressure::Orange), (500, Pressure::Yellow)];
/// A level is left when its limit is passed by a quarter,
const EASE_QUARTERS: u64 = 5;
/// and stays so for as long as the kernel averages over: one step at a time, so that slabs are not moved to and fro.
const EASE_AFTER: Duration = Duration::from_secs(10);

/// What the kernel says at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Bytes that can be had without swapping, and bytes in all.
    pub available: u64,
    pub total: u64,
    /// `some avg10` of `/proc/pressure/memory`, in hundredths of a percent; 0 where the kernel does not say.
    pub stalled: u32,
}

impl Sample {
    /// Of the texts of `/proc/meminfo` and `/proc/pressure/memory`. `None` if the first is not one.
    pub fn parse(meminfo: &str, pressure: &str) -> Option<Sample> {
        let kib = |name: &str| {
            let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
            value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let (available, total) = (kib("MemAvailable:")?, kib("MemTotal:")?);
        let some = pressure.lines().find_map(|line| line.strip_prefix("some "));
        let average = some.and_then(|some| some.split(' ').find_map(|field| field.strip_prefix("avg10=")));
        Some(Sample { available, total, stalled: average.and_then(hundredths).unwrap_or(0) })
    }

    fn level(&self, ease_quarters: u64) -> Pressure {
        let per_mille = u128::from(self.available) * 1000 / u128::from(self.total.max(1));
        let below = |limit: u64| per_mille < u128::from(limit * ease_quarters / 4);
        let above = |limit: u32| u64::from(self.stalled) > u64::from(limit) * 4 / ease_quarters;
        let by_free = FREE_BELOW.iter().find(|(limit, _)| below(*limit)).map(|(_, level)| *level);
        let by_stall = STALLED_ABOVE.iter().find(|(limit, _)| above(*limit)).map(|(_, level)| *level);
        by_free.max(by_stall).unwrap_or(Pressure::None)
    }
}

/// A number with two digits after the point in hundredths: `1.23` is 123.
fn hundredths(text: &str) -> Option<u32> {
    let (whole, part) = text.split_once('.')?;
    let part = (part.len() == 2).then(|| part.parse::<u32>().ok()).flatten()?;
    whole.parse::<u32>().ok()?.checked_mul(100)?.checked_add(part)
}

/// The level over time: up at once, down slowly.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauge {
    level: Pressure,
    /// Since when it could be lower.
    eased: Option<Time>,
}

impl Gauge {
    pub fn level(&self) -> Pressure {
        self.level
    }

    pub fn apply(&mut self, now: Time, sample: &Sample) -> Pressure {
        let now_level = sample.level(4);
        if now_level > self.level {
            (self.level, self.eased) = (now_level, None);
        } else if sample.level(EASE_QUARTERS) < self.level {
            if now.since(*self.eased.get_or_insert(now)) >= EASE_AFTER {
                (self.level, self.eased) = (lower(self.level), Some(now));
            }
        } else {
            self.eased = None;
        }
        self.level
    }
}

fn lower(level: Pressure) -> Pressure {
    match level {
        Pressure::Red => Pressure::Orange,
        Pressure::Orange => Pressure::Yellow,
        Pressure::Yellow | Pressure::None => Pressure::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(available: u64, stalled: u32) -> Sample {
        Sample { available, total: 1000, stalled }
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        let meminfo = "MemTotal:       24609880 kB\nMemFree:         100 kB\nMemAvailable:    1024 kB\n";
        let psi = "some avg10=1.23 avg60=0.00 avg300=0.00 total=0\nfull avg10=9.00 avg60=0.00 avg300=0.00 total=0\n";
        let read = Sample { available: 1 << 20, total: 24_609_880 << 10, stalled: 123 };
        assert_eq!(Sample::parse(meminfo, psi), Some(read));
        assert_eq!(Sample::parse(meminfo, ""), Some(Sample { stalled: 0, ..read }));
        for bad in ["", "MemTotal: 1 kB", "MemTotal: x kB\nMemAvailable: 1 kB", "MemTotal: 1 kB\nMemAvailable: 1"] {
            assert_eq!(Sample::parse(bad, psi), None, "{bad}");
        }
        assert_eq!(["1.2", "1", "-1.00", "1.234", "99999999.00"].map(hundredths), [None; 5]);
    }

    #[test]
    fn levels_begin_where_they_are_said_to() {
        for (available, stalled, level) in [
            (100, 500, Pressure::None),
            (99, 0, Pressure::Yellow),
            (900, 501, Pressure::Yellow),
            (49, 0, Pressure::Orange),
            (900, 2001, Pressure::Orange),
            (900, 10_000, Pressure::Orange),
            (19, 0, Pressure::Red),
            (0, 0, Pressure::Red),
        ] {
            assert_eq!(Gauge::default().apply(Time(0), &sample(available, stalled)), level, "{available} {stalled}");
        }
    }

    #[test]
    fn it_rises_at_once_and_falls_step_by_step() {
        let mut gauge = Gauge::default();
        let mut at = |seconds: u64, available| gauge.apply(Time(seconds * 1_000_000_000), &sample(available, 0));
        assert_eq!(at(0, 10), Pressure::Red);
        // Not far enough above the limit to be over.
        assert_eq!([at(10, 21), at(100, 24)], [Pressure::Red; 2]);
        assert_eq!([at(101, 900), at(110, 900), at(111, 900)], [Pressure::Red, Pressure::Red, Pressure::Orange]);
        assert_eq!([at(120, 900), at(121, 900), at(131, 900)], [Pressure::Orange, Pressure::Yellow, Pressure::None]);
        assert_eq!([at(132, 60), at(135, 200), at(140, 60), at(146, 200)], [Pressure::Yellow; 4]);
    }
}
