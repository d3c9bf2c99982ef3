//! Executes the machine's actions. Each is one or a few system calls; the ones that take time are only started here.

use std::time::{Duration, Instant};

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::{Action, Event, OpId, Pages};
use pagoda_core::stats::Metric;
use pagoda_core::units::{CHUNK_PAGES, CHUNK_SIZE, ChunkIdx, PAGE_SIZE};
use pagoda_sys::Errno;
use pagoda_sys::uffd::{Protect, Resolved};

use super::Engine;
use super::agent::Asked;
use crate::handle::Notice;
use crate::recover;

/// How long an allocation that the host refuses is tried again: as long as the kernel's own OOM handling may take.
const MEMORY_PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two such tries.
const MEMORY_PAUSE: Duration = Duration::from_millis(2);
/// How long a punch of the VMM's own may take: one is microseconds, and a host that runs short delays a thread for less.
const OWN_PUNCH_MAX: Duration = Duration::from_secs(5);
/// Between two looks whether it is over.
const OWN_PUNCH_PAUSE: Duration = Duration::from_micros(50);

fn mode(protect: bool) -> Protect {
    if protect { Protect::Yes } else { Protect::No }
}

const WHOLE: Run = Run { start: 0, len: CHUNK_PAGES as u16 };

impl Engine {
    pub(super) fn execute(&mut self, action: Action) {
        match action {
            Action::Map { pages, protect } => self.map(pages, protect),
            Action::Unprotect { pages } => self.unprotect(pages),
            Action::Protect { pages } => self.protect(pages),
            // The engine has no store of images, so nobody sends the machine `Event::Freeze`.
            Action::Preserve { .. } | Action::BeginImage | Action::RefuseImage | Action::LoseImages => {
                self.freeze("an image was begun, and this daemon keeps none");
            }
            Action::Wake { pages } => self.wake(pages),
            Action::Zero { pages } => self.zero(pages),
            Action::ZeroChunk { chunk } => self.zero_chunk(chunk),
            Action::ReadPage { op, page, demand } => {
                let pages = Pages { chunk: page.chunk(), run: Run { start: page.index_in_chunk(), len: 1 } };
                self.read_buffered(op, pages, PageSet::single(page.index_in_chunk()), demand, Metric::FaultsSwapPage);
            }
            Action::ReadSpan { op, span, wanted, demand } => {
                self.read_buffered(op, span, wanted, demand, Metric::FaultsSwapChunk);
            }
            Action::ReadChunk { op, chunk, demand } => self.read_direct(op, chunk, demand),
            Action::ChunkComplete { op } => self.withdraw(op),
            Action::ChunkAbandon { op, chunk } => self.abandon_chunk(op, chunk),
            Action::Copy { op, pages, protect } => self.copy(op, pages, protect),
            Action::Store { op, pages } => self.store(op, pages),
            Action::Release { op } => self.release(op),
            Action::Zap { op } => self.zap(op),
            Action::ZapPages { ticket } => self.zap_pages(Asked::Watch { ticket, at: std::time::Instant::now() }),
            Action::WriteOut { op, chunk, pages } => self.write_out(op, chunk, pages),
            Action::PunchOut { op, chunk, pages, alone } => self.punch_out(op, chunk, pages, alone),
            Action::Share { op, chunk, pages } => self.share_pages(op, chunk, pages),
            Action::CopyBack { pages } => self.copy_back(pages),
            Action::DropShared { pages } => self.drop_shared(pages),
            Action::SwapPunch { pages } => self.swap_punch(pages),
            Action::RamPunch { pages } => {
                let place = self.space.place(pages);
                if let Err(errno) = place.region.ram.punch(place.offset, place.len) {
                    self.freeze(&format!("discarded memory could not be given back: {errno}"));
                }
            }
            Action::DiscardDone { token } => self.discard_done(token),
            Action::Arm => self.begin_to_arm(),
            Action::Disarm => self.disarm(),
            Action::Stalled { stall } => self.stalled(stall),
        }
    }

    fn map(&mut self, pages: Pages, protect: bool) {
        let place = self.space.place(pages);
        let uffd = self.space.uffd(place.addr);
        // A page that the host's kernel swapped out needs memory to come back.
        let resolved = self.retry(|| uffd.cont_over(place.addr, place.len, mode(protect)));
        self.check(resolved, "map pages");
    }

    fn unprotect(&mut self, pages: Pages) {
        let place = self.space.place(pages);
        if let Err(errno) = self.space.uffd(place.addr).unprotect(place.addr, place.len) {
            self.check(Resolved::Partial { bytes: 0, errno }, "end write protection");
        }
    }

    fn protect(&mut self, pages: Pages) {
        let place = self.space.place(pages);
        if let Err(errno) = self.space.uffd(place.addr).protect(place.addr, place.len) {
            self.check(Resolved::Partial { bytes: 0, errno }, "write-protect");
        }
    }

    fn wake(&mut self, pages: Pages) {
        let place = self.space.place(pages);
        let _ = self.space.uffd(place.addr).wake(place.addr, place.len);
    }

    pub(super) fn wake_all(&mut self) {
        for shard in self.space.shards() {
            let _ = shard.uffd.wake(shard.addr, shard.len);
        }
    }

    fn zero(&mut self, pages: Pages) {
        let mut left = pages.run;
        while left.len > 0 {
            let place = self.space.place(Pages { chunk: pages.chunk, run: left });
            let uffd = self.space.uffd(place.addr);
            let resolved = self.retry(|| uffd.zeropage(place.addr, place.len));
            let mut done = (resolved.bytes(place.len) / PAGE_SIZE) as u16;
            if resolved.exists() {
                // A punch that could not take a folio apart leaves zeros in the file, which is what is wanted here.
                let page = place.pages().start + u64::from(done);
                let addr = place.addr + u64::from(done) * PAGE_SIZE;
                if !place.region.view.is_zero(page..page + 1) {
                    return self.freeze("a page that should be zero is not: somebody else writes the RAM file");
                }
                let mapped = self.space.uffd(addr).cont_over(addr, PAGE_SIZE, Protect::No);
                self.check(mapped, "map a zero page");
                done += 1;
            } else if !resolved.is_all() {
                return self.check(resolved, "fill with zeros");
            }
            left = Run { start: left.start.wrapping_add(done as u8), len: left.len - done };
        }
    }

    fn zero_chunk(&mut self, chunk: ChunkIdx) {
        let place = self.space.place_chunk(chunk);
        let view = place.region.view.clone();
        let pages = place.pages();
        let filled = self.retry(|| match view.populate(pages.clone()) {
            Ok(()) => Resolved::All,
            Err(errno) => Resolved::Partial { bytes: 0, errno },
        });
        if !filled.is_all() {
            return self.check(filled, "fill a chunk with zeros");
        }
        if !place.region.view.is_zero(place.pages()) {
            return self.freeze("a chunk that should be zero is not: somebody else writes the RAM file");
        }
        self.map(Pages { chunk, run: WHOLE }, false);
    }

    /// The intent stays if something is left: then the next daemon settles it.
    fn abandon_chunk(&mut self, op: OpId, chunk: ChunkIdx) {
        let place = self.space.place_chunk(chunk);
        if let Err(errno) = place.region.ram.punch(place.offset, place.len) {
            return self.freeze(&format!("a chunk that could not be read could not be dropped: {errno}"));
        }
        match recover::still_there(&self.space, chunk, PageSet::FULL) {
            Ok(left) if left.is_empty() => self.withdraw(op),
            Ok(_) => self.freeze("a chunk that could not be read is held by a pin, and could not be dropped"),
            Err(error) => self.freeze(&error.to_string()),
        }
    }

    fn copy(&mut self, op: OpId, pages: Pages, protect: bool) {
        let Some((id, first)) = self.buffer_of(op) else { return self.freeze("a page arrived without a buffer") };
        let place = self.space.place(pages);
        let start = ((pages.first().0 - first.0) * PAGE_SIZE) as usize;
        let Some(content) = self.ring.buffer(id) else { return self.freeze("a page arrived in a busy buffer") };
        let content = &content[start..start + place.len as usize];
        let uffd = self.space.uffd(place.addr);
        // A try behind a partial one goes on where that stopped: what was copied exists.
        let mut done = 0;
        let resolved = self.retry(|| {
            let resolved = uffd.copy(place.addr + done as u64, &content[done..], mode(protect));
            done += resolved.bytes((content.len() - done) as u64) as usize;
            resolved
        });
        self.check(resolved, "bring a page in");
    }

    fn store(&mut self, op: OpId, pages: Pages) {
        let Some((id, first)) = self.buffer_of(op) else { return self.freeze("pages arrived without a buffer") };
        let place = self.space.place(pages);
        // Before the intent: it would have the next daemon drop what the file has.
        match place.region.ram.next_data(place.offset) {
            Ok(data) if data.is_none_or(|at| at >= place.offset + place.len) => {}
            Ok(_) => return self.freeze("a page that was to come in from swap is in the RAM file already"),
            Err(errno) => return self.freeze(&format!("page-in could not look at the RAM file: {errno}")),
        }
        let Some(intent) = self.io.take_intent() else { return self.freeze("the intents ran out") };
        let set = PageSet::range(pages.run.start, pages.run.len);
        // A page exists in the file before its content does.
        self.shared.intents[intent].declare(pages.chunk.0, set.words());
        let Some(content) = self.ring.buffer(id) else { return self.freeze("pages arrived in a busy buffer") };
        let start = ((pages.first().0 - first.0) * PAGE_SIZE) as usize;
        for (index, page) in place.pages().enumerate() {
            let at = start + index * PAGE_SIZE as usize;
            place.region.small.write_page(page, &content[at..at + PAGE_SIZE as usize]);
        }
        self.shared.intents[intent].withdraw();
        self.io.give_intent(intent);
    }

    fn punch_out(&mut self, op: OpId, chunk: ChunkIdx, pages: PageSet, alone: bool) {
        let Some(intent) = self.io.take_intent() else { return self.freeze("the intents ran out") };
        self.shared.intents[intent].declare(chunk.0, pages.words());
        let left = match self.punch(chunk, pages, alone) {
            Ok(left) => left,
            Err(why) => return self.freeze(&why),
        };
        self.shared.intents[intent].withdraw();
        self.io.give_intent(intent);
        self.events.push_front(Event::PunchDone { op, left });
    }

    /// Punches and looks whether the pages are gone; those that are not get their content back.
    pub(super) fn punch(&mut self, chunk: ChunkIdx, pages: PageSet, alone: bool) -> Result<PageSet, String> {
        let (Some(first), Some(last)) = (pages.first_set(), pages.last_set()) else { return Ok(PageSet::EMPTY) };
        let span = Run { start: first, len: u16::from(last) - u16::from(first) + 1 };
        let spans = if alone { PageSet::range(span.start, span.len) } else { pages };
        self.tiers.keep(&self.space, chunk, pages);
        let mut present = false;
        for run in spans.runs() {
            let place = self.space.place(Pages { chunk, run });
            let ram = &place.region.ram;
            ram.punch(place.offset, place.len).map_err(|errno| format!("page-out could not punch: {errno}"))?;
            let data = ram.next_data(place.offset).map_err(|errno| format!("page-out could not look: {errno}"))?;
            present |= data.is_some_and(|at| at < place.offset + place.len);
        }
        if !present {
            return Ok(PageSet::EMPTY);
        }
        // A folio that is pinned cannot be split: its part was zeroed in place.
        let place = self.space.place_chunk(chunk);
        let left = recover::still_there(&self.space, chunk, pages).map_err(|error| error.to_string())?;
        for index in left.iter() {
            let at = place.pages().start + u64::from(index);
            let mut content = [0; PAGE_SIZE as usize];
            self.tiers
                .read_back(chunk.page(index), &mut content)
                .map_err(|errno| format!("page-out was half done and a page cannot be read back: {errno}"))?;
            place.region.view.write_page(at, &content);
        }
        Ok(left)
    }

    fn swap_punch(&mut self, pages: Pages) {
        let Pages { chunk, run } = pages;
        if let Err(errno) = self.tiers.drop_blocks(chunk, PageSet::range(run.start, run.len)) {
            self.freeze(&format!("a swap block that is outdated could not be dropped: {errno}"));
        }
    }

    /// From now on all that leaves RAM does so with our knowledge.
    pub(super) fn take_punches(&self) {
        self.shared.take_punches();
        let deadline = Instant::now() + OWN_PUNCH_MAX;
        while self.shared.is_punching() {
            if Instant::now() > deadline {
                // The VMM stands still in the middle of it, or lies. It will ask for the same again.
                return tracing::warn!(vm = %self.name, "the VMM does not finish to give memory back");
            }
            std::thread::sleep(OWN_PUNCH_PAUSE);
        }
    }

    fn disarm(&mut self) {
        // Everything is in RAM. Blocks go first: from now on pages become zero without our knowing.
        if let Err(errno) = self.tiers.clear_blocks() {
            return self.freeze(&format!("swap could not be emptied: {errno}"));
        }
        for shard in self.space.shards() {
            match shard.uffd.unregister(shard.addr, shard.len) {
                Ok(()) => {}
                Err(errno) => {
                    return self.check(Resolved::Partial { bytes: 0, errno }, "unregister memory");
                }
            }
        }
        if let Some(member) = self.tiers.frames() {
            member.trim();
        }
        self.machine.disarmed();
        self.shared.leave_punches();
        self.collapse();
        // After the collapse, which maps what nobody has used.
        self.restart_sample();
        self.release_pin_waiters();
    }

    /// Tries again while the host has no memory to give; the VM's faults wait meanwhile, as under the kernel's own reclaim.
    pub(super) fn retry(&self, mut attempt: impl FnMut() -> Resolved) -> Resolved {
        let start = std::time::Instant::now();
        loop {
            let resolved = attempt();
            if !(resolved.no_memory() || resolved.busy()) || start.elapsed() > MEMORY_PATIENCE {
                return resolved;
            }
            std::thread::sleep(MEMORY_PAUSE);
        }
    }

    pub(super) fn check(&mut self, resolved: Resolved, what: &str) {
        if resolved.is_all() {
            return;
        }
        if resolved.gone() {
            // The VMM is ending; its pidfd says when it has.
            tracing::debug!(vm = %self.name, "{what}: the VMM is gone");
            return;
        }
        let why = resolved.errno().unwrap_or(Errno::IO);
        self.freeze(&format!("could not {what}: {why}"));
    }

    /// The VMM let its end of a connection go, or ended; [`Notice::Exited`] comes from the pidfd.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.end, Some(Notice::Exited))
    }
}

// The whole space is a multiple of chunks; a run of a chunk never leaves it.
const _: () = assert!(CHUNK_SIZE == CHUNK_PAGES * PAGE_SIZE);
