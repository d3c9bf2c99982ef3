//! Whether this client still owns a space: for what its owner acknowledges without asking a server.
//!
//! Servers refuse an owner that was replaced, so whatever they have acknowledged was done while it owned the space. Making zero what is
//! zero already needs no server, and a newer owner may have written the page since. Who acknowledges such a trim asks here first. The
//! answer is as it was at some moment after the question was asked, and generations only grow: the client owned the space at that
//! moment and at all times before it, so what it knew of its pages when it asked was true.
//!
//! All who ask while a question is under way share the next one. Nobody waits for the control plane for ever: they fail as writes do
//! that need its answer; see `unmapped.rs`. If the space has another owner, they fail as [`Failure::Fenced`], like everything else.

use std::collections::VecDeque;

use super::{Event, Failure, SPACES_MAX, Token};
use crate::client::index::SpaceIndex;
use crate::control::{ControlRequest, QuestionId};

/// Those who wait at a time. A caller with much to acknowledge asks once for all of it, so one for each space is enough.
const CONFIRMS_MAX: usize = SPACES_MAX;

#[derive(Clone, Copy, Debug)]
struct Waiting {
    token: Token,
    space: SpaceIndex,
    /// The question that it waits for, if that is asked already.
    question: Option<QuestionId>,
}

/// Those who want to know whether this client owns a space, and those who have their answer.
#[derive(Debug)]
pub struct Confirms {
    waiting: Vec<Waiting>,
    done: VecDeque<(Token, Result<(), Failure>)>,
}

impl Default for Confirms {
    fn default() -> Confirms {
        Confirms { waiting: Vec::with_capacity(CONFIRMS_MAX), done: VecDeque::with_capacity(CONFIRMS_MAX) }
    }
}

impl Confirms {
    /// Whether one more may ask.
    pub fn has_room(&self) -> bool {
        self.waiting.len() + self.done.len() < CONFIRMS_MAX
    }

    /// Somebody asks, and has the answer.
    pub fn finish(&mut self, token: Token, result: Result<(), Failure>) {
        self.done.push_back((token, result));
    }

    /// Somebody asks, and waits for a question.
    pub fn wait(&mut self, token: Token, space: SpaceIndex) {
        self.waiting.push(Waiting { token, space, question: None });
    }

    /// All who wait about a space without a question wait for this one.
    pub fn wait_for(&mut self, space: SpaceIndex, question: QuestionId) {
        let waiting = self.waiting.iter_mut().filter(|waiting| waiting.space == space);
        waiting.for_each(|waiting| _ = waiting.question.get_or_insert(question));
    }

    pub fn is_waiting(&self, space: SpaceIndex) -> bool {
        self.waiting.iter().any(|waiting| waiting.space == space)
    }

    /// What the one at this position asks about, if there is one.
    pub fn space_at(&self, at: usize) -> Option<SpaceIndex> {
        self.waiting.get(at).map(|waiting| waiting.space)
    }

    /// A question was answered: this client owns the space.
    pub fn confirm(&mut self, question: QuestionId) {
        self.end(|waiting| waiting.question == Some(question), Ok(()));
    }

    /// All who wait about a space fail. How many they are.
    pub fn fail(&mut self, space: SpaceIndex, failure: Failure) -> usize {
        self.end(|waiting| waiting.space == space, Err(failure))
    }

    pub fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.done.is_empty()
    }

    pub fn next_event(&mut self) -> Option<Event> {
        self.done.pop_front().map(|(token, result)| Event::Written { token, result })
    }

    /// How many have their answer by this.
    fn end(&mut self, fits: impl Fn(&Waiting) -> bool, result: Result<(), Failure>) -> usize {
        let ended = self.waiting.iter().filter(|waiting| fits(waiting));
        self.done.extend(ended.map(|waiting| (waiting.token, result)));
        let before = self.waiting.len();
        self.waiting.retain(|waiting| !fits(waiting));
        before - self.waiting.len()
    }
}

pub fn is_confirm(request: &ControlRequest) -> bool {
    matches!(request, ControlRequest::Confirm { .. })
}
