//! What the owners of the client's state may read of each other.
//!
//! Each part of the client that has work of its own is polled with a context: it reads the others and changes only itself.
//! What it wants of them is in what `poll` returns, and the client does it.

use super::config::ClientConfig;
use super::exchange::Exchanges;
use super::ops::Ops;
use super::peer::PeerSet;
use super::peers::Peers;
use super::questions::Questions;
use super::sealed::Tenure;
use super::slab::{Slab, Space};
use crate::client::index::{GroupIndex, List, SpaceIndex};
use crate::control::MapEntry;
use crate::units::{SlabNo, Version};

/// The rest of the client, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    pub config: &'a ClientConfig,
    pub peers: &'a Peers,
    pub spaces: &'a List<SpaceIndex, Space>,
    pub exchanges: &'a Exchanges,
    pub ops: &'a Ops,
    pub questions: &'a Questions,
}

/// The context of a client whose other fields may be borrowed meanwhile.
macro_rules! context {
    ($client:ident) => {
        $crate::client::context::Context {
            config: &$client.config,
            peers: &$client.peers,
            spaces: &$client.spaces,
            exchanges: &$client.exchanges,
            ops: &$client.ops,
            questions: &$client.questions,
        }
    };
}
pub(super) use context;

impl Context<'_> {
    /// Servers of a map entry.
    pub fn peers_of(&self, entry: &MapEntry) -> PeerSet {
        entry.replicas.iter().filter_map(|replica| self.peers.of(replica.server)).collect()
    }

    /// Copies of a slab that nothing speaks against.
    pub fn sound_copies(&self, space: SpaceIndex, slab: SlabNo) -> PeerSet {
        let state = &self.spaces[space].slabs[slab];
        self.peers_of(&state.entry).minus(state.failed).minus(state.behind)
    }

    /// Whether the map says that a group has parity.
    pub fn has_parity(&self, space: SpaceIndex, group: GroupIndex) -> bool {
        let state = &self.spaces[space];
        !state.is_removed && state.slabs.get(state.layout.parity(group)).is_some_and(Slab::is_held)
    }

    /// Whether a slab is one of a group that has parity.
    pub fn is_grouped(&self, space: SpaceIndex, slab: SlabNo) -> bool {
        self.spaces[space].layout.group(slab).is_some_and(|group| self.has_parity(space, group))
    }

    /// Whether a server answered for another copy than the one in this reader's map: one that left since, and came again in the same
    /// generation, and is being made. What is sealed and known to be written is never unwritten.
    pub fn is_another_copy(&self, space: SpaceIndex, version: Version) -> bool {
        self.spaces[space].tenure == Tenure::Reader && version == Version::NEVER
    }

    /// Whether a write to a page is under way.
    pub fn is_being_written(&self, space: SpaceIndex, slab: SlabNo, index: usize) -> bool {
        self.ops.writer(space, self.config.slab_size.page(slab, index)).is_some()
    }
}
