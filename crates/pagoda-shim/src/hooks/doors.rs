//! The doors by which somebody else gets at guest RAM: sockets, DMA, and system calls made by hand.

use std::ffi::{c_int, c_long, c_uint, c_ulong, c_void};

use libc::{mmsghdr, msghdr, ssize_t};

use super::{hook, queues};
use crate::config::{Config, config};
use crate::foreign;
use crate::real::{self, Opaque};
use pagoda_abi::attach::ForeignReason;

/// Reports RAM fds among those a message carries.
///
/// # Safety
/// `message` is null or a valid message to be sent.
unsafe fn inspect_message(config: &Config, message: *const msghdr) {
    // SAFETY: null or valid (caller).
    let Some(message) = (unsafe { message.as_ref() }) else { return };
    if message.msg_control.is_null() {
        return;
    }
    // SAFETY: the control data of a valid message is `msg_controllen` bytes, which the CMSG functions keep to; the data of
    // an SCM_RIGHTS header is fds, which need not be aligned.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                let mut fds = (0..bytes / size_of::<c_int>()).map(|index| data.add(index).read_unaligned());
                if fds.any(|fd| config.region_of(fd).is_some()) {
                    foreign::report_and_wait(ForeignReason::RamFdSent);
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// What an ioctl(2) means for RAM, by its type and number; their sizes differ between kernels.
fn reason_of(request: c_ulong) -> Option<ForeignReason> {
    match ((request >> 8) as u8, request as u8) {
        // linux/vfio.h: VFIO_IOMMU_MAP_DMA. linux/iommufd.h: IOMMU_IOAS_MAP, _COPY and _MAP_FILE.
        (b';', 0x71 | 0x83 | 0x85 | 0x8f) => Some(ForeignReason::DmaMapped),
        // linux/vhost.h: everything of vDPA, which maps RAM by messages on its fd.
        (0xaf, 0x70..=0x8f) => Some(ForeignReason::DmaMapped),
        // linux/vduse.h: VDUSE_IOTLB_REG_UMEM.
        (0x81, 0x18) => Some(ForeignReason::DmaMapped),
        // linux/kvm.h: KVM_MEMORY_ENCRYPT_REG_REGION pins encrypted guests' RAM.
        (0xae, 0xbb) => Some(ForeignReason::DmaMapped),
        // linux/udmabuf.h: UDMABUF_CREATE and _CREATE_LIST pin pages of a memfd.
        (b'u', 0x42 | 0x43) => Some(ForeignReason::DmaMapped),
        // rdma/rdma_user_ioctl_cmds.h: RDMA_VERBS_IOCTL, memory registration among others.
        (0x1b, 0x01) => Some(ForeignReason::DmaMapped),
        // linux/vhost.h: VHOST_SCSI_SET_ENDPOINT; the kernel then does direct I/O on RAM by itself.
        (0xaf, 0x40) => Some(ForeignReason::UntrackedIo),
        _ => None,
    }
}

fn report_untracked() {
    if config().is_some() {
        foreign::report(ForeignReason::UntrackedIo);
    }
}

hook! {
    /// Sends a message, perhaps with fds.
    fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
        if let Some(config) = config() {
            // SAFETY: a message to be sent (caller).
            unsafe { inspect_message(config, message) };
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::sendmsg(fd, message, flags) }
    }

    /// Sends messages, perhaps with fds.
    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        if let (Some(config), false) = (config(), messages.is_null()) {
            for index in 0..count as usize {
                // SAFETY: an array of `count` messages to be sent (caller).
                unsafe { inspect_message(config, &raw const (*messages.add(index)).msg_hdr) };
            }
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::sendmmsg(fd, messages, count, flags) }
    }

    /// Controls a device, perhaps one that is given RAM for DMA.
    fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        if let (Some(reason), Some(_)) = (reason_of(request), config()) {
            foreign::report_and_wait(reason);
        }
        // SAFETY: the caller's call, passed on unchanged. An argument that was not given is not used by it.
        unsafe { real::ioctl(fd, request, argument) }
    }

    /// A system call by number. Queues made this way are not followed.
    fn syscall(number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long {
        match number {
            libc::SYS_io_uring_setup => report_untracked(),
            libc::SYS_io_submit if !queues::in_io_submit() => report_untracked(),
            _ => {}
        }
        // SAFETY: the caller's call, passed on unchanged. Arguments that were not given are not used by it.
        unsafe { real::syscall(number, a, b, c, d, e, f) }
    }

    /// Makes a ring without liburing's functions for it.
    fn io_uring_setup(entries: c_uint, params: Opaque) -> c_int {
        report_untracked();
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::io_uring_setup(entries, params) }
    }

    /// Registers something with a ring, perhaps buffers.
    fn io_uring_register(fd: c_uint, opcode: c_uint, argument: *const c_void, count: c_uint) -> c_int {
        // linux/io_uring.h: IORING_REGISTER_BUFFERS, _BUFFERS2 and _BUFFERS_UPDATE.
        if matches!(opcode, 0 | 15 | 16) && config().is_some() {
            foreign::report(ForeignReason::FixedBuffers);
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::io_uring_register(fd, opcode, argument, count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dma_is_told_from_everything_else() {
        let table = [
            (0x3b71, Some(ForeignReason::DmaMapped)),
            (0x3b72, None),
            (0x3b85, Some(ForeignReason::DmaMapped)),
            (0x8004_af70, Some(ForeignReason::DmaMapped)),
            (0x4010_af03, None),
            (0xae80, None),
            (0x8010_aebb, Some(ForeignReason::DmaMapped)),
            (0x40e8_af40, Some(ForeignReason::UntrackedIo)),
            (0x4018_7542, Some(ForeignReason::DmaMapped)),
            (0xaa00, None),
        ];
        for (request, expected) in table {
            assert_eq!(reason_of(request), expected, "{request:#x}");
        }
    }
}
