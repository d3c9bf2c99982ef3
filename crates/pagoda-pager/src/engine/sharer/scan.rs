//! Looks at pages, and shares equal ones. What is found changes in the machine's page table by an event, and in the RAM file by
//! `engine/paging`.

use std::time::Duration;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, Found, Machine, OpId};
use pagoda_core::stats::Metric;
use pagoda_core::units::{ChunkIdx, PAGE_SIZE, PageCount, PageIdx};
use pagoda_sys::process::thread_cpu_time;
use pagoda_sys::ring::Ring;

use super::{LOOK_PAGES, Looking, Sharer, TAKE_BACK_MAX, ZEROS};
use crate::engine::broken::Broken;
use crate::engine::paging::Paging;
use crate::share::{Hint, Look, Member};

/// A VM's pages may be looked at: before the group is settled a look would find nothing, and nobody would look again.
fn is_looking(paging: &Paging) -> bool {
    paging.frames().is_some_and(|member| member.group().is_settled())
}

fn bury_dead(paging: &mut Paging) {
    if let Some(member) = paging.frames_mut() {
        member.bury_dead();
    }
}

impl Sharer {
    /// How long until pages can be looked at; `blocked` if direct I/O hinders that, until the agent has been asked
    /// whether it is over.
    pub fn scan_wait(&self, paging: &Paging, blocked: Duration) -> Duration {
        if !paging.machine().has_pages_to_scan(paging.now_ms()) || !is_looking(paging) {
            return Duration::MAX;
        }
        match paging.machine().is_scan_blocked() {
            true => blocked,
            false => Duration::from_nanos(self.budget.wait_ns(self.per_mille())),
        }
    }

    /// Whether there are pages to look at and time for it. If so the machine gets `Event::Scan`, and then
    /// [`Sharer::end_scan`] what is returned.
    pub fn begin_scan(&mut self, paging: &mut Paging) -> Option<Duration> {
        if paging.frames().is_none() || paging.is_halted() {
            return None;
        }
        if paging.frames().is_some_and(Member::has_many_dead) {
            bury_dead(paging);
        }
        if !paging.machine().has_pages_to_scan(paging.now_ms()) || !is_looking(paging) {
            return None;
        }
        self.earn();
        (!self.budget.is_spent()).then_some(self.cpu)
    }

    /// Counts the time that a scan took.
    pub fn end_scan(&mut self, begun: Duration) {
        let spent = self.cpu - begun;
        self.budget.spend(spent.as_nanos() as u64);
    }

    /// Executes `Share`: what is looked at is in the RAM file and cannot change until the answer. A few pages are looked at
    /// at once, many between faults.
    pub fn share_pages(
        &mut self,
        op: OpId,
        chunk: ChunkIdx,
        pages: PageSet,
        paging: &mut Paging,
        ring: &mut Ring,
    ) -> Result<(), Broken> {
        let mut looking = Looking { op, chunk, rest: pages, seen: PageSet::EMPTY, found: Found::default() };
        if paging.frames().is_some() {
            if pages.iter().nth(LOOK_PAGES).is_some() {
                self.looks.push_back(looking);
                return Ok(());
            }
            self.look_on(&mut looking, paging, ring)?;
        }
        // The next event of all: until it is applied the machine has another idea of these pages.
        paging.push_first(Event::ShareDone { op, found: looking.found });
        Ok(())
    }

    /// Looks at the next few pages of chunks that leave. True: that was the last of a look, and its end waits among the
    /// events.
    pub fn step_look(&mut self, paging: &mut Paging, ring: &mut Ring) -> Result<bool, Broken> {
        let Some(mut looking) = self.looks.pop_front() else { return Ok(false) };
        self.look_on(&mut looking, paging, ring)?;
        let is_last = looking.rest.is_empty();
        if is_last {
            paging.push_first(Event::ShareDone { op: looking.op, found: looking.found });
        } else {
            self.looks.push_front(looking);
        }
        Ok(is_last)
    }

    /// Goes on with a look; with its last pages all that was found leaves the RAM file.
    fn look_on(&mut self, looking: &mut Looking, paging: &mut Paging, ring: &mut Ring) -> Result<(), Broken> {
        let before = thread_cpu_time();
        paging.submit_page_ins(ring)?;
        bury_dead(paging);
        let pages: PageSet = looking.rest.iter().take(LOOK_PAGES).collect();
        looking.rest -= pages;
        if !paging.machine().is_armed() {
            return Err("pages of a VM that is not armed were to be shared".into());
        }
        self.find_equal(looking, pages, paging)?;
        looking.seen |= pages;
        if looking.rest.is_empty() {
            looking.found = take_out(looking.chunk, looking.found, paging)?;
        }
        self.cpu += thread_cpu_time().saturating_sub(before);
        Ok(())
    }

    /// Writes the entries of pages with an equal frame, and makes holes in swap of zero ones.
    fn find_equal(&mut self, looking: &mut Looking, pages: PageSet, paging: &mut Paging) -> Result<(), Broken> {
        let Some(member) = paging.frames() else { return Ok(()) };
        let Looking { chunk, seen, ref mut found, .. } = *looking;
        let location = paging.space().locate_chunk(chunk);
        let (view, start) = (&location.region.view, location.pages().start);
        let (machine, collisions) = (paging.machine(), &mut self.collisions);
        for run in pages.runs() {
            let run = start + u64::from(run.start)..start + u64::from(run.start) + u64::from(run.len);
            if view.make_readable(run).is_err() {
                // Page-out will meet the same and say so; until then these pages are just not shared.
                return Ok(());
            }
        }
        let mut zero = PageSet::EMPTY;
        let mut hints: Vec<Hint> = Vec::new();
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
                            hints.push(hint);
                        }
                    }
                    Look::New => {}
                    Look::Collision => *collisions += 1,
                }
            }
        }
        found.zero |= zero;
        let stale = zero & machine.chunk(chunk).swap;
        paging
            .drop_blocks(chunk, stale)
            .map_err(|errno| format!("the swap block of a zero page could not be dropped: {errno}"))?;
        tell(hints, paging);
        Ok(())
    }

    /// Counts the VM's part of its frames, once a second: how many pages it is charged, and which it shares with nobody
    /// any more. Where the part is more than the cap can bear, these become its own again, so that page-out can write
    /// them to swap.
    pub fn charge_frames(&mut self, paging: &mut Paging) -> Option<(PageCount, Vec<PageIdx>)> {
        bury_dead(paging);
        let stats = |metric| paging.machine().stats().get(metric);
        self.note_copied_back(stats(Metric::PagesCopiedBack));
        let member = paging.frames()?;
        if stats(Metric::Shared) == 0 && stats(Metric::SharedPart) == 0 {
            return None;
        }
        match member.part(TAKE_BACK_MAX) {
            Ok((part, sole)) => Some((PageCount(part.pages), sole)),
            Err(error) => {
                tracing::warn!(vm = %paging.vm(), "count shared frames: {error}");
                None
            }
        }
    }
}

/// Tells the owners of pages that they may have equal frames now.
fn tell(mut hints: Vec<Hint>, paging: &mut Paging) {
    let Some(number) = paging.frames().map(Member::number) else { return };
    hints.sort_unstable_by_key(|hint| hint.member);
    for same in hints.chunk_by(|a, b| a.member == b.member) {
        let pages = same.iter().map(|hint| hint.page);
        if same[0].member == number {
            pages.for_each(|page| paging.push(Event::LookAgain { page }));
        } else if let Some(member) = paging.frames() {
            member.group().notify(same[0].member, pages.collect());
        }
    }
}

/// Takes pages out of the RAM file whose entries are written, or which are zero.
fn take_out(chunk: ChunkIdx, mut found: Found, paging: &mut Paging) -> Result<Found, Broken> {
    let gone = found.shared | found.zero;
    if gone.is_empty() {
        return Ok(found);
    }
    // From here on the entry is the page's content, whatever the RAM file holds.
    let left = paging.take_out(chunk, gone)?;
    // Only now: before, an outdated swap block would have been the content.
    let Some(member) = paging.frames_mut() else { return Ok(found) };
    (found.shared & left).iter().for_each(|index| member.clear(chunk.page(index)));
    found.zero_left = found.zero & left;
    found.zero -= left;
    found.shared -= left;
    Ok(found)
}

/// The page of a hint deserves a frame if it is likely to be shared too. What another VM's page holds now only that VM can
/// see; of ours it is known whether it has left.
fn is_worth(machine: &Machine, member: &Member, hint: Hint) -> bool {
    let is_resident = || machine.chunk(hint.page.chunk()).ram.contains(hint.page.index_in_chunk());
    !machine.is_overcharged() && (hint.member != member.number() || is_resident())
}
