//! Errors that callers tell apart, by `downcast_ref`.

/// What was asked for cannot be meant.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// There is no disk of that name.
#[derive(Debug, thiserror::Error)]
#[error("there is no disk {0}; `pagoda disk ls` shows those that there are")]
pub struct NoSuchDisk(pub String);
