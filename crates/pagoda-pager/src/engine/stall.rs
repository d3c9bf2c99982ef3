//! Why a VM cannot go on, in words.

use pagoda_core::fault::{IoError, Stall};
use pagoda_sys::Errno;

/// What a stall means to the VM's owner. `trouble`: what a tier says of a page that it could not read.
pub(super) fn stall_text(stall: Stall, swap: &std::path::Path, trouble: Option<&str>) -> String {
    if let Stall::Write(IoError::Failed(errno)) = stall
        && [Errno::HWPOISON, Errno::FAULT].map(Errno::raw_os_error).contains(&errno)
    {
        return "a page of its memory cannot be read: a memory error of this machine, or a read error of the host's own swap \
                (dmesg says which). Its other pages are well, and it goes on with `pagoda vm cont` until it needs that page: save \
                what it has and start it again"
            .to_owned();
    }
    let (what, error) = match stall {
        Stall::Write(error) => ("written to", error),
        Stall::Read(error) => ("read from", error),
    };
    let (cause, advice) = match error {
        IoError::Lost => {
            return "a page of it was in the pool alone and is lost with the server that had it: the VM cannot go on. End it \
                    and start it again, with copies=2 if servers may fail"
                .to_owned();
        }
        IoError::Image => {
            return format!(
                "{}. The VM's other pages are well. Repair that disk, or put back the file from a copy, then `pagoda vm \
                 cont`; or save what the VM has, end it and restore another snapshot. `pagoda snapshot verify` finds all \
                 that is damaged",
                trouble.unwrap_or("a page cannot be read from the snapshot that the VM was made of")
            );
        }
        IoError::NoSpace => ("the file system is full, or a quota of it".to_owned(), "make room there"),
        IoError::Failed(errno) if errno == Errno::FBIG.raw_os_error() => (
            "pagodad may not make a file so long".to_owned(),
            "start pagodad again with LimitFSIZE=infinity in its unit",
        ),
        IoError::Failed(errno) => (std::io::Error::from_raw_os_error(errno).to_string(), "repair the disk"),
    };
    format!("swap could not be {what} ({}: {cause}); nothing is lost: {advice}, then `pagoda vm cont`", swap.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_says_what_to_do() {
        let text = stall_text(Stall::Write(IoError::NoSpace), std::path::Path::new("/swap/web1.swap"), None);
        let long = stall_text(Stall::Write(IoError::Failed(27)), std::path::Path::new("/swap/web1.swap"), None);
        assert!(long.contains("LimitFSIZE") && !long.contains("repair"), "{long}");
        let image =
            stall_text(Stall::Read(IoError::Image), std::path::Path::new("/swap/web1.swap"), Some("page 7 ..."));
        assert!(image.starts_with("page 7 ...") && image.contains("pagoda vm cont"), "{image}");
        assert!(!image.contains("swap"), "{image}");
        assert!(text.contains("/swap/web1.swap") && text.contains("full") && text.contains("pagoda vm cont"), "{text}");
    }
}
