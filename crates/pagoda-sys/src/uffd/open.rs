//! Making a userfaultfd that may handle faults of the kernel too, and which of the three ways allows it.
//!
//! Faults of user mode alone are not enough: QEMU's disk reads touch guest memory from inside system calls.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::error::UffdError;
use super::kernel;

const DEVICE: &str = "/dev/userfaultfd";
const SYSCTL: &str = "/proc/sys/vm/unprivileged_userfaultfd";
/// The number is from linux/capability.h.
const CAP_SYS_PTRACE: u32 = 19;

/// What allows this process to make userfaultfds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permission {
    /// `/dev/userfaultfd` can be opened.
    Device,
    /// The process has the capability `CAP_SYS_PTRACE`.
    Capability,
    /// The sysctl `vm.unprivileged_userfaultfd` is 1.
    Sysctl,
    /// Nothing allows this process to make one.
    None {
        /// The advice says what the operator can do.
        advice: String,
    },
}

/// Opens `/dev/userfaultfd`, for ourselves or to hand to a shim, whose own process then needs no permission.
///
/// # Errors
/// `NotFound` where the host or its container has no such device; `PermissionDenied`.
pub fn open_device() -> std::io::Result<OwnedFd> {
    Ok(rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Makes a userfaultfd of this process, nonblocking and not yet enabled: for the self-test, the toy VMM and tests.
///
/// # Errors
/// [`UffdError::Permission`] with what to do; [`UffdError::Os`].
pub fn create() -> Result<OwnedFd, UffdError> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    let raw = match open_device() {
        Ok(device) => {
            // SAFETY: USERFAULTFD_IOC_NEW takes its flags by value and touches no memory of ours.
            unsafe { libc::ioctl(device.as_raw_fd(), kernel::USERFAULTFD_IOC_NEW as _, flags) }
        }
        Err(_) => {
            // SAFETY: userfaultfd(2) takes its flags by value and touches no memory of ours.
            unsafe { libc::syscall(libc::SYS_userfaultfd, flags) as i32 }
        }
    };
    if raw < 0 {
        return Err(match crate::errno() {
            Errno::PERM | Errno::ACCESS => UffdError::Permission { advice: advice() },
            source => UffdError::Os { what: "create userfaultfd", source },
        });
    }
    // SAFETY: the kernel just returned this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Which way is open to this process.
pub fn permission() -> Permission {
    if open_device().is_ok() {
        return Permission::Device;
    }
    if has_capability(CAP_SYS_PTRACE) {
        return Permission::Capability;
    }
    if std::fs::read_to_string(SYSCTL).is_ok_and(|text| text.trim() == "1") {
        return Permission::Sysctl;
    }
    Permission::None { advice: advice() }
}

fn advice() -> String {
    if std::path::Path::new(DEVICE).exists() {
        format!("give this user read and write access to {DEVICE}, or run pagodad as root")
    } else {
        "run pagodad as root or with CAP_SYS_PTRACE (this kernel has no /dev/userfaultfd), \
         or set vm.unprivileged_userfaultfd = 1 with sysctl"
            .to_owned()
    }
}

fn has_capability(number: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).is_some_and(|bits| bits & (1 << number) != 0)
}
