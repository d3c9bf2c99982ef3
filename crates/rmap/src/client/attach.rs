//! Opens spaces: as their owner, or as one of their readers.

use crate::client::outcome::COPIES_MAX;
use crate::client::sealed::Tenure;
use crate::client::slab::{SPACE_SLABS_MAX, Space};
use crate::client::{Client, ClientError, SPACES_MAX, SpaceRef, SpaceSpec};
use crate::control::{MapEntry, Today};
use crate::crypto::SpaceKey;
use crate::units::{Generation, SlabNo};

impl Client {
    /// Opens a space as its owner of `generation`, which the control plane gave with the map.
    ///
    /// # Errors
    /// Limits, and servers of the map that are not known.
    pub fn attach(
        &mut self,
        spec: &SpaceSpec,
        generation: Generation,
        map: &[(SlabNo, MapEntry)],
    ) -> Result<SpaceRef, ClientError> {
        self.attach_as(spec, generation, map, Tenure::Owner)
    }

    /// Opens a space as one of its readers, as the control plane sees it today. One that is sealed needs no owner: should it
    /// lack copies, one of its readers sees to that. One that is not is read as its owner writes it; see `follow.rs`.
    ///
    /// # Errors
    /// Limits, and servers of the map that are not known.
    pub fn attach_reader(&mut self, spec: &SpaceSpec, today: &Today) -> Result<SpaceRef, ClientError> {
        let tenure = if today.sealed { Tenure::Reader } else { Tenure::Follower };
        let is_read = |space: &Space| space.id == spec.id && !space.is_taken && space.tenure != Tenure::Owner;
        if tenure == Tenure::Follower && self.pool.map.spaces.iter().any(is_read) {
            // The answers to the questions of the two would be taken for each other's.
            return Err(ClientError::KnownSpace);
        }
        self.attach_as(spec, today.generation, &today.map, tenure)
    }

    fn attach_as(
        &mut self,
        spec: &SpaceSpec,
        generation: Generation,
        map: &[(SlabNo, MapEntry)],
        tenure: Tenure,
    ) -> Result<SpaceRef, ClientError> {
        if self.pool.map.spaces.len() >= SPACES_MAX {
            return Err(ClientError::TooManySpaces);
        }
        if !(1..=COPIES_MAX).contains(&spec.copies) {
            return Err(ClientError::Copies { copies: spec.copies });
        }
        // Who only reads may come before the first owner.
        let is_owned = generation > Generation(0) || tenure == Tenure::Follower;
        if !is_owned || generation > Generation::MAX {
            return Err(ClientError::Generation { generation: generation.0 });
        }
        let max = (SPACE_SLABS_MAX * self.pool.map.size.pages()) as u64;
        if spec.pages == 0 || spec.pages > max {
            return Err(ClientError::Size { pages: spec.pages, max });
        }
        let slabs = spec.pages.div_ceil(self.pool.map.size.pages() as u64);
        if spec.reserve as u64 > slabs {
            return Err(ClientError::Reserve { slabs: spec.reserve, max: slabs });
        }
        for replica in map.iter().flat_map(|(_, entry)| &entry.replicas) {
            if self.pool.sessions.peers.of(replica.server).is_none() {
                return Err(ClientError::UnknownServer { server: replica.server.0 });
            }
        }
        let key = SpaceKey::new(&spec.key, spec.id);
        let opened = Space::new(spec, key, (generation, self.pool.new_owner()), tenure, self.pool.map.size, map);
        self.parity.open(if tenure == Tenure::Owner { opened.layout.groups } else { 0 });
        let space = self.pool.map.spaces.push(opened);
        if tenure == Tenure::Follower {
            self.pool.map.begin_follow(space, map);
        }
        self.pool.expect_parity(space);
        self.make_room();
        if spec.reserve > 0 && tenure == Tenure::Owner {
            self.redundancy.reserve(space, spec.reserve, spec.copies);
        }
        for slab in self.pool.map.spaces[space].slabs.indices() {
            self.pool.map.mark(space, slab);
        }
        self.pool.look_for_leftovers_of(space);
        Ok(SpaceRef(space))
    }

    /// Room for all that may be under way about slabs, and for each of them a turn to be copied.
    pub(in crate::client) fn make_room(&mut self) {
        let slabs = self.pool.map.make_room();
        self.redundancy.make_room(slabs);
    }
}
