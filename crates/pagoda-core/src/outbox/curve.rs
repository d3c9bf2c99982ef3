//! How a VM's response time falls as its space grows: what the controller inverts and the orchestrator divides by.

use crate::units::Bytes;

use super::units::{RESPONSE_MAX_S, bytes_floor};

/// Response times at increasing sizes; they never rise.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    points: Vec<(Bytes, f64)>,
}

impl Curve {
    /// Of points in any order. What is no number is without end. A response that rises with the size is noise of a
    /// measurement, and is flattened.
    ///
    /// # Panics
    /// There is no point.
    pub fn new(mut points: Vec<(Bytes, f64)>) -> Curve {
        assert!(!points.is_empty(), "a curve without points");
        points.sort_by_key(|(size, _)| *size);
        points.dedup_by_key(|(size, _)| *size);
        let mut least = RESPONSE_MAX_S;
        for (_, response) in &mut points {
            let value = if response.is_nan() { RESPONSE_MAX_S } else { response.max(0.0) };
            least = least.min(value);
            *response = least;
        }
        Curve { points }
    }

    /// Gives the points, the smallest size first.
    pub fn points(&self) -> &[(Bytes, f64)] {
        &self.points
    }

    /// What the largest size gives.
    pub fn best(&self) -> f64 {
        self.points.last().map_or(RESPONSE_MAX_S, |(_, response)| *response)
    }

    /// The response at a size: straight lines between the points, level beyond them.
    pub fn at(&self, size: Bytes) -> f64 {
        let above = self.points.partition_point(|(point, _)| *point < size);
        let (Some(&(high, low_response)), Some(&(low, high_response))) =
            (self.points.get(above), above.checked_sub(1).and_then(|below| self.points.get(below)))
        else {
            return self.points.get(above).map_or(self.best(), |(_, response)| *response);
        };
        let part = (size.0 - low.0) as f64 / (high.0 - low.0) as f64;
        high_response + (low_response - high_response) * part
    }

    /// The smallest size of the curve at which the response is within `limit_s`; `None` if there is none.
    pub fn smallest_within(&self, limit_s: f64) -> Option<Bytes> {
        let at = self.points.partition_point(|(_, response)| *response > limit_s);
        let &(high, low_response) = self.points.get(at)?;
        let Some(&(low, high_response)) = at.checked_sub(1).and_then(|below| self.points.get(below)) else {
            return Some(high);
        };
        let part = (high_response - limit_s) / (high_response - low_response);
        let between = Bytes(low.0 + bytes_floor((high.0 - low.0) as f64 * part).0 + 1);
        Some(between.min(high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_curve_is_read_both_ways() {
        let curve = Curve::new(vec![(Bytes(200), 3.0), (Bytes(0), 9.0), (Bytes(100), 5.0), (Bytes(300), 3.5)]);
        let check = |size, expected| assert_eq!(curve.at(Bytes(size)), expected, "{size}");
        check(0, 9.0);
        check(50, 7.0);
        check(100, 5.0);
        check(300, 3.0);
        check(9999, 3.0);
        assert_eq!(curve.smallest_within(9.5), Some(Bytes(0)));
        assert_eq!(curve.smallest_within(7.0), Some(Bytes(51)));
        assert_eq!(curve.smallest_within(3.0), Some(Bytes(200)));
        assert_eq!(curve.smallest_within(2.9), None);
        let flat = Curve::new(vec![(Bytes(10), f64::INFINITY), (Bytes(20), f64::NAN)]);
        assert_eq!((flat.at(Bytes(5)), flat.smallest_within(1.0)), (RESPONSE_MAX_S, None));
    }

    proptest! {
        #[test]
        fn the_inverse_is_one(points in prop::collection::vec((0u64..1 << 40, 0.0f64..1e7), 1..20), limit in 0.0f64..1e7) {
            let curve = Curve::new(points.into_iter().map(|(size, response)| (Bytes(size), response)).collect());
            match curve.smallest_within(limit) {
                Some(size) => {
                    prop_assert!(curve.at(size) <= limit + 1e-6 * limit);
                    // Two bytes less is not enough, unless the curve begins there.
                    if size > curve.points()[0].0 + Bytes(2) {
                        prop_assert!(curve.at(size - Bytes(2)) >= limit - 1e-6 * limit);
                    }
                }
                None => prop_assert!(curve.best() > limit),
            }
            let mut before = f64::INFINITY;
            for size in (0..1u64 << 40).step_by(1 << 35) {
                prop_assert!(curve.at(Bytes(size)) <= before);
                before = curve.at(Bytes(size));
            }
        }
    }
}
