//! How many pages page-out keeps free below a cap, so that no fault waits for an eviction.

use crate::units::{CHUNK_PAGES, PageCount};

/// Headroom: this part of the cap ...
const HEADROOM_PART: u64 = 32;
/// ... but at least as many pages as read-ahead of one stream and the page-outs behind it take ...
const HEADROOM_MIN: u64 = 8 * 256;
/// ... and at most what the disk writes in a few tens of milliseconds.
const HEADROOM_MAX: u64 = 64 * 256;
/// While pages come in one by one: this part of the cap, because at random every page of DRAM counts ...
const PAGEWISE_PART: u64 = 256;
/// ... but at least what two chunks leave behind, which is 20 ms of a disk that reads 25,000 pages a second.
const PAGEWISE_MIN: u64 = 2 * 256;
/// The most that page-out keeps free below a cap.
pub const fn headroom_max(cap: PageCount) -> PageCount {
    PageCount(headroom_at(cap.0, true))
}

/// What page-out leaves below a cap in any case: it keeps a headroom free, and may overshoot by a chunk.
pub const fn page_out_leaves(cap: PageCount) -> PageCount {
    PageCount(cap.0.saturating_sub(headroom_at(cap.0, true) + CHUNK_PAGES))
}

/// What is kept free below a cap: `wide` while whole chunks come in.
pub const fn headroom_at(cap: u64, wide: bool) -> u64 {
    let (part, least) = if wide { (HEADROOM_PART, HEADROOM_MIN) } else { (PAGEWISE_PART, PAGEWISE_MIN) };
    headroom_of(cap, part, least)
}

const fn headroom_of(cap: u64, part: u64, least: u64) -> u64 {
    let wanted = cap / part;
    let bounded = if wanted < least { least } else { wanted };
    let bounded = if bounded > HEADROOM_MAX { HEADROOM_MAX } else { bounded };
    if bounded > cap / 4 { cap / 4 } else { bounded }
}
