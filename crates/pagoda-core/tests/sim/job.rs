//! Reads, writes and zaps that are under way: they move their pages in any order, and what fails leaves garbage.

use std::collections::BTreeMap;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::OpId;
use pagoda_core::units::ChunkIdx;

use crate::rng::Rng;
use crate::weather::Weather;
use crate::world::{GARBAGE, World};

/// An operation under way.
#[derive(Debug)]
pub struct Job {
    pub op: OpId,
    pub kind: JobKind,
    /// Pages that were not moved yet.
    pub left: Vec<usize>,
}

#[derive(Debug)]
pub enum JobKind {
    /// Into a buffer, for the sake of these pages.
    Read {
        missing: Vec<usize>,
    },
    /// Into a buffer, for the image that was the newest of so many, or for a move.
    Keep {
        pages: Vec<usize>,
        begun: usize,
    },
    /// A whole chunk is read into these frames.
    Fill(BTreeMap<usize, crate::world::Frame>),
    Write {
        zero: PageSet,
        /// Where each page's content goes, which is not its block before the end.
        targets: BTreeMap<usize, usize>,
    },
    /// These pages of a borrowed chunk are being copied into the RAM file; then the mapping is moved.
    Own {
        chunk: ChunkIdx,
        kept: PageSet,
    },
    Zap {
        chunks: Vec<ChunkIdx>,
        epoch: Option<u64>,
    },
}

impl Job {
    /// Moves some of the pages that are left, in any order.
    pub fn advance(
        &mut self,
        share: usize,
        buffers: &mut BTreeMap<u16, BTreeMap<usize, u64>>,
        world: &mut World,
        weather: &Weather,
        rng: &mut Rng,
    ) {
        for _ in 0..share {
            let page = self.left.swap_remove(rng.below(self.left.len()));
            let target = self.target(page, world, weather, rng);
            match &self.kind {
                JobKind::Read { .. } => {
                    let buffer = buffers.get_mut(&self.op.0).expect("a read has a buffer");
                    buffer.insert(page, world.swapped_content(page));
                }
                JobKind::Keep { .. } => {
                    let buffer = buffers.get_mut(&self.op.0).expect("a read has a buffer");
                    buffer.insert(page, world.blocks.get(page).unwrap_or(GARBAGE));
                }
                JobKind::Fill(frames) => frames[&page].set(world.swapped_content(page)),
                JobKind::Write { .. } => {
                    // The frame may be gone only if the machine let it go too early.
                    let frame = world.ram[page].as_ref().expect("a page that is being written is in RAM");
                    let content = frame.get();
                    world.blocks.write(target, content);
                }
                JobKind::Own { .. } => world.copy_private(page),
                JobKind::Zap { .. } => {}
            }
        }
    }

    /// Where a page-out writes the page; nothing for other jobs.
    fn target(&mut self, page: usize, world: &mut World, weather: &Weather, rng: &mut Rng) -> usize {
        let JobKind::Write { targets, .. } = &mut self.kind else { return 0 };
        let moves = rng.per_mille(weather.moves);
        *targets.entry(page).or_insert_with(|| world.blocks.target(page, moves, weather.mistake))
    }

    /// What a failed operation leaves.
    pub fn spoil(
        &mut self,
        buffers: &mut BTreeMap<u16, BTreeMap<usize, u64>>,
        world: &mut World,
        weather: &Weather,
        rng: &mut Rng,
    ) {
        for page in std::mem::take(&mut self.left) {
            let target = self.target(page, world, weather, rng);
            match &self.kind {
                JobKind::Read { .. } | JobKind::Keep { .. } => {
                    buffers.get_mut(&self.op.0).expect("a read has a buffer").insert(page, GARBAGE);
                }
                JobKind::Fill(frames) if rng.coin() => frames[&page].set(GARBAGE),
                JobKind::Write { .. } if rng.coin() => world.blocks.write(target, GARBAGE),
                _ => {}
            }
        }
    }
}
