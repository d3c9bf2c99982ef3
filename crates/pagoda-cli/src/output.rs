//! Text for people and JSON for programs, on standard output.

use std::io::{self, Write};

use serde::Serialize;

/// The format in which a command prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Text,
    Json,
}

/// Who reads standard output has seen enough, as `head` does. That is no failure; a socket that is closed is one.
#[derive(Debug, thiserror::Error)]
#[error("standard output is closed")]
pub struct OutputClosed;

/// Writes all of `text`, and flushes it.
///
/// # Errors
/// Standard output cannot be written. If its reader has gone, the error contains [`OutputClosed`].
pub fn print_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, OutputClosed),
        _ => error,
    })
}

/// Several lines, for one value.
///
/// # Errors
/// As [`print_text`].
pub fn print_json(value: &impl Serialize) -> io::Result<()> {
    print_text(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// One line, for streams of objects.
///
/// # Errors
/// As [`print_text`].
pub fn print_json_line(value: &impl Serialize) -> io::Result<()> {
    print_text(&(serde_json::to_string(value)? + "\n"))
}
