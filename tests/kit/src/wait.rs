//! The one place that waits by looking again and again.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Between two looks: short against everything that tests wait for, long against the look itself.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The end of a hang, for whatever depends on a disk's or a CPU's speed. A test never measures time by it: machines
/// of a CI are slow, share their disks and stand still at times.
pub const HANG: Duration = Duration::from_secs(300);
/// The same for a whole life of a guest or a toy, of which there are several at once.
pub const LIFE: Duration = Duration::from_secs(900);

/// Looks until there is something; `what` names it in the message when there is not.
///
/// # Errors
/// `look` failed, or `max` is over.
pub fn until<T>(what: &str, max: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if start.elapsed() > max {
            bail!("not after {:.1} s: {what}", max.as_secs_f64());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
