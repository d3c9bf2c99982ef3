//! Slabs in which no page has content any more go back to their servers by themselves.
//!
//! The owner counts the pages with content of each open slab. A slab that has none is looked at a while later. So a caller that
//! trims and writes again at once pays nothing. What is given back then, and how, is in `discard.rs`.

pub mod content;
mod queue;

use std::collections::VecDeque;
use std::time::Duration;

use crate::client::index::SpaceIndex;
use crate::units::{SlabNo, Time};

/// A slab that was empty for so long is not about to be written again by whoever emptied it.
pub const GIVE_BACK_AFTER: Duration = Duration::from_secs(1);
/// Slabs that may be leaving the map at a time: should the control plane be away, writes to these wait for it.
const LEAVING_MAX: usize = 8;
/// A control plane that has not answered for so long may be away: nothing is given back before it answers.
pub const MAP_SILENT: Duration = Duration::from_millis(100);
/// How soon it is looked again whether there is an answer: 800 slabs a second at most, where each look finds room for eight.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Slabs without content, as they became so, and when each is to be looked at. Owner of the line that slabs stand in before they go
/// back; what is counted of each is its [`Content`](content::Content).
#[derive(Debug, Default)]
pub struct Vacating {
    queue: VecDeque<(Time, SpaceIndex, SlabNo)>,
    not_before: Time,
}
