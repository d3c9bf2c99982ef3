//! Executes the machine's actions that answer faults and that move pages out of the RAM file. Each is one or a few
//! system calls.

use std::time::Duration;

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{Event, OpId, Pages};
use pagoda_core::units::{CHUNK_PAGES, CHUNK_SIZE, ChunkIdx, PAGE_SIZE};
use pagoda_sys::Errno;
use pagoda_sys::ring::Ring;
use pagoda_sys::uffd::{Protect, Resolved};

use super::Paging;
use super::io::Answered;
use crate::engine::broken::Broken;
use crate::recover;

/// How long an allocation that the host refuses is tried again: as long as the kernel's own OOM handling may take.
const MEMORY_PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two such tries.
const MEMORY_PAUSE: Duration = Duration::from_millis(2);

fn mode(protect: bool) -> Protect {
    if protect { Protect::Yes } else { Protect::No }
}

const WHOLE: Run = Run { start: 0, len: CHUNK_PAGES as u16 };

impl Paging {
    /// Executes `Map`: answers the fault on pages that are in DRAM.
    pub fn map(&self, pages: Pages, protect: bool) -> Result<(), Broken> {
        let location = self.space.locate(pages);
        let uffd = self.space.uffd(location.addr);
        // A page that the host's kernel swapped out needs memory to come back.
        let resolved = self.retry(|| uffd.cont_over(location.addr, location.len, mode(protect)));
        self.check(resolved, "map pages")?;
        self.mappers().map(pages, mode(protect));
        Ok(())
    }

    /// Executes `Unprotect`: answers the first write to clean pages.
    pub fn unprotect(&self, pages: Pages) -> Result<(), Broken> {
        let location = self.space.locate(pages);
        let uffd = self.space.uffd(location.addr);
        let resolved = self.retry(|| Resolved::of(uffd.unprotect(location.addr, location.len)));
        self.check(resolved, "end write protection")?;
        self.mappers().unprotect(pages);
        Ok(())
    }

    /// Executes `Protect`. False: it could not be done, which the machine hears before anything new.
    pub fn protect(&mut self, pages: Pages) -> bool {
        let location = self.space.locate(pages);
        let uffd = self.space.uffd(location.addr);
        let mut protected = uffd.protect(location.addr, location.len);
        if protected == Err(Errno::AGAIN) {
            self.hear();
            protected = uffd.protect(location.addr, location.len);
        }
        let protected = protected.and_then(|()| self.mappers().protect(pages));
        if let Err(errno) = protected {
            tracing::debug!(vm = %self.vm, "write-protect: {errno}");
            self.push_correction(Event::ProtectFailed { pages });
        }
        protected.is_ok()
    }

    /// Executes `Wake`: the pages' faulters try again, in the VMM and in mappers.
    pub fn wake(&self, pages: Pages) {
        let location = self.space.locate(pages);
        let _ = self.space.uffd(location.addr).wake(location.addr, location.len);
        self.mappers().wake(pages);
    }

    /// Has every thread that waits for a page ask again.
    pub fn wake_all(&self) {
        for shard in self.space.shards() {
            let _ = shard.uffd.wake(shard.addr, shard.len);
        }
        self.mappers().wake_all();
    }

    /// Executes `Zero`: answers the fault on pages that are nowhere.
    pub fn zero(&self, pages: Pages) -> Result<(), Broken> {
        let mut left = pages.run;
        while left.len > 0 {
            let location = self.space.locate(Pages { chunk: pages.chunk, run: left });
            let uffd = self.space.uffd(location.addr);
            let resolved = self.retry(|| uffd.zeropage(location.addr, location.len));
            let mut done = (resolved.bytes(location.len) / PAGE_SIZE) as u16;
            if resolved.exists() {
                // A punch that could not take a folio apart leaves zeros in the file, which is what is wanted here.
                let page = location.pages().start + u64::from(done);
                let addr = location.addr + u64::from(done) * PAGE_SIZE;
                if !location.region.view.is_zero(page..page + 1) {
                    return Err("a page that should be zero is not: somebody else writes the RAM file".into());
                }
                let mapped = self.retry(|| self.space.uffd(addr).cont_over(addr, PAGE_SIZE, Protect::No));
                self.check(mapped, "map a zero page")?;
                done += 1;
            } else if !resolved.is_all() {
                return self.check(resolved, "fill with zeros");
            }
            left = Run { start: left.start.wrapping_add(done as u8), len: left.len - done };
        }
        self.mappers().map(pages, Protect::No);
        Ok(())
    }

    /// Executes `ZeroChunk`: fills a hole of a chunk with zeros, by one large folio if it can.
    pub fn zero_chunk(&self, chunk: ChunkIdx) -> Result<(), Broken> {
        let location = self.space.locate_chunk(chunk);
        let view = location.region.view.clone();
        let pages = location.pages();
        let filled = self.retry(|| match view.populate(pages.clone()) {
            Ok(()) => Resolved::All,
            Err(errno) => Resolved::Partial { bytes: 0, errno },
        });
        if !filled.is_all() {
            return self.check(filled, "fill a chunk with zeros");
        }
        if !location.region.view.is_zero(location.pages()) {
            return Err("a chunk that should be zero is not: somebody else writes the RAM file".into());
        }
        self.map(Pages { chunk, run: WHOLE }, false)
    }

    /// Executes `ChunkAbandon`. The intent stays if something is left: then the next daemon settles it.
    pub fn abandon_chunk(&mut self, op: OpId, chunk: ChunkIdx) -> Result<Option<Answered>, Broken> {
        let location = self.space.locate_chunk(chunk);
        if let Err(errno) = location.region.ram.punch(location.offset, location.len) {
            return Err(format!("a chunk that could not be read could not be dropped: {errno}").into());
        }
        match recover::still_there(&self.space, chunk, PageSet::FULL) {
            Ok(left) if left.is_empty() => Ok(self.withdraw(op)),
            Ok(_) => Err("a chunk that could not be read is held by a pin, and could not be dropped".into()),
            Err(error) => Err(error.to_string().into()),
        }
    }

    /// Executes `Copy`: answers the fault on pages that a tier has brought into a buffer.
    pub fn copy(&self, ring: &Ring, op: OpId, pages: Pages, protect: bool) -> Result<(), Broken> {
        let Some((id, first)) = self.buffer_of(op) else { return Err("a page arrived without a buffer".into()) };
        let location = self.space.locate(pages);
        let start = ((pages.first().0 - first.0) * PAGE_SIZE) as usize;
        let Some(content) = ring.buffer(id) else { return Err("a page arrived in a busy buffer".into()) };
        let content = &content[start..start + location.len as usize];
        let uffd = self.space.uffd(location.addr);
        // A try behind a partial one goes on where that stopped: what was copied exists.
        let mut done = 0;
        let resolved = self.retry(|| {
            let resolved = uffd.copy(location.addr + done as u64, &content[done..], mode(protect));
            done += resolved.bytes((content.len() - done) as u64) as usize;
            resolved
        });
        self.check(resolved, "bring a page in")?;
        self.mappers().map(pages, mode(protect));
        Ok(())
    }

    /// Executes `Store`: puts pages that came into a buffer into the RAM file, under an intent.
    pub fn store(&mut self, ring: &Ring, op: OpId, pages: Pages) -> Result<(), Broken> {
        let Some((id, first)) = self.buffer_of(op) else { return Err("pages arrived without a buffer".into()) };
        let location = self.space.locate(pages);
        // Before the intent: it would have the next daemon drop what the file has.
        match location.region.ram.next_data(location.offset) {
            Ok(data) if data.is_none_or(|at| at >= location.offset + location.len) => {}
            Ok(_) => return Err("a page that was to come in from swap is in the RAM file already".into()),
            Err(errno) => return Err(format!("page-in could not look at the RAM file: {errno}").into()),
        }
        let Some(intent) = self.io.take_intent() else { return Err("the intents ran out".into()) };
        let set = PageSet::range(pages.run.start, pages.run.len);
        // A page exists in the file before its content does.
        self.shared.intents[intent].declare(pages.chunk.0, set.words());
        let Some(content) = ring.buffer(id) else { return Err("pages arrived in a busy buffer".into()) };
        let start = ((pages.first().0 - first.0) * PAGE_SIZE) as usize;
        for (index, page) in location.pages().enumerate() {
            let at = start + index * PAGE_SIZE as usize;
            location.region.small.write_page(page, &content[at..at + PAGE_SIZE as usize]);
        }
        self.shared.intents[intent].withdraw();
        self.io.give_intent(intent);
        Ok(())
    }

    /// Executes `PunchOut`: takes pages out of the RAM file, under an intent.
    pub fn punch_out(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet, alone: bool) -> Result<(), Broken> {
        let left = self.punch_with_intent(chunk, pages, alone)?;
        self.push_first(Event::PunchDone { op, left });
        Ok(())
    }

    /// Takes pages out of the RAM file whose content is elsewhere by now; those that the kernel could not take out got
    /// it back, and are returned.
    pub fn take_out(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<PageSet, Broken> {
        let alone = (self.machine.chunk(chunk).ram - pages).is_empty();
        self.punch_with_intent(chunk, pages, alone)
    }

    /// From the intent on, what the tiers have is the pages' content, whatever the RAM file holds. If this fails it
    /// stays: the next daemon settles it.
    fn punch_with_intent(&mut self, chunk: ChunkIdx, pages: PageSet, alone: bool) -> Result<PageSet, Broken> {
        let Some(intent) = self.io.take_intent() else { return Err("the intents ran out".into()) };
        self.shared.intents[intent].declare(chunk.0, pages.words());
        let left = self.punch(chunk, pages, alone)?;
        self.shared.intents[intent].withdraw();
        self.io.give_intent(intent);
        Ok(left)
    }

    /// Punches and looks whether the pages are gone; those that are not get their content back.
    fn punch(&mut self, chunk: ChunkIdx, pages: PageSet, alone: bool) -> Result<PageSet, String> {
        let (Some(first), Some(last)) = (pages.first_set(), pages.last_set()) else { return Ok(PageSet::EMPTY) };
        let span = Run { start: first, len: u16::from(last) - u16::from(first) + 1 };
        let spans = if alone { PageSet::range(span.start, span.len) } else { pages };
        self.tiers.keep(&self.space, chunk, pages);
        let mut present = false;
        for run in spans.runs() {
            let location = self.space.locate(Pages { chunk, run });
            let ram = &location.region.ram;
            ram.punch(location.offset, location.len).map_err(|errno| format!("page-out could not punch: {errno}"))?;
            let data = ram.next_data(location.offset).map_err(|errno| format!("page-out could not look: {errno}"))?;
            present |= data.is_some_and(|at| at < location.offset + location.len);
        }
        if !present {
            return Ok(PageSet::EMPTY);
        }
        // A folio that is pinned cannot be split: its part was zeroed in place.
        let location = self.space.locate_chunk(chunk);
        let left = recover::still_there(&self.space, chunk, pages).map_err(|error| error.to_string())?;
        for index in left.iter() {
            let at = location.pages().start + u64::from(index);
            let mut content = [0; PAGE_SIZE as usize];
            self.tiers
                .read_back(chunk.page(index), &mut content)
                .map_err(|errno| format!("page-out was half done and a page cannot be read back: {errno}"))?;
            location.region.view.write_page(at, &content);
        }
        Ok(left)
    }

    /// Executes `CopyBack`: answers the fault on shared pages, each of which becomes the VM's own again.
    pub fn copy_back(&mut self, pages: Pages) -> Result<(), Broken> {
        let mut content = [0; PAGE_SIZE as usize];
        for index in PageSet::range(pages.run.start, pages.run.len).iter() {
            let page = pages.chunk.page(index);
            if !self.frames().is_some_and(|member| member.read(page, &mut content)) {
                return Err("a shared page has no frame".into());
            }
            let location = self.space.locate(Pages { chunk: pages.chunk, run: Run { start: index, len: 1 } });
            let uffd = self.space.uffd(location.addr);
            let resolved = self.retry(|| uffd.copy(location.addr, &content, Protect::No));
            if !resolved.is_all() {
                return self.check(resolved, "copy a shared page back");
            }
            self.mappers().map(Pages { chunk: pages.chunk, run: Run { start: index, len: 1 } }, Protect::No);
            // The page has its content: only now may its entry go, and only then the frame.
            if let Some(member) = self.frames_mut() {
                member.clear(page);
            }
        }
        Ok(())
    }

    /// Executes `DropShared`: the pages refer to no frame any more.
    pub fn drop_shared(&mut self, pages: Pages) {
        if let Some(member) = self.frames_mut() {
            let set = PageSet::range(pages.run.start, pages.run.len);
            set.iter().for_each(|index| member.clear(pages.chunk.page(index)));
        }
    }

    /// Executes `SwapPunch`: drops blocks that are outdated.
    pub fn swap_punch(&mut self, pages: Pages) -> Result<(), Broken> {
        let Pages { chunk, run } = pages;
        self.drop_blocks(chunk, PageSet::range(run.start, run.len))
            .map_err(|errno| format!("a swap block that is outdated could not be dropped: {errno}").into())
    }

    /// Executes `RamPunch`: gives memory that the guest has discarded back to the host.
    pub fn ram_punch(&self, pages: Pages) -> Result<(), Broken> {
        let location = self.space.locate(pages);
        let punched = location.region.ram.punch(location.offset, location.len);
        punched.map_err(|errno| format!("discarded memory could not be given back: {errno}").into())
    }

    /// Tries again while the host has no memory to give; the VM's faults wait meanwhile, as under the kernel's own reclaim.
    pub(super) fn retry(&self, mut attempt: impl FnMut() -> Resolved) -> Resolved {
        let start = std::time::Instant::now();
        loop {
            let resolved = attempt();
            if !(resolved.no_memory() || resolved.busy()) || start.elapsed() > MEMORY_PATIENCE {
                return resolved;
            }
            // A move waits for its message to be read. Without one, something else is under way in the kernel.
            match resolved.busy() && self.may_borrow() {
                true => {
                    self.hear();
                    std::thread::yield_now();
                }
                false => std::thread::sleep(MEMORY_PAUSE),
            }
        }
    }

    /// Whether the kernel has done all of something.
    pub(super) fn check(&self, resolved: Resolved, what: &str) -> Result<(), Broken> {
        if resolved.is_all() {
            return Ok(());
        }
        if resolved.gone() {
            // The VMM is ending; its pidfd says when it has.
            tracing::debug!(vm = %self.vm, "{what}: the VMM is gone");
            return Ok(());
        }
        let why = resolved.errno().unwrap_or(Errno::IO);
        Err(format!("could not {what}: {why}").into())
    }
}

// The whole space is a multiple of chunks; a run of a chunk never leaves it.
const _: () = assert!(CHUNK_SIZE == CHUNK_PAGES * PAGE_SIZE);
