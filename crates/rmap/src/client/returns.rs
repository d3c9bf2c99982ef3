//! Slabs that have left the map, or never came to be in it, go back to their servers.
//!
//! A server that is away is told when it answers again, however many slabs it has: they wait in a list of its own, and not as
//! requests, of which there is a limited number for all servers together. It is told of this owner first, or it would not listen.
//! A release names the grant that it ends, so one that comes late, twice or to a new life of the server ends nothing else.

mod ask;

use crate::client::index::SpaceIndex;
use crate::units::{SlabNo, Version};

/// What is to be given back to one server, 256 GiB of the usual slabs: the rest of what a server that is away has lent is given
/// back when it is next asked for.
pub const RETURNS_MAX: usize = 4096;
/// Of these, under way.
const AT_A_TIME: usize = 32;

/// A slab as it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Return {
    pub space: SpaceIndex,
    pub slab: SlabNo,
    pub grant: Version,
}
