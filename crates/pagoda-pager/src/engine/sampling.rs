//! Sampled pages and the miss-ratio curve of one VM.

use std::sync::Arc;

use pagoda_core::policy::SampleCount;
use pagoda_core::policy::mrc::Curve;
use pagoda_core::units::PageIdx;

/// What is sampled.
#[derive(Debug, Default)]
pub struct Sampling {
    period: u64,
    count: SampleCount,
    curve: Option<Arc<Curve>>,
}

impl Sampling {
    /// A period begins.
    pub fn begin(&mut self, _pages: Vec<PageIdx>) {
        self.period += 1;
        self.count = SampleCount::default();
    }

    /// Switches the curve on or off.
    pub fn watch_curve(&mut self, _on: bool) {
        self.curve = None;
    }

    pub fn count(&self) -> SampleCount {
        self.count
    }

    pub fn period(&self) -> u64 {
        self.period
    }

    pub fn curve(&self) -> Option<Arc<Curve>> {
        self.curve.clone()
    }
}
