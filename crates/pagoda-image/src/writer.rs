//! The engine's end of an image: takes over pages before they change.
//!
//! [`Prepared`] is what it has while the VM is stopped, [`Writer`] from the moment in which the image exists. The order for each
//! page: the block is written -> the entry is written -> the caller may change the page. So a daemon that is killed at any
//! instruction leaves an image whose missing pages are those that the VM has unchanged, and the next daemon goes on
//! ([`Writer::resume`]). A block is never written twice, nor is an entry.
//!
//! **When the disk fails**, the image is lost and the VM is not: that is noted for the next daemon, and all later calls do
//! nothing. The guest sees nothing of it. Nothing here waits for a disk except in the kernel's way of slowing a writer down;
//! nothing allocates but the note of a loss.

use std::os::fd::AsFd;
use std::sync::Arc;

use pagoda_core::bits::{PageSet, Run};
use pagoda_core::fault::Pages;
use pagoda_core::units::{Bytes, CHUNK_PAGES, ChunkIdx, PAGE_SIZE};

use crate::damage::{ImageError, ImageFile};
use crate::entry::{BlockIdx, ENTRY_SIZE, Entry, POISON, entry_offset, seal_of, sum_of};
use crate::ledger::{Ledger, PART};
use crate::lengths::Lengths;
use crate::limits::IMAGE_PAGES_MAX;
use crate::manifest::Stage;
use crate::map::{CHUNK_ENTRIES, mark_of, mark_offset};

const PAGE: usize = PAGE_SIZE as usize;
const ZERO_PAGE: [u8; PAGE] = [0; PAGE];

/// What became of pages that an image was to take over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "what the image does not have it cannot be filled with later"]
pub enum Taken {
    /// It has them, for the next daemon too.
    Yes,
    /// It is lost; see [`Writer::lost`].
    No,
}

/// An image that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub why: String,
    /// The next daemon will know. If it is false, [`Writer::note_loss`] has to be called until it is.
    pub is_noted: bool,
}

/// The files of an image that does not exist yet.
#[derive(Debug)]
pub struct Prepared {
    ledger: Arc<Ledger>,
    missing: Vec<PageSet>,
}

impl Prepared {
    pub(crate) fn new(ledger: Arc<Ledger>) -> Prepared {
        let missing = vec![PageSet::FULL; ledger.chunks.as_usize()];
        Prepared { ledger, missing }
    }

    /// How far the image is, for the daemon.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// **The image begins to exist**: it is what the VM holds now. The manifest has been written, the VM stands still, and no
    /// page changes without [`Writer::preserve`] from now on. One rename, of which a killed daemon leaves all or nothing.
    ///
    /// # Errors
    /// The disk's. There is no image then, and there will be none.
    pub fn commit(self) -> Result<Writer, ImageError> {
        let Prepared { ledger, missing } = self;
        let stage = ledger.manifest().map(|manifest| manifest.stage);
        if stage != Some(Stage::Begun) {
            let stage = stage.map_or("not begun", Stage::name);
            return Err(ImageError::WrongStage { stage, needed: Stage::Begun.name() });
        }
        let (part, name) = (format!("{}{PART}", ledger.id), ledger.id.to_string());
        let renamed = ledger.disk.rename(ledger.images.as_fd(), &part, &name);
        renamed.map_err(|source| ImageError::Directory { what: part, source })?;
        Ok(Writer { missing_count: ledger.chunks.pages().0, next: 0, lost: None, missing, ledger })
    }
}

/// An image that exists and takes pages over, until it is filled or lost.
#[derive(Debug)]
pub struct Writer {
    ledger: Arc<Ledger>,
    missing: Vec<PageSet>,
    missing_count: u64,
    /// The block that is written next.
    next: u64,
    lost: Option<Loss>,
}

impl Writer {
    /// Goes on with an image that a daemon before this one began, in this life of the host. Its missing pages are those that
    /// the VM has unchanged.
    ///
    /// # Errors
    /// It cannot be gone on with. It has to be made lost ([`crate::Store::lose`]) before the VM runs unseen: else a later
    /// daemon would take changed pages for its own.
    pub fn resume(ledger: Arc<Ledger>, boot_id: &str) -> Result<Writer, ImageError> {
        let manifest = ledger.manifest().ok_or(ImageError::WrongStage { stage: "not begun", needed: "begun" })?;
        match manifest.stage {
            Stage::Lost => return Err(ImageError::Lost { why: manifest.why.unwrap_or_default() }),
            Stage::Begun if manifest.boot_id == boot_id => {}
            Stage::Begun => return Err(ImageError::Lost { why: "the host was restarted before it was filled".into() }),
            stage => return Err(ImageError::WrongStage { stage: stage.name(), needed: Stage::Begun.name() }),
        }
        let lengths = Lengths::of(&ledger.map, &ledger.pages, ledger.state.get(), ledger.marks.as_ref())?;
        lengths.check(&manifest)?;
        let mut missing = Vec::with_capacity(ledger.chunks.as_usize());
        for chunk in ledger.chunks.iter() {
            let entries = ledger.tables()?.chunk(chunk)?;
            missing.push((0..=u8::MAX).filter(|index| entries[usize::from(*index)] == Entry::Missing).collect());
        }
        let missing_count = missing.iter().map(|pages: &PageSet| u64::from(pages.count())).sum();
        // Behind all that was written, also what got no entry any more.
        let next = lengths.pages.pages_ceil().0;
        ledger.progress.set_written(Bytes(next * PAGE_SIZE));
        Ok(Writer { ledger, missing, missing_count, next, lost: None })
    }

    /// How far the image is, for the daemon.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Pages of a chunk that the image has no copy of: those that the VM holds for it.
    pub fn missing_of(&self, chunk: ChunkIdx) -> PageSet {
        self.missing[chunk.as_usize()]
    }

    /// Pages that the image has no copy of. At 0 it is full, and [`Ledger::mark_filled`] may say so.
    pub fn missing(&self) -> u64 {
        self.missing_count
    }

    /// The disk is behind what was written ([`Ledger::write_back`]): what can wait should.
    pub fn is_behind(&self) -> bool {
        self.ledger.progress.is_behind()
    }

    /// Takes over pages that hold `content`. Those that the image has already stay what they are in it.
    pub fn preserve(&mut self, pages: Pages, content: &[u8]) -> Taken {
        assert_eq!(content.len(), usize::from(pages.run.len) * PAGE, "a page has its content");
        self.take(pages, |writer, run| {
            let from = usize::from(run.start - pages.run.start) * PAGE;
            writer.write_blocks(pages.chunk, run, &content[from..from + usize::from(run.len) * PAGE])
        })
    }

    /// Takes over pages that are all zero.
    pub fn preserve_zeros(&mut self, pages: Pages) -> Taken {
        self.take(pages, |_, run| Ok(Entries::of(run, Entry::Zero)))
    }

    /// Takes over pages that are known not to have changed since the image's parent began, which has them: nothing is copied.
    /// Whole chunks of them take four bytes.
    pub fn inherit(&mut self, pages: Pages) -> Taken {
        if self.ledger.marks.is_none() && self.lost.is_none() {
            self.lose("pages were taken for those of its parent, and it has none; please report this");
            self.poison(pages.chunk, pages.run);
        }
        if u64::from(pages.run.len) == CHUNK_PAGES && self.missing_of(pages.chunk).is_full() {
            return self.mark(pages);
        }
        let (id, chunk) = (self.ledger.id, pages.chunk);
        self.take(pages, |_, run| {
            let mut entries = Entries::of(run, Entry::Missing);
            for (index, page) in (0..=u8::MAX).zip(run.start..=u8::MAX).take(usize::from(run.len)) {
                entries.set(index, Entry::Parent { seal: seal_of(id, chunk.page(page)) });
            }
            Ok(entries)
        })
    }

    /// The image is given up, and this said to whoever asks for it later.
    pub fn lose(&mut self, why: &str) {
        if self.lost.is_none() {
            let is_noted = self.ledger.lose(why);
            self.lost = Some(Loss { why: why.to_owned(), is_noted });
        }
    }

    /// Whether the image was given up.
    pub fn lost(&self) -> Option<&Loss> {
        self.lost.as_ref()
    }

    /// Tries again to note a loss for the next daemon; whether it is noted now.
    pub fn note_loss(&mut self) -> bool {
        let Some(loss) = &mut self.lost else { return true };
        loss.is_noted = loss.is_noted || self.ledger.lose(&loss.why);
        loss.is_noted
    }

    /// All pages of a chunk that has no entry yet are the parent's.
    fn mark(&mut self, pages: Pages) -> Taken {
        let Pages { chunk, run } = pages;
        if let (None, Some(marks)) = (&self.lost, &self.ledger.marks) {
            let offset = mark_offset(chunk);
            match self.ledger.disk.write_at(marks, &mark_of(self.ledger.id, chunk).to_le_bytes(), offset) {
                Ok(()) => {
                    self.missing[chunk.as_usize()].clear_range(run.start, run.len);
                    self.missing_count -= u64::from(run.len);
                }
                Err(error) => {
                    self.lose(&format!("{}, offset {offset}: {error}", ImageFile::Inherited));
                    self.poison(chunk, run);
                }
            }
        }
        if self.lost.is_some() { Taken::No } else { Taken::Yes }
    }

    fn take(&mut self, pages: Pages, mut entries_of: impl FnMut(&mut Writer, Run) -> Result<Entries, String>) -> Taken {
        let wanted = self.missing_of(pages.chunk) & PageSet::range(pages.run.start, pages.run.len);
        for run in wanted.runs() {
            if self.lost.is_some() {
                break;
            }
            let written = entries_of(self, run).and_then(|entries| self.write_entries(pages.chunk, run, &entries));
            if let Err(why) = written {
                self.lose(&why);
                self.poison(pages.chunk, run);
            }
        }
        if self.lost.is_some() { Taken::No } else { Taken::Yes }
    }

    /// Appends a block for each page that is not zero, with one call for each run of them.
    fn write_blocks(&mut self, chunk: ChunkIdx, run: Run, content: &[u8]) -> Result<Entries, String> {
        let (pages, _) = content.as_chunks::<PAGE>();
        let mut entries = Entries::of(run, Entry::Zero);
        let filled: PageSet =
            (run.start..=u8::MAX).zip(pages).filter(|(_, page)| **page != ZERO_PAGE).map(|(index, _)| index).collect();
        for part in filled.runs() {
            let first = self.next;
            if first + u64::from(part.len) > IMAGE_PAGES_MAX.0 {
                return Err(format!("it would have more than {IMAGE_PAGES_MAX} blocks"));
            }
            let from = usize::from(part.start - run.start) * PAGE;
            let bytes = &content[from..from + usize::from(part.len) * PAGE];
            // Also what was written of it when this fails is never written again.
            self.next += u64::from(part.len);
            let written = self.ledger.disk.write_at(&self.ledger.pages, bytes, first * PAGE_SIZE);
            written.map_err(|error| format!("pages, offset {}: {error}", first * PAGE_SIZE))?;
            self.ledger.progress.set_written(Bytes(self.next * PAGE_SIZE));
            for (index, block) in (part.start..=u8::MAX).zip(first..).take(usize::from(part.len)) {
                let sum = sum_of(chunk.page(index), &pages[usize::from(index - run.start)]);
                entries.set(index - run.start, Entry::Block { block: BlockIdx(block as u32), sum });
            }
        }
        Ok(entries)
    }

    fn write_entries(&mut self, chunk: ChunkIdx, run: Run, entries: &Entries) -> Result<(), String> {
        let offset = entry_offset(chunk.page(run.start));
        let written = self.ledger.disk.write_at(&self.ledger.map, entries.bytes(), offset);
        written.map_err(|error| format!("{}, offset {offset}: {error}", ImageFile::Map))?;
        self.missing[chunk.as_usize()].clear_range(run.start, run.len);
        self.missing_count -= u64::from(run.len);
        Ok(())
    }

    /// Where a loss cannot be noted otherwise: the entries of these pages become ones that every daemon refuses. They have had
    /// their space from the beginning, so a full disk takes them, unless the image has a parent: then the map has holes, and the
    /// engine's note in memory that it shares with the VMM is the last one.
    fn poison(&mut self, chunk: ChunkIdx, run: Run) {
        let Some(loss) = self.lost.as_mut().filter(|loss| !loss.is_noted) else { return };
        let offset = entry_offset(chunk.page(run.start));
        let poison = POISON.to_le_bytes().repeat(usize::from(run.len));
        loss.is_noted = self.ledger.disk.write_at(&self.ledger.map, &poison, offset).is_ok();
    }
}

/// Entries of a run of pages, as they are in the file.
struct Entries {
    bytes: [u8; CHUNK_ENTRIES],
    len: usize,
}

impl Entries {
    fn of(run: Run, entry: Entry) -> Entries {
        let mut entries = Entries { bytes: [0; CHUNK_ENTRIES], len: usize::from(run.len) * ENTRY_SIZE };
        (0..=u8::MAX).take(usize::from(run.len)).for_each(|index| entries.set(index, entry));
        entries
    }

    fn set(&mut self, index: u8, entry: Entry) {
        let from = usize::from(index) * ENTRY_SIZE;
        self.bytes[from..from + ENTRY_SIZE].copy_from_slice(&entry.encode().to_le_bytes());
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
