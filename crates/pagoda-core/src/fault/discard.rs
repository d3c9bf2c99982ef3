//! Pages the guest gave back (balloon, free page reporting): they become zero, in DRAM and in swap.

use crate::bits::{PageSet, Run};
use crate::stats::Metric;
use crate::units::{ChunkIdx, PageCount, PageIdx};

use super::action::{Action, Actions, Pages};
use super::machine::Machine;
use super::table::Phase;

impl Machine {
    /// Goes on with discards in their order; one waits while anything is under way on its chunk, because a read could bring
    /// the old content back and a write could put it into swap after the block was punched. It also waits until an image has
    /// read what only a block holds, and until a borrowed chunk is the VM's own.
    pub(super) fn retry_discards(&mut self, out: &mut Actions) {
        while let Some(&(token, first, count)) = self.discards.front() {
            let (mut page, mut left) = (first, count);
            while left.0 > 0 {
                let chunk = page.chunk();
                if self.armed && (self.chunk(chunk).busy() || matches!(self.chunk(chunk).phase, Phase::Leaving)) {
                    self.discards[0] = (token, page, left);
                    return;
                }
                let start = page.index_in_chunk();
                let len = left.0.min(256 - u64::from(start)) as u16;
                if self.waits_to_own(chunk, PageSet::range(start, len), out)
                    || self.waits_for_image(chunk, PageSet::range(start, len), out)
                {
                    self.discards[0] = (token, page, left);
                    return;
                }
                self.discard_in(chunk, Run { start, len }, out);
                page = PageIdx(page.0 + u64::from(len));
                left = PageCount(left.0 - u64::from(len));
            }
            self.discards.pop_front();
            out.push(Action::DiscardDone { token });
        }
    }

    fn discard_in(&mut self, chunk: ChunkIdx, run: Run, out: &mut Actions) {
        self.stats.add(Metric::PagesDiscarded, u64::from(run.len));
        if !self.armed {
            out.push(Action::RamPunch { pages: Pages { chunk, run } });
            return;
        }
        if self.chunk(chunk).borrowed {
            // Nothing of it is content, or it may not change but by the VMM's own writes.
            return;
        }
        let set = PageSet::range(run.start, run.len);
        let c = self.chunk(chunk);
        // A page that is zero already does not change.
        let there = set & (c.swap | c.ram | c.shared);
        self.change(chunk, there, None, out);
        let c = self.chunk(chunk);
        let (swap, ram, shared) = (c.swap & set, c.ram & set, c.shared & set);
        out.extend(swap.runs().map(|run| Action::SwapPunch { pages: Pages { chunk, run } }));
        // Behind its swap block: an outdated one would be the page's content once the entry is gone.
        out.extend(shared.runs().map(|run| Action::DropShared { pages: Pages { chunk, run } }));
        out.extend(ram.runs().map(|run| Action::RamPunch { pages: Pages { chunk, run } }));
        let empty = self.edit(chunk, |c| {
            c.swap -= set;
            c.shared -= set;
            c.ram -= set;
            c.clean -= set;
            c.mapped -= set;
            c.open -= set;
            c.dram().is_empty()
        });
        if empty {
            match self.chunk(chunk).phase {
                Phase::Hot => {
                    self.queues.remove(chunk);
                    self.chunks[chunk.as_usize()].phase = Phase::Absent;
                }
                Phase::Cold { .. } => {
                    self.cold.leave();
                    self.chunks[chunk.as_usize()].phase = Phase::Absent;
                }
                Phase::Absent | Phase::Zapping { .. } | Phase::Leaving => {}
            }
        }
    }
}
