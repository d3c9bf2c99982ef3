//! What `pagoda run`, `vm restore` and `vm rollback` do when QEMU crashes.

use std::str::FromStr;

use clap::Args;

/// Restores of one run within [`crate::run::on_crash::CRASH_WINDOW`] of which nothing is said.
const RESTORES_DEFAULT: u32 = 3;
/// More would be a loop that nobody ends.
const RESTORES_MAX: u32 = 100;

// Plain comments on what is flattened: clap would take a doc comment for that of the command.

#[derive(Debug, Clone, Copy, PartialEq, Eq, Args)]
pub struct CrashOptions {
    /// If QEMU crashes or is killed, restore the VM from its newest snapshot, at most N times in 10 minutes [N: 3]
    ///
    /// This command then stays as QEMU's parent instead of becoming it. It passes SIGTERM, SIGINT and SIGHUP on and ends with QEMU's
    /// status, or with 128 and the signal's number if a signal ended QEMU and it is not restored. A VM that was ended by its
    /// guest or its user is never restored. For root and the daemon's own user.
    #[arg(long, value_name = "restore[=N]")]
    pub on_crash: Option<OnCrash>,
}

/// What to do about a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnCrash {
    /// Restores within the window.
    pub restores_max: u32,
}

impl FromStr for OnCrash {
    type Err = String;

    fn from_str(text: &str) -> Result<OnCrash, String> {
        let wrong = || format!("{text:?} is not restore, or restore=N with N from 1 to {RESTORES_MAX}");
        let restores_max = match text.split_once('=') {
            None if text == "restore" => RESTORES_DEFAULT,
            Some(("restore", number)) => number.parse().map_err(|_| wrong())?,
            _ => return Err(wrong()),
        };
        if !(1..=RESTORES_MAX).contains(&restores_max) {
            return Err(wrong());
        }
        Ok(OnCrash { restores_max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_often_is_said_or_not() {
        let check = |text: &str, expected: Option<u32>| {
            assert_eq!(text.parse::<OnCrash>().ok().map(|of| of.restores_max), expected, "{text}");
        };
        check("restore", Some(3));
        check("restore=1", Some(1));
        check("restore=100", Some(100));
        for wrong in ["", "restore=", "restore=0", "restore=101", "restore=-1", "restart", "reboot=2"] {
            check(wrong, None);
        }
    }
}
