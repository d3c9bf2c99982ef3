//! The outermost layer: what kind of datagram, for which session, and its counter.

use super::fields::{Malformed, u32_at, u64_at};
pub use super::sizes::DATAGRAM_HEADER_SIZE as HEADER_SIZE;
use super::sizes::{DATAGRAM_MAX, MESSAGE_HEADER_SIZE, TAG_SIZE};

/// A hello is padded to this, so that no answer to it is larger than it.
pub const HELLO_SIZE: usize = 256;
/// Code that shows knowledge of the pool's key before anything expensive is done.
pub const MAC_SIZE: usize = 16;
/// Noise IKpsk1, first message: ephemeral key, encrypted static key, encrypted payload.
pub const NOISE_HELLO_SIZE: usize = 32 + 48 + HELLO_PAYLOAD_SIZE + TAG_SIZE;
/// Noise IKpsk1, second message: ephemeral key, encrypted payload.
pub const NOISE_ACCEPT_SIZE: usize = 32 + ACCEPT_PAYLOAD_SIZE + TAG_SIZE;
/// The hello's own payload, which is reserved: all zeros.
pub const HELLO_PAYLOAD_SIZE: usize = 8;
/// Boot epoch, server, pages per slab, write credits.
pub const ACCEPT_PAYLOAD_SIZE: usize = 24;
/// Header and Noise message.
pub const ACCEPT_SIZE: usize = HEADER_SIZE + NOISE_ACCEPT_SIZE;
/// Bytes of a refusal: header and code.
pub const REFUSE_SIZE: usize = HEADER_SIZE + MAC_SIZE;

/// The first byte of a hello.
pub const HELLO: u8 = 1;
/// Where the receiver's number of a session is, four bytes, little-endian.
pub const RECEIVER_AT: usize = 4;

const ACCEPT: u8 = 2;
const REFUSE: u8 = 3;
const DATA: u8 = 4;

/// Which versions the sender of a hello or a refusal speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    pub min: u8,
    pub max: u8,
}

/// A datagram by its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// A client wants a session. `sender` is what it will be called by.
    Hello { versions: Versions, sender: u32 },
    /// A server agrees. `receiver` echoes the hello's sender.
    Accept { version: u8, receiver: u32, sender: u32 },
    /// A server cannot: no common version.
    Refuse { versions: Versions, receiver: u32 },
    /// A fragment of a message, encrypted. `epoch` is the low byte of the key's number.
    Data { version: u8, epoch: u8, receiver: u32, counter: u64 },
}

impl Head {
    pub fn encode(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        let (first, receiver, rest) = match self {
            Head::Hello { versions, sender } => ([HELLO, versions.min, versions.max], 0, u64::from(sender)),
            Head::Accept { version, receiver, sender } => ([ACCEPT, version, 0], receiver, u64::from(sender)),
            Head::Refuse { versions, receiver } => ([REFUSE, versions.min, versions.max], receiver, 0),
            Head::Data { version, epoch, receiver, counter } => ([DATA, version, epoch], receiver, counter),
        };
        bytes[..3].copy_from_slice(&first);
        bytes[RECEIVER_AT..][..4].copy_from_slice(&receiver.to_le_bytes());
        bytes[8..].copy_from_slice(&rest.to_le_bytes());
        bytes
    }

    /// # Errors
    /// An unknown kind, or a size that its kind cannot have.
    pub fn decode(datagram: &[u8]) -> Result<Head, Malformed> {
        if datagram.len() < HEADER_SIZE {
            return Err(Malformed("shorter than a header"));
        }
        let versions = Versions { min: datagram[1], max: datagram[2] };
        let (receiver, rest) = (u32_at(datagram, RECEIVER_AT), u64_at(datagram, 8));
        if datagram[3] != 0 {
            return Err(Malformed("reserved byte"));
        }
        let fits = match datagram[0] {
            HELLO => datagram.len() == HELLO_SIZE,
            ACCEPT => datagram.len() == ACCEPT_SIZE,
            REFUSE => datagram.len() == REFUSE_SIZE,
            DATA => (HEADER_SIZE + MESSAGE_HEADER_SIZE + TAG_SIZE..=DATAGRAM_MAX).contains(&datagram.len()),
            _ => return Err(Malformed("unknown kind of datagram")),
        };
        if !fits {
            return Err(Malformed("a size that its kind does not have"));
        }
        let sender = || u32::try_from(rest).map_err(|_| Malformed("reserved bytes"));
        match datagram[0] {
            HELLO => Ok(Head::Hello { versions, sender: sender()? }),
            ACCEPT => Ok(Head::Accept { version: datagram[1], receiver, sender: sender()? }),
            REFUSE => Ok(Head::Refuse { versions, receiver }),
            _ => Ok(Head::Data { version: datagram[1], epoch: datagram[2], receiver, counter: rest }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn heads_come_back() {
        let versions = Versions { min: 1, max: 3 };
        for (head, size) in [
            (Head::Hello { versions, sender: 7 }, HELLO_SIZE),
            (Head::Accept { version: 1, receiver: 7, sender: 9 }, ACCEPT_SIZE),
            (Head::Refuse { versions, receiver: 7 }, REFUSE_SIZE),
            (Head::Data { version: 1, epoch: 2, receiver: 9, counter: u64::MAX }, 1200),
        ] {
            let mut bytes = head.encode().to_vec();
            bytes.resize(size, 0);
            assert_eq!(Head::decode(&bytes), Ok(head));
            for wrong in [HEADER_SIZE - 1, 79, super::super::DATAGRAM_MAX + 1] {
                bytes.resize(wrong, 0);
                assert!(Head::decode(&bytes).is_err(), "{head:?} in {wrong} bytes");
            }
        }
    }

    /// Changing this is changing the protocol.
    #[test]
    fn golden() {
        let head = Head::Data { version: 1, epoch: 2, receiver: 0x0403_0201, counter: 0x0807_0605 };
        assert_eq!(head.encode(), [4, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(head) = Head::decode(&bytes) {
                prop_assert!(bytes.len() >= head.encode().len());
            }
        }
    }
}
