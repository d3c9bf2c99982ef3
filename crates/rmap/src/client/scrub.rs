//! Looks at every copy of every page in the background, so that damage is found while another copy is right.
//!
//! A page is read from one copy, behind everything else, and its version and seal are checked as those of any read. A copy
//! that has a bad page leaves the map where another one in sync is at a server that answers, as when a read finds it, and is
//! made anew from that: memory that has lost a bit is not trusted with the rest either. A bad page of an only copy stays what
//! it is, an error for who reads it, and is counted.

pub mod pass;

use std::time::Duration;

use crate::client::exchange::ExchangeId;
use crate::client::index::SpaceIndex;
use crate::units::{SlabNo, Time};

/// How long a look at everything takes, if it can: memory loses bits without notice rarely, and two copies of the same page
/// within a day hardly ever.
pub const SCRUB_PASS: Duration = Duration::from_secs(24 * 3600);
/// Pages are looked at no more often, however many there are: 4 MiB/s, less than one hundredth of a core at either end.
const PACE_MIN: Duration = Duration::from_millis(1);
/// And no less often, however few there are.
const PACE_MAX: Duration = Duration::from_secs(1);
/// Slots without a page that are passed over at a time.
const PASSED_OVER_MAX: usize = 4096;

/// How many pages there are is counted no more often: that is a look at every slab.
const COUNT_EVERY: Duration = Duration::from_secs(1);

/// How far it has come.
#[derive(Debug)]
pub struct Scrub {
    space: SpaceIndex,
    slab: SlabNo,
    index: usize,
    /// Of the copies of the page.
    copy: usize,
    due: Option<Time>,
    /// How long from one page to the next, and when that was last worked out.
    pace: Duration,
    paced_at: Time,
    /// The page that was asked for last.
    exchange: Option<ExchangeId>,
}

impl Default for Scrub {
    fn default() -> Scrub {
        Scrub {
            space: SpaceIndex(0),
            slab: SlabNo(0),
            index: 0,
            copy: 0,
            due: None,
            pace: Duration::ZERO,
            paced_at: Time::default(),
            exchange: None,
        }
    }
}
