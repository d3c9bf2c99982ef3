//! What the shim, the daemon, the command and the process of an outbox must agree on byte for byte.
//!
//! * [`attach`]: packets on the attach socket (the shim, `pagoda run` and `pagoda-outbox` to the daemon).
//! * [`shared`]: the page table's companion in shared memory, one per VM. It outlives the daemon,
//!   because the shim keeps it mapped.
//! * [`template`]: the memory that clones of a snapshot read.
//!
//! Nothing here does I/O or knows policy. Every number that crosses a process boundary is little-endian and has a
//! cap; a reader that meets an unknown version refuses, it never guesses.

pub mod attach;
pub mod shared;
pub mod template;

/// Version of everything in this crate. A shim and a daemon of different versions refuse each other, except
/// that a daemon accepts every version from [`ABI_VERSION_OLDEST`] on, so it can be upgraded under running VMs.
pub const ABI_VERSION: u16 = 1;
/// Oldest shim a daemon of this version still serves.
pub const ABI_VERSION_OLDEST: u16 = 1;

/// Size of a page in bytes. Pagoda manages memory in the base pages of x86-64.
pub const PAGE_SIZE: usize = 4096;
/// Pages in a chunk (VMemDirect section 4.1: 256-page chunks).
pub const CHUNK_PAGES: usize = 256;
/// Bytes in a chunk.
pub const CHUNK_SIZE: usize = CHUNK_PAGES * PAGE_SIZE;
/// RAM regions of one VM: one for each guest NUMA node. Eight nodes cover every host QEMU models by default.
pub const REGIONS_MAX: usize = 8;
/// userfaultfds of one VM: the fd limit of one `SCM_RIGHTS` packet (253, unix(7)) leaves room; past a few per VM the
/// wait-queue lock no longer shows.
pub const UFFDS_MAX: usize = 16;
/// A region's length and address are multiples of this, so that the kernel can map it by huge pages.
pub const REGION_ALIGN: u64 = 2 << 20;

/// Where a VMM finds its RAM: this path and the number of the region, one digit. Nothing is there. The shim answers for
/// it, so a program without the shim cannot open it, and cannot make it either, for nobody makes files in /proc.
pub const RAM_PATH: &str = "/proc/pagoda-shim/ram";

/// The secret by which a VMM proves which VM it is. Known to the daemon and to the VM's owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// Reads 32 hexadecimal digits; `None` for anything else.
    pub fn from_hex(text: &str) -> Option<Token> {
        let bytes = text.as_bytes();
        if bytes.len() != 32 {
            return None;
        }
        let mut token = [0u8; 16];
        for (i, pair) in bytes.chunks(2).enumerate() {
            let high = char::from(pair[0]).to_digit(16)?;
            let low = char::from(pair[1]).to_digit(16)?;
            token[i] = (high * 16 + low) as u8;
        }
        Some(Token(token))
    }

    /// The 32 hexadecimal digits that [`Token::from_hex`] reads.
    pub fn to_hex(self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }
}

impl std::fmt::Debug for Token {
    /// A token is a secret: logs show only its first byte.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token({:02x}..)", self.0[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_reads_what_it_writes_and_nothing_else() {
        let token = Token(*b"0123456789abcdef");
        assert_eq!(Token::from_hex(&token.to_hex()), Some(token));
        for bad in ["", "00", &"g".repeat(32), &"0".repeat(33)] {
            assert_eq!(Token::from_hex(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn token_stays_out_of_logs() {
        assert_eq!(format!("{:?}", Token([0xab; 16])), "Token(ab..)");
    }
}
