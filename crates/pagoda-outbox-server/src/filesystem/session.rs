//! What the guest's kernel and the file server agreed on at the mount, said again to the file server of another process. The
//! guest says it once and knows nothing of processes.

use std::io;

use virtiofsd::fuse::{InHeader, InitInCompat, InitInExt, KERNEL_MINOR_VERSION, KERNEL_VERSION, Opcode};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use crate::chain::{DATA, OwnRing, Part, WRITE};

/// Where the answer goes.
const ANSWER: u64 = DATA + 0x1000;
const ANSWER_BYTES: u32 = 0x1000;

/// The request of a guest that can do what these bits say (`flags` and `flags2` of FUSE_INIT).
pub fn request(capable: u64) -> io::Result<OwnRing> {
    let length = size_of::<InHeader>() + size_of::<InitInCompat>() + size_of::<InitInExt>();
    let header = InHeader { len: length as u32, opcode: Opcode::Init as u32, unique: 1, ..InHeader::default() };
    let init =
        InitInCompat { major: KERNEL_VERSION, minor: KERNEL_MINOR_VERSION, max_readahead: 0, flags: capable as u32 };
    let more = InitInExt { flags2: (capable >> 32) as u32, ..InitInExt::default() };
    let bytes = [header.as_slice(), init.as_slice(), more.as_slice()].concat();
    let ring = OwnRing::new(&[
        Part { address: DATA, length: length as u32, flags: 0 },
        Part { address: ANSWER, length: ANSWER_BYTES, flags: WRITE },
    ])?;
    ring.memory.write_slice(&bytes, GuestAddress(DATA)).map_err(io::Error::other)?;
    Ok(ring)
}
