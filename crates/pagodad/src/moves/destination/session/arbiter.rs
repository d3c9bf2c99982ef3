//! What the thread of a VM that comes has to do with the arbiter. Neither waits for the other.

use pagoda_move::owner::{Claim, DestinationEvent};

use super::Session;
use crate::moves::arbiter::shown::of_destination;
use crate::moves::sessions::Input;

impl Session {
    /// The answer comes beside the session's other inputs, for which whoever brings them may have to wait.
    pub(super) fn ask_arbiter(&self, claim: Claim) {
        let (answers, own) = (self.answers.sender.clone(), self.own.clone());
        let answer = move |answer| {
            let _ = answers.send(answer);
            // One that cannot be sent finds a session that is at work, and looks for answers behind that.
            let _ = own.try_send(Input::Arbiter);
        };
        self.registry.moves.arbiter.ask(&self.vm, claim, answer);
    }

    pub(super) fn hear_arbiter(&mut self) {
        while let Ok(answer) = self.answers.received.try_recv() {
            if self.answers.said != Some(answer) {
                tracing::info!(vm = %self.vm, "the arbiter of its move has {answer:?}");
            }
            self.answers.said = Some(answer);
            self.apply(DestinationEvent::Arbiter(answer));
        }
    }

    /// What users see of it.
    pub(super) fn show_arbiter(&self) {
        let (moves, owner) = (&self.registry.moves, &self.owner);
        let standing = moves.arbiter.standing();
        let answered = (self.answers.said, moves.me(), "its source");
        let arbiter = of_destination(&standing, owner.offered().register, owner.is_arbitrated(), answered);
        self.show(|progress| {
            progress.arbiter = Some(arbiter);
            if owner.is_claiming() {
                progress.phase = "claiming";
            }
        });
    }
}
