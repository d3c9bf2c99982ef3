//! Why an attempt failed, and why a file is not pushed any more.

use std::time::Duration;

use crate::name::NameError;
use crate::target::TargetError;

/// What a server says is repeated up to so many characters.
const WORDS_CHARS_MAX: usize = 200;

/// Why an attempt failed. Another one follows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("cannot connect to {address}: {what}")]
    Connect { address: String, what: String },
    #[error("no TLS with {address}: {what}")]
    Tls { address: String, what: String },
    #[error("a request cannot name this address")]
    BadAddress,
    #[error("the connection broke: {what}")]
    Lost { what: String },
    #[error("nothing moved for {} s", .limit.as_secs())]
    Stalled { limit: Duration },
    #[error("the server said {status}{}{}", if .words.is_empty() { "" } else { ": " }, .words)]
    Refused { status: u16, words: String, retry_after: Option<Duration> },
    #[error("the server said {status} before it had the whole file")]
    Early { status: u16 },
    #[error("the server's reply makes no sense: {what}")]
    BadReply { what: String },
    #[error("the server does not have the upload any more, which begins anew")]
    UploadLost,
    #[error("the receiver did not take the whole file: {what}")]
    NotTaken { what: String },
}

impl Failure {
    /// What the server asks to wait at least.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Failure::Refused { retry_after, .. } => *retry_after,
            _ => None,
        }
    }
}

/// Why a file is not pushed any more. It was not delivered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    #[error("the file's writer disappeared before the file had ended")]
    Broken,
    #[error("the push has to begin at the start again, but the file's bytes below {oldest} were given back")]
    GivenBack { oldest: u64 },
    #[error("the file has more than {parts_max} parts of {part_bytes} bytes")]
    TooLarge { parts_max: u64, part_bytes: u64 },
    #[error("{0}")]
    Name(NameError),
    #[error("{0}")]
    Address(TargetError),
    #[error("S3 needs keys: give a file of mode 0600 with aws_access_key_id and aws_secret_access_key")]
    NoKeys,
    #[error("the file was removed")]
    Removed,
    #[error("the file has reached its age")]
    Expired,
    #[error("the transmitter ends")]
    Ending,
}

/// How an attempt ends if it does not deliver.
#[derive(Debug, PartialEq, Eq)]
pub enum Trouble {
    Again(Failure),
    Never(Cause),
}

impl From<Failure> for Trouble {
    fn from(failure: Failure) -> Trouble {
        Trouble::Again(failure)
    }
}

impl From<Cause> for Trouble {
    fn from(cause: Cause) -> Trouble {
        Trouble::Never(cause)
    }
}

/// What a server said, for a person: without control characters, and not at any length.
pub fn words(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    plain.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(WORDS_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_cannot_say_much() {
        assert_eq!(words(b"a\x1b[2J\n\n b\xff"), "a [2J b\u{fffd}");
        assert_eq!(words(&[b'x'; 1000]).len(), WORDS_CHARS_MAX);
        let refused = |words: &str| Failure::Refused { status: 507, words: words.to_owned(), retry_after: None };
        assert_eq!(refused("").to_string(), "the server said 507");
        assert_eq!(refused("full").to_string(), "the server said 507: full");
    }
}
