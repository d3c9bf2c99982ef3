//! One message of vhost-user on its socket: a header, what follows it, and descriptors.
//!
//! From QEMU, which may be in its guest's hands, and from the process that serves, which may be as well. Lengths are bounded.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

const HEADER_BYTES: usize = 12;
/// As the library that answers has it.
const PAYLOAD_BYTES_MAX: usize = 0x1000;
const DESCRIPTORS_MAX: usize = 32;
/// Of the flags: the protocol's version.
const VERSION: u32 = 1;
/// Of the flags: the other side is to answer in any case.
pub const NEED_REPLY: u32 = 1 << 3;

/// Kinds of messages that are looked at here. All others are passed on as they are.
pub mod kind {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

#[derive(Debug)]
pub struct Message {
    pub kind: u32,
    pub flags: u32,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// A question without anything else.
    pub fn ask(kind: u32) -> Message {
        Message { kind, flags: VERSION, payload: Vec::new(), fds: Vec::new() }
    }

    /// Whether the other side answers it.
    pub fn has_answer(&self) -> bool {
        let asks = [
            kind::GET_FEATURES,
            kind::GET_PROTOCOL_FEATURES,
            kind::GET_VRING_BASE,
            kind::GET_QUEUE_NUM,
            kind::GET_MAX_MEM_SLOTS,
        ];
        asks.contains(&self.kind) || self.flags & NEED_REPLY != 0
    }

    /// The 32 bits at this offset, or 0.
    pub fn word(&self, at: usize) -> u32 {
        let bytes = self.payload.get(at..).and_then(|rest| rest.first_chunk::<4>());
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    /// The same message without a wish for an answer.
    pub fn again(&self) -> io::Result<Message> {
        let fds: io::Result<Vec<OwnedFd>> = self.fds.iter().map(OwnedFd::try_clone).collect();
        Ok(Message { kind: self.kind, flags: self.flags & !NEED_REPLY, payload: self.payload.clone(), fds: fds? })
    }
}

/// `None`: the other side is gone.
pub fn receive(mut socket: &UnixStream) -> io::Result<Option<Message>> {
    let mut header = [0; HEADER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut header)];
    let received = rustix::io::retry_on_intr(|| recvmsg(socket, &mut parts, &mut beside, RecvFlags::CMSG_CLOEXEC));
    let count = match received {
        Ok(received) => received.bytes,
        Err(rustix::io::Errno::CONNRESET) => 0,
        Err(error) => return Err(error.into()),
    };
    let fds = beside.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
        _ => Vec::new(),
    });
    let fds: Vec<OwnedFd> = fds.collect();
    if count == 0 {
        return Ok(None);
    }
    socket.read_exact(&mut header[count..])?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let length = word(8) as usize;
    if length > PAYLOAD_BYTES_MAX {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut payload = vec![0; length];
    socket.read_exact(&mut payload)?;
    Ok(Some(Message { kind: word(0), flags: word(4), payload, fds }))
}

pub fn send(mut socket: &UnixStream, message: &Message) -> io::Result<()> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + message.payload.len());
    for word in [message.kind, message.flags, message.payload.len() as u32] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(&message.payload);
    let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let sent =
        rustix::io::retry_on_intr(|| sendmsg(socket, &[IoSlice::new(&bytes)], &mut beside, SendFlags::NOSIGNAL))?;
    socket.write_all(&bytes[sent..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_as_they_go() {
        let (one, other) = UnixStream::pair().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![OwnedFd::from(null.try_clone().unwrap()), OwnedFd::from(null)];
        let sent = Message { kind: kind::SET_MEM_TABLE, flags: 1 | NEED_REPLY, payload: vec![1, 2, 3, 4, 5], fds };
        assert!(sent.has_answer());
        send(&one, &sent).unwrap();
        send(&one, &sent.again().unwrap()).unwrap();
        let came = receive(&other).unwrap().unwrap();
        assert_eq!((came.kind, came.flags, came.fds.len()), (kind::SET_MEM_TABLE, 1 | NEED_REPLY, 2));
        assert_eq!((came.payload, came.kind), (sent.payload.clone(), sent.kind));
        let again = receive(&other).unwrap().unwrap();
        assert!(!again.has_answer() && again.word(0) == 0x0403_0201 && again.word(2) == 0);
        drop(one);
        assert!(receive(&other).unwrap().is_none());
    }

    #[test]
    fn a_length_beyond_all_is_refused() {
        let (mut one, other) = UnixStream::pair().unwrap();
        one.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0, 0]).unwrap();
        assert!(receive(&other).is_err());
    }
}
