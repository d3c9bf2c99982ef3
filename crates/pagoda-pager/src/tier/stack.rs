//! The tiers of one VM in their order, and which of them has a page.
//!
//! A page's content, where DRAM does not have it, is the frame that its entry in the share table names; else the block of the
//! first tier that holds one; else zeros. The last tier is the swap file, which has every block that no tier above has.
//! [`Stack::owners`] is the one place that knows this order; page-in, page-out, repair and recovery ask it.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::OpId;
use pagoda_core::stats::Stats;
use pagoda_core::units::{ChunkIdx, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ring::{Ring, RingError};
use pagoda_sys::swapfile::SwapFile;

use super::remote::RemoteNumbers;
use super::report::Report;
use super::swap::SwapTier;
use super::{Begun, ByTier, Content, Ended, Io, Placed, Places, Read, TIERS_MAX, Takes, Target, Tier, TierIdx, Write};
use crate::latency::Histogram;
use crate::share::Member;
use crate::space::Space;

/// Why the blocks that the last daemon left cannot be used. The VM waits; nothing is lost.
#[derive(Debug, thiserror::Error)]
pub enum BlocksError {
    /// They cannot be read, or an outdated one cannot be dropped.
    #[error(transparent)]
    Os(#[from] Errno),
    /// Which of two is the newer one is not known.
    #[error(
        "page {} has a block in the tier {tier} and one above it, and is not in DRAM: please report this with the VM's swap \
         file, which is kept",
        page.0
    )]
    TwoBlocks {
        /// The first such page.
        page: PageIdx,
        /// The name of the lower of the two tiers.
        tier: &'static str,
    },
}

/// A tier, with what the stack measures of it.
#[derive(Debug)]
struct Level {
    tier: Box<dyn Tier>,
    reads: Histogram,
    writes: Histogram,
}

/// What is to be read for an operation.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The machine's operation that the read belongs to.
    pub op: OpId,
    /// The chunk that all of the pages are in.
    pub chunk: ChunkIdx,
    /// The pages that are wanted.
    pub pages: PageSet,
    /// All pages for which the target has room.
    pub room: PageSet,
    /// Where the content of the pages goes.
    pub target: Target,
    /// A fault waits for them.
    pub demand: bool,
}

/// The tiers of one VM, which this alone reads, writes and drops.
#[derive(Debug)]
pub struct Stack {
    frames: Option<Member>,
    /// In the order in which they are asked; the last is the swap file.
    levels: Vec<Level>,
    swap_path: PathBuf,
}

impl Stack {
    /// The swap file under these tiers, the first of which is asked first, and the frames of a share group above all.
    ///
    /// # Panics
    /// If there are more than [`TIERS_MAX`] tiers: the list is the daemon's own.
    pub fn new(frames: Option<Member>, above_swap: Vec<Box<dyn Tier>>, swap: SwapFile) -> Stack {
        assert!(above_swap.len() < TIERS_MAX, "{} tiers above swap", above_swap.len());
        let swap_path = swap.path().to_owned();
        let last: Box<dyn Tier> = Box::new(SwapTier::new(swap));
        let level = |tier| Level { tier, reads: Histogram::default(), writes: Histogram::default() };
        let levels = above_swap.into_iter().chain([last]).map(level).collect();
        Stack { frames, levels, swap_path }
    }

    /// The swap file's path.
    pub fn swap_path(&self) -> &Path {
        &self.swap_path
    }

    /// The VM's part in its share group.
    pub fn frames(&self) -> Option<&Member> {
        self.frames.as_ref()
    }

    /// The VM's part in its share group, to be changed.
    pub fn frames_mut(&mut self) -> Option<&mut Member> {
        self.frames.as_mut()
    }

    /// Takes the VM out of its share group.
    pub fn take_frames(&mut self) -> Option<Member> {
        self.frames.take()
    }

    fn each(&mut self) -> impl Iterator<Item = (TierIdx, &mut Level)> {
        (0..).map(TierIdx).zip(&mut self.levels)
    }

    fn last(&self) -> usize {
        self.levels.len() - 1
    }

    /// The name of a tier.
    pub fn name(&self, tier: TierIdx) -> &'static str {
        self.levels[tier.as_usize()].tier.name()
    }

    /// Makes all tiers known to the ring.
    ///
    /// # Errors
    /// Of the ring.
    pub fn attach(&mut self, ring: &mut Ring) -> Result<(), RingError> {
        self.levels.iter_mut().try_for_each(|level| level.tier.attach(ring))
    }

    /// The descriptors of the tiers that have one.
    pub fn fds(&self) -> impl Iterator<Item = (TierIdx, BorrowedFd<'_>)> {
        (0..).map(TierIdx).zip(&self.levels).filter_map(|(index, level)| Some((index, level.tier.fd()?)))
    }

    /// The descriptor of a tier.
    pub fn fd(&self, tier: TierIdx) -> Option<BorrowedFd<'_>> {
        self.levels.get(tier.as_usize())?.tier.fd()
    }

    /// Which tier has which of these pages, all of which have a block.
    pub fn owners(&self, chunk: ChunkIdx, pages: PageSet) -> ByTier {
        let (mut owners, mut rest) = (ByTier::default(), pages);
        for (index, level) in self.levels[..self.last()].iter().enumerate() {
            owners[index] = level.tier.holds(chunk) & rest;
            rest -= owners[index];
        }
        owners[self.last()] = rest;
        owners
    }

    /// Those of these pages that need not be sent to whoever the VM moves to: the tier that has them is handed over.
    pub fn handed_over(&self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let owners = self.owners(chunk, pages);
        let each = self.levels.iter().zip(owners);
        each.fold(PageSet::EMPTY, |all, (level, owned)| all | (level.tier.handed_over(chunk) & owned))
    }

    /// Whether a tier takes copies for whoever the VM moves to.
    pub fn places(&self) -> Places {
        let each = self.levels.iter().map(|level| level.tier.places());
        each.into_iter().find(|places| *places != Places::No).unwrap_or(Places::No)
    }

    /// Has the tier that takes copies write what these pages held. False: there is none.
    #[must_use]
    pub fn place(&mut self, first: PageIdx, content: Vec<u8>) -> bool {
        let taker = self.levels.iter_mut().find(|level| level.tier.places() != Places::No);
        taker.map(|level| level.tier.place(first, content)).is_some()
    }

    /// What became of a copy. Each is given once.
    pub fn next_placed(&mut self) -> Option<Placed> {
        self.levels.iter_mut().find_map(|level| level.tier.next_placed())
    }

    /// Nobody waits for copies any more.
    pub fn forget_placing(&mut self) {
        self.levels.iter_mut().for_each(|level| level.tier.forget_placing());
    }

    /// Has each tier read the pages that it has. A wanted page without a block is read from the swap file, whose holes are zeros.
    /// `begun` hears what each has begun.
    pub fn read(&mut self, ring: &mut Ring, space: &Space, wanted: &Wanted, mut begun: impl FnMut(TierIdx, Begun)) {
        let Wanted { op, chunk, pages, room, target, demand } = *wanted;
        let owners = self.owners(chunk, pages);
        for (tier, level) in self.each() {
            let pages = owners[tier.as_usize()];
            if !pages.is_empty() {
                let around = room - wanted.pages;
                let read = Read { op, chunk, pages, around, target, demand };
                let since = Instant::now();
                let part = level.tier.read(&mut Io { ring, space, tier }, &read);
                if part.parts == 0 {
                    level.reads.record(since.elapsed());
                }
                begun(tier, part);
            }
        }
    }

    /// The first tier from `from` on that does not refuse pages, and how many it takes. The last never refuses.
    pub fn offer(&self, from: TierIdx, has_time: bool) -> (TierIdx, Takes) {
        let takes = |index: usize| self.levels[index].tier.takes(has_time);
        let first =
            (from.as_usize()..self.last()).map(|index| (index, takes(index))).find(|(_, takes)| *takes != Takes::No);
        let (index, takes) = first.unwrap_or_else(|| (self.last(), takes(self.last())));
        (TierIdx(index as u8), takes)
    }

    /// Has one tier write pages.
    pub fn write(&mut self, ring: &mut Ring, space: &Space, tier: TierIdx, write: &Write) -> Begun {
        let level = &mut self.levels[tier.as_usize()];
        let since = Instant::now();
        let begun = level.tier.write(&mut Io { ring, space, tier }, write);
        if begun.parts == 0 {
            level.writes.record(since.elapsed());
        }
        begun
    }

    /// A request of a write, which a tier gave to the ring, has ended.
    pub fn ring_write_ended(&mut self, tier: TierIdx) {
        if let Some(level) = self.levels.get_mut(tier.as_usize()) {
            level.tier.ring_write_ended();
        }
    }

    /// A tier's part of an operation has ended and took so long.
    pub fn note_latency(&mut self, tier: TierIdx, is_read: bool, took: Duration) {
        let level = &mut self.levels[tier.as_usize()];
        if is_read { level.reads.record(took) } else { level.writes.record(took) }
    }

    /// Sends what waits to be sent; how long nothing is to be done after that.
    pub fn begin(&mut self, ring: &mut Ring, space: &Space) -> Duration {
        self.each().map(|(tier, level)| level.tier.begin(&mut Io { ring, space, tier })).min().unwrap_or(Duration::MAX)
    }

    /// Takes in what a tier's descriptor has.
    ///
    /// # Errors
    /// The descriptor is broken.
    pub fn turn(&mut self, tier: TierIdx) -> std::io::Result<()> {
        self.levels.get_mut(tier.as_usize()).map_or(Ok(()), |level| level.tier.turn())
    }

    /// The next part that has ended outside the ring.
    pub fn next_ended(&mut self, ring: &mut Ring, space: &Space) -> Option<(TierIdx, Ended)> {
        self.each().find_map(|(tier, level)| Some((tier, level.tier.next_ended(&mut Io { ring, space, tier })?)))
    }

    /// A page-out of this chunk has ended: each tier holds the pages of its set in `held`. `before` says which tier had which when it
    /// began ([`Stack::owners`]): their blocks there are outdated now, and go.
    ///
    /// # Errors
    /// It could not be noted for the next daemon.
    pub fn settle(&mut self, chunk: ChunkIdx, before: &ByTier, held: &ByTier) -> Result<(), Errno> {
        let all = held.iter().fold(PageSet::EMPTY, |all, pages| all | *pages);
        // From the first tier on: a page that has come to one counts there before the tiers below let go of it.
        for (tier, level) in self.each() {
            let gained = held[tier.as_usize()];
            let lost = (all - gained) & before[tier.as_usize()];
            if !(gained | lost).is_empty() {
                level.tier.settle(chunk, gained, lost)?;
            }
        }
        Ok(())
    }

    /// These blocks become holes, in whichever tier they are. Frames stay.
    ///
    /// # Errors
    /// The next daemon would find one of them.
    pub fn drop_blocks(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        let owners = self.owners(chunk, pages);
        self.each()
            .filter(|(tier, _)| !owners[tier.as_usize()].is_empty())
            .try_for_each(|(tier, level)| level.tier.drop_pages(chunk, owners[tier.as_usize()]))
    }

    /// No page has a block any more. The swap file is emptied first.
    ///
    /// # Errors
    /// The next daemon would find some.
    pub fn clear_blocks(&mut self) -> Result<(), Errno> {
        self.levels.iter_mut().rev().try_for_each(|level| level.tier.clear())
    }

    /// These pages are about to leave DRAM: [`Stack::read_back`] can bring them until the next call.
    pub fn keep(&mut self, space: &Space, chunk: ChunkIdx, pages: PageSet) {
        let owners = self.owners(chunk, pages);
        for (tier, level) in self.each() {
            level.tier.keep(space, chunk, owners[tier.as_usize()]);
        }
    }

    /// Brings back a page that was kept, for the kernel could not take it out of DRAM and only zeroed it. It may wait for the
    /// disk.
    ///
    /// # Errors
    /// Of the disk.
    pub fn read_back(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.owner_of(page).read_back(page, out)
    }

    /// Brings a page while nothing is under way, wherever it is. It may wait for the disk and for other machines.
    ///
    /// # Errors
    /// The page is lost or does not come.
    pub fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        self.owner_of(page).read_now(page, out)
    }

    /// Who has the page's content: its frame, else the tier of its block, else the last tier, whose holes are zeros.
    fn owner_of(&mut self, page: PageIdx) -> &mut dyn Tier {
        let owners = self.owners(page.chunk(), PageSet::single(page.index_in_chunk()));
        let index = owners.iter().position(|pages| !pages.is_empty()).unwrap_or(self.last());
        match &mut self.frames {
            Some(member) if member.frame_of(page).is_some() => member,
            _ => &mut *self.levels[index].tier,
        }
    }

    /// Tells which pages have a block. A page that two tiers claim was on its way from one to the other when the daemon died. DRAM
    /// has it then: it leaves only after the block that is outdated has gone. So the upper tier counts, and the block below goes,
    /// lest it come back as the page one day. `in_dram` has an entry for every chunk.
    ///
    /// # Errors
    /// What the last daemon left cannot be read, or a block cannot be dropped. Two tiers claim a page that DRAM does not have:
    /// neither is known to be the newer one, and nothing of that tier is dropped.
    pub fn recover(&mut self, in_dram: &[PageSet]) -> Result<Vec<PageSet>, BlocksError> {
        let mut all = vec![PageSet::EMPTY; in_dram.len()];
        for level in &mut self.levels {
            // All that the tier has, before it is compared: it may name a page twice, as a file system does whose blocks are
            // smaller than a page, and what it names twice is no second claim.
            let mut held = vec![PageSet::EMPTY; in_dram.len()];
            level.tier.recover(&mut |chunk, pages| {
                if let Some(held) = held.get_mut(chunk.as_usize()) {
                    *held |= pages;
                }
            })?;
            let twice: Vec<PageSet> = all.iter().zip(&held).map(|(above, held)| *above & *held).collect();
            for (chunk, (twice, in_dram)) in (0..).map(ChunkIdx).zip(twice.iter().zip(in_dram)) {
                if let Some(index) = (*twice - *in_dram).first_set() {
                    return Err(BlocksError::TwoBlocks { page: chunk.page(index), tier: level.tier.name() });
                }
            }
            for (chunk, twice) in (0..).map(ChunkIdx).zip(&twice).filter(|(_, twice)| !twice.is_empty()) {
                level.tier.drop_pages(chunk, *twice)?;
            }
            all.iter_mut().zip(held).for_each(|(all, held)| *all |= held);
        }
        Ok(all)
    }

    /// Of the chunk's blocks, those that have not come to this host yet.
    pub fn missing(&self, chunk: ChunkIdx) -> PageSet {
        let each = self.levels.iter().map(|level| level.tier.missing(chunk));
        each.fold(PageSet::EMPTY, |all, pages| all | pages)
    }

    /// The VM begins, and these pages, by chunk, have not come yet. No tier has anything of them.
    ///
    /// # Errors
    /// It cannot be noted. `NOENT`: none of the tiers expects pages, and some are missing.
    pub fn expect(&mut self, missing: &[PageSet]) -> Result<(), Errno> {
        for level in &mut self.levels {
            if level.tier.expect(missing)? {
                return Ok(());
            }
        }
        if missing.iter().all(PageSet::is_empty) { Ok(()) } else { Err(Errno::NOENT) }
    }

    /// Pages that were missing and have come. Each is given once.
    pub fn take_came(&mut self) -> Option<(ChunkIdx, PageSet)> {
        self.levels.iter_mut().find_map(|level| level.tier.take_came())
    }

    /// Once a second. `written` gives the chunks that are being written out.
    pub fn maintain<I: Iterator<Item = ChunkIdx>>(&mut self, written: impl Fn() -> I) {
        self.levels.iter_mut().for_each(|level| level.tier.maintain(&mut written()));
    }

    /// What the VM is expected to need soon, in the order in which it is to come in. Given out once.
    pub fn take_prefetch(&mut self) -> Vec<(ChunkIdx, PageSet)> {
        self.levels.iter_mut().flat_map(|level| level.tier.take_prefetch()).collect()
    }

    /// What was read ahead of this chunk is used.
    pub fn note_hit(&mut self, chunk: ChunkIdx) {
        self.levels.iter_mut().for_each(|level| level.tier.note_hit(chunk));
    }

    /// The guest of a restored VM was let run, now or before.
    pub fn note_let_run(&mut self) {
        self.levels.iter_mut().for_each(|level| level.tier.note_let_run());
    }

    /// The VM has ended.
    pub fn end(&mut self) {
        self.levels.iter_mut().for_each(|level| level.tier.end());
    }

    /// What each tier reports.
    pub fn reports(&self) -> Vec<Report> {
        let report = |level: &Level| Report {
            name: level.tier.name(),
            counts: level.tier.counts(),
            reads: level.reads.clone(),
            writes: level.writes.clone(),
        };
        self.levels.iter().map(report).collect()
    }

    /// Adds the tiers' own metrics.
    pub fn add_to(&self, stats: &mut Stats) {
        self.levels.iter().for_each(|level| level.tier.add_to(stats));
    }

    /// What the VM waits for, if pages do not come in time.
    pub fn waits(&mut self) -> Option<String> {
        self.levels.iter_mut().find_map(|level| level.tier.waits())
    }

    /// What could not be read last of a tier that says so in its own words.
    pub fn trouble(&self) -> Option<String> {
        self.levels.iter().find_map(|level| level.tier.trouble())
    }

    /// More of the tier in other machines' memory, if there is one.
    pub fn remote(&mut self) -> Option<RemoteNumbers> {
        self.levels.iter_mut().find_map(|level| level.tier.remote())
    }
}

#[cfg(test)]
mod tests;
