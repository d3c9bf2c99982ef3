//! A VM's pages: the machine that decides, the memory and the tiers that it decides about, and what is under way
//! between them.
//!
//! This is the only owner that maps, fills, punches, reads and writes pages ([`exec`], [`io`], [`arm`]). The loop gives
//! it events ([`Paging::apply`]) and hands it back those of the machine's actions that are about pages, in the
//! machine's order. Other owners see the page table and the memory read-only, and change pages only by the methods
//! here.
//!
//! Events that an action leads to wait in a queue until the actions before them are done: the machine is never entered twice.
//!
//! A method that finds an invariant broken returns [`super::broken::Broken`] and stops there; an intent that is open stays
//! for the next daemon. Once halted, the machine gets no event, so no action follows.

mod arm;
mod borrow;
mod borrowed;
mod busy;
mod content;
mod exec;
mod io;
mod mappers;

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pagoda_core::bits::PageSet;
use pagoda_core::fault::{Actions, Event, Located, Machine, Now, Pages, Served};
use pagoda_core::units::{ChunkIdx, PageCount, PageIdx};
use pagoda_image::ImageId;
use pagoda_sys::Errno;
use pagoda_sys::ring::{Ring, RingError};
use pagoda_sys::socket::SharedMap;
use pagoda_sys::uffd::{Fault, Uffd};

use crate::handle::Look;
use crate::loan::Loan;
use crate::mapper::Mapped;
use crate::recover::{self, RecoverError};
use crate::share::Member;
use crate::source::Source;
use crate::space::Space;
use crate::tier::remote::RemoteNumbers;
use crate::tier::{Placed, Places, Stack};

use self::mappers::Mappers;
pub use content::{pieces, short_runs};
pub use io::Answered;

/// Owns the VM's page table, its memory and its tiers.
pub struct Paging {
    /// The VM's name, for messages.
    vm: Arc<str>,
    machine: Machine,
    space: Space,
    tiers: Stack,
    shared: SharedMap,
    io: io::Transfers,
    /// Events that actions led to, handled before anything new.
    events: VecDeque<Event>,
    /// Since when it has been arming in vain, for its memory is another's.
    busy: Option<busy::Busy>,
    /// The ring has its bounce buffers: a VM that is never armed needs none.
    has_buffers: bool,
    /// The machine's time counts from here.
    started: Instant,
    halted: Option<String>,
    /// Where its pages are, if they have just arrived from another host.
    expected: Option<Vec<Located>>,
    borrow: Option<borrowed::Borrow>,
    /// Faults that were read while the kernel waited for a message to be read.
    heard: RefCell<VecDeque<Fault>>,
    mappers: RefCell<Mappers>,
}

impl Paging {
    /// The pages of a VM that is not armed.
    pub fn new(
        vm: Arc<str>,
        machine: Machine,
        space: Space,
        tiers: Stack,
        shared: SharedMap,
        loan: Option<Loan>,
    ) -> Paging {
        Paging {
            vm,
            machine,
            space,
            tiers,
            shared,
            io: io::Transfers::new(),
            events: VecDeque::with_capacity(64),
            busy: None,
            has_buffers: false,
            started: Instant::now(),
            halted: None,
            expected: None,
            borrow: loan.map(borrowed::Borrow::new),
            heard: RefCell::default(),
            mappers: RefCell::default(),
        }
    }

    /// The VM's pages are on their way from another host, or are there: until then it is not armed.
    pub fn await_pages(&mut self, on: bool) {
        self.machine.await_pages(on);
    }

    /// The VM's name, as messages show it.
    pub fn vm(&self) -> &str {
        &self.vm
    }

    /// The page table and what else the machine knows.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Where pages are in the VMM and in the RAM files.
    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Where pages are that are not in DRAM.
    pub fn tiers(&self) -> &Stack {
        &self.tiers
    }

    /// The VM's memory in other processes.
    pub fn mappers(&self) -> RefMut<'_, Mappers> {
        self.mappers.borrow_mut()
    }

    /// A mapper may map this from now on.
    ///
    /// # Errors
    /// It cannot be registered.
    pub fn let_map(&self, slot: usize, process: (u32, u64), mapped: Mapped) -> Result<(), Errno> {
        // Before it has access: the next daemon must know that it may have entries.
        self.shared.mark_mapper_maps(slot, process.0, process.1);
        self.mappers().insert(slot, mapped)
    }

    /// A mapper maps all of this, and nothing else.
    ///
    /// # Errors
    /// It cannot be registered.
    pub fn take_maps(
        &self,
        ring: &mut Ring,
        slot: usize,
        process: (u32, u64),
        uffd: Uffd,
        maps: &[Mapped],
    ) -> Result<(), Errno> {
        if !maps.is_empty() {
            self.shared.mark_mapper_maps(slot, process.0, process.1);
        }
        self.mappers().set_maps(ring, slot, uffd, maps)
    }

    /// The process of a mapper that mapped RAM has ended, and another may come.
    pub fn reset_mapper(&self, ring: &mut Ring, slot: usize) {
        let _ = ring.cancel_poll(Source::MapperUffd(slot as u32).key());
        self.mappers().reset(slot);
        self.shared.clear_mapper(slot);
    }

    /// A mapper has ended.
    pub fn forget_mapper(&self, ring: &mut Ring, slot: usize) {
        let _ = ring.cancel_poll(Source::MapperUffd(slot as u32).key());
        self.mappers().remove(slot);
        self.shared.remove_mapper(slot);
    }

    /// The machine's time: milliseconds since the engine was made.
    pub fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Gives the machine an event. What it asks for is in `actions`, to be executed in that order. Says what became of
    /// a fault. A halted VM's machine gets none.
    pub fn apply(&mut self, event: Event, actions: &mut Actions) -> Option<Served> {
        if self.is_halted() {
            return None;
        }
        let now = Now { ms: self.now_ms(), oldest_io: self.shared.oldest_io() };
        self.machine.apply(event, now, actions)
    }

    /// An event that is handled after those that wait already.
    pub fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// The limits that the machine begins with. It plans nothing before it knows both.
    pub fn begin_with_limits(&mut self, limit: PageCount, min: PageCount) {
        self.machine.set_min(min);
        self.push(Event::SetLimit { limit });
    }

    /// An event that is handled before all others: until then the machine has another idea of its pages.
    pub fn push_first(&mut self, event: Event) {
        self.events.push_front(event);
    }

    /// What an action could not do, which the machine took for done: handled before all else but the ends of a punch or of
    /// sharing, which belong to what was done before.
    pub fn push_correction(&mut self, event: Event) {
        let comes_first = |event: &Event| {
            matches!(
                event,
                Event::PunchDone { .. }
                    | Event::ShareDone { .. }
                    | Event::Fenced { .. }
                    | Event::ProtectFailed { .. }
                    | Event::Thaw
            )
        };
        let at = self.events.iter().position(|event| !comes_first(event)).unwrap_or(self.events.len());
        self.events.insert(at, event);
    }

    /// The event that is to be handled next.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// From now on nothing changes. False: it was halted before, for another reason.
    #[must_use]
    pub fn halt(&mut self, text: &str) -> bool {
        let is_first = self.halted.is_none();
        self.halted.get_or_insert_with(|| text.to_owned());
        is_first
    }

    pub fn is_halted(&self) -> bool {
        self.halted.is_some()
    }

    /// Why it is halted.
    pub fn halted(&self) -> Option<&str> {
        self.halted.as_deref()
    }

    /// Reads messages of a userfaultfd, as many as there is room for.
    ///
    /// # Errors
    /// The VMM is gone, as a rule.
    pub fn read_faults(&self, shard: usize, faults: &mut [Fault]) -> std::io::Result<usize> {
        self.space.shards()[shard].uffd.read(faults)
    }

    /// Waits for messages of a userfaultfd.
    ///
    /// # Errors
    /// Of the ring.
    pub fn poll_faults(&self, ring: &mut Ring, shard: u32) -> Result<(), RingError> {
        ring.poll_multishot(self.space.shards()[shard as usize].uffd.as_fd(), Source::Uffd(shard).key())
    }

    /// Waits for whatever the kernel and the tiers' own descriptors have to say.
    ///
    /// # Errors
    /// Of the ring.
    pub fn poll_all(&self, ring: &mut Ring) -> Result<(), RingError> {
        (0..self.space.shards().len() as u32).try_for_each(|shard| self.poll_faults(ring, shard))?;
        self.tiers.fds().try_for_each(|(tier, fd)| ring.poll_multishot(fd, Source::Tier(tier).key()))
    }

    /// Settles what an earlier daemon left half done, and says how many intents that were. Before anything is armed.
    ///
    /// # Errors
    /// The kernel or a tier refuses; nothing is lost.
    pub fn settle_intents(&mut self) -> Result<u64, RecoverError> {
        recover::settle_intents(&self.space, &mut self.tiers, &self.shared)
    }

    /// What the machine has found at the last look of a move. The clock of direct I/O moves on behind the protection, as behind a zap.
    pub fn end_look(&mut self) -> Look {
        let written = self.machine.take_written();
        Look { written, protected_at: self.shared.advance(), oldest_io: self.shared.oldest_io() }
    }

    /// Direct I/O of the VMM may be in flight. One that has ended counts until the VMM's agent has looked.
    pub fn has_direct_io(&self) -> bool {
        self.shared.oldest_io() != u64::MAX
    }

    /// The VMM may be giving memory back by itself.
    pub fn is_punching(&self) -> bool {
        self.shared.is_punching()
    }

    /// Notes for the next daemon that an image is lost, whatever its files say.
    pub fn mark_lost_image(&self, image: ImageId) {
        self.shared.mark_lost_image(image.0);
    }

    /// The image that a daemon has noted so.
    pub fn lost_image(&self) -> Option<ImageId> {
        self.shared.lost_image().map(ImageId)
    }

    /// The files of the image say so themselves.
    pub fn unmark_lost_image(&self) {
        self.shared.unmark_lost_image();
    }

    /// The VMM may give memory back by itself, while the VM is not armed.
    pub fn leave_punches(&self) {
        self.shared.leave_punches();
    }

    /// Pages that the VMM says it gave back by itself: any number.
    pub fn punched(&self) -> u64 {
        self.shared.punched.load(Ordering::Relaxed)
    }

    /// Watches these pages from now on. The VM is armed.
    pub fn start_sample(&mut self, pages: &[PageIdx]) {
        self.machine.start_sample(pages);
        self.push(Event::Tick);
    }

    /// Feeds the miss-ratio curve, anew, or no more.
    pub fn watch_curve(&mut self, on: bool) {
        self.machine.watch_curve(on);
    }

    /// The VM's part in its share group.
    pub fn frames(&self) -> Option<&Member> {
        self.tiers.frames()
    }

    /// The VM's part in its share group, to be changed.
    pub fn frames_mut(&mut self) -> Option<&mut Member> {
        self.tiers.frames_mut()
    }

    /// The references of a VM that came back count from now on. Before any is dropped.
    ///
    /// # Errors
    /// The table of shared pages cannot be read.
    pub fn count_references(&mut self) -> Result<(), Errno> {
        self.frames_mut().map_or(Ok(()), Member::count_references)
    }

    /// Takes the VM out of its share group. `gone`: the VM has ended.
    pub fn leave_group(&mut self, gone: bool) {
        if let Some(member) = self.tiers.take_frames() {
            member.leave(gone);
        }
    }

    /// Sends what the tiers have to send; how long nothing is to be done for them after that.
    pub fn begin_tiers(&mut self, ring: &mut Ring) -> Duration {
        self.tiers.begin(ring, &self.space)
    }

    /// What the VM is expected to need comes in before it asks, from the next event on. The VM is armed.
    pub fn begin_prefetch(&mut self) {
        let list = self.tiers.take_prefetch();
        self.machine.prefetch(list);
    }

    /// What was read ahead of this chunk is used.
    pub fn note_hit(&mut self, chunk: ChunkIdx) {
        self.tiers.note_hit(chunk);
    }

    /// The VM has ended, and the tiers are told.
    pub fn end_tiers(&mut self) {
        self.note_let_run();
        self.tiers.end();
    }

    /// The daemon lets the guest of a restored VM run, and notes that in the memory that the VMM keeps.
    fn note_let_run(&mut self) {
        if self.shared.was_let_run() {
            self.tiers.note_let_run();
        }
    }

    /// Pages that were missing and have come from another host. Each is given once.
    pub fn take_came(&mut self) -> Option<(ChunkIdx, PageSet)> {
        self.tiers.take_came()
    }

    /// Once a second: what tiers do now and then.
    pub fn maintain_tiers(&mut self) {
        self.note_let_run();
        self.tiers.maintain(|| self.io.written_out());
    }

    /// What the VM waits for in a tier, if pages do not come in time.
    pub fn tier_waits(&mut self) -> Option<String> {
        self.tiers.waits()
    }

    /// What is known of the remote tier, if there is one.
    pub fn remote(&mut self) -> Option<RemoteNumbers> {
        self.tiers.remote()
    }

    /// Those of these pages whose content is in a tier that is handed over to whoever the VM moves to, and nowhere else.
    pub fn handed_over(&self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let c = self.machine.chunk(chunk);
        let is_known = self.machine.can_look().is_ok() && !c.busy();
        if is_known { self.tiers.handed_over(chunk, pages & c.swapped()) } else { PageSet::EMPTY }
    }

    /// The same, and those whose content is in DRAM too.
    pub fn held_by_handed_over(&self, chunk: ChunkIdx, pages: PageSet) -> PageSet {
        let c = self.machine.chunk(chunk);
        let is_known = self.machine.can_look().is_ok() && !c.busy();
        let in_both = c.ram & c.clean & c.swap;
        if is_known { self.tiers.handed_over(chunk, pages & (c.swapped() | in_both)) } else { PageSet::EMPTY }
    }

    /// Whether a tier takes copies for whoever the VM moves to.
    pub fn takes_copies(&self) -> Places {
        self.tiers.places()
    }

    /// Has it write what these pages held. False: there is none, or it has one of them already, which is not written over.
    #[must_use]
    pub fn place(&mut self, pages: Pages, content: impl FnOnce() -> Vec<u8>) -> bool {
        let c = self.machine.chunk(pages.chunk);
        let asked = PageSet::range(pages.run.start, pages.run.len);
        let counts = asked & (c.swapped() | c.ram & c.clean & c.swap);
        if !self.tiers.handed_over(pages.chunk, counts).is_empty() || self.tiers.places() == Places::No {
            return false;
        }
        self.tiers.place(pages.first(), content())
    }

    /// What became of a copy. Each is given once.
    pub fn next_placed(&mut self) -> Option<Placed> {
        self.tiers.next_placed()
    }

    /// Nobody waits for copies any more.
    pub fn forget_placing(&mut self) {
        self.tiers.forget_placing();
    }

    /// These blocks become holes, in whichever tier they are.
    ///
    /// # Errors
    /// The next daemon would find one of them.
    pub fn drop_blocks(&mut self, chunk: ChunkIdx, pages: PageSet) -> Result<(), Errno> {
        self.tiers.drop_blocks(chunk, pages)
    }
}
