//! What the owners of the client's state may read of each other.
//!
//! Each part of the client that has work of its own is polled with a context: it reads the others and changes only itself.
//! What it wants of them is in what `poll` returns, and the client does it.

use super::ops::Ops;
use super::pool::Pool;
use crate::client::index::SpaceIndex;
use crate::units::SlabNo;

/// The rest of the client, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    pub pool: &'a Pool,
    pub ops: &'a Ops,
}

impl Context<'_> {
    /// Whether a write to a page is under way.
    pub fn is_being_written(&self, space: SpaceIndex, slab: SlabNo, index: usize) -> bool {
        self.ops.writer(space, self.pool.map.size.page(slab, index)).is_some()
    }
}
