//! The thread of one attempt to move a VM here: it has the machine that says who owns the VM, and does what that wants.

mod arbiter;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use pagoda_api::in_full;
use pagoda_core::policy::VmId;
use pagoda_move::note::Note;
use pagoda_move::owner::{Action, Destination, DestinationEvent, End};
use pagoda_move::units::{AttemptId, Moment};
use pagoda_move::wire::offer::{Reason, ReasonKind};
use pagoda_move::wire::{Control, Malformed};

use super::tail::Tail;
use super::vm::{self, Wanted};
use crate::moves::Moves;
use crate::moves::arbiter::Answers;
use crate::moves::channel::ControlSender;
use crate::moves::claims::Claim;
use crate::moves::sessions::{Arriving, INPUTS_MAX, Input, LinkNo, Progress};
use crate::moves::store::Store;
use crate::registry::Registry;

/// How long a session may be without a link before it calls the other host itself. Its source does that first.
const CALL_AFTER: Duration = Duration::from_secs(5);

/// How long a stream is kept for the last word.
const LINGER: Duration = Duration::from_secs(1);

/// One attempt of another host to move a VM here.
pub struct Session {
    registry: Arc<Registry>,
    vm: String,
    attempt: AttemptId,
    owner: Destination,
    wanted: Option<Wanted>,
    inputs: Receiver<Input>,
    /// By this, threads of the session say what came of their work.
    own: SyncSender<Input>,
    link: Option<(LinkNo, Arc<ControlSender>)>,
    progress: Arc<Mutex<Progress>>,
    call: Call,
    /// The VM, once there is one.
    id: Option<VmId>,
    /// The process id of its QEMU.
    pid: Option<u32>,
    /// The claim on the VM's note, until the attempt is over.
    claim: Option<Claim>,
    began: Instant,
    arriving: Option<Arriving>,
    /// The VM runs here, or is about to, without all its pages.
    tail: Option<Tail>,
    is_loaded: bool,
    /// It is being let run for the first time.
    is_starting: bool,
    /// A daemon before this one has made the VM.
    is_recovered: bool,
    is_dead: bool,
    /// When the link was lost, or the other host was called last.
    called: Instant,
    is_calling: Arc<AtomicBool>,
    answers: Answers,
}

/// Calls the other host, and gives the session what it says until the stream ends.
pub type Call = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// What a session is begun with.
pub struct Begun {
    pub owner: Destination,
    /// What is to be made; nothing if a daemon before this one made it, or if there is nothing to be made.
    pub wanted: Option<Wanted>,
    /// The VM, if a daemon before this one made it. Never looked up by its name for a new attempt: a user may have made one since.
    pub made: Option<VmId>,
    /// What a VM lacks that an earlier daemon has let run.
    pub tail: Option<Tail>,
    pub link: Option<(LinkNo, Arc<ControlSender>)>,
    pub progress: Arc<Mutex<Progress>>,
    pub call: Call,
    /// The claim on the VM's note.
    pub claim: Claim,
}

/// The moment, by a clock that begins with the session.
fn moment(began: Instant) -> Moment {
    Moment(began.elapsed())
}

impl Session {
    pub fn new(
        registry: &Arc<Registry>,
        vm: &str,
        begun: Begun,
        (own, inputs): (SyncSender<Input>, Receiver<Input>),
    ) -> Session {
        let Begun { owner, wanted, made, tail, link, progress, call, claim } = begun;
        let pid_of = |id| registry.find_by_id(id, |vm| vm.record.pid.0);
        Session {
            pid: made.and_then(pid_of),
            registry: Arc::clone(registry),
            vm: vm.to_owned(),
            attempt: owner.offered().attempt,
            owner,
            wanted,
            inputs,
            own,
            link,
            progress,
            call,
            id: made,
            claim: Some(claim),
            began: Instant::now(),
            arriving: None,
            tail,
            is_loaded: false,
            is_starting: false,
            is_recovered: made.is_some(),
            is_dead: false,
            called: Instant::now(),
            is_calling: Arc::default(),
            answers: Answers::default(),
        }
    }

    /// Works until the attempt is over.
    pub fn run(mut self, first: Vec<Action>) {
        self.execute(first);
        while !self.owner.is_over() {
            let now = moment(self.began);
            let wait = self.owner.next_at(now).since(now);
            match self.inputs.recv_timeout(wait) {
                Ok(input) => self.take(input),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("it has a sender itself"),
            }
            for _ in 1..INPUTS_MAX {
                let Ok(input) = self.inputs.try_recv() else { break };
                self.take(input);
            }
            self.hear_arbiter();
            self.look_at_qemu();
            self.call_if_lonely();
            self.tell_of_tail();
            self.apply(DestinationEvent::Tick);
        }
        self.registry.moves.sessions.leave(self.attempt);
        drop(self.claim.take());
        // Who ended the VM meanwhile has left its note to whoever had the claim.
        if !self.registry.lock().contains_key(&self.vm) {
            self.registry.moves.forget(&self.vm);
        }
        if let Some((_, link)) = self.link.take() {
            // What was said last is on its way.
            std::thread::sleep(LINGER);
            link.cut();
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::LinkUp(number, link) => {
                if let Some((_, before)) = self.link.replace((number, link)) {
                    before.cut();
                }
                self.apply(DestinationEvent::LinkUp);
            }
            Input::Called(_, link) if self.link.is_some() => link.cut(),
            Input::Called(number, link) => {
                self.link = Some((number, link));
                self.apply(DestinationEvent::LinkUp);
            }
            Input::LinkDown(number) => {
                if self.link.take_if(|(current, _)| *current == number).is_some() {
                    self.called = Instant::now();
                    self.apply(DestinationEvent::LinkDown);
                }
            }
            Input::Message(number, message) => self.hear(number, &message),
            Input::RoundKept(round) => {
                self.show(|progress| progress.rounds = round.0 + 1);
                self.send(&Control::RoundKept { attempt: self.attempt, round });
                self.load_if_all_is_here();
            }
            Input::Prepared(prepared) => self.prepared(prepared.map(|arriving| *arriving)),
            Input::Stored(chunk, pages) => {
                if let Some(tail) = &mut self.tail {
                    tail.stored(chunk, pages);
                }
            }
            Input::Loaded(loaded) => self.loaded(loaded),
            Input::Whole => self.apply(DestinationEvent::Whole),
            // A page that cannot be stored is sent again, by the next connection.
            Input::Failed(why) if self.owner.is_running() => {
                tracing::warn!(vm = %self.vm, "pages of it that are still to come: {why}");
                self.show(|progress| progress.why = Some(why));
            }
            Input::Failed(why) => self.fail(why),
            Input::StreamEnded if self.tail.is_some() => self.cut(),
            Input::StreamEnded | Input::Tail | Input::Arbiter => {}
            // What an earlier daemon has done of it nobody knows.
            Input::LetRun(false) if !self.is_recovered => self.apply(DestinationEvent::NeverRan),
            Input::LetRun(_) => {
                self.is_starting = false;
                let generation = self.owner.offered().generation;
                if self.owner.is_running() {
                    self.send(&Control::Started { attempt: self.attempt, generation });
                }
                if let Err(error) = self.registry.moves.copies.keep(&self.vm) {
                    // Its own note says the same.
                    tracing::warn!(vm = %self.vm, "note that its disks are its own: {}", in_full(error.as_ref()));
                }
            }
            Input::Resolve => self.apply(DestinationEvent::Resolve),
            Input::Cancel(why) if self.owner.is_before_grant() => self.fail(why),
            Input::Cancel(why) => {
                tracing::warn!(vm = %self.vm, "its move to this host goes on, for it was granted: {why}")
            }
            Input::Cut => self.cut(),
        }
    }

    fn prepared(&mut self, prepared: Result<Arriving, String>) {
        match prepared {
            Ok(arriving) => {
                self.registry.moves.sessions.set_places(self.attempt, &arriving);
                self.id = Some(arriving.id);
                self.pid = self.registry.find_by_id(arriving.id, |vm| vm.record.pid.0);
                self.arriving = Some(arriving);
                self.show(|progress| progress.phase = "copying");
                self.apply(DestinationEvent::Prepared);
            }
            Err(why) => {
                self.refuse(why);
                self.apply(DestinationEvent::CannotPrepare);
            }
        }
    }

    fn hear(&mut self, number: LinkNo, message: &Control) {
        // What is left of an earlier stream is said again on the later one.
        let is_current = self.link.as_ref().is_some_and(|(current, _)| *current == number);
        let is_part = matches!(
            message,
            Control::Missing { .. }
                | Control::RemoteMap { .. }
                | Control::State { .. }
                | Control::StateEnd { .. }
                | Control::Resume { .. }
        );
        if is_current || !is_part {
            self.receive(message);
        }
    }

    fn receive(&mut self, message: &Control) {
        let arriving = self.arriving.as_ref().filter(|_| self.owner.takes_pages());
        let taken = match (message, arriving) {
            (Control::Resume { connection, .. }, Some(arriving)) => {
                arriving.store.connect(*connection);
                Ok(())
            }
            // After a restart of this daemon: what there is of the attempt has nowhere to go.
            (Control::Resume { .. }, None) if !self.owner.is_running() => {
                self.send(&Control::Forgotten { attempt: self.attempt });
                Ok(())
            }
            (_, Some(arriving)) if !self.is_loaded => take_part(&arriving.store, message),
            // What comes once more of a VM that is loaded is the same, or wrong.
            _ => Ok(()),
        };
        if let Err(malformed) = taken {
            return self.fail(malformed.to_string());
        }
        if let Control::StateEnd { .. } = message {
            self.load_if_all_is_here();
        }
        self.apply(DestinationEvent::Message(message));
    }

    /// With all rounds, the map and the state the VM can run: its engine serves it, and QEMU loads the state.
    fn load_if_all_is_here(&mut self) {
        let Some(arriving) = self.arriving.as_ref().filter(|_| !self.is_loaded && !self.is_dead) else { return };
        let all = arriving.store.arrival().all().map(|(state, missing)| (state.to_vec(), missing.clone()));
        let Some((state, missing)) = all else { return };
        self.is_loaded = true;
        tracing::debug!(vm = %self.vm, "pause: its last pages and its state are here");
        self.show(|progress| progress.phase = "loading");
        let own = self.own.clone();
        // One that cannot be sent finds a session that has something else to do, and looks at its tail behind that.
        let listener = move || drop(own.try_send(Input::Tail));
        let begun = vm::serve(&self.registry, arriving, self.attempt, &missing, listener).and_then(|tail| {
            self.tail = tail;
            tracing::debug!(vm = %self.vm, "pause: its engine serves it");
            let own = self.own.clone();
            let report = move |loaded| drop(own.send(Input::Loaded(loaded)));
            vm::load(&self.registry, arriving, state, report)
        });
        if let Err(error) = begun {
            self.fail(in_full(error.as_ref()));
        }
    }

    fn loaded(&mut self, loaded: Result<(), String>) {
        match loaded {
            Ok(()) => {
                tracing::debug!(vm = %self.vm, "pause: its state is loaded");
                self.show(|progress| progress.phase = "ready");
                self.apply(DestinationEvent::Loaded);
                if self.tail.is_none() {
                    self.apply(DestinationEvent::Whole);
                }
            }
            Err(why) => self.fail(why),
        }
    }

    /// The source hears what is missing, what threads wait for, and what it may forget. QEMU needs pages already when it loads its state.
    fn tell_of_tail(&mut self) {
        let Some(tail) = &mut self.tail else { return };
        if let Some((number, link)) = &self.link {
            for message in tail.messages(*number) {
                let _ = link.send(&message);
            }
        }
        let left = tail.left().bytes().0;
        if !self.owner.is_running() {
            return;
        }
        let mut shown = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        (shown.phase, shown.left) = ("postcopy", left);
        drop(shown);
        if tail.is_whole() {
            self.tail = None;
            self.apply(DestinationEvent::Whole);
        }
    }

    /// Ends the stream, after which the source calls again.
    fn cut(&self) {
        if let Some((_, link)) = &self.link {
            link.cut();
        }
    }

    /// The VM cannot run here. Its source hears why.
    fn fail(&mut self, why: String) {
        tracing::error!(vm = %self.vm, "it does not come from the other host: {why}");
        self.refuse(why);
        self.lose_qemu();
    }

    /// The source gives the attempt up when it hears of it, if it has not granted the VM.
    fn refuse(&mut self, why: String) {
        self.show(|progress| progress.why = Some(why.clone()));
        let remedy = "put that right there, and move the VM again";
        let what: String = why.chars().filter(|c| !c.is_control()).take(400).collect();
        let reasons = vec![Reason { kind: ReasonKind::Forbidden, what, remedy: remedy.to_owned() }];
        self.send(&Control::Refuse { attempt: self.attempt, reasons });
    }

    fn lose_qemu(&mut self) {
        if !std::mem::replace(&mut self.is_dead, true) {
            self.apply(DestinationEvent::QemuDied);
        }
    }

    fn look_at_qemu(&mut self) {
        // One that an earlier daemon has made is known by its id alone.
        let is_its = self.arriving.is_some() || self.owner.is_running() && !self.is_dead;
        // While it is being let run, whoever does that says whether it was there.
        if is_its && !self.is_starting && self.has_ended() {
            self.arriving = None;
            self.lose_qemu();
        }
    }

    fn has_ended(&self) -> bool {
        self.id.is_some_and(|id| self.registry.find_by_id(id, |_| ()).is_none())
    }

    /// A source that has forgotten the attempt does not call any more, and the VM's note waits for its last word.
    fn call_if_lonely(&mut self) {
        let is_owed = self.owner.is_running() || matches!(self.owner.note(), Some(Note::Refused(_)));
        if self.link.is_some() || !is_owed || self.called.elapsed() < CALL_AFTER {
            return;
        }
        self.called = Instant::now();
        if self.is_calling.swap(true, Ordering::AcqRel) {
            return;
        }
        let (vm, source, calling) = (self.vm.clone(), Arc::clone(&self.call), Arc::clone(&self.is_calling));
        let call = move || {
            if let Err(error) = source() {
                tracing::debug!(%vm, "call its source: {}", in_full(error.as_ref()));
            }
            calling.store(false, Ordering::Release);
        };
        if let Err(error) = std::thread::Builder::new().name("call".into()).spawn(call) {
            tracing::warn!(vm = %self.vm, "call its source: {error}");
            self.is_calling.store(false, Ordering::Release);
        }
    }

    fn apply(&mut self, event: DestinationEvent<'_>) {
        let mut actions = Vec::new();
        self.owner.apply(moment(self.began), event, &mut actions);
        self.execute(actions);
    }

    /// Does what the machine wants, in order. What it hears of that comes behind all of it.
    fn execute(&mut self, actions: Vec<Action>) {
        let mut heard = Vec::new();
        for action in actions {
            match action {
                // The guest does not run before its QEMU has said so.
                Action::Send(Control::Started { .. }) if self.is_starting => {}
                Action::Send(message) => self.send(&message),
                Action::Write(note) => {
                    let is_written = self.write(note);
                    // A QEMU that has ended while the note was written has not run: the note is followed by a refusal.
                    if matches!(note, Some(Note::Accepted(..))) && self.has_ended() {
                        self.is_dead = true;
                        heard.push(DestinationEvent::QemuDied);
                    }
                    heard.push(DestinationEvent::Written(is_written));
                }
                Action::Prepare => self.prepare(),
                Action::Run => {
                    self.show(|progress| progress.phase = "running");
                    self.is_starting = true;
                    let own = self.own.clone();
                    vm::run(&self.registry, &self.vm, move |was_there| drop(own.send(Input::LetRun(was_there))));
                }
                Action::Discard => {
                    if let Some(arriving) = self.arriving.take() {
                        arriving.store.close();
                        arriving.exports.iter().for_each(|exports| _ = exports.cut());
                    }
                    vm::discard(&self.registry, &self.vm, self.attempt, self.id);
                    let Moves { copies, .. } = &self.registry.moves;
                    copies.remove(self.registry.moves.notes(), &self.vm, self.attempt);
                }
                Action::Ask(claim) => self.ask_arbiter(claim),
                Action::Unregister(..) => unreachable!("a destination removes no register"),
                Action::End(end) => self.note_end(end),
                Action::Stop => unreachable!("a destination stops nothing"),
            }
        }
        self.show_arbiter();
        heard.into_iter().for_each(|event| self.apply(event));
    }

    /// Whether the note is durable. The VM is accepted only if it can run.
    fn write(&self, note: Option<Note>) -> bool {
        if let Some(Note::Accepted(..)) = note
            && let Err(error) = vm::check_loaded(&self.registry, self.arriving.as_ref())
        {
            tracing::error!(vm = %self.vm, "it is not accepted: {}", in_full(error.as_ref()));
            return false;
        }
        let written = self.registry.moves.notes().write(&self.vm, note);
        if let Err(error) = &written {
            tracing::error!(vm = %self.vm, "note who owns it: {}", in_full(error.as_ref()));
        }
        tracing::debug!(vm = %self.vm, ?note, "who owns it is noted");
        written.is_ok()
    }

    fn prepare(&mut self) {
        self.show(|progress| progress.phase = "preparing");
        let (Some(wanted), own) = (self.wanted.take(), self.own.clone()) else {
            return drop(self.own.try_send(Input::Prepared(Err("nothing is known of it".to_owned()))));
        };
        let registry = Arc::clone(&self.registry);
        let prepare = move || {
            let prepared = wanted.prepare(&registry);
            let _ = own.send(Input::Prepared(prepared.map(Box::new).map_err(|error| in_full(error.as_ref()))));
        };
        if let Err(error) = std::thread::Builder::new().name("arrive".into()).spawn(prepare) {
            let _ = self.own.try_send(Input::Prepared(Err(format!("start a thread: {error}"))));
        }
    }

    /// What is lost with the link is sent again when it is back.
    fn send(&self, message: &Control) {
        if let Some((_, link)) = &self.link {
            let _ = link.send(message);
        }
    }

    fn show(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn note_end(&self, end: End) {
        self.registry.moves.sessions.note_end(self.attempt, end);
        match end {
            End::Moved => tracing::info!(vm = %self.vm, "its move to this host is over"),
            other => tracing::warn!(vm = %self.vm, "it has not come to this host: {other:?}"),
        }
        // Its QEMU may have died here when the VM was accepted and had not run: the source has it.
        if !matches!(end, End::Moved | End::Crashed)
            && let Some(pid) = self.pid
            && let Err(error) = self.registry.crashes.remove_of(&self.vm, pid)
        {
            tracing::warn!(vm = %self.vm, "remove the note that it has crashed: {error}");
        }
    }
}

/// Takes in a part of what the VM needs beside pages.
fn take_part(store: &Store, message: &Control) -> Result<(), Malformed> {
    let mut arrival = store.arrival();
    match message {
        Control::Missing { part, .. } => arrival.missing(part),
        Control::RemoteMap { part, .. } => arrival.remote_map(part),
        Control::State { offset, bytes, .. } => arrival.state(*offset, bytes),
        Control::StateEnd { total, round, .. } => {
            arrival.end_state(*total, *round);
            Ok(())
        }
        _ => Ok(()),
    }
}
