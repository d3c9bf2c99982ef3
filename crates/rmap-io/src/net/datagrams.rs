//! A UDP socket with what the kernel offers for many datagrams at once.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use quinn_udp::{RecvMeta, Transmit as UdpTransmit, UdpSocketState};

use rmap::transmit::Transmit;

/// Buffers of one `recvmmsg`. Each holds the datagrams of a message or of several; each costs a header at every call.
const BATCH: usize = 8;
/// Calls of a turn. Who sends faster than is taken in must not keep the caller from its timers, or from what it has to send.
const BATCHES_A_TURN: usize = 8;
/// What the kernel joins at most into one buffer.
const BUFFER_SIZE: usize = 65_535;
/// Requests and replies of a full window in both directions; the kernel's default holds 50 pages.
pub const SOCKET_BUFFER: usize = 4 << 20;

/// A socket and its buffers.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    state: UdpSocketState,
    buffers: Vec<Vec<u8>>,
    metas: Vec<RecvMeta>,
}

impl AsFd for Datagrams {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Datagrams {
    /// How many datagrams the kernel takes in one call (GSO), and hands over in one buffer (GRO).
    pub fn batches(&self) -> (usize, usize) {
        (self.state.max_gso_segments(), self.state.gro_segments())
    }

    /// # Errors
    /// The address cannot be bound, or the socket not be set up.
    pub fn bind(addr: SocketAddr) -> io::Result<Datagrams> {
        Datagrams::new(UdpSocket::bind(addr)?)
    }

    pub fn new(socket: UdpSocket) -> io::Result<Datagrams> {
        let about = socket2::SockRef::from(&socket);
        // Less than was asked for is what the system allows; the windows fit themselves to what gets lost.
        about.set_recv_buffer_size(SOCKET_BUFFER)?;
        about.set_send_buffer_size(SOCKET_BUFFER)?;
        let state = UdpSocketState::new((&socket).into())?;
        let buffers = (0..BATCH).map(|_| vec![0; BUFFER_SIZE]).collect();
        Ok(Datagrams { socket, state, buffers, metas: vec![RecvMeta::default(); BATCH] })
    }

    /// # Errors
    /// The socket is broken.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Hands over the datagrams that are there now, as many as a turn may take. The socket stays readable if there are more. `false` if
    /// there was none.
    ///
    /// # Errors
    /// The socket is broken.
    pub fn receive(&mut self, mut on_datagram: impl FnMut(SocketAddr, &mut [u8])) -> io::Result<bool> {
        let mut any = false;
        for _ in 0..BATCHES_A_TURN {
            let mut slices: [IoSliceMut<'_>; BATCH] = {
                let mut buffers = self.buffers.iter_mut();
                std::array::from_fn(|_| IoSliceMut::new(buffers.next().map_or(&mut [][..], |buffer| &mut buffer[..])))
            };
            let count = match self.state.recv((&self.socket).into(), &mut slices, &mut self.metas) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(any),
                // Nobody listens at some peer: that is for timeouts to find out.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => continue,
                Err(error) => return Err(error),
            };
            any = true;
            for (buffer, meta) in self.buffers.iter_mut().zip(&self.metas[..count]) {
                let joined = &mut buffer[..meta.len];
                joined.chunks_mut(meta.stride.max(1)).for_each(|datagram| on_datagram(meta.addr, datagram));
            }
            if count < BATCH {
                return Ok(any);
            }
        }
        Ok(any)
    }

    /// Sends what [`Transmit`] describes. What the system cannot send now is lost, like anything else on the way.
    pub fn send(&mut self, transmit: Transmit, contents: &[u8]) {
        let segment_size = (transmit.segment < contents.len()).then_some(transmit.segment);
        let datagrams = UdpTransmit { destination: transmit.to, ecn: None, contents, segment_size, src_ip: None };
        if self.state.try_send((&self.socket).into(), &datagrams).is_err() && segment_size.is_some() {
            // A path without GSO takes them one by one.
            for datagram in contents.chunks(transmit.segment) {
                let one = UdpTransmit { contents: datagram, segment_size: None, ..datagrams.clone() };
                if self.state.try_send((&self.socket).into(), &one).is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
