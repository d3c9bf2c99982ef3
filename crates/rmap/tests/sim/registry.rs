//! The control plane as a model: compares and swaps, is slow, loses questions and answers, and is away at times.

use std::collections::BTreeMap;

use rmap::control::{Change, ControlReply, ControlRequest, Map, MapEntry, Today};
use rmap::units::{Generation, ServerId, SlabNo, SpaceId};

#[derive(Debug, Default)]
struct Record {
    generation: u32,
    sealed: bool,
    map: BTreeMap<u32, MapEntry>,
}

#[derive(Debug, Default)]
pub struct Registry {
    spaces: BTreeMap<u64, Record>,
    pub away_until_ns: u64,
}

impl Record {
    fn today(&self) -> Today {
        let map: Map = self.map.iter().map(|(slab, entry)| (SlabNo(*slab), entry.clone())).collect();
        Today { generation: Generation(self.generation), sealed: self.sealed, map }
    }
}

impl Registry {
    /// The next owner of a space, and the map as it is at that moment.
    pub fn take_over(&mut self, space: SpaceId) -> (Generation, Map) {
        let record = self.spaces.entry(space.0).or_default();
        record.generation += 1;
        let Today { generation, map, .. } = record.today();
        (generation, map)
    }

    /// Whether the owner of this generation could seal the space.
    pub fn seal(&mut self, space: SpaceId, generation: u32) -> bool {
        let record = self.spaces.entry(space.0).or_default();
        if record.generation == generation {
            (record.generation, record.sealed) = (generation + 1, true);
        }
        record.sealed
    }

    pub fn generation(&self, space: SpaceId) -> u32 {
        self.spaces.get(&space.0).map_or(0, |record| record.generation)
    }

    /// How many slabs of a space a server has, by the map.
    pub fn copies_at(&self, space: SpaceId, server: ServerId) -> usize {
        let entries = self.spaces.get(&space.0).into_iter().flat_map(|record| record.map.values());
        entries.filter(|entry| entry.replicas.iter().any(|replica| replica.server == server)).count()
    }

    /// A sealed space, for a reader.
    pub fn sealed(&self, space: SpaceId) -> Option<Today> {
        self.spaces.get(&space.0).filter(|record| record.sealed).map(Record::today)
    }

    pub fn answer(&mut self, request: &ControlRequest) -> ControlReply {
        let record = self.spaces.entry(request.subject().0.0).or_default();
        match request {
            ControlRequest::Change(Change { generation, slab, entry, .. }) => {
                if record.generation != generation.0 {
                    return ControlReply::Fenced;
                }
                let today = record.map.get(&slab.0).cloned().unwrap_or_default();
                if today.revision + 1 != entry.revision {
                    return ControlReply::Conflict(today);
                }
                // Refused, as every control plane does: this one's clients have no such mistake.
                assert!(entry.is_sound(), "{entry:?} is proposed");
                record.map.insert(slab.0, entry.clone());
                ControlReply::Done
            }
            ControlRequest::Confirm { generation, .. } if record.generation == generation.0 => ControlReply::Done,
            ControlRequest::Confirm { .. } => ControlReply::Fenced,
            ControlRequest::Keep { generation, .. } if record.generation == generation.0 => {
                record.generation += 1;
                ControlReply::Kept(record.today())
            }
            ControlRequest::Look { .. } | ControlRequest::Keep { .. } => ControlReply::Seen(record.today()),
        }
    }
}
