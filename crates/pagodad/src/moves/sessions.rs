//! The attempts of other hosts to move a VM here that are under way: who has the machine of each, and how it is told something.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use pagoda_api::types::MoveArbiter;
use pagoda_core::bits::PageSet;
use pagoda_core::policy::VmId;
use pagoda_core::units::{Bytes, ChunkIdx};
use pagoda_link::PublicKey;
use pagoda_move::owner::End;
use pagoda_move::units::{AttemptId, RoundNo};
use pagoda_move::wire::Control;
use pagoda_pager::handle::Handle;

use super::channel::ControlSender;
use super::destination::exports::Exports;
use super::outgoing::{ENDED_FOR, ENDED_MAX};
use super::store::Store;
use crate::qmp::Monitor;

/// A VM whose QEMU waits for its state.
#[derive(Debug)]
pub struct Arriving {
    pub id: VmId,
    pub store: Arc<Store>,
    pub handle: Arc<Handle>,
    /// Its disks, if they come too.
    pub exports: Option<Arc<Exports>>,
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
    /// A stream to the source, which this host has called.
    Called(LinkNo, Arc<ControlSender>),
    /// A data stream of the newest connection has ended.
    StreamEnded,
    /// It was tried to let the guest run. False: QEMU had ended before.
    LetRun(bool),
    /// QEMU has its state, or why not.
    Loaded(Result<(), String>),
    /// Pages that the VM lacked are in their places for good.
    Stored(ChunkIdx, PageSet),
    /// There is something to be told the source of the pages that a VM lacks here.
    Tail,
    /// All pages are in their places.
    Whole,
    /// Pages could not be stored, and why.
    Failed(String),
    /// An operator says that the source is gone for good.
    Resolve,
    /// It is given up if it is before the grant, and why.
    Cancel(String),
    /// The arbiter has answered, or was not reached.
    Arbiter,
    /// Its source is not trusted any more: the stream ends.
    Cut,
}

/// An attempt that is under way.
#[derive(Clone, Debug)]
pub struct Session {
    pub vm: String,
    pub peer: PublicKey,
    /// Whoever brings more than the session takes in waits.
    pub inputs: SyncSender<Input>,
    /// Where its pages go, once there is a VM.
    pub store: Option<Arc<Store>>,
    /// Where its disks go, until they are here.
    pub exports: Option<Arc<Exports>>,
    pub progress: Arc<Mutex<Progress>>,
    pub began: Instant,
}

impl Session {
    /// Content that is in its place here.
    pub fn came(&self) -> Bytes {
        let (in_dram, in_swap) = self.store.as_ref().map(|store| store.counts()).unwrap_or_default();
        (in_dram + in_swap).bytes()
    }
}

/// An attempt that has ended.
#[derive(Clone, Debug)]
pub struct Arrived {
    pub session: Session,
    /// How much of it was here, and how long it took.
    pub came: Bytes,
    pub elapsed: Duration,
    pub end: End,
    pub at: SystemTime,
}

/// How far one is, for users.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    pub phase: &'static str,
    pub rounds: u32,
    /// Bytes of a VM that runs here which are still at its source.
    pub left: u64,
    pub why: Option<String>,
    /// Whether an arbiter decides, and what it says.
    pub arbiter: Option<MoveArbiter>,
}

/// The attempts that are under way, and those that have ended of late.
#[derive(Debug, Default)]
pub struct Sessions {
    by_attempt: Mutex<BTreeMap<AttemptId, Session>>,
    links: AtomicU64,
    ended: Mutex<VecDeque<Arrived>>,
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

    /// The attempt to move a VM of this name here.
    pub fn of_vm(&self, vm: &str) -> Option<(AttemptId, Session)> {
        self.lock().iter().find(|(_, session)| session.vm == vm).map(|(attempt, session)| (*attempt, session.clone()))
    }

    /// Its pages have places from now on, and so have its disks.
    pub fn set_places(&self, attempt: AttemptId, arriving: &Arriving) {
        if let Some(session) = self.lock().get_mut(&attempt) {
            session.store = Some(Arc::clone(&arriving.store));
            session.exports.clone_from(&arriving.exports);
        }
    }

    /// Forgets an attempt that is over.
    pub fn leave(&self, attempt: AttemptId) {
        self.lock().remove(&attempt);
    }

    /// Notes how an attempt has ended, for users.
    pub fn note_end(&self, attempt: AttemptId, end: End) {
        let Some(session) = self.lock().get(&attempt).cloned() else { return };
        let mut all = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // What is kept of the session keeps nothing of the VM.
        let (came, elapsed) = (session.came(), session.began.elapsed());
        all.push_back(Arrived {
            session: Session { store: None, exports: None, ..session },
            came,
            elapsed,
            end,
            at: SystemTime::now(),
        });
        if all.len() > ENDED_MAX {
            all.pop_front();
        }
    }

    /// Those that have ended of late, the last one last.
    pub fn ended(&self) -> Vec<Arrived> {
        let mut all = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that was set back shows them for longer.
        let is_old = |ended: &Arrived| SystemTime::now().duration_since(ended.at).is_ok_and(|since| since > ENDED_FOR);
        all.retain(|ended| !is_old(ended));
        all.iter().cloned().collect()
    }

    pub fn all(&self) -> Vec<Session> {
        self.lock().values().cloned().collect()
    }
}
