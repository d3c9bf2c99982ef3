//! The frames of a share group and how many entries name each.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use pagoda_core::units::PAGE_SIZE;
use pagoda_sys::Errno;
use pagoda_sys::ram::{LargeFolios, RamError, RamFile, RamView};

/// Frames of a pool: 64 GiB, more than the equal pages of any host this runs on. The file is sparse; address space is all
/// that it costs in advance.
pub const FRAMES_MAX: u32 = 1 << 24;
/// Counts are made in blocks of so many, as frames come to be used.
const BLOCK: u32 = 1 << 16;
/// References to a frame from which on it is not found any more: far from where the count would overflow.
const REFS_MAX: u32 = 1 << 30;

/// Content of a page.
pub type Content = [u8; PAGE_SIZE as usize];

/// A pool and its counts. See [`super`].
#[derive(Debug)]
pub struct Frames {
    max: u32,
    file: RamFile,
    view: RamView,
    counts: Vec<OnceLock<Box<[AtomicU32]>>>,
}

impl Frames {
    /// A new pool, empty, of at most `max` frames, frame 0 included, which is not used.
    ///
    /// # Errors
    /// EMFILE, ENOMEM.
    pub fn create(name: &str, max: u32) -> Result<Frames, RamError> {
        let own = pagoda_sys::process::own_uid();
        Frames::of(RamFile::create(name, u64::from(max) * PAGE_SIZE, own)?, max)
    }

    /// The pool that a VMM kept.
    ///
    /// # Errors
    /// What was handed over is something else.
    pub fn reopen(kept: BorrowedFd<'_>, max: u32) -> Result<Frames, RamError> {
        Frames::of(RamFile::reopen(kept, u64::from(max) * PAGE_SIZE)?, max)
    }

    fn of(file: RamFile, max: u32) -> Result<Frames, RamError> {
        let view = file.map(LargeFolios::Never)?;
        let counts = (0..max.div_ceil(BLOCK)).map(|_| OnceLock::new()).collect();
        Ok(Frames { max, file, view, counts })
    }

    /// Frames are 1 to this, exclusive.
    pub fn max(&self) -> u32 {
        self.max
    }

    /// For a VMM to keep.
    ///
    /// # Errors
    /// EMFILE.
    pub fn keepsake(&self) -> Result<OwnedFd, Errno> {
        self.file.keepsake()
    }

    /// Device and inode of the pool.
    pub fn inode(&self) -> (u64, u64) {
        self.file.inode()
    }

    /// Bytes that the pool holds.
    pub fn allocated(&self) -> u64 {
        self.file.allocated().unwrap_or(0)
    }

    /// The number behind the last frame that has content.
    ///
    /// # Errors
    /// The error of lseek(2).
    pub fn end(&self) -> Result<u32, Errno> {
        let mut end = 1;
        for run in self.file.data_runs() {
            end = run?.end.div_ceil(PAGE_SIZE) as u32;
        }
        Ok(end)
    }

    fn slot(&self, frame: u32) -> &AtomicU32 {
        let block = self.counts[(frame / BLOCK) as usize]
            .get_or_init(|| std::iter::repeat_with(|| AtomicU32::new(0)).take(BLOCK as usize).collect());
        &block[(frame % BLOCK) as usize]
    }

    /// References to a frame.
    pub fn count(&self, frame: u32) -> u32 {
        self.slot(frame).load(Ordering::SeqCst)
    }

    /// One reference more, for an entry that is there: a new frame's first, or one found when the VM came back.
    pub fn add(&self, frame: u32) {
        self.slot(frame).fetch_add(1, Ordering::SeqCst);
    }

    /// One reference more to a frame that somebody refers to. False: nobody does, so it is about to be freed.
    pub fn take(&self, frame: u32) -> bool {
        let more = |count| (count > 0 && count < REFS_MAX).then_some(count + 1);
        self.slot(frame).fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
    }

    /// Takes one reference away. True: it was the last.
    pub fn drop_reference(&self, frame: u32) -> bool {
        let less = |count: u32| count.checked_sub(1);
        match self.slot(frame).fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) {
            Ok(before) => before == 1,
            Err(_) => {
                // Somebody else writes the tables, which only this user can. Kept for ever, it does no harm.
                tracing::error!(frame, "a shared frame lost a reference that nobody had");
                false
            }
        }
    }

    /// Reads a frame that the caller has a reference to.
    pub fn read(&self, frame: u32, out: &mut Content) {
        self.view.read_page(u64::from(frame), out);
    }

    /// Fills a frame that nobody refers to yet.
    ///
    /// # Errors
    /// ENOMEM: the host has no memory.
    pub fn write(&self, frame: u32, content: &Content) -> Result<(), Errno> {
        let page = u64::from(frame);
        self.view.populate(page..page + 1)?;
        self.view.write_page(page, content);
        Ok(())
    }

    /// Frees a frame that nobody refers to.
    ///
    /// # Errors
    /// The error of fallocate(2).
    pub fn punch(&self, frame: u32) -> Result<(), Errno> {
        self.file.punch(u64::from(frame) * PAGE_SIZE, PAGE_SIZE)
    }
}
