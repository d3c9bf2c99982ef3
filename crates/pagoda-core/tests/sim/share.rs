//! The share group: frames, the entries that name them, and how pages become shared and their own again, step by step
//! with a chance to die between any two.

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Event, Found, OpId, Sharing};
use pagoda_core::units::{ChunkIdx, PageCount, PageIdx};

use crate::pager::{Crash, Pager, set};
use crate::rng::Rng;
use crate::vmm::SAME_CONTENTS;
use crate::world::{CHUNK, GARBAGE, World};

/// A look at pages of a chunk that goes on.
#[derive(Debug)]
pub struct Looking {
    op: OpId,
    chunk: ChunkIdx,
    rest: PageSet,
    found: Found,
}

/// Entries of other VMs at most.
const OTHERS_MAX: usize = 50;

impl World {
    /// References to each frame, as a daemon that starts now counts them.
    pub fn count_references(&self) -> Vec<usize> {
        let mut refs = vec![0; self.frames.len()];
        for (page, entry) in self.entries.iter().enumerate() {
            if let Some(frame) = entry
                && self.ram_loses(page)
            {
                refs[*frame] += 1;
            }
        }
        self.others.iter().for_each(|frame| refs[*frame] += 1);
        refs
    }

    /// An entry counts unless the RAM file has the page and no intent says otherwise.
    fn ram_loses(&self, page: usize) -> bool {
        self.ram[page].is_none() || self.intents.iter().any(|(_, pages)| pages.contains(&page))
    }

    /// What a new daemon does when all VMs of the group are back.
    pub fn free_frames(&mut self) {
        let refs = self.count_references();
        self.frames.iter_mut().zip(refs).filter(|(_, refs)| *refs == 0).for_each(|(frame, _)| *frame = None);
    }

    /// What a new daemon does with a page that an intent names.
    pub fn settle(&mut self, page: usize, unsplittable: bool) {
        if unsplittable && self.ram[page].is_some() {
            self.punch_in_place(page);
            let content = self.shared_content(page).unwrap_or_else(|| self.swapped_content(page));
            self.ram[page] = Some(Rc::new(Cell::new(content)));
        } else {
            self.punch(page);
        }
    }
}

impl Pager {
    /// A look at what is cold, another count of the VM's part, or something that another VM of the group does.
    pub fn any_share_event(&mut self, world: &mut World, rng: &mut Rng) -> Option<Event> {
        match rng.below(8) {
            0 => Some(Event::LookAgain { page: PageIdx(rng.below(world.pages()) as u64) }),
            1 => {
                let part = world.entries.iter().flatten().filter(|frame| self.refs[**frame] == 1).count();
                Some(Event::Charge { pages: PageCount(part as u64) })
            }
            2 => {
                let sole = |page: &usize| world.entries[*page].is_some_and(|frame| self.refs[frame] == 1);
                let page = (0..world.pages()).find(sole).filter(|_| self.machine.is_overcharged())?;
                Some(Event::TakeBack { page: PageIdx(page as u64) })
            }
            3 => {
                self.other_vm(world, rng);
                None
            }
            _ => self.machine.has_pages_to_scan(self.now_ms).then_some(Event::Scan),
        }
    }

    /// Another VM shares a frame, makes one, or lets one go.
    fn other_vm(&mut self, world: &mut World, rng: &mut Rng) {
        if self.weather.sharing == Sharing::Off {
            return;
        }
        if world.others.len() < OTHERS_MAX && rng.coin() {
            let content = rng.within(1, 4) as u64;
            let frame = self.equal_frame(content, world);
            let frame = frame.unwrap_or_else(|| self.make_frame(content, world, rng));
            self.refs[frame] += 1;
            world.others.push(frame);
        } else if !world.others.is_empty() {
            let frame = world.others.swap_remove(rng.below(world.others.len()));
            self.drop_reference(frame, world);
        }
    }

    fn equal_frame(&self, content: u64, world: &World) -> Option<usize> {
        // Only few contents come twice: the others need not be looked for.
        let often = content < SAME_CONTENTS as u64;
        often.then(|| world.frames.iter().position(|frame| *frame == Some(content))).flatten()
    }

    /// An unused frame, most often one that was used before.
    fn make_frame(&mut self, content: u64, world: &mut World, rng: &mut Rng) -> usize {
        let unused: Vec<usize> = (0..world.frames.len()).filter(|frame| self.refs[*frame] == 0).collect();
        let frame = if unused.is_empty() || rng.per_mille(100) {
            world.frames.push(None);
            self.refs.push(0);
            world.frames.len() - 1
        } else {
            *rng.pick(&unused)
        };
        world.frames[frame] = Some(content);
        frame
    }

    fn drop_reference(&mut self, frame: usize, world: &mut World) {
        self.refs[frame] -= 1;
        if self.refs[frame] == 0 {
            world.frames[frame] = None;
        }
    }

    /// First the entry, then the reference.
    pub fn drop_entry(&mut self, page: usize, world: &mut World) {
        let frame = world.entries[page].take().expect("the page is shared");
        self.drop_reference(frame, world);
    }

    pub fn copy_back(&mut self, pages: Range<usize>, world: &mut World, rng: &mut Rng) -> Result<(), Crash> {
        for page in pages.clone() {
            let content = world.shared_content(page).expect("the page is shared");
            world.put(page, content);
            world.map(page, false);
            self.may_die(rng)?;
            self.drop_entry(page, world);
        }
        world.woken.push(pages);
        Ok(())
    }

    /// Looks at pages at once, or in pieces with other events in between.
    pub fn share(
        &mut self,
        op: OpId,
        chunk: ChunkIdx,
        pages: PageSet,
        world: &mut World,
        rng: &mut Rng,
    ) -> Result<(), Crash> {
        assert!(world.registered, "nobody would bring back what an unarmed VM shares");
        let mut looking = Looking { op, chunk, rest: pages, found: Found::default() };
        if rng.coin() {
            self.looks.push_back(looking);
            return Ok(());
        }
        self.look(&mut looking, pages, world, rng)?;
        let ended = self.take_out(looking, world, rng)?;
        self.share_ended(ended);
        Ok(())
    }

    /// Goes on with a look; its end is an event.
    pub fn look_on(&mut self, world: &mut World, rng: &mut Rng) -> Result<Option<Event>, Crash> {
        let Some(mut looking) = self.looks.pop_front() else { return Ok(None) };
        let count = rng.within(1, usize::from(looking.rest.count()));
        let pages: PageSet = looking.rest.iter().take(count).collect();
        self.look(&mut looking, pages, world, rng)?;
        if looking.rest.is_empty() {
            return self.take_out(looking, world, rng).map(Some);
        }
        self.looks.push_front(looking);
        Ok(None)
    }

    /// Pages that have an entry and have not left yet.
    pub fn entered(&self) -> Vec<usize> {
        self.looks.iter().flat_map(|looking| set(looking.found.shared, looking.chunk)).collect()
    }

    /// Writes entries of pages that have an equal frame, or get one.
    fn look(&mut self, looking: &mut Looking, pages: PageSet, world: &mut World, rng: &mut Rng) -> Result<(), Crash> {
        let first = looking.chunk.0 as usize * CHUNK;
        let found = &mut looking.found;
        looking.rest -= pages;
        for index in pages.iter() {
            let page = first + usize::from(index);
            let content = world.ram[page].as_ref().expect("a page that is looked at is in RAM").get();
            assert_ne!(content, GARBAGE);
            assert_eq!(world.entries[page], None, "page {page} is in RAM and shared");
            if content == 0 {
                world.blocks.drop_page(page, self.weather.mistake);
                found.zero.set(index);
            } else if let Some(frame) = self.equal_frame(content, world) {
                self.refs[frame] += 1;
                world.entries[page] = Some(frame);
                found.shared.set(index);
            } else if rng.per_mille(self.weather.promotes) {
                let frame = self.make_frame(content, world, rng);
                self.refs[frame] += 1;
                world.entries[page] = Some(frame);
                found.shared.set(index);
                found.frames += 1;
            }
            self.may_die(rng)?;
        }
        Ok(())
    }

    /// What was found leaves the RAM file.
    fn take_out(&mut self, looking: Looking, world: &mut World, rng: &mut Rng) -> Result<Event, Crash> {
        let Looking { op, chunk, mut found, .. } = looking;
        let first = chunk.0 as usize * CHUNK;
        assert!(world.registered, "it was disarmed while pages were on their way");
        for index in (found.shared | found.zero).iter() {
            let page = first + usize::from(index);
            let content = world.ram[page].as_ref().expect("a page on its way is in RAM").get();
            assert_eq!(content, world.shared_content(page).unwrap_or(0), "page {page} changed on its way");
        }
        let gone = found.shared | found.zero;
        world.intents.push((op.0, gone.iter().map(|index| first + usize::from(index)).collect()));
        let mut left = PageSet::EMPTY;
        for index in gone.iter() {
            let page = first + usize::from(index);
            match rng.per_mille(self.weather.unsplittable) {
                true => {
                    world.punch_in_place(page);
                    left.set(index);
                }
                false => world.punch(page),
            }
            self.may_die(rng)?;
        }
        for index in left.iter() {
            let page = first + usize::from(index);
            let content = world.shared_content(page).unwrap_or(0);
            world.ram[page].as_ref().expect("was zeroed in place").set(content);
            self.may_die(rng)?;
        }
        world.intents.retain(|(owner, _)| *owner != op.0);
        for index in (left & found.shared).iter() {
            self.may_die(rng)?;
            self.drop_entry(first + usize::from(index), world);
        }
        found.zero_left = found.zero & left;
        found.zero -= left;
        found.shared -= left;
        Ok(Event::ShareDone { op, found })
    }

    pub fn may_die(&self, rng: &mut Rng) -> Result<(), Crash> {
        // There are hundreds of such moments in one action.
        if rng.per_mille(self.weather.crash) && rng.per_mille(20) { Err(Crash) } else { Ok(()) }
    }
}
