//! Recursive least squares for one factor: `y = factor * x`, old pairs forgotten.
//!
//! Ten lines instead of a library of matrices; the estimator needs two factors that do not depend on each other.

/// One factor, and how well it is known.
#[derive(Clone, Debug)]
pub struct Rls {
    factor: f64,
    /// Its variance, in units of the noise's.
    spread: f64,
    /// A moving average of the squared errors of what was predicted before a pair was taken in.
    noise: f64,
    pairs: u32,
    forgetting: f64,
    low: f64,
    high: f64,
}

/// How little is known at first: one pair decides.
const SPREAD_START: f64 = 1e3;
/// The weight of a new error in the average.
const NOISE_GAIN: f64 = 0.1;
/// Pairs before the error says anything.
const PAIRS_MIN: u32 = 5;
/// A factor that is off by fewer standard errors may be chance.
const SIGNIFICANT: f64 = 2.0;
/// One that is off by less is not worth a correction.
const NEGLIGIBLE: f64 = 0.02;

impl Rls {
    /// A factor of 1 that stays within `low` and `high`. `forgetting` is the weight of a pair one pair later.
    pub fn new(forgetting: f64, low: f64, high: f64) -> Rls {
        assert!(0.0 < forgetting && forgetting <= 1.0 && low <= 1.0 && 1.0 <= high, "limits of a factor");
        Rls { factor: 1.0, spread: SPREAD_START, noise: 0.0, pairs: 0, forgetting, low, high }
    }

    /// Takes in a pair. One that is no number, or has no `x`, says nothing.
    pub fn update(&mut self, x: f64, y: f64) {
        if !x.is_finite() || !y.is_finite() || x <= 0.0 {
            return;
        }
        let error = y - self.factor * x;
        let gain = self.spread * x / (self.forgetting + self.spread * x * x);
        self.factor = (self.factor + gain * error).clamp(self.low, self.high);
        self.spread = ((1.0 - gain * x) * self.spread / self.forgetting).min(SPREAD_START);
        // The first error is of the start value, not of the data.
        if self.pairs > 0 {
            let gain = NOISE_GAIN.max(1.0 / f64::from(self.pairs));
            self.noise += gain * (error * error - self.noise);
        }
        self.pairs = self.pairs.saturating_add(1);
    }

    /// Gives the factor as it is, even if chance explains it.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// The factor if chance does not explain it, else 1.
    pub fn significant(&self) -> f64 {
        let error = (self.spread * self.noise).sqrt();
        let off = (self.factor - 1.0).abs();
        let is_known = self.pairs >= PAIRS_MIN && off > SIGNIFICANT * error && off > NEGLIGIBLE;
        if is_known { self.factor } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chance::Chance;

    fn noisy(rls: &mut Rls, factor: f64, noise: f64, pairs: u32, seed: u64) {
        let mut chance = Chance::new(seed);
        for _ in 0..pairs {
            let x = 1.0 + chance.below(1000) as f64 / 500.0;
            let error = (chance.below(2001) as f64 / 1000.0 - 1.0) * noise;
            rls.update(x, factor * x + error);
        }
    }

    #[test]
    fn a_factor_is_found_and_followed() {
        let mut rls = Rls::new(0.97, 0.5, 4.0);
        noisy(&mut rls, 1.1, 0.2, 60, 1);
        assert!((rls.factor() - 1.1).abs() < 0.03, "{}", rls.factor());
        noisy(&mut rls, 1.25, 0.2, 100, 2);
        assert!((rls.factor() - 1.25).abs() < 0.03, "{}", rls.factor());
    }

    #[test]
    fn nothing_takes_it_beyond_its_limits() {
        let mut rls = Rls::new(0.97, 0.5, 4.0);
        for (x, y) in [(1.0, 1e9), (f64::NAN, 1.0), (1.0, f64::INFINITY), (0.0, 7.0), (-1.0, 3.0)] {
            rls.update(x, y);
            assert!((0.5..=4.0).contains(&rls.factor()));
        }
        rls.update(1.0, -1e9);
        assert_eq!(rls.factor(), 0.5);
    }

    #[test]
    fn chance_is_not_taken_for_a_factor() {
        let wrong = (0..200).filter(|seed| {
            let mut rls = Rls::new(0.97, 0.4, 1.6);
            noisy(&mut rls, 1.0, 0.5, 20, *seed);
            rls.significant() != 1.0
        });
        assert!(wrong.count() < 30);
        let mut rls = Rls::new(0.97, 0.4, 1.6);
        noisy(&mut rls, 1.4, 0.5, 20, 1);
        assert!((rls.significant() - 1.4).abs() < 0.15, "{}", rls.significant());
    }
}
