//! Outboxes: what the host keeps for the files that guests write for others.

use serde::{Deserialize, Serialize};

use super::{OutboxAuto, OutboxProfile};

/// Where an outbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutboxState {
    /// Its VM is made, and its process has not come yet.
    Starting,
    /// Its process runs and answers.
    Serving,
    /// Its process runs and does not answer, or says what cannot be: nothing is known of it. It may serve all the same.
    Silent,
    /// Its VM has ended, and files wait to be fetched.
    Lingering,
    /// Its process has ended, and its VM runs. What was in it is gone, and the guest's file system fails.
    Ended,
    /// A newer daemon has said a state that is not known here.
    #[serde(other)]
    Unknown,
}

impl OutboxState {
    /// One word for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Silent => "silent",
            Self::Lingering => "lingering",
            Self::Ended => "ended",
            Self::Unknown => "unknown",
        }
    }
}

/// An outbox as the daemon knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutboxInfo {
    pub vm: String,
    pub state: OutboxState,
    /// What is wrong with it, if anything is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What it is to have.
    pub space_bytes: u64,
    /// What the pool keeps for it: more than its space while it still holds more. Nothing once its process has ended.
    pub charged_bytes: u64,
    #[serde(default)]
    pub pid: Option<u32>,
    /// What its process says; nothing while that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub figures: Option<OutboxFigures>,
    /// What its size follows; nothing if it is set by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<OutboxAuto>,
    /// What its guest's jobs do; nothing if its process is of an older version, and so says nothing of jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Box<OutboxProfile>>,
}

impl OutboxInfo {
    /// It holds more than its space: nothing new is written until enough was delivered.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.figures.is_some_and(|figures| figures.used_bytes > self.space_bytes)
    }
}

/// What the process of an outbox says. Counts begin with the process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutboxFigures {
    /// How old these figures are.
    pub age_ms: u64,
    /// The space that it keeps to.
    pub space_bytes: u64,
    pub used_bytes: u64,
    /// Of these, what was delivered and goes when there is need.
    pub delivered_bytes_kept: u64,
    /// What the guest can write without waiting.
    pub available_bytes: u64,
    /// The space has so many files and directories.
    pub files: u64,
    /// Clients that read now.
    pub readers: u64,
    /// Writes that wait for room now.
    pub waiting_writes: u64,
    pub written_bytes: u64,
    /// What clients' TCP has acknowledged.
    pub acknowledged_bytes: u64,
    /// Changes of bytes that were sent already.
    pub refused_changes: u64,
    /// How long writes have waited for room, summed over writes.
    pub blocked_ms: u64,
}

/// `GET /v1/outboxes`, by VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OutboxList {
    pub outboxes: Vec<OutboxInfo>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_the_wire() {
        let newer = r#"{"vm":"a","state":"dreaming","space_bytes":1,"charged_bytes":2,"newer":0}"#;
        let info: OutboxInfo = serde_json::from_str(newer).unwrap();
        assert_eq!((info.state, info.pid, info.figures), (OutboxState::Unknown, None, None));
        let figures = Some(OutboxFigures { used_bytes: 2, ..OutboxFigures::default() });
        assert!(OutboxInfo { figures, ..info.clone() }.is_draining() && !info.is_draining());
        assert_eq!(serde_json::to_string(&OutboxState::Lingering).unwrap(), "\"lingering\"");
    }
}
