//! Asks the control plane who owns a space, and answers what waited for that.

use crate::client::confirm::is_confirm;
use crate::client::index::SpaceIndex;
use crate::client::pages::Pages;
use crate::client::pool::Pool;
use crate::client::sealed::Tenure;
use crate::client::{Failure, Fault, Refused, Token};
use crate::control::{ControlRequest, QuestionId};
use crate::units::Time;

impl Pages {
    /// Asks whether this client owns a space, at some moment from now on.
    ///
    /// # Errors
    /// Nothing was asked.
    pub fn confirm(&mut self, pool: &mut Pool, now: Time, space: SpaceIndex, token: Token) -> Result<(), Refused> {
        if pool.map.spaces[space].tenure != Tenure::Owner {
            return Err(Refused::ReadOnly);
        }
        if !self.confirms.has_room() {
            return Err(Refused::Busy);
        }
        pool.now = now;
        if pool.map.spaces[space].is_taken || pool.has(Fault::TrustsItself) {
            let result = if pool.map.spaces[space].is_taken { Err(Failure::Fenced) } else { Ok(()) };
            self.confirms.finish(token, result);
            return Ok(());
        }
        self.confirms.wait(token, space);
        self.ask_to_confirm(pool, space);
        self.end_overdue_confirms(pool, space);
        Ok(())
    }

    /// Sees to it that all who wait have a question that was not sent before they came.
    fn ask_to_confirm(&mut self, pool: &mut Pool, space: SpaceIndex) {
        let open = pool.map.questions.find(space, is_confirm);
        let question = match open.map(|question| (question.id, question.is_sent())) {
            Some((id, false)) => id,
            // Its answer may be from before. One question about a space is under way at a time.
            Some((_, true)) => return,
            None => {
                let (id, generation) = (pool.map.spaces[space].id, pool.map.spaces[space].generation);
                pool.map.questions.ask(space, ControlRequest::Confirm { space: id, generation })
            }
        };
        self.confirms.wait_for(space, question);
    }

    /// The control plane says that this client owns the space.
    pub fn confirmed(&mut self, pool: &mut Pool, space: SpaceIndex, question: QuestionId) {
        self.confirms.confirm(question);
        if self.confirms.is_waiting(space) {
            self.ask_to_confirm(pool, space);
        }
    }

    /// Another owner has the space.
    pub fn refuse_confirms(&mut self, space: SpaceIndex) {
        self.confirms.fail(space, Failure::Fenced);
    }

    /// Ends what has waited for the control plane for too long.
    pub fn maintain_confirms(&mut self, pool: &mut Pool, now: Time) {
        pool.now = now;
        let mut at = 0;
        while let Some(space) = self.confirms.space_at(at) {
            // Where it is overdue, none of this space waits any more, and another one is in this slot.
            at += usize::from(!self.end_overdue_confirms(pool, space));
        }
    }

    /// `true` if the control plane has been silent for too long, and nobody waits for its word on this space any more.
    fn end_overdue_confirms(&mut self, pool: &mut Pool, space: SpaceIndex) -> bool {
        let is_overdue = pool.is_question_overdue(space, is_confirm);
        if is_overdue {
            let ended = self.confirms.fail(space, Failure::Silent) as u64;
            pool.stats.unmapped += ended;
            pool.stats.unanswered += ended;
        }
        is_overdue
    }
}
