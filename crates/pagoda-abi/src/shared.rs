//! Memory shared by a VM's shim and the daemon: the clock of direct I/O, the daemon's open intents, who punches, which
//! mappers there are, and what the next daemon has to know.
//!
//! It is a memfd that the daemon makes and the shim keeps, so it outlives the daemon. The VMM may scribble on it: that
//! harms nobody but this VM, because the daemon checks every index it reads here.
//!
//! # The clock (the pin rule: docs/architecture/direct-io.md)
//!
//! Write-protection does not stop DMA: a direct I/O pins a page when it starts and may land in it long after. A chunk
//! may leave DRAM only if every direct I/O in flight began *after* its page-table entries were zapped; a later I/O has to
//! fault, and the fault is seen.
//!
//! * The shim, before each direct I/O: `slot = epoch` (sequentially consistent), then the system call. After its
//!   completion: `slot = 0`.
//! * The agent, for a zap: `madvise`, then `epoch += 1`; the new value is the zap's epoch.
//! * The daemon: a chunk zapped at epoch `z` may go when [`Shared::oldest_io`] `>= z`.
//!
//! An I/O that stored its slot after the daemon's scan issues its system call after the scan, so after the zap: it faults.
//!
//! # Intents
//!
//! "Data in the RAM file wins" rebuilds the page table from the two files' holes, except while a chunk is being read
//! straight into a hole (its pages exist before their content does) or punched (a folio that cannot be split is zeroed in
//! place). For that time the pages stand in an [`Intent`]: after a crash their truth is the swap file.
//!
//! # A lost image
//!
//! An image of the VM is lost when its disk does not take a page that is about to change. The next daemon must not take such
//! a page for the image's, and the image's own files may not take a note. So the last intent is kept for it
//! ([`Shared::mark_lost_image`]): one of no chunk, with the image's number in place of pages.
//!
//! # A guest that was let run
//!
//! A VM that is made of a snapshot is let run by the daemon, once. Its record says so afterwards, if the disk takes it; this
//! memory says so in any case ([`Shared::mark_let_run`]). So no later daemon lets a guest run that its user has paused since.
//!
//! # An orderly end
//!
//! A VMM that ends by exit(3) notes its exit status here ([`Shared::mark_ended`]). One that is killed or crashes cannot. So the
//! daemon, which is not its parent, tells a VM that was ended from one that crashed.
//!
//! # Punches
//!
//! Pages that the guest gives back become holes. While the VM is armed the daemon makes them, for it may have the pages
//! elsewhere. An unarmed VM is all in its RAM files, and the shim punches by itself ([`Shared::punch_alone`]): to ask costs
//! a wake-up for each page of a balloon. Before the daemon looks at RAM it takes that back ([`Shared::take_punches`]) and
//! waits for the punches under way. One it did not wait for long enough is repeated by way of the daemon.
//!
//! # Mappers
//!
//! Another process with the shim in it may map RAM ([`Shared::mappers`]). A page may leave only if it has no page-table entry there
//! either, so the next daemon has to know of each such process before it serves the VM. A mapper keeps the same clock: direct I/O
//! of either process counts.
//!
//! # Moves
//!
//! A part of RAM takes the template's place in one mremap(2), which a thread of the shim does when the daemon orders it. The
//! daemon may die between the two, and the next one lets the guest write to the template's pages: a move that came after that
//! would bring the guest's memory back to what it was. So each order has a number that is given once in the VM's life, and is
//! carried out only while it stands here ([`Shared::begin_move`]). A new daemon takes it back ([`Shared::take_back_move`]), or
//! waits until it is done.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Direct I/Os that can be in flight and tracked: QEMU's libaio context has 1024 requests, its thread pool 64
/// threads, an io_uring 128; three of the largest fit beside those of mappers.
pub const IO_SLOTS: usize = 4096;
/// Those of a mapper. When it has ended they are free, whatever it was doing; so nobody else uses them.
pub const MAPPER_IO_SLOTS: usize = 128;
/// Those of the VMM: all others.
pub const VMM_IO_SLOTS: Range<usize> = 0..IO_SLOTS - MAPPERS_MAX * MAPPER_IO_SLOTS;
/// Chunks that can be read into holes or punched at one time.
pub const INTENTS: usize = 64;
/// Those that pages may stand in: the last is for a lost image.
pub const PAGE_INTENTS: usize = INTENTS - 1;
/// The chunk of an intent that names no pages.
pub const NO_CHUNK: u32 = u32::MAX;
/// Processes that may map RAM beside the VMM.
pub const MAPPERS_MAX: usize = 4;
/// Marks the layout; a different one is refused.
pub const SHARED_MAGIC: u64 = u64::from_le_bytes(*b"PGDshr02");

/// The layout. All fields are atomic, since two processes use them at once.
#[repr(C)]
#[derive(Debug)]
pub struct Shared {
    /// It is [`SHARED_MAGIC`], or the memory has another layout.
    pub magic: AtomicU64,
    /// Counts zaps; starts at 1, so that 0 can mean "free" in a slot.
    pub epoch: AtomicU64,
    /// Direct I/Os in flight that found no free slot: while not zero nothing may be evicted.
    pub untracked: AtomicU64,
    /// Slots from here on were never used: the daemon's scan stops there.
    pub slots_used: AtomicU64,
    /// Start epoch of each direct I/O in flight, 0 for a free slot.
    pub io: [AtomicU64; IO_SLOTS],
    /// Pages whose truth is the swap file.
    pub intents: [Intent; INTENTS],
    /// Odd while the shim punches by itself; another odd number each time, so that no thread takes one time for another.
    pub alone: AtomicU64,
    /// So many threads of the VMM may be about to punch.
    pub punching: AtomicU64,
    /// Threads of the VMM have punched so many pages.
    pub punched: AtomicU64,
    /// 1: the guest of a restored VM was let run. It is in what older shims and daemons leave zero.
    pub let_run: AtomicU64,
    /// [`ENDED`] and the exit status, once the VMM ends by exit(3). It is in what older shims and daemons leave zero.
    pub ended: AtomicU64,
    /// Orders of moves that there have been. It is in what older shims and daemons leave zero, and so is what follows.
    pub moves: AtomicU64,
    /// The order that stands: its number doubled, and 1 more while it is carried out. 0: none.
    pub moving: AtomicU64,
    /// Processes that map RAM beside the VMM. It is in what older shims and daemons leave zero.
    pub mappers: [MapperSlot; MAPPERS_MAX],
}

/// A process that maps RAM beside the VMM.
#[repr(C)]
#[derive(Debug)]
pub struct MapperSlot {
    /// Its id. 0: there is none.
    pub pid: AtomicU64,
    /// When it started (proc(5) stat, field 22).
    pub start: AtomicU64,
    /// The process of it that a daemon has let map RAM, so that it may have pages mapped: itself or a child. 0: there is none.
    pub maps: AtomicU64,
    /// When that one started.
    pub maps_start: AtomicU64,
}

/// Marks an exit status that was noted.
const ENDED: u64 = 1 << 32;

/// Pages of one chunk whose truth is the swap file, whatever the RAM file holds. The last intent may be of no chunk.
#[repr(C)]
#[derive(Debug)]
pub struct Intent {
    /// 1 while the intent holds.
    pub valid: AtomicU32,
    /// The chunk's index in the VM's space.
    pub chunk: AtomicU32,
    /// Each page of the chunk has one bit.
    pub pages: [AtomicU64; 4],
}

impl Shared {
    /// Start epoch of the oldest direct I/O in flight; `u64::MAX` when there is none, 0 when it cannot be told.
    pub fn oldest_io(&self) -> u64 {
        std::sync::atomic::fence(Ordering::SeqCst);
        if self.untracked.load(Ordering::SeqCst) != 0 {
            return 0;
        }
        let used = (self.slots_used.load(Ordering::SeqCst) as usize).min(IO_SLOTS);
        let is_there = |index: &usize| self.mappers[*index].pid.load(Ordering::SeqCst) != 0;
        let of_mappers = (0..MAPPERS_MAX).filter(is_there).flat_map(|index| &self.io[mapper_io_slots(index)]);
        let all = self.io[..used].iter().chain(of_mappers);
        let oldest = all.map(|slot| slot.load(Ordering::SeqCst)).filter(|epoch| *epoch != 0).min();
        oldest.unwrap_or(u64::MAX)
    }

    /// Takes a slot for a direct I/O that is about to start. `None`: all are taken, and the I/O counts as untracked.
    /// Either way the I/O must be given back by [`Shared::finish_io`].
    pub fn start_io(&self, hint: usize) -> Option<usize> {
        self.start_io_in(VMM_IO_SLOTS, hint)
    }

    /// The same by whoever these slots are for.
    pub fn start_io_in(&self, slots: Range<usize>, hint: usize) -> Option<usize> {
        for probe in 0..slots.len() {
            let index = slots.start + (hint + probe) % slots.len();
            // The slot must be inside the scanned part before it holds an epoch. Those of mappers are looked at while there are any.
            if VMM_IO_SLOTS.contains(&index) {
                self.slots_used.fetch_max(index as u64 + 1, Ordering::SeqCst);
            }
            let epoch = self.epoch.load(Ordering::SeqCst);
            if self.io[index].compare_exchange(0, epoch, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                std::sync::atomic::fence(Ordering::SeqCst);
                return Some(index);
            }
        }
        self.untracked.fetch_add(1, Ordering::SeqCst);
        None
    }

    /// The I/O of this slot is complete: no page is pinned by it any more.
    pub fn finish_io(&self, slot: Option<usize>) {
        match slot {
            Some(index) => self.io[index].store(0, Ordering::SeqCst),
            None => {
                self.untracked.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Called by the agent after a zap; returns the zap's epoch.
    pub fn advance(&self) -> u64 {
        self.epoch.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The shim's side: runs `punch`, which says whether it succeeded, if the VM is all in its RAM files. False: the daemon
    /// has to be asked, also for pages that are punched already.
    pub fn punch_alone(&self, pages: u64, punch: impl FnOnce() -> bool) -> bool {
        if !may_punch(self.alone.load(Ordering::Relaxed)) {
            return false;
        }
        self.punching.fetch_add(1, Ordering::SeqCst);
        let before = self.alone.load(Ordering::SeqCst);
        let punched = may_punch(before) && punch();
        let done = punched && self.alone.load(Ordering::SeqCst) == before;
        self.punching.fetch_sub(1, Ordering::SeqCst);
        if done {
            self.punched.fetch_add(pages, Ordering::Relaxed);
        }
        done
    }

    /// The shim's side: runs `work` if the VM is not armed, and it is not armed before that is over. What touches RAM in the
    /// agent's thread has to be done so: in an armed VM it might wait for a page-out, which waits for the agent.
    pub fn while_unarmed(&self, work: impl FnOnce()) {
        self.punch_alone(0, || {
            work();
            true
        });
    }

    /// The daemon's side: nothing of the VM is outside its RAM files, and no account is kept of what is in them.
    pub fn leave_punches(&self) {
        self.alone.store(self.alone.load(Ordering::SeqCst) | 1, Ordering::SeqCst);
    }

    /// No new punch begins unasked. Those under way are over when [`Shared::is_punching`] says so.
    pub fn take_punches(&self) {
        let times = self.alone.load(Ordering::SeqCst);
        if may_punch(times) {
            self.alone.store(times.wrapping_add(1), Ordering::SeqCst);
        }
    }

    /// A punch that nobody asked for may be under way.
    pub fn is_punching(&self) -> bool {
        self.punching.load(Ordering::SeqCst) != 0
    }

    /// The daemon's side: the guest of this VM, which was made of a snapshot, was let run.
    pub fn mark_let_run(&self) {
        self.let_run.store(1, Ordering::SeqCst);
    }

    /// Whether a daemon has let the guest of this restored VM run.
    pub fn was_let_run(&self) -> bool {
        self.let_run.load(Ordering::SeqCst) == 1
    }

    /// The shim's side: the VMM ends by itself, with this exit status.
    pub fn mark_ended(&self, status: i32) {
        self.ended.store(ENDED | u64::from(status as u32), Ordering::SeqCst);
    }

    /// The exit status with which the VMM has ended by itself. `None`: it has not, as far as it could say.
    pub fn ended_with(&self) -> Option<i32> {
        let ended = self.ended.load(Ordering::SeqCst);
        (ended & !u64::from(u32::MAX) == ENDED).then_some(ended as u32 as i32)
    }

    /// The daemon's side: from now on one move may be done, and no other. Its number.
    pub fn order_move(&self) -> u64 {
        let order = self.moves.fetch_add(1, Ordering::SeqCst) + 1;
        self.moving.store(order << 1, Ordering::SeqCst);
        order
    }

    /// The shim's side: whether this order still stands. If so it is carried out now, and [`Shared::end_move`] follows.
    pub fn begin_move(&self, order: u64) -> bool {
        let standing = order << 1;
        self.moving.compare_exchange(standing, standing | 1, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The shim's side: it has been carried out, or could not be.
    pub fn end_move(&self) {
        self.moving.store(0, Ordering::SeqCst);
    }

    /// The daemon's side: no order stands any more. False: one is being carried out, and is to be waited for.
    pub fn take_back_move(&self) -> bool {
        let standing = self.moving.load(Ordering::SeqCst);
        if standing & 1 == 1 {
            return false;
        }
        self.moving.compare_exchange(standing, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The daemon's side: a process is going to map RAM. `None`: there is no room for another.
    pub fn add_mapper(&self, pid: u32, start: u64) -> Option<usize> {
        let index = self.mappers.iter().position(|slot| slot.pid.load(Ordering::SeqCst) == 0)?;
        let slot = &self.mappers[index];
        slot.maps.store(0, Ordering::SeqCst);
        slot.start.store(start, Ordering::SeqCst);
        // Last: the slot counts from now on.
        slot.pid.store(u64::from(pid), Ordering::SeqCst);
        Some(index)
    }

    /// The daemon's side: a mapper has ended, and with it its direct I/O.
    pub fn remove_mapper(&self, index: usize) {
        if let Some(slot) = self.mappers.get(index) {
            self.io[mapper_io_slots(index)].iter().for_each(|io| io.store(0, Ordering::SeqCst));
            slot.pid.store(0, Ordering::SeqCst);
        }
    }

    /// The daemon's side: the process of a mapper that has mapped RAM has ended, and another may follow.
    pub fn clear_mapper(&self, index: usize) {
        if let Some(slot) = self.mappers.get(index) {
            self.io[mapper_io_slots(index)].iter().for_each(|io| io.store(0, Ordering::SeqCst));
            slot.maps.store(0, Ordering::SeqCst);
        }
    }

    /// The daemon's side, before a mapper gets access to its first mapping.
    pub fn mark_mapper_maps(&self, index: usize, pid: u32, start: u64) {
        if let Some(slot) = self.mappers.get(index) {
            slot.maps_start.store(start, Ordering::SeqCst);
            slot.maps.store(u64::from(pid), Ordering::SeqCst);
        }
    }

    /// Mappers that there were when a daemon last said so: slot, process id, its start, and whether it may have pages mapped.
    pub fn known_mappers(&self) -> impl Iterator<Item = (usize, u32, u64, bool)> + '_ {
        self.mappers.iter().enumerate().filter_map(|(index, slot)| {
            let pid = u32::try_from(slot.pid.load(Ordering::SeqCst)).ok().filter(|pid| *pid != 0)?;
            Some((index, pid, slot.start.load(Ordering::SeqCst), slot.maps.load(Ordering::SeqCst) != 0))
        })
    }

    /// The process of a mapper that may have pages mapped, and its start.
    pub fn mapping_process(&self, index: usize) -> Option<(u32, u64)> {
        let slot = self.mappers.get(index)?;
        let pid = u32::try_from(slot.maps.load(Ordering::SeqCst)).ok().filter(|pid| *pid != 0)?;
        Some((pid, slot.maps_start.load(Ordering::SeqCst)))
    }

    /// The daemon's side: this image of the VM is lost, whatever its files say.
    pub fn mark_lost_image(&self, image: u128) {
        self.intents[PAGE_INTENTS].declare(NO_CHUNK, [image as u64, (image >> 64) as u64, 0, 0]);
    }

    /// The image that a daemon marked as lost.
    pub fn lost_image(&self) -> Option<u128> {
        let (chunk, [low, high, ..]) = self.intents[PAGE_INTENTS].read()?;
        (chunk == NO_CHUNK).then_some(u128::from(high) << 64 | u128::from(low))
    }

    /// The files of the lost image say so themselves.
    pub fn unmark_lost_image(&self) {
        if self.lost_image().is_some() {
            self.intents[PAGE_INTENTS].withdraw();
        }
    }
}

/// The slots of a mapper's direct I/O.
pub const fn mapper_io_slots(index: usize) -> Range<usize> {
    let start = VMM_IO_SLOTS.end + index % MAPPERS_MAX * MAPPER_IO_SLOTS;
    start..start + MAPPER_IO_SLOTS
}

fn may_punch(alone: u64) -> bool {
    alone & 1 == 1
}

impl Intent {
    /// Writes the intent so that a crash sees either none of it or all of it.
    pub fn declare(&self, chunk: u32, pages: [u64; 4]) {
        self.valid.store(0, Ordering::SeqCst);
        self.chunk.store(chunk, Ordering::SeqCst);
        for (slot, word) in self.pages.iter().zip(pages) {
            slot.store(word, Ordering::SeqCst);
        }
        self.valid.store(1, Ordering::SeqCst);
    }

    /// The RAM file tells the truth again.
    pub fn withdraw(&self) {
        self.valid.store(0, Ordering::SeqCst);
    }

    /// What a crash left, if anything.
    pub fn read(&self) -> Option<(u32, [u64; 4])> {
        (self.valid.load(Ordering::SeqCst) == 1).then(|| {
            let pages = [0, 1, 2, 3].map(|i| self.pages[i].load(Ordering::SeqCst));
            (self.chunk.load(Ordering::SeqCst), pages)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared() -> Box<Shared> {
        Box::new(Shared {
            magic: AtomicU64::new(SHARED_MAGIC),
            epoch: AtomicU64::new(1),
            untracked: AtomicU64::new(0),
            slots_used: AtomicU64::new(0),
            io: std::array::from_fn(|_| AtomicU64::new(0)),
            intents: std::array::from_fn(|_| Intent {
                valid: AtomicU32::new(0),
                chunk: AtomicU32::new(0),
                pages: std::array::from_fn(|_| AtomicU64::new(0)),
            }),
            alone: AtomicU64::new(0),
            punching: AtomicU64::new(0),
            punched: AtomicU64::new(0),
            let_run: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            moves: AtomicU64::new(0),
            moving: AtomicU64::new(0),
            mappers: std::array::from_fn(|_| MapperSlot {
                pid: AtomicU64::new(0),
                start: AtomicU64::new(0),
                maps: AtomicU64::new(0),
                maps_start: AtomicU64::new(0),
            }),
        })
    }

    #[test]
    fn mappers_are_known_until_they_end() {
        let shared = shared();
        assert_eq!(shared.known_mappers().count(), 0);
        assert_eq!((shared.add_mapper(7, 70), shared.add_mapper(8, 80)), (Some(0), Some(1)));
        shared.mark_mapper_maps(1, 9, 90);
        assert_eq!((shared.mapping_process(0), shared.mapping_process(1)), (None, Some((9, 90))));
        let io = shared.start_io_in(mapper_io_slots(1), 1000);
        assert!(io.is_some_and(|io| mapper_io_slots(1).contains(&io)) && shared.oldest_io() == 1);
        assert_eq!(mapper_io_slots(MAPPERS_MAX - 1).end, IO_SLOTS);
        assert_eq!(shared.known_mappers().collect::<Vec<_>>(), [(0, 7, 70, false), (1, 8, 80, true)]);
        shared.remove_mapper(1);
        assert_eq!(shared.oldest_io(), u64::MAX, "its direct I/O has ended with it");
        assert_eq!(shared.add_mapper(9, 90), Some(1));
        assert_eq!(shared.known_mappers().last(), Some((1, 9, 90, false)), "what the one before had mapped is gone");
        assert_eq!([10, 11, 12].map(|pid| shared.add_mapper(pid, 0)), [Some(2), Some(3), None]);
        // It takes no more room than older shims map: their memory is whole pages.
        let before = size_of::<Shared>() - size_of::<[MapperSlot; MAPPERS_MAX]>();
        assert_eq!(size_of::<Shared>().div_ceil(4096), before.div_ceil(4096));
    }

    #[test]
    fn an_io_older_than_the_zap_holds_it_back_until_it_ends() {
        let shared = shared();
        assert_eq!(shared.oldest_io(), u64::MAX);
        let before = shared.start_io(5);
        let zap = shared.advance();
        let after = shared.start_io(5);
        assert!(shared.oldest_io() < zap);
        shared.finish_io(before);
        assert!(shared.oldest_io() >= zap, "an I/O that began after the zap does not count");
        shared.finish_io(after);
        assert_eq!(shared.oldest_io(), u64::MAX);
    }

    #[test]
    fn more_ios_than_slots_hold_everything_back() {
        let shared = shared();
        let slots: Vec<_> = VMM_IO_SLOTS.map(|i| shared.start_io(i)).collect();
        assert!(slots.iter().all(Option::is_some));
        assert!(shared.start_io_in(mapper_io_slots(0), 7).is_some(), "a mapper has its own");
        let extra = shared.start_io(0);
        assert_eq!(extra, None);
        assert_eq!(shared.oldest_io(), 0);
        shared.finish_io(extra);
        assert_eq!(shared.oldest_io(), 1);
    }

    #[test]
    fn an_intent_is_there_whole_or_not_at_all() {
        let shared = shared();
        let intent = &shared.intents[3];
        assert_eq!(intent.read(), None);
        intent.declare(7, [1, 2, 3, 4]);
        assert_eq!(intent.read(), Some((7, [1, 2, 3, 4])));
        intent.withdraw();
        assert_eq!(intent.read(), None);
    }

    #[test]
    fn a_lost_image_is_known_until_its_files_say_so() {
        let shared = shared();
        let intent = &shared.intents[PAGE_INTENTS];
        assert_eq!(shared.lost_image(), None);
        shared.mark_lost_image(0x1234 << 100 | 5);
        assert_eq!(shared.lost_image(), Some(0x1234 << 100 | 5));
        assert_eq!(intent.read().map(|(chunk, _)| chunk), Some(NO_CHUNK));
        shared.unmark_lost_image();
        assert_eq!((shared.lost_image(), intent.read()), (None, None));
        // Pages that an older daemon left there are no image.
        intent.declare(7, [1, 2, 3, 4]);
        shared.unmark_lost_image();
        assert_eq!((shared.lost_image(), intent.read()), (None, Some((7, [1, 2, 3, 4]))));
    }

    #[test]
    fn a_move_is_done_only_while_its_order_stands() {
        let shared = shared();
        assert!(shared.take_back_move(), "there is none");
        let first = shared.order_move();
        assert!(!shared.begin_move(first + 1) && shared.begin_move(first));
        assert!(!shared.begin_move(first), "once");
        assert!(!shared.take_back_move(), "it is being carried out");
        shared.end_move();
        assert!(shared.take_back_move() && !shared.begin_move(first));
        let second = shared.order_move();
        assert!(second > first && shared.take_back_move());
        assert!(!shared.begin_move(second), "another daemon has taken it back");
        // It takes no more room than older shims map: their memory is whole pages.
        let before = size_of::<Shared>() - 3 * size_of::<AtomicU64>();
        assert_eq!(size_of::<Shared>().div_ceil(4096), before.div_ceil(4096));
    }

    #[test]
    fn an_exit_status_is_noted() {
        let shared = shared();
        assert_eq!(shared.ended_with(), None);
        for status in [0, 1, 255, -1] {
            shared.mark_ended(status);
            assert_eq!(shared.ended_with(), Some(status));
        }
        shared.ended.store(u64::MAX, Ordering::SeqCst);
        assert_eq!(shared.ended_with(), None, "nobody writes that");
    }

    #[test]
    fn that_a_guest_was_let_run_is_known_from_then_on() {
        let shared = shared();
        assert!(!shared.was_let_run());
        shared.mark_let_run();
        assert!(shared.was_let_run());
        // It takes no more room than older shims map: their memory is whole pages.
        let before = size_of::<Shared>() - size_of::<AtomicU64>();
        assert_eq!(size_of::<Shared>().div_ceil(4096), before.div_ceil(4096));
    }

    #[test]
    fn the_shim_punches_alone_only_while_it_may() {
        let shared = shared();
        let never = || -> bool { panic!("punched without leave") };
        assert!(!shared.punch_alone(1, never), "a daemon that says nothing is asked");
        shared.while_unarmed(|| panic!("touched without leave"));
        shared.leave_punches();
        assert!(shared.punch_alone(3, || shared.is_punching()));
        assert!(!shared.punch_alone(1, || false), "what failed is the daemon's");
        // The daemon took it back and did not wait, and in the second case has left it again since.
        for leaves_again in [false, true] {
            assert!(!shared.punch_alone(1, || {
                shared.take_punches();
                if leaves_again {
                    shared.leave_punches();
                }
                true
            }));
            shared.leave_punches();
        }
        shared.take_punches();
        assert!(!shared.punch_alone(1, never));
        assert_eq!((shared.is_punching(), shared.punched.load(Ordering::Relaxed)), (false, 3));
    }

    #[test]
    fn no_punch_runs_once_the_daemon_has_waited() {
        const TURNS: usize = 200;
        let shared = shared();
        // What the daemon alone may touch while it has taken the punches.
        let (owned, over) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while over.load(Ordering::Relaxed) == 0 {
                        shared.punch_alone(1, || {
                            assert_eq!(owned.load(Ordering::Relaxed), 0);
                            true
                        });
                    }
                });
            }
            for _ in 0..TURNS {
                shared.leave_punches();
                std::thread::yield_now();
                shared.take_punches();
                while shared.is_punching() {
                    std::thread::yield_now();
                }
                owned.store(1, Ordering::Relaxed);
                std::hint::spin_loop();
                owned.store(0, Ordering::Relaxed);
            }
            over.store(1, Ordering::Relaxed);
        });
    }
}
