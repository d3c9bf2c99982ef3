//! Exit statuses of errors, which `pagoda --help` documents.

use std::process::ExitCode;

use pagoda_api::{ClientError, ErrorCode};
pub use pagoda_cli::exit::UsageError;
use pagoda_cli::exit::{self, FAILED, GIVEN_UP, NO_ROOM, NOT_FOUND, REFUSED, UNDECIDED, UNREACHABLE, USAGE};

use crate::qemu_args::ArgError;

/// A VM would not be admitted; the text says what is missing.
#[derive(Debug, thiserror::Error)]
#[error("not admitted: {0}")]
pub struct NotAdmitted(pub String);

/// A snapshot, a restore or a move is not possible, and nothing was changed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Something was begun and given up, and what it made is gone.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GivenUp(pub String);

/// Nobody knows here which host runs a VM.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Undecided(pub String);

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
    exit::report(error, status(error))
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
                ClientError::BadName(_) => USAGE,
                error => error.code().map_or(FAILED, code_status),
            };
        }
        if let Some(status) = exit::pool_cause_status(cause) {
            return status;
        }
        if cause.is::<NoSuchServer>() || cause.is::<NoSuchClient>() {
            return NOT_FOUND;
        }
        if cause.is::<NotAdmitted>() {
            return NO_ROOM;
        }
        if cause.is::<Refused>() {
            return REFUSED;
        }
        if cause.is::<GivenUp>() {
            return GIVEN_UP;
        }
        if cause.is::<Undecided>() {
            return UNDECIDED;
        }
        if cause.is::<ArgError>() {
            return USAGE;
        }
    }
    FAILED
}

/// The exit status of an error that the daemon has answered.
fn code_status(code: ErrorCode) -> u8 {
    match code {
        ErrorCode::NoSuchVm | ErrorCode::NoSuchOutbox | ErrorCode::NoSuchSnapshot | ErrorCode::NoSuchHost => NOT_FOUND,
        ErrorCode::NoRoom => NO_ROOM,
        ErrorCode::Refused => REFUSED,
        ErrorCode::GivenUp => GIVEN_UP,
        ErrorCode::Unreachable => UNREACHABLE,
        _ => FAILED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    use pagoda_api::ApiError;
    use pagoda_pool::error::NoSuchDisk;
    use rmap_etcd::EtcdError;

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
        check(EtcdError::Unreachable { endpoint: "e".into(), what: "w".into() }.into(), UNREACHABLE);
        check(refused(ErrorCode::NameTaken), FAILED);
        // The daemon went away in the middle of a request: its pipe is not ours.
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        check(ClientError::Protocol { socket: "/s".into(), source: gone().into() }.into(), UNREACHABLE);
        check(refused(ErrorCode::NoRoom), NO_ROOM);
        check(NotAdmitted("n".into()).into(), NO_ROOM);
        check(refused(ErrorCode::NoSuchSnapshot), NOT_FOUND);
        check(refused(ErrorCode::NoSuchOutbox), NOT_FOUND);
        check(refused(ErrorCode::NoSuchHost), NOT_FOUND);
        check(refused(ErrorCode::Unreachable), UNREACHABLE);
        check(refused(ErrorCode::Refused), REFUSED);
        check(refused(ErrorCode::GivenUp), GIVEN_UP);
        check(Refused("r".into()).into(), REFUSED);
        check(GivenUp("g".into()).into(), GIVEN_UP);
        check(Undecided("u".into()).into(), UNDECIDED);
        check(
            ClientError::NotRunning { socket: "/s".into(), source: io::ErrorKind::NotFound.into() }.into(),
            UNREACHABLE,
        );
    }
}
