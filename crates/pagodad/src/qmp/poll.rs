//! Waiting for descriptors, for so long and no longer.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec};

/// Waits until one of them is as it is to be, or the time is over.
///
/// # Errors
/// The kernel's; a signal is one of them.
pub fn poll(polled: &mut [PollFd<'_>], max: Duration) -> rustix::io::Result<usize> {
    let max = Timespec { tv_sec: max.as_secs().cast_signed(), tv_nsec: i64::from(max.subsec_nanos()) };
    rustix::event::poll(polled, Some(&max))
}

/// Waits until this descriptor is as it is to be.
///
/// # Errors
/// The deadline is over.
pub fn wait_until(fd: &impl AsFd, flags: PollFlags, deadline: Instant) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "it takes too long");
        match poll(&mut [PollFd::new(fd, flags)], left) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
