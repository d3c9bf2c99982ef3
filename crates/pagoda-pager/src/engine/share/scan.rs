//! Looks, shares, copies back.

use std::time::Duration;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, Found, Machine, OpId};
use pagoda_core::stats::Metric;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageCount};
use pagoda_sys::process::thread_cpu_time;

use super::{LOOK_PAGES, Looking, TAKE_BACK_MAX, ZEROS};
use crate::engine::broken::Broken;
use crate::engine::{Engine, EngineError, TICK_BUSY};
use crate::share::{Hint, Look, Member};

impl Engine {
    /// The references of a VM that came back count from now on.
    pub(in crate::engine) fn count_references(&mut self) -> Result<(), EngineError> {
        let Some(member) = self.paging.frames_mut() else { return Ok(()) };
        member.count_references().map_err(EngineError::Shared)
    }

    /// Its pages may be looked at: before the group is settled a look would find nothing, and nobody would look again.
    fn is_looking(&self) -> bool {
        self.paging.frames().is_some_and(|member| member.group().is_settled())
    }

    /// How long until pages can be looked at.
    pub(in crate::engine) fn scan_wait(&self) -> Duration {
        if !self.paging.machine().has_pages_to_scan(self.paging.now_ms()) || !self.is_looking() {
            return Duration::MAX;
        }
        match self.paging.machine().is_scan_blocked() {
            // Until the agent has been asked which direct I/O is over.
            true => TICK_BUSY,
            false => Duration::from_nanos(self.share.budget.wait_ns(self.share.per_mille())),
        }
    }

    /// Looks at some pages, if there is time for it.
    pub(in crate::engine) fn scan(&mut self) {
        if self.paging.frames().is_none() || self.paging.is_frozen() || self.end.is_some() {
            return;
        }
        if self.paging.frames().is_some_and(Member::has_many_dead) {
            self.bury_dead();
        }
        if !self.paging.machine().has_pages_to_scan(self.paging.now_ms()) || !self.is_looking() {
            return;
        }
        self.share.earn();
        if self.share.budget.is_spent() {
            return;
        }
        let cpu = self.share.cpu;
        self.apply(Event::Scan);
        let spent = self.share.cpu - cpu;
        self.share.budget.spend(spent.as_nanos() as u64);
        if self.paging.machine().is_scan_blocked() {
            self.link.agent.ask_clock(&mut self.ring);
        }
    }

    fn bury_dead(&mut self) {
        if let Some(member) = self.paging.frames_mut() {
            member.bury_dead();
        }
    }

    /// Executes `Share`: what is looked at is in the RAM file and cannot change until the answer. A few pages are looked at
    /// at once, many between faults.
    pub(in crate::engine) fn share_pages(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet) -> Result<(), Broken> {
        let mut looking = Looking { op, chunk, rest: pages, seen: PageSet::EMPTY, found: Found::default() };
        if self.paging.frames().is_some() {
            if pages.iter().nth(LOOK_PAGES).is_some() {
                self.share.looks.push_back(looking);
                return Ok(());
            }
            self.look_on(&mut looking)?;
        }
        // The next event of all: until it is applied the machine has another idea of these pages.
        self.paging.push_first(Event::ShareDone { op, found: looking.found });
        Ok(())
    }

    /// Pages of chunks that leave are to be looked at.
    pub(in crate::engine) fn can_look(&self) -> bool {
        !self.share.looks.is_empty() && !self.paging.is_frozen()
    }

    /// Looks at the next few of them.
    pub(in crate::engine) fn step_look(&mut self) {
        let Some(mut looking) = self.share.looks.pop_front() else { return };
        match self.look_on(&mut looking) {
            Err(why) => self.freeze(&why),
            Ok(()) if looking.rest.is_empty() => {
                self.paging.push_first(Event::ShareDone { op: looking.op, found: looking.found });
                self.settle();
            }
            Ok(()) => self.share.looks.push_front(looking),
        }
    }

    /// Goes on with a look; with its last pages all that was found leaves the RAM file.
    fn look_on(&mut self, looking: &mut Looking) -> Result<(), Broken> {
        let before = thread_cpu_time();
        self.page_ins_first();
        self.bury_dead();
        let pages: PageSet = looking.rest.iter().take(LOOK_PAGES).collect();
        looking.rest -= pages;
        if !self.paging.machine().is_armed() {
            return Err("pages of a VM that is not armed were to be shared".into());
        }
        self.find_equal(looking, pages)?;
        looking.seen |= pages;
        if looking.rest.is_empty() {
            looking.found = self.take_out(looking.chunk, looking.found)?;
        }
        self.share.cpu += thread_cpu_time().saturating_sub(before);
        Ok(())
    }

    /// Writes the entries of pages with an equal frame, and makes holes in swap of zero ones.
    fn find_equal(&mut self, looking: &mut Looking, pages: PageSet) -> Result<(), Broken> {
        let Some(member) = self.paging.frames() else { return Ok(()) };
        let Looking { chunk, seen, ref mut found, .. } = *looking;
        let place = self.paging.space().place_chunk(chunk);
        let (view, start) = (&place.region.view, place.pages().start);
        let (machine, collisions) = (self.paging.machine(), &mut self.share.collisions);
        for run in pages.runs() {
            let run = start + u64::from(run.start)..start + u64::from(run.start) + u64::from(run.len);
            if view.make_readable(run).is_err() {
                // Page-out will meet the same and say so; until then these pages are just not shared.
                return Ok(());
            }
        }
        let mut zero = PageSet::EMPTY;
        let mut told: Vec<Hint> = Vec::new();
        let mut content = [0; PAGE_SIZE as usize];
        // A page of the same chunk may be the other one of a new frame: those are looked at a second time.
        let mut again = PageSet::EMPTY;
        for (round, set) in [(1, pages), (2, PageSet::EMPTY)] {
            let set = if round == 1 { set } else { again - found.shared };
            for index in set.iter() {
                view.read_page(start + u64::from(index), &mut content);
                if content == ZEROS {
                    zero.set(index);
                    continue;
                }
                let is_worth = |hint: Hint| is_worth(machine, member, hint);
                match member.look(&content, chunk.page(index), is_worth) {
                    Look::Equal(frame) => {
                        member.enter(chunk.page(index), frame);
                        found.shared.set(index);
                    }
                    Look::Made(frame, hint) => {
                        member.enter(chunk.page(index), frame);
                        found.shared.set(index);
                        found.frames += 1;
                        let is_here = hint.member == member.number() && hint.page.chunk() == chunk;
                        let other = hint.page.index_in_chunk();
                        if is_here && (pages | seen).contains(other) && !found.shared.contains(other) {
                            again.set(other);
                        } else {
                            told.push(hint);
                        }
                    }
                    Look::New => {}
                    Look::Collision => *collisions += 1,
                }
            }
        }
        found.zero |= zero;
        let stale = zero & machine.chunk(chunk).swap;
        self.paging
            .drop_blocks(chunk, stale)
            .map_err(|errno| format!("the swap block of a zero page could not be dropped: {errno}"))?;
        self.tell(told);
        Ok(())
    }

    /// Tells the owners of pages that they may have equal frames now.
    fn tell(&mut self, mut hints: Vec<Hint>) {
        let Some(number) = self.paging.frames().map(Member::number) else { return };
        hints.sort_unstable_by_key(|hint| hint.member);
        for same in hints.chunk_by(|a, b| a.member == b.member) {
            let pages = same.iter().map(|hint| hint.page);
            if same[0].member == number {
                pages.for_each(|page| self.paging.push(Event::LookAgain { page }));
            } else if let Some(member) = self.paging.frames() {
                member.group().tell(same[0].member, pages.collect());
            }
        }
    }

    /// Takes pages out of the RAM file whose entries are written, or which are zero.
    fn take_out(&mut self, chunk: ChunkIdx, mut found: Found) -> Result<Found, Broken> {
        let gone = found.shared | found.zero;
        if gone.is_empty() {
            return Ok(found);
        }
        // From here on the entry is the page's content, whatever the RAM file holds.
        let left = self.paging.take_out(chunk, gone)?;
        // Only now: before, an outdated swap block would have been the content.
        let Some(member) = self.paging.frames_mut() else { return Ok(found) };
        (found.shared & left).iter().for_each(|index| member.clear(chunk.page(index)));
        found.zero_left = found.zero & left;
        found.zero -= left;
        found.shared -= left;
        Ok(found)
    }

    /// Counts the VM's part of its frames, once a second. Where it is more than the cap can bear, pages that share with
    /// nobody any more become its own again, so that page-out can write them to swap.
    pub(in crate::engine) fn charge_frames(&mut self) {
        self.bury_dead();
        self.share.note_copied_back(self.paging.machine().stats().get(Metric::PagesCopiedBack));
        let Some(member) = self.paging.frames() else { return };
        if self.paging.machine().stats().get(Metric::Shared) == 0
            && self.paging.machine().stats().get(Metric::SharedPart) == 0
        {
            return;
        }
        let (part, sole) = match member.part(TAKE_BACK_MAX) {
            Ok(found) => found,
            Err(error) => return tracing::warn!(vm = %self.name, "count shared frames: {error}"),
        };
        self.apply(Event::Charge { pages: PageCount(part.pages) });
        if self.paging.machine().is_overcharged() {
            sole.into_iter().for_each(|page| self.apply(Event::TakeBack { page }));
        }
    }

    /// The engine ends, and with it, if it is `gone`, the VM.
    pub(in crate::engine) fn leave_group(&mut self, gone: bool) {
        self.paging.leave_group(gone);
    }
}

/// The page of a hint deserves a frame if it is likely to be shared too. What another VM's page holds now only that VM can
/// see; of ours it is known whether it has left.
fn is_worth(machine: &Machine, member: &Member, hint: Hint) -> bool {
    let is_resident = || machine.chunk(hint.page.chunk()).ram.contains(hint.page.index_in_chunk());
    !machine.is_overcharged() && (hint.member != member.number() || is_resident())
}
