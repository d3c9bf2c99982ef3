//! Why a ring cannot be had, or takes no operation.

use crate::Errno;

/// Why a ring could not be made or would not take an operation.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// All operations the ring can hold are in flight: take completions, then try again. Nothing was dropped.
    #[error("all {limit} operations of the ring are in flight")]
    Full {
        /// The ring can hold so many operations.
        limit: usize,
    },
    /// A buffer slice or file that is not the ring's, or a buffer not taken.
    #[error("{what} does not belong to this ring")]
    Stranger {
        /// This argument is not the ring's.
        what: &'static str,
    },
    /// io_uring is switched off.
    #[error("io_uring is disabled on this host: set kernel.io_uring_disabled = 0 with sysctl")]
    Disabled,
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// The text says what was tried.
        what: &'static str,
        /// It failed with this error.
        source: Errno,
    },
}

pub(super) fn os(what: &'static str) -> impl FnOnce(std::io::Error) -> RingError {
    move |error| RingError::Os { what, source: Errno::from_io_error(&error).unwrap_or(Errno::IO) }
}
