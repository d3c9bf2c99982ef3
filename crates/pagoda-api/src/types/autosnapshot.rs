//! Snapshots by a timetable.

use serde::{Deserialize, Serialize};

/// The shortest period, in seconds. Names of such snapshots have the second in which they were taken.
pub const AUTOSNAPSHOT_EVERY_S_MIN: u64 = 1;
/// The longest period: a year.
pub const AUTOSNAPSHOT_EVERY_S_MAX: u64 = 366 * 86_400;
/// The most snapshots that are kept. A VM has 16, and the next one is taken before the oldest is removed.
pub const AUTOSNAPSHOT_KEEP_MAX: u32 = 15;
/// Names of such snapshots begin with this.
pub const AUTOSNAPSHOT_PREFIX: &str = "auto-";

/// A timetable says when snapshots of a VM are taken, and how many stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Autosnapshot {
    /// Seconds between two snapshots.
    pub every_s: u64,
    /// So many of them stay; the oldest is removed first.
    pub keep: u32,
    /// With what is on the VM's disks.
    pub disks: bool,
}

impl Autosnapshot {
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn check(&self) -> Result<(), String> {
        if !(AUTOSNAPSHOT_EVERY_S_MIN..=AUTOSNAPSHOT_EVERY_S_MAX).contains(&self.every_s) {
            return Err(format!(
                "snapshots are taken every {AUTOSNAPSHOT_EVERY_S_MIN} to {AUTOSNAPSHOT_EVERY_S_MAX} seconds, not {}",
                self.every_s
            ));
        }
        if !(1..=AUTOSNAPSHOT_KEEP_MAX).contains(&self.keep) {
            return Err(format!("1 to {AUTOSNAPSHOT_KEEP_MAX} snapshots are kept, not {}", self.keep));
        }
        Ok(())
    }
}

/// A change of a VM's timetable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AutosnapshotChange {
    Off,
    On(Autosnapshot),
}

impl AutosnapshotChange {
    /// The timetable from now on.
    #[must_use]
    pub fn timetable(self) -> Option<Autosnapshot> {
        match self {
            Self::Off => None,
            Self::On(timetable) => Some(timetable),
        }
    }
}

/// How a VM's timetable is kept; the timetable is in [`super::VmSpec`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutosnapshotInfo {
    /// The last one that this daemon took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<String>,
    /// Seconds until the next one; 0 if it is due and waits.
    pub next_in_s: u64,
    /// Why the last attempt failed. It is made again when the next one is due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Attempts that failed since this daemon started.
    #[serde(default)]
    pub failures: u64,
    /// Snapshots that were taken since then.
    #[serde(default)]
    pub taken: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timetables_that_are_refused() {
        let check = |every_s, keep, expected: &str| {
            let said = Autosnapshot { every_s, keep, disks: false }.check().err().unwrap_or_default();
            assert!(if expected.is_empty() { said.is_empty() } else { said.contains(expected) }, "{said}");
        };
        check(600, 6, "");
        check(1, 15, "");
        check(0, 6, "every 1 to");
        check(u64::MAX, 6, "every 1 to");
        check(600, 0, "1 to 15");
        check(600, 16, "1 to 15");
    }

    #[test]
    fn a_change_is_a_word_or_a_timetable() {
        let on = AutosnapshotChange::On(Autosnapshot { every_s: 60, keep: 3, disks: false });
        let text = serde_json::to_string(&on).unwrap();
        assert_eq!(text, r#"{"on":{"every_s":60,"keep":3,"disks":false}}"#);
        assert_eq!(serde_json::from_str::<AutosnapshotChange>(&text).unwrap(), on);
        assert_eq!(serde_json::to_string(&AutosnapshotChange::Off).unwrap(), "\"off\"");
    }
}
