//! A part of a processor that background work may use: earned as time passes, spent as it is used.

/// Nanoseconds to spend. It may be overdrawn by one piece of work, which the next one waits for.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    left_ns: i64,
    max_ns: i64,
    earned_at_ns: u64,
}

impl Budget {
    /// An empty budget that never holds more than `max_ns`.
    pub fn new(max_ns: u64) -> Budget {
        Budget { left_ns: 0, max_ns: max_ns as i64, earned_at_ns: 0 }
    }

    /// Time has passed until `now_ns` of any steady clock: earns `per_mille` thousandths of it.
    pub fn earn(&mut self, now_ns: u64, per_mille: u32) {
        let passed = now_ns.saturating_sub(self.earned_at_ns);
        self.earned_at_ns = now_ns;
        let earned = (passed / 1000).saturating_mul(u64::from(per_mille));
        self.left_ns = self.left_ns.saturating_add(i64::try_from(earned).unwrap_or(i64::MAX)).min(self.max_ns);
    }

    /// A piece of work took so long.
    pub fn spend(&mut self, ns: u64) {
        self.left_ns = self.left_ns.saturating_sub(i64::try_from(ns).unwrap_or(i64::MAX));
    }

    /// Says whether all time is used up or overdrawn, so that work has to wait.
    pub fn is_spent(&self) -> bool {
        self.left_ns <= 0
    }

    /// How long it takes at this rate until something is left.
    pub fn wait_ns(&self, per_mille: u32) -> u64 {
        if self.left_ns > 0 {
            return 0;
        }
        (self.left_ns.unsigned_abs() + 1) / u64::from(per_mille.max(1)) * 1000 + 1000
    }
}

#[cfg(test)]
mod tests {
    use super::Budget;

    const MS: u64 = 1_000_000;

    #[test]
    fn work_takes_its_part_of_the_time_whatever_a_piece_takes() {
        for piece in [10_000, 100_000, 7 * MS] {
            let mut budget = Budget::new(2 * MS);
            let (mut now, mut worked) = (0, 0);
            while now < 10_000 * MS {
                budget.earn(now, 30);
                if budget.is_spent() {
                    now += budget.wait_ns(30).max(1000);
                } else {
                    budget.spend(piece);
                    worked += piece;
                    now += piece;
                }
            }
            let part = worked as f64 / now as f64;
            assert!((0.029..0.032).contains(&part), "pieces of {piece} ns: {part}");
        }
    }

    #[test]
    fn what_is_not_used_does_not_pile_up() {
        let mut budget = Budget::new(2 * MS);
        budget.earn(3_600_000 * MS, 30);
        budget.spend(2 * MS);
        assert!(budget.is_spent());
    }
}
