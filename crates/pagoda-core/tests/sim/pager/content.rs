//! What reads and copies bring: the content of where it is, or garbage where nothing may be relied on.

use pagoda_core::fault::{Event, OpId, Source};
use pagoda_core::units::ChunkIdx;

use super::Pager;
use crate::image::Mistake;
use crate::job::{Job, JobKind};
use crate::vmm::Vmm;
use crate::world::{CHUNK, GARBAGE, World};

impl Pager {
    /// There is no newest image, or it cannot take more; the machine hears of it next.
    pub(super) fn lose_image(&mut self, world: &mut World) {
        world.lose_images();
        self.is_void = true;
        self.failed.push_back(Event::Thaw);
    }

    /// What a page holds, by the place that the machine names.
    pub(super) fn content_of(&self, page: usize, from: Source, world: &World) -> u64 {
        if self.weather.mistake == Some(Mistake::WrongSource)
            && let Some(content) = world.blocks.get(page)
        {
            return content;
        }
        match from {
            _ if self.is_late => world.recoverable(page),
            Source::Ram => world.ram[page].as_ref().expect("a page preserved from RAM is there").get(),
            Source::Buffer(op) => self.buffers[&op.0][&page],
            Source::Frame => world.shared_content(page).expect("a page preserved from its frame is shared"),
            Source::Parent => unreachable!("what the parent has is not copied"),
            Source::Zero => {
                assert_eq!(world.recoverable(page), 0, "page {page} is not zero");
                0
            }
        }
    }

    /// A block that was written or dropped while it was read brings anything.
    pub(super) fn garble(&mut self, op: OpId, pages: &[usize], begun: usize, world: &World) {
        let buffer = self.buffers.get_mut(&op.0).expect("a read has a buffer");
        for page in pages.iter().filter(|page| begun != world.begun || !world.is_frozen(**page)) {
            buffer.insert(*page, GARBAGE);
        }
    }

    /// What was read for a move of pages that have changed, or come in, meanwhile.
    pub(super) fn garble_changed(&mut self, op: OpId, vmm: &Vmm) {
        for (page, before) in self.held_before.remove(&op.0).unwrap_or_default() {
            let entry = self.machine.chunk(ChunkIdx((page / CHUNK) as u32));
            if vmm.truth[page] != before || !entry.swapped().contains((page % CHUNK) as u8) {
                self.buffers.get_mut(&op.0).expect("a read has a buffer").insert(page, GARBAGE);
            }
        }
    }

    /// The page's block is being written in place.
    pub(super) fn is_written(&self, page: usize, world: &World) -> bool {
        let target = |job: &Job| match &job.kind {
            JobKind::Write { targets, .. } => targets.get(&page).copied(),
            _ => None,
        };
        self.jobs.iter().filter_map(target).any(|block| world.blocks.block_of(page) == Some(block))
    }
}
