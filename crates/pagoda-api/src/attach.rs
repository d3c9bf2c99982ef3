//! Fetching the RAM of a new VM over the attach socket, before its program starts.
//!
//! One packet each way (`pagoda_abi::attach`). The token proves who asks; the descriptors arrive
//! close-on-exec, and whoever starts the program decides which of them it inherits. If the daemon
//! dies before the answer, the caller gets an error and nothing has been attached.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use pagoda_abi::Token;
use pagoda_abi::attach::{DecodeError, FDS_MAX, PACKET_MAX, Packet};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

use crate::types::CreatedVm;

/// Longest wait for the daemon's answer; it only has to pass on what it made before.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// What the program of a new VM is started with.
#[derive(Debug)]
pub struct Fetched {
    /// The RAM files, one for each region in the order of `CreateVm::memory`.
    pub ram: Vec<OwnedFd>,
    /// A listening Unix socket for QEMU's monitor.
    pub monitor: Option<OwnedFd>,
}

/// Why the RAM could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("talk to the daemon on its attach socket {}", socket.display())]
    Io { socket: PathBuf, source: io::Error },
    #[error("the daemon's token is malformed: are pagoda and pagodad of one version?")]
    Token,
    #[error("the daemon closed the attach socket without an answer: see its log")]
    Closed,
    #[error("the daemon's answer on the attach socket is malformed")]
    Decode(#[from] DecodeError),
    #[error("the daemon refused to hand over the RAM: {0}")]
    Refused(String),
    #[error("the daemon handed over something else than RAM files of the sizes asked for: {what}")]
    Unexpected { what: String },
}

/// Fetches the RAM of `vm`, which was made with regions of `memory` bytes.
///
/// # Errors
/// See [`FetchError`]; the VM can then be given up with `Client::delete`.
pub fn fetch(vm: &CreatedVm, memory: &[u64]) -> Result<Fetched, FetchError> {
    let token = Token::from_hex(&vm.token).ok_or(FetchError::Token)?;
    let (answer, fds) = exchange(vm, &Packet::Fetch { token })
        .map_err(|source| FetchError::Io { socket: vm.attach_socket.clone(), source })?;
    if answer.is_empty() {
        return Err(FetchError::Closed);
    }
    match Packet::decode(&answer)? {
        Packet::Fetched { monitor, lens } => check(fds, monitor, lens.as_slice(), memory),
        Packet::Refused { text } => Err(FetchError::Refused(text.as_str().into())),
        other => Err(FetchError::Unexpected { what: format!("{other:?}") }),
    }
}

/// Sends one packet and receives one, with its descriptors.
fn exchange(vm: &CreatedVm, packet: &Packet) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let address = SocketAddrUnix::new(&vm.attach_socket)?;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, Timeout::Send, Some(WAIT_MAX))?;
    sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(WAIT_MAX))?;
    rustix::net::connect(&socket, &address)?;

    let packet = packet.encode();
    rustix::net::sendmsg(
        &socket,
        &[IoSlice::new(packet.as_bytes())],
        &mut SendAncillaryBuffer::default(),
        SendFlags::NOSIGNAL,
    )?;

    let mut bytes = vec![0; PACKET_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        rustix::net::recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is too large"));
    }
    bytes.truncate(received.bytes);
    Ok((bytes, fds))
}

/// Compares what came with what was asked for, before a program is started on it.
fn check(mut fds: Vec<OwnedFd>, has_monitor: bool, lens: &[u64], memory: &[u64]) -> Result<Fetched, FetchError> {
    let unexpected = |what: String| Err(FetchError::Unexpected { what });
    if lens != memory {
        return unexpected(format!("regions of {lens:?} bytes instead of {memory:?}"));
    }
    if fds.len() != lens.len() + usize::from(has_monitor) {
        return unexpected(format!("{} descriptors for {} regions", fds.len(), lens.len()));
    }
    let monitor = if has_monitor { fds.pop() } else { None };
    for (fd, &len) in fds.iter().zip(lens) {
        let size = rustix::fs::fstat(fd).map(|stat| stat.st_size);
        if size != Ok(i64::try_from(len).unwrap_or(i64::MAX)) {
            return unexpected(format!("a file of {size:?} bytes instead of {len}"));
        }
    }
    Ok(Fetched { ram: fds, monitor })
}
