//! The thread of a move from this host: it has the machine that says who owns the VM, and does what that wants, in order.
//!
//! A note is written before anything that follows from it is done, on this thread. Nobody else lets the VM run or ends it while the
//! record has the operation, and nobody else sends for this attempt. What takes long and may be waited for by nobody (calls, the
//! stop of the VM, networks) has threads of its own, which say here what came of it.

mod arbiter;
mod disks;
mod tail;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode};
use pagoda_core::stats::Metric;
use pagoda_core::units::Bytes;
use pagoda_move::arrival::map_parts;
use pagoda_move::note::{Note, Owned};
use pagoda_move::owner::{Action, End, Source, SourceEvent};
use pagoda_move::rounds::{Settings, Slowing};
use pagoda_move::units::{ConnectionNo, Generation, Moment, RoundNo};
use pagoda_move::wire::limits::STATE_CHUNK_MAX;
use pagoda_move::wire::offer::Capabilities;
use pagoda_move::wire::{Control, PROTOCOL_VERSION};
use pagoda_pager::handle::Command;

use super::check::Offer;
use super::copying::{Copying, Extent, Turn};
use super::guest::Guest;
use super::input::Input;
use super::line::{Called, Line};
use super::mirror::Mirror;
use super::progress::{Ended, Progress};
use super::shown::{self, Stage};
use super::standing::Outcome;
use super::tail::Tail;
use crate::moves::arbiter::Said;
use crate::moves::capabilities::ours;
use crate::moves::channel::Connection;
use crate::moves::claims::Claim;
use crate::moves::notes::Notes;
use crate::moves::outgoing::Order;
use crate::qmp::QemuTime;
use crate::registry::Registry;

/// Inputs that are taken before the rounds go on.
const INPUTS_AT_A_TIME: usize = 256;
/// How often what users see is made anew, and it is looked whether QEMU lives.
const SHOW_EVERY: Duration = Duration::from_millis(100);
/// How long a clone's memory may take to become its own: some 1,000 chunks a second.
const OWN_MAX: Duration = Duration::from_secs(60);

/// What a move is begun with.
pub struct Begun {
    pub owner: Source,
    pub stage: Stage,
    pub called: Called,
    pub guest: Guest,
    pub notes: Notes,
    /// What its note told of before. None for one of an earlier daemon.
    pub owned: Option<Owned>,
    /// None for one of an earlier daemon.
    pub offer: Option<(Offer, Settings)>,
    pub progress: Arc<Mutex<Progress>>,
    /// Who waits until the destination has room for it.
    pub answer: Option<Sender<Result<(), ApiError>>>,
    pub own: Sender<Input>,
    pub inputs: Receiver<Input>,
}

/// One move of a VM from this host, as its thread has it.
pub struct Driver {
    registry: Arc<Registry>,
    begun: Begun,
    began: Instant,
    line: Option<Line>,
    connections: u32,
    /// What both hosts can do, once the destination has said so.
    agreed: Capabilities,
    said: Said,
    is_over: Arc<AtomicBool>,
    /// The claim on the VM's note, until the move is over.
    claim: Option<Claim>,
    copying: Option<Copying>,
    /// Its disks, until it runs there or stays here.
    mirror: Option<Mirror>,
    /// The VM's remote tier is handed over, and the destination gets its map.
    hands_over: bool,
    /// Once the VM runs at its destination and lacks pages there, or may.
    tail: Option<Tail>,
    wait_until: Option<Moment>,
    /// QEMU's device state, once it is saved.
    state: Option<Vec<u8>>,
    still_since: Option<QemuTime>,
    downtime: Option<Duration>,
    shown: Option<Instant>,
    /// When the destination was heard of, or was reminded.
    heard: Instant,
    /// Why there is no connection.
    unreachable: Option<String>,
    /// Why it is given up: the first reason counts.
    why: Option<(ErrorCode, String)>,
}

/// Before the first connection of this daemon's. A destination takes nothing from a connection whose number is smaller than one that it
/// knows, and how many there were before a restart is not noted. It was less than one a second.
fn first_connection(stage: Stage) -> u32 {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    if stage == Stage::Granted { seconds as u32 } else { 0 }
}

impl Driver {
    pub fn new(registry: &Arc<Registry>, begun: Begun, claim: Claim) -> Driver {
        let connections = first_connection(begun.stage);
        Driver {
            registry: Arc::clone(registry),
            begun,
            began: Instant::now(),
            line: None,
            connections,
            agreed: Capabilities::default(),
            said: None,
            is_over: Arc::default(),
            claim: Some(claim),
            copying: None,
            mirror: None,
            hands_over: false,
            tail: None,
            wait_until: None,
            state: None,
            still_since: None,
            downtime: None,
            shown: None,
            heard: Instant::now(),
            unreachable: None,
            why: None,
        }
    }

    /// Works until the attempt is over. Without a first connection the destination is called.
    pub fn run(mut self, first: Option<Connection>, actions: Vec<Action>) {
        self.execute(actions);
        match first {
            Some(connection) => self.connected(connection),
            None => self.call(),
        }
        while !self.begun.owner.is_over() {
            let wait = self.next_at().since(self.now());
            match self.begun.inputs.recv_timeout(wait) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("it has a sender itself"),
            }
            for _ in 1..INPUTS_AT_A_TIME {
                let Ok(input) = self.begun.inputs.try_recv() else { break };
                self.take(input);
            }
            self.look();
            self.event(SourceEvent::Tick);
            self.pump();
            self.slow_writers();
        }
    }

    /// As the rounds want it. Without rounds nobody is slowed.
    fn slow_writers(&mut self) {
        let slowing = self.copying.as_ref().map_or(Slowing::NONE, |copying| copying.slowing(self.now()));
        self.begun.guest.slow(slowing);
    }

    fn now(&self) -> Moment {
        Moment(self.began.elapsed())
    }

    fn next_at(&self) -> Moment {
        let now = self.now();
        let next = self.begun.owner.next_at(now);
        let next = self.wait_until.map_or(next, |until| next.min(until));
        match self.begun.stage {
            Stage::Owning(_) | Stage::Mirroring => next.min(now + SHOW_EVERY),
            _ => next,
        }
    }

    fn take(&mut self, input: Input) {
        if self.begun.owner.is_over() {
            return;
        }
        match input {
            Input::Connected(connection) => self.connected(connection),
            Input::Unreachable(error) if crate::hosts::is_distrust(&error) && !self.begun.owner.is_granted() => {
                self.cancel("its destination does not trust this host any more");
            }
            Input::Unreachable(error) => self.unreachable = Some(in_full(&error)),
            Input::LinkDown(no, why) if self.is_current(no) => self.lost(why),
            Input::Received(no, message, permit) if self.is_current(no) => {
                self.receive(&message);
                drop(permit);
            }
            Input::LinkDown(..) | Input::Received(..) => {}
            Input::Copied(no, copied) => self.copied(no, copied, false),
            Input::Demanded(no, copied) => self.copied(no, copied, true),
            Input::Sent { connection, gone } => {
                if let Some(copying) = &mut self.copying {
                    copying.sent(connection, gone);
                }
            }
            Input::Disks(Ok(())) if self.begun.stage == Stage::Mirroring => self.own_all(),
            Input::Disks(Ok(())) => {}
            Input::Disks(Err(why)) => self.give_up(why),
            Input::Stopped(outcome) => self.stopped(outcome),
            Input::Arbiter(answer) => self.arbiter_answers(answer),
            Input::Order(Order::Cancel) => self.cancel("its user has cancelled it"),
            // What was said last is sent before the streams end.
            Input::Order(Order::Untrusted) if !self.begun.owner.is_granted() => {
                self.cancel("its destination is not trusted any more");
            }
            Input::Order(Order::Untrusted) if self.line.is_some() => {
                self.lost("this host does not trust it any more".to_owned());
            }
            Input::Order(Order::Untrusted) => {}
            Input::Order(Order::Resolve) => {
                tracing::warn!(vm = %self.begun.called.vm, "an operator says that the destination of its move is gone for good");
                self.event(SourceEvent::Resolve);
            }
        }
    }

    /// After the grant the destination is asked for the VM.
    fn cancel(&mut self, why: &str) {
        if !self.begun.owner.is_granted() {
            self.note_why(ErrorCode::GivenUp, why.to_owned());
        }
        self.event(SourceEvent::Cancel);
    }

    fn is_current(&self, no: ConnectionNo) -> bool {
        self.line.as_ref().is_some_and(|line| line.no == no)
    }

    fn call(&mut self) {
        let over = Arc::clone(&self.is_over);
        if let Err(error) = self.begun.called.begin(self.begun.own.clone(), over) {
            // Without a connection it is given up in time, or waits for its user.
            self.unreachable = Some(format!("start a thread: {error}"));
        }
    }

    fn connected(&mut self, connection: Connection) {
        let Some(no) = self.connections.checked_add(1) else { return };
        self.connections = no;
        let attempt = self.begun.owner.offered().attempt;
        let round = self.copying.as_ref().map(Copying::round).unwrap_or_default();
        match Line::open(ConnectionNo(no), connection, attempt, round, &self.begun.own) {
            Ok(line) => {
                self.line = Some(line);
                self.let_compress();
                self.unreachable = None;
                self.greet();
                self.event(SourceEvent::LinkUp);
            }
            Err(error) => {
                self.unreachable = Some(in_full(error.as_ref()));
                self.call();
            }
        }
    }

    fn lost(&mut self, why: String) {
        tracing::info!(vm = %self.begun.called.vm, "the connection of its move is lost: {why}");
        if let Some(line) = self.line.take() {
            line.cut();
        }
        self.unreachable = Some(why);
        if let Some(copying) = &mut self.copying {
            copying.lost_link();
        }
        if let Some(tail) = &mut self.tail {
            tail.lost_link();
        }
        self.event(SourceEvent::LinkDown);
        self.lost_disks();
        if !self.begun.owner.is_over() {
            self.call();
        }
    }

    /// Pages may be compressed, if the destination has said that it unpacks them.
    fn let_compress(&self) {
        if let Some(line) = self.line.as_ref().filter(|_| self.agreed.has(Capabilities::LZ4)) {
            let cap = self.begun.offer.as_ref().and_then(|(_, settings)| settings.bandwidth_max);
            line.let_compress(cap, self.agreed.has(Capabilities::ZSTD));
        }
    }

    /// What is said first on a connection.
    pub(super) fn greet(&self) {
        let (Some(line), offered) = (&self.line, self.begun.owner.offered()) else { return };
        let attempt = offered.attempt;
        let message = match (self.begun.stage, &self.begun.offer) {
            (Stage::Greeting, Some((offer, _))) => {
                Control::Hello(offer.hello(attempt, line.no, Generation(offered.generation.0 - 1)))
            }
            (Stage::Reserving, Some(_)) => return self.reserve(),
            (Stage::Mirroring | Stage::Owning(_) | Stage::Copying, _) => {
                Control::Resume { attempt, connection: line.no }
            }
            (Stage::Greeting | Stage::Reserving | Stage::Granted, _) => return,
        };
        line.send(&message);
    }

    fn reserve(&self) {
        let Some((offer, _)) = &self.begun.offer else { return };
        let attempt = self.begun.owner.offered().attempt;
        self.send(&Control::Reserve { attempt, room: offer.room, specification: offer.specification.clone() });
    }

    /// What is lost with the connection is sent again when there is another.
    fn send(&self, message: &Control) {
        if let Some(line) = &self.line {
            line.send(message);
        }
    }

    fn receive(&mut self, message: &Control) {
        let offered = self.begun.owner.offered();
        if message.attempt() != offered.attempt {
            return;
        }
        self.heard = Instant::now();
        match message {
            Control::Welcome(welcome) if self.begun.stage == Stage::Greeting => {
                let register = self.begun.offer.as_ref().and_then(|(offer, _)| offer.register);
                if welcome.protocol != PROTOCOL_VERSION || !ours(register).has(welcome.capabilities) {
                    return self.give_up("the destination wants what this host has not offered".to_owned());
                }
                self.agreed = welcome.capabilities;
                self.let_compress();
                self.agree_on_arbiter(register);
                self.begun.stage = Stage::Reserving;
                self.reserve();
            }
            Control::Reserved { .. } if self.begun.stage == Stage::Reserving => self.offer(),
            Control::RoundKept { round, .. } => {
                let now = self.now();
                let has_all = self.copying.as_mut().is_some_and(|copying| copying.kept(*round, now));
                if has_all {
                    self.event(SourceEvent::Complete);
                }
            }
            Control::Started { generation, .. } if *generation == offered.generation && self.downtime.is_none() => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
                self.downtime = self.still_since.map(|since| Duration::from_micros(QemuTime(now).us_since(since)));
            }
            Control::Refuse { reasons, .. } => {
                let told = |reason: &pagoda_move::wire::offer::Reason| format!("{} ({})", reason.what, reason.remedy);
                let told: Vec<String> = reasons.iter().map(told).collect();
                self.note_why(ErrorCode::Refused, format!("{} refuses: {}", self.to(), told.join("; ")));
            }
            Control::NoRoom { needed, free, .. } => {
                let why = format!(
                    "{} has no room: {} of DRAM and {} of swap are needed, {} and {} are free",
                    self.to(),
                    shown::size(needed.dram),
                    shown::size(needed.swap),
                    shown::size(free.dram),
                    shown::size(free.swap)
                );
                self.note_why(ErrorCode::NoRoom, why);
            }
            Control::Missing { part, .. } if self.tail.is_some() || self.begun.owner.is_granted() => {
                if let Err(error) = self.take_map(part) {
                    return self.lost(in_full(error.as_ref()));
                }
            }
            Control::Demand { runs, .. } => {
                if let Some(tail) = &mut self.tail {
                    tail.demand(runs);
                }
            }
            Control::Kept { runs, .. } => {
                if let Some(tail) = &mut self.tail {
                    tail.kept(runs);
                }
            }
            Control::Forgotten { .. } if !self.begun.owner.is_granted() => {
                self.note_why(ErrorCode::GivenUp, format!("{} knows nothing of it any more", self.to()));
            }
            _ => {}
        }
        self.event(SourceEvent::Message(message));
    }

    fn to(&self) -> String {
        self.shown().to.clone()
    }

    fn shown(&self) -> std::sync::MutexGuard<'_, Progress> {
        self.begun.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the destination may come to have all of the VM: the note tells of that, and of nobody else.
    fn offer(&mut self) {
        let note = Note::Owned(Owned::Offered(self.begun.owner.offered()));
        match self.begun.notes.write(&self.begun.called.vm, Some(note)) {
            Ok(()) => self.copy_disks(),
            Err(error) => self.give_up(format!("note whom it is offered to: {}", in_full(error.as_ref()))),
        }
    }

    /// The note of a VM that stays, once the machine has said its last word: a destination that was not sent the VM's state cannot run it.
    fn note_stay(&self) {
        let note = match (self.begun.guest.is_here(), self.begun.owned) {
            // It has ended, and the next VM of its name is another one.
            (false, _) => None,
            (true, Some(owned)) if self.state.is_none() && self.begun.stage != Stage::Greeting => {
                Some(Note::Owned(owned))
            }
            (true, _) => return,
        };
        if let Err(error) = self.begun.notes.write(&self.begun.called.vm, note) {
            tracing::warn!(vm = %self.begun.called.vm, "note that it stays: {}", in_full(error.as_ref()));
        }
    }

    /// What the VM borrows of a snapshot's template is copied by nobody.
    fn own_all(&mut self) {
        if let Some(engine) = self.begun.guest.engine() {
            engine.send(Command::OwnAll);
        }
        self.begun.stage = Stage::Owning(Instant::now() + OWN_MAX);
        self.begin_rounds();
    }

    /// Begins the rounds, as soon as all memory is the VM's own.
    fn begin_rounds(&mut self) {
        let Stage::Owning(until) = self.begun.stage else { return };
        let (Some(engine), Some((offer, settings))) = (self.begun.guest.engine(), &self.begun.offer) else {
            return self.give_up("the VM has ended".to_owned());
        };
        if engine.fresh_status().stats.get(Metric::BorrowedChunks) > 0 {
            if Instant::now() > until {
                self.give_up("what it shares with other clones did not become its own in time".to_owned());
            }
            return;
        }
        let (no, own) = (ConnectionNo(self.connections), &self.begun.own);
        let (pages, dram) = (offer.pages(), offer.room.dram.pages_floor());
        let extent = Extent { pages, dram, is_split: offer.is_split };
        self.hands_over = match self.begun.guest.hold_tier() {
            Ok(hands_over) => hands_over,
            Err(error) => return self.give_up(in_full(error.as_ref())),
        };
        let settings = self.behind_disks(*settings);
        match Copying::begin(&engine, settings, extent, no, own, self.now()) {
            Ok(copying) => {
                self.copying = Some(copying);
                self.begun.stage = Stage::Copying;
                self.answer(Ok(()));
            }
            Err(error) => self.give_up(in_full(error.as_ref())),
        }
    }

    /// Whoever has asked for the move hears how it begins.
    fn answer(&mut self, answer: Result<(), ApiError>) {
        if let Some(asker) = self.begun.answer.take() {
            let _ = asker.send(answer);
        }
    }

    /// Looks from time to time at what nobody reports.
    fn look(&mut self) {
        if self.shown.is_some_and(|shown| shown.elapsed() < SHOW_EVERY) || self.begun.owner.is_over() {
            return;
        }
        self.shown = Some(Instant::now());
        if !self.begun.guest.is_here() {
            self.note_why(ErrorCode::GivenUp, "its QEMU has ended".to_owned());
            self.event(SourceEvent::QemuDied);
        }
        self.look_at_time();
        self.begin_rounds();
        self.remind();
        self.show();
    }

    fn pump(&mut self) {
        let now = self.now();
        self.wait_until = None;
        self.pump_tail();
        if self.begun.owner.is_granted() || self.begun.owner.is_over() {
            return;
        }
        let (Some(copying), Some(line)) = (&mut self.copying, &self.line) else { return };
        match copying.pump(line, now) {
            Turn::Wait(until) => self.wait_until = until,
            Turn::Switch => self.event(SourceEvent::Switch),
            Turn::SendState(round) => self.send_state(round),
            Turn::GiveUp(why) => self.give_up(why),
        }
    }

    fn stopped(&mut self, outcome: Outcome) {
        self.begun.guest.stopped(&outcome);
        let (state, was_running, since) = match outcome {
            Outcome::Saved { state, was_running, since } => (state, was_running, since),
            Outcome::Failed { why, .. } => return self.give_up(why),
        };
        if was_running != self.begun.guest.runs() {
            return self.give_up("it was paused or let run meanwhile".to_owned());
        }
        let now = self.now();
        tracing::debug!(vm = %self.begun.called.vm, "pause: its state is saved");
        match self.copying.as_mut().map(|copying| copying.stopped(now)) {
            Some(Ok(())) => {
                tracing::debug!(vm = %self.begun.called.vm, "pause: its last pages are known");
                (self.state, self.still_since) = (Some(state), since);
                self.event(SourceEvent::Stopped);
            }
            Some(Err(error)) => self.give_up(in_full(error.as_ref())),
            None => self.give_up("nothing of it was copied".to_owned()),
        }
    }

    /// The map of what is missing and QEMU's state. With the rounds until this one it is all that the VM needs.
    fn send_state(&mut self, round: RoundNo) {
        let attempt = self.begun.owner.offered().attempt;
        let (Some(state), Some(copying)) = (&self.state, &self.copying) else { return };
        for part in map_parts(copying.missing()) {
            self.send(&Control::Missing { attempt, part });
        }
        if self.hands_over {
            self.begun.guest.name_pages_of_tier();
            for part in map_parts(copying.handed_over()) {
                self.send(&Control::RemoteMap { attempt, part });
            }
        }
        let mut offset = 0;
        for part in state.chunks(STATE_CHUNK_MAX) {
            self.send(&Control::State { attempt, offset: Bytes(offset), bytes: part.to_vec() });
            offset += part.len() as u64;
        }
        self.send(&Control::StateEnd { attempt, total: Bytes(offset), round });
        tracing::debug!(vm = %self.begun.called.vm, state = offset, "pause: its last pages and its state are on their way");
        let missing = copying.missing().clone();
        if !missing.is_empty() {
            self.begin_tail(Some(missing));
        }
    }

    fn note_why(&mut self, code: ErrorCode, why: String) {
        self.why.get_or_insert((code, why));
    }

    /// Before the grant. Afterwards nothing fails here that the machine does not know of.
    fn give_up(&mut self, why: String) {
        if self.begun.owner.is_granted() {
            return tracing::warn!(vm = %self.begun.called.vm, "its move goes on: {why}");
        }
        self.note_why(ErrorCode::GivenUp, why);
        self.event(SourceEvent::Cancel);
    }

    fn event(&mut self, event: SourceEvent<'_>) {
        let (now, mut actions) = (self.now(), Vec::new());
        self.begun.owner.apply(now, event, &mut actions);
        self.execute(actions);
    }

    /// Does what the machine wants, in order. What it wants because a note was written comes behind that.
    fn execute(&mut self, actions: Vec<Action>) {
        let mut wanted = VecDeque::from(actions);
        while let Some(action) = wanted.pop_front() {
            match action {
                Action::Send(message) => self.send(&message),
                Action::Write(note) => {
                    let (is_written, mut more) = (self.write(note), Vec::new());
                    self.begun.owner.apply(self.now(), SourceEvent::Written(is_written), &mut more);
                    wanted.extend(more);
                }
                Action::Stop => {
                    tracing::debug!(vm = %self.begun.called.vm, "pause: it is to stop");
                    if let Err(error) = self.stop() {
                        let failed = Outcome::Failed { why: in_full(error.as_ref()), is_left: false };
                        let _ = self.begun.own.send(Input::Stopped(failed));
                    }
                }
                Action::Run => self.let_run(),
                Action::Discard => {
                    self.show();
                    (self.copying, self.tail, self.mirror) = (None, None, None);
                    self.begun.guest.discard();
                }
                Action::Ask(claim) => self.ask_arbiter(claim),
                Action::Unregister(register, attempt) => self.registry.moves.arbiter.remove(register, attempt),
                Action::Prepare => unreachable!("a source prepares nothing"),
                Action::End(end) => self.end(end),
            }
        }
    }

    /// Whether the note is durable. The VM is given away only if it has stood still since its state.
    fn write(&mut self, note: Option<Note>) -> bool {
        let vm = self.begun.called.vm.clone();
        if let Some(Note::Given(..)) = note
            && let Err(error) = self.begun.guest.check_still()
        {
            let why = in_full(error.as_ref());
            self.note_why(ErrorCode::GivenUp, why.clone());
            tracing::warn!(%vm, "it is not given away: {why}");
            return false;
        }
        let written = self.begun.notes.write(&vm, note);
        if let Err(error) = &written {
            let why = format!("note who owns it: {}", in_full(error.as_ref()));
            tracing::error!(%vm, "{why}");
            self.note_why(ErrorCode::GivenUp, why);
        }
        tracing::debug!(%vm, ?note, "who owns it is noted");
        written.is_ok()
    }

    /// The machine says that the VM is this host's. If it does not run at once, the end of the move waits for that.
    fn let_run(&mut self) {
        (self.copying, self.tail) = (None, None);
        self.slow_writers();
        if let Some(mirror) = &self.mirror {
            mirror.cut();
        }
        while self.begun.guest.is_stopping() {
            // A state that is being saved cannot be called back. It has a deadline.
            match self.begun.inputs.recv() {
                Ok(Input::Stopped(outcome)) => self.begun.guest.stopped(&outcome),
                Ok(_) => {}
                Err(_) => unreachable!("it has a sender itself"),
            }
        }
        self.begun.guest.let_run();
        // The guest does not wait for that.
        self.mirror = None;
    }

    fn end(&mut self, end: End) {
        self.is_over.store(true, Ordering::Relaxed);
        self.show();
        self.mirror = None;
        let vm = self.begun.called.vm.clone();
        let (code, why) = self.why.take().unwrap_or((ErrorCode::GivenUp, shown::reason_of(end).to_owned()));
        match end {
            End::Moved => {
                let files = self.shown().disk_files.join(", ");
                tracing::info!(%vm, downtime = ?self.downtime, files, "it has moved to {}", self.to());
            }
            other => tracing::warn!(%vm, "it has not moved to {}: {other:?}: {why}", self.to()),
        }
        if matches!(end, End::GivenUp | End::CameBack | End::Crashed) {
            self.begun.guest.stay();
            self.note_stay();
        }
        // Its QEMU may have died here while the note that gives it away was written. It has not crashed: it runs there.
        if end == End::Moved
            && let Err(error) = self.registry.crashes.remove(&vm)
        {
            tracing::warn!(%vm, "remove the note that it has crashed: {error}");
        }
        self.show();
        self.shown().phase = "over";
        let to = self.to();
        self.answer(Err(ApiError::new(code, format!("{vm} has not moved to {to}: {why}"), None)));
        let progress = self.shown().clone();
        let why = (end != End::Moved).then_some(why);
        // Its note has its last word.
        drop(self.claim.take());
        self.registry.moves.outgoing.end(Ended { progress, end, why, at: SystemTime::now() });
    }

    /// Makes what users see anew.
    fn show(&self) {
        let rounds = self.copying.as_ref().map(|copying| copying.progress(self.now()));
        let phase = match &self.begun.owner {
            owner if owner.serves() && self.tail.is_some() => "postcopy",
            owner if owner.is_theirs() => "moved",
            owner if owner.is_granted() => "granted",
            _ => shown::phase(self.begun.stage, rounds.as_ref()),
        };
        let mut shown = self.shown();
        (shown.phase, shown.elapsed, shown.downtime) = (phase, self.began.elapsed(), self.downtime);
        let placed = self.copying.as_ref().map(Copying::placed);
        shown::update(&mut shown, rounds.as_ref(), placed, self.unreachable.as_deref());
        shown.disks = self.mirror.as_ref().map_or(shown.disks, Mirror::copied);
        shown.arbiter = Some(self.shown_arbiter(&shown.to));
        self.show_tail(&mut shown, rounds.map_or(Bytes::ZERO, |rounds| rounds.sent));
    }
}
