//! How the process that serves hands files' memory to the one that keeps it: a packet with the file's number, and its memory
//! beside it, or none when the file is gone.
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

#[derive(Debug)]
pub struct Line(OwnedFd);

/// What the keeper is told.
#[derive(Debug)]
pub enum Told {
    Keep(Ino, OwnedFd),
    /// Nothing of it is needed any more.
    Forget(Ino),
    /// The process has ended, or says something else.
    Ended,
}

impl Line {
    /// The end of the process that serves, and that of the keeper.
    pub fn pair() -> io::Result<(Line, Line)> {
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Line(one), Line(other)))
    }

    pub fn keep(&self, ino: Ino, memory: BorrowedFd<'_>) -> io::Result<()> {
        self.send(ino, &[memory])
    }

    pub fn forget(&self, ino: Ino) -> io::Result<()> {
        self.send(ino, &[])
    }

    fn send(&self, ino: Ino, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = ino.0.to_le_bytes();
        rustix::io::retry_on_intr(|| sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits for the next packet.
    pub fn hear(&self) -> io::Result<Told> {
        let mut bytes = [0; 8];
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
        let ino = Ino(u64::from_le_bytes(bytes));
        Ok(match fd {
            _ if count != bytes.len() => Told::Ended,
            Some(memory) => Told::Keep(ino, memory),
            None => Told::Forget(ino),
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
}
