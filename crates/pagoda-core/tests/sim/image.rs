//! Blocks, which need not be at their page's offset, and images of the VM's memory, which copy pages or refer to blocks.
//!
//! A page-out writes a block in place or takes another one, which becomes the page's when all is written. A block that an
//! image refers to is not written again, and is free when neither a page nor an image has it.

use std::collections::BTreeMap;

use crate::rng::Rng;
use crate::vmm::Vmm;
use crate::world::{GARBAGE, World};

/// What an image has of a page that has changed since it began.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Copy(u64),
    Block(usize),
    Zero,
    /// What the image before this one has of the page.
    Parent,
}

/// An image of the VM's memory.
#[derive(Debug)]
pub struct Image {
    entries: BTreeMap<usize, Entry>,
    /// The image before this one is its parent.
    has_parent: bool,
    /// What it has to hold for ever. Nothing of pages that were being given back when it began.
    truth: Vec<Option<u64>>,
    /// It lacks pages that have changed, which was said. What it has may serve an older one.
    is_lost: bool,
}

/// A block of the swap file. It is free when it has neither a page nor an entry.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    content: u64,
    page: Option<usize>,
    /// Entries of images that refer to it.
    entries: usize,
}

/// The swap file's blocks.
#[derive(Debug, Default)]
pub struct Blocks {
    blocks: Vec<Block>,
    free: Vec<usize>,
    of_page: Vec<Option<usize>>,
}

/// A rule that an executor may break: the simulation has to notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake {
    /// Page-out overwrites a block that an image refers to.
    WritesInPlace,
    /// A block that an image refers to becomes free with its page.
    FreesBlocks,
    /// What a page's block holds is taken for what the page holds.
    WrongSource,
    /// What was read for an image is used for pages that have changed since.
    UsesChangedKeep,
    /// What was read for an image is used for the next one.
    UsesOldKeep,
    /// A page is copied from RAM behind its punch.
    FillsPunched,
    /// A daemon that starts does not know which pages are frozen.
    ForgetsFrozen,
    /// Preserved after the next event instead of before the next action.
    PreservesLate,
    /// Pages stay mapped writable.
    ProtectsNothing,
    /// An image begins while direct I/O is in flight.
    MissesDirectIo,
    /// A page that has changed in this way is taken for the parent's.
    KeepsSame(Change),
    /// A borrowed chunk is moved while old direct I/O may write into its private pages.
    MovesUnderIo,
    /// A borrowed chunk is moved that was not protected.
    FencesNothing,
    /// What a borrowed chunk has of its own is copied before the chunk is protected.
    CopiesBeforeFence,
    /// A borrowed page may be written before the VM is charged for it.
    OpensBeforeCharge,
    /// A daemon that starts lets writes go on that the dead one let happen.
    LeavesOpen,
    /// A daemon that starts takes no page for private.
    ForgetsPrivate,
    /// A daemon that starts leaves in the RAM file what the dead one copied of a borrowed chunk.
    LeavesCopies,
    /// A move that a dead daemon ordered is done when another one has started.
    MovesLate,
    /// Of a page that moves to another host a copy counts that direct I/O in flight may change.
    CopiesUnderIo,
    /// What could not be copied for a move is not asked for again.
    ForgetsCopies,
}

/// A way in which a page may change, or be changed unseen from then on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The first write of a protected page.
    Unprotect,
    /// The page was mapped writable.
    Map,
    /// Brought in from swap and mapped writable.
    Copy,
    /// Zeros where nothing was, mapped writable.
    Zero,
    /// Copied back from a frame.
    CopyBack,
    /// Given back by the guest.
    Discard,
}

impl Blocks {
    pub fn new(pages: usize) -> Blocks {
        Blocks { of_page: vec![None; pages], ..Blocks::default() }
    }

    /// What the page's block holds.
    pub fn get(&self, page: usize) -> Option<u64> {
        self.of_page[page].map(|block| self.blocks[block].content)
    }

    pub fn has(&self, page: usize) -> bool {
        self.of_page[page].is_some()
    }

    /// Where a page-out is to write: the page's own block, or another one.
    pub fn target(&mut self, page: usize, moves: bool, mistake: Option<Mistake>) -> usize {
        let own = self.of_page[page].filter(|_| !moves);
        let in_place = own.filter(|block| self.blocks[*block].entries == 0 || mistake == Some(Mistake::WritesInPlace));
        in_place.unwrap_or_else(|| self.allocate())
    }

    fn allocate(&mut self) -> usize {
        let block = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(Block::default());
            self.blocks.len() - 1
        });
        self.blocks[block].content = GARBAGE;
        block
    }

    pub fn block_of(&self, page: usize) -> Option<usize> {
        self.of_page[page]
    }

    pub fn write(&mut self, block: usize, content: u64) {
        self.blocks[block].content = content;
    }

    /// From now on the block is the page's.
    pub fn give(&mut self, page: usize, block: usize) {
        if self.of_page[page] == Some(block) {
            return;
        }
        self.drop_page(page, None);
        self.of_page[page] = Some(block);
        self.blocks[block].page = Some(page);
    }

    /// The page has no block any more.
    pub fn drop_page(&mut self, page: usize, mistake: Option<Mistake>) {
        let Some(block) = self.of_page[page].take() else { return };
        self.blocks[block].page = None;
        if mistake == Some(Mistake::FreesBlocks) {
            self.blocks[block].content = GARBAGE;
        }
        self.free(block);
    }

    pub fn drop_all(&mut self) {
        (0..self.of_page.len()).for_each(|page| self.drop_page(page, None));
    }

    /// The block is free unless a page or an image has it.
    pub fn free(&mut self, block: usize) {
        let Block { page, entries, .. } = self.blocks[block];
        if page.is_none() && entries == 0 {
            self.blocks[block].content = GARBAGE;
            self.free.push(block);
        }
    }

    /// What a new daemon does: blocks that nobody has are free.
    pub fn collect(&mut self) {
        self.free.clear();
        (0..self.blocks.len()).for_each(|block| self.free(block));
    }
}

impl World {
    /// An image of what the VM holds now.
    pub fn begin_image(&mut self, has_parent: bool, vmm: &Vmm) {
        let truth = |page: usize| (!vmm.is_given_back(page)).then_some(vmm.truth[page]);
        self.begun += 1;
        self.images.push(Image {
            entries: BTreeMap::new(),
            has_parent,
            truth: (0..self.pages()).map(truth).collect(),
            is_lost: false,
        });
    }

    /// Pages that the newest image has no entry for.
    pub fn is_frozen(&self, page: usize) -> bool {
        self.images.last().is_some_and(|image| !image.is_lost && !image.entries.contains_key(&page))
    }

    /// The newest image takes over what the page holds. `refers`: to the page's block, if that holds it.
    pub fn preserve(&mut self, page: usize, content: u64, refers: bool) {
        let entry = match self.blocks.of_page[page].filter(|block| self.blocks.blocks[*block].content == content) {
            _ if content == 0 => Entry::Zero,
            Some(block) if refers => Entry::Block(block),
            _ => Entry::Copy(content),
        };
        if let Entry::Block(block) = entry {
            self.blocks.blocks[block].entries += 1;
        }
        self.add_entry(page, entry);
    }

    /// The newest image refers to its parent for the page.
    pub fn inherit(&mut self, page: usize) {
        let [.., parent, image] = &self.images[..] else { panic!("page {page} is of no parent") };
        assert!(image.has_parent && !parent.is_lost && parent.entries.contains_key(&page), "the parent lacks {page}");
        self.inherited += 1;
        self.add_entry(page, Entry::Parent);
    }

    fn add_entry(&mut self, page: usize, entry: Entry) {
        let image = self.images.last_mut().expect("a frozen page has an image");
        let before = image.entries.insert(page, entry);
        assert!(before.is_none(), "page {page} is preserved twice in one image");
    }

    /// The newest image has another copy of a page that it has already.
    pub fn mistake_copy(&mut self, page: usize, content: u64) {
        let image = self.images.last_mut().filter(|image| !image.is_lost);
        if let Some(entry) = image.and_then(|image| image.entries.get_mut(&page)) {
            *entry = Entry::Copy(content);
        }
    }

    /// The oldest image is not wanted any more, or all of them.
    pub fn remove_images(&mut self, count: usize) {
        if let [parent, child, ..] = &mut self.images[..]
            && child.has_parent
            && count == 1
        {
            // The child takes over what it refers to.
            child.has_parent = parent.has_parent;
            for (page, entry) in child.entries.iter_mut().filter(|(_, entry)| matches!(entry, Entry::Parent)) {
                *entry = parent.entries[page];
                if let Entry::Block(block) = *entry {
                    self.blocks.blocks[block].entries += 1;
                }
            }
        }
        let removed: Vec<Image> = self.images.drain(..count).collect();
        for entry in removed.iter().flat_map(|image| image.entries.values()) {
            if let Entry::Block(block) = entry {
                self.blocks.blocks[*block].entries -= 1;
                self.blocks.free(*block);
            }
        }
    }

    /// From now on pages change unseen: images that lack some are lost.
    pub fn lose_images(&mut self) {
        for number in 0..self.images.len() {
            let has = |page: &usize| self.images[number..].iter().any(|image| image.entries.contains_key(page));
            let is_whole = (0..self.pages()).all(|page| has(&page));
            self.images[number].is_lost |= !is_whole;
        }
    }

    /// What an image has of a page, itself, by the next newer one that has it, or by the parent of that.
    fn entry_of(&self, number: usize, page: usize) -> Option<Entry> {
        let has = |number: &usize| self.images[*number].entries.contains_key(&page);
        let mut owner = (number..self.images.len()).find(has)?;
        while let Entry::Parent = self.images[owner].entries[&page] {
            owner -= 1;
        }
        Some(self.images[owner].entries[&page])
    }

    /// The oldest image may be removed: no other one is being filled that refers to it.
    pub fn may_remove_oldest(&self) -> bool {
        let is_filled = |image: &Image| image.entries.len() == self.pages();
        matches!(&self.images[..], [_, second, ..] if !second.has_parent || second.is_lost || is_filled(second))
    }

    /// What the newest image holds of a page; nothing if there is none, or it says nothing of the page.
    pub fn newest_truth(&self, page: usize) -> Option<u64> {
        self.images.last().filter(|image| !image.is_lost).and_then(|image| image.truth[page])
    }

    /// The newest image has all pages.
    pub fn is_newest_whole(&self) -> bool {
        self.images.last().is_some_and(|image| !image.is_lost && image.entries.len() == self.pages())
    }

    /// There is an image that a later one may have as its parent.
    pub fn has_newest(&self) -> bool {
        self.images.last().is_some_and(|image| !image.is_lost)
    }

    /// Every image holds what it held when it began.
    pub fn check_images(&self) {
        for (number, image) in self.images.iter().enumerate().filter(|(_, image)| !image.is_lost) {
            for (page, truth) in image.truth.iter().enumerate() {
                let Some(truth) = truth else { continue };
                let entry = self.entry_of(number, page);
                let content = match entry {
                    Some(Entry::Copy(content)) => Some(content),
                    Some(Entry::Block(block)) => Some(self.blocks.blocks[block].content),
                    Some(Entry::Zero) => Some(0),
                    Some(Entry::Parent) => None,
                    None => Some(self.recoverable(page)),
                };
                assert_eq!(content, Some(*truth), "page {page} of image {number}, by {entry:?}");
            }
        }
    }
}

/// What a user does with images.
#[derive(Clone, Copy, Debug)]
pub enum ImageRequest {
    Prepare {
        on: bool,
    },
    Begin,
    /// No later image is to have the newest one as its parent.
    Forget,
    RemoveOldest,
    RemoveAll,
}

/// Most images of a VM.
const IMAGES_MAX: usize = 3;

pub fn any_request(world: &World, rng: &mut Rng) -> ImageRequest {
    match world.images.len() {
        _ if rng.per_mille(300) => ImageRequest::Prepare { on: rng.coin() },
        _ if rng.per_mille(30) => ImageRequest::Forget,
        0 => ImageRequest::Begin,
        1 if rng.per_mille(200) => ImageRequest::RemoveAll,
        IMAGES_MAX => ImageRequest::RemoveOldest,
        _ => *rng.pick(&[ImageRequest::Begin, ImageRequest::Begin, ImageRequest::RemoveOldest]),
    }
}
