//! VMs whose program has ended without being told to, and what they can be restored from.

use serde::{Deserialize, Serialize};

/// How a VM's program has ended, as far as the daemon knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Crash {
    /// It did not end by itself: it was killed, or it crashed.
    Killed,
    /// It ended by itself, as one does that cannot go on.
    Exited { status: i32 },
    /// It was being restored or put back to a snapshot.
    CutOff,
    /// It ended while no daemon ran.
    Unseen,
    /// What a newer daemon knows.
    #[serde(other)]
    Unknown,
}

impl Crash {
    /// A sentence for the VM's user.
    #[must_use]
    pub fn words(self) -> String {
        match self {
            Self::Killed => "its QEMU was killed, or it crashed".to_owned(),
            Self::Exited { status } => format!("its QEMU ended with status {status}"),
            Self::CutOff => "it ended while it was being restored".to_owned(),
            Self::Unseen => "its QEMU ended while no daemon ran, and nobody knows how".to_owned(),
            Self::Unknown => "its QEMU has ended".to_owned(),
        }
    }
}

/// `GET /v1/crashed/NAME`, and one element of [`super::VmList::crashed`]: a VM that is not there any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrashedVm {
    pub name: String,
    pub memory_bytes: u64,
    /// The process that it was.
    pub pid: u32,
    /// When the daemon saw that it had ended, in milliseconds since 1970.
    pub seen_unix_ms: u64,
    pub crash: Crash,
    /// The newest snapshot that it can be restored from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Candidate>,
}

/// A snapshot that a VM may be restored from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    pub name: String,
    pub taken_unix_ms: u64,
    /// The text says why the VM cannot be restored from it, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Why it can be by force alone: what of its disks has changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<String>,
}

/// `GET /v1/restorable/NAME`: a VM's snapshots from the newest on, up to the first that can be restored without force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restorable {
    pub candidates: Vec<Candidate>,
}

impl Restorable {
    /// The newest that can be restored, and those that are passed over for it with the reason.
    #[must_use]
    pub fn newest(&self, force: bool) -> (Option<&Candidate>, Vec<(&str, &str)>) {
        let cannot = |of: &Candidate| of.refused.is_some() || (of.changed.is_some() && !force);
        let passed = self.candidates.iter().take_while(|of| cannot(of));
        let passed = passed.map(|of| {
            let why = of.refused.as_deref().or(of.changed.as_deref()).unwrap_or_default();
            (of.name.as_str(), why)
        });
        (self.candidates.iter().find(|of| !cannot(of)), passed.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_that_can_be_restored() {
        let of = |name: &str, refused: Option<&str>, changed: Option<&str>| Candidate {
            name: name.into(),
            taken_unix_ms: 0,
            refused: refused.map(Into::into),
            changed: changed.map(Into::into),
        };
        let all = Restorable {
            candidates: vec![of("c", Some("lost"), None), of("b", None, Some("disk0")), of("a", None, None)],
        };
        let check = |all: &Restorable, force: bool, name: Option<&str>, passed: &[(&str, &str)]| {
            let (newest, passed_over) = all.newest(force);
            assert_eq!((newest.map(|of| of.name.as_str()), passed_over.as_slice()), (name, passed));
        };
        check(&all, false, Some("a"), &[("c", "lost"), ("b", "disk0")]);
        check(&all, true, Some("b"), &[("c", "lost")]);
        let none = Restorable { candidates: all.candidates[..1].to_vec() };
        check(&none, true, None, &[("c", "lost")]);
        check(&Restorable::default(), false, None, &[]);
    }

    #[test]
    fn a_crash_of_a_newer_daemon_is_one() {
        let crash: Crash = serde_json::from_str(r#"{"kind":"melted"}"#).unwrap();
        assert_eq!(crash, Crash::Unknown);
        let text = serde_json::to_string(&Crash::Exited { status: 3 }).unwrap();
        assert_eq!(text, r#"{"kind":"exited","status":3}"#);
    }
}
