//! How often a VM is restored: a crash loop ends.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

/// Restores that are longer ago do not count.
pub const CRASH_WINDOW: Duration = Duration::from_secs(600);

/// Restores of a VM within [`CRASH_WINDOW`].
#[derive(Debug)]
pub struct Budget {
    restores_max: u32,
    spent: VecDeque<Instant>,
}

impl Budget {
    pub fn new(restores_max: u32) -> Budget {
        Budget { restores_max, spent: VecDeque::new() }
    }

    pub fn restores_max(&self) -> u32 {
        self.restores_max
    }

    /// Whether one more is allowed. Then it counts.
    pub fn spend(&mut self, now: Instant) -> bool {
        while self.spent.front().is_some_and(|at| now.saturating_duration_since(*at) >= CRASH_WINDOW) {
            self.spent.pop_front();
        }
        let is_allowed = self.spent.len() < self.restores_max as usize;
        if is_allowed {
            self.spent.push_back(now);
        }
        is_allowed
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (spent, max, minutes) = (self.spent.len(), self.restores_max, CRASH_WINDOW.as_secs() / 60);
        write!(f, " ({spent} of {max} restores within {minutes} min)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_loop_ends_and_an_old_crash_is_forgotten() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut budget = Budget::new(2);
        assert!(budget.spend(at(0)) && budget.spend(at(300)));
        assert_eq!(budget.to_string(), " (2 of 2 restores within 10 min)");
        assert!(!budget.spend(at(599)));
        assert!(budget.spend(at(600)), "the first is forgotten");
        assert!(!budget.spend(at(899)), "one that was refused does not count");
        assert!(budget.spend(at(900)));
    }
}
