//! What a completion of the ring is about: the key of a request.

use pagoda_core::fault::OpId;

use crate::tier::TierIdx;

/// What a request to the ring was for, and so what its completion means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A userfaultfd has messages.
    Uffd(u32),
    /// The agent's connection, of this generation.
    Agent(u32),
    /// A connection for the VMM's own calls.
    Calls(u32),
    /// Commands of the daemon.
    Wake,
    /// The VMM's pidfd is readable: it has ended.
    Exit,
    /// A mapper's connection, of this generation (24 bits).
    Mapper { slot: u8, generation: u32 },
    /// A mapper's userfaultfd has messages.
    MapperUffd(u32),
    /// The pidfd of the mapper in this slot is readable: it has ended.
    MapperExit(u32),
    /// The pidfd of a mapper's process that maps RAM.
    WorkerExit(u32),
    /// A tier's read or write for an operation ended.
    Io {
        /// The tier that the request belongs to.
        tier: TierIdx,
        /// The machine's operation that waits for the request.
        op: OpId,
    },
    /// A tier's own descriptor is readable.
    Tier(TierIdx),
}

impl Source {
    /// The number that the ring gives back.
    pub const fn key(self) -> u64 {
        let (tag, index) = match self {
            Source::Uffd(index) => (1, index),
            Source::Agent(index) => (2, index),
            Source::Calls(index) => (3, index),
            Source::Wake => (4, 0),
            Source::Exit => (5, 0),
            Source::Io { tier, op } => (6, (tier.0 as u32) << 16 | op.0 as u32),
            Source::Tier(tier) => (7, tier.0 as u32),
            Source::Mapper { slot, generation } => (8, (slot as u32) << 24 | generation & 0xff_ffff),
            Source::MapperUffd(slot) => (9, slot),
            Source::MapperExit(slot) => (10, slot),
            Source::WorkerExit(slot) => (11, slot),
        };
        (tag << 32) | index as u64
    }

    /// What a number means; `None`: nothing.
    pub fn of(key: u64) -> Option<Source> {
        let index = key as u32;
        Some(match key >> 32 {
            1 => Source::Uffd(index),
            2 => Source::Agent(index),
            3 => Source::Calls(index),
            4 => Source::Wake,
            5 => Source::Exit,
            6 => Source::Io { tier: TierIdx((index >> 16) as u8), op: OpId(index as u16) },
            7 => Source::Tier(TierIdx(index as u8)),
            8 => Source::Mapper { slot: (index >> 24) as u8, generation: index & 0xff_ffff },
            9 => Source::MapperUffd(index),
            10 => Source::MapperExit(index),
            11 => Source::WorkerExit(index),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_read_as_written() {
        let sources = [
            Source::Uffd(3),
            Source::Agent(7),
            Source::Calls(0),
            Source::Wake,
            Source::Exit,
            Source::Io { tier: TierIdx(0), op: OpId(u16::MAX) },
            Source::Io { tier: TierIdx(3), op: OpId(0) },
            Source::Tier(TierIdx(2)),
            Source::Mapper { slot: 3, generation: 0xff_ffff },
            Source::MapperUffd(1),
            Source::MapperExit(2),
            Source::WorkerExit(2),
        ];
        for source in sources {
            assert_eq!(Source::of(source.key()), Some(source));
        }
        assert_eq!(Source::of(0), None);
    }
}
