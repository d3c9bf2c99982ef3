//! When snapshots of which VMs are due, by the VMs' timetables.
//!
//! Pure bookkeeping: time is an argument, and is monotonic, so a jump of the wall clock moves nothing. The timetables themselves
//! are in the VMs' records; [`crate::snapshots::timetables`] says which VMs there are and does what is due.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagoda_api::types::{Autosnapshot, AutosnapshotInfo};
use pagoda_core::policy::VmId;

/// The timetables of all VMs, and what each has done so far.
#[derive(Debug, Default)]
pub struct Timetables(Mutex<BTreeMap<VmId, Kept>>);

/// A VM with a timetable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Follower {
    pub id: VmId,
    pub name: String,
    pub timetable: Autosnapshot,
}

#[derive(Debug)]
struct Kept {
    name: String,
    timetable: Autosnapshot,
    due: Instant,
    /// There may be more snapshots than are to be kept.
    must_remove: bool,
    last: Option<String>,
    taken: u64,
    failures: u64,
    /// Why the last one was not taken.
    not_taken: Option<String>,
    /// Why an old one was not removed.
    not_removed: Option<String>,
}

impl Timetables {
    /// These VMs have a timetable, and no others. `age` says how old the newest snapshot is that was taken by a VM's timetable;
    /// it is asked for VMs that are new here, so that a daemon that is restarted often still takes snapshots.
    pub fn follow(&self, vms: &[Follower], now: Instant, age: impl Fn(&Follower) -> Option<Duration>) {
        let mut all = self.lock();
        all.retain(|id, _| vms.iter().any(|vm| vm.id == *id));
        for vm in vms {
            let every = Duration::from_secs(vm.timetable.every_s);
            match all.get_mut(&vm.id) {
                Some(kept) if kept.timetable == vm.timetable => {}
                Some(kept) => {
                    (kept.timetable, kept.due, kept.must_remove) = (vm.timetable, now + every, true);
                    (kept.not_taken, kept.not_removed) = (None, None);
                }
                None => {
                    let due = now + every.saturating_sub(age(vm).unwrap_or_default());
                    all.insert(vm.id, Kept::new(vm, due));
                }
            }
        }
    }

    /// VMs of which a snapshot is due, the longest due first.
    pub fn due(&self, now: Instant) -> Vec<Follower> {
        let all = self.lock();
        let mut due: Vec<_> = all.iter().filter(|(_, kept)| kept.due <= now).collect();
        due.sort_by_key(|(_, kept)| kept.due);
        due.into_iter().map(|(id, kept)| kept.follower(*id)).collect()
    }

    /// VMs of which old snapshots may have to be removed.
    pub fn to_remove(&self) -> Vec<Follower> {
        self.lock().iter().filter(|(_, kept)| kept.must_remove).map(|(id, kept)| kept.follower(*id)).collect()
    }

    /// What became of one that was due: its name, or why it was not taken. The next one is due a period later.
    pub fn ended(&self, id: VmId, now: Instant, outcome: Result<String, String>) {
        self.with(id, |kept| {
            let every = Duration::from_secs(kept.timetable.every_s);
            // What is late moves the ones behind it, and is not made up for.
            kept.due = Some(kept.due + every).filter(|due| *due > now).unwrap_or(now + every);
            match outcome {
                Ok(name) => {
                    (kept.last, kept.not_taken, kept.must_remove) = (Some(name), None, true);
                    kept.taken += 1;
                }
                Err(why) => {
                    kept.not_taken = Some(why);
                    kept.failures += 1;
                }
            }
        });
    }

    /// What became of removing old ones. It is tried again behind the next snapshot.
    pub fn removed(&self, id: VmId, outcome: Result<(), String>) {
        self.with(id, |kept| (kept.must_remove, kept.not_removed) = (false, outcome.err()));
    }

    pub fn info(&self, id: VmId, now: Instant) -> AutosnapshotInfo {
        let of = |kept: &mut Kept| AutosnapshotInfo {
            last: kept.last.clone(),
            next_in_s: kept.due.saturating_duration_since(now).as_secs(),
            problem: kept.problem(),
            failures: kept.failures,
            taken: kept.taken,
        };
        self.with(id, of).unwrap_or_default()
    }

    /// A sentence for each VM whose timetable is not kept.
    pub fn problems(&self) -> Vec<String> {
        let all = self.lock();
        let of = |kept: &Kept| Some(format!("snapshots of {} by its timetable: {}", kept.name, kept.problem()?));
        all.values().filter_map(of).collect()
    }

    fn with<T>(&self, id: VmId, act: impl FnOnce(&mut Kept) -> T) -> Option<T> {
        self.lock().get_mut(&id).map(act)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VmId, Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn new(vm: &Follower, due: Instant) -> Kept {
        Kept {
            name: vm.name.clone(),
            timetable: vm.timetable,
            due,
            // Not before one is taken: a restored VM has the timetable of that time, which may keep fewer than there are.
            must_remove: false,
            last: None,
            taken: 0,
            failures: 0,
            not_taken: None,
            not_removed: None,
        }
    }

    fn follower(&self, id: VmId) -> Follower {
        Follower { id, name: self.name.clone(), timetable: self.timetable }
    }

    fn problem(&self) -> Option<String> {
        self.not_taken.clone().or_else(|| self.not_removed.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: VmId = VmId(7);

    fn vm(every_s: u64) -> Follower {
        Follower { id: ID, name: "web1".into(), timetable: Autosnapshot { every_s, keep: 2, disks: false } }
    }

    fn at(begin: Instant, seconds: u64) -> Instant {
        begin + Duration::from_secs(seconds)
    }

    #[test]
    fn one_is_due_a_period_after_the_last() {
        let (timetables, begin) = (Timetables::default(), Instant::now());
        let is_due = |seconds| !timetables.due(at(begin, seconds)).is_empty();
        timetables.follow(&[vm(60)], begin, |_| None);
        assert!(!is_due(59) && is_due(60));
        timetables.ended(ID, at(begin, 61), Ok("auto-1".into()));
        assert!(!is_due(119) && is_due(120), "the period does not drift");
        timetables.ended(ID, at(begin, 500), Err("it is stalled".into()));
        assert!(!is_due(559) && is_due(560), "what was missed is not made up for");
        let info = timetables.info(ID, at(begin, 530));
        assert_eq!((info.last.as_deref(), info.next_in_s), (Some("auto-1"), 30));
        assert_eq!((info.taken, info.failures, info.problem.as_deref()), (1, 1, Some("it is stalled")));
        assert_eq!(timetables.problems(), ["snapshots of web1 by its timetable: it is stalled"]);
        timetables.ended(ID, at(begin, 560), Ok("auto-2".into()));
        assert!(timetables.problems().is_empty());
    }

    #[test]
    fn what_was_taken_before_counts_within_a_period() {
        let begin = Instant::now();
        for (age, due) in [(None, 60), (Some(20), 40), (Some(60), 0), (Some(100_000), 0)] {
            let timetables = Timetables::default();
            timetables.follow(&[vm(60)], begin, |_| age.map(Duration::from_secs));
            let is_due = |seconds| !timetables.due(at(begin, seconds)).is_empty();
            assert!(is_due(due) && (due == 0 || !is_due(due - 1)), "{age:?}");
        }
    }

    #[test]
    fn a_timetable_that_changes_begins_anew_and_one_that_is_gone_is_forgotten() {
        let (timetables, begin) = (Timetables::default(), Instant::now());
        timetables.follow(&[vm(60)], begin, |_| None);
        timetables.follow(&[vm(60)], at(begin, 50), |_| None);
        assert_eq!(timetables.due(at(begin, 60)), [vm(60)]);
        timetables.follow(&[vm(10)], at(begin, 100), |_| None);
        assert!(timetables.due(at(begin, 109)).is_empty());
        assert_eq!(timetables.due(at(begin, 110)), [vm(10)]);
        timetables.follow(&[], at(begin, 111), |_| None);
        assert!(timetables.due(at(begin, 1000)).is_empty());
        assert_eq!(timetables.info(ID, begin), AutosnapshotInfo::default());
    }

    #[test]
    fn old_ones_are_removed_behind_each_new_one() {
        let (timetables, begin) = (Timetables::default(), Instant::now());
        timetables.follow(&[vm(60)], begin, |_| None);
        assert!(timetables.to_remove().is_empty(), "a VM that was restored may keep fewer than before");
        timetables.ended(ID, begin, Err("x".into()));
        assert!(timetables.to_remove().is_empty());
        timetables.ended(ID, begin, Ok("auto-1".into()));
        assert_eq!(timetables.to_remove(), [vm(60)]);
        timetables.removed(ID, Err("its disk failed".into()));
        assert!(timetables.to_remove().is_empty());
        assert_eq!(timetables.info(ID, begin).problem.as_deref(), Some("its disk failed"));
    }
}
