//! What QEMU tells on its monitor without being asked.

use std::fmt;
use std::time::Instant;

use serde_json::Value;

/// The events that somebody here needs, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Events {
    /// Times the guest was reset.
    pub resets: u64,
    /// Times the guest's balloon changed its size.
    pub balloon_changes: u64,
    /// When the guest was last shut down.
    pub shutdown: Option<Instant>,
    /// Times the guest was stopped.
    pub stops: u64,
    /// When the guest was stopped last. `None`: it never was, or no time was said.
    pub last_stop: Option<QemuTime>,
    /// Times the guest was let run again.
    pub resumes: u64,
    /// When the guest was let run again last. `None`: never, or no time was said.
    pub last_resume: Option<QemuTime>,
    /// Times a migration came to another status. QEMU says it only while its capability `events` is on.
    pub migration_changes: u64,
    /// The status that the last of these named.
    pub migration: Option<MigrationStatus>,
}

/// QEMU's own time of an event: microseconds since 1970, by the clock of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuTime(pub u64);

impl QemuTime {
    /// Microseconds since `earlier`; 0 if the clock was set back.
    pub fn us_since(self, earlier: QemuTime) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// An event's `timestamp`. QEMU that cannot tell the time says -1.
    fn of(event: &Value) -> Option<QemuTime> {
        let part = |name| event.get("timestamp")?.get(name)?.as_u64();
        let seconds: u64 = part("seconds")?;
        Some(QemuTime(seconds.checked_mul(1_000_000)?.checked_add(part("microseconds")?)?))
    }
}

/// How far a migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigrationStatus {
    /// No migration has begun.
    None,
    Completed,
    Failed,
    Cancelled,
    /// It is under way, in whatever way.
    UnderWay,
}

impl fmt::Display for MigrationStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MigrationStatus::None => "has not begun",
            MigrationStatus::Completed => "is completed",
            MigrationStatus::Failed => "failed",
            MigrationStatus::Cancelled => "was cancelled",
            MigrationStatus::UnderWay => "is under way",
        })
    }
}

impl MigrationStatus {
    /// QEMU's word for it.
    pub fn of(word: &str) -> MigrationStatus {
        match word {
            "none" => MigrationStatus::None,
            "completed" => MigrationStatus::Completed,
            "failed" => MigrationStatus::Failed,
            "cancelled" => MigrationStatus::Cancelled,
            _ => MigrationStatus::UnderWay,
        }
    }
}

impl Events {
    /// Takes in what QEMU says, if it is an event of interest.
    pub fn note(&mut self, line: &Value) {
        match line.get("event").and_then(Value::as_str) {
            Some("RESET") => {
                self.resets += 1;
                self.shutdown = None;
            }
            Some("SHUTDOWN") => self.shutdown = Some(Instant::now()),
            Some("BALLOON_CHANGE") => self.balloon_changes += 1,
            Some("STOP") => {
                self.stops += 1;
                self.last_stop = QemuTime::of(line);
            }
            Some("RESUME") => {
                self.resumes += 1;
                self.last_resume = QemuTime::of(line);
            }
            Some("MIGRATION") => {
                self.migration_changes += 1;
                let word = line.get("data").and_then(|data| data.get("status")).and_then(Value::as_str);
                self.migration = word.map(MigrationStatus::of);
            }
            _ => {}
        }
    }
}
