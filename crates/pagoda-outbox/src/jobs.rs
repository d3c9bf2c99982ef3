//! Jobs of the guest, as their files show them. Nothing runs in the guest for it.
//!
//! A job is a file that is written. It begins when the file is made or opened for its first writing, and ends when the last writer
//! has closed it. A file whose name begins with a dot is not published by that: its job ends when it is renamed to a name without
//! one. A file that is removed before, or whose guest has gone, is a job that was given up.
//!
//! The last jobs that ended are kept ([`JOBS_KEPT_MAX`]) until they have been asked for, and longer: who asks again
//! gets them again.

use std::collections::{BTreeMap, VecDeque};

use crate::limits::{JOBS_KEPT_MAX, LABEL_BYTES_MAX};
use crate::node::Ino;
use crate::policy::Mode;

/// What the guest says of a job by extended attributes of its file, or of the directory that it is in.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Labels {
    /// `user.pagoda.job`, cut to [`LABEL_BYTES_MAX`].
    pub id: Box<[u8]>,
    /// `user.pagoda.destination`, cut as well.
    pub destination: Box<[u8]>,
    /// `user.pagoda.priority`: 0 to 255, and 0 if it is none.
    pub priority: u8,
    /// `user.pagoda.mode`, as it holds for the file.
    pub mode: Mode,
}

impl Labels {
    /// Of what an attribute's value is; `None`: it is not set.
    pub(crate) fn read<'a>(mode: Mode, value: impl Fn(&[u8]) -> Option<&'a [u8]>) -> Labels {
        let cut = |name: &[u8]| {
            let value = value(name).unwrap_or_default();
            value[..value.len().min(LABEL_BYTES_MAX)].into()
        };
        let priority = value(b"user.pagoda.priority").and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
        Labels {
            id: cut(b"user.pagoda.job"),
            destination: cut(b"user.pagoda.destination"),
            priority: priority.unwrap_or(0),
            mode,
        }
    }
}

/// A job that has ended. Times are the caller's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedJob {
    /// One more than that of the job that ended before; the first has 1.
    pub number: u64,
    pub began_ms: u64,
    pub ended_ms: u64,
    /// Its writes waited for room for so long. No longer than it took.
    pub blocked_us: u64,
    pub output: u64,
    /// Bytes that were not delivered when it began.
    pub backlog: u64,
    pub labels: Labels,
}

/// The counts say what became of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JobCounts {
    /// The oldest that is still kept, and the last that ended.
    pub oldest: u64,
    pub last: u64,
    /// So many jobs have written something, or have ended without.
    pub began: u64,
    pub given_up: u64,
}

#[derive(Debug, Clone, Copy)]
struct Running {
    began_ms: u64,
    backlog: u64,
    blocked_us: u64,
    has_written: bool,
}

/// See the module. As many run as there are files ([`crate::limits::NODES_MAX`]).
#[derive(Debug, Default)]
pub struct Jobs {
    running: BTreeMap<Ino, Running>,
    ended: VecDeque<EndedJob>,
    last: u64,
    began: u64,
    given_up: u64,
}

impl Jobs {
    /// A file was opened for writing. What runs already goes on.
    pub(crate) fn opened(&mut self, ino: Ino, now_ms: u64, backlog: impl FnOnce() -> u64) {
        self.running.entry(ino).or_insert_with(|| Running {
            began_ms: now_ms,
            backlog: backlog(),
            blocked_us: 0,
            has_written: false,
        });
    }

    pub(crate) fn is_running(&self, ino: Ino) -> bool {
        self.running.contains_key(&ino)
    }

    pub(crate) fn wrote(&mut self, ino: Ino) {
        if let Some(job) = self.running.get_mut(&ino).filter(|job| !job.has_written) {
            job.has_written = true;
            self.began += 1;
        }
    }

    pub(crate) fn waited(&mut self, ino: Ino, us: u64) {
        if let Some(job) = self.running.get_mut(&ino) {
            job.blocked_us = job.blocked_us.saturating_add(us);
        }
    }

    /// The file of a job will never be published.
    pub(crate) fn gone(&mut self, ino: Ino) {
        if let Some(job) = self.running.remove(&ino) {
            self.given_up += u64::from(job.has_written);
        }
    }

    /// The guest has gone, with all that it was writing.
    pub(crate) fn all_gone(&mut self) {
        self.given_up += self.running.values().filter(|job| job.has_written).count() as u64;
        self.running.clear();
    }

    /// The file of a job is whole and published.
    pub(crate) fn published(&mut self, ino: Ino, now_ms: u64, output: u64, labels: Labels) {
        let Some(job) = self.running.remove(&ino) else { return };
        // A file gets a size by a truncation alone, too.
        self.began += u64::from(!job.has_written);
        let ended_ms = now_ms.max(job.began_ms);
        let took_us = (ended_ms - job.began_ms).saturating_mul(1000);
        self.last += 1;
        self.ended.push_back(EndedJob {
            number: self.last,
            began_ms: job.began_ms,
            ended_ms,
            // Writes that wait at the same time have waited once.
            blocked_us: job.blocked_us.min(took_us),
            output,
            backlog: job.backlog,
            labels,
        });
        if self.ended.len() > JOBS_KEPT_MAX {
            self.ended.pop_front();
        }
    }

    /// Up to `count` jobs behind the one with this number, in the order in which they ended.
    pub fn after(&self, number: u64, count: usize) -> impl Iterator<Item = &EndedJob> {
        let skipped = number.saturating_add(1).saturating_sub(self.oldest());
        self.ended.iter().skip(usize::try_from(skipped).unwrap_or(usize::MAX)).take(count)
    }

    fn oldest(&self) -> u64 {
        self.ended.front().map_or(self.last + 1, |job| job.number)
    }

    pub fn counts(&self) -> JobCounts {
        JobCounts { oldest: self.oldest(), last: self.last, began: self.began, given_up: self.given_up }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(jobs: &Jobs, after: u64, count: usize) -> Vec<u64> {
        jobs.after(after, count).map(|job| job.number).collect()
    }

    #[test]
    fn the_last_jobs_are_kept_and_told_as_often_as_asked_for() {
        let mut jobs = Jobs::default();
        assert_eq!((numbers(&jobs, 0, 9), jobs.counts().oldest), (vec![], 1));
        for ino in 1..=JOBS_KEPT_MAX as u64 + 2 {
            jobs.opened(Ino(ino), ino, || 7);
            jobs.wrote(Ino(ino));
            jobs.published(Ino(ino), ino + 1, 10, Labels::default());
        }
        let last = JOBS_KEPT_MAX as u64 + 2;
        assert_eq!(jobs.counts(), JobCounts { oldest: 3, last, began: last, given_up: 0 });
        for _ in 0..2 {
            assert_eq!(numbers(&jobs, 0, 2), [3, 4], "1 and 2 are forgotten");
            assert_eq!(numbers(&jobs, 3, 2), [4, 5]);
        }
        assert_eq!(numbers(&jobs, last - 1, 9), [last]);
        assert_eq!((numbers(&jobs, last, 9), numbers(&jobs, u64::MAX, 9)), (vec![], vec![]));
    }

    #[test]
    fn waits_are_no_longer_than_the_job_and_clocks_may_stand() {
        let mut jobs = Jobs::default();
        jobs.opened(Ino(2), 100, || 1);
        jobs.opened(Ino(2), 900, || 2);
        jobs.waited(Ino(2), 30_000);
        jobs.waited(Ino(2), u64::MAX);
        jobs.published(Ino(2), 140, 5, Labels::default());
        let job = jobs.after(0, 1).next().unwrap();
        assert_eq!((job.began_ms, job.ended_ms, job.blocked_us, job.backlog), (100, 140, 40_000, 1));
        jobs.opened(Ino(3), 100, || 1);
        jobs.published(Ino(3), 50, 5, Labels::default());
        assert_eq!(jobs.after(1, 1).next().unwrap().ended_ms, 100);
    }

    #[test]
    fn labels_are_cut_and_a_priority_is_a_number() {
        let labels = |priority: &'static [u8]| {
            Labels::read(Mode::Stream, |name| match name {
                b"user.pagoda.job" => Some(&[b'x'; 100]),
                b"user.pagoda.priority" => Some(priority),
                _ => None,
            })
        };
        assert_eq!((labels(b"9").id.len(), labels(b"9").priority), (LABEL_BYTES_MAX, 9));
        for bad in [&b"256"[..], b"-1", b"high", b"", b"\xff"] {
            assert_eq!(labels(bad).priority, 0);
        }
        assert!(labels(b"").destination.is_empty());
    }
}
