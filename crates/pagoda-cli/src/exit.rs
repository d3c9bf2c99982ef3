//! Exit statuses, which `pagoda --help` documents, and how an error is reported.

use std::error::Error;
use std::io;
use std::process::ExitCode;

use pagoda_api::in_full;
use pagoda_pool::error::NoSuchDisk;
/// The command line is wrong in a way that clap cannot see.
pub use pagoda_pool::error::UsageError;
use rmap_etcd::EtcdError;

use crate::output::OutputClosed;

/// It failed; the message says what to do.
pub const FAILED: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// The daemon, or the etcd of a cluster, cannot be reached.
pub const UNREACHABLE: u8 = 3;
/// There is no VM, snapshot, disk or server of that name.
pub const NOT_FOUND: u8 = 4;
/// There is no room for the VM or the snapshot.
pub const NO_ROOM: u8 = 5;
/// A snapshot, a restore or a move was refused: nothing was changed.
pub const REFUSED: u8 = 6;
/// A snapshot, a restore or a move was begun and given up: the VM runs where it was.
pub const GIVEN_UP: u8 = 7;
/// A move was begun, and which host runs the VM is not decided, or not known here.
pub const UNDECIDED: u8 = 8;

/// Prints `error`, with all its causes. The program ends with `status`, or with 0 if nobody reads standard output any
/// more.
pub fn report(error: &anyhow::Error, status: u8) -> ExitCode {
    if is_output_closed(error) {
        return ExitCode::SUCCESS;
    }
    eprintln!("pagoda: {}", in_full(error.as_ref()));
    ExitCode::from(status)
}

fn is_output_closed(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        inner.is_some_and(|inner| inner.is::<OutputClosed>())
    })
}

/// The status of an error that concerns a pool.
pub fn pool_status(error: &anyhow::Error) -> u8 {
    error.chain().find_map(pool_cause_status).unwrap_or(FAILED)
}

/// The status that one cause of an error decides; `None` if it decides none.
pub fn pool_cause_status(cause: &(dyn Error + 'static)) -> Option<u8> {
    if let Some(error) = cause.downcast_ref::<EtcdError>() {
        return Some(match error {
            error if error.is_transient() => UNREACHABLE,
            EtcdError::NoSuchSpace { .. } => NOT_FOUND,
            EtcdError::Address { .. } | EtcdError::Invalid { .. } => USAGE,
            _ => FAILED,
        });
    }
    if cause.is::<NoSuchDisk>() {
        return Some(NOT_FOUND);
    }
    cause.is::<UsageError>().then_some(USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses() {
        let check = |error: anyhow::Error, expected: u8| {
            assert_eq!(pool_status(&error.context("outer")), expected);
        };
        check(anyhow::anyhow!("any"), FAILED);
        check(UsageError("u".into()).into(), USAGE);
        check(NoSuchDisk("d".into()).into(), NOT_FOUND);
        check(EtcdError::NoSuchSpace { name: "d".into() }.into(), NOT_FOUND);
        check(EtcdError::NameTaken { name: "d".into() }.into(), FAILED);
        check(EtcdError::Unreachable { endpoint: "e".into(), what: "w".into() }.into(), UNREACHABLE);
        check(EtcdError::Invalid { what: "w".into() }.into(), USAGE);
    }

    #[test]
    fn a_reader_that_has_gone_is_no_failure() {
        let closed = anyhow::Error::from(io::Error::other(OutputClosed)).context("print");
        assert!(is_output_closed(&closed));
        // The daemon went away in the middle of a request: its pipe is not ours.
        assert!(!is_output_closed(&io::Error::from(io::ErrorKind::BrokenPipe).into()));
    }
}
