//! Which images must stay although no image refers to them yet: a snapshot that is being taken is to be their child.
//!
//! A removal and a snapshot decide here which of them comes first: an image that is needed is not removed, and one that is being
//! removed becomes nobody's parent. Once the child exists, its own files say what it refers to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pagoda_image::ImageId;

#[derive(Debug, Default)]
struct State {
    /// How often each is needed.
    needed: BTreeMap<ImageId, usize>,
    removed: BTreeSet<ImageId>,
}

/// Which images are needed as parents, and which are being removed.
#[derive(Debug, Default)]
pub struct Parents(Mutex<State>);

/// An image that is not removed as long as this is.
#[derive(Debug)]
#[must_use = "the image may be removed when this is dropped"]
pub struct Held<'a> {
    parents: &'a Parents,
    pub id: ImageId,
}

/// An image that is being removed, and becomes nobody's parent as long as this is.
#[derive(Debug)]
#[must_use = "the image may become a parent when this is dropped"]
pub struct Removing<'a> {
    parents: &'a Parents,
    id: ImageId,
}

impl Parents {
    /// `None`: the image is being removed.
    pub fn hold(&self, id: ImageId) -> Option<Held<'_>> {
        let mut state = self.lock();
        if state.removed.contains(&id) {
            return None;
        }
        *state.needed.entry(id).or_default() += 1;
        Some(Held { parents: self, id })
    }

    /// Nothing: it is needed, or being removed by somebody else.
    pub fn remove(&self, id: ImageId) -> Option<Removing<'_>> {
        let mut state = self.lock();
        let is_free = !state.needed.contains_key(&id) && state.removed.insert(id);
        // Made only then: its drop takes the lock.
        is_free.then(|| Removing { parents: self, id })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut state = self.parents.lock();
        let left = state.needed.get(&self.id).map_or(0, |count| count - 1);
        match left {
            0 => drop(state.needed.remove(&self.id)),
            left => drop(state.needed.insert(self.id, left)),
        }
    }
}

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        self.parents.lock().removed.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_is_not_removed_and_what_is_removed_is_nobodys_parent() {
        let (parents, id) = (Parents::default(), ImageId(1));
        let (one, two) = (parents.hold(id).unwrap(), parents.hold(id).unwrap());
        drop(one);
        assert!(parents.remove(id).is_none());
        drop(two);
        let removing = parents.remove(id).unwrap();
        assert!(parents.hold(id).is_none() && parents.remove(id).is_none());
        assert!(parents.hold(ImageId(2)).is_some(), "another one");
        drop(removing);
        assert!(parents.hold(id).is_some());
    }
}
