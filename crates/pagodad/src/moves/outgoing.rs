//! Moves from this host that are under way, and those that have ended of late.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use pagoda_move::owner::End;
use pagoda_move::units::AttemptId;

use super::source::progress::{Ended, Progress};

/// Those that have ended are shown for so long, and no more of them than [`ENDED_MAX`].
pub const ENDED_FOR: Duration = Duration::from_secs(3600);
pub const ENDED_MAX: usize = 64;

/// A VM that has gone so lately is not made of a snapshot by itself: who watches over it may take its end for a crash.
const JUST_MOVED: Duration = Duration::from_secs(60);

/// What a user wants of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Cancel,
    /// The destination is gone for good.
    Resolve,
    /// It is not trusted any more: no stream to it stays, and what was not granted is given up.
    Untrusted,
}

/// A move that is under way.
struct Move {
    progress: Arc<Mutex<Progress>>,
    attempt: AttemptId,
    order: Box<dyn Fn(Order) + Send>,
}

impl fmt::Debug for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Move({})", self.attempt)
    }
}

/// See the module. At most one for each VM.
#[derive(Debug, Default)]
pub struct Outgoing {
    moves: Mutex<BTreeMap<String, Move>>,
    ended: Mutex<VecDeque<Ended>>,
}

impl Outgoing {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Move>> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters one. False: there is one of this VM already.
    #[must_use]
    pub fn enter(&self, progress: &Arc<Mutex<Progress>>, order: impl Fn(Order) + Send + 'static) -> bool {
        let (vm, attempt) = {
            let progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
            (progress.vm.clone(), progress.attempt)
        };
        let mut moves = self.lock();
        if moves.contains_key(&vm) {
            return false;
        }
        moves.insert(vm, Move { progress: Arc::clone(progress), attempt, order: Box::new(order) });
        true
    }

    /// It has not begun after all.
    pub fn leave(&self, vm: &str) {
        self.lock().remove(vm);
    }

    /// Takes a move out, and keeps for a while how it has ended.
    pub fn end(&self, ended: Ended) {
        self.leave(&ended.progress.vm);
        let mut all = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        all.push_back(ended);
        if all.len() > ENDED_MAX {
            all.pop_front();
        }
    }

    /// Tells the move of a VM what its user wants. False: there is none.
    pub fn order(&self, vm: &str, order: Order) -> bool {
        self.lock().get(vm).map(|one| (one.order)(order)).is_some()
    }

    /// Tells all moves to the host of this name.
    pub fn order_all_to(&self, host: &str, order: Order) {
        let is_to = |one: &&Move| one.progress.lock().unwrap_or_else(PoisonError::into_inner).to == host;
        self.lock().values().filter(is_to).for_each(|one| (one.order)(order));
    }

    pub fn has_attempt(&self, attempt: AttemptId) -> bool {
        self.lock().values().any(|one| one.attempt == attempt)
    }

    /// Where a VM has gone that was here until lately.
    pub fn just_moved(&self, vm: &str) -> Option<String> {
        let is_new = |at| SystemTime::now().duration_since(at).is_ok_and(|since| since < JUST_MOVED);
        let all = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let is_gone = |end| matches!(end, End::Moved | End::Superseded);
        let of_vm = |one: &&Ended| one.progress.vm == vm && is_gone(one.end) && is_new(one.at);
        all.iter().find(of_vm).map(|one| one.progress.to.clone())
    }

    pub fn all(&self) -> Vec<Progress> {
        let of = |one: &Move| one.progress.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.lock().values().map(of).collect()
    }

    /// Those that have ended of late, the last one last.
    pub fn ended(&self) -> Vec<Ended> {
        let mut all = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that was set back shows them for longer.
        let is_old = |ended: &Ended| SystemTime::now().duration_since(ended.at).is_ok_and(|since| since > ENDED_FOR);
        all.retain(|ended| !is_old(ended));
        all.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagoda_core::units::Bytes;
    use std::sync::mpsc::channel;

    #[test]
    fn one_for_each_vm_and_the_last_ends_are_kept() {
        let outgoing = Outgoing::default();
        let progress = |vm: &str| Arc::new(Mutex::new(Progress::new(vm, "b", AttemptId(3), Bytes(4096))));
        let (orders, ordered) = channel();
        let (web1, again) = (orders.clone(), orders);
        assert!(outgoing.enter(&progress("web1"), move |order| web1.send(order).unwrap()));
        assert!(!outgoing.enter(&progress("web1"), move |order| again.send(order).unwrap()));
        assert!(outgoing.order("web1", Order::Cancel) && !outgoing.order("web2", Order::Cancel));
        assert_eq!(ordered.try_iter().collect::<Vec<_>>(), [Order::Cancel]);
        outgoing.order_all_to("a", Order::Untrusted);
        outgoing.order_all_to("b", Order::Untrusted);
        assert_eq!(ordered.try_iter().collect::<Vec<_>>(), [Order::Untrusted]);
        assert!(outgoing.has_attempt(AttemptId(3)) && outgoing.just_moved("web1").is_none());
        let ended = |vm: String, at| Ended {
            progress: Progress::new(&vm, "b", AttemptId(3), Bytes(4096)),
            end: End::Moved,
            why: None,
            at,
        };
        outgoing.end(ended("web1".into(), SystemTime::now()));
        assert!(outgoing.just_moved("web1").is_some() && outgoing.all().is_empty());
        (0..ENDED_MAX).for_each(|index| outgoing.end(ended(index.to_string(), SystemTime::now())));
        assert_eq!(outgoing.ended().len(), ENDED_MAX);
        outgoing.end(ended("old".into(), SystemTime::now() - ENDED_FOR * 2));
        assert_eq!(outgoing.ended().len(), ENDED_MAX - 1);
    }
}
