//! What is known of a link and of a guest's writes, from the rounds so far.

use std::time::Duration;

use pagoda_core::units::{Bytes, PageCount};

use super::settings::{PROGRESS_PART, STALL_ROUNDS};
use crate::units::Rate;

/// A round with less says little of a link: it may all have gone into buffers.
const RATE_BYTES_MIN: Bytes = Bytes::from_mib(1);
const MILLE: u64 = 1000;

/// A round, looked at when what was written meanwhile is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundFacts {
    pub left: PageCount,
    pub written: PageCount,
    pub span: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Estimate {
    /// What the link carries.
    rate: Option<Rate>,
    /// What compression leaves of pages, in thousandths, in the last two rounds that say something of the link.
    left_by_compression: [u64; 2],
    written: Rate,
    /// The least that was left after any round.
    low: Option<PageCount>,
    before: Option<PageCount>,
    last: Option<PageCount>,
    rounds_since_low: u32,
    /// Rounds since one left hardly more than that.
    rounds_since_near: u32,
}

impl Estimate {
    pub const fn new(rate: Option<Rate>) -> Estimate {
        Estimate {
            rate,
            left_by_compression: [MILLE; 2],
            written: Rate(0),
            low: None,
            before: None,
            last: None,
            rounds_since_low: 0,
            rounds_since_near: 0,
        }
    }

    /// So many bytes have gone over the link, which compression had made smaller by `saved`.
    pub fn sent(&mut self, bytes: Bytes, saved: Bytes, span: Duration) {
        if self.rate.is_none() || bytes >= RATE_BYTES_MIN {
            self.rate = Rate::of_floor(bytes, span).filter(|rate| rate.0 > 0).or(self.rate);
            let part = (bytes.0.saturating_mul(MILLE)).div_ceil((bytes.0 + saved.0).max(1));
            self.left_by_compression = [self.left_by_compression[1], part.clamp(1, MILLE)];
        }
    }

    /// Takes a round in. Whether it has come forward.
    pub fn end_round(&mut self, facts: RoundFacts) -> bool {
        self.written = Rate::of_floor(facts.written.bytes(), facts.span).unwrap_or(self.written);
        (self.before, self.last) = (self.last, Some(facts.left));
        let has_low = self.low.is_none_or(|low| facts.left.0 < low.0 - low.0 / PROGRESS_PART);
        if has_low {
            (self.low, self.rounds_since_low) = (Some(facts.left), 0);
        } else {
            self.rounds_since_low += 1;
        }
        let is_near = self.low.is_none_or(|low| facts.left.0 <= low.0 + low.0 / PROGRESS_PART);
        self.rounds_since_near = if is_near { 0 } else { self.rounds_since_near + 1 };
        has_low
    }

    pub const fn is_stalled(&self) -> bool {
        self.rounds_since_low >= STALL_ROUNDS
    }

    /// The last round left at most half of what the one before did.
    pub fn has_halved(&self) -> bool {
        match (self.before, self.last) {
            (Some(before), Some(last)) => last.0 <= before.0 / 2,
            // The first round has sent everything.
            _ => true,
        }
    }

    /// The last round left hardly more than the least there ever was, or that has not come again for long.
    pub const fn is_near_low(&self) -> bool {
        self.rounds_since_near == 0 || self.rounds_since_near >= 2 * STALL_ROUNDS
    }

    pub const fn rate(&self) -> Option<Rate> {
        self.rate
    }

    /// How fast pages go over the link, if they compress as those of the last two rounds that compressed worse.
    pub fn page_rate(&self) -> Option<Rate> {
        let part = self.left_by_compression.into_iter().max().unwrap_or(MILLE);
        let rate = u128::from(self.rate?.0) * u128::from(MILLE) / u128::from(part);
        Some(Rate(u64::try_from(rate).unwrap_or(u64::MAX)))
    }

    pub const fn written_rate(&self) -> Rate {
        self.written
    }

    /// How long it takes until nothing is left, if writes go on as they do. None if that never is.
    pub fn remaining(&self, left: PageCount) -> Option<Duration> {
        let rate = self.page_rate()?.0.checked_sub(self.written.0)?;
        Rate(rate).time_ceil(left.bytes())
    }
}
