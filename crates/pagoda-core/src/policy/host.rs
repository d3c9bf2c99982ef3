//! How much of the pool the host can do without: all of it, unless the host itself runs short of memory.

use crate::units::{Bytes, PageCount};

/// The host is short when less than this part of its memory is available, unless another minimum is set ...
const SHORT_PART: u64 = 32;
/// ... or when less than this multiple of that is available ...
const PRESSED_TIMES: u64 = 4;
/// ... and all tasks waited for memory for this part of the last 10 s (PSI, thousandths): above it a host thrashes.
const PRESSED_PER_MILLE: u32 = 100;
/// While the host is short, the pool shrinks until this part of the host's memory is available beyond the minimum.
const LEFT_PART: u64 = 32;
/// The host counts as short for this long after it was.
const RELEASE_MS: u64 = 30_000;

/// The host's memory at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// The host has so much memory in all.
    pub total: Bytes,
    /// Free or easily freed (`MemAvailable`).
    pub available: Bytes,
    /// The part of the last 10 s in which all tasks waited for memory, in thousandths. `None` if the kernel does not report it.
    pub stalled: Option<u32>,
}

/// The pool at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// The pool has this size now, at most what was set.
    pub now: PageCount,
    /// Why that is less than what was set, if it is.
    pub reason: Option<String>,
    /// What VMs may take before the host runs short.
    pub room: PageCount,
}

/// Remembers whether the host was short of memory.
#[derive(Clone, Debug, Default)]
pub struct HostPressure {
    short_ms: Option<u64>,
    reason: String,
}

impl HostPressure {
    /// The pool at `now_ms`. `set` is its size as it was set, and `used` is what VMs use of it. Below `available_min` the host
    /// is short; `None` stands for the default.
    pub fn pool_at(
        &mut self,
        now_ms: u64,
        set: PageCount,
        used: PageCount,
        memory: &HostMemory,
        available_min: Option<Bytes>,
    ) -> Pool {
        let HostMemory { total, available, stalled } = *memory;
        let min = available_min.unwrap_or(Bytes(total.0 / SHORT_PART));
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

    fn memory(available_mib: u64, stalled: Option<u32>) -> HostMemory {
        HostMemory { total: Bytes::from_gib(32), available: Bytes::from_mib(available_mib), stalled }
    }

    #[test]
    fn the_pool_is_what_was_set_until_the_host_runs_short() {
        let (set, used) = (PageCount(28 * GIB), PageCount(20 * GIB));
        let mut pressure = HostPressure::default();
        let mut pool = |at_s: u64, memory: HostMemory| {
            let pool = pressure.pool_at(at_s * 1000, set, used, &memory, None);
            (pool.now.0 / GIB, pool.reason.is_some())
        };
        assert_eq!(pool(0, memory(8192, Some(0))), (28, false));
        assert_eq!(pool(1, memory(1024, Some(0))), (28, false));
        assert_eq!(pool(2, memory(1023, None)), (18, true), "20 GiB in use, 1 available, 2 are to be left");
        assert_eq!(pool(3, memory(6 << 10, None)), (24, true), "for half a minute");
        assert_eq!(pool(32, memory(6 << 10, None)), (28, false));
        assert_eq!(pool(33, memory(3 << 10, Some(99))), (28, false));
        assert_eq!(pool(34, memory(3 << 10, Some(100))), (21, true));
        assert_eq!(pool(35, memory(12 << 10, Some(100))), (28, false), "it has more than enough again");
    }

    #[test]
    fn what_is_to_be_left_can_be_set() {
        let (set, used, min) = (PageCount(28 * GIB), PageCount(20 * GIB), Some(Bytes::from_gib(3)));
        let mut pressure = HostPressure::default();
        let pool = pressure.pool_at(0, set, used, &memory(4 << 10, None), min);
        assert_eq!((pool.now, pool.room), (set, PageCount(GIB)));
        assert_eq!(pressure.pool_at(1, set, used, &memory(2 << 10, None), min).now, PageCount((20 + 2 - 3 - 1) * GIB));
        // More than the host has: nothing is left for VMs but what they were promised.
        assert_eq!(pressure.pool_at(2, set, used, &memory(2 << 10, None), Some(Bytes(u64::MAX))).now, PageCount::ZERO);
    }

    #[test]
    fn room_is_what_the_host_has() {
        let set = PageCount(28 * GIB);
        let pool = HostPressure::default().pool_at(0, set, PageCount::ZERO, &memory(3 << 10, None), None);
        assert_eq!(pool.room, PageCount(2 * GIB));
    }
}
