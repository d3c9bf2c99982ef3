//! What is known of a link and of a guest's writes, from the rounds so far.

use std::collections::VecDeque;
use std::time::Duration;

use pagoda_core::units::{Bytes, PageCount};

use super::settings::{PROGRESS_PART, STALL_ROUNDS};
use crate::units::Rate;

/// Fewer bytes say little of a link: most of their time is the answer's.
const RATE_BYTES_MIN: Bytes = Bytes::from_mib(1);
/// What went over the link before the last so many bytes counts no more.
const RATE_WINDOW: Bytes = Bytes::from_mib(16);
const MILLE: u64 = 1000;

/// Bytes of which the destination has said that it has them, and how long the link was busy with them.
#[derive(Clone, Copy, Debug)]
struct Delivered {
    bytes: Bytes,
    span: Duration,
}

/// A round, looked at when what was written meanwhile is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundFacts {
    pub left: PageCount,
    pub written: PageCount,
    pub span: Duration,
}

#[derive(Clone, Debug)]
pub(super) struct Estimate {
    /// What the link carries. Bytes that went into a socket may still be in buffers, so only those count that have been acknowledged.
    rate: Option<Rate>,
    delivered: VecDeque<Delivered>,
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
            delivered: VecDeque::new(),
            left_by_compression: [MILLE; 2],
            written: Rate(0),
            low: None,
            before: None,
            last: None,
            rounds_since_low: 0,
            rounds_since_near: 0,
        }
    }

    /// Compression has made the pages of a round smaller by `saved`, to `bytes`.
    pub fn compressed(&mut self, bytes: Bytes, saved: Bytes) {
        if bytes >= RATE_BYTES_MIN || self.delivered.is_empty() {
            let part = (bytes.0.saturating_mul(MILLE)).div_ceil((bytes.0 + saved.0).max(1));
            self.left_by_compression = [self.left_by_compression[1], part.clamp(1, MILLE)];
        }
    }

    /// The destination has so many bytes more, with which the link was busy for so long.
    pub fn delivered(&mut self, bytes: Bytes, span: Duration) {
        if bytes < RATE_BYTES_MIN && self.rate.is_some() {
            return;
        }
        self.delivered.push_back(Delivered { bytes, span });
        let mut total: u64 = self.delivered.iter().map(|delivered| delivered.bytes.0).sum();
        while let Some(oldest) = self.delivered.front().filter(|oldest| total - oldest.bytes.0 >= RATE_WINDOW.0) {
            total -= oldest.bytes.0;
            self.delivered.pop_front();
        }
        let span = self.delivered.iter().map(|delivered| delivered.span).sum();
        self.rate = Rate::of_floor(Bytes(total), span).filter(|rate| rate.0 > 0).or(self.rate);
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
