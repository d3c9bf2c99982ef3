//! One VM in a share group: its table, which names the frame of every shared page.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pagoda_abi::Token;
use pagoda_core::bits::PageSet;
use pagoda_core::units::{CHUNK_PAGES, ChunkIdx, PAGE_SIZE, PageIdx};
use pagoda_sys::Errno;
use pagoda_sys::ram::{RamError, RamFile, WordTable};

use super::frames::{Content, Frames};
use super::group::{Group, Hint, Look};

/// Dead frames that wait until they are freed together: the index is locked for it.
const DEAD_MAX: usize = 64;

/// Bytes of the table of a VM of this size: 4 a page, in whole pages.
fn table_len(vm_bytes: u64) -> u64 {
    (vm_bytes / PAGE_SIZE * 4).next_multiple_of(PAGE_SIZE)
}

/// Makes the table of a new VM.
///
/// # Errors
/// EMFILE, ENOMEM.
pub fn create(name: &str, vm_bytes: u64) -> Result<RamFile, RamError> {
    RamFile::create(&format!("{name}.shared"), table_len(vm_bytes), pagoda_sys::process::own_uid())
}

/// The table that a VMM kept.
///
/// # Errors
/// What was handed over is something else.
pub fn reopen(kept: BorrowedFd<'_>, vm_bytes: u64, inode: (u64, u64)) -> Result<RamFile, RamError> {
    let file = RamFile::reopen(kept, table_len(vm_bytes))?;
    if file.inode() != inode {
        return Err(RamError::NotRam { what: "not the table of this VM".to_owned() });
    }
    Ok(file)
}

/// What a VMM keeps for its VM: the table, then the pool.
///
/// # Errors
/// EMFILE.
pub fn keepsakes(table: &RamFile, frames: &Frames) -> Result<[OwnedFd; 2], Errno> {
    Ok([table.keepsake()?, frames.keepsake()?])
}

/// How much of the group's frames is a VM's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// A frame of n references counts 1/n for each, in whole pages, rounded up.
    pub pages: u64,
    /// Pages whose frame nobody else refers to.
    pub sole: u64,
}

/// A VM in its group; its engine owns it.
#[derive(Debug)]
pub struct Member {
    group: Arc<Group>,
    table: WordTable,
    token: Token,
    number: u32,
    dead: Vec<u32>,
    /// The group's counts have this VM's references in them.
    counted: bool,
}

impl Member {
    /// The VM with this table joins, as the number that [`Group::join`] gave it. The group has its pool. `is_new`: nothing
    /// of it can be shared yet; else [`Member::count_references`] follows.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn new(group: Arc<Group>, table: RamFile, token: Token, number: u32, is_new: bool) -> Result<Member, RamError> {
        let dead = Vec::with_capacity(DEAD_MAX);
        Ok(Member { group, table: WordTable::map(table)?, token, number, dead, counted: is_new })
    }

    /// The share group that the VM is in.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The VM's number in it.
    pub fn number(&self) -> u32 {
        self.number
    }

    fn frames(&self) -> &Frames {
        self.group.frames().expect("a member's group has its pool")
    }

    /// The frame that the page's entry names, if it names a valid one.
    pub fn frame_of(&self, page: PageIdx) -> Option<u32> {
        Some(self.table[page.0 as usize].load(Ordering::SeqCst))
            .filter(|frame| (1..self.frames().max()).contains(frame))
    }

    /// Looks at a page of this VM; see [`Group::look`].
    pub fn look(&self, content: &Content, page: PageIdx, is_worth: impl FnOnce(Hint) -> bool) -> Look {
        self.group.look(content, Hint { member: self.number, page }, is_worth)
    }

    /// Writes the entry of a page; the caller has a reference for it.
    pub fn enter(&self, page: PageIdx, frame: u32) {
        // The frame's content was stored before: whoever finds the entry after a crash finds that too.
        self.table[page.0 as usize].store(frame, Ordering::SeqCst);
    }

    /// Reads what a shared page holds. False: it is not shared.
    pub fn read(&self, page: PageIdx, out: &mut Content) -> bool {
        self.frame_of(page).is_some_and(|frame| {
            self.frames().read(frame, out);
            true
        })
    }

    /// Clears the entry of a page, then drops its reference. The other way round a frame could be used anew while the
    /// entry still names it.
    pub fn clear(&mut self, page: PageIdx) {
        let frame = self.table[page.0 as usize].swap(0, Ordering::SeqCst);
        if (1..self.frames().max()).contains(&frame) && self.frames().drop_reference(frame) {
            self.dead.push(frame);
        }
    }

    /// Frees frames whose last reference this VM dropped. Not on the path of a fault: it takes the index's lock.
    pub fn bury_dead(&mut self) {
        if !self.dead.is_empty() && self.group.is_settled() {
            self.group.bury(&self.dead);
            self.dead.clear();
        }
    }

    /// So many wait to be freed that it should be done.
    pub fn has_many_dead(&self) -> bool {
        self.dead.len() >= DEAD_MAX
    }

    /// The pages with an entry, of the chunks that have any.
    ///
    /// # Errors
    /// EBADMSG when an entry names a frame that no pool has; the error of lseek(2).
    pub fn entries(&self) -> Result<Vec<(ChunkIdx, PageSet)>, Errno> {
        let mut found: Vec<(ChunkIdx, PageSet)> = Vec::new();
        for run in self.table.file().data_runs() {
            let run = run?;
            let (first, last) = (run.start as usize / 4, (run.end as usize / 4).min(self.table.len()));
            for (page, entry) in self.table.iter().enumerate().take(last).skip(first) {
                let frame = entry.load(Ordering::SeqCst);
                if frame >= self.frames().max() {
                    return Err(Errno::BADMSG);
                }
                if frame != 0 {
                    let (chunk, index) = (page / CHUNK_PAGES as usize, page % CHUNK_PAGES as usize);
                    let chunk = ChunkIdx(chunk as u32);
                    if found.last().is_none_or(|(last, _)| *last != chunk) {
                        found.push((chunk, PageSet::EMPTY));
                    }
                    if let Some((_, pages)) = found.last_mut() {
                        pages.set(index as u8);
                    }
                }
            }
        }
        Ok(found)
    }

    /// Clears entries whose page the RAM file has: what was not counted yet needs no reference dropped.
    pub fn forget(&self, chunk: ChunkIdx, pages: PageSet) {
        pages.iter().for_each(|index| self.table[chunk.page(index).0 as usize].store(0, Ordering::SeqCst));
    }

    /// Counts the references of a VM that came back: its table says what they are.
    ///
    /// # Errors
    /// As [`Member::entries`].
    pub fn count_references(&mut self) -> Result<(), Errno> {
        if !self.counted {
            self.each_frame(|frame| self.frames().add(frame))?;
            self.counted = true;
        }
        self.group.account_for(self.token);
        Ok(())
    }

    fn each_frame(&self, mut work: impl FnMut(u32)) -> Result<(), Errno> {
        for (chunk, pages) in self.entries()? {
            pages.iter().filter_map(|index| self.frame_of(chunk.page(index))).for_each(&mut work);
        }
        Ok(())
    }

    /// The VM's part of the frames, and the first `max` pages that have one for themselves.
    ///
    /// # Errors
    /// As [`Member::entries`].
    pub fn part(&self, max: usize) -> Result<(Part, Vec<PageIdx>), Errno> {
        let (mut parts, mut sole, mut pages) = (0.0, 0, Vec::new());
        for (chunk, set) in self.entries()? {
            for index in set.iter() {
                let page = chunk.page(index);
                let Some(frame) = self.frame_of(page) else { continue };
                let count = self.frames().count(frame).max(1);
                parts += 1.0 / f64::from(count);
                if count == 1 {
                    sole += 1;
                    if pages.len() < max {
                        pages.push(page);
                    }
                }
            }
        }
        Ok((Part { pages: f64::ceil(parts - 1e-6) as u64, sole }, pages))
    }

    /// Gives the table's memory back; no page is shared.
    pub fn trim(&self) {
        if let Err(error) = self.table.file().punch(0, self.table.file().len()) {
            tracing::debug!("give the table's memory back: {error}");
        }
    }

    /// The engine ends. `gone`: and so did the VM, so its references end with it; else it will be back.
    pub fn leave(mut self, gone: bool) {
        self.group.leave(self.number);
        if !gone {
            // Before its references go: nobody may free a frame from now on.
            self.group.expect(self.token);
        }
        if !self.counted {
            // Its references were not dropped, for nobody has counted them.
            return if gone {
                self.group.account_for(self.token)
            };
        }
        let mut dead = Vec::new();
        let dropped = self.each_frame(|frame| {
            if self.frames().drop_reference(frame) {
                dead.push(frame);
            }
        });
        if let Err(error) = dropped {
            // Counts stay too high: frames are kept that nobody needs, which harms nobody.
            tracing::warn!(group = %self.group.name(), "let go of shared pages: {error}");
        }
        if gone {
            self.group.bury(&dead);
            self.bury_dead();
        }
    }
}
