//! Ends of reads, writes, punches and zaps.

use crate::bits::{PageSet, Run};
use crate::stats::Metric;
use crate::units::ChunkIdx;

use super::action::{Access, Action, Actions, IoError, Now, OpId, Pages, Stall};
use super::machine::Machine;
use super::ops::OpKind;
use super::table::Phase;

impl Machine {
    pub(super) fn read_done(&mut self, id: OpId, result: Result<(), IoError>, now: Now, out: &mut Actions) {
        let op = self.ops.remove(id);
        match (op.kind, result) {
            (OpKind::Page { index, access }, result) => {
                self.reserved -= 1;
                self.chunks[op.chunk.as_usize()].reading.clear(index);
                match result {
                    Ok(()) => self.page_arrived(id, op.chunk, index, access, out),
                    Err(error) => {
                        self.failed.push_back((op.chunk.page(index), access));
                        self.stalled(Stall::Read(error), now, out);
                    }
                }
                out.push(Action::Release { op: id });
            }
            (OpKind::Fill { pages, direct, demand, writable, prefetch }, result) => {
                self.reserved -= u64::from(pages.count());
                self.chunks[op.chunk.as_usize()].fill = None;
                self.prefetch.in_flight -= usize::from(prefetch);
                if prefetch && result.is_ok() && demand.is_none() {
                    return self.prefetched(id, op.chunk, pages, direct, out);
                }
                if prefetch && result.is_ok() {
                    self.note_prefetch_joined(op.chunk, pages);
                }
                match (result, direct) {
                    (Ok(()), true) => {
                        out.push(Action::ChunkComplete { op: id });
                        self.chunk_arrived(op.chunk, demand, writable, out);
                    }
                    (Ok(()), false) => {
                        self.span_arrived(id, op.chunk, pages, demand, writable, out);
                        out.push(Action::Release { op: id });
                    }
                    (Err(_), direct) => {
                        out.push(match direct {
                            true => Action::ChunkAbandon { op: id, chunk: op.chunk },
                            false => Action::Release { op: id },
                        });
                        self.background.pause_restore();
                        self.chunks[op.chunk.as_usize()].read_singly = true;
                        if demand.is_some() {
                            // Several may wait on any page of it. All of them try again, page by page: only whoever needs a page
                            // that cannot be read has to wait.
                            out.push(Action::Wake { pages: whole(op.chunk) });
                        }
                    }
                }
            }
            (OpKind::Keep { pages, image }, result) => self.keep_done(id, op.chunk, (pages, image), result, out),
            (OpKind::CopyOut { pages, look }, result) => {
                self.copy_out_done(id, op.chunk, (pages, look), result, out);
            }
            (kind, _) => unreachable!("a read ended as {kind:?}"),
        }
    }

    fn page_arrived(&mut self, id: OpId, chunk: ChunkIdx, index: u8, access: Access, out: &mut Actions) {
        self.note_read(1);
        let page = PageSet::single(index);
        let imaged = self.chunk(chunk).imaged().contains(index);
        let writable = if imaged { access == Access::Write } else { self.predict_write(access) };
        if writable {
            self.change(chunk, page, Some(id), out);
        }
        self.edit(chunk, |c| {
            c.ram |= page;
            c.mapped |= page;
            match writable {
                true => c.open |= page,
                false => c.clean |= page,
            }
        });
        self.touch(chunk);
        self.stats.add(Metric::PagesIn, 1);
        let pages = Pages { chunk, run: Run { start: index, len: 1 } };
        out.push(Action::Copy { op: id, pages, protect: !writable });
    }

    fn chunk_arrived(&mut self, chunk: ChunkIdx, demand: Option<(u8, Access)>, writable: bool, out: &mut Actions) {
        self.note_read(self.chunk(chunk).swapped().count());
        self.edit(chunk, |c| {
            c.ram = PageSet::FULL;
            c.clean = PageSet::FULL;
            c.ahead = demand.is_none();
        });
        self.touch(chunk);
        self.stats.add(Metric::PagesIn, 256);
        if demand.is_some() {
            self.map(chunk, PageSet::FULL - self.watch.hidden(chunk), demand, writable, out);
        }
    }

    fn span_arrived(
        &mut self,
        id: OpId,
        chunk: ChunkIdx,
        pages: PageSet,
        demand: Option<(u8, Access)>,
        writable: bool,
        out: &mut Actions,
    ) {
        // A single-page read may have been quicker, never the other way round: a fault on a page of the fill joins it.
        let pages = pages - self.chunks[chunk.as_usize()].ram;
        self.stats.add(Metric::PagesIn, u64::from(pages.count()));
        self.note_read(pages.count());
        let Some((index, access)) = demand else {
            self.edit(chunk, |c| {
                c.ram |= pages;
                c.clean |= pages;
                c.ahead = true;
            });
            self.touch(chunk);
            out.extend(pages.runs().map(|run| Action::Store { op: id, pages: Pages { chunk, run } }));
            return;
        };
        // Who waits for a page was heard of, and such a page is not watched any more.
        let unseen = pages & self.watch.hidden(chunk);
        let pages = pages - unseen;
        let is_write = access == Access::Write;
        let written = if is_write { pages & PageSet::single(index) } else { PageSet::EMPTY };
        // A guess is no reason to take a copy of a page, now or for the next image.
        let open = if writable || is_write { (pages - self.chunk(chunk).imaged()) | written } else { PageSet::EMPTY };
        self.change(chunk, open, Some(id), out);
        self.edit(chunk, |c| {
            c.ram |= pages | unseen;
            c.mapped |= pages;
            c.open |= open;
            c.clean |= (pages - open) | unseen;
        });
        self.touch(chunk);
        out.extend(unseen.runs().map(|run| Action::Store { op: id, pages: Pages { chunk, run } }));
        let copy = |run, protect| Action::Copy { op: id, pages: Pages { chunk, run }, protect };
        // What somebody waits for comes first.
        let (first, rest) = if open.contains(index) { (open, pages - open) } else { (pages - open, open) };
        let protects = |pages: PageSet| !open.contains_all(pages);
        let around = first.run_around(index);
        out.extend(around.map(|run| copy(run, protects(first))));
        out.extend(first.runs().filter(|run| Some(*run) != around).map(|run| copy(run, protects(first))));
        out.extend(rest.runs().map(|run| copy(run, protects(rest))));
    }

    pub(super) fn write_done(
        &mut self,
        id: OpId,
        zero: PageSet,
        result: Result<(), IoError>,
        now: Now,
        out: &mut Actions,
    ) {
        let op = *self.ops.get(id);
        let OpKind::Out { leaving, dirty, .. } = op.kind else { unreachable!("a write ended as {:?}", op.kind) };
        if let Err(error) = result {
            // What the blocks hold now is unknown; the RAM file has the truth.
            self.edit(op.chunk, |c| c.swap |= dirty);
            self.end_out(id);
            self.stalled(Stall::Write(error), now, out);
            return;
        }
        self.stats.add(Metric::PagesOut, u64::from((dirty - zero).count()));
        self.stats.add(Metric::PagesZeroOut, u64::from(zero.count()));
        self.edit(op.chunk, |c| {
            c.swap |= dirty - zero;
            c.swap -= zero;
            // A page that was touched meanwhile may have been written while the disk read it.
            c.clean |= dirty & leaving;
        });
        if leaving.is_empty() {
            self.end_out(id);
        } else {
            self.push_punch(id, out);
        }
    }

    pub(super) fn push_punch(&mut self, id: OpId, out: &mut Actions) {
        let op = self.ops.get_mut(id);
        let OpKind::Out { leaving, punching, .. } = &mut op.kind else { return };
        // A fault that waited may be served behind this action in the same list: it must not keep a page of it.
        *punching = true;
        let (chunk, pages) = (op.chunk, *leaving);
        let alone = (self.chunk(chunk).ram - pages).is_empty();
        out.push(Action::PunchOut { op: id, chunk, pages, alone });
    }

    pub(super) fn punch_done(&mut self, id: OpId, left: PageSet) {
        let op = *self.ops.get(id);
        let OpKind::Out { leaving, dirty, .. } = op.kind else { unreachable!("a punch ended as {:?}", op.kind) };
        let gone = leaving - left;
        self.stats.add(Metric::PagesDropped, u64::from((gone - dirty).count()));
        let ahead = self.edit(op.chunk, |c| {
            c.ram -= gone;
            c.clean -= gone;
            c.mapped -= gone;
            c.open -= gone;
            std::mem::take(&mut c.ahead)
        });
        if ahead {
            self.pattern.on_read_ahead_miss(op.chunk);
        }
        if !gone.is_empty() {
            self.stats.add(Metric::EvictedChunks, 1);
            self.note_eviction();
        }
        self.end_out(id);
    }

    /// The page-out is over; what stayed is hot.
    pub(super) fn end_out(&mut self, id: OpId) {
        let op = self.ops.remove(id);
        let c = &mut self.chunks[op.chunk.as_usize()];
        c.out = None;
        if c.ram.is_empty() {
            c.phase = Phase::Absent;
        } else {
            c.phase = Phase::Hot;
            self.queues.insert_tail_last(op.chunk);
        }
    }

    pub(super) fn zap_done(&mut self, id: OpId, epoch: Option<u64>, now: Now) {
        let op = self.ops.remove(id);
        let OpKind::Zap { chunks, len } = op.kind else { unreachable!("a zap ended as {:?}", op.kind) };
        for chunk in &chunks[..usize::from(len)] {
            let c = &mut self.chunks[chunk.as_usize()];
            let touched = !matches!(c.phase, Phase::Zapping { touched: false });
            if epoch.is_some() && !touched {
                c.open = PageSet::EMPTY;
            }
            match epoch {
                Some(epoch) if !touched && !c.ram.is_empty() => {
                    self.make_cold(*chunk, epoch);
                    self.plan_look(*chunk, now);
                }
                _ if c.ram.is_empty() => c.phase = Phase::Absent,
                _ => {
                    c.phase = Phase::Hot;
                    self.queues.insert_tail_last(*chunk);
                    if touched {
                        self.note_rescue();
                    }
                }
            }
        }
    }

    pub(super) fn stalled(&mut self, stall: Stall, now: Now, out: &mut Actions) {
        // A failed write counts for more than a failed read before it: it also has to end page-out, which would go on failing.
        let since = match (self.stall, stall) {
            (None, _) => now.ms,
            (Some((Stall::Read(_), since)), Stall::Write(_)) => since,
            (Some(_), _) => return,
        };
        self.stall = Some((stall, since));
        out.push(Action::Stalled { stall });
    }
}

fn whole(chunk: ChunkIdx) -> Pages {
    Pages { chunk, run: Run { start: 0, len: 256 } }
}
