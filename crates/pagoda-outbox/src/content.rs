//! The bytes of one file: which there are, which have been sent, which have been given back.
//!
//! ```text
//! 0 ........ freed ........ cursor ........ size
//!   given back     may be sent     may still
//!                  again, never    change
//!                  changes
//! ```

use std::ops::Range;
use std::time::Duration;

use crate::codec::{Damaged, Decoder, Encoder};
use crate::delivery::Delivery;
use crate::limits::{EXTENTS_MAX, FILE_BYTES_MAX, PAGE_BYTES, WRITES_MAX, page_ceil, page_floor};
use crate::policy::{Mode, Policy, Ttl};
use crate::ranges::RangeSet;
use crate::refusal::Refusal;

/// How far a file has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Open,
    /// Closed after it had been written: nothing of it changes any more.
    Sealed,
    /// Its writer disappeared before the end.
    Broken,
}

/// What a write may do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes that may be written, from the write's offset on.
    pub bytes: u64,
    /// Bytes of pages that it adds.
    pub charge: u64,
}

#[derive(Debug, Clone)]
pub struct Content {
    size: u64,
    /// Send cursor: the end of the last byte that any reader was given.
    cursor: u64,
    /// Everything below was given back. Between two pages, or behind the last.
    freed: u64,
    state: State,
    /// Handles that may write.
    writers: usize,
    /// Pages that are charged, as bytes.
    charged: RangeSet,
    /// These writes are under way.
    writes: Vec<Range<u64>>,
    /// Bytes below the end that no write has reached. As long as somebody writes the file they may still come: the guest's
    /// kernel splits a large write, and its parts are carried out in any order.
    gaps: RangeSet,
    /// Its process took over from another one, whose writes were not all carried out: readers get nothing new.
    is_held: bool,
    /// The file is being given this size, if any.
    resize: Option<u64>,
    delivery: Delivery,
    /// When it was first seen to be sealed with nothing under way.
    sealed_since: Option<Duration>,
    pub policy: Policy,
}

impl Content {
    pub fn new(policy: Policy) -> Content {
        Content {
            size: 0,
            cursor: 0,
            freed: 0,
            state: State::Open,
            writers: 0,
            charged: RangeSet::default(),
            writes: Vec::new(),
            gaps: RangeSet::default(),
            is_held: false,
            resize: None,
            delivery: Delivery::new(policy.deliveries),
            sealed_since: None,
            policy,
        }
    }

    pub fn encode(&self, record: &mut Encoder) {
        record.number(self.size).number(self.cursor).number(self.freed / PAGE_BYTES).number(self.state as u64);
        self.policy.encode(record);
        self.delivery.encode(record);
        encode_ranges(&self.charged, PAGE_BYTES, record);
        encode_ranges(&self.gaps, 1, record);
    }

    /// Reads what was encoded, which has no writers and no writes under way.
    pub fn decode(from: &mut Decoder<'_>) -> Result<Content, Damaged> {
        let size = from.number_below(FILE_BYTES_MAX)?;
        let cursor = from.number_below(FILE_BYTES_MAX)?;
        let freed = from.number_below(FILE_BYTES_MAX / PAGE_BYTES)? * PAGE_BYTES;
        let state = match from.number()? {
            state if state == State::Open as u64 => State::Open,
            state if state == State::Sealed as u64 => State::Sealed,
            state if state == State::Broken as u64 => State::Broken,
            _ => return Err(Damaged("a file in an unknown state")),
        };
        let policy = Policy::decode(from)?;
        let delivery = Delivery::decode(policy.deliveries, cursor, from)?;
        let charged = decode_ranges(PAGE_BYTES, from)?;
        let gaps = decode_ranges(1, from)?;
        let is_gap_behind = gaps.bytes_within(&(size..u64::MAX)) > 0;
        if cursor > size || is_gap_behind || charged.bytes_within(&(0..freed)) > 0 {
            return Err(Damaged("a file that contradicts itself"));
        }
        Ok(Content { size, cursor, freed, state, delivery, charged, gaps, ..Content::new(policy) })
    }

    /// No write is under way any more, so nothing is behind the end. Gives the bytes of pages that are charged.
    pub fn trim(&mut self) -> u64 {
        self.charged.remove(&(page_ceil(self.size)..u64::MAX));
        self.charged.bytes()
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    pub fn freed(&self) -> u64 {
        self.freed
    }

    pub fn state(&self) -> State {
        self.state
    }

    pub fn charged_bytes(&self) -> u64 {
        self.charged.bytes()
    }

    /// Nobody writes it now, so what there is is all of it. A guest that obeys no rules closes a file while its writes are under way.
    pub fn is_complete(&self) -> bool {
        self.state != State::Broken && !self.is_held && self.is_idle()
    }

    pub fn is_published(&self) -> bool {
        self.policy.mode == Mode::Stream || self.is_complete()
    }

    /// Nothing of it is being changed, and nobody could begin to.
    pub fn is_idle(&self) -> bool {
        self.writers == 0 && self.writes.is_empty() && self.resize.is_none()
    }

    pub fn set_policy(&mut self, policy: Policy) -> Result<(), Refusal> {
        let how_sent = |policy: &Policy| (policy.mode, policy.deliveries);
        // If that is the same, what was delivered stays delivered.
        if how_sent(&policy) != how_sent(&self.policy) {
            if self.cursor > 0 {
                return Err(Refusal::BadPolicy);
            }
            self.delivery = Delivery::new(policy.deliveries);
        }
        self.policy = policy;
        Ok(())
    }

    /// # Errors
    /// Nothing may be written to it any more.
    pub fn check_writable(&self) -> Result<(), Refusal> {
        match self.state {
            State::Open => Ok(()),
            State::Sealed => Err(Refusal::Sealed),
            State::Broken => Err(Refusal::Broken),
        }
    }

    pub fn add_writer(&mut self) {
        self.writers += 1;
    }

    /// The last one of them seals the file. An empty file stays open: `touch` before the job must not keep it from writing.
    pub fn remove_writer(&mut self) {
        self.writers = self.writers.saturating_sub(1);
        if self.writers == 0 && self.size > 0 && self.state == State::Open {
            self.state = State::Sealed;
        }
    }

    /// A writer that the same request opens again at once: the file is not sealed.
    pub fn suspend_writer(&mut self) {
        self.writers = self.writers.saturating_sub(1);
    }

    /// The bytes of the file are gone, so it will never be whole.
    pub fn lose(&mut self) {
        self.state = State::Broken;
    }

    /// Until [`Content::let_go`] no reader is given more of a file that may still change.
    pub fn hold(&mut self) {
        self.is_held = self.state == State::Open;
    }

    pub fn let_go(&mut self) {
        self.is_held = false;
    }

    /// All writers have disappeared.
    pub fn abandon_writers(&mut self) -> bool {
        let had = self.writers > 0;
        self.writers = 0;
        if had && self.state == State::Open {
            self.state = State::Broken;
        }
        had
    }

    /// Whether it has been sealed for longer than it may stay. Its age counts from the first time that this is asked.
    pub fn is_expired(&mut self, now: Duration, default_ttl: Option<Duration>) -> bool {
        if self.state != State::Sealed || !self.is_idle() {
            return false;
        }
        let since = *self.sealed_since.get_or_insert(now);
        let ttl = match self.policy.ttl {
            Ttl::Default => default_ttl,
            Ttl::Never => None,
            Ttl::Seconds(seconds) => Some(Duration::from_secs(seconds.into())),
        };
        ttl.is_some_and(|ttl| now.saturating_sub(since) >= ttl)
    }

    /// All of it was delivered as often as it is to be.
    pub fn is_delivered(&self) -> bool {
        self.delivery.delivered_below() >= self.size
    }

    /// How much of `range` may be written, with `free` bytes of pages left. Nothing is changed.
    pub fn room(&self, range: &Range<u64>, free: u64) -> Result<Room, Refusal> {
        self.check_writable()?;
        self.check_change(range.start)?;
        if self.resize.is_some() || self.writes.len() >= WRITES_MAX {
            return Err(Refusal::Busy);
        }
        if range.end > FILE_BYTES_MAX {
            return Err(Refusal::TooLarge);
        }
        let pages = page_floor(range.start)..page_ceil(range.end);
        let missing = |end: u64| {
            let pages = pages.start..page_ceil(end);
            pages.end - pages.start - self.charged.bytes_within(&pages)
        };
        let mut end = range.end;
        if missing(end) > free {
            // The longest beginning of whole pages that fits. Pages there already cost nothing, so it is found page by page.
            end = range.start;
            while end < range.end {
                let next = (page_floor(end) + PAGE_BYTES).min(range.end);
                if missing(next) > free {
                    break;
                }
                end = next;
            }
            if end == range.start {
                return Err(Refusal::Full);
            }
        }
        // Of what will be written, not of what is wanted: a part may leave more pieces than the whole.
        let gaps = match range.start > self.size {
            true => self.gaps.pieces() + 1,
            false => self.gaps.pieces_without(&(range.start..end)),
        };
        if self.charged.pieces_with(&(pages.start..page_ceil(end))) > EXTENTS_MAX
            || (gaps > self.gaps.pieces() && gaps + self.writes.len() > EXTENTS_MAX)
        {
            return Err(Refusal::TooScattered);
        }
        Ok(Room { bytes: end - range.start, charge: missing(end) })
    }

    /// The write of `range` begins. Its pages are charged.
    pub fn begin_write(&mut self, range: Range<u64>) {
        self.charged.insert(page_floor(range.start)..page_ceil(range.end));
        self.writes.push(range);
    }

    /// That write has ended; `written` bytes of it are there. Pages stay charged even if they were not written, for the
    /// kernel may have allocated them.
    pub fn complete_write(&mut self, range: &Range<u64>, written: u64) {
        let Some(at) = self.writes.iter().position(|write| write == range) else { return };
        self.writes.swap_remove(at);
        if written > 0 {
            let done = range.start..range.start + written.min(range.end - range.start);
            self.gaps.insert(self.size..done.start);
            self.gaps.remove(&done);
            self.size = self.size.max(done.end);
        }
    }

    /// # Errors
    /// Something at `at` or behind must not change.
    pub fn check_change(&self, at: u64) -> Result<(), Refusal> {
        if at < self.cursor.max(self.freed) { Err(Refusal::BelowCursor) } else { Ok(()) }
    }

    /// The file is to be of `size` bytes: no reader gets what is behind from now on.
    pub fn begin_resize(&mut self, size: u64) -> Result<(), Refusal> {
        self.check_writable()?;
        self.check_change(size)?;
        if size > FILE_BYTES_MAX {
            return Err(Refusal::TooLarge);
        }
        if self.resize.is_some() || !self.writes.is_empty() {
            return Err(Refusal::Busy);
        }
        if size > self.size && self.gaps.pieces() >= EXTENTS_MAX {
            return Err(Refusal::TooScattered);
        }
        self.resize = Some(size);
        self.size = self.size.min(size);
        self.gaps.remove(&(self.size..u64::MAX));
        Ok(())
    }

    /// Whether it worked. Gives the bytes of pages that are not there any more.
    pub fn complete_resize(&mut self, worked: bool) -> u64 {
        let Some(size) = self.resize.take() else { return 0 };
        if !worked {
            return 0;
        }
        self.gaps.insert(self.size..size);
        self.size = size;
        let behind = page_ceil(size)..u64::MAX;
        let bytes = self.charged.bytes_within(&behind);
        self.charged.remove(&behind);
        bytes
    }

    /// The end of what readers may be given: what is there without a gap. Gaps that are left when nobody writes the file any more
    /// are meant to be there, and are zeros.
    pub fn sendable_end(&self) -> u64 {
        if !self.is_published() || self.is_held {
            return self.cursor;
        }
        let undecided = self.writes.iter().map(|write| write.start).min();
        let gap = if self.is_complete() { None } else { self.gaps.first() };
        self.size.min(undecided.unwrap_or(u64::MAX)).min(gap.map_or(u64::MAX, |gap| gap.start)).max(self.cursor)
    }

    /// A reader is given everything below `end`.
    pub fn send(&mut self, end: u64) {
        debug_assert!(end <= self.sendable_end());
        self.cursor = self.cursor.max(end);
        self.gaps.remove(&(0..self.cursor));
    }

    /// `range` has arrived at a client.
    pub fn acknowledge(&mut self, range: Range<u64>) {
        debug_assert!(range.end <= self.cursor);
        self.delivery.acknowledge(range);
    }

    /// The end of what may be given back, if no reader is below `slowest`.
    fn disposable_end(&self, slowest: Option<u64>) -> u64 {
        let delivered = self.delivery.delivered_below().min(slowest.unwrap_or(u64::MAX));
        if self.state == State::Sealed && self.is_idle() && delivered >= self.size {
            page_ceil(self.size)
        } else {
            page_floor(delivered)
        }
    }

    /// Bytes of pages that may be given back.
    pub fn disposable(&self, slowest: Option<u64>) -> u64 {
        self.charged.bytes_within(&(self.freed..self.disposable_end(slowest).max(self.freed)))
    }

    /// Takes up to `want` bytes of pages, rounded up to pages, from the beginning of what may be given back.
    pub fn dispose(&mut self, slowest: Option<u64>, want: u64) -> Option<(Range<u64>, u64)> {
        let parts = self.charged.overlaps(&(self.freed..self.disposable_end(slowest).max(self.freed)));
        let mut bytes = 0;
        let mut end = self.freed;
        for part in parts {
            if bytes >= want {
                break;
            }
            let length = (part.end - part.start).min(page_ceil(want - bytes));
            bytes += length;
            end = part.start + length;
        }
        if bytes == 0 {
            return None;
        }
        let range = self.freed..end;
        self.charged.remove(&range);
        self.freed = end;
        Some((range, bytes))
    }
}

/// Ranges whose ends are multiples of `unit`.
fn encode_ranges(ranges: &RangeSet, unit: u64, record: &mut Encoder) {
    record.number(ranges.pieces() as u64);
    let mut at = 0;
    for piece in ranges.iter() {
        record.number((piece.start - at) / unit).number((piece.end - piece.start) / unit);
        at = piece.end;
    }
}

fn decode_ranges(unit: u64, from: &mut Decoder<'_>) -> Result<RangeSet, Damaged> {
    let mut ranges = RangeSet::default();
    let mut at = 0;
    for _ in 0..from.number_below(EXTENTS_MAX as u64)? {
        let start = at + from.number_below(FILE_BYTES_MAX / unit)? * unit;
        let end = start + from.number_below(FILE_BYTES_MAX / unit)? * unit;
        if start >= end || end > FILE_BYTES_MAX {
            return Err(Damaged("ranges that cannot be"));
        }
        ranges.insert(start..end);
        at = end;
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(content: &mut Content, range: Range<u64>) {
        content.room(&range, u64::MAX).unwrap();
        content.begin_write(range.clone());
        content.complete_write(&range, range.end - range.start);
    }

    fn growing() -> Content {
        let mut content = Content::new(Policy::default());
        content.add_writer();
        content
    }

    /// The guest's kernel splits a large write, and its parts come in any order.
    #[test]
    fn nothing_behind_a_gap_is_sent_while_somebody_writes() {
        let mut content = growing();
        written(&mut content, 10_000..20_000);
        assert_eq!((content.size(), content.sendable_end()), (20_000, 0));
        written(&mut content, 0..5_000);
        assert_eq!(content.sendable_end(), 5_000);
        content.send(5_000);
        written(&mut content, 5_000..10_000);
        assert_eq!(content.sendable_end(), 20_000);
        content.begin_resize(30_000).unwrap();
        content.complete_resize(true);
        assert_eq!(content.sendable_end(), 20_000, "a program that makes room before it writes");
        content.remove_writer();
        assert_eq!((content.state(), content.sendable_end()), (State::Sealed, 30_000));
    }

    #[test]
    fn a_part_of_a_write_may_leave_more_pieces_than_the_whole() {
        let mut content = growing();
        let page = |number: u64| number * PAGE_BYTES..(number + 1) * PAGE_BYTES;
        for number in 0..EXTENTS_MAX as u64 {
            written(&mut content, page(3 * number + 2));
        }
        let between = page(0).start..page(1).end;
        assert_eq!(content.room(&between, u64::MAX).unwrap().bytes, 2 * PAGE_BYTES, "it fills a hole");
        assert_eq!(content.room(&between, PAGE_BYTES), Err(Refusal::TooScattered));
        let mut record = Encoder::default();
        content.encode(&mut record);
        let mut read = Content::decode(&mut Decoder(&record.0)).unwrap();
        read.add_writer();
        assert_eq!((read.size(), read.sendable_end()), (content.size(), 0));
    }
}
