//! The attempts of other hosts to move a VM here that are under way: who has the machine of each, and how it is told something.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pagoda_core::policy::VmId;
use pagoda_link::PublicKey;
use pagoda_move::units::{AttemptId, RoundNo};
use pagoda_move::wire::Control;
use pagoda_pager::handle::Handle;

use super::channel::ControlSender;
use super::store::Store;
use crate::qmp::Monitor;

/// A VM whose QEMU waits for its state.
#[derive(Debug)]
pub struct Arriving {
    pub id: VmId,
    pub store: Arc<Store>,
    pub handle: Arc<Handle>,
    pub qmp: Arc<Monitor>,
}

/// Moves to this host at a time.
const SESSIONS_MAX: usize = 64;
/// What waits for a session at most.
pub const INPUTS_MAX: usize = 64;

/// The number of a control stream, which this daemon gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkNo(pub u64);

/// What a session hears of.
#[derive(Debug)]
pub enum Input {
    LinkUp(LinkNo, Arc<ControlSender>),
    LinkDown(LinkNo),
    Message(LinkNo, Control),
    /// All pages of this round are in their places.
    RoundKept(RoundNo),
    /// The VM is made, and its QEMU waits; or why that is not possible.
    Prepared(Result<Box<Arriving>, String>),
    /// All pages are in their places.
    Whole,
    /// Pages could not be stored, and why.
    Failed(String),
    /// An operator says that the source is gone for good.
    Resolve,
}

/// One that is under way.
#[derive(Clone, Debug)]
pub struct Session {
    pub vm: String,
    pub peer: PublicKey,
    /// Whoever brings more than the session takes in waits.
    pub inputs: SyncSender<Input>,
    /// Where its pages go, once there is a VM.
    pub store: Option<Arc<Store>>,
    pub progress: Arc<Mutex<Progress>>,
}

/// How far one is, for users.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    pub phase: &'static str,
    pub rounds: u32,
    pub in_dram: u64,
    pub in_swap: u64,
    pub why: Option<String>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Sessions {
    by_attempt: Mutex<BTreeMap<AttemptId, Session>>,
    links: AtomicU64,
}

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<AttemptId, Session>> {
        self.by_attempt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for another control stream.
    pub fn next_link(&self) -> LinkNo {
        LinkNo(self.links.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Enters one, whose VM nobody else has a claim on. False: there are too many.
    #[must_use]
    pub fn enter(&self, attempt: AttemptId, session: Session) -> bool {
        let mut all = self.lock();
        if all.len() >= SESSIONS_MAX || all.contains_key(&attempt) {
            return false;
        }
        all.insert(attempt, session);
        true
    }

    /// The one of an attempt that this host makes.
    pub fn of(&self, attempt: AttemptId, peer: &PublicKey) -> Option<Session> {
        self.lock().get(&attempt).filter(|session| session.peer == *peer).cloned()
    }

    /// The one of a VM.
    pub fn of_vm(&self, vm: &str) -> Option<(AttemptId, Session)> {
        self.lock().iter().find(|(_, session)| session.vm == vm).map(|(attempt, session)| (*attempt, session.clone()))
    }

    /// Its pages have places from now on.
    pub fn set_store(&self, attempt: AttemptId, store: &Arc<Store>) {
        if let Some(session) = self.lock().get_mut(&attempt) {
            session.store = Some(Arc::clone(store));
        }
    }

    /// It is over.
    pub fn leave(&self, attempt: AttemptId) {
        self.lock().remove(&attempt);
    }

    pub fn all(&self) -> Vec<Session> {
        self.lock().values().cloned().collect()
    }
}
