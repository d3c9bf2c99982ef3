//! The control plane as a model: compares and swaps, is slow, loses questions and answers, and is away at times.

use std::collections::BTreeMap;

use rmap::control::{ControlReply, ControlRequest, MapEntry};
use rmap::units::{Generation, SlabNo, SpaceId};

#[derive(Debug, Default)]
struct Record {
    generation: u32,
    map: BTreeMap<u32, MapEntry>,
}

#[derive(Debug, Default)]
pub struct Registry {
    spaces: BTreeMap<u64, Record>,
    pub away_until_ns: u64,
}

impl Registry {
    /// The next owner of a space, and the map as it is at that moment.
    pub fn take_over(&mut self, space: SpaceId) -> (Generation, Vec<(SlabNo, MapEntry)>) {
        let record = self.spaces.entry(space.0).or_default();
        record.generation += 1;
        (Generation(record.generation), record.map.iter().map(|(slab, entry)| (SlabNo(*slab), entry.clone())).collect())
    }

    pub fn generation(&self, space: SpaceId) -> u32 {
        self.spaces.get(&space.0).map_or(0, |record| record.generation)
    }

    pub fn answer(&mut self, request: &ControlRequest) -> ControlReply {
        let record = self.spaces.entry(request.space.0).or_default();
        if record.generation != request.generation.0 {
            return ControlReply::Fenced;
        }
        let entry = record.map.entry(request.slab.0).or_default();
        if entry.revision + 1 != request.entry.revision {
            return ControlReply::Conflict(entry.clone());
        }
        *entry = request.entry.clone();
        ControlReply::Done
    }
}
