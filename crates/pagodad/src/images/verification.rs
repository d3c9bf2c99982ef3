//! Verifications of images under way: all of an image is read, which takes as long as its disk needs.
//!
//! Each has a thread of its own and holds no lock while it reads. Clients ask again and again how far it is; one that
//! nobody asks for any more ends. Of an image there is one at a time, whoever asks. Order of locks: all of them, then one's state.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pagoda_api::types::{ApiError, ErrorCode, SnapshotName, VERIFY_SILENCE_S_MAX, VerifyReport};
use pagoda_core::units::{Bytes, ChunkIdx};
use pagoda_image::{ImageId, Manifest, Report, Stage, Store};

use super::{Found, Images, describe, lock, refused};

/// Images that are read at a time: more would only take the disk from VMs that swap to it.
const VERIFICATIONS_MAX: usize = 2;
/// How long a request waits for the end before it says how far it is.
const ANSWER_AFTER: Duration = Duration::from_secs(1);
const SILENCE_MAX: Duration = Duration::from_secs(VERIFY_SILENCE_S_MAX);

/// See the module.
#[derive(Debug, Default)]
pub struct Verifications(Mutex<BTreeMap<ImageId, Arc<Verification>>>);

#[derive(Debug)]
struct Verification {
    memory: Bytes,
    /// Chunks that were looked at.
    chunks: AtomicU64,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug)]
struct State {
    asked: Instant,
    end: Option<End>,
}

#[derive(Debug, Clone)]
enum End {
    Done(VerifyReport),
    /// Nobody asked for it any more.
    GivenUp,
}

impl Images {
    /// Begins to verify a snapshot, or says how far that is. Waits for a second at most.
    ///
    /// # Errors
    /// There is none of this name; it is lost, or not filled yet; others are verified.
    pub fn verify(&self, name: &SnapshotName) -> Result<VerifyReport, ApiError> {
        let Found { listed, manifest } = self.find(name)?;
        self.check_whole(name, &manifest)?;
        let store = Arc::clone(self.store()?);
        let verification = self.verifications.ask(listed.id, describe::memory(&manifest), store)?;
        Ok(self.verifications.wait(listed.id, &verification))
    }

    /// What is being filled has no end that could be compared, and what is lost has no content.
    fn check_whole(&self, name: &SnapshotName, manifest: &Manifest) -> Result<(), ApiError> {
        let boot_id = self.boot_id()?;
        match manifest.check_usable(boot_id) {
            Ok(()) => Ok(()),
            Err(why) if manifest.stage == Stage::Begun && manifest.boot_id == boot_id => {
                Err(refused(format!("{name} cannot be verified: {why}"), Some("try again when it is filled")))
            }
            Err(why) => {
                Err(refused(format!("{name} cannot be verified: {why}"), Some("`pagoda snapshot rm` removes it")))
            }
        }
    }
}

impl Verifications {
    /// The verification of this image, which begins if there is none.
    fn ask(&self, id: ImageId, memory: Bytes, store: Arc<Store>) -> Result<Arc<Verification>, ApiError> {
        let mut known = lock(&self.0);
        known.retain(|_, verification| verification.is_of_use());
        if let Some(verification) = known.get(&id) {
            verification.touch();
            return Ok(Arc::clone(verification));
        }
        if known.values().filter(|verification| !verification.has_ended()).count() >= VERIFICATIONS_MAX {
            let why = format!("{VERIFICATIONS_MAX} snapshots are being verified");
            return Err(ApiError::new(ErrorCode::WrongState, why, Some("try again when one of them is done")));
        }
        let verification = Arc::new(Verification::new(memory));
        let reading = Arc::clone(&verification);
        let started = std::thread::Builder::new().name("verify".into()).spawn(move || reading.run(&store, id));
        started.map_err(|error| super::failed("start a thread", &error))?;
        known.insert(id, Arc::clone(&verification));
        Ok(verification)
    }

    /// Its report, or how far it is after a while. A report that was handed out is forgotten: who asks next has all read anew.
    fn wait(&self, id: ImageId, verification: &Arc<Verification>) -> VerifyReport {
        match verification.wait() {
            Some(End::Done(report)) => {
                let mut known = lock(&self.0);
                if known.get(&id).is_some_and(|other| Arc::ptr_eq(other, verification)) {
                    known.remove(&id);
                }
                report
            }
            Some(End::GivenUp) | None => verification.progress(),
        }
    }
}

impl Verification {
    fn new(memory: Bytes) -> Verification {
        let state = Mutex::new(State { asked: Instant::now(), end: None });
        Verification { memory, chunks: AtomicU64::new(0), state, ended: Condvar::new() }
    }

    /// Somebody asks for it.
    fn touch(&self) {
        lock(&self.state).asked = Instant::now();
    }

    fn has_ended(&self) -> bool {
        lock(&self.state).end.is_some()
    }

    /// It is under way, or has a report that somebody may still come for.
    fn is_of_use(&self) -> bool {
        let state = lock(&self.state);
        match &state.end {
            None => true,
            Some(End::Done(_)) => state.asked.elapsed() < SILENCE_MAX,
            Some(End::GivenUp) => false,
        }
    }

    /// Its end, if that comes soon.
    fn wait(&self) -> Option<End> {
        let state = lock(&self.state);
        let waited = self.ended.wait_timeout_while(state, ANSWER_AFTER, |state| state.end.is_none());
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.asked = Instant::now();
        state.end.clone()
    }

    fn run(&self, store: &Store, id: ImageId) {
        let mut goes_on = |chunk: ChunkIdx| {
            self.chunks.store(u64::from(chunk.0), Ordering::Relaxed);
            lock(&self.state).asked.elapsed() < SILENCE_MAX
        };
        let report = store.verify_while(id, &mut goes_on);
        let end = report.map_or(End::GivenUp, |report| End::Done(self.report(&report)));
        lock(&self.state).end = Some(end);
        self.ended.notify_all();
    }

    fn progress(&self) -> VerifyReport {
        let checked = self.chunks.load(Ordering::Relaxed).saturating_mul(pagoda_core::units::CHUNK_SIZE);
        VerifyReport { checked_bytes: checked, memory_bytes: self.memory.0, ..VerifyReport::default() }
    }

    fn report(&self, report: &Report) -> VerifyReport {
        VerifyReport {
            is_done: true,
            checked_bytes: self.memory.0,
            memory_bytes: self.memory.0,
            good_pages: report.blocks,
            zero_pages: report.zeros,
            damaged: report.damaged,
            damages: report.damages.iter().map(describe::damage).collect(),
        }
    }
}
