//! When a step is over: after so many operations or so much time, or when the host has had enough of it.
//!
//! A test does not know how long its own steps take. So its guest works for longer than any of them, until the host says `enough`,
//! on the console or the control port. It then does a part of a pass more: what comes after the last step of the test is work on memory,
//! too, and not only the last look at it.

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::fs::OFlags;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

use crate::params::Limit;

/// What the host says.
pub const WORD: &str = "enough";

const CONSOLE: &str = "/dev/console";
/// Of a pass, one part of so many is done after the word.
const PART: u64 = 4;

static IS_SAID: AtomicBool = AtomicBool::new(false);

/// The host has said it, or has sent another command since.
pub fn set(is_said: bool) {
    IS_SAID.store(is_said, Ordering::Relaxed);
}

/// Listens on the console, for good.
///
/// # Errors
/// There is none, or it cannot be set to be silent about what it reads.
pub fn listen() -> Result<()> {
    let no_terminal = OFlags::NOCTTY.bits().cast_signed();
    let console = OpenOptions::new().read(true).custom_flags(no_terminal).open(CONSOLE);
    let console = console.with_context(|| format!("open {CONSOLE}"))?;
    let mut settings = tcgetattr(&console).context("ask how the console is set")?;
    // An echo would come in the middle of lines.
    settings.local_modes -= LocalModes::ECHO;
    tcsetattr(&console, OptionalActions::Now, &settings).context("have the console not echo")?;
    std::thread::spawn(move || {
        let lines = BufReader::new(console).lines().map_while(|line| line.ok());
        lines.filter(|line| line.trim() == WORD).for_each(|_| set(true));
    });
    Ok(())
}

/// Whether a thread's part of a step is over.
#[derive(Debug)]
pub struct End {
    limit: Limit,
    started: Instant,
    /// Operations of a pass.
    pass: u64,
    /// It ends after so many, since the host has had enough.
    last: Option<u64>,
}

impl End {
    pub const fn new(limit: Limit, started: Instant, pass: u64) -> End {
        End { limit, started, pass, last: None }
    }

    /// So many operations are done.
    pub fn is_reached(&mut self, done: u64) -> bool {
        match self.limit {
            Limit::Passes(passes) => done >= passes * self.pass,
            Limit::Time(time) if self.started.elapsed() >= time => true,
            Limit::Time(_) if IS_SAID.load(Ordering::Relaxed) => {
                done >= *self.last.get_or_insert(done + self.pass / PART)
            }
            Limit::Time(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_word_ends_what_has_a_time_a_part_of_a_pass_later() {
        let now = Instant::now();
        let mut passes = End::new(Limit::Passes(2), now, 100);
        let mut timed = End::new(Limit::Time(Duration::from_hours(1)), now, 100);
        assert!(!passes.is_reached(199) && passes.is_reached(200));
        assert!(!timed.is_reached(1_000_000));
        set(true);
        assert!(!passes.is_reached(199), "a number of operations is what the test wants");
        assert!(!timed.is_reached(1_000_000) && !timed.is_reached(1_000_024) && timed.is_reached(1_000_025));
        set(false);
        assert!(End::new(Limit::Time(Duration::ZERO), now, 100).is_reached(0));
    }
}
