//! The thread that serves one VM: a loop, and the owners of the VM's state.
//!
//! The loop waits in one place ([`Engine::run`]), turns completions into events, and has the machine's actions executed
//! in order ([`Engine::execute`]). Faults are read before anything else is looked at; demand reads are queued as they
//! come, page-out behind them.
//!
//! Each owner has its own state, which others reach by its methods only, and gets what it needs of the others as arguments:
//! [`paging`] has the pages, and answers faults; [`link`] has the connections to the VMM; [`sampler`] measures for the
//! policy; [`sharer`] looks for equal pages; [`imager`] has the VM's image; [`mover`] serves a move of the VM to another
//! host; [`status`] reports. The loop has the ring, the inbox and the time.
//!
//! What the guest sees: if this thread or the whole daemon dies, faults wait until the next daemon answers them. If the disk
//! fails, the VM is stalled and its owner told. If an owner finds an invariant broken, the VM is halted as it is
//! ([`Engine::halt`]): nothing is mapped any more, so that no wrong page can be seen.

mod acting;
mod arming;
mod broken;
mod imager;
mod imaging;
mod link;
mod mapping;
mod messages;
mod mover;
mod moving;
mod owning;
mod paging;
mod parts;
mod sampler;
mod sharer;
mod slowing;
mod stall;
mod start;
mod status;
mod upkeep;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda_core::fault::{Access, Actions, Event, FaultKind, Served};
use pagoda_core::stats::Metric;
use pagoda_sys::Errno;
use pagoda_sys::ring::{Ring, RingError};
use pagoda_sys::uffd::Fault;

use self::imager::Imager;
use self::link::VmmLink;
use self::mover::{Awaited, Mover};
use self::paging::Paging;
use self::sampler::Sampler;
use self::sharer::Sharer;
use self::slowing::Faulted;
use self::status::Reporter;
use crate::follow::Follow;
use crate::handle::{Inbox, Notice};
use crate::poll::BusyPoll;
use crate::source::Source;

pub use parts::{EngineError, Origin, Parts};
pub use start::spawn;

/// Fault messages read at once: one `read(2)` of a page.
const FAULTS_MAX: usize = 64;
/// Operations queued between two submissions. A fragmented page-out has 128 runs.
const RING_ENTRIES: u32 = 1024;
/// Causes that say, as a hit of read-ahead does, that chunks come in beside the thread that faults, or have to leave for it.
const SIGNS_OF_STREAM: [Metric; 3] = [Metric::FaultsSwapChunk, Metric::FaultsJoined, Metric::FaultsWaited];
/// Causes whose faults are answered by the actions of their own event.
const ANSWERED_AT_ONCE: [Metric; 6] = [
    Metric::FaultsMinor,
    Metric::FaultsZero,
    Metric::FaultsShared,
    Metric::FaultsWriteProtect,
    Metric::FaultsBorrowed,
    Metric::FaultsCancel,
];
/// How often time-driven work is looked at while something is under way.
const TICK_BUSY: Duration = Duration::from_millis(100);
/// The same for a VM that does nothing: heat is sampled at this rate, and an idle VM costs this many wake-ups.
const TICK_IDLE: Duration = Duration::from_millis(1000);
/// How soon direct I/O that blocks page-out is looked at again: a request takes some hundred microseconds.
const TICK_PIN: Duration = Duration::from_millis(1);

/// Serves one VM: it owns the VM's state, and runs on a thread of its own.
pub struct Engine {
    name: Arc<str>,
    paging: Paging,
    ring: Ring,
    inbox: Inbox,
    link: VmmLink,
    /// Room for the actions of one event.
    actions: Actions,
    sampler: Sampler,
    sharer: Sharer,
    imager: Imager,
    mover: Mover,
    /// Its pages are on their way from another host.
    arrival: Option<Awaited>,
    reporter: Reporter,
    follow: Follow,
    busy_poll: BusyPoll,
    /// The moment the fault in hand was read.
    fault_at: Instant,
    ticked: Instant,
    /// When that was done last which is due once a second.
    maintained: Instant,
    end: Option<Notice>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Engine {
    /// Serves the VM until it or the daemon ends.
    fn run(&mut self) -> Option<Notice> {
        let mut ready: Vec<(Source, Result<u32, Errno>, bool)> = Vec::with_capacity(RING_ENTRIES as usize);
        while self.end.is_none() {
            if let Err(error) = self.wait() {
                self.halt(&format!("the disk ring failed: {error}").into());
            }
            ready.clear();
            for completion in self.ring.completions() {
                if let Some(source) = Source::of(completion.key) {
                    ready.push((source, completion.result, completion.more));
                }
            }
            // Faults first: a guest waits for them, and they only queue reads.
            for &(source, _, more) in &ready {
                match source {
                    Source::Uffd(index) => {
                        self.read_faults(index as usize);
                        if !more {
                            self.poll_uffd(index);
                        }
                    }
                    Source::MapperUffd(slot) => {
                        self.read_mapper_faults(slot as usize);
                        if !more {
                            self.poll_mapper_faults(slot as usize);
                        }
                    }
                    _ => {}
                }
            }
            self.read_heard();
            self.answer_slowed();
            for &(source, result, more) in &ready {
                self.handle(source, result, more);
            }
            // The machine hears of nothing more, so nothing more may be done to its pages.
            if self.end.is_some() {
                break;
            }
            self.follow_tiers();
            if self.paging.can_write() {
                // The kernel hands a submission to the disk as a whole: a page-in must not wait for its writes to be made.
                self.page_ins_first();
                let stepped = self.paging.step_plan(&mut self.ring);
                self.or_halt(stepped);
                self.settle();
            }
            if self.can_look() {
                let stepped = self.sharer.step_look(&mut self.paging, &mut self.ring);
                if self.or_halt(stepped) == Some(true) {
                    self.settle();
                }
            }
            self.scan();
            self.turn_image();
            self.turn_move();
            self.tick();
            self.receive_waiting_calls();
        }
        self.publish();
        self.end.take()
    }

    /// Hands page-ins to the disk before something that takes a while.
    fn page_ins_first(&mut self) {
        let submitted = self.paging.submit_page_ins(&mut self.ring);
        self.or_halt(submitted);
    }

    /// Hands over what is queued and waits until there is something to do.
    fn wait(&mut self) -> Result<(), RingError> {
        let tiers_wait = self.paging.begin_tiers(&mut self.ring);
        if self.paging.has_page_faults() && self.follow.shares_cpu() && !self.paging.can_write() && !self.can_look() {
            self.ring.submit()?;
            self.busy_poll.poll(|| self.ring.is_due());
        }
        self.ring.submit_and_wait(1, Some(self.timeout().min(tiers_wait))).map(drop)
    }

    fn timeout(&self) -> Duration {
        let machine = self.paging.machine();
        let scan_wait = || self.sharer.scan_wait(&self.paging, TICK_BUSY);
        let wait = match () {
            () if self.paging.can_write() || self.can_look() || self.paging.has_heard() => Duration::ZERO,
            () if machine.is_pin_blocked() || machine.is_owning_paused() || machine.is_copying_back() => TICK_PIN,
            () if machine.is_busy() => TICK_BUSY.min(scan_wait()),
            () => TICK_IDLE.min(scan_wait()),
        };
        let wait = wait.min(self.imager.wait(&self.paging)).min(self.mover.wait(&self.paging));
        wait.min(self.mover.slowed_wait())
    }

    fn handle(&mut self, source: Source, result: Result<u32, Errno>, more: bool) {
        match source {
            Source::Uffd(_) | Source::MapperUffd(_) => {}
            Source::Io { tier, op } => {
                let ended = self.paging.finish_request(tier, op, result);
                self.apply_ended(ended);
            }
            Source::Tier(tier) => {
                let turned = self.paging.turn_tier(&mut self.ring, tier, more);
                self.or_halt(turned);
            }
            Source::Agent(generation) => self.receive_from_agent(generation, more),
            Source::Calls(id) => self.receive_calls(id, more),
            Source::Mapper { slot, generation } => self.receive_from_mapper(usize::from(slot), generation, more),
            Source::MapperExit(slot) => self.mapper_exits(slot as usize, more),
            Source::WorkerExit(slot) => self.worker_exits(slot as usize, more),
            Source::Wake => {
                self.inbox.wake().clear();
                while let Some(command) = self.inbox.next() {
                    self.obey(command);
                }
                if !more && let Err(error) = self.ring.poll_multishot(self.inbox.wake().as_fd(), Source::Wake.key()) {
                    self.halt(&format!("cannot wait for commands: {error}").into());
                }
            }
            Source::Exit => {
                let exited = self.link.has_exited(&mut self.ring, more);
                if self.or_halt(exited) == Some(true) {
                    self.end = Some(Notice::Exited);
                }
            }
        }
    }

    fn poll_uffd(&mut self, index: u32) {
        if let Err(error) = self.paging.poll_faults(&mut self.ring, index) {
            self.halt(&format!("cannot wait for faults: {error}").into());
        }
    }

    fn read_faults(&mut self, index: usize) {
        let mut faults = [Fault::default(); FAULTS_MAX];
        loop {
            let count = match self.paging.read_faults(index, &mut faults) {
                Ok(count) => count,
                Err(error) => {
                    tracing::debug!(vm = %self.name, "read faults: {error}");
                    return;
                }
            };
            self.fault_at = Instant::now();
            for fault in &faults[..count] {
                self.fault(fault);
            }
            if count < FAULTS_MAX {
                return;
            }
            let _ = self.ring.submit();
        }
    }

    /// Faults that came while something else was waited for.
    fn read_heard(&mut self) {
        while let Some(fault) = self.paging.next_heard() {
            self.fault_at = Instant::now();
            self.fault(&fault);
        }
    }

    fn fault(&mut self, fault: &Fault) {
        let Some(page) = self.paging.space().page_at(fault.addr) else { return };
        let access = if fault.write || fault.wp { Access::Write } else { Access::Read };
        let kind = if fault.wp { FaultKind::WriteProtected } else { FaultKind::Unmapped };
        let fault = Faulted { page, access, kind, thread: fault.tid };
        if self.mover.slowed().is_on()
            && self.paging.machine().is_first_write(page, access)
            && self.mover.slowed().take(fault, self.fault_at)
        {
            return;
        }
        self.answer(fault);
    }

    /// Writers that are slowed have waited.
    fn answer_slowed(&mut self) {
        if !self.mover.slowed().is_on() {
            return;
        }
        // Faults that come meanwhile are due later.
        let now = Instant::now();
        while let Some(fault) = self.mover.slowed().next_due(now) {
            self.fault_at = now;
            self.answer(fault);
        }
    }

    fn answer(&mut self, Faulted { page, access, kind, thread }: Faulted) {
        self.reporter.note_message(&self.paging);
        let served = self.step(Event::Fault { page, access, kind });
        self.settle();
        let Some(Served { cause, read_ahead }) = served else { return };
        if read_ahead {
            self.paging.note_hit(page.chunk());
        }
        self.follow.note(thread, read_ahead || SIGNS_OF_STREAM.contains(&cause), self.fault_at);
        if ANSWERED_AT_ONCE.contains(&cause) {
            self.reporter.note_latency(cause, self.fault_at.elapsed());
        }
    }

    /// Gives the machine an event and does what it asks for, until nothing is left to do at once.
    fn apply(&mut self, event: Event) {
        self.paging.push(event);
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(event) = self.paging.next_event() {
            self.step(event);
        }
    }

    /// One event, and what the machine asks for. Says what became of a fault. An engine that ends gives the machine none:
    /// its page table is as the pages are.
    fn step(&mut self, event: Event) -> Option<Served> {
        if self.end.is_some() {
            return None;
        }
        let mut actions = std::mem::take(&mut self.actions);
        let served = self.paging.apply(event, &mut actions);
        for action in actions.drain(..) {
            if !self.paging.is_halted() {
                let executed = self.execute(action);
                self.or_halt(executed);
            }
        }
        self.actions = actions;
        served
    }
}
