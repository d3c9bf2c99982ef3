//! Numbers that nobody can guess.

use std::fs::File;
use std::io::{self, Read};

/// 128 random bits of the kernel's.
///
/// # Errors
/// `/dev/urandom` cannot be read.
pub fn bytes() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
