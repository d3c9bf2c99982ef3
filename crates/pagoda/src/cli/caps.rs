//! Amounts of memory that a VM may have, as the command line says them.

use crate::units::{format_exact, parse_size};

/// A DRAM cap on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DramLimit {
    All,
    Bytes(u64),
}

impl DramLimit {
    /// The cap of a VM of `memory_bytes`.
    pub fn of(self, memory_bytes: u64) -> u64 {
        match self {
            Self::All => memory_bytes,
            Self::Bytes(bytes) => bytes,
        }
    }

    /// The value as the option takes it: `all`, or the exact size.
    pub fn word(self) -> String {
        match self {
            Self::All => "all".to_owned(),
            Self::Bytes(bytes) => format_exact(bytes),
        }
    }
}

pub fn dram(text: &str) -> Result<DramLimit, String> {
    if text == "all" { Ok(DramLimit::All) } else { parse_size(text).map(DramLimit::Bytes) }
}

/// A balloon target on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BalloonTarget {
    Off,
    Bytes(u64),
}

pub fn balloon_target(text: &str) -> Result<BalloonTarget, String> {
    if text == "off" { Ok(BalloonTarget::Off) } else { parse_size(text).map(BalloonTarget::Bytes) }
}
