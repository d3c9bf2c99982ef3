//! The protocol's numbers and fixed-size parts, big-endian, as in `doc/proto.md` of the NBD project.

/// Bytes before and after a name in the first greeting.
pub const GREETING_MAGIC: &[u8; 8] = b"NBDMAGIC";
pub const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

pub const OPTION_HEADER_SIZE: usize = 16;
pub const REQUEST_SIZE: usize = 28;

/// Of the longest READ and WRITE: what a client may assume of a server that says nothing.
pub const REQUEST_MAX: u32 = 32 << 20;
/// Longest name of an export, by the protocol.
pub const NAME_MAX: usize = 4096;

pub mod handshake_flag {
    pub const FIXED_NEWSTYLE: u16 = 1;
    pub const NO_ZEROES: u16 = 2;
}

pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

pub mod option_reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUP: u32 = 0x8000_0001;
    pub const ERR_INVALID: u32 = 0x8000_0003;
    pub const ERR_UNKNOWN: u32 = 0x8000_0006;
}

pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const BLOCK_SIZE: u16 = 3;
}

pub mod export_flag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// What the disk can do, whatever was agreed on.
pub const EXPORT_FLAGS: u16 = export_flag::HAS_FLAGS
    | export_flag::SEND_FLUSH
    | export_flag::SEND_FUA
    | export_flag::SEND_TRIM
    | export_flag::SEND_WRITE_ZEROES
    | export_flag::CAN_MULTI_CONN
    | export_flag::SEND_FAST_ZERO;

/// What a disk can do that is only read.
pub const READ_ONLY_FLAGS: u16 =
    export_flag::HAS_FLAGS | export_flag::READ_ONLY | export_flag::SEND_FLUSH | export_flag::CAN_MULTI_CONN;

pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

pub mod command_flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 2;
    pub const DF: u16 = 4;
    pub const REQ_ONE: u16 = 8;
    pub const FAST_ZERO: u16 = 16;
}

pub mod chunk {
    pub const DONE: u16 = 1;
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = 0x8001;
}

/// The only metadata context, and its number.
pub const BASE_ALLOCATION: &str = "base:allocation";
pub const BASE_ALLOCATION_ID: u32 = 1;
/// State of an extent: a hole that reads as zeros.
pub const STATE_HOLE_ZERO: u32 = 3;
pub const STATE_DATA: u32 = 0;

/// The protocol's error numbers, which are Linux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errno {
    NotPermitted = 1,
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
    NotSupported = 95,
    Shutdown = 108,
}

/// The fixed part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length: u32,
}

impl RequestHeader {
    /// `None` if it does not begin as a request does.
    pub fn decode(bytes: &[u8; REQUEST_SIZE]) -> Option<RequestHeader> {
        let mut reader = Reader(bytes);
        (reader.u32()? == REQUEST_MAGIC).then_some(())?;
        Some(RequestHeader {
            flags: reader.u16()?,
            command: reader.u16()?,
            cookie: reader.u64()?,
            offset: reader.u64()?,
            length: reader.u32()?,
        })
    }

    /// As a client sends it.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out.extend_from_slice(&self.flags.to_be_bytes());
        out.extend_from_slice(&self.command.to_be_bytes());
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.offset.to_be_bytes());
        out.extend_from_slice(&self.length.to_be_bytes());
    }
}

/// An answer without structure: to anything but READ and BLOCK_STATUS, and to READ where no structure was agreed on.
pub fn simple_reply(out: &mut Vec<u8>, cookie: u64, error: Option<Errno>) {
    out.extend_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&error.map_or(0, |error| error as u32).to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
}

/// The head of a structured answer of one chunk, which `length` bytes follow.
pub fn chunk_header(out: &mut Vec<u8>, cookie: u64, kind: u16, length: u32) {
    out.extend_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&chunk::DONE.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
}

/// A structured answer that says what is wrong.
pub fn chunk_error(out: &mut Vec<u8>, cookie: u64, error: Errno) {
    chunk_header(out, cookie, chunk::ERROR, 6);
    out.extend_from_slice(&(error as u32).to_be_bytes());
    out.extend_from_slice(&0_u16.to_be_bytes());
}

/// Takes numbers and strings off the front; `None` where nothing is left.
#[derive(Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Four bytes of length, then so many bytes of text.
    pub fn text(&mut self) -> Option<&'a [u8]> {
        let length = self.u32()?;
        self.bytes(usize::try_from(length).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_replies_have_the_bytes_of_the_protocol() {
        let header = RequestHeader { flags: 1, command: 1, cookie: 2, offset: 3 << 32, length: 4096 };
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        assert_eq!(bytes[..12], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1, 0, 0, 0, 0]);
        let bytes: [u8; REQUEST_SIZE] = bytes.try_into().unwrap();
        assert_eq!(RequestHeader::decode(&bytes), Some(header));
        assert_eq!(RequestHeader::decode(&[0; REQUEST_SIZE]), None);
        let mut reply = Vec::new();
        simple_reply(&mut reply, 7, Some(Errno::NoSpace));
        assert_eq!(reply, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0, 7]);
        reply.clear();
        chunk_error(&mut reply, 7, Errno::Io);
        assert_eq!(reply[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0x80, 1]);
        assert_eq!(reply[16..], [0, 0, 0, 6, 0, 0, 0, 5, 0, 0]);
    }

    #[test]
    fn a_reader_never_reads_beyond_its_end() {
        let mut reader = Reader(&[0, 0, 0, 9, 1]);
        assert_eq!(reader.text(), None);
        assert_eq!(Reader(&[0, 0, 0, 1, 7]).text(), Some(&[7][..]));
        assert_eq!(Reader(&[1]).u16(), None);
    }
}
