//! What a push is at, for whoever asks why a file has not been delivered.

use std::time::Instant;

use tokio::sync::watch;

use crate::failure::Failure;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// An attempt is under way.
    #[default]
    Sending,
    /// The next attempt begins then.
    Pausing { until: Instant },
    /// What was left at the server is removed from there.
    Cleaning,
    /// It is over, one way or the other.
    Ended,
}

/// What one push is at.
#[derive(Debug, Clone, Default)]
pub struct Status {
    pub phase: Phase,
    /// Attempts so far, the present one included.
    pub attempts: u64,
    /// Where in the file the present attempt is.
    pub sent: u64,
    /// The server has everything below.
    pub acknowledged: u64,
    /// Why the latest attempt failed that did.
    pub last_failure: Option<Failure>,
}

impl Status {
    /// One line for a person.
    pub fn describe(&self, now: Instant) -> String {
        let Status { phase, attempts, sent, acknowledged, last_failure } = self;
        let doing = match phase {
            Phase::Sending => format!("attempt {attempts} is at byte {sent}"),
            Phase::Pausing { until } => {
                let seconds = until.saturating_duration_since(now).as_secs_f64().ceil();
                format!("attempt {} begins in {seconds} s", attempts + 1)
            }
            Phase::Cleaning => "what it left at the server is being removed".to_owned(),
            Phase::Ended => format!("ended after {attempts} attempts"),
        };
        let failure = last_failure.as_ref().map_or_else(String::new, |failure| format!("; last failure: {failure}"));
        format!("{doing}, the server has {acknowledged} bytes{failure}")
    }
}

/// Where a push notes what it is at.
pub type Progress = watch::Sender<Status>;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_line_says_it() {
        let now = Instant::now();
        let mut status = Status { attempts: 1, sent: 7, ..Status::default() };
        assert_eq!(status.describe(now), "attempt 1 is at byte 7, the server has 0 bytes");
        status.phase = Phase::Pausing { until: now + Duration::from_millis(1500) };
        status.last_failure = Some(Failure::UploadLost);
        let expected = "attempt 2 begins in 2 s, the server has 0 bytes; \
                        last failure: the server does not have the upload any more, which begins anew";
        assert_eq!(status.describe(now), expected);
    }
}
