//! Why something was not done. Nothing has changed then.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    NotFound,
    Exists,
    NotADirectory,
    IsADirectory,
    NotEmpty,
    /// No name that a file may have: empty, a dot, or with a slash or NUL in it.
    BadName,
    NameTooLong,
    TooDeep,
    /// A directory would come to be below itself.
    Loop,
    /// There are [`NODES_MAX`](crate::limits::NODES_MAX) files and directories already.
    TooManyFiles,
    /// The guest has [`HANDLES_MAX`](crate::limits::HANDLES_MAX) files open already.
    TooManyHandles,
    /// There are [`READERS_MAX`](crate::limits::READERS_MAX) readers already.
    TooManyReaders,
    BadHandle,
    /// The handle was not opened for that.
    NotOpenForThat,
    /// These bytes have been sent, or are being sent.
    BelowCursor,
    /// The file was closed after it had been written, and does not change any more.
    Sealed,
    /// The budget is used up. It may help to wait.
    Full,
    /// Something else changes the file just now. It helps to wait.
    Busy,
    /// The file would be larger than [`FILE_BYTES_MAX`](crate::limits::FILE_BYTES_MAX).
    TooLarge,
    /// The file would have more pieces than [`EXTENTS_MAX`](crate::limits::EXTENTS_MAX).
    TooScattered,
    /// These bytes have been delivered and their memory given back; what there is begins at this byte.
    Gone {
        oldest: u64,
    },
    /// The range begins behind the end of a file that does not grow any more.
    BeyondEnd {
        size: u64,
    },
    /// The file is to be sent when it is closed, and is not.
    NotPublished,
    /// Its writer disappeared before it had ended.
    Broken,
    /// A part of [`limits`](crate::limits) for extended attributes.
    XattrTooLarge,
    NoXattr,
    XattrExists,
    /// Only attributes named `user.…` are kept.
    XattrNotKept,
    /// A value of `user.pagoda.…` that has no meaning.
    BadPolicy,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Refusal::NotFound => "there is no such file",
            Refusal::Exists => "the name is taken",
            Refusal::NotADirectory => "not a directory",
            Refusal::IsADirectory => "a directory",
            Refusal::NotEmpty => "the directory is not empty",
            Refusal::BadName => "not a name for a file",
            Refusal::NameTooLong => "the name is too long",
            Refusal::TooDeep => "too many directories below one another",
            Refusal::Loop => "a directory cannot be moved below itself",
            Refusal::TooManyFiles => "too many files",
            Refusal::TooManyHandles => "too many open files",
            Refusal::TooManyReaders => "too many readers",
            Refusal::BadHandle => "no such open file",
            Refusal::NotOpenForThat => "the file is not open for that",
            Refusal::BelowCursor => "these bytes have been sent and do not change any more",
            Refusal::Sealed => "the file has been closed and does not change any more",
            Refusal::Full => "the space is full",
            Refusal::Busy => "the file is being changed",
            Refusal::TooLarge => "the file would be too large",
            Refusal::TooScattered => "the file would have too many holes",
            Refusal::Gone { oldest } => return write!(f, "delivered and given back; what there is begins at {oldest}"),
            Refusal::BeyondEnd { size } => return write!(f, "the file ends at {size}"),
            Refusal::NotPublished => "the file is sent when it has been closed",
            Refusal::Broken => "the file's writer disappeared before its end",
            Refusal::XattrTooLarge => "too many or too large extended attributes",
            Refusal::NoXattr => "no such extended attribute",
            Refusal::XattrExists => "the extended attribute exists",
            Refusal::XattrNotKept => "only extended attributes of users are kept",
            Refusal::BadPolicy => "not a value of this attribute, or too late to change it",
        };
        f.write_str(text)
    }
}

impl std::error::Error for Refusal {}
