//! How much of the pool the host can do without: all of it, unless the host itself runs short.

use std::fs;
use std::io;

use pagoda_core::units::{Bytes, PageCount};

/// The host is short when less than this part of its memory is available, unless another minimum is set ...
const SHORT_PART: u64 = 32;
/// ... or when so many times that is available ...
const PRESSED_TIMES: u64 = 4;
/// ... and all tasks stood still for memory that much of the last 10 s (PSI, thousandths): above it a host thrashes.
const PRESSED_PER_MILLE: u32 = 100;
/// While it is short, the pool is what leaves this part of the host's memory more than the minimum available.
const LEFT_PART: u64 = 32;
/// It is no longer short when it was not for so long.
const RELEASE_MS: u64 = 30_000;

/// The host's memory at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    pub total: Bytes,
    /// Free or easily freed.
    pub available: Bytes,
    /// Time in which all tasks waited for memory, of the last 10 s, in thousandths; `None`: this kernel does not say.
    pub stalled: Option<u32>,
}

impl Memory {
    /// As of now.
    ///
    /// # Errors
    /// /proc/meminfo cannot be read or does not say: that is not to be taken for a host without memory.
    pub fn read() -> io::Result<Memory> {
        let meminfo = fs::read_to_string("/proc/meminfo")?;
        let pressure = fs::read_to_string("/proc/pressure/memory").ok();
        Memory::parse(&meminfo, pressure.as_deref()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo does not say how much memory there is")
        })
    }

    fn parse(meminfo: &str, pressure: Option<&str>) -> Option<Memory> {
        let kib = |key: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(Bytes::from_kib)
        };
        Some(Memory {
            total: kib("MemTotal:")?,
            available: kib("MemAvailable:")?,
            stalled: pressure.and_then(stalled_per_mille),
        })
    }
}

/// The line `full avg10=1.25 avg60=...` in thousandths (Documentation/accounting/psi.rst: per cent).
fn stalled_per_mille(text: &str) -> Option<u32> {
    let full = text.lines().find_map(|line| line.strip_prefix("full avg10="))?;
    let percent: f32 = full.split(' ').next()?.parse().ok()?;
    Some((percent.clamp(0.0, 100.0) * 10.0) as u32)
}

/// The pool now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    pub now: PageCount,
    /// Why it is less than what was set, if so.
    pub reason: Option<String>,
    /// What VMs may take before the host runs short.
    pub room: PageCount,
}

/// Remembers that the host was short a moment ago.
#[derive(Clone, Debug, Default)]
pub struct Host {
    short_ms: Option<u64>,
    reason: String,
}

impl Host {
    /// The pool at `now_ms`, of which `set` was set and `used` is used. `min`: available memory below which the host is
    /// short, if that was set.
    pub fn look(&mut self, now_ms: u64, set: PageCount, used: PageCount, memory: &Memory, min: Option<Bytes>) -> Pool {
        let Memory { total, available, stalled } = *memory;
        let min = min.unwrap_or(Bytes(total.0 / SHORT_PART));
        if available < min {
            self.short_ms = Some(now_ms);
            self.reason = format!("the host has only {available} of {total} available");
        } else if available.0 < min.0.saturating_mul(PRESSED_TIMES)
            && let Some(stalled) = stalled.filter(|stalled| *stalled >= PRESSED_PER_MILLE)
        {
            self.short_ms = Some(now_ms);
            self.reason = format!("the host stood still for memory {} % of the last 10 s", stalled / 10);
        }
        let room = available.saturating_sub(min).pages_floor();
        let is_short = self.short_ms.is_some_and(|short| now_ms.saturating_sub(short) < RELEASE_MS);
        let left = Bytes(min.0.saturating_add(total.0 / LEFT_PART));
        let backed = (used + available.pages_floor()).saturating_sub(left.pages_ceil());
        if is_short && backed < set {
            return Pool { now: backed, reason: Some(self.reason.clone()), room };
        }
        if !is_short {
            self.short_ms = None;
        }
        Pool { now: set, reason: None, room }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 18;

    fn memory(available_mib: u64, stalled: Option<u32>) -> Memory {
        Memory { total: Bytes::from_gib(32), available: Bytes::from_mib(available_mib), stalled }
    }

    #[test]
    fn both_files_are_read() {
        let meminfo = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    500 kB\n";
        let pressure = "some avg10=9.00 avg60=0.00\nfull avg10=1.25 avg60=0.10 avg300=0.00 total=7\n";
        let read = Memory::parse(meminfo, Some(pressure)).unwrap();
        assert_eq!(read, Memory { total: Bytes::from_kib(1000), available: Bytes::from_kib(500), stalled: Some(12) });
        assert_eq!(Memory::parse(meminfo, Some("full avg10=x")).unwrap().stalled, None);
        for unknown in ["", "MemTotal: 7 kB\n", "MemTotal: 7 kB\nMemAvailable: many\n"] {
            assert_eq!(Memory::parse(unknown, None), None, "{unknown:?} is not a host without memory");
        }
        assert!(Memory::read().unwrap().total > Bytes::ZERO);
    }

    #[test]
    fn the_pool_is_what_was_set_until_the_host_runs_short() {
        let (set, used) = (PageCount(28 * GIB), PageCount(20 * GIB));
        let mut host = Host::default();
        let mut look = |at_s: u64, memory: Memory| {
            let pool = host.look(at_s * 1000, set, used, &memory, None);
            (pool.now.0 / GIB, pool.reason.is_some())
        };
        assert_eq!(look(0, memory(8192, Some(0))), (28, false));
        assert_eq!(look(1, memory(1024, Some(0))), (28, false));
        assert_eq!(look(2, memory(1023, None)), (18, true), "20 GiB in use, 1 available, 2 are to be left");
        assert_eq!(look(3, memory(6 << 10, None)), (24, true), "for half a minute");
        assert_eq!(look(32, memory(6 << 10, None)), (28, false));
        assert_eq!(look(33, memory(3 << 10, Some(99))), (28, false));
        assert_eq!(look(34, memory(3 << 10, Some(100))), (21, true));
        assert_eq!(look(35, memory(12 << 10, Some(100))), (28, false), "it has more than enough again");
    }

    #[test]
    fn what_is_to_be_left_can_be_set() {
        let (set, used, min) = (PageCount(28 * GIB), PageCount(20 * GIB), Some(Bytes::from_gib(3)));
        let mut host = Host::default();
        let pool = host.look(0, set, used, &memory(4 << 10, None), min);
        assert_eq!((pool.now, pool.room), (set, PageCount(GIB)));
        assert_eq!(host.look(1, set, used, &memory(2 << 10, None), min).now, PageCount((20 + 2 - 3 - 1) * GIB));
        // More than the host has: nothing is left for VMs but what they were promised.
        assert_eq!(host.look(2, set, used, &memory(2 << 10, None), Some(Bytes(u64::MAX))).now, PageCount::ZERO);
    }

    #[test]
    fn room_is_what_the_host_has() {
        let pool = Host::default().look(0, PageCount(28 * GIB), PageCount::ZERO, &memory(3 << 10, None), None);
        assert_eq!(pool.room, PageCount(2 * GIB));
    }
}
