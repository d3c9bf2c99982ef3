//! A note on its way to the disk. The one that is wanted last is tried again until it is durable.

use super::types::{Action, RETRY_EVERY};
use crate::note::Note;
use crate::units::Moment;

#[derive(Clone, Debug)]
pub(super) struct Notes {
    wanted: Option<Note>,
    /// What is being written.
    writing: Option<Option<Note>>,
    durable: bool,
    /// The last write failed.
    failed: bool,
    retry_at: Option<Moment>,
}

impl Notes {
    /// The note that a host has, durably.
    pub const fn new(note: Option<Note>) -> Notes {
        Notes { wanted: note, writing: None, durable: true, failed: false, retry_at: None }
    }

    /// From now on this one is wanted.
    pub fn want(&mut self, note: Option<Note>, actions: &mut Vec<Action>) {
        if self.wanted == note && (self.durable || self.writing == Some(note)) {
            return;
        }
        (self.wanted, self.durable, self.failed) = (note, false, false);
        self.submit(actions);
    }

    /// A write has ended.
    pub fn complete(&mut self, is_written: bool, now: Moment, actions: &mut Vec<Action>) {
        let Some(written) = self.writing.take() else { return };
        if written != self.wanted {
            self.submit(actions);
        } else if is_written {
            (self.durable, self.failed) = (true, false);
        } else {
            self.failed = true;
            self.retry_at = Some(now + RETRY_EVERY);
        }
    }

    pub fn tick(&mut self, now: Moment, actions: &mut Vec<Action>) {
        if self.retry_at.is_some_and(|at| at <= now) {
            self.submit(actions);
        }
    }

    pub const fn wanted(&self) -> Option<Note> {
        self.wanted
    }

    /// What is wanted is durable.
    pub const fn is_durable(&self) -> bool {
        self.durable
    }

    /// What is wanted could not be written. It may be on the disk, and may not.
    pub const fn has_failed(&self) -> bool {
        self.failed
    }

    pub const fn retry_at(&self) -> Option<Moment> {
        self.retry_at
    }

    fn submit(&mut self, actions: &mut Vec<Action>) {
        self.retry_at = None;
        if self.writing.is_none() {
            self.writing = Some(self.wanted);
            actions.push(Action::Write(self.wanted));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::note::Owned;
    use crate::units::Generation;

    #[test]
    fn what_is_wanted_last_is_written_last() {
        let note = |generation| Some(Note::Owned(Owned::Alone(Generation(generation))));
        let (mut notes, mut actions) = (Notes::new(note(1)), Vec::new());
        notes.want(note(1), &mut actions);
        assert!(actions.is_empty() && notes.is_durable());
        notes.want(note(2), &mut actions);
        notes.want(note(3), &mut actions);
        assert_eq!(actions, [Action::Write(note(2))]);
        notes.complete(true, Moment::default(), &mut actions);
        assert!(!notes.is_durable() && actions.len() == 2 && actions[1] == Action::Write(note(3)));
        notes.complete(false, Moment::default(), &mut actions);
        assert!(notes.has_failed() && !notes.is_durable());
        notes.tick(Moment::default(), &mut actions);
        assert_eq!(actions.len(), 2);
        notes.tick(Moment(RETRY_EVERY), &mut actions);
        notes.complete(true, Moment(RETRY_EVERY), &mut actions);
        assert!(notes.is_durable() && !notes.has_failed() && actions.len() == 3);
    }
}
