//! Questions to the control plane: when each is asked, which are open, and whether answers come.
//!
//! A question is asked again until it is answered. What waits for an answer waits for no longer than the caller's patience, and
//! for less where the control plane as a whole seems to be silent.

use std::time::Duration;

use crate::client::index::SpaceIndex;
use crate::control::{ControlReply, ControlRequest, QuestionId};
use crate::units::Time;

/// A question that the control plane did not answer is asked again; a store with three members answers in 10 ms.
const RETRY: Duration = Duration::from_millis(500);
/// An answer that is not there yet is looked for no more often; a store on the same machine answers in 1 ms.
const RETRY_MIN: Duration = Duration::from_micros(200);

/// How long after "later" to ask again: a quarter of what was waited already, so that an answer is found soon after it
/// came and a store that is away costs nothing.
fn retry_after(waited: Duration) -> Duration {
    (waited / 4).clamp(RETRY_MIN, RETRY)
}

/// A question that was not answered yet.
#[derive(Clone, Debug)]
pub struct Question {
    pub id: QuestionId,
    pub space: SpaceIndex,
    pub request: ControlRequest,
    first_asked: Option<Time>,
    /// When it is asked (again).
    due: Time,
}

impl Question {
    /// Whether it was asked already: its answer may be from before now.
    pub fn is_sent(&self) -> bool {
        self.first_asked.is_some()
    }

    /// One that was not asked yet is about to be.
    fn asked_at(&self, now: Time) -> Time {
        self.first_asked.unwrap_or(now)
    }
}

/// How long an answer is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub at_most: Duration,
    /// One that is asked while older ones have no answer is waited for so long, to see whether there are answers.
    pub grace: Duration,
}

/// All questions that are open.
#[derive(Debug, Default)]
pub struct Questions {
    open: Vec<Question>,
    last_id: QuestionId,
    /// When there was last an answer.
    answered_at: Time,
    /// When it was last looked who has waited for too long.
    polled_at: Time,
}

impl Questions {
    /// For so many at a time.
    pub fn make_room(&mut self, questions: usize) {
        self.open.reserve(questions.saturating_sub(self.open.len()));
    }

    pub fn len(&self) -> usize {
        self.open.len()
    }

    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    #[cfg(test)]
    pub fn last_id(&self) -> QuestionId {
        self.last_id
    }

    /// Adds a question to the control plane, which is due at once.
    pub fn ask(&mut self, space: SpaceIndex, request: ControlRequest) -> QuestionId {
        self.last_id.0 += 1;
        self.open.push(Question { id: self.last_id, space, request, first_asked: None, due: Time(0) });
        self.last_id
    }

    /// A question that is to be asked now.
    pub fn poll(&mut self, now: Time) -> Option<(QuestionId, ControlRequest)> {
        let question = self.open.iter_mut().find(|question| question.due <= now)?;
        question.first_asked.get_or_insert(now);
        question.due = now + RETRY;
        Some((question.id, question.request.clone()))
    }

    /// When the next one is to be asked.
    pub fn due(&self) -> Option<Time> {
        self.open.iter().map(|question| question.due).min()
    }

    /// Takes an answer in: its question is open no more, but if the answer comes later. `None` for those that are settled, too.
    pub fn receive(&mut self, now: Time, id: QuestionId, reply: &ControlReply) -> Option<Question> {
        let at = self.open.iter().position(|question| question.id == id)?;
        if *reply == ControlReply::Later {
            let question = &mut self.open[at];
            question.due = now + retry_after(now.since(question.asked_at(now)));
            return None;
        }
        self.answered_at = now;
        Some(self.open.swap_remove(at))
    }

    pub fn iter(&self) -> impl Iterator<Item = &Question> {
        self.open.iter()
    }

    /// The first that fits of a space.
    pub fn find(&self, space: SpaceIndex, fits: impl Fn(&ControlRequest) -> bool) -> Option<&Question> {
        self.open.iter().find(|question| question.space == space && fits(&question.request))
    }

    /// Nobody waits any more for the answers to those that fit, of a space.
    pub fn forget(&mut self, space: SpaceIndex, fits: impl Fn(&ControlRequest) -> bool) {
        self.open.retain(|question| question.space != space || !fits(&question.request));
    }

    /// How long that has had no answer which was asked first.
    pub fn silent_for(&self, now: Time) -> Option<Duration> {
        self.open.iter().filter_map(|question| question.first_asked).min().map(|asked| now.since(asked))
    }

    /// Questions that were asked within so long.
    pub fn younger_than(&self, now: Time, age: Duration) -> usize {
        self.open.iter().filter(|question| now.since(question.asked_at(now)) < age).count()
    }

    /// When that was asked which was asked first of those that fit.
    pub fn first_asked(&self, now: Time, fits: impl Fn(&Question) -> bool) -> Option<Time> {
        self.open.iter().filter(|question| fits(question)).map(|question| question.asked_at(now)).min()
    }

    /// When the control plane will have been silent for too long, as it seems now. What it was asked before its last answer it can
    /// maybe not answer; that says nothing of the rest.
    pub fn all_late_at(&self, now: Time, at_most: Duration) -> Option<Time> {
        let asked = self.open.iter().map(|question| question.asked_at(now));
        asked.filter(|at| *at >= self.answered_at).min().map(|at| at + at_most)
    }

    /// Whether the first that fits, of a space, was asked and has waited for too long.
    pub fn is_overdue(
        &self,
        now: Time,
        patience: Patience,
        space: SpaceIndex,
        fits: impl Fn(&ControlRequest) -> bool,
    ) -> bool {
        let asked = self.find(space, fits).and_then(|question| question.first_asked);
        asked.is_some_and(|asked| patience.late_at(asked, self.all_late_at(now, patience.at_most)) <= now)
    }

    /// When those who wait for answers are to be looked at.
    pub fn overdue_at(&self, now: Time, patience: Patience) -> Option<Time> {
        let all_late = self.all_late_at(now, patience.at_most);
        let each = self.open.iter().map(|question| patience.late_at(question.asked_at(now), all_late));
        each.chain(all_late).filter(|at| *at > self.polled_at).min()
    }

    /// Whether it is time for that.
    pub fn poll_overdue(&mut self, now: Time, patience: Patience) -> bool {
        let is_due = self.overdue_at(now, patience).is_some_and(|at| at <= now);
        if is_due {
            self.polled_at = now;
        }
        is_due
    }
}

impl Patience {
    /// When a question will have waited for too long, if the control plane as a whole has at `all_late`. One that is asked of a
    /// control plane that seems to be silent shows soon whether it is.
    pub fn late_at(&self, asked: Time, all_late: Option<Time>) -> Time {
        let soon = all_late.map_or(asked + self.at_most, |late| late.max(asked + self.grace));
        soon.min(asked + self.at_most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::SpaceId;

    const SPACE: SpaceIndex = SpaceIndex(0);
    const MS: u64 = 1_000_000;

    fn look() -> ControlRequest {
        ControlRequest::Look { space: SpaceId(1) }
    }

    #[test]
    fn a_question_is_asked_until_it_is_answered() {
        let mut questions = Questions::default();
        let id = questions.ask(SPACE, look());
        assert_eq!(questions.poll(Time(0)), Some((id, look())));
        assert_eq!((questions.poll(Time(499 * MS)), questions.due()), (None, Some(Time(500 * MS))));
        assert!(questions.poll(Time(500 * MS)).is_some());
        // The answer is not there yet: a quarter of the time that it has taken so far.
        assert!(questions.receive(Time(600 * MS), id, &ControlReply::Later).is_none());
        assert_eq!(questions.due(), Some(Time(750 * MS)));
        assert!(questions.receive(Time(600 * MS), id, &ControlReply::Done).is_some() && questions.is_empty());
        assert!(questions.receive(Time(601 * MS), id, &ControlReply::Done).is_none(), "it is settled");
    }

    #[test]
    fn what_is_asked_of_a_silent_control_plane_is_late_sooner() {
        let patience = Patience { at_most: Duration::from_millis(100), grace: Duration::from_millis(10) };
        let mut questions = Questions::default();
        let old = questions.ask(SPACE, look());
        questions.poll(Time(0));
        questions.ask(SpaceIndex(1), look());
        questions.poll(Time(95 * MS));
        let is_late = |questions: &Questions, at, space| questions.is_overdue(Time(at * MS), patience, space, |_| true);
        assert!(!is_late(&questions, 99, SPACE) && is_late(&questions, 100, SPACE));
        assert!(!is_late(&questions, 104, SpaceIndex(1)) && is_late(&questions, 105, SpaceIndex(1)));
        assert!(questions.poll_overdue(Time(100 * MS), patience) && !questions.poll_overdue(Time(100 * MS), patience));
        // It answers, so the other has its own time.
        questions.receive(Time(94 * MS), old, &ControlReply::Done);
        assert!(!is_late(&questions, 105, SpaceIndex(1)) && is_late(&questions, 195, SpaceIndex(1)));
    }
}
