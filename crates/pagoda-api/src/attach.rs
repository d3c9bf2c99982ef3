//! Fetching the monitor of a new VM over the attach socket, before its program starts.
//!
//! One packet each way (`pagoda_abi::attach`). The token proves who asks; the descriptor arrives
//! close-on-exec. The VM's RAM is not fetched here: only the shim in the program gets it.
//! If the daemon dies before the answer, the caller gets an error and nothing has been attached.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use pagoda_abi::attach::{DecodeError, FDS_MAX, PACKET_MAX, Packet};
use pagoda_abi::{RAM_PATH, Token};
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType,
};

use crate::types::CreatedVm;

/// Longest wait for the daemon's answer; it only has to pass on what it made before.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Why the monitor could not be fetched.
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
    #[error("the daemon refused to hand over the VM: {0}")]
    Refused(String),
    #[error("the daemon handed over something else than a monitor: {what}")]
    Unexpected { what: String },
}

/// Says that this process becomes the program of `vm`, and fetches what QEMU's monitor listens on, a Unix socket;
/// `None` for a plain program.
///
/// # Errors
/// See [`FetchError`]; the VM can then be given up with `Client::delete`.
pub fn fetch(vm: &CreatedVm) -> Result<Option<OwnedFd>, FetchError> {
    let token = Token::from_hex(&vm.token).ok_or(FetchError::Token)?;
    let (answer, mut fds) = exchange(vm, &Packet::Fetch { token })
        .map_err(|source| FetchError::Io { socket: vm.attach_socket.clone(), source })?;
    if answer.is_empty() {
        return Err(FetchError::Closed);
    }
    match Packet::decode(&answer)? {
        Packet::Fetched { monitor, lens } if lens.as_slice().is_empty() && fds.len() == usize::from(monitor) => {
            Ok(fds.pop())
        }
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

/// The path at which a VM's program opens the RAM of this region, by its libc, for the shim to answer.
#[must_use]
pub fn ram_path(region: usize) -> String {
    format!("{RAM_PATH}{region}")
}
