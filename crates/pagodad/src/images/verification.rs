//! Verifications of images under way: all of an image is read, which takes as long as its disk needs.
//!
//! Each has a thread of its own and holds no lock while it reads. Clients ask again and again how far it is; one that
//! nobody asks for any more ends. Of an image there is one at a time, whoever asks. Order of locks: all of them, then one's state.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagoda_api::types::{ApiError, ErrorCode, VERIFY_SILENCE_S_MAX, VerifyReport};
use pagoda_core::units::{Bytes, ChunkIdx};
use pagoda_image::{ImageId, Report, Store};

use super::describe;
use super::error::failed;

/// Images that are read at a time: more would only take the disk from VMs that swap to it.
const VERIFICATIONS_MAX: usize = 2;
/// How long a request waits for the end before it says how far it is.
const ANSWER_AFTER: Duration = Duration::from_secs(1);
const SILENCE_MAX: Duration = Duration::from_secs(VERIFY_SILENCE_S_MAX);

/// The verifications that clients ask about, by image.
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

impl Verifications {
    /// How far the verification of this image is, after a second at most. It begins if there is none.
    ///
    /// # Errors
    /// Others are under way.
    pub fn ask(&self, id: ImageId, memory: Bytes, store: &Arc<Store>) -> Result<VerifyReport, ApiError> {
        let verification = self.find_or_begin(id, memory, store)?;
        match verification.wait() {
            Some(End::Done(report)) => {
                // Who asks next has all read anew.
                let mut known = self.lock();
                if known.get(&id).is_some_and(|other| Arc::ptr_eq(other, &verification)) {
                    known.remove(&id);
                }
                Ok(report)
            }
            Some(End::GivenUp) | None => Ok(verification.progress()),
        }
    }

    fn find_or_begin(&self, id: ImageId, memory: Bytes, store: &Arc<Store>) -> Result<Arc<Verification>, ApiError> {
        let mut known = self.lock();
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
        let (reading, store) = (Arc::clone(&verification), Arc::clone(store));
        let started = std::thread::Builder::new().name("verify".into()).spawn(move || reading.run(&store, id));
        started.map_err(|error| failed("start a thread", &error))?;
        known.insert(id, Arc::clone(&verification));
        Ok(verification)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<ImageId, Arc<Verification>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Verification {
    fn new(memory: Bytes) -> Verification {
        let state = Mutex::new(State { asked: Instant::now(), end: None });
        Verification { memory, chunks: AtomicU64::new(0), state, ended: Condvar::new() }
    }

    /// Notes that somebody asks for it.
    fn touch(&self) {
        self.lock().asked = Instant::now();
    }

    fn has_ended(&self) -> bool {
        self.lock().end.is_some()
    }

    /// It is under way, or has a report that somebody may still come for.
    fn is_of_use(&self) -> bool {
        let state = self.lock();
        match &state.end {
            None => true,
            Some(End::Done(_)) => state.asked.elapsed() < SILENCE_MAX,
            Some(End::GivenUp) => false,
        }
    }

    /// Its end, if that comes soon.
    fn wait(&self) -> Option<End> {
        let state = self.lock();
        let waited = self.ended.wait_timeout_while(state, ANSWER_AFTER, |state| state.end.is_none());
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.asked = Instant::now();
        state.end.clone()
    }

    fn run(&self, store: &Store, id: ImageId) {
        let mut goes_on = |chunk: ChunkIdx| {
            self.chunks.store(u64::from(chunk.0), Ordering::Relaxed);
            self.lock().asked.elapsed() < SILENCE_MAX
        };
        let report = store.verify_while(id, &mut goes_on);
        let end = report.map_or(End::GivenUp, |report| End::Done(self.report(&report)));
        self.lock().end = Some(end);
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Bench, make, manifest};
    use super::*;
    use pagoda_image::Stage;

    #[test]
    fn what_nobody_asks_for_any_more_ends() {
        let bench = Bench::new("silent");
        let store = bench.images.store().unwrap();
        make(store, manifest(1, "web1", "one"), Stage::Filled);
        let verification = Verification::new(Bytes(2 << 20));
        verification.lock().asked = Instant::now().checked_sub(SILENCE_MAX).unwrap();
        verification.run(store, ImageId(1));
        assert!(matches!(verification.wait(), Some(End::GivenUp)));
        assert!(verification.has_ended() && !verification.is_of_use());
    }

    #[test]
    fn a_report_waits_for_whoever_began_it() {
        let bench = Bench::new("fetched");
        let store = bench.images.store().unwrap();
        make(store, manifest(1, "web1", "one"), Stage::Filled);
        let verifications = Verifications::default();
        let begun = verifications.find_or_begin(ImageId(1), Bytes(2 << 20), store).unwrap();
        let again = verifications.find_or_begin(ImageId(1), Bytes(2 << 20), store).unwrap();
        assert!(Arc::ptr_eq(&begun, &again), "one at a time");
        while begun.wait().is_none() {}
        assert!(verifications.ask(ImageId(1), Bytes(2 << 20), store).unwrap().is_done);
        assert!(verifications.lock().is_empty(), "it is forgotten when it was fetched");
    }

    #[test]
    fn only_so_many_run_at_a_time() {
        let bench = Bench::new("busy");
        let store = bench.images.store().unwrap();
        let verifications = Verifications::default();
        for id in 0..VERIFICATIONS_MAX as u128 {
            // Under way, without a thread.
            verifications.lock().insert(ImageId(id), Arc::new(Verification::new(Bytes(2 << 20))));
        }
        let error = verifications.ask(ImageId(9), Bytes(2 << 20), store).unwrap_err();
        assert!(error.code == ErrorCode::WrongState && error.message.contains("2 snapshots are being verified"));
        assert!(!verifications.ask(ImageId(0), Bytes(2 << 20), store).unwrap().is_done);
    }
}
