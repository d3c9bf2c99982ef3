//! One connection to the daemon: packets and the fds they carry. Nothing here allocates, and every call is taken up
//! again after a signal.

use std::ffi::c_int;
use std::mem::{size_of, size_of_val, zeroed};

use pagoda_abi::attach::{FDS_MAX, PACKET_MAX, Packet};

use crate::real;

/// Room for the control message of the most fds a packet carries.
#[repr(C, align(8))]
struct Control([u8; 160]);

// SAFETY: CMSG_SPACE only computes.
const _: () =
    assert!(unsafe { libc::CMSG_SPACE((FDS_MAX * size_of::<c_int>()) as u32) } as usize <= size_of::<Control>());

/// The pause before something is tried again, in milliseconds.
const PAUSE_MS: c_int = 10;

/// The connection is of no more use: the daemon is gone, or it sent what cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// Closed, refused, or an error of the socket.
    Gone,
    /// A packet that is not in the protocol.
    Nonsense(pagoda_abi::attach::DecodeError),
}

/// Fds that came with a packet.
pub type Fds = pagoda_abi::attach::List<c_int, FDS_MAX>;

pub fn errno() -> c_int {
    // SAFETY: errno's location is valid for the calling thread.
    unsafe { *libc::__errno_location() }
}

/// Repeats a call that a signal interrupted; any other failure is `Gone`.
fn retry(mut call: impl FnMut() -> isize) -> Result<usize, Broken> {
    loop {
        match call() {
            -1 if errno() == libc::EINTR => {}
            n => return usize::try_from(n).map_err(|_| Broken::Gone),
        }
    }
}

/// Closes an fd of ours.
pub fn close(fd: c_int) {
    // SAFETY: the fd is the shim's own and is not used after this.
    unsafe { libc::close(fd) };
}

/// Opens a connection to the daemon.
pub fn connect(address: &libc::sockaddr_un) -> Result<c_int, Broken> {
    // SAFETY: socket(2) has no memory conditions.
    let fd = retry(|| unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) } as isize)?;
    let fd = fd as c_int;
    let len = size_of_val(address) as libc::socklen_t;
    // SAFETY: connect(2) reads `len` bytes of the address, which is that long; the path in it is NUL-terminated.
    match retry(|| unsafe { libc::connect(fd, (&raw const *address).cast(), len) } as isize) {
        Ok(_) => Ok(fd),
        Err(gone) => {
            close(fd);
            Err(gone)
        }
    }
}

/// Sends a packet with fds.
pub fn send(link: c_int, packet: &Packet, fds: &[c_int]) -> Result<(), Broken> {
    let encoded = packet.encode();
    let bytes = encoded.as_bytes();
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; size_of::<Control>()]);
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        assert!(fds.len() <= FDS_MAX);
        let size = size_of_val(fds) as u32;
        message.msg_control = (&raw mut control).cast();
        // SAFETY: `control` is aligned and, for up to FDS_MAX fds, large enough (asserted above), so the first header and
        // its data lie inside it.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size) as usize;
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size) as usize;
            std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast(), fds.len());
        }
    }
    // SAFETY: sendmsg(2) reads the message, its one buffer and the control data, all alive and of the lengths given.
    let sent = retry(|| unsafe { real::sendmsg(link, &message, libc::MSG_NOSIGNAL) })?;
    // SEQPACKET: whole or not at all.
    if sent == bytes.len() { Ok(()) } else { Err(Broken::Gone) }
}

/// Waits for the next packet and takes the fds it carries, which are then the caller's.
pub fn receive(link: c_int) -> Result<(Packet, Fds), Broken> {
    let mut bytes = [0u8; PACKET_MAX];
    let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control([0; size_of::<Control>()]);
    // SAFETY: a plain C structure: all zero bits are valid.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>();
    // SAFETY: recvmsg(2) writes into the one buffer and the control data, both alive and of the lengths given.
    let len = retry(|| unsafe { libc::recvmsg(link, &mut message, libc::MSG_CMSG_CLOEXEC) })?;
    let fds = received_fds(&message);
    let packet = if len == 0 { Err(Broken::Gone) } else { Packet::decode(&bytes[..len]).map_err(Broken::Nonsense) };
    match packet {
        Ok(packet) => Ok((packet, fds)),
        Err(broken) => {
            fds.as_slice().iter().for_each(|fd| close(*fd));
            Err(broken)
        }
    }
}

/// Waits for a packet that carries no fds.
pub fn receive_plain(link: c_int) -> Result<Packet, Broken> {
    let (packet, fds) = receive(link)?;
    fds.as_slice().iter().for_each(|fd| close(*fd));
    Ok(packet)
}

/// The same for the answer to a question that must not be left while the daemon may still act on it: it ends with an answer or
/// with the connection, whatever other error there is meanwhile (ENOMEM, say).
pub fn receive_answer(link: c_int) -> Result<Packet, Broken> {
    loop {
        match receive_plain(link) {
            Err(Broken::Gone) if !is_closed(link) => pause(),
            answer => return answer,
        }
    }
}

/// Whether the other end has closed the connection. What poll(2) cannot tell is no.
fn is_closed(link: c_int) -> bool {
    let mut poll = libc::pollfd { fd: link, events: 0, revents: 0 };
    // SAFETY: poll(2) is given one structure that lives through the call.
    retry(|| unsafe { libc::poll(&mut poll, 1, 0) } as isize) == Ok(1)
}

fn pause() {
    // SAFETY: poll(2) of no descriptor touches no memory.
    unsafe { libc::poll(std::ptr::null_mut(), 0, PAUSE_MS) };
}

fn received_fds(message: &libc::msghdr) -> Fds {
    let mut fds = Fds::default();
    // SAFETY: recvmsg(2) filled the control data that `message` points to, so its headers chain inside it, and the data of
    // an SCM_RIGHTS header is `cmsg_len` minus the header of fds, which need not be aligned.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<c_int>();
                let data = libc::CMSG_DATA(header).cast::<c_int>();
                for index in 0..count {
                    let fd = data.add(index).read_unaligned();
                    if !fds.push(fd) {
                        close(fd);
                    }
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    fds
}

/// Waits until a packet can be read, or the time is over; `false` then.
pub fn wait_readable(link: c_int, timeout_ms: c_int) -> bool {
    let mut poll = libc::pollfd { fd: link, events: libc::POLLIN, revents: 0 };
    // SAFETY: poll(2) is given one structure that lives through the call.
    retry(|| unsafe { libc::poll(&mut poll, 1, timeout_ms) } as isize) != Ok(0)
}
