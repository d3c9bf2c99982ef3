//! How the process that serves hands files' memory to the one that keeps it: a packet with what to do and the file's number, and its
//! memory beside it unless the file is gone. The packet says which of the two it is: the kernel drops a descriptor for which the receiver has
//! no room, and delivers the rest. In the other direction go the ends of each new transmitter's sockets.
//!
//! What was sent arrives, also if the sender has been killed since.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pagoda_outbox::Ino;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use crate::link::{ENDS, Ends};

/// What to do, and the file's number.
const PACKET_BYTES: usize = 9;
const KEEP: u8 = 1;
const FORGET: u8 = 2;
const TRANSMITTER: u8 = 3;
/// Descriptors beside a packet.
const FDS_MAX: usize = ENDS;

#[derive(Debug)]
pub struct Line(OwnedFd);

/// What the keeper is told.
#[derive(Debug)]
pub enum Told {
    Keep(Ino, OwnedFd),
    /// Nothing of it is needed any more.
    Forget(Ino),
    /// The process has ended, or says something else; or memory came that there is no descriptor for.
    Ended,
}

impl Line {
    /// The end of the process that serves, and that of the keeper.
    pub fn pair() -> io::Result<(Line, Line)> {
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Line(one), Line(other)))
    }

    pub fn keep(&self, ino: Ino, memory: BorrowedFd<'_>) -> io::Result<()> {
        self.send(KEEP, ino.0, &[memory], SendFlags::empty())
    }

    pub fn forget(&self, ino: Ino) -> io::Result<()> {
        self.send(FORGET, ino.0, &[], SendFlags::empty())
    }

    /// To the process that serves: its ends of another transmitter's sockets. Does not wait.
    ///
    /// # Errors
    /// It has not taken those of many others.
    pub fn hand_over(&self, ends: &Ends) -> io::Result<()> {
        self.send(TRANSMITTER, 0, &ends.fds(), SendFlags::DONTWAIT)
    }

    /// Waits for the ends of the next transmitter's sockets. `None`: the keeper is gone.
    pub fn next_transmitter(&self) -> io::Result<Option<Ends>> {
        let Some((TRANSMITTER, _, fds)) = self.receive()? else { return Ok(None) };
        let [calls, bell, signs] = <[OwnedFd; ENDS]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Some(Ends { calls, bell, signs }))
    }

    pub fn try_clone(&self) -> io::Result<Line> {
        Ok(Line(self.0.try_clone()?))
    }

    fn send(&self, what: u8, number: u64, fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let [n0, n1, n2, n3, n4, n5, n6, n7] = number.to_le_bytes();
        let bytes: [u8; PACKET_BYTES] = [what, n0, n1, n2, n3, n4, n5, n6, n7];
        let flags = flags | SendFlags::NOSIGNAL;
        rustix::io::retry_on_intr(|| sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut beside, flags))?;
        Ok(())
    }

    /// Waits for the next packet from the process that serves.
    pub fn hear(&self) -> io::Result<Told> {
        let Some((what, ino, mut fds)) = self.receive()? else { return Ok(Told::Ended) };
        Ok(match (what, fds.pop(), fds.is_empty()) {
            (KEEP, Some(memory), true) => Told::Keep(Ino(ino), memory),
            (FORGET, None, _) => Told::Forget(Ino(ino)),
            _ => Told::Ended,
        })
    }

    /// What to do, a number, and descriptors. `None`: the other side has ended, or says something else.
    fn receive(&self) -> io::Result<Option<(u8, u64, Vec<OwnedFd>)>> {
        let mut bytes = [0; PACKET_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = rustix::io::retry_on_intr(|| recvmsg(&self.0, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC));
        let count = match received {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => return Err(error.into()),
        };
        let mut fds = Vec::new();
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                fds.extend(came);
            }
        }
        let [what, number @ ..] = bytes;
        Ok((count == PACKET_BYTES).then(|| (what, u64::from_le_bytes(number), fds)))
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn what_was_sent_arrives_after_its_sender_is_gone() {
        let (serves, keeps) = Line::pair().unwrap();
        let memory = File::from(rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        memory.write_all_at(b"bytes", 0).unwrap();
        serves.keep(Ino(7), memory.as_fd()).unwrap();
        serves.forget(Ino(7)).unwrap();
        drop((serves, memory));
        let Told::Keep(Ino(7), kept) = keeps.hear().unwrap() else { panic!() };
        let mut bytes = [0; 5];
        File::from(kept).read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"bytes");
        assert!(matches!(keeps.hear().unwrap(), Told::Forget(Ino(7))));
        assert!(matches!(keeps.hear().unwrap(), Told::Ended));
        assert!(keeps.next_transmitter().unwrap().is_none());
    }

    #[test]
    fn ends_of_a_transmitters_sockets_arrive() {
        let (serves, keeps) = Line::pair().unwrap();
        let (theirs, ours) = crate::link::pair().unwrap();
        keeps.hand_over(&ours).unwrap();
        drop(ours);
        let came = serves.try_clone().unwrap().next_transmitter().unwrap().unwrap();
        rustix::net::send(&came.calls, b"calls", SendFlags::empty()).unwrap();
        rustix::net::send(&came.bell, b"bell", SendFlags::empty()).unwrap();
        let mut bytes = [0; 9];
        assert_eq!(rustix::net::recv(&theirs.calls, &mut bytes[..], RecvFlags::empty()).unwrap().0, 5);
        assert_eq!(rustix::net::recv(&theirs.bell, &mut bytes[..], RecvFlags::empty()).unwrap().0, 4);
        // A process that serves and takes none is not waited for.
        let (_, more) = crate::link::pair().unwrap();
        assert!((0..100_000).any(|_| keeps.hand_over(&more).is_err()));
    }

    #[test]
    fn memory_that_did_not_come_is_not_forgotten() {
        let (serves, keeps) = Line::pair().unwrap();
        // As the kernel delivers it to a process that may have no more descriptors.
        serves.send(KEEP, 7, &[], SendFlags::empty()).unwrap();
        assert!(matches!(keeps.hear().unwrap(), Told::Ended));
    }
}
