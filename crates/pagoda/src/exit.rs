//! Exit statuses, which `pagoda --help` documents.

use std::io;
use std::process::ExitCode;

use pagoda_api::{ClientError, ErrorCode, in_full};
use pagoda_pool::error::NoSuchDisk;
/// The command line is wrong in a way that clap cannot see.
pub use pagoda_pool::error::UsageError;
use rmap_etcd::EtcdError;

use crate::output::OutputClosed;
use crate::qemu_args::ArgError;

const FAILED: u8 = 1;
const USAGE: u8 = 2;
const UNREACHABLE: u8 = 3;
const NOT_FOUND: u8 = 4;
const NO_ROOM: u8 = 5;

/// A VM would not be admitted; the text says what is missing.
#[derive(Debug, thiserror::Error)]
#[error("not admitted: {0}")]
pub struct NotAdmitted(pub String);

/// There is no server of that number.
#[derive(Debug, thiserror::Error)]
#[error("there is no server {0}; `pagoda pool ls` shows those that there are")]
pub struct NoSuchServer(pub u32);

/// No client is admitted by that key or name.
#[derive(Debug, thiserror::Error)]
#[error("{0} is not admitted here; `pagoda pool key ls` shows those that are")]
pub struct NoSuchClient(pub String);

/// Prints `error` and finds its status.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if is_output_closed(error) {
        return ExitCode::SUCCESS;
    }
    eprintln!("pagoda: {}", in_full(error.as_ref()));
    ExitCode::from(status(error))
}

fn is_output_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        inner.is_some_and(|inner| inner.is::<OutputClosed>())
    })
}

/// Whether the daemon or etcd does not answer.
pub fn is_unreachable(error: &anyhow::Error) -> bool {
    status(error) == UNREACHABLE
}

fn status(error: &anyhow::Error) -> u8 {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<ClientError>() {
            return match error {
                error if error.is_unreachable() => UNREACHABLE,
                error if error.code() == Some(ErrorCode::NoSuchVm) => NOT_FOUND,
                error if error.code() == Some(ErrorCode::NoRoom) => NO_ROOM,
                ClientError::BadName(_) => USAGE,
                _ => FAILED,
            };
        }
        if let Some(error) = cause.downcast_ref::<EtcdError>() {
            return match error {
                error if error.is_transient() => UNREACHABLE,
                EtcdError::NoSuchSpace { .. } => NOT_FOUND,
                EtcdError::Address { .. } | EtcdError::Invalid { .. } => USAGE,
                _ => FAILED,
            };
        }
        if cause.is::<NoSuchDisk>() || cause.is::<NoSuchServer>() || cause.is::<NoSuchClient>() {
            return NOT_FOUND;
        }
        if cause.is::<NotAdmitted>() {
            return NO_ROOM;
        }
        if cause.is::<UsageError>() || cause.is::<ArgError>() {
            return USAGE;
        }
    }
    FAILED
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_api::ApiError;

    #[test]
    fn statuses() {
        let check = |error: anyhow::Error, expected: u8| {
            assert_eq!(status(&error.context("outer")), expected);
        };
        let refused = |code| {
            let error = ApiError { code, message: "m".into(), hint: None };
            anyhow::Error::from(ClientError::Refused(error))
        };
        check(anyhow::anyhow!("any"), FAILED);
        check(UsageError("u".into()).into(), USAGE);
        check(ClientError::BadName("n".into()).into(), USAGE);
        check(refused(ErrorCode::NoSuchVm), NOT_FOUND);
        check(NoSuchDisk("d".into()).into(), NOT_FOUND);
        check(NoSuchServer(3).into(), NOT_FOUND);
        check(NoSuchClient("a".into()).into(), NOT_FOUND);
        check(EtcdError::NoSuchSpace { name: "d".into() }.into(), NOT_FOUND);
        check(EtcdError::NameTaken { name: "d".into() }.into(), FAILED);
        check(EtcdError::Unreachable { endpoint: "e".into(), what: "w".into() }.into(), UNREACHABLE);
        check(EtcdError::Invalid { what: "w".into() }.into(), USAGE);
        check(refused(ErrorCode::NameTaken), FAILED);
        // The daemon went away in the middle of a request: its pipe is not ours.
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        check(ClientError::Protocol { socket: "/s".into(), source: gone().into() }.into(), UNREACHABLE);
        assert!(!is_output_closed(&gone().into()));
        assert!(is_output_closed(&anyhow::Error::from(io::Error::other(OutputClosed)).context("print")));
        check(refused(ErrorCode::NoRoom), NO_ROOM);
        check(NotAdmitted("n".into()).into(), NO_ROOM);
        check(
            ClientError::NotRunning { socket: "/s".into(), source: io::ErrorKind::NotFound.into() }.into(),
            UNREACHABLE,
        );
    }
}
