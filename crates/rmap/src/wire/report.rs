//! What a server says of itself when it is asked.

use super::fields::{Malformed, u32_at, u64_at};

/// Bytes of a report.
pub const REPORT_SIZE: usize = 48;
/// Of the flags, the only one there is.
const DRAINING: u32 = 1;

/// How a server is. Counts begin with its life, and so does its time: rates come from two reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Slabs that it lends, and those of them that somebody has.
    pub slabs: u32,
    pub held: u32,
    /// Spaces that have slabs here.
    pub spaces: u32,
    pub sessions: u32,
    /// Pages that were read, and pages that were written or trimmed.
    pub reads: u64,
    pub writes: u64,
    pub uptime_ms: u64,
    /// It wants its slabs moved elsewhere, and gives none away: it is about to end.
    pub draining: bool,
}

impl Report {
    pub fn encode(&self) -> [u8; REPORT_SIZE] {
        let mut bytes = [0; REPORT_SIZE];
        let words = [self.slabs, self.held, self.spaces, self.sessions];
        for (field, word) in bytes.chunks_exact_mut(4).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        for (field, word) in bytes[16..].chunks_exact_mut(8).zip([self.reads, self.writes, self.uptime_ms]) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        let flags = if self.draining { DRAINING } else { 0 };
        bytes[40..44].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    /// # Errors
    /// Another length, or a flag that does not exist.
    pub fn decode(bytes: &[u8]) -> Result<Report, Malformed> {
        if bytes.len() != REPORT_SIZE {
            return Err(Malformed("not the length of a report"));
        }
        if u32_at(bytes, 40) > DRAINING || u32_at(bytes, 44) != 0 {
            return Err(Malformed("unknown flag in a report"));
        }
        Ok(Report {
            slabs: u32_at(bytes, 0),
            held: u32_at(bytes, 4),
            spaces: u32_at(bytes, 8),
            sessions: u32_at(bytes, 12),
            reads: u64_at(bytes, 16),
            writes: u64_at(bytes, 24),
            uptime_ms: u64_at(bytes, 32),
            draining: u32_at(bytes, 40) == DRAINING,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Changing this is changing the protocol.
    #[test]
    fn golden() {
        let report =
            Report { slabs: 1, held: 2, spaces: 3, sessions: 4, reads: 5, writes: 6, uptime_ms: 7, draining: true };
        let bytes = report.encode();
        let words: Vec<u8> = bytes.chunks(4).map(|word| word[0]).collect();
        assert_eq!(words, [1, 2, 3, 4, 5, 0, 6, 0, 7, 0, 1, 0]);
        assert_eq!(Report::decode(&bytes), Ok(report));
        assert_eq!(Report::decode(&Report::default().encode()), Ok(Report::default()));
        for at in [40, 41, 44, 47] {
            let mut bad = bytes;
            bad[at] = 2;
            assert!(Report::decode(&bad).is_err(), "byte {at}");
        }
        assert!(Report::decode(&bytes[1..]).is_err());
    }
}
