//! How the process that serves hands files' memory to the one that keeps it: a packet with what to do and the file's number, and its
//! memory beside it unless the file is gone. The packet says which of the two it is: the kernel drops a descriptor for which the receiver has
//! no room, and delivers the rest.
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

/// What to do, and the file's number.
const PACKET_BYTES: usize = 9;
const KEEP: u8 = 1;
const FORGET: u8 = 2;

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
        self.send(KEEP, ino, &[memory])
    }

    pub fn forget(&self, ino: Ino) -> io::Result<()> {
        self.send(FORGET, ino, &[])
    }

    fn send(&self, what: u8, ino: Ino, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let [n0, n1, n2, n3, n4, n5, n6, n7] = ino.0.to_le_bytes();
        let bytes: [u8; PACKET_BYTES] = [what, n0, n1, n2, n3, n4, n5, n6, n7];
        rustix::io::retry_on_intr(|| sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits for the next packet.
    pub fn hear(&self) -> io::Result<Told> {
        let mut bytes = [0; PACKET_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = rustix::io::retry_on_intr(|| recvmsg(&self.0, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC));
        let count = match received {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::CONNRESET) => 0,
            Err(error) => return Err(error.into()),
        };
        let fd = beside.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let [what, number @ ..] = bytes;
        let ino = Ino(u64::from_le_bytes(number));
        Ok(match (what, fd) {
            _ if count != PACKET_BYTES => Told::Ended,
            (KEEP, Some(memory)) => Told::Keep(ino, memory),
            (FORGET, None) => Told::Forget(ino),
            _ => Told::Ended,
        })
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
    }

    #[test]
    fn memory_that_did_not_come_is_not_forgotten() {
        let (serves, keeps) = Line::pair().unwrap();
        // As the kernel delivers it to a process that may have no more descriptors.
        serves.send(KEEP, Ino(7), &[]).unwrap();
        assert!(matches!(keeps.hear().unwrap(), Told::Ended));
    }
}
