//! VMs that have ended, and whose disks do not have their names yet.
//!
//! Each attempt has a thread of its own, one at a time for a VM, because it may wait for a file system for ever. Whoever needs the disks
//! asks for an attempt and waits for it, so long and no longer. Nobody waits for a disk while this is locked.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::record::Record;

/// The first pause between two attempts, and the longest.
const PAUSE: Duration = Duration::from_secs(5);
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// Such VMs by name, and how far the attempts for each are.
#[derive(Debug, Default)]
pub struct Unsettled {
    all: Mutex<BTreeMap<String, Ended>>,
    changed: Condvar,
}

/// A VM that has ended, and how the attempts to settle its disks went.
#[derive(Debug)]
struct Ended {
    record: Record,
    /// Why its disks could not be settled when that was tried last.
    why: Option<String>,
    /// Attempts that have begun, and that have ended.
    begun: u64,
    ended: u64,
    due: Instant,
    pause: Duration,
}

impl Ended {
    fn is_tried(&self) -> bool {
        self.begun > self.ended
    }
}

impl Unsettled {
    /// Notes what is left of a VM, which is to be tried at once.
    pub fn insert(&self, record: Record) {
        let ended = Ended { record, why: None, begun: 0, ended: 0, due: Instant::now(), pause: PAUSE };
        self.lock().insert(ended.record.name.clone(), ended);
        self.changed.notify_all();
    }

    /// The records of all VMs whose disks are not settled.
    pub fn all(&self) -> Vec<Record> {
        self.lock().values().map(|ended| ended.record.clone()).collect()
    }

    /// Begins an attempt for each that is due. Without one, this waits so long.
    pub fn begin_due(&self, max: Duration) -> Vec<Record> {
        let is_due = |ended: &Ended| !ended.is_tried() && ended.due <= Instant::now();
        let mut all = self.lock();
        if !all.values().any(is_due) {
            all = self.changed.wait_timeout(all, max).unwrap_or_else(PoisonError::into_inner).0;
        }
        let due = all.values_mut().filter(|ended| is_due(ended));
        due.map(|ended| {
            ended.begun += 1;
            ended.due = Instant::now() + ended.pause;
            ended.record.clone()
        })
        .collect()
    }

    /// An attempt has ended. A VM that is settled is forgotten. Whether the reason is another one than before.
    pub fn end(&self, name: &str, outcome: Result<(), String>) -> bool {
        let mut all = self.lock();
        let is_new = match outcome {
            Ok(()) => all.remove(name).is_some(),
            Err(why) => all.get_mut(name).is_some_and(|ended| {
                ended.ended = ended.begun;
                // Somebody may have asked for the next one meanwhile.
                ended.due = ended.due.min(Instant::now() + ended.pause);
                ended.pause = (ended.pause * 2).min(PAUSE_MAX);
                ended.why.as_ref() != Some(&why) && ended.why.replace(why).is_none_or(|_| true)
            }),
        };
        self.changed.notify_all();
        is_new
    }

    /// Has it tried now, if it is there, and waits until that has ended.
    ///
    /// # Errors
    /// Why the disks do not have their names; their file system does not answer in time.
    pub fn settle(&self, name: &str, max: Duration) -> Result<(), String> {
        let deadline = Instant::now() + max;
        let mut all = self.lock();
        let Some(ended) = all.get_mut(name) else { return Ok(()) };
        // What one that has begun saw may have been put right since.
        let (wanted, of) = (ended.begun + 1, ended.record.token);
        ended.due = Instant::now();
        self.changed.notify_all();
        loop {
            match all.get(name).filter(|ended| ended.record.token == of) {
                None => return Ok(()),
                Some(Ended { ended, why: Some(why), .. }) if *ended >= wanted => return Err(why.clone()),
                Some(_) => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("their file system has not answered for {} s", max.as_secs()));
            }
            all = self.changed.wait_timeout(all, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Ended>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pagoda_abi::Token;
    use pagoda_api::types::{VmKind, VmSpec};

    use super::*;

    fn record(name: &str) -> Record {
        Record::new(name, Token([name.len() as u8; 16]), VmKind::Qemu, &[2 << 20], VmSpec::default())
    }

    fn names(records: &[Record]) -> Vec<&str> {
        records.iter().map(|record| record.name.as_str()).collect()
    }

    #[test]
    fn one_that_hangs_holds_up_no_other_and_is_not_tried_twice() {
        let unsettled = Unsettled::default();
        unsettled.insert(record("hangs"));
        assert_eq!(names(&unsettled.begin_due(Duration::ZERO)), ["hangs"]);
        unsettled.insert(record("web1"));
        let why = unsettled.settle("hangs", Duration::ZERO).unwrap_err();
        assert!(why.contains("has not answered"), "{why}");
        assert_eq!(names(&unsettled.begin_due(Duration::ZERO)), ["web1"]);
        assert!(unsettled.end("web1", Ok(())));
        assert_eq!(unsettled.settle("web1", Duration::ZERO), Ok(()));
        assert!(unsettled.begin_due(Duration::ZERO).is_empty());
        // Somebody has asked meanwhile.
        assert!(unsettled.end("hangs", Err("its file is another one".into())));
        assert_eq!(names(&unsettled.begin_due(Duration::ZERO)), ["hangs"]);
        assert!(!unsettled.end("hangs", Err("its file is another one".into())), "it has been said");
        assert!(unsettled.begin_due(Duration::ZERO).is_empty(), "it is not due");
        assert_eq!(names(&unsettled.all()), ["hangs"]);
    }

    /// Who asks learns of an attempt that began afterwards.
    #[test]
    fn who_asks_learns_of_an_attempt_of_its_own() {
        let unsettled = Arc::new(Unsettled::default());
        unsettled.insert(record("web1"));
        unsettled.begin_due(Duration::ZERO);
        let asking = Arc::clone(&unsettled);
        let asks = std::thread::spawn(move || asking.settle("web1", Duration::from_secs(600)));
        while unsettled.lock().values().any(|ended| ended.due > Instant::now()) {
            std::thread::yield_now();
        }
        unsettled.end("web1", Err("before it was put right".into()));
        assert_eq!(names(&unsettled.begin_due(Duration::from_secs(600))), ["web1"]);
        unsettled.end("web1", Err("after".into()));
        assert_eq!(asks.join().unwrap(), Err("after".into()));
    }
}
