//! Follows the thread that faults.
//!
//! A wake-up on the faulter's own CPU costs a third of one on another CPU, less where interrupts between CPUs are dear
//! (measured: bench `fault`; mechanisms.md Q4: 3 us against 8-12). The faulter sleeps until it is answered, so the engine takes
//! nothing from it. This holds while one thread faults page by page; a stream of whole chunks or several threads gain
//! more from the engine running beside them, and then it runs where the scheduler likes.

use std::time::{Duration, Instant};

use pagoda_sys::process::{Affinity, CpuOf};

/// Confidence at which a thread is followed.
const FOLLOW_AT: u32 = 24;
/// Confidence is not kept beyond this: a change of the load is noticed after some ten faults.
const CONFIDENCE_MAX: u32 = 48;
/// What a fault of another thread, or of a stream, takes from it.
const DOUBT: u32 = 4;
/// How often the thread's CPU is looked up: the scheduler moves it seldom, and the look costs 2 us.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Which thread the engine follows, and how sure it is of it.
#[derive(Debug)]
pub struct Follow {
    pid: u32,
    tid: u32,
    confidence: u32,
    /// The CPU this thread is bound to.
    bound: Option<usize>,
    looked: Option<Instant>,
    /// The followed thread can run on one CPU alone.
    pinned: bool,
    cpu_of: Option<CpuOf>,
    home: Option<Affinity>,
}

impl Follow {
    /// Follows threads of this process. Made on the thread that will follow.
    pub fn new(pid: u32) -> Follow {
        let home = Affinity::of_this_thread().ok();
        Follow { pid, tid: 0, confidence: 0, bound: None, looked: None, pinned: false, cpu_of: None, home }
    }

    /// A fault of thread `tid`, which was or was not part of a stream of chunks.
    pub fn note(&mut self, tid: u32, stream: bool, now: Instant) {
        if tid == self.tid && !stream {
            self.confidence = (self.confidence + 1).min(CONFIDENCE_MAX);
        } else {
            self.confidence = self.confidence.saturating_sub(DOUBT);
            if self.confidence == 0 && tid != self.tid {
                self.tid = tid;
                self.cpu_of = None;
            }
        }
        match (self.confidence, self.bound) {
            (FOLLOW_AT.., _) => self.go_to_it(now),
            (0, Some(_)) => self.go_home(),
            _ => {}
        }
    }

    /// This thread shares a CPU with the one it serves, and nothing will part them. (A thread that may run elsewhere would be
    /// moved away from a CPU that looks busy.)
    pub fn shares_cpu(&self) -> bool {
        self.bound.is_some() && self.pinned
    }

    fn go_to_it(&mut self, now: Instant) {
        if self.looked.is_some_and(|looked| now.saturating_duration_since(looked) < LOOK_EVERY) {
            return;
        }
        self.looked = Some(now);
        if self.cpu_of.is_none() {
            self.cpu_of = CpuOf::open(self.pid, self.tid).ok();
        }
        let Some(cpu) = self.cpu_of.as_ref().and_then(|of| of.cpu().ok()) else { return self.go_home() };
        self.pinned = Affinity::of_thread(self.tid).is_ok_and(|there| there.is_pinned());
        if self.bound != Some(cpu)
            && let Some(there) = self.home.as_ref().and_then(|home| home.only(cpu))
            && there.apply().is_ok()
        {
            self.bound = Some(cpu);
        }
    }

    fn go_home(&mut self) {
        if self.bound.take().is_some()
            && let Some(home) = &self.home
        {
            // A thread that stays bound is only slower.
            let _ = home.apply();
        }
        self.cpu_of = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> u32 {
        rustix_tid()
    }

    fn rustix_tid() -> u32 {
        let link = std::fs::read_link("/proc/thread-self").expect("proc");
        link.file_name().and_then(|name| name.to_str()?.parse().ok()).expect("thread id")
    }

    #[test]
    fn one_thread_is_followed_and_a_crowd_is_not() {
        let mut follow = Follow::new(std::process::id());
        let now = Instant::now();
        for _ in 0..2 * FOLLOW_AT {
            follow.note(me(), false, now);
        }
        assert!(follow.bound.is_some());
        for other in 0..CONFIDENCE_MAX {
            follow.note(1_000_000 + other, false, now);
        }
        assert_eq!(follow.bound, None);
    }

    #[test]
    fn a_stream_is_not_followed() {
        let mut follow = Follow::new(std::process::id());
        for _ in 0..2 * FOLLOW_AT {
            follow.note(me(), true, Instant::now());
        }
        assert_eq!(follow.bound, None);
    }
}
