//! Units of a move: moments, rates, and the numbers that tell owners, attempts, connections and rounds apart.
//!
//! Sizes and pages are those of `pagoda-core`. Every number is an integer. What divides says in its name how it rounds.

use std::fmt;
use std::num::NonZeroU64;
use std::ops::Add;
use std::time::Duration;

use pagoda_core::units::Bytes;

/// A moment of any steady clock, from a beginning that only its reader knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub Duration);

impl Moment {
    /// How long it is since `earlier`: nothing, if that is later.
    pub fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;
    fn add(self, span: Duration) -> Moment {
        Moment(self.0.saturating_add(span))
    }
}

/// Bytes in a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub u64);

impl Rate {
    /// The rate of so many bytes in so long. None where no time has passed.
    pub fn of_floor(bytes: Bytes, span: Duration) -> Option<Rate> {
        let rate = (u128::from(bytes.0) * NANOS).checked_div(span.as_nanos())?;
        Some(Rate(u64::try_from(rate).unwrap_or(u64::MAX)))
    }

    /// How long so many bytes take. None at a rate of 0, at which they never come.
    pub fn time_ceil(self, bytes: Bytes) -> Option<Duration> {
        if bytes == Bytes::ZERO {
            return Some(Duration::ZERO);
        }
        let nanos = (u128::from(bytes.0) * NANOS).div_ceil(u128::from(self.0).max(1));
        (self.0 > 0).then(|| Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    /// What comes in so long.
    pub fn bytes_floor(self, span: Duration) -> Bytes {
        let bytes = u128::from(self.0) * span.as_nanos() / NANOS;
        Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

const NANOS: u128 = 1_000_000_000;

/// The number of an ownership of a VM. A later owner has a larger one, so of two that claim a VM the larger is right.
///
/// A grant offers its destination the generation after the source's. A source that gets a grant back takes the one after that,
/// so no generation is ever offered twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl Generation {
    pub const fn next(self) -> Generation {
        Generation(self.0.checked_add(1).expect("2^64 owners"))
    }
}

/// The name of one attempt to move a VM: random bits that its source draws, never 0. What is late is told by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId(pub u64);

impl fmt::Debug for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AttemptId({self})")
    }
}

impl fmt::Display for AttemptId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A host by its public key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostKey(pub [u8; 32]);

impl fmt::Debug for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostKey({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// Registers of an arbiter: which ones, by a number that no others have. Hosts that know them by one number ask the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegisterId(pub NonZeroU64);

impl RegisterId {
    /// As it is in messages and notes, where 0 says that there are none.
    pub const fn of(number: u64) -> Option<RegisterId> {
        match NonZeroU64::new(number) {
            Some(number) => Some(RegisterId(number)),
            None => None,
        }
    }

    pub const fn number(id: Option<RegisterId>) -> u64 {
        match id {
            Some(RegisterId(number)) => number.get(),
            None => 0,
        }
    }
}

impl fmt::Display for RegisterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Counts the connections of one attempt, from 1. What an earlier connection still has in its buffers is not taken in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionNo(pub u32);

/// Counts the rounds of one attempt, from 0. The tail of a post-copy has the round after the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct RoundNo(pub u32);

impl RoundNo {
    pub const fn next(self) -> RoundNo {
        RoundNo(self.0.checked_add(1).expect("2^32 rounds"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_round_as_named() {
        let second = Duration::from_secs(1);
        assert_eq!(Rate::of_floor(Bytes(10), Duration::from_secs(3)), Some(Rate(3)));
        assert_eq!(Rate::of_floor(Bytes(10), Duration::ZERO), None);
        assert_eq!(Rate(3).time_ceil(Bytes(10)), Some(Duration::from_nanos(3_333_333_334)));
        assert_eq!((Rate(0).time_ceil(Bytes(1)), Rate(0).time_ceil(Bytes(0))), (None, Some(Duration::ZERO)));
        assert_eq!(Rate(3).bytes_floor(second / 2), Bytes(1));
        assert_eq!(Rate(u64::MAX).bytes_floor(second * 2), Bytes(u64::MAX));
        assert_eq!(Moment(second).since(Moment(second * 2)), Duration::ZERO);
    }
}
