//! How pages come into the RAM file and leave it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, OpId};
use pagoda_core::units::ChunkIdx;

use crate::image::Mistake;
use crate::job::JobKind;
use crate::pager::{Crash, Pager, chunk_pages, set};
use crate::rng::Rng;
use crate::world::{CHUNK, GARBAGE, World};

impl Pager {
    pub fn zero(&mut self, pages: Range<usize>, world: &mut World) {
        for page in pages.clone() {
            match &world.ram[page] {
                // Left behind by a punch in place.
                Some(frame) => assert_eq!(frame.get(), 0),
                None => world.put(page, 0),
            }
            world.map(page, false);
        }
        world.woken.push(pages);
    }

    pub fn read(&mut self, op: OpId, pages: impl Iterator<Item = usize> + Clone, world: &World) {
        assert!(self.buffers.insert(op.0, BTreeMap::new()).is_none(), "the buffer of {op:?} is in use");
        let missing =
            |page: &usize| world.ram[*page].is_none() && world.entries[*page].is_none() && world.blocks.has(*page);
        self.start(op, JobKind::Read { missing: pages.clone().filter(missing).collect() }, pages.collect());
    }

    pub fn fill(&mut self, op: OpId, chunk: ChunkIdx, world: &mut World) {
        assert!(self.weather.direct, "large folios are not to be had");
        let pages = chunk_pages(chunk);
        world.intents.push((op.0, pages.clone().collect()));
        let frame = |page: usize| world.ram[page].get_or_insert_with(|| Rc::new(Cell::new(GARBAGE))).clone();
        let frames = pages.clone().map(frame).enumerate().map(|(nth, frame)| (pages.start + nth, frame)).collect();
        self.start(op, JobKind::Fill(frames), pages.collect());
    }

    pub fn withdraw(&mut self, op: OpId, world: &mut World) {
        let index = world.intents.iter().position(|(owner, _)| *owner == op.0).expect("the operation has an intent");
        world.intents.remove(index);
    }

    pub fn punch_out(
        &mut self,
        op: OpId,
        chunk: ChunkIdx,
        pages: PageSet,
        alone: bool,
        world: &mut World,
        rng: &mut Rng,
    ) -> Result<(), Crash> {
        let wanted = set(pages, chunk);
        let (first, last) = (wanted[0], wanted[wanted.len() - 1]);
        let span: Vec<usize> = if alone { (first..=last).collect() } else { wanted.clone() };
        world.intents.push((op.0, wanted.clone()));
        let mut left = Vec::new();
        for page in span {
            if wanted.contains(&page) && rng.per_mille(self.weather.unsplittable) {
                world.punch_in_place(page);
                left.push(page);
            } else {
                world.punch(page);
            }
        }
        if self.weather.mistake == Some(Mistake::FillsPunched) {
            for page in wanted.into_iter().filter(|page| !left.contains(page)) {
                if world.is_frozen(page) {
                    world.preserve(page, 0, false);
                }
            }
        }
        if rng.per_mille(self.weather.crash * 4) {
            return Err(Crash);
        }
        for page in &left {
            let content = world.swapped_content(*page);
            world.ram[*page].as_ref().expect("was zeroed in place").set(content);
        }
        self.withdraw(op, world);
        let left = left.iter().map(|page| (page % CHUNK) as u8).collect();
        self.punched.push_back(Event::PunchDone { op, left });
        Ok(())
    }
}
