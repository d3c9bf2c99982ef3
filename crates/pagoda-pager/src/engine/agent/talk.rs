//! What is said to the agent and to the VMM's calls, and what they say.

use std::os::fd::AsFd;
use std::time::Instant;

use pagoda_abi::attach::{Packet, Range, Ranges};
use pagoda_core::fault::{Event, OpId};
use pagoda_core::units::{PAGE_SIZE, PageCount};
use pagoda_sys::socket::{Connection, Received, SocketError};

use super::{Asked, COLLAPSE_PIECE, Call, LINGER};
use crate::engine::{CALLS_MAX, Engine, EngineError, Source};
use crate::handle::Notice;

impl Engine {
    pub(in crate::engine) fn connect_agent(&mut self, connection: Connection) -> Result<(), EngineError> {
        self.drop_agent();
        let generation = self.agent.generation;
        self.ring.poll_multishot(connection.as_fd(), Source::Agent(generation).key())?;
        self.agent.connection = Some(connection);
        let unanswered: Vec<Asked> = self.agent.zaps.drain().map(|(_, asked)| asked).collect();
        for asked in unanswered {
            match asked {
                Asked::Chunks(op) => self.zap(op),
                pages if self.still_wanted(&pages) => self.zap_pages(pages),
                _ => {}
            }
        }
        if let Some(large) = self.agent.large_folios {
            self.tell_agent(&Packet::Folios { large });
        }
        Ok(())
    }

    pub(in crate::engine) fn allow_large_folios(&mut self, large: bool) {
        self.agent.large_folios = Some(large);
        self.tell_agent(&Packet::Folios { large });
    }

    fn drop_agent(&mut self) {
        if self.agent.connection.take().is_some() {
            let _ = self.ring.cancel_poll(Source::Agent(self.agent.generation).key());
        }
        self.agent.generation += 1;
        self.agent.clock_asked = false;
    }

    pub(in crate::engine) fn zap(&mut self, op: OpId) {
        let mut ranges = Ranges::default();
        for chunk in self.paging.machine().zap_chunks(op) {
            let place = self.paging.space().place_chunk(*chunk);
            ranges.push(Range { addr: place.addr, len: place.len });
        }
        let seq = self.next_seq();
        self.owes(seq, Asked::Chunks(op));
        self.page_ins_first();
        self.tell_agent(&Packet::Zap { seq, ranges });
    }

    pub(in crate::engine) fn next_seq(&mut self) -> u64 {
        self.agent.seq += 1;
        self.agent.seq
    }

    /// The agent is about to be asked for a zap.
    pub(in crate::engine) fn owes(&mut self, seq: u64, asked: Asked) {
        self.agent.zaps.insert(seq, asked);
    }

    /// Whether pages of the sample are on their way to the agent.
    pub(in crate::engine) fn is_unmapping_sample(&self) -> bool {
        self.agent.zaps.values().any(|asked| matches!(asked, Asked::Peek { .. }))
    }

    /// Asks the agent to look which direct I/O has completed.
    pub(in crate::engine) fn ask_clock(&mut self) {
        if !std::mem::replace(&mut self.agent.clock_asked, true) {
            self.agent.seq += 1;
            let seq = self.agent.seq;
            self.tell_agent(&Packet::Clock { seq });
        }
    }

    /// Asks for huge mappings. A wish: what cannot be collapsed stays as it is.
    pub(in crate::engine) fn collapse(&mut self) {
        if self.agent.large_folios == Some(false) {
            return;
        }
        let pieces: Vec<Range> = self
            .paging
            .space()
            .regions()
            .flat_map(|(_, region)| {
                let (addr, len) = (region.addr, region.ram.len());
                (0..len.div_ceil(COLLAPSE_PIECE)).map(move |piece| {
                    let at = piece * COLLAPSE_PIECE;
                    Range { addr: addr + at, len: COLLAPSE_PIECE.min(len - at) }
                })
            })
            .collect();
        for piece in pieces {
            let mut ranges = Ranges::default();
            ranges.push(piece);
            self.agent.seq += 1;
            let seq = self.agent.seq;
            self.tell_agent(&Packet::Collapse { seq, ranges });
        }
    }

    pub(in crate::engine) fn tell_agent(&mut self, packet: &Packet) {
        let Some(connection) = &self.agent.connection else { return };
        if let Err(error) = connection.send(packet, &[]) {
            tracing::debug!(vm = %self.name, "agent: {error}");
            self.drop_agent();
        }
    }

    /// The poll of the VMM's pidfd brought something. A poll may end for other reasons, such as a lack of memory, so the pidfd
    /// itself is asked: on its word the VM's files are removed.
    pub(in crate::engine) fn check_exit(&mut self, more: bool) {
        if pagoda_sys::process::has_ended(self.pidfd.as_fd()) {
            self.end = Some(Notice::Exited);
        } else if !more && let Err(error) = self.ring.poll_multishot(self.pidfd.as_fd(), Source::Exit.key()) {
            self.freeze(&format!("cannot wait for the end of the VMM: {error}").into());
        }
    }

    /// The VMM let its end of a connection go, or ended; [`Notice::Exited`] comes from the pidfd.
    fn is_ending(&self) -> bool {
        matches!(self.end, Some(Notice::Exited))
    }

    pub(in crate::engine) fn hear_agent(&mut self, generation: u32, more: bool) {
        if generation != self.agent.generation {
            return;
        }
        loop {
            let Some(connection) = &self.agent.connection else { return };
            match connection.try_recv() {
                Ok(Received::Message { packet, .. }) => self.agent_says(packet),
                Ok(Received::Nothing) => break,
                Ok(Received::Closed) => {
                    if !self.is_ending() {
                        tracing::info!(vm = %self.name, "the agent went away; its faults wait until it is back");
                    }
                    return self.drop_agent();
                }
                Err(error) => {
                    tracing::warn!(vm = %self.name, "agent: {error}");
                    return self.drop_agent();
                }
            }
        }
        if !more && let Some(connection) = &self.agent.connection {
            let again = self.ring.poll_multishot(connection.as_fd(), Source::Agent(generation).key());
            if let Err(error) = again {
                tracing::warn!(vm = %self.name, "agent: {error}");
                self.drop_agent();
            }
        }
    }

    fn agent_says(&mut self, packet: Packet) {
        match packet {
            Packet::Zapped { seq, epoch, errno } => {
                let Some(asked) = self.agent.zaps.remove(&seq) else { return };
                let done = errno == 0;
                if !done {
                    tracing::warn!(vm = %self.name, errno, "zap failed");
                }
                match asked {
                    Asked::Chunks(op) => self.apply(Event::ZapDone { op, epoch: done.then_some(epoch) }),
                    Asked::Watch { ticket, at } => self.watch_zapped(ticket, at, done),
                    Asked::Peek { round, pages, at } => self.peek_zapped(round, pages, at, done),
                    Asked::Age { pages, at } => self.ages_zapped(pages, at, done),
                }
            }
            Packet::Clocked { .. } => {
                self.agent.clock_asked = false;
                self.apply(Event::Tick);
            }
            Packet::Collapsed { errno, done, .. } => {
                tracing::debug!(vm = %self.name, errno, done, "collapsed");
            }
            Packet::Foreign { reason } => self.pin(format!("its memory is reachable by others ({reason:?})")),
            other => tracing::warn!(vm = %self.name, ?other, "the agent said something it should not"),
        }
    }

    pub(in crate::engine) fn connect_calls(&mut self, connection: Connection) {
        if self.calls.len() == CALLS_MAX {
            self.drop_calls(self.calls[0].id);
        }
        self.calls_made += 1;
        let id = self.calls_made;
        match self.ring.poll_multishot(connection.as_fd(), Source::Calls(id).key()) {
            Ok(()) => self.calls.push(Call { id, connection, is_under_way: false, discard: None, was_answered: false }),
            Err(error) => tracing::warn!(vm = %self.name, "calls: {error}"),
        }
    }

    /// Reads what the VMM's threads call. While a call is under way the next one stays in the socket: a VMM that does not
    /// wait for answers waits for room there, and costs the daemon no memory.
    pub(in crate::engine) fn hear_calls(&mut self, id: u32, more: bool) {
        loop {
            let Some(call) = self.calls.iter_mut().find(|call| call.id == id) else { return };
            if call.is_under_way {
                break;
            }
            call.was_answered = false;
            match call.connection.try_recv() {
                Ok(Received::Message { packet: Packet::Discard { seq, region, offset, len }, .. }) => {
                    self.discard(id, seq, region, offset, len);
                    if !self.another_call_comes(id) {
                        break;
                    }
                }
                Ok(Received::Message { packet: Packet::Foreign { reason }, .. }) => {
                    self.pin(format!("its memory is reachable by others ({reason:?})"));
                    self.begin_call(id);
                    self.pin_waiters.push(id);
                    self.release_pin_waiters();
                }
                Ok(Received::Message { packet, .. }) => {
                    tracing::warn!(vm = %self.name, ?packet, "the VMM called something it cannot");
                    return self.drop_calls(id);
                }
                Ok(Received::Nothing) => break,
                Ok(Received::Closed) => return self.drop_calls(id),
                Err(error) => {
                    tracing::warn!(vm = %self.name, "calls: {error}");
                    return self.drop_calls(id);
                }
            }
        }
        if !more
            && let Some(call) = self.calls.iter().find(|call| call.id == id)
            && self.ring.poll_multishot(call.connection.as_fd(), Source::Calls(id).key()).is_err()
        {
            self.drop_calls(id);
        }
    }

    /// After a call: whether the next one is there, or comes at once. A guest that inflates its balloon gives up page by page,
    /// and each would cost a wake-up. Ends when anything else is to be done: its completion also says if a call is left.
    fn another_call_comes(&mut self, id: u32) -> bool {
        let start = Instant::now();
        loop {
            let Some(call) = self.calls.iter().find(|call| call.id == id) else { return false };
            if call.is_under_way || self.ring.is_due() {
                return false;
            }
            if call.connection.is_readable() {
                return true;
            }
            if start.elapsed() > LINGER {
                return false;
            }
            std::thread::yield_now();
        }
    }

    fn discard(&mut self, id: u32, seq: u64, region: u32, offset: u64, len: u64) {
        let token = u64::from(id) << 32 | (seq & u64::from(u32::MAX));
        self.begin_call(id);
        match self.paging.space().page_in_region(region, offset, len) {
            Some(first) => {
                if let Some(call) = self.calls.iter_mut().find(|call| call.id == id) {
                    call.discard = Some(token);
                }
                self.apply(Event::Discard { token, first, count: PageCount(len / PAGE_SIZE) });
            }
            None => {
                tracing::warn!(vm = %self.name, region, offset, len, "discard of something that is not RAM");
                self.discard_done(token);
            }
        }
    }

    pub(in crate::engine) fn discard_done(&mut self, token: u64) {
        let (id, seq) = ((token >> 32) as u32, token & u64::from(u32::MAX));
        let sent = self.answer_call(id, &Packet::Discarded { seq });
        if let Err(error) = sent {
            let expected = matches!(error, SocketError::Closed);
            tracing::debug!(vm = %self.name, expected, "calls: {error}");
            self.drop_calls(id);
        }
    }

    /// Lets those go on who are about to give others access to RAM, once all of it is there and stays.
    pub(in crate::engine) fn release_pin_waiters(&mut self) {
        if self.paging.machine().is_armed() {
            return;
        }
        for id in std::mem::take(&mut self.pin_waiters) {
            let _ = self.answer_call(id, &Packet::Welcome { flags: 0 });
        }
    }

    fn begin_call(&mut self, id: u32) {
        if let Some(call) = self.calls.iter_mut().find(|call| call.id == id) {
            call.is_under_way = true;
        }
    }

    /// Ends a call, and has the next one read ([`Engine::hear_waiting_calls`]).
    fn answer_call(&mut self, id: u32, answer: &Packet) -> Result<(), SocketError> {
        let Some(call) = self.calls.iter_mut().find(|call| call.id == id) else { return Ok(()) };
        (call.is_under_way, call.discard, call.was_answered) = (false, None, true);
        call.connection.send(answer, &[])
    }

    /// Reads calls that came while others were under way, each connection once: faults come first.
    pub(in crate::engine) fn hear_waiting_calls(&mut self) {
        for _ in 0..self.calls.len() {
            let Some(id) = self.calls.iter().find(|call| call.was_answered).map(|call| call.id) else { return };
            self.hear_calls(id, true);
        }
    }

    fn drop_calls(&mut self, id: u32) {
        // Before the connection is closed: the guest may use the pages as soon as its shim knows that nobody answers.
        let discard = self.calls.iter().find(|call| call.id == id).and_then(|call| call.discard);
        if let Some(token) = discard {
            self.apply(Event::Abandon { token });
        }
        self.calls.retain(|call| call.id != id);
        self.pin_waiters.retain(|waiter| *waiter != id);
        let _ = self.ring.cancel_poll(Source::Calls(id).key());
    }
}
