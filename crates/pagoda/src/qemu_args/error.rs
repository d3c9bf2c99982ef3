//! What is refused of a command line.

/// What is wrong with the command line, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}: {advice}")]
pub struct ArgError {
    pub problem: String,
    pub advice: String,
}

impl ArgError {
    pub(super) fn new(problem: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { problem: problem.into(), advice: advice.into() }
    }
}
