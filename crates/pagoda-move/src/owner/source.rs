//! The host that a VM leaves.
//!
//! It owns the VM until its note says that it is given. After the grant it waits for one of three words: the destination's
//! `Started`, the destination's `Refusal`, or the arbiter's. What the guest sees of a failure: before the grant the VM runs on
//! here; after it the VM stands still until that word is there.

use super::claim::{Claim, Registered, Step};
use super::link::Link;
use super::notes::Notes;
use super::types::{
    Action, End, GIVE_UP_AFTER, NO_ARBITER_AFTER, RETRY_EVERY, STOPPED_MAX, SourceEvent, TAKE_BACK_AFTER,
};
use crate::note::{Decision, Note, Offered, Owned};
use crate::units::{Generation, HostKey, Moment, RegisterId};
use crate::wire::Control;
use crate::wire::control::{Holding, Verdict};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The VM runs here. Comparing, reserving and all rounds are in this state.
    Copying,
    Stopping,
    /// The VM is stopped, and its last pages are on their way.
    Finishing,
    /// The note that gives the VM away is being written.
    Noting,
    /// That note is being taken back. No grant has been sent.
    Reverting,
    Granted,
    /// The VM runs at its destination, which may still need pages.
    Theirs,
    Removing,
    /// The grant came back. The note that says so is being written.
    Ours,
    Over,
}

/// One attempt to move a VM away.
#[derive(Clone, Debug)]
pub struct Source {
    me: HostKey,
    offered: Offered,
    /// The generation at which this host owns the VM if no grant is sent.
    own: Generation,
    state: State,
    link: Link,
    notes: Notes,
    is_dead: bool,
    is_loaded: bool,
    is_complete: bool,
    /// The rounds have come to their end.
    switches: bool,
    /// When this state began, where it has a limit.
    since: Moment,
    /// The arbiter has named this host as the owner.
    is_registered: bool,
    is_asking: bool,
    ask_at: Option<Moment>,
    withdraws: bool,
    /// The destination has refused for good.
    is_refused: bool,
    /// An operator has let the destination run the VM, which went on here meanwhile.
    is_superseded: bool,
    end: End,
}

impl Source {
    /// Begins an attempt for a VM that this host owns at `own`. `offered` has the generation after it, and no arbiter yet. The caller has a
    /// note that tells of the offer ([`Owned::Offered`]) before the destination can have all of the VM.
    pub fn begin(me: HostKey, own: Generation, offered: Offered, now: Moment) -> Source {
        assert_eq!(offered.generation, own.next(), "an offer of another generation");
        assert_eq!(offered.register, None, "an arbiter before both hosts agree");
        let mut source = Source::new(me, own, offered, Some(Note::Owned(Owned::Offered(offered))), now);
        source.link.set(true, now);
        source
    }

    /// After a restart, with the note that gives the VM away. A VM that runs has come back: nothing else lets it run here.
    pub(super) fn recover(
        me: HostKey,
        offered: Offered,
        decision: Decision,
        qemu: super::Qemu,
        now: Moment,
        actions: &mut Vec<Action>,
    ) -> Source {
        // A source's own generation is the one before its offer, whatever became of that.
        let own = Generation(offered.generation.0.saturating_sub(1));
        let mut source = Source::new(me, own, offered, Some(Note::Given(offered, decision)), now);
        source.state = State::Granted;
        source.is_dead = qemu == super::Qemu::Dead;
        if qemu == super::Qemu::Running {
            source.come_back(actions);
        }
        source
    }

    /// The destination has said that it runs all of a VM that was offered to it and not granted ([`super::Answer::Superseded`]). The VM is
    /// stopped here, and then the note that gives it away is durable. So it is as after any grant: it ends here when the destination
    /// says so once more, and comes back if that refuses.
    pub fn supersede(me: HostKey, offered: Offered, now: Moment) -> Source {
        let mut actions = Vec::new();
        let mut source = Source::recover(me, offered, Decision::Grant, super::Qemu::Stopped, now, &mut actions);
        assert!(actions.is_empty(), "a stopped VM waits for its destination");
        source.is_superseded = true;
        source
    }

    fn new(me: HostKey, own: Generation, offered: Offered, note: Option<Note>, now: Moment) -> Source {
        Source {
            me,
            offered,
            own,
            state: State::Copying,
            link: Link::new(false, now),
            notes: Notes::new(note),
            is_dead: false,
            is_loaded: false,
            is_complete: false,
            switches: false,
            since: now,
            is_registered: false,
            is_asking: false,
            ask_at: None,
            withdraws: false,
            is_refused: false,
            is_superseded: false,
            end: End::GivenUp,
        }
    }

    pub const fn offered(&self) -> Offered {
        self.offered
    }

    /// The attempt is in the past: what is left of it is the note.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// The VM is or will be at its destination: it can no longer be cancelled, only asked back.
    pub fn is_granted(&self) -> bool {
        matches!(self.state, State::Granted | State::Theirs | State::Removing)
    }

    /// The destination has said that it runs the VM.
    pub fn is_theirs(&self) -> bool {
        matches!(self.state, State::Theirs | State::Removing)
    }

    /// The destination runs the VM, and may ask for pages.
    pub fn serves(&self) -> bool {
        self.state == State::Theirs
    }

    /// The arbiter decides, as far as is known now: before the grant, if it is there to be asked.
    pub fn is_arbitrated(&self) -> bool {
        match self.notes.wanted() {
            Some(Note::Given(_, decision)) => decision != Decision::Grant,
            _ => self.is_registered,
        }
    }

    pub fn note(&self) -> Option<Note> {
        self.notes.wanted()
    }

    /// When `Tick` is due, if nothing happens before.
    pub fn next_at(&self, now: Moment) -> Moment {
        let times = [self.notes.retry_at(), self.ask_at];
        times.into_iter().flatten().fold(now + RETRY_EVERY, Moment::min)
    }

    pub fn apply(&mut self, now: Moment, event: SourceEvent<'_>, actions: &mut Vec<Action>) {
        match event {
            SourceEvent::LinkUp => self.link.set(true, now),
            SourceEvent::LinkDown => self.link.set(false, now),
            SourceEvent::Message(message) if message.attempt() == self.offered.attempt => {
                self.receive(now, message, actions);
            }
            SourceEvent::Message(_) => {}
            SourceEvent::Agreed(register) => self.agree(now, register, actions),
            SourceEvent::Switch => self.switches = true,
            SourceEvent::Stopped if self.state == State::Stopping => self.state = State::Finishing,
            SourceEvent::Stopped => {}
            SourceEvent::Complete => self.is_complete = true,
            SourceEvent::Written(is_written) => self.notes.complete(is_written, now, actions),
            SourceEvent::Arbiter(answer) => self.receive_answer(now, answer, actions),
            SourceEvent::QemuDied => self.lose_qemu(actions),
            SourceEvent::Cancel => self.cancel(now, actions),
            SourceEvent::Resolve if self.state == State::Granted => self.come_back(actions),
            SourceEvent::Resolve => {}
            SourceEvent::Tick => {}
        }
        self.advance(now, actions);
        self.repeat(now, actions);
    }

    /// Both hosts ask these registers. What is noted from now on says so.
    fn agree(&mut self, now: Moment, register: RegisterId, actions: &mut Vec<Action>) {
        if self.state != State::Copying || self.offered.register.is_some() {
            return;
        }
        self.offered.register = Some(register);
        self.notes = Notes::new(Some(Note::Owned(Owned::Offered(self.offered))));
        self.since = now;
        self.ask(actions);
    }

    fn receive(&mut self, now: Moment, message: &Control, actions: &mut Vec<Action>) {
        let offered = self.offered.generation;
        let is_before = matches!(self.state, State::Copying | State::Stopping | State::Finishing);
        match message {
            Control::Refuse { .. } | Control::NoRoom { .. } | Control::Forgotten { .. } if is_before => {
                self.give_up(actions);
            }
            Control::Holds { holding, .. } => self.is_loaded = *holding == Holding::Ready,
            Control::Started { generation, .. } if *generation == offered => match self.state {
                State::Granted => self.state = State::Theirs,
                // An operator has let the destination take over without a grant. It said before that it can run the VM, which stands still
                // here since. So it is as if it had the grant; it may need pages.
                State::Finishing | State::Noting | State::Reverting if self.is_loaded => {
                    (self.state, self.since) = (State::Noting, now);
                    (self.is_superseded, self.withdraws) = (true, false);
                    self.notes.want(Some(Note::Given(self.offered, Decision::Grant)), actions);
                }
                _ => {}
            },
            Control::Whole { .. } if self.state == State::Theirs => {
                let end = if self.is_superseded { End::Superseded } else { End::Moved };
                self.remove(end, actions);
            }
            Control::Refusal { generation, .. }
                if *generation == offered && matches!(self.state, State::Granted | State::Reverting) =>
            {
                self.is_refused = true;
                self.come_back(actions);
            }
            // Only if this host has never asked, not even before a restart: that would be in the note.
            Control::NoArbiter { generation, .. }
                if *generation == offered && self.state == State::Granted && self.decision() == Decision::Arbiter =>
            {
                self.notes.want(Some(Note::Given(self.offered, Decision::Grant)), actions);
                self.link.hurry(now);
            }
            _ => {}
        }
    }

    /// What follows from the state as it is now.
    fn advance(&mut self, now: Moment, actions: &mut Vec<Action>) {
        self.notes.tick(now, actions);
        let is_late = now.since(self.since) >= STOPPED_MAX;
        match self.state {
            State::Copying if self.link.was_down_for(GIVE_UP_AFTER, now) => self.give_up(actions),
            // A move that the arbiter cannot decide waits for the link. That is worth a moment before the stop.
            State::Copying if self.lacks_register() && now.since(self.since) < NO_ARBITER_AFTER => {
                self.ask_when_due(now, actions);
            }
            State::Copying if self.switches => {
                (self.state, self.since) = (State::Stopping, now);
                actions.push(Action::Stop);
            }
            State::Copying if self.lacks_register() => self.ask_when_due(now, actions),
            State::Stopping if is_late => self.give_up(actions),
            State::Finishing if self.is_loaded && self.is_complete => {
                (self.state, self.since) = (State::Noting, now);
                let decision = if self.is_registered { Decision::Arbiter } else { Decision::Grant };
                self.notes.want(Some(Note::Given(self.offered, decision)), actions);
            }
            State::Finishing if is_late => self.give_up(actions),
            State::Noting if self.notes.is_durable() => {
                (self.state, self.since) = (State::Granted, now);
                self.link.hurry(now);
            }
            State::Noting if !self.is_superseded && (self.notes.has_failed() || is_late) => {
                // The note may be there or not. If this one cannot be written either, the destination's refusal will do.
                self.withdraws = true;
                self.revert(now, actions);
            }
            State::Reverting if self.notes.is_durable() => self.give_up(actions),
            State::Granted => self.advance_grant(now, actions),
            State::Removing if self.notes.is_durable() => {
                let verdict = Verdict::Yours;
                self.settle(self.offered.generation, verdict, actions);
            }
            State::Ours if self.notes.is_durable() => {
                self.settle(self.offered.generation.next(), Verdict::Mine, actions);
            }
            _ => {}
        }
    }

    /// The link has not brought an answer: the arbiter is asked for the VM, after a note says that it may have been.
    fn advance_grant(&mut self, now: Moment, actions: &mut Vec<Action>) {
        match self.decision() {
            Decision::Arbiter if now.since(self.since) >= TAKE_BACK_AFTER => {
                self.notes.want(Some(Note::Given(self.offered, Decision::TakingBack)), actions);
                self.ask_at = Some(now);
            }
            Decision::TakingBack if self.notes.is_durable() => self.ask_when_due(now, actions),
            Decision::Grant | Decision::Arbiter | Decision::TakingBack => {}
        }
    }

    fn receive_answer(&mut self, now: Moment, answer: Option<Registered>, actions: &mut Vec<Action>) {
        self.is_asking = false;
        self.ask_at = Some(now + RETRY_EVERY);
        let Some(registered) = answer else { return };
        match self.state {
            State::Copying if registered.generation > self.own => self.give_up(actions),
            State::Copying | State::Stopping | State::Finishing => {
                self.is_registered = registered == Registered { generation: self.own, owner: self.me };
            }
            State::Granted if registered.owner == self.me && registered.generation > self.offered.generation => {
                self.come_back(actions);
            }
            // The destination's, for now: it may give the VM back, to the link or to the arbiter.
            _ => {}
        }
    }

    /// Makes this host the owner. Before the grant: if the arbiter knows of no owner as late as this one. After it: unless the
    /// destination was first.
    fn ask(&mut self, actions: &mut Vec<Action>) {
        if self.is_asking {
            return;
        }
        let step = if self.state == State::Granted { Step::TakeBack } else { Step::Begin };
        let Some(claim) = Claim::of_source(self.me, self.offered, step) else { return };
        self.is_asking = true;
        self.ask_at = None;
        actions.push(Action::Ask(claim));
    }

    /// There is an arbiter, which has not named this host so far.
    fn lacks_register(&self) -> bool {
        self.offered.register.is_some() && !self.is_registered
    }

    fn ask_when_due(&mut self, now: Moment, actions: &mut Vec<Action>) {
        if self.ask_at.is_none_or(|at| at <= now) {
            self.ask(actions);
        }
    }

    fn cancel(&mut self, now: Moment, actions: &mut Vec<Action>) {
        match self.state {
            State::Copying | State::Stopping | State::Finishing => self.give_up(actions),
            State::Noting if !self.is_superseded => self.revert(now, actions),
            State::Granted => {
                self.withdraws = true;
                self.link.hurry(now);
            }
            State::Noting | State::Reverting | State::Theirs | State::Removing | State::Ours | State::Over => {}
        }
    }

    /// Before the grant a VM that has crashed is this host's to restore. Once it is noted as given, the destination has all of it.
    fn lose_qemu(&mut self, actions: &mut Vec<Action>) {
        self.is_dead = true;
        if matches!(self.state, State::Copying | State::Stopping | State::Finishing) {
            self.give_up(actions);
        }
    }

    fn revert(&mut self, now: Moment, actions: &mut Vec<Action>) {
        self.state = State::Reverting;
        self.notes.want(Some(Note::Owned(Owned::Offered(self.offered))), actions);
        self.link.hurry(now);
    }

    /// The VM stays here, and no grant was sent.
    fn give_up(&mut self, actions: &mut Vec<Action>) {
        if self.state != State::Copying && !self.is_dead {
            actions.push(Action::Run);
        }
        self.end = if self.is_dead { End::Crashed } else { End::GivenUp };
        self.settle(self.own, Verdict::Mine, actions);
    }

    /// The destination has refused, the arbiter has decided, or an operator has.
    fn come_back(&mut self, actions: &mut Vec<Action>) {
        self.state = State::Ours;
        self.end = if self.is_dead { End::Crashed } else { End::CameBack };
        if !self.is_dead {
            actions.push(Action::Run);
        }
        self.notes.want(Some(Note::Owned(Owned::Back(self.offered))), actions);
    }

    /// QEMU goes before the note: a daemon that starts in between finds by the note what is left.
    fn remove(&mut self, end: End, actions: &mut Vec<Action>) {
        (self.state, self.end) = (State::Removing, end);
        actions.push(Action::Discard);
        self.notes.want(None, actions);
    }

    fn settle(&mut self, generation: Generation, verdict: Verdict, actions: &mut Vec<Action>) {
        // It came back by the word of the arbiter or of an operator: the destination may not know it, and may ask still.
        let may_ask = self.state == State::Ours && !self.is_refused;
        self.state = State::Over;
        let attempt = self.offered.attempt;
        actions.push(Action::Send(Control::Settled { attempt, generation, verdict }));
        // Otherwise no grant was sent, or the destination has refused it for good, or the VM has run there.
        if let Some(register) = self.offered.register.filter(|_| !may_ask) {
            actions.push(Action::Unregister(register, attempt));
        }
        actions.push(Action::End(self.end));
    }

    /// What is sent until it is answered.
    fn repeat(&mut self, now: Moment, actions: &mut Vec<Action>) {
        let Offered { attempt, generation, .. } = self.offered;
        let is_granted = self.state == State::Granted;
        let withdraws = self.withdraws && (is_granted || self.state == State::Reverting);
        if !(is_granted || withdraws) || !self.link.take_turn(now) {
            return;
        }
        if withdraws {
            actions.push(Action::Send(Control::Withdraw { attempt, generation }));
        } else {
            // A note that is not durable yet is not granted by.
            let by = if self.notes.is_durable() { self.decision() } else { Decision::Arbiter };
            actions.push(Action::Send(Control::Grant { attempt, generation, by: by.on_the_wire() }));
        }
    }

    fn decision(&self) -> Decision {
        match self.notes.wanted() {
            Some(Note::Given(_, decision)) => decision,
            _ => Decision::Grant,
        }
    }
}
