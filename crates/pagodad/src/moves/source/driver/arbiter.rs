//! What the thread of a move has to do with the arbiter. It never waits for it.

use pagoda_api::types::MoveArbiter;
use pagoda_move::owner::{Claim, Registered, SourceEvent};
use pagoda_move::units::RegisterId;
use pagoda_move::wire::offer::Capabilities;

use super::{Driver, Input, Stage};
use crate::moves::arbiter::shown;

impl Driver {
    /// The destination asks the same one, if it has said so. Before it has anything of the VM.
    pub(super) fn agree_on_arbiter(&mut self, register: Option<RegisterId>) {
        if let Some(register) = register.filter(|_| self.agreed.has(Capabilities::ARBITER)) {
            self.event(SourceEvent::Agreed(register));
        }
    }

    pub(super) fn ask_arbiter(&self, claim: Claim) {
        let own = self.begun.own.clone();
        // The thread may have ended meanwhile.
        let answer = move |answer| drop(own.send(Input::Arbiter(answer)));
        self.registry.moves.arbiter.ask(&self.begun.called.vm, claim, answer);
    }

    pub(super) fn arbiter_answers(&mut self, answer: Option<Registered>) {
        if self.said != Some(answer) {
            tracing::info!(vm = %self.begun.called.vm, "the arbiter of its move has {answer:?}");
        }
        self.said = Some(answer);
        self.event(SourceEvent::Arbiter(answer));
    }

    pub(super) fn shown_arbiter(&self, to: &str) -> MoveArbiter {
        let (moves, owner) = (&self.registry.moves, &self.begun.owner);
        let is_welcome = !matches!(self.begun.stage, Stage::Greeting);
        let answered = (self.said, moves.me(), to);
        let register = owner.offered().register;
        shown::of_source(&moves.arbiter.standing(), register, is_welcome, owner.is_arbitrated(), answered)
    }
}
