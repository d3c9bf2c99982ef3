//! The stack against a naive reference: three tiers, random page-outs that succeed, fail or die with the daemon. In some runs
//! the second has all pages to begin with and takes none, as that of an image.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use pagoda_core::bits::Run;
use pagoda_core::fault::Pages;
use pagoda_core::units::ChunkCount;
use proptest::prelude::*;

use super::super::Counts;
use super::super::source::{ArrivalFiles, Arrivals, SourceTier};
use super::*;

/// Blocks of a tier, which outlive it: what each page held when it was written.
type Blocks = Arc<Mutex<BTreeMap<u64, u32>>>;

/// Errors are injected by a count of calls that still succeed.
#[derive(Debug)]
struct Fake {
    blocks: Blocks,
    is_last: bool,
    calls_left: Arc<Mutex<Option<u32>>>,
}

impl Fake {
    fn call(&self) -> Result<(), Errno> {
        match &mut *self.calls_left.lock().unwrap() {
            None => Ok(()),
            Some(0) => Err(Errno::IO),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }

    fn forget(&self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        self.call()?;
        let mut blocks = self.blocks.lock().unwrap();
        for index in pages.iter() {
            blocks.remove(&chunk.page(index).0);
        }
        Ok(())
    }
}

impl Tier for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn holds(&self, chunk: ChunkIdx) -> PageSet {
        if self.is_last {
            return PageSet::EMPTY;
        }
        let blocks = self.blocks.lock().unwrap();
        (0..=u8::MAX).filter(|index| blocks.contains_key(&chunk.page(*index).0)).collect()
    }

    fn takes(&self, _: bool) -> Takes {
        Takes::No
    }

    fn read(&mut self, _: &mut Io<'_>, _: &Read) -> Begun {
        unreachable!("the model reads the blocks")
    }

    fn write(&mut self, _: &mut Io<'_>, _: &Write) -> Begun {
        unreachable!("the model writes the blocks")
    }

    fn settle(&mut self, chunk: ChunkIdx, _: PageSet, lost: PageSet) -> Result<(), Errno> {
        self.forget(chunk, lost)
    }

    fn drop_pages(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        self.forget(chunk, pages)
    }

    fn clear(&mut self) -> Result<(), Errno> {
        self.call()?;
        self.blocks.lock().unwrap().clear();
        Ok(())
    }

    fn read_now(&mut self, page: PageIdx, out: &mut Content) -> Result<(), Errno> {
        let content = self.blocks.lock().unwrap().get(&page.0).copied();
        out.fill(0);
        match content {
            Some(content) => out[..4].copy_from_slice(&content.to_le_bytes()),
            // Holes of the swap file are zeros; any other tier must have been asked for what it has.
            None if self.is_last => {}
            None => return Err(Errno::NOENT),
        }
        Ok(())
    }

    /// Names each page twice, as a file system does whose blocks are smaller than a page.
    fn recover(&mut self, found: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
        for page in self.blocks.lock().unwrap().keys().copied().map(PageIdx) {
            (0..2).for_each(|_| found(page.chunk(), PageSet::single(page.index_in_chunk())));
        }
        Ok(())
    }

    fn counts(&self) -> Counts {
        Counts::default()
    }
}

const TIERS: usize = 3;
const PAGES: u8 = 6;
const CHUNK: ChunkIdx = ChunkIdx(1);

/// What a page-out does with one page.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// This tier has it in the end; those in `tried` wrote it and declined afterwards.
    Written(usize),
    /// Nothing was done with it before the page-out failed or died.
    Untouched,
}

#[derive(Clone, Debug)]
enum Step {
    /// The pages that the guest has changed leave: succeeds, or fails after some writes.
    Out { pages: Vec<(u8, Fate)>, succeeds: bool },
    /// The daemon dies so many calls into the end of a page-out.
    OutAndDie { pages: Vec<(u8, Fate)>, calls: u32 },
    /// These pages become zero.
    Drop { page: u8 },
    /// The daemon is replaced.
    Restart,
    /// A page comes from the VM's source, perhaps for the second time.
    Come { page: u8 },
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![4 => (0..TIERS).prop_map(Fate::Written), 1 => Just(Fate::Untouched)]
}

fn step() -> impl Strategy<Value = Step> {
    let pages =
        || prop::collection::btree_map(0..PAGES, fate(), 1..=PAGES as usize).prop_map(|map| map.into_iter().collect());
    prop_oneof![
        6 => (pages(), prop::bool::weighted(0.8)).prop_map(|(pages, succeeds)| Step::Out { pages, succeeds }),
        2 => (pages(), 0..5_u32).prop_map(|(pages, calls)| Step::OutAndDie { pages, calls }),
        2 => (0..PAGES).prop_map(|page| Step::Drop { page }),
        1 => Just(Step::Restart),
        2 => (0..PAGES).prop_map(|page| Step::Come { page }),
    ]
}

/// The engine and the machine, as far as blocks concern them.
struct World {
    blocks: [Blocks; TIERS],
    calls_left: Arc<Mutex<Option<u32>>>,
    stack: Stack,
    /// Pages with a block, as the machine knows them.
    has_block: PageSet,
    /// What is only in a block; `None`: DRAM has the page, or it is zero.
    truth: [Option<u32>; PAGES as usize],
    version: u32,
    /// The second tier is an image, or that of a VM's source.
    has_image: bool,
    source: Option<Source>,
}

/// Where the second tier of a VM has its pages that moved here before they came.
struct Source {
    arrivals: Arc<Arrivals>,
    dir: Dir,
}

struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Source {
    fn new() -> Source {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // On a disk, for direct I/O.
        let dir = Dir(PathBuf::from(format!("/var/tmp/pagoda-stack-{}-{number}", std::process::id())));
        let _ = std::fs::remove_dir_all(&dir.0);
        std::fs::create_dir_all(&dir.0).unwrap();
        Source { arrivals: Arrivals::create(Source::files(&dir), ChunkCount(2)).unwrap(), dir }
    }

    fn files(dir: &Dir) -> ArrivalFiles {
        ArrivalFiles::beside(&dir.0.join("vm.swap"))
    }

    /// Another daemon goes by what the files say.
    fn reopen(self) -> Source {
        let Source { arrivals, dir } = self;
        drop(arrivals);
        Source { arrivals: Arrivals::open(Source::files(&dir), ChunkCount(2)).unwrap(), dir }
    }

    fn put(&self, index: u8) {
        let mut content = [7; pagoda_core::units::PAGE_SIZE as usize];
        content[..4].copy_from_slice(&(IN_IMAGE + u32::from(index)).to_le_bytes());
        self.arrivals.put(Pages { chunk: CHUNK, run: Run { start: index, len: 1 } }, &content).unwrap();
    }
}

/// What the page holds in an image.
const IN_IMAGE: u32 = 1 << 20;

impl World {
    fn new() -> World {
        let (blocks, calls_left) = (std::array::from_fn(|_| Blocks::default()), Arc::new(Mutex::new(None)));
        let stack = World::stack(&blocks, &calls_left);
        let (has_block, truth) = (PageSet::EMPTY, [None; PAGES as usize]);
        World { blocks, calls_left, stack, has_block, truth, version: 0, has_image: false, source: None }
    }

    /// All pages are at the VM's source.
    fn with_source() -> World {
        let mut world = World::new();
        let source = Source::new();
        world.stack.levels[1].tier = Box::new(SourceTier::new(Arc::clone(&source.arrivals)));
        let all = PageSet::range(0, PAGES.into());
        world.stack.expect(&[PageSet::EMPTY, all]).unwrap();
        assert_eq!(world.stack.missing(CHUNK), all);
        world.truth = std::array::from_fn(|index| Some(IN_IMAGE + index as u32));
        (world.has_image, world.has_block, world.source) = (true, all, Some(source));
        world
    }

    fn with_image() -> World {
        let mut world = World::new();
        for index in 0..PAGES {
            let content = IN_IMAGE + u32::from(index);
            world.blocks[1].lock().unwrap().insert(CHUNK.page(index).0, content);
            world.truth[usize::from(index)] = Some(content);
        }
        world.has_image = true;
        world.restart();
        world
    }

    fn stack(blocks: &[Blocks; TIERS], calls_left: &Arc<Mutex<Option<u32>>>) -> Stack {
        let fake = |(index, blocks): (usize, &Blocks)| Level {
            tier: Box::new(Fake {
                blocks: Arc::clone(blocks),
                is_last: index + 1 == TIERS,
                calls_left: Arc::clone(calls_left),
            }),
            reads: Histogram::default(),
            writes: Histogram::default(),
        };
        let levels = blocks.iter().enumerate().map(fake).collect();
        Stack { frames: None, levels, swap_path: PathBuf::new() }
    }

    /// Writes blocks as page-out does. The first tier keeps what it is given only when it says so at the end, as the remote
    /// one; the others overwrite at once.
    fn write(&mut self, pages: &[(u8, Fate)]) -> (ByTier, ByTier, ByTier) {
        let before = self.stack.owners(CHUNK, self.has_block);
        let (mut written, mut overwritten) = (ByTier::default(), ByTier::default());
        self.version += 1;
        for (index, fate) in pages {
            let Fate::Written(tier) = *fate else { continue };
            match tier {
                0 => written[0].set(*index),
                tier => {
                    // An image declines, and the next is asked.
                    let tier = if self.has_image { TIERS - 1 } else { tier };
                    self.blocks[tier].lock().unwrap().insert(CHUNK.page(*index).0, self.version);
                    overwritten[tier].set(*index);
                }
            }
        }
        (before, written, overwritten)
    }

    fn settle(
        &mut self,
        before: &ByTier,
        written: &ByTier,
        overwritten: &ByTier,
        succeeded: bool,
    ) -> Result<(), Errno> {
        let held: ByTier =
            std::array::from_fn(|tier| if succeeded { written[tier] | overwritten[tier] } else { overwritten[tier] });
        if succeeded {
            for index in written[0].iter() {
                self.blocks[0].lock().unwrap().insert(CHUNK.page(index).0, self.version);
            }
        }
        self.stack.settle(CHUNK, before, &held)
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Out { pages, succeeds } => {
                let set: PageSet = pages.iter().map(|(index, _)| *index).collect();
                let complete = pages.iter().all(|(_, fate)| matches!(fate, Fate::Written(_)));
                let succeeded = *succeeds && complete;
                let (before, written, overwritten) = self.write(pages);
                self.settle(&before, &written, &overwritten, succeeded).unwrap();
                // As the machine does: of a failed page-out the blocks may be anything.
                self.has_block |= set;
                for index in set.iter() {
                    self.truth[usize::from(index)] = succeeded.then_some(self.version);
                }
            }
            Step::OutAndDie { pages, calls } => {
                let (before, written, overwritten) = self.write(pages);
                *self.calls_left.lock().unwrap() = Some(*calls);
                let _ = self.settle(&before, &written, &overwritten, true);
                *self.calls_left.lock().unwrap() = None;
                // DRAM still has the pages that were on their way.
                pages.iter().for_each(|(index, _)| self.truth[usize::from(*index)] = None);
                self.restart();
            }
            Step::Drop { page } => {
                self.stack.drop_blocks(CHUNK, PageSet::single(*page) & self.has_block).unwrap();
                self.has_block.clear(*page);
                self.truth[usize::from(*page)] = None;
            }
            Step::Restart => self.restart(),
            Step::Come { page } => {
                if let Some(source) = &self.source {
                    source.put(*page);
                }
            }
        }
    }

    fn restart(&mut self) {
        self.stack = World::stack(&self.blocks, &self.calls_left);
        if let Some(source) = self.source.take().map(Source::reopen) {
            self.stack.levels[1].tier = Box::new(SourceTier::new(Arc::clone(&source.arrivals)));
            self.source = Some(source);
        }
        // What no block has alone may be in DRAM.
        let in_dram: PageSet = (0..PAGES).filter(|index| self.truth[usize::from(*index)].is_none()).collect();
        let found = self.stack.recover(&[PageSet::EMPTY, in_dram]).unwrap();
        assert!(found[0].is_empty());
        let expected: PageSet = (0..PAGES).filter(|index| self.truth[usize::from(*index)].is_some()).collect();
        assert!(found[1].contains_all(expected), "a page is lost");
        self.has_block = found[1];
    }

    fn check(&mut self) {
        for index in 0..PAGES {
            let page = CHUNK.page(index);
            let holders = self.blocks.iter().filter(|blocks| blocks.lock().unwrap().contains_key(&page.0)).count();
            let holders =
                holders + usize::from(self.source.is_some() && self.stack.levels[1].tier.holds(CHUNK).contains(index));
            assert!(holders <= 1, "page {index} has {holders} blocks");
            assert!(
                holders == 0 || self.has_block.contains(index),
                "page {index} has a block that the machine does not know"
            );
            let of_image = self.blocks[1].lock().unwrap().get(&page.0).copied();
            assert!(!self.has_image || of_image.is_none_or(|content| content == IN_IMAGE + u32::from(index)));
            let is_missing = self.stack.missing(CHUNK).contains(index);
            if let Some(content) = self.truth[usize::from(index)].filter(|_| !is_missing) {
                let mut out = [0; pagoda_core::units::PAGE_SIZE as usize];
                self.stack.read_now(page, &mut out).unwrap();
                assert_eq!(out[..4], content.to_le_bytes(), "page {index} is wrong");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_page_has_one_block_and_that_is_the_last_written(steps in prop::collection::vec(step(), 1..20)) {
        let mut world = World::new();
        for step in &steps {
            world.apply(step);
            world.check();
        }
    }

    #[test]
    fn what_left_an_image_does_not_come_back_from_it(steps in prop::collection::vec(step(), 1..20)) {
        let mut world = World::with_image();
        let mut in_image = PAGES as usize;
        for step in &steps {
            world.apply(step);
            world.check();
            let now = world.blocks[1].lock().unwrap().len();
            prop_assert!(now <= in_image);
            in_image = now;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_left_the_source_does_not_come_back_from_it(steps in prop::collection::vec(step(), 1..20)) {
        let mut world = World::with_source();
        for step in &steps {
            let held = world.stack.levels[1].tier.holds(CHUNK);
            world.apply(step);
            world.check();
            prop_assert!(held.contains_all(world.stack.levels[1].tier.holds(CHUNK)));
        }
        // All that is still missing comes, and nothing is lost.
        if let Some(source) = &world.source {
            (0..PAGES).for_each(|page| source.put(page));
            assert!(source.arrivals.is_whole());
        }
        world.check();
        world.restart();
        world.check();
    }
}

#[test]
fn a_stack_without_a_source_lacks_nothing() {
    let mut world = World::new();
    assert_eq!(world.stack.expect(&[PageSet::EMPTY; 2]), Ok(()));
    assert_eq!(world.stack.expect(&[PageSet::EMPTY, PageSet::single(1)]), Err(Errno::NOENT));
}

#[test]
fn of_two_blocks_none_goes_unless_dram_has_the_page() {
    let mut world = World::new();
    for tier in [1, 2] {
        world.blocks[tier].lock().unwrap().insert(CHUNK.page(3).0, tier as u32);
    }
    let unknown = world.stack.recover(&[PageSet::EMPTY; 2]).unwrap_err();
    assert!(matches!(unknown, BlocksError::TwoBlocks { page, .. } if page == CHUNK.page(3)), "{unknown}");
    let holders = |world: &World| world.blocks.iter().filter(|blocks| !blocks.lock().unwrap().is_empty()).count();
    assert_eq!(holders(&world), 2, "a block was dropped on doubt");
    world.stack.recover(&[PageSet::EMPTY, PageSet::single(3)]).unwrap();
    assert_eq!(holders(&world), 1);
}

#[test]
fn the_first_tier_that_does_not_refuse_is_offered_pages() {
    #[derive(Debug)]
    struct Says(Takes);
    impl Tier for Says {
        fn name(&self) -> &'static str {
            "says"
        }
        fn holds(&self, _: ChunkIdx) -> PageSet {
            PageSet::EMPTY
        }
        fn takes(&self, _: bool) -> Takes {
            self.0
        }
        fn read(&mut self, _: &mut Io<'_>, _: &Read) -> Begun {
            unreachable!()
        }
        fn write(&mut self, _: &mut Io<'_>, _: &Write) -> Begun {
            unreachable!()
        }
        fn settle(&mut self, _: ChunkIdx, _: PageSet, _: PageSet) -> Result<(), Errno> {
            Ok(())
        }
        fn drop_pages(&mut self, _: ChunkIdx, _: PageSet) -> Result<(), Errno> {
            Ok(())
        }
        fn clear(&mut self) -> Result<(), Errno> {
            Ok(())
        }
        fn read_now(&mut self, _: PageIdx, _: &mut Content) -> Result<(), Errno> {
            Ok(())
        }
        fn recover(&mut self, _: &mut dyn FnMut(ChunkIdx, PageSet)) -> Result<(), Errno> {
            Ok(())
        }
        fn counts(&self) -> Counts {
            Counts::default()
        }
    }
    let now = Takes::Now(crate::tier::Step { runs: 1, pages: 1 });
    let offer = |takes: [Takes; 3], from: u8| {
        let level =
            |takes| Level { tier: Box::new(Says(takes)), reads: Histogram::default(), writes: Histogram::default() };
        let stack = Stack { frames: None, levels: takes.map(level).into(), swap_path: PathBuf::new() };
        stack.offer(TierIdx(from), false)
    };
    assert_eq!(offer([now, now, now], 0), (TierIdx(0), now));
    assert_eq!(offer([Takes::No, Takes::Later, now], 0), (TierIdx(1), Takes::Later));
    assert_eq!(offer([Takes::No, Takes::No, Takes::Later], 0), (TierIdx(2), Takes::Later));
    assert_eq!(offer([now, Takes::No, now], 1), (TierIdx(2), now));
    assert_eq!(offer([now, now, now], 2), (TierIdx(2), now));
}
