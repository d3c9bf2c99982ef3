//! Between the transmitter, which speaks to clients, and the process that serves, which has the files.
//!
//! Two pairs of sockets. On the first (SOCK_SEQPACKET) the transmitter asks and waits for the answer: one packet each, a frame of
//! [`message::FRAME_BYTES`] and a tail of bounded length. `Acknowledge` and `Detach` have no answer. On the second the other side
//! says one byte, and does not wait: that a reader may have more ([`Told::More`]), or that QEMU has gone. Whether it says so, and whether
//! it is of any use to ask, is in memory that both have ([`signs`]). If a side says what cannot be, the other one ends the connection.
//!
//! Order: the send cursor is moved -> the answer says which bytes may be sent. The transmitter's process has ended -> its end of the
//! pair is closed -> its readers are detached. A file's memory goes beside the first bytes that a reader is given.
//!
//! If one of the two ends, clients lose their connections and ask again; the guest notices nothing.

pub mod answer;
pub mod client;
pub mod message;
mod request;
pub mod server;
mod signs;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use self::message::{PACKET_BYTES_MAX, Packet};

/// How many descriptors [`Ends`] are.
pub const ENDS: usize = 3;

/// What belongs to the transmitter, or to the process that serves.
#[derive(Debug)]
pub struct Ends {
    /// Carries questions and their answers.
    pub calls: OwnedFd,
    /// What is said without a question.
    pub bell: OwnedFd,
    /// The memory that [`signs`] are in.
    pub signs: OwnedFd,
}

/// What the process that serves says without being asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// Readers that wait may have more.
    More,
    /// QEMU has gone. Whoever reads what QEMU says waits until nobody else has its standard error.
    VmmGone,
}

impl Told {
    pub fn byte(self) -> u8 {
        match self {
            Told::More => 1,
            Told::VmmGone => 2,
        }
    }

    pub fn of(byte: u8) -> Option<Told> {
        [Told::More, Told::VmmGone].into_iter().find(|told| told.byte() == byte)
    }
}

/// The ends of the transmitter and of the process that serves.
pub fn pair() -> io::Result<(Ends, Ends)> {
    let pair = |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    let ((calls, served_calls), (bell, served_bell)) = (pair(SocketType::SEQPACKET)?, pair(SocketType::STREAM)?);
    let signs = signs::memory()?;
    let served = Ends { calls: served_calls, bell: served_bell, signs: signs.try_clone()? };
    Ok((Ends { calls, bell, signs }, served))
}

/// One packet, with a file's memory beside it.
fn send(socket: &OwnedFd, packet: &Packet, memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if let Some(memory) = &memory
        && !beside.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(memory)))
    {
        return Err(ErrorKind::InvalidInput.into());
    }
    let frame = packet.frame();
    let parts = [IoSlice::new(&frame), IoSlice::new(packet.tail())];
    rustix::io::retry_on_intr(|| sendmsg(socket, &parts, &mut beside, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// Receives packets; this is its room for the longest one.
#[derive(Debug)]
struct Receiver(Box<[u8]>);

impl Receiver {
    fn new() -> Receiver {
        // A byte more than there may be, so that a longer packet is noticed.
        Receiver(vec![0; PACKET_BYTES_MAX + 1].into())
    }

    /// Waits for the next packet. `None`: the other side has gone.
    ///
    /// # Errors
    /// It is none of ours.
    fn receive(&mut self, socket: &OwnedFd) -> io::Result<Option<(Packet, Option<OwnedFd>)>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut self.0)];
        let received = rustix::io::retry_on_intr(|| recvmsg(socket, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC));
        let received = match received {
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            received => received?,
        };
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                fds.extend(came);
            }
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        let is_whole = !received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) && fds.len() <= 1;
        let packet = is_whole.then(|| Packet::of(&self.0[..received.bytes])).flatten();
        Ok(Some((packet.ok_or(ErrorKind::InvalidData)?, fds.pop())))
    }
}

impl Ends {
    pub fn fds(&self) -> [BorrowedFd<'_>; ENDS] {
        [self.calls.as_fd(), self.bell.as_fd(), self.signs.as_fd()]
    }
}
