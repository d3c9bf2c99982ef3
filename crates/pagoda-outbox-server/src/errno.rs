//! What a refusal is called in the guest.

use std::io;

use pagoda_outbox::Refusal;

pub fn error(refusal: Refusal) -> io::Error {
    io::Error::from_raw_os_error(number(refusal))
}

fn number(refusal: Refusal) -> i32 {
    match refusal {
        Refusal::NotFound => libc::ENOENT,
        Refusal::Exists | Refusal::XattrExists => libc::EEXIST,
        Refusal::NotADirectory => libc::ENOTDIR,
        Refusal::IsADirectory => libc::EISDIR,
        Refusal::NotEmpty => libc::ENOTEMPTY,
        Refusal::BadName | Refusal::Loop | Refusal::BadPolicy | Refusal::BeyondEnd { .. } => libc::EINVAL,
        Refusal::NameTooLong => libc::ENAMETOOLONG,
        Refusal::TooDeep => libc::ELOOP,
        Refusal::TooManyFiles | Refusal::Full | Refusal::XattrTooLarge => libc::ENOSPC,
        Refusal::TooManyHandles | Refusal::TooManyReaders => libc::ENFILE,
        Refusal::BadHandle | Refusal::NotOpenForThat => libc::EBADF,
        Refusal::BelowCursor | Refusal::Sealed => libc::EPERM,
        Refusal::Busy | Refusal::NotPublished => libc::EBUSY,
        Refusal::TooLarge | Refusal::TooScattered => libc::EFBIG,
        Refusal::Gone { .. } | Refusal::NoXattr => libc::ENODATA,
        Refusal::Broken => libc::EIO,
        Refusal::XattrNotKept => libc::EOPNOTSUPP,
    }
}
