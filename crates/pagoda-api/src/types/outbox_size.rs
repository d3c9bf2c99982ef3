//! What a guest does with its outbox, and how large that is to be.

use serde::{Deserialize, Serialize};

/// A space below this holds less than one write of the guest's kernel, which is at most 1 MiB.
pub const OUTBOX_SPACE_BYTES_MIN: u64 = 1 << 20;
/// More than any host has, and little enough that no sum overflows.
pub const OUTBOX_SPACE_BYTES_MAX: u64 = 1 << 46;

/// That an outbox can have this space.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_outbox_space(bytes: u64) -> Result<(), String> {
    match bytes {
        ..OUTBOX_SPACE_BYTES_MIN => Err("an outbox has at least 1M".into()),
        OUTBOX_SPACE_BYTES_MIN..=OUTBOX_SPACE_BYTES_MAX => Ok(()),
        _ => Err("an outbox has at most 64T".into()),
    }
}

/// What a size follows that the daemon chooses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutboxAuto {
    /// Such as `p90 4.6s`.
    pub slo: String,
    pub min_bytes: u64,
    /// Nothing: as much as there is for outboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    pub weight: u32,
}

/// `PATCH /v1/outboxes/NAME`. What is left out stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutboxPatch {
    /// The size is set by hand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub space_bytes: Option<u64>,
    /// The size follows an SLO from now on.
    #[serde(skip_serializing_if = "is_false")]
    pub auto: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_false(value: &bool) -> bool {
    !value
}

impl OutboxPatch {
    /// Another size, by hand.
    #[must_use]
    pub fn space(bytes: u64) -> OutboxPatch {
        OutboxPatch { space_bytes: Some(bytes), ..OutboxPatch::default() }
    }

    /// Checks what needs no knowledge of the outbox.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn check(&self) -> Result<(), String> {
        let of_auto =
            self.slo.is_some() || self.min_bytes.is_some() || self.max_bytes.is_some() || self.weight.is_some();
        match (self.space_bytes, self.auto) {
            (None, false) if !of_auto => {
                Err("nothing is to be changed; give --space, --slo, --min, --max or --weight".into())
            }
            (Some(_), true) => Err("a size set by hand and one that follows an SLO exclude each other".into()),
            (Some(_), false) if of_auto => {
                Err("an SLO, a min, a max and a weight belong to a size that follows an SLO: give --space auto".into())
            }
            (Some(bytes), false) => check_outbox_space(bytes),
            (None, _) => {
                self.min_bytes.map_or(Ok(()), check_outbox_space)?;
                self.max_bytes.map_or(Ok(()), check_outbox_space)
            }
        }
    }
}

/// What jobs of a guest did, of the control periods that are kept: as long as they are of one behaviour, at most 30.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutboxProfile {
    pub period_s: f64,
    pub periods: u64,
    /// Jobs that ended in them.
    pub jobs: u64,
    pub arrivals_per_s: f64,
    pub compute_mean_s: Option<f64>,
    pub output_mean_bytes: Option<u64>,
    /// From a job's start to its end.
    pub response_mean_s: Option<f64>,
    pub response_p90_s: Option<f64>,
    /// Of the last period: the part of the time in which a writer waited for room.
    pub blocked_share: f64,
    /// Of the last period: what clients acknowledged.
    pub goodput_bytes_per_s: u64,
    /// How fast the space drains while there is something to send.
    pub drain_bytes_per_s: Option<u64>,
    /// What one client got while there was something for it, since the process began.
    pub reader_goodput_bytes_per_s: Option<u64>,
    /// Of windows with jobs, those within the SLO, and all.
    pub windows_kept: u64,
    pub windows: u64,
    /// `learning`, `feasible`, `marginal`, `infeasible`; nothing if the size is set by hand.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// What the SLO needs, by the last decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted_bytes: Option<u64>,
    /// Since the process began: jobs that began, ended, and never ended.
    pub jobs_begun: u64,
    pub jobs_ended: u64,
    pub jobs_given_up: u64,
    /// Jobs that the daemon was not told of in time, or whose times cannot be.
    pub jobs_lost: u64,
    pub refused_writes: u64,
    pub sending_ms: u64,
    /// Time in which at least one writer waited.
    pub blocked_ms: u64,
    pub reading_ms: u64,
    /// The last ones, newest first.
    pub recent: Vec<OutboxJob>,
}

/// A job that has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OutboxJob {
    pub number: u64,
    /// Milliseconds from its start to its end.
    pub took_ms: u64,
    pub blocked_ms: u64,
    pub output_bytes: u64,
    pub backlog_bytes: u64,
    pub on_close: bool,
    pub priority: u32,
    /// As the guest says, without what cannot be printed.
    pub id: String,
    pub destination: String,
}

/// `GET /v1/outboxes/NAME/explain` says why an outbox has the size that it has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutboxExplanation {
    pub vm: String,
    pub terms: Vec<OutboxTerm>,
}

/// The explanation has one such row for each term.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutboxTerm {
    pub term: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        let check = |bytes: u64, part: &str| {
            let said = check_outbox_space(bytes).err().unwrap_or_default();
            assert!(if part.is_empty() { said.is_empty() } else { said.contains(part) }, "{bytes}: {said}");
        };
        check(0, "at least 1M");
        check(OUTBOX_SPACE_BYTES_MIN - 1, "at least 1M");
        check(OUTBOX_SPACE_BYTES_MIN, "");
        check(OUTBOX_SPACE_BYTES_MAX, "");
        check(OUTBOX_SPACE_BYTES_MAX + 1, "at most 64T");
        check(u64::MAX, "at most 64T");
    }

    #[test]
    fn patches_that_contradict_themselves_are_refused() {
        let check = |text: &str, part: &str| {
            let patch: OutboxPatch = serde_json::from_str(text).unwrap();
            let said = patch.check().err().unwrap_or_default();
            assert!(if part.is_empty() { said.is_empty() } else { said.contains(part) }, "{text}: {said}");
            assert_eq!(serde_json::from_str::<OutboxPatch>(&serde_json::to_string(&patch).unwrap()).unwrap(), patch);
        };
        check(r#"{"space_bytes":1048576}"#, "");
        check(r#"{"auto":true,"slo":"p90 1s"}"#, "");
        check(r#"{"weight":3}"#, "");
        check("{}", "nothing is to be changed");
        check(r#"{"space_bytes":1}"#, "at least 1M");
        check(r#"{"min_bytes":1}"#, "at least 1M");
        check(r#"{"max_bytes":18446744073709551615}"#, "at most 64T");
        check(r#"{"space_bytes":1048576,"auto":true}"#, "exclude each other");
        check(r#"{"space_bytes":1048576,"slo":"p90 1s"}"#, "give --space auto");
        assert!(serde_json::from_str::<OutboxPatch>(r#"{"space_bytes":1,"newer":2}"#).is_err());
    }
}
