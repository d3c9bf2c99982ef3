//! How long a guest's writers wait, in steps.
//!
//! A thread that writes to a page for the first time since the last look waits in a fault anyway. When writers are slowed, the
//! answer comes later. So a VM with `n` processors writes no more than `n` pages in each delay, however fast it is. One that
//! writes to few pages is hardly slower.

use std::time::Duration;

/// What the first write to a page waits in each step, microseconds. 50 us are about what such a fault costs by itself; with the last a
/// processor writes 2.4 MiB/s, and a guest hardly goes on.
pub const SLOW_DELAYS_US: [u32; 7] = [0, 50, 100, 200, 400, 800, 1600];

/// A step of [`SLOW_DELAYS_US`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slowing(pub(super) u8);

impl Slowing {
    pub const NONE: Slowing = Slowing(0);
    pub const MOST: Slowing = Slowing(SLOW_DELAYS_US.len() as u8 - 1);

    /// What the first write to a page waits.
    pub const fn delay(self) -> Duration {
        Duration::from_micros(SLOW_DELAYS_US[self.0 as usize] as u64)
    }

    pub(super) fn more(self) -> Slowing {
        Slowing(self.0 + 1).min(Slowing::MOST)
    }

    pub(super) fn less(self) -> Slowing {
        Slowing(self.0.saturating_sub(1))
    }
}
