//! How often each byte of a file has been delivered.
//!
//! One set of ranges for each delivery that the file needs. What is acknowledged goes into the first; the part that was
//! there already goes on to the second, and so on. A client that loses its connection and goes on by a range so completes
//! the delivery that it began.

use std::ops::Range;

use crate::codec::{Damaged, Decoder, Encoder};
use crate::limits::DELIVERED_PIECES_MAX;
use crate::ranges::RangeSet;

#[derive(Debug, Clone)]
pub struct Delivery {
    times: Vec<RangeSet>,
}

impl Delivery {
    pub fn new(deliveries: u8) -> Delivery {
        Delivery { times: vec![RangeSet::default(); usize::from(deliveries.max(1))] }
    }

    /// `range` has been acknowledged by one reader.
    pub fn acknowledge(&mut self, range: Range<u64>) {
        let mut parts = vec![range];
        for set in &mut self.times {
            let mut again = Vec::new();
            for part in parts {
                again.extend(set.overlaps(&part));
                // Bytes that are not noted stay in memory: never wrong. A client that reads in order is always noted: its bytes make one
                // piece at most.
                if part.start <= set.prefix() || set.pieces_with(&part) <= DELIVERED_PIECES_MAX {
                    set.insert(part);
                }
            }
            parts = again;
        }
    }

    /// Of each delivery what has no gap. The rest counts as not delivered.
    pub fn encode(&self, record: &mut Encoder) {
        for set in &self.times {
            record.number(set.prefix());
        }
    }

    pub fn decode(deliveries: u8, cursor: u64, from: &mut Decoder<'_>) -> Result<Delivery, Damaged> {
        let mut delivery = Delivery::new(deliveries);
        for set in &mut delivery.times {
            set.insert(0..from.number_below(cursor)?);
        }
        Ok(delivery)
    }

    /// Every byte below has been delivered as often as needed.
    pub fn delivered_below(&self) -> u64 {
        self.times.last().map_or(0, RangeSet::prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_deliveries() {
        let mut twice = Delivery::new(2);
        twice.acknowledge(0..10);
        assert_eq!(twice.delivered_below(), 0);
        twice.acknowledge(4..10);
        assert_eq!(twice.delivered_below(), 0, "its beginning was delivered once");
        twice.acknowledge(0..4);
        assert_eq!(twice.delivered_below(), 10);
        twice.acknowledge(10..12);
        assert_eq!(twice.delivered_below(), 10);
    }

    #[test]
    fn scattered_pieces_are_bounded() {
        let mut once = Delivery::new(1);
        (1..1000).for_each(|at| once.acknowledge(at * 2..at * 2 + 1));
        assert_eq!(once.times[0].pieces(), DELIVERED_PIECES_MAX);
        once.acknowledge(0..1);
        once.acknowledge(1..2);
        assert_eq!((once.delivered_below(), once.times[0].pieces()), (3, DELIVERED_PIECES_MAX));
        once.acknowledge(0..2000);
        assert_eq!(once.delivered_below(), 2000);
    }
}
