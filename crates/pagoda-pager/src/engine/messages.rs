//! What is said to the engine beside faults: by the daemon, by the agent, and by the VMM's calls. Each message goes to the
//! owner of what it is about, or becomes an event.

use pagoda_abi::attach::{ForeignReason, Packet, Range, Ranges};
use pagoda_core::fault::{Event, OpId};
use pagoda_core::units::{PAGE_SIZE, PageCount};
use pagoda_sys::ring::RingError;
use pagoda_sys::socket::Connection;

use super::Engine;
use super::broken::Broken;
use super::link::agent::Asked;
use super::link::calls::{Calls, Heard};
use super::link::mappers::Zapped;
use crate::handle::{Command, Notice};

impl Engine {
    /// Does what the daemon wants.
    pub(super) fn obey(&mut self, command: Command) {
        match command {
            Command::SetLimit(limit) => self.set_limit(limit),
            Command::SetMin(min) => self.apply(Event::SetMin { min }),
            Command::Continue => self.apply(Event::Continue),
            Command::OwnAll => self.apply(Event::OwnAll),
            Command::Pin(reason) => self.pin(reason),
            Command::Agent(connection) => {
                if let Err(error) = self.connect_agent(connection) {
                    tracing::warn!(vm = %self.name, "agent: {error}");
                }
            }
            Command::Calls(connection) => self.connect_calls(connection),
            Command::Mapper(new) => self.add_mapper(new),
            Command::Sample(pages) => {
                let (sampler, mut context) = self.sampling();
                let started = sampler.start_sample(pages, &mut context);
                self.or_halt(started);
                self.settle();
                self.publish();
            }
            Command::WatchCurve(on) => {
                let (sampler, mut context) = self.sampling();
                sampler.watch_curve(on, &mut context);
            }
            Command::Gate { open, asker } => self.link.agent.ask_gate(&mut self.ring, open, asker),
            Command::LargeFolios(large) => self.link.agent.allow_large_folios(&mut self.ring, large),
            Command::LookAgain(pages) => pages.into_iter().for_each(|page| self.apply(Event::LookAgain { page })),
            Command::PrepareImage(prepared) => {
                self.imager.prepare(prepared, &mut self.paging);
                self.settle();
            }
            Command::FollowImages(on) => {
                self.imager.follow(on, &mut self.paging);
                self.settle();
            }
            // The next turn of the loop looks whether it can begin.
            Command::BeginImage(ticket) => self.imager.ask_to_begin(ticket),
            Command::CancelImage => {
                self.imager.cancel(&mut self.paging);
                self.settle();
            }
            Command::RemoveImage(image) => {
                self.imager.remove(image, &mut self.paging);
                self.settle();
            }
            Command::Move(on) => self.set_moving(on),
            Command::LearnHeat => self.apply(Event::LearnHeat),
            Command::LookForWrites(asker) => self.mover.ask_look(asker),
            Command::CopyOut(order) => self.mover.ask_copy(order),
            // Whoever asked may have gone.
            Command::AskOrder(asker) => drop(asker.send(self.paging.machine().chunk_order())),
            Command::AskContent(asker) => drop(asker.send(self.paging.machine().content())),
            Command::HurryMove(on) => self.mover.hurry(on),
            Command::SlowWriters { delay, threads } => self.mover.slow(delay, threads),
            Command::Arrived { found, asker } => self.arrive(found, asker),
            Command::Refresh => self.publish(),
            // Who hears that the VMM ended removes its files; who hears of the detaching keeps them.
            Command::Detach => {
                self.end.get_or_insert(Notice::Detached);
            }
        }
    }

    pub(super) fn pin(&mut self, reason: String) {
        self.reporter.note_pin(reason);
        self.apply(Event::Pin);
    }

    pub(super) fn pin_for(&mut self, reason: ForeignReason) {
        if reason == ForeignReason::UntrackedIo {
            // Before it is tried: what is moved would not be what the disk writes to.
            self.apply(Event::KeepBorrowed);
        }
        self.pin(format!("its memory is reachable by others ({reason:?})"));
    }

    /// Takes a new connection to the agent, which is asked again for what the one before has not answered.
    ///
    /// # Errors
    /// Of the ring; the VM has no agent then.
    pub(super) fn connect_agent(&mut self, connection: Connection) -> Result<(), RingError> {
        for asked in self.link.agent.connect(&mut self.ring, connection)? {
            let zapped = match asked {
                Asked::Chunks(op) => self.zap(op),
                pages if self.sampler.still_wants(&pages, &self.paging) => self.zap_pages(pages),
                _ => Ok(()),
            };
            self.or_halt(zapped);
        }
        self.link.agent.repeat_folios(&mut self.ring);
        self.repeat_move();
        Ok(())
    }

    /// Executes `Action::Zap`: asks the agent to unmap the operation's chunks.
    pub(super) fn zap(&mut self, op: OpId) -> Result<(), Broken> {
        let mut ranges = Ranges::default();
        for chunk in self.paging.machine().zap_chunks(op) {
            let location = self.paging.space().locate_chunk(*chunk);
            ranges.push(Range { addr: location.addr, len: location.len });
        }
        self.paging.submit_page_ins(&mut self.ring)?;
        self.link.agent.zap(&mut self.ring, ranges, Asked::Chunks(op));
        Ok(())
    }

    /// Has the agent unmap single pages.
    pub(super) fn zap_pages(&mut self, asked: Asked) -> Result<(), Broken> {
        let (sampler, mut context) = self.sampling();
        sampler.zap_pages(asked, &mut context)
    }

    pub(super) fn receive_from_agent(&mut self, generation: u32, more: bool) {
        let is_ending = self.end == Some(Notice::Exited);
        while let Some(packet) = self.link.agent.receive(&mut self.ring, generation, is_ending) {
            self.agent_says(packet);
        }
        if !more {
            self.link.agent.poll_again(&mut self.ring, generation);
        }
    }

    fn agent_says(&mut self, packet: Packet) {
        match packet {
            Packet::Zapped { seq, epoch, errno } => {
                let Some(asked) = self.link.agent.complete_zap(seq) else { return };
                let done = errno == 0;
                if !done {
                    tracing::warn!(vm = %self.name, errno, "zap failed");
                }
                self.zapped_in_vmm(Zapped { asked, done, epoch });
            }
            Packet::Clocked { .. } => {
                self.link.agent.complete_clock();
                self.apply(Event::Tick);
            }
            Packet::Collapsed { errno, done, .. } => {
                tracing::debug!(vm = %self.name, errno, done, "collapsed");
            }
            Packet::Foreign { reason } => self.pin_for(reason),
            Packet::Owned { order, errno } => self.owned(order, errno),
            Packet::Gated { seq, open } => self.link.agent.complete_gate(seq, open),
            other => tracing::warn!(vm = %self.name, ?other, "the agent said something it should not"),
        }
    }

    /// A zap has been done, in the VMM and wherever else it was to be.
    pub(super) fn zapped(&mut self, Zapped { asked, done, epoch }: Zapped) {
        match asked {
            Asked::Chunks(op) => self.apply(Event::ZapDone { op, epoch: done.then_some(epoch) }),
            Asked::Watch { ticket, at } => {
                self.sampler.note_zap(at);
                self.apply(Event::PagesZapped { ticket, done });
            }
            Asked::Peek { round, pages, at } => {
                self.sampler.note_zap(at);
                self.sampler.complete_peek(round, pages, done);
            }
            Asked::Age { pages, at } => {
                self.sampler.note_zap(at);
                self.sampler.complete_age(pages, done, &self.paging);
            }
        }
    }

    fn connect_calls(&mut self, connection: Connection) {
        if let Some(id) = self.link.calls.surplus() {
            self.close_calls(id);
        }
        self.link.calls.connect(&mut self.ring, connection);
    }

    /// Reads what the VMM's threads call on a connection, until a call has to wait for its answer or none comes.
    pub(super) fn receive_calls(&mut self, id: u32, more: bool) {
        loop {
            match self.link.calls.receive(id) {
                Heard::Discard { seq, region, offset, len } => {
                    self.discard(id, seq, region, offset, len);
                    if !self.link.calls.another_comes(&mut self.ring, id) {
                        break;
                    }
                }
                Heard::Foreign { reason: ForeignReason::RamFdLent } => {
                    self.link.calls.begin(id);
                    // What is borrowed of a snapshot is mapped in the VMM alone.
                    let is_known = !self.link.mappers.is_empty() && !self.paging.may_borrow();
                    self.link.calls.answer_lend(id, is_known);
                }
                Heard::Foreign { reason } => {
                    self.pin_for(reason);
                    self.link.calls.begin(id);
                    self.link.calls.wait_for_pin(id);
                    if !self.paging.machine().is_armed() {
                        self.link.calls.release_pin_waiters();
                    }
                }
                Heard::Nothing => break,
                Heard::Closed => return self.close_calls(id),
            }
        }
        if !more && !self.link.calls.poll_again(&mut self.ring, id) {
            self.close_calls(id);
        }
    }

    /// Reads calls that came while others were under way, each connection once: faults come first.
    pub(super) fn receive_waiting_calls(&mut self) {
        for _ in 0..self.link.calls.len() {
            let Some(id) = self.link.calls.next_answered() else { return };
            self.receive_calls(id, true);
        }
    }

    fn discard(&mut self, id: u32, seq: u64, region: u32, offset: u64, len: u64) {
        let token = Calls::token(id, seq);
        self.link.calls.begin(id);
        match self.paging.space().page_in_region(region, offset, len) {
            Some(first) => {
                self.link.calls.begin_discard(id, token);
                self.apply(Event::Discard { token, first, count: PageCount(len / PAGE_SIZE) });
            }
            None => {
                tracing::warn!(vm = %self.name, region, offset, len, "discard of something that is not RAM");
                self.link.calls.complete_discard(&mut self.ring, token);
            }
        }
    }

    fn close_calls(&mut self, id: u32) {
        // Before the connection is closed: the guest may use the pages as soon as its shim knows that nobody answers.
        if let Some(token) = self.link.calls.discard_of(id) {
            self.apply(Event::Abandon { token });
        }
        self.link.calls.close(&mut self.ring, id);
    }
}
