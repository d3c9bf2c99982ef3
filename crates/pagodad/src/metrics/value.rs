//! Values of metrics, and what the daemon's own process uses.

use std::fmt;

use prometheus_client::encoding::{CounterValueEncoder, EncodeCounterValue, EncodeGaugeValue, GaugeValueEncoder};

/// What the daemon's own process uses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ProcessInfo {
    pub resident_bytes: u64,
    pub cpu_seconds: f64,
}

impl ProcessInfo {
    /// As of now. What cannot be read counts as zero, for the other numbers matter more.
    #[must_use]
    pub fn now() -> Self {
        let pid = std::process::id();
        Self {
            resident_bytes: pagoda_sys::process::rss(pid).unwrap_or_default(),
            cpu_seconds: pagoda_sys::process::cpu_time(pid).unwrap_or_default().as_secs_f64(),
        }
    }
}

/// Whole numbers stay whole in the text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value {
    Count(u64),
    Real(f64),
}

impl EncodeGaugeValue for Value {
    fn encode(&self, encoder: &mut GaugeValueEncoder<'_>) -> fmt::Result {
        match self {
            // The encoder's whole numbers are signed.
            Self::Count(value) => EncodeGaugeValue::encode(&(*value).min(i64::MAX as u64), encoder),
            Self::Real(value) => EncodeGaugeValue::encode(value, encoder),
        }
    }
}

impl EncodeCounterValue for Value {
    fn encode(&self, encoder: &mut CounterValueEncoder<'_>) -> fmt::Result {
        match self {
            Self::Count(value) => EncodeCounterValue::encode(value, encoder),
            Self::Real(value) => EncodeCounterValue::encode(value, encoder),
        }
    }
}
