//! Why a userfaultfd cannot be had or used.

use crate::Errno;

/// Why a userfaultfd could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    /// The peer sent some other kind of file.
    #[error("file descriptor is {kind}, not a userfaultfd")]
    NotUffd {
        /// The kernel calls the file this.
        kind: String,
    },
    /// The kernel lacks what Pagoda needs.
    #[error("this kernel's userfaultfd lacks {missing}: use Linux 6.1 or newer with CONFIG_USERFAULTFD")]
    Features {
        /// The absent features and the kernels that have them.
        missing: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// The text says what was tried.
        what: &'static str,
        /// It failed with this error.
        source: Errno,
    },
    /// Nobody may make a userfaultfd here.
    #[error("not allowed to handle page faults of the kernel: {advice}")]
    Permission {
        /// What to do about it.
        advice: String,
    },
}
