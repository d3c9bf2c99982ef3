//! Announcements on the network. They are sent to a group, a broadcast address or one node. They are heard on one interface, and
//! never answered.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use rmap::announce::ANNOUNCEMENT_SIZE;

/// Of the block for use within an organization (RFC 2365).
pub const ANNOUNCE_GROUP: Ipv4Addr = Ipv4Addr::new(239, 255, 82, 77);
/// Where servers announce themselves, unless another place is given.
pub const ANNOUNCE_AT: SocketAddrV4 = SocketAddrV4::new(ANNOUNCE_GROUP, 7069);
/// Announcements taken from the socket at a time, so that a flood of them does not keep its reader from other work.
const HEARD_MAX: usize = 256;

/// Sends announcements from one interface.
#[derive(Debug)]
pub struct AnnounceSender {
    socket: UdpSocket,
    to: SocketAddrV4,
}

impl AnnounceSender {
    /// `interface` is the address of the network's card; they do not leave that network.
    ///
    /// # Errors
    /// The address is not this host's, or the socket cannot be set up.
    pub fn bind(interface: Ipv4Addr, to: SocketAddrV4) -> io::Result<AnnounceSender> {
        let socket = UdpSocket::bind((interface, 0))?;
        if to.ip().is_multicast() {
            socket2::SockRef::from(&socket).set_multicast_if_v4(&interface)?;
            socket.set_multicast_ttl_v4(1)?;
        } else {
            socket.set_broadcast(true)?;
            socket.set_ttl(1)?;
        }
        Ok(AnnounceSender { socket, to })
    }

    /// One that cannot be sent is lost: the next comes in a second.
    ///
    /// # Errors
    /// What to say to an operator, if it happens again and again.
    pub fn send(&self, announcement: &[u8; ANNOUNCEMENT_SIZE]) -> io::Result<()> {
        self.socket.send_to(announcement, self.to).map(drop)
    }
}

/// Hears announcements. Several processes of a host can listen to the same.
#[derive(Debug)]
pub struct AnnounceListener {
    socket: UdpSocket,
}

impl AnnounceListener {
    /// `at` is a group, joined on `interface`; or the address to listen at, which for broadcasts is the broadcast address.
    ///
    /// # Errors
    /// The address cannot be bound, or the group not be joined.
    pub fn bind(interface: Ipv4Addr, at: SocketAddrV4) -> io::Result<AnnounceListener> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        // Bound to the group: what is sent to the port otherwise is not even read.
        socket.bind(&at.into())?;
        if at.ip().is_multicast() {
            // What others of this host joined on other interfaces is heard too: it has to be signed all the same.
            socket.join_multicast_v4(at.ip(), &interface)?;
        }
        Ok(AnnounceListener { socket: socket.into() })
    }

    /// # Errors
    /// The socket is broken.
    pub fn local_addr(&self) -> io::Result<std::net::SocketAddr> {
        self.socket.local_addr()
    }

    /// Waits until something may have been heard, or `patience` is over.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn wait(&self, patience: Duration) -> io::Result<()> {
        let timeout = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Hands over what was heard, a limited number at a time. A datagram of another size is handed over cut to one byte
    /// more than an announcement has, to be counted and ignored.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn receive(&self, mut heard: impl FnMut(&[u8])) -> io::Result<()> {
        let mut bytes = [0; ANNOUNCEMENT_SIZE + 1];
        for _ in 0..HEARD_MAX {
            match self.socket.recv(&mut bytes) {
                Ok(length) => heard(&bytes[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
