//! A share group: what contents its VMs have, and which VMs these are.
//!
//! The index maps the hash of a content to a frame, or to a **hint**: a page that had this content when it was looked at.
//! Nothing follows from a hash alone: a page is shared only after all of it was compared with a frame. Two pages with a
//! hash in common make a frame of the second; the owner of the first is told and looks at its page again.
//!
//! # After a restart
//!
//! Counts are not known before every VM whose record names the group is back, or is found dead. Until then the group is
//! not **settled**: nothing is looked up, nothing is made, no frame is freed. References may be dropped: a count that
//! becomes 0 means nothing yet. [`Group::settle`] then frees what nobody refers to and fills the index.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use pagoda_abi::Token;
use pagoda_core::units::{PAGE_SIZE, PageIdx};
use pagoda_sys::ram::RamError;

use super::frames::{Content, Frames};
use crate::handle::{Command, Handle};

/// Hints kept at most, 16 bytes each and what the map adds: those of 64 GiB. Beyond it all are forgotten, which costs
/// another look at the pages.
const HINTS_MAX: usize = 1 << 24;
/// Bits of a slot for a hint's page: 16 TiB of RAM.
const PAGE_BITS: u32 = 32;
/// The slot is a hint.
const HINT: u64 = 1 << 63;

/// Contents are hashed well enough already.
#[derive(Debug, Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are 64-bit hashes");
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// A page that had a content when it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hint {
    /// The VM's number in the group.
    pub member: u32,
    /// The page of that VM which had the content.
    pub page: PageIdx,
}

impl Hint {
    fn to_slot(self) -> u64 {
        HINT | u64::from(self.member) << PAGE_BITS | self.page.0
    }

    fn of_slot(slot: u64) -> Option<Hint> {
        let member = ((slot & !HINT) >> PAGE_BITS) as u32;
        (slot & HINT != 0).then_some(Hint { member, page: PageIdx(slot & ((1 << PAGE_BITS) - 1)) })
    }
}

/// What a look at a page found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// An equal frame; the caller has a reference now.
    Equal(u32),
    /// Made a frame of it, with a reference for the caller, because the hint says there is another such page.
    Made(u32, Hint),
    /// Nothing equal is known; the page is a hint now.
    New,
    /// A frame has the same hash and another content.
    Collision,
}

#[derive(Debug, Default)]
struct Inner {
    index: HashMap<u64, u64, BuildHasherDefault<Identity>>,
    hints: usize,
    /// Frames below `next` that are not in use.
    free: Vec<u32>,
    /// The lowest frame that was never used.
    next: u32,
    /// A bit for each frame in use.
    used: Vec<u64>,
    /// VMs that may refer to frames and have not come back.
    expected: HashSet<Token>,
    members: BTreeMap<u32, Weak<Handle>>,
    joined: u32,
}

/// A share group of this daemon, which its VMs' engines hold in common.
#[derive(Debug)]
pub struct Group {
    name: String,
    /// Seed of the hash, so that no guest can prepare collisions.
    seed: u64,
    frames_max: u32,
    frames: OnceLock<Frames>,
    /// Written under the lock of `inner`; read without it by those who may not wait while the pool is read.
    settled: AtomicBool,
    inner: Mutex<Inner>,
}

impl Group {
    /// A new group without a VM, of at most `frames_max` frames.
    ///
    /// # Errors
    /// Its pool could not be made.
    pub fn create(name: &str, frames_max: u32) -> Result<Group, RamError> {
        let group = Group::recovered(name, frames_max);
        let _ = group.frames.set(Frames::create(&format!("{name}.pool"), frames_max)?);
        group.settled.store(true, Ordering::SeqCst);
        Ok(group)
    }

    /// A group that an earlier daemon made; its VMs bring its pool.
    pub fn recovered(name: &str, frames_max: u32) -> Group {
        let seed = RandomState::new().hash_one(0);
        let inner = Inner { next: 1, ..Inner::default() };
        Group {
            name: name.to_owned(),
            seed,
            frames_max,
            frames: OnceLock::new(),
            settled: AtomicBool::new(false),
            inner: Mutex::new(inner),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What its VMs call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pool; `None` until a VM of a recovered group is back.
    pub fn frames(&self) -> Option<&Frames> {
        self.frames.get()
    }

    /// A VM of a recovered group brings the pool.
    ///
    /// # Errors
    /// It is not a pool, or not that of this group.
    pub fn adopt(&self, kept: BorrowedFd<'_>, inode: (u64, u64)) -> Result<(), RamError> {
        let wrong = || RamError::NotRam { what: "not the pool of this share group".to_owned() };
        if self.frames.get().is_none() {
            let frames = Frames::reopen(kept, self.frames_max)?;
            if frames.inode() != inode {
                return Err(wrong());
            }
            let _ = self.frames.set(frames);
        }
        if self.frames.get().is_some_and(|frames| frames.inode() == inode) { Ok(()) } else { Err(wrong()) }
    }

    /// This VM refers to frames, and has to come back or be found dead before any is freed.
    pub fn expect(&self, token: Token) {
        let mut inner = self.lock();
        self.settled.store(false, Ordering::SeqCst);
        inner.expected.insert(token);
    }

    /// The VM has come back and its references are counted, or it is dead.
    pub fn account_for(&self, token: Token) {
        self.lock().expected.remove(&token);
    }

    /// Whether [`Group::settle`] has something to do: all VMs are accounted for.
    pub fn can_settle(&self) -> bool {
        let inner = self.lock();
        !self.is_settled() && inner.expected.is_empty() && self.frames.get().is_some()
    }

    /// Whether equal pages are looked for, because all references are known.
    pub fn is_settled(&self) -> bool {
        self.settled.load(Ordering::SeqCst)
    }

    /// Frees the frames that nobody refers to, and learns the contents of the others. It reads all of the pool.
    pub fn settle(&self) {
        let Some(frames) = self.frames.get() else { return };
        let mut inner = self.lock();
        if self.is_settled() || !inner.expected.is_empty() {
            return;
        }
        let end = match frames.end() {
            Ok(end) => end.max(inner.next),
            Err(error) => return tracing::warn!(group = %self.name, "look at the pool: {error}"),
        };
        inner.index.clear();
        inner.hints = 0;
        inner.free.clear();
        inner.used = vec![0; (end as usize).div_ceil(64)];
        inner.next = end;
        let mut content = [0; PAGE_SIZE as usize];
        for frame in 1..end {
            if frames.count(frame) > 0 {
                frames.read(frame, &mut content);
                let hash = self.hash(&content);
                inner.index.insert(hash, u64::from(frame));
                inner.set_used(frame, true);
            } else {
                if let Err(error) = frames.punch(frame) {
                    tracing::warn!(group = %self.name, "free a frame: {error}");
                }
                inner.free.push(frame);
            }
        }
        self.settled.store(true, Ordering::SeqCst);
        let used = inner.index.len();
        tracing::info!(group = %self.name, frames = used, "all VMs are accounted for: sharing goes on");
    }

    /// A VM that looks for equal pages and can be told to look again; its number.
    pub fn join(&self, handle: Weak<Handle>) -> u32 {
        let mut inner = self.lock();
        inner.joined += 1;
        let member = inner.joined;
        inner.members.insert(member, handle);
        member
    }

    /// The VM's pages are no hints any more.
    pub fn leave(&self, member: u32) {
        let mut inner = self.lock();
        inner.members.remove(&member);
        inner.index.retain(|_, slot| Hint::of_slot(*slot).is_none_or(|hint| hint.member != member));
        inner.hints = inner.index.values().filter(|slot| Hint::of_slot(**slot).is_some()).count();
    }

    /// Tells a VM that these pages may have equal frames now.
    pub fn notify(&self, member: u32, pages: Vec<PageIdx>) {
        let handle = self.lock().members.get(&member).and_then(Weak::upgrade);
        if let Some(handle) = handle {
            handle.send(Command::LookAgain(pages));
        }
    }

    /// The key of a content.
    pub fn hash(&self, content: &Content) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(content, self.seed)
    }

    /// Looks for a frame with this content, which must not change until the entry is written. `page`: whose it is;
    /// `is_worth`: whether the page of a hint deserves a frame.
    pub fn look(&self, content: &Content, page: Hint, is_worth: impl FnOnce(Hint) -> bool) -> Look {
        let Some(frames) = self.frames.get().filter(|_| self.is_settled()) else { return Look::New };
        let hash = self.hash(content);
        let mut inner = self.lock();
        if !self.is_settled() {
            return Look::New;
        }
        let slot = inner.index.get(&hash).copied();
        match slot.map(|slot| (slot, Hint::of_slot(slot))) {
            Some((frame, None)) if frames.take(frame as u32) => {
                drop(inner);
                self.compare(frames, frame as u32, content)
            }
            Some((_, Some(hint))) if hint != page && is_worth(hint) => match inner.make(frames, hash, content) {
                Some(frame) => Look::Made(frame, hint),
                None => Look::New,
            },
            _ => {
                inner.note(hash, page);
                Look::New
            }
        }
    }

    /// The caller has a reference, so the frame cannot change.
    fn compare(&self, frames: &Frames, frame: u32, content: &Content) -> Look {
        let mut other = [0; PAGE_SIZE as usize];
        frames.read(frame, &mut other);
        if other == *content {
            return Look::Equal(frame);
        }
        if frames.drop_reference(frame) {
            self.bury(&[frame]);
        }
        Look::Collision
    }

    /// Frees those of these frames to which nobody refers any more. It waits while the pool is read.
    pub fn bury(&self, dead: &[u32]) {
        let Some(frames) = self.frames.get() else { return };
        let mut inner = self.lock();
        if !self.is_settled() {
            return;
        }
        let mut content = [0; PAGE_SIZE as usize];
        for &frame in dead {
            // Somebody else may have buried it, and it may be in use again.
            if !inner.is_used(frame) || frames.count(frame) > 0 {
                continue;
            }
            frames.read(frame, &mut content);
            let hash = self.hash(&content);
            if inner.index.get(&hash) == Some(&u64::from(frame)) {
                inner.index.remove(&hash);
            }
            if let Err(error) = frames.punch(frame) {
                tracing::warn!(group = %self.name, "free a frame: {error}");
            }
            inner.set_used(frame, false);
            inner.free.push(frame);
        }
    }

    /// Frames in use; 0 until the group is settled.
    pub fn frames_in_use(&self) -> u64 {
        self.lock().used.iter().map(|word| u64::from(word.count_ones())).sum()
    }
}

impl Inner {
    fn is_used(&self, frame: u32) -> bool {
        self.used.get(frame as usize / 64).is_some_and(|word| word & (1 << (frame % 64)) != 0)
    }

    fn set_used(&mut self, frame: u32, used: bool) {
        let word = frame as usize / 64;
        if word >= self.used.len() {
            self.used.resize(word + 1, 0);
        }
        let bit = 1 << (frame % 64);
        if used { self.used[word] |= bit } else { self.used[word] &= !bit }
    }

    /// A frame with this content and one reference, in the place of a hint. `None`: the pool or the host is full.
    fn make(&mut self, frames: &Frames, hash: u64, content: &Content) -> Option<u32> {
        let fresh = (self.next < frames.max()).then_some(self.next);
        let frame = self.free.pop().or(fresh)?;
        if let Err(error) = frames.write(frame, content) {
            tracing::debug!("no memory for a frame: {error}");
            if frame != self.next {
                self.free.push(frame);
            }
            return None;
        }
        self.next = self.next.max(frame + 1);
        self.set_used(frame, true);
        frames.add(frame);
        self.index.insert(hash, u64::from(frame));
        self.hints -= 1;
        Some(frame)
    }

    fn note(&mut self, hash: u64, page: Hint) {
        if self.hints >= HINTS_MAX {
            self.index.retain(|_, slot| Hint::of_slot(*slot).is_none());
            self.hints = 0;
        }
        let before = self.index.insert(hash, page.to_slot());
        self.hints += usize::from(before.is_none_or(|slot| Hint::of_slot(slot).is_none()));
    }
}
