//! Pre-copy: which pages go in which round, and when the VM is stopped for the last ones.
//!
//! The caller protects pages and reports which were written since ([`Rounds::written`]). It reports the clock of direct I/O
//! ([`Rounds::set_oldest_io`]). It copies and sends the runs that [`Rounds::next`] gives, and asks [`Rounds::decide`] after each
//! round.
//!
//! **The pin rule**: a run is given out only if every direct I/O in flight began after the protection of its pages. All other
//! pages wait, at the latest until the VM is stopped, when no I/O is in flight any more. So each copy that is made counts.
//!
//! What the guest sees: its first write to a page after a protection costs a fault. If the move has not ended in its time, that
//! fault takes longer, in steps, if the settings say so ([`slowing`]). Nothing here stops a VM for longer than was promised.

mod estimate;
mod pace;
mod pages;
mod progress;
mod settings;
mod slower;
mod slowing;

use std::collections::VecDeque;
use std::time::Duration;

use pagoda_core::units::{Bytes, ChunkIdx, PageCount};

use crate::map::PageMap;
use crate::units::{Moment, Rate, RoundNo};
use estimate::{Estimate, RoundFacts};
use pages::Pages;
use slower::Slower;

pub use pace::Pace;
pub use pages::IoEpoch;
pub use progress::{Phase, Progress, Waits};
use settings::FAR;
pub use settings::{
    Handover, Hopeless, LITTLE, Mode, Next, OnTimeout, ROUND_MIN, SLOWED_ROUND_MIN, STALL_ROUNDS, Settings, Step,
};
pub use slower::{SLOW_TIME_MIN, slow_time_max};
pub use slowing::{SLOW_DELAYS_US, Slowing};

/// A round that has been sent.
#[derive(Clone, Copy, Debug)]
struct Ended {
    round: RoundNo,
    began: Moment,
    bytes: Bytes,
}

#[derive(Clone, Debug)]
pub struct Rounds {
    settings: Settings,
    pages: Pages,
    pace: Pace,
    phase: Phase,
    round: RoundNo,
    /// Rounds whose pages are at the destination, counted from the first.
    kept: u32,
    began: Moment,
    round_began: Moment,
    round_sent: Bytes,
    /// By how much compression has made the round smaller.
    round_saved: Bytes,
    round_written: PageCount,
    sent: Bytes,
    spared: Bytes,
    saved: Bytes,
    slower: Slower,
    estimate: Estimate,
    /// Rounds that have been sent and that the destination has not acknowledged, the oldest first.
    unacknowledged: VecDeque<Ended>,
    kept_at: Moment,
}

impl Rounds {
    /// Begins with every page of the VM to be sent, all protected at `protected_at`. `hot_first` has all chunks.
    ///
    /// `rate` is what the link is known to send, if it is.
    pub fn new(
        settings: Settings,
        pages: PageCount,
        hot_first: Vec<ChunkIdx>,
        protected_at: IoEpoch,
        rate: Option<Rate>,
        now: Moment,
    ) -> Rounds {
        Rounds {
            settings,
            pages: Pages::new(pages, hot_first, protected_at),
            pace: Pace::new(settings.bandwidth_max, now),
            phase: Phase::Rounds,
            round: RoundNo(0),
            kept: 0,
            began: now,
            round_began: now,
            round_sent: Bytes::ZERO,
            round_saved: Bytes::ZERO,
            round_written: PageCount::ZERO,
            sent: Bytes::ZERO,
            spared: Bytes::ZERO,
            saved: Bytes::ZERO,
            slower: Slower::default(),
            estimate: Estimate::new(rate),
            unacknowledged: VecDeque::new(),
            kept_at: now,
        }
    }

    /// These pages were written since they were last protected, and have been protected again, at this epoch.
    pub fn written(&mut self, pages: &PageMap, protected_at: IoEpoch) {
        self.round_written += pages.count();
        self.pages.written(pages, protected_at);
    }

    /// The epoch of the oldest direct I/O that is in flight now; the greatest if none is.
    pub fn set_oldest_io(&mut self, oldest: IoEpoch) {
        self.pages.set_oldest_io(oldest);
    }

    /// Chunks go in this order from now on. It has each chunk once.
    pub fn reorder(&mut self, hot_first: Vec<ChunkIdx>) {
        self.pages.reorder(hot_first);
    }

    /// What is to be sent next. It counts as sent.
    pub fn next(&mut self, now: Moment) -> Next {
        if self.phase == Phase::Done || self.settings.mode == Mode::Postcopy && self.phase == Phase::Rounds {
            return Next::RoundEnd;
        }
        // A stopped VM does not wait for a cap.
        if self.phase == Phase::Rounds
            && let Some(until) = self.pace.wait_until(now)
        {
            return if self.pages.has_ready() { Next::Wait(until) } else { Next::RoundEnd };
        }
        match self.pages.take_run() {
            Some(run) => {
                let bytes = run.count().bytes();
                self.pace.spend(now, bytes);
                self.round_sent += bytes;
                self.sent += bytes;
                Next::Send(run)
            }
            None => Next::RoundEnd,
        }
    }

    /// So many bytes of this round were named instead of sent, such as zeros. They say nothing of the link.
    pub fn spare(&mut self, bytes: Bytes) {
        self.spared += bytes;
        self.take_back(bytes);
    }

    /// Compression has made what was sent of this round smaller by so many bytes.
    pub fn save(&mut self, bytes: Bytes) {
        self.saved += bytes;
        self.round_saved += bytes;
        self.take_back(bytes);
    }

    /// So many bytes that count as sent did not go over the link.
    fn take_back(&mut self, bytes: Bytes) {
        self.sent = Bytes(self.sent.0.saturating_sub(bytes.0));
        self.pace.give_back(bytes);
        self.round_sent = Bytes(self.round_sent.0.saturating_sub(bytes.0));
    }

    /// The number of the round that is being sent.
    pub const fn round(&self) -> RoundNo {
        self.round
    }

    /// Ends the round: its end is sent behind its pages.
    pub fn end_round(&mut self) -> RoundNo {
        let ended = self.round;
        self.estimate.compressed(self.round_sent, self.round_saved);
        self.unacknowledged.push_back(Ended { round: ended, began: self.round_began, bytes: self.round_sent });
        self.pages.end_round();
        self.round = ended.next();
        ended
    }

    /// The destination has every page of that round, and of those before.
    pub fn kept(&mut self, round: RoundNo, now: Moment) {
        if round < self.round && round.0 >= self.kept {
            self.kept = round.0 + 1;
            self.delivered(round, now);
            self.pages.kept(round.next() == self.round);
        }
        if matches!(self.phase, Phase::Last(_)) && self.kept == self.round.0 && !self.pages.must_send() {
            self.phase = Phase::Done;
        }
    }

    /// The link was busy with these rounds since they began, or since the one before was there.
    fn delivered(&mut self, up_to: RoundNo, now: Moment) {
        let Some(first) = self.unacknowledged.front() else { return };
        let busy_from = first.began.max(self.kept_at);
        let mut bytes = Bytes::ZERO;
        while let Some(ended) = self.unacknowledged.pop_front_if(|ended| ended.round <= up_to) {
            bytes += ended.bytes;
        }
        self.estimate.delivered(bytes, now.since(busy_from));
        self.kept_at = now;
    }

    /// The link was cut: what was not acknowledged is sent again. Writers wait for nothing meanwhile.
    pub fn lost_link(&mut self) {
        self.pages.lost_link();
        self.unacknowledged.clear();
        self.slower.stop();
    }

    /// How writers are to be slowed now: not at all before the time limit, nor once the VM stands still or the move is given up.
    pub fn slowing(&self, now: Moment) -> Slowing {
        match self.phase {
            // The VM is stopped because of what it writes at this speed.
            Phase::Rounds | Phase::Stopping(_) => self.slower.slowing(now),
            Phase::Last(_) | Phase::Done => Slowing::NONE,
        }
    }

    /// What follows a round whose end has been sent, after a look at what was written meanwhile.
    pub fn decide(&mut self, now: Moment) -> Step {
        assert_eq!(self.phase, Phase::Rounds, "rounds are over");
        let span = now.since(self.round_began);
        let facts = RoundFacts { left: self.pages.left(), written: self.round_written, span };
        let expected = self.expected_downtime();
        let is_slowed = self.slower.step() > Slowing::NONE;
        let earliest = self.round_began + if is_slowed { SLOWED_ROUND_MIN } else { ROUND_MIN };
        let is_enough = (facts.left <= LITTLE || is_slowed) && self.is_short(expected);
        if now < earliest && self.settings.mode != Mode::Postcopy && !is_enough {
            return Step::Wait(earliest);
        }
        let has_low = self.estimate.end_round(facts);
        let step = if self.settings.mode == Mode::Postcopy {
            Step::Stop(Handover::Missing)
        } else if self.may_stop(expected, has_low) {
            Step::Stop(Handover::Whole)
        } else if self.settings.mode == Mode::Hybrid && !has_low {
            Step::Stop(Handover::Missing)
        } else {
            self.go_on(now, expected)
        };
        match step {
            Step::Stop(handover) => self.phase = Phase::Stopping(handover),
            Step::GiveUp(_) => self.phase = Phase::Done,
            Step::Round(_) => self.begin_round(now),
            Step::Wait(_) => {}
        }
        step
    }

    /// The VM is stopped, no direct I/O is in flight, and these pages were written since the last look. From now on each page
    /// that is not acknowledged is one of the last, or missing.
    pub fn stopped(&mut self, written: &PageMap, now: Moment) {
        let Phase::Stopping(handover) = self.phase else { panic!("nobody has decided to stop") };
        self.round_written += written.count();
        self.pages.stopped(written);
        self.phase = Phase::Last(handover);
        self.begin_round(now);
        if handover == Handover::Missing {
            self.pages.leave_missing();
        }
    }

    /// Of a VM of which nothing was sent, which goes over without its pages: all others than these are zeros, which its destination
    /// has already.
    pub fn leave_out_zeros(&mut self, holding: &PageMap) {
        assert_eq!((self.settings.mode, self.sent), (Mode::Postcopy, Bytes::ZERO), "the destination has pages already");
        self.pages.keep_missing(holding);
    }

    /// Pages that the destination does not get before it runs. Empty unless the VM goes over with pages missing.
    pub fn missing(&self) -> &PageMap {
        self.pages.missing()
    }

    /// All that is sent before the grant is at the destination.
    pub fn is_complete(&self) -> bool {
        self.phase == Phase::Done
    }

    pub fn progress(&self, now: Moment) -> Progress {
        Progress {
            phase: self.phase,
            round: self.round,
            sent: self.sent,
            spared: self.spared,
            saved: self.saved,
            left: self.pages.left(),
            rate: self.estimate.rate(),
            written_rate: self.estimate.written_rate(),
            slowing: self.slowing(now),
            elapsed: now.since(self.began),
            remaining: self.estimate.remaining(self.pages.left()),
            expected_downtime: self.expected_downtime(),
            waits: self.waits(now),
        }
    }

    fn waits(&self, now: Moment) -> Waits {
        if self.pages.is_held() && !self.pages.has_ready() {
            Waits::DirectIo { pages: self.pages.held() }
        } else if self.kept + 1 < self.round.0 {
            Waits::Acknowledgement
        } else if self.pace.wait_until(now).is_some() {
            Waits::Bandwidth
        } else if self.estimate.is_stalled() {
            Waits::Writers
        } else {
            Waits::Nothing
        }
    }

    /// The last pages go behind all that the destination has not acknowledged. None if nothing is known of the link.
    fn expected_downtime(&self) -> Option<Duration> {
        let before = self.unacknowledged.iter().map(|ended| ended.bytes.0).sum();
        let (before, left) = (Bytes(before), self.pages.left().bytes());
        if before == Bytes::ZERO && left == Bytes::ZERO {
            return Some(self.settings.stop_cost);
        }
        let before = self.estimate.rate()?.time_ceil(before)?;
        let pages = self.estimate.page_rate()?.time_ceil(left)?;
        Some(self.settings.stop_cost.saturating_add(before).saturating_add(pages))
    }

    /// Short enough, and not about to become much shorter. Writers that are slowed have waited for this.
    fn may_stop(&self, expected: Option<Duration>, has_low: bool) -> bool {
        let is_little = self.pages.left() <= LITTLE || self.slower.step() > Slowing::NONE;
        self.is_short(expected) && (is_little || !has_low || !self.estimate.has_halved())
    }

    fn is_short(&self, expected: Option<Duration>) -> bool {
        expected.is_some_and(|expected| expected <= self.settings.downtime_max)
    }

    /// A round more, or what there is instead.
    fn go_on(&mut self, now: Moment, expected: Option<Duration>) -> Step {
        let Some(time_max) = self.settings.time_max.filter(|most| now.since(self.began) >= *most) else {
            return Step::Round(Slowing::NONE);
        };
        match self.settings.on_timeout {
            OnTimeout::Abort => {
                let expected = expected.unwrap_or(Duration::MAX);
                Step::GiveUp(Hopeless::TimeOver { expected, promised: self.settings.downtime_max })
            }
            // The fewer are missing, the shorter is the tail: at a low, if one comes.
            OnTimeout::Postcopy if self.estimate.is_near_low() => Step::Stop(Handover::Missing),
            OnTimeout::Postcopy => Step::Round(Slowing::NONE),
            OnTimeout::SlowGuest => {
                let is_far = expected.is_none_or(|expected| expected > self.settings.downtime_max * FAR);
                self.slower.end_round(now, self.pages.left(), is_far, time_max).map_or_else(Step::GiveUp, Step::Round)
            }
        }
    }

    fn begin_round(&mut self, now: Moment) {
        self.round_began = now;
        self.round_sent = Bytes::ZERO;
        self.round_saved = Bytes::ZERO;
        self.round_written = PageCount::ZERO;
        self.pages.begin_round();
    }
}

#[cfg(test)]
mod tests;
