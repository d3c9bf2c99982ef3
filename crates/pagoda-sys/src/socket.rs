//! The attach socket: packets of [`pagoda_abi::attach`] over `SOCK_SEQPACKET`, with file descriptors.
//!
//! A packet arrives whole or not at all. Nothing a peer sends is trusted: packets are decoded with every field checked,
//! more descriptors than allowed or a packet cut short are errors (the connection is then of no use), received descriptors are
//! close-on-exec and owned from the first moment. The peer's end is [`Received::Closed`], no error.

mod shared;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagoda_abi::attach::{DecodeError, FDS_MAX, PACKET_MAX, Packet};
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::Errno;
pub use shared::{SharedError, SharedMap};

/// Connections that wait for `accept`: more VMs than this seldom start within one turn of the accept loop, and a further
/// one only waits.
const BACKLOG: i32 = 128;
/// Room for one packet and one byte more, so that a longer one is noticed.
const RECEIVE_SIZE: usize = PACKET_MAX + 1;

/// Why the socket, or one connection, failed.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Someone answers at the path.
    #[error("another daemon is running at {}: stop it, or use another --socket", path.display())]
    InUse {
        /// The socket is at this path.
        path: PathBuf,
    },
    /// Nobody answers at the path.
    #[error("no daemon answers at {}: start pagodad, or point PAGODA_SOCKET at its socket", path.display())]
    NoDaemon {
        /// The socket should be at this path.
        path: PathBuf,
    },
    /// The file at the path is no socket.
    #[error("{} is there and is not a socket: remove it, or use another --socket", path.display())]
    NotSocket {
        /// The file is at this path.
        path: PathBuf,
    },
    /// The peer closed the connection before this packet could be sent.
    #[error("the other side closed the connection")]
    Closed,
    /// The packet has more than [`PACKET_MAX`] bytes.
    #[error("packet is longer than {PACKET_MAX} bytes")]
    TooLong,
    /// More descriptors than [`FDS_MAX`], or this process has too many open files.
    #[error("packet has more than {FDS_MAX} file descriptors, or the limit on open files is too low")]
    TooManyFds,
    /// Not a packet of ours.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// The text says what was tried.
        what: &'static str,
        /// It failed with this error.
        source: Errno,
    },
}

fn os(what: &'static str) -> impl FnOnce(Errno) -> SocketError {
    move |source| SocketError::Os { what, source }
}

/// Who is at the other end, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// This process connected, or listens.
    pub pid: u32,
    /// The process has this effective user.
    pub uid: u32,
    /// The process has this effective group.
    pub gid: u32,
}

/// What came of a receive.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // handled at once, on the stack
pub enum Received {
    /// A packet came, perhaps with descriptors.
    Message {
        /// The packet says this.
        packet: Packet,
        /// These descriptors came with it.
        fds: Vec<OwnedFd>,
    },
    /// Nothing there now (nonblocking only).
    Nothing,
    /// The peer is gone.
    Closed,
}

/// The socket the daemon listens on. Its path is not removed in the end: the next daemon may have bound its own there
/// already, and replaces a stale one anyway.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    path: PathBuf,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn new_socket() -> Result<OwnedFd, SocketError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .map_err(os("make socket"))
}

impl Listener {
    /// Listens at `path`, for its owner alone. A socket that a dead daemon left is replaced.
    ///
    /// # Errors
    /// [`SocketError::InUse`] if a daemon answers there. Two daemons that start at the same moment are not told apart
    /// here: the lock on the state directory does that.
    pub fn bind(path: &Path) -> Result<Listener, SocketError> {
        let addr = SocketAddrUnix::new(path).map_err(os("use socket path"))?;
        let fd = new_socket()?;
        // On Linux the file gets the socket's own mode (unix_bind), so it is never open to others even for a moment.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(os("set mode of socket"))?;
        match rustix::net::bind(&fd, &addr) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path)?;
                rustix::net::bind(&fd, &addr).map_err(os("bind socket"))?;
            }
            result => result.map_err(os("bind socket"))?,
        }
        rustix::net::listen(&fd, BACKLOG).map_err(os("listen on socket"))?;
        Ok(Listener { fd, path: path.to_owned() })
    }

    /// Lends the descriptor, so that it can be polled.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A socket that listens already; `None` for one that has no path.
    pub fn from_fd(fd: OwnedFd) -> Option<Listener> {
        let address = SocketAddrUnix::try_from(rustix::net::getsockname(&fd).ok()?).ok()?;
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(address.path()?.to_bytes()));
        Some(Listener { fd, path })
    }

    /// The same socket once more.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn try_clone(&self) -> Result<Listener, SocketError> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0).map_err(os("duplicate socket"))?;
        Ok(Listener { fd, path: self.path.clone() })
    }

    /// Gives the path at which it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection; blocks unless the listener was made nonblocking.
    ///
    /// # Errors
    /// The error of accept4(2), as EMFILE.
    pub fn accept(&self) -> Result<Connection, SocketError> {
        let fd = rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC).map_err(os("accept connection"))?;
        Ok(Connection { fd })
    }
}

fn remove_stale(path: &Path) -> Result<(), SocketError> {
    match Connection::connect(path) {
        Ok(_) => Err(SocketError::InUse { path: path.to_owned() }),
        Err(SocketError::NoDaemon { .. }) => rustix::fs::unlink(path).map_err(os("remove stale socket")),
        Err(error) => Err(error),
    }
}

/// A connection carries packets, with descriptors, both ways.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Connection {
    /// Connects to the daemon.
    ///
    /// # Errors
    /// [`SocketError::NoDaemon`]; [`SocketError::NotSocket`].
    pub fn connect(path: &Path) -> Result<Connection, SocketError> {
        let addr = SocketAddrUnix::new(path).map_err(os("use socket path"))?;
        let fd = new_socket()?;
        match rustix::net::connect(&fd, &addr) {
            Ok(()) => Ok(Connection { fd }),
            Err(Errno::CONNREFUSED) if !is_socket(path) => Err(SocketError::NotSocket { path: path.to_owned() }),
            Err(Errno::CONNREFUSED | Errno::NOENT) => Err(SocketError::NoDaemon { path: path.to_owned() }),
            Err(errno) => Err(os("connect to daemon")(errno)),
        }
    }

    /// Connects without ever waiting, neither now nor in `recv` and `send`: for a peer that is not trusted to accept.
    ///
    /// # Errors
    /// EAGAIN: it has not accepted those before. ECONNREFUSED, ENOENT: nobody listens.
    pub fn connect_at_once(path: &Path) -> Result<Connection, SocketError> {
        let addr = SocketAddrUnix::new(path).map_err(os("use socket path"))?;
        let connection = Connection { fd: new_socket()? };
        connection.set_nonblocking(true)?;
        rustix::net::connect(&connection.fd, &addr).map_err(os("connect"))?;
        Ok(connection)
    }

    /// Two connected ends.
    ///
    /// # Errors
    /// The error of socketpair(2).
    pub fn pair() -> Result<(Connection, Connection), SocketError> {
        let flags = SocketFlags::CLOEXEC;
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(os("make socket pair"))?;
        Ok((Connection { fd: a }, Connection { fd: b }))
    }

    /// A connection made elsewhere.
    pub fn from_fd(fd: OwnedFd) -> Connection {
        Connection { fd }
    }

    /// Lends the descriptor, so that it can be polled.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The same connection once more.
    ///
    /// # Errors
    /// EMFILE.
    pub fn try_clone(&self) -> Result<Connection, SocketError> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.fd, 0).map_err(os("duplicate a connection"))?;
        Ok(Connection { fd })
    }

    /// Ends it for both sides: who waits in `recv` hears that it is closed.
    pub fn shut_down(&self) {
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// How long `recv` waits for a packet; for ever if `None`.
    ///
    /// # Errors
    /// The error of setsockopt(2).
    pub fn set_patience(&self, patience: Option<Duration>) -> Result<(), SocketError> {
        rustix::net::sockopt::set_socket_timeout(&self.fd, rustix::net::sockopt::Timeout::Recv, patience)
            .map_err(os("set a time-out"))
    }

    /// Whether `recv` and `send` return at once.
    ///
    /// # Errors
    /// The error of fcntl(2).
    pub fn set_nonblocking(&self, nonblocking: bool) -> Result<(), SocketError> {
        let mut flags = rustix::fs::fcntl_getfl(&self.fd).map_err(os("read flags of socket"))?;
        flags.set(OFlags::NONBLOCK, nonblocking);
        rustix::fs::fcntl_setfl(&self.fd, flags).map_err(os("set flags of socket"))
    }

    /// Who is at the other end (`SO_PEERCRED`): the process that connected, whoever uses its descriptor now.
    ///
    /// # Errors
    /// The error of getsockopt(2).
    pub fn peer(&self) -> Result<Peer, SocketError> {
        let creds = rustix::net::sockopt::socket_peercred(&self.fd).map_err(os("ask for the peer"))?;
        let pid = creds.pid.as_raw_nonzero().get() as u32;
        Ok(Peer { pid, uid: creds.uid.as_raw(), gid: creds.gid.as_raw() })
    }

    /// Sends one packet. The descriptors stay the caller's.
    ///
    /// # Errors
    /// [`SocketError::Closed`]; [`SocketError::TooManyFds`]; EAGAIN on a nonblocking connection whose peer does not read.
    pub fn send(&self, packet: &Packet, fds: &[BorrowedFd<'_>]) -> Result<(), SocketError> {
        if fds.len() > FDS_MAX {
            return Err(SocketError::TooManyFds);
        }
        let encoded = packet.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let data = [IoSlice::new(encoded.as_bytes())];
        let flags = SendFlags::NOSIGNAL;
        match rustix::io::retry_on_intr(|| rustix::net::sendmsg(&self.fd, &data, &mut control, flags)) {
            Ok(_) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(SocketError::Closed),
            Err(errno) => Err(os("send packet")(errno)),
        }
    }

    /// The next packet; waits for it unless the connection is nonblocking.
    ///
    /// # Errors
    /// [`SocketError::Decode`], [`SocketError::TooLong`], [`SocketError::TooManyFds`]: the connection should be closed.
    pub fn recv(&self) -> Result<Received, SocketError> {
        self.receive(RecvFlags::CMSG_CLOEXEC)
    }

    /// A packet, or the end, is there.
    pub fn is_readable(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.fd, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// The next packet if one is there.
    ///
    /// # Errors
    /// As [`Connection::recv`].
    pub fn try_recv(&self) -> Result<Received, SocketError> {
        self.receive(RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)
    }

    fn receive(&self, flags: RecvFlags) -> Result<Received, SocketError> {
        let mut bytes = [0; RECEIVE_SIZE];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = loop {
            match rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Ok(message) => break message,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(Errno::CONNRESET) => return Ok(Received::Closed),
                Err(errno) => return Err(os("receive packet")(errno)),
            }
        };
        // Owned before anything can fail, so that none leaks.
        let mut fds = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = part {
                fds.extend(received);
            }
        }
        // The control buffer is padded: one more than it was made for can fit.
        if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FDS_MAX {
            return Err(SocketError::TooManyFds);
        }
        if message.flags.contains(ReturnFlags::TRUNC) || message.bytes > PACKET_MAX {
            return Err(SocketError::TooLong);
        }
        if message.bytes == 0 {
            return Ok(Received::Closed);
        }
        Ok(Received::Message { packet: Packet::decode(&bytes[..message.bytes])?, fds })
    }
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

#[cfg(test)]
mod tests;
