//! A rate in bytes a second, what the model calls endless, and the few conversions between whole numbers and the
//! model's floating point.

use std::fmt;
use std::time::Duration;

use crate::units::Bytes;

/// The model's word for "without end": longer than any promise.
pub const RESPONSE_MAX_S: f64 = 1e6;

/// A rate counts bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub u64);

impl Rate {
    /// What went through in a time; `None` if no time passed.
    pub fn over(bytes: Bytes, time: Duration) -> Option<Rate> {
        let nanos = time.as_nanos();
        if nanos == 0 {
            return None;
        }
        let rate = u128::from(bytes.0) * 1_000_000_000 / nanos;
        Some(Rate(u64::try_from(rate).unwrap_or(u64::MAX)))
    }

    /// A rate of the model. What is no number, or below 0, is 0.
    pub fn from_model(bytes_per_s: f64) -> Rate {
        Rate(bytes_per_s.max(0.0) as u64)
    }
}

/// A rate is written as `26.7 MiB/s`.
impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/s", Bytes(self.0)))
    }
}

/// A size of the model, rounded down. What is no number, or below 0, is 0.
pub fn bytes_floor(bytes: f64) -> Bytes {
    Bytes(bytes.max(0.0) as u64)
}

/// A time of the model: `4.20 s`, `120 ms`, `without end`.
pub fn seconds(s: f64) -> String {
    match s {
        s if !s.is_finite() || s >= RESPONSE_MAX_S => "without end".to_owned(),
        s if s < 1.0 => format!("{:.0} ms", s * 1000.0),
        s => format!("{s:.2} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_off() {
        let check = |bytes, ms, expected| assert_eq!(Rate::over(Bytes(bytes), Duration::from_millis(ms)), expected);
        check(1000, 0, None);
        check(1000, 500, Some(Rate(2000)));
        check(u64::MAX, 1, Some(Rate(u64::MAX)));
        assert_eq!((Rate::from_model(f64::NAN), Rate::from_model(-1.0)), (Rate(0), Rate(0)));
        assert_eq!(Rate(28 << 20).to_string(), "28 MiB/s");
        assert_eq!(
            (seconds(0.12), seconds(4.2), seconds(f64::INFINITY)),
            ("120 ms".into(), "4.20 s".into(), "without end".into())
        );
    }
}
