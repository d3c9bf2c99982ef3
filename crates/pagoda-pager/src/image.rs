//! What the daemon and an engine agree on about an image: the moment in which it begins, and how far it is.
//!
//! The daemon prepares the files of an image while the VM runs, and gives the engine a [`Ticket`] when the VM stands still. The
//! engine answers it once. A daemon that does not want to wait any longer cancels the ticket, and the engine will not begin
//! the image then. Which of the two comes first is decided under the ticket's lock, so both know the same.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagoda_core::units::PageCount;
use pagoda_image::ImageId;

/// What became of a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The image exists: it is what the VM held at this moment, and the VM may run.
    Begun,
    /// There is no image, and none of the VM's pages belongs to it. The text is for the user.
    Refused(String),
    /// The engine did not answer in time, and will not begin the image any more.
    TooLate,
}

#[derive(Debug)]
enum State {
    Waiting,
    Cancelled,
    /// The engine is about to begin the image. It answers in any case.
    Claimed,
    Answered(Answer),
}

/// Asks an engine to begin the image that was prepared. See the module.
pub struct Ticket {
    state: Mutex<State>,
    changed: Condvar,
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ticket").field(&*self.lock()).finish()
    }
}

impl Ticket {
    /// A ticket for one image.
    #[allow(clippy::new_ret_no_self)] // both ends have it
    pub fn new() -> Arc<Ticket> {
        Arc::new(Ticket { state: Mutex::new(State::Waiting), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the engine's answer. After `max` the ticket is cancelled, unless the engine is about to begin the image: that
    /// takes as long as protecting the pages that the VM has written lately, and its answer is waited for.
    pub fn wait(&self, max: Duration) -> Answer {
        let is_open = |state: &mut State| matches!(state, State::Waiting | State::Claimed);
        let waited = self.changed.wait_timeout_while(self.lock(), max, is_open);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let State::Waiting = *state {
            *state = State::Cancelled;
        }
        let is_claimed = |state: &mut State| matches!(state, State::Claimed);
        let state = self.changed.wait_while(state, is_claimed).unwrap_or_else(PoisonError::into_inner);
        match &*state {
            State::Answered(answer) => answer.clone(),
            State::Waiting | State::Cancelled | State::Claimed => Answer::TooLate,
        }
    }

    /// The engine's side: whether the daemon still waits. From then on it waits for [`Ticket::answer`].
    #[must_use]
    pub fn claim(&self) -> bool {
        let mut state = self.lock();
        let is_waiting = matches!(*state, State::Waiting);
        if is_waiting {
            *state = State::Claimed;
        }
        is_waiting
    }

    /// The engine's side: what became of the image. The first answer counts, and none does behind a cancellation.
    pub fn answer(&self, answer: Answer) {
        let mut state = self.lock();
        if matches!(*state, State::Waiting | State::Claimed) {
            *state = State::Answered(answer);
            self.changed.notify_all();
        }
    }

    /// The engine's side: whether the daemon has gone on without an answer.
    pub fn is_cancelled(&self) -> bool {
        matches!(*self.lock(), State::Cancelled)
    }
}

/// How far the newest image of a VM is, while the VM has to do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageStatus {
    /// The image that this is about.
    pub id: ImageId,
    /// How far the image is.
    pub stage: ImageStage,
}

/// How far an image is, from its preparation on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageStage {
    /// It does not exist yet. `sweeps`: how often all pages that may be written have been protected.
    Preparing { sweeps: u32 },
    /// It exists, and the VM holds so many pages for it that it has no copy of.
    Filling { missing: PageCount },
    /// It is lost, and its files could not be made to say so yet: no other image begins before.
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT_ONCE: Duration = Duration::ZERO;
    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_daemon_that_gives_up_and_an_engine_that_begins_cannot_both_win() {
        let ticket = Ticket::new();
        assert_eq!(ticket.wait(AT_ONCE), Answer::TooLate);
        assert!(ticket.is_cancelled() && !ticket.claim());
        ticket.answer(Answer::Begun);
        assert_eq!(ticket.wait(AT_ONCE), Answer::TooLate);

        let ticket = Ticket::new();
        assert!(ticket.claim() && !ticket.claim());
        let waiter = std::thread::spawn({
            let ticket = Arc::clone(&ticket);
            move || ticket.wait(AT_ONCE)
        });
        ticket.answer(Answer::Begun);
        assert_eq!(waiter.join().unwrap(), Answer::Begun);
        ticket.answer(Answer::Refused("too late for that".into()));
        assert_eq!(ticket.wait(AT_ONCE), Answer::Begun);
    }

    #[test]
    fn an_answer_that_comes_later_is_waited_for() {
        let ticket = Ticket::new();
        let waiter = std::thread::spawn({
            let ticket = Arc::clone(&ticket);
            move || ticket.wait(PATIENCE)
        });
        ticket.answer(Answer::Refused("no".into()));
        assert_eq!(waiter.join().unwrap(), Answer::Refused("no".into()));
        assert!(!ticket.claim());
    }
}
