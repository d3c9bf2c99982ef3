//! The space under its lock, and the journal with it.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use pagoda_outbox::Space;

use crate::journal::Journal;

/// The space and its journal, if it has one.
#[derive(Debug)]
pub struct Held {
    pub space: Space,
    pub journal: Option<Journal>,
}

impl Held {
    fn commit(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.commit(&mut self.space);
        }
    }
}

/// The space, alone. When it is let go, its changes are in the journal.
#[derive(Debug)]
pub struct Locked<'a>(Option<MutexGuard<'a, Held>>);

impl<'a> Locked<'a> {
    pub fn new(held: MutexGuard<'a, Held>) -> Locked<'a> {
        Locked(Some(held))
    }

    /// Lets go of it until it is notified, or for `most`.
    pub fn wait(mut self, notified: &Condvar, most: Duration) {
        if let Some(mut held) = self.0.take() {
            held.commit();
            drop(notified.wait_timeout(held, most).unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl Deref for Locked<'_> {
    type Target = Space;

    fn deref(&self) -> &Space {
        &self.0.as_ref().expect("it is taken only when this ends").space
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Space {
        &mut self.0.as_mut().expect("it is taken only when this ends").space
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        if let Some(held) = &mut self.0 {
            held.commit();
        }
    }
}
