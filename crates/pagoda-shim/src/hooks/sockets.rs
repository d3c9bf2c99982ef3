//! What messages carry: RAM, to be sent later than the call returns, or fds of RAM files.

use std::ffi::{c_int, c_uint, c_void};

use libc::{mmsghdr, msghdr, socklen_t};

use super::hook;
use crate::config::{Config, config, lends_to};
use crate::{foreign, ram, real};
use pagoda_abi::attach::ForeignReason;

/// `SOL_XDP` of `linux/socket.h` and `XDP_UMEM_REG` of `linux/if_xdp.h`.
const SOL_XDP: c_int = 283;
const XDP_UMEM_REG: c_int = 4;

/// A transfer with RAM that cannot be followed is about to be made.
pub fn report_if(untracked: bool) {
    if untracked {
        foreign::report(ForeignReason::UntrackedIo);
    }
}

/// With MSG_ZEROCOPY the pages are sent after the call, until a notification on the socket that nobody tells the shim of.
pub fn before_send(touches_ram: bool, flags: c_int) {
    report_if(touches_ram && flags & libc::MSG_ZEROCOPY != 0);
}

/// Whether one of a message's buffers lies in RAM.
///
/// # Safety
/// `message` is null or valid.
pub unsafe fn touches_ram(message: *const msghdr) -> bool {
    // SAFETY: null or valid (caller); a valid message has `msg_iovlen` elements at `msg_iov`.
    unsafe { message.as_ref().is_some_and(|message| ram::any_overlaps(message.msg_iov, message.msg_iovlen)) }
}

/// Whether one of several messages' buffers lies in RAM.
///
/// # Safety
/// `messages` is null or an array of `count` valid messages.
pub unsafe fn any_touches_ram(messages: *const mmsghdr, count: c_uint) -> bool {
    // SAFETY: an array of `count` messages (caller).
    !messages.is_null()
        && (0..count as usize).any(|index| unsafe { touches_ram(&raw const (*messages.add(index)).msg_hdr) })
}

/// Looks at a message to be sent: RAM fds that it carries are reported, and whether its buffers lie in RAM is the answer.
///
/// # Safety
/// `message` is null or a valid message.
pub unsafe fn inspect_sent(socket: c_int, message: *const msghdr, flags: c_int) -> bool {
    if let Some(config) = config() {
        // SAFETY: null or valid (caller).
        unsafe { inspect_fds(config, socket, message) };
    }
    // SAFETY: null or valid (caller).
    let touches_ram = unsafe { touches_ram(message) };
    before_send(touches_ram, flags);
    touches_ram
}

/// The same for several messages.
///
/// # Safety
/// `messages` is null or an array of `count` valid messages.
pub unsafe fn inspect_all_sent(socket: c_int, messages: *const mmsghdr, count: c_uint, flags: c_int) -> bool {
    if messages.is_null() || config().is_none() {
        return false;
    }
    // Every one is looked at: `any` would stop at the first that touches RAM, and the fds are in another.
    let inspect = |found, index| {
        // SAFETY: an array of `count` messages (caller).
        let touches = unsafe { inspect_sent(socket, &raw const (*messages.add(index)).msg_hdr, flags) };
        found | touches
    };
    (0..count as usize).fold(false, inspect)
}

/// Reports RAM fds among those a message carries.
///
/// # Safety
/// `message` is null or a valid message to be sent.
unsafe fn inspect_fds(config: &Config, socket: c_int, message: *const msghdr) {
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
                    if is_mappers(socket) {
                        foreign::lend();
                    } else {
                        foreign::report_and_wait(ForeignReason::RamFdSent);
                    }
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Whether this is a connection to the socket of the VM's mapper, which `pagoda run` has named.
fn is_mappers(socket: c_int) -> bool {
    let Some(wanted) = lends_to() else { return false };
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::sockaddr_un>() as socklen_t;
    // SAFETY: getpeername(2) fills at most `len` bytes of the structure that it is given.
    if unsafe { libc::getpeername(socket, (&raw mut address).cast(), &mut len) } != 0
        || address.sun_family != libc::AF_UNIX as libc::sa_family_t
    {
        return false;
    }
    let path = size_of::<libc::sa_family_t>()..(len as usize).min(size_of::<libc::sockaddr_un>());
    // SAFETY: as many bytes as the kernel filled in, within the structure.
    let bytes = unsafe { std::slice::from_raw_parts((&raw const address).cast::<u8>().add(path.start), path.len()) };
    match (bytes, wanted) {
        // A name that is in no file system begins with a zero; in the environment, with an at sign.
        ([0, name @ ..], [b'@', wanted @ ..]) => !name.is_empty() && name == wanted,
        ([_, ..], _) => bytes.strip_suffix(&[0]).unwrap_or(bytes) == wanted,
        ([], _) => false,
    }
}

/// Whether an option of a socket is known not to give memory away: its value is copied. Levels by `linux/socket.h`.
fn is_copying_level(level: c_int) -> bool {
    const SOL_MPTCP: c_int = 284;
    matches!(
        level,
        libc::SOL_SOCKET
            | libc::IPPROTO_IP
            | libc::IPPROTO_TCP
            | libc::IPPROTO_UDP
            | libc::IPPROTO_IPV6
            | libc::IPPROTO_ICMPV6
            | libc::IPPROTO_SCTP
            | libc::SOL_RAW
            | libc::SOL_PACKET
            | libc::SOL_NETLINK
            | libc::SOL_ALG
            | libc::SOL_TLS
            | libc::AF_VSOCK
            | SOL_MPTCP
    )
}

hook! {
    /// Sets a socket's option. Some give memory to a device: AF_XDP's umem, RDS.
    fn setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int {
        // SAFETY: an XDP_UMEM_REG option begins with an address and a length of 64 bits each (linux/if_xdp.h).
        let umem = unsafe {
            (level == SOL_XDP && name == XDP_UMEM_REG && len >= 16 && !value.is_null())
                .then(|| value.cast::<[u64; 2]>().read_unaligned())
        };
        match umem {
            Some([addr, len]) if ram::overlaps(addr as usize, len as usize) => {
                foreign::report(ForeignReason::DmaMapped);
            }
            Some(_) => {}
            None if level == SOL_XDP => {}
            None => report_if(config().is_some() && !is_copying_level(level)),
        }
        // SAFETY: the caller's call, passed on unchanged.
        unsafe { real::setsockopt(fd, level, name, value, len) }
    }
}
