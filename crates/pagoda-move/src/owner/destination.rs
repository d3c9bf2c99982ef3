//! The host that a VM comes to.
//!
//! It reserves room, takes in pages and state, and runs the VM when it has three things: the grant, its own durable note, and the
//! arbiter's word if the grant asks for that. Until then it may give up at any moment. If it has no use for a grant, it refuses
//! the grant durably.
//!
//! What the guest sees of a failure: before the VM runs here, nothing; afterwards, what it sees of any crash of QEMU.

use super::claim::{Claim, Registered, Step};
use super::link::Link;
use super::notes::Notes;
use super::types::{Action, DestinationEvent, End, GIVE_UP_AFTER, NO_ARBITER_AFTER, Qemu, RETRY_EVERY};
use crate::note::{Note, Offered, Owned};
use crate::units::{Generation, HostKey, Moment};
use crate::wire::Control;
use crate::wire::control::{DecidedBy, Holding, Verdict};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A note is written, then room is made.
    Preparing,
    Filling,
    Ready,
    /// The grant is here, and is being noted.
    Accepting,
    /// The arbiter is being asked.
    Claiming,
    /// The VM runs here, or did until QEMU died.
    Running,
    /// The source has nothing left. The note becomes an ordinary one.
    Closing,
    Refusing,
    /// What the attempt had here is gone; its note goes.
    Clearing,
    Over,
}

/// Whether memory is being reserved and QEMU started. That cannot be called back, only undone when it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prepares {
    NotYet,
    Now,
    Done,
}

/// One attempt to take a VM in.
#[derive(Clone, Debug)]
pub struct Destination {
    me: HostKey,
    offered: Offered,
    state: State,
    link: Link,
    notes: Notes,
    /// What the grant says that decides.
    by: DecidedBy,
    prepares: Prepares,
    is_whole: bool,
    is_dead: bool,
    /// What a refused VM had here is gone.
    is_discarded: bool,
    /// Since when the arbiter is asked.
    since: Moment,
    is_asking: bool,
    ask_at: Option<Moment>,
    end: End,
}

impl Destination {
    /// Begins to take a VM in, on a host whose note of this VM is `note`: none, or a refusal of an earlier attempt that the
    /// source knows of, since it owns the VM at a later generation.
    pub fn begin(
        me: HostKey,
        offered: Offered,
        note: Option<Note>,
        now: Moment,
        actions: &mut Vec<Action>,
    ) -> Destination {
        let mut destination = Destination::new(me, offered, note, now);
        destination.link.set(true, now);
        destination.notes.want(Some(Note::Incoming(offered)), actions);
        destination
    }

    /// Refuses a grant of an attempt that this host knows nothing of. `offered` has the arbiter's registers that the host asks now: if
    /// others were agreed on, nothing of the attempt is in them.
    pub fn refuse_unknown(
        me: HostKey,
        offered: Offered,
        by: DecidedBy,
        now: Moment,
        actions: &mut Vec<Action>,
    ) -> Destination {
        let mut destination = Destination::new(me, offered, None, now);
        destination.link.set(true, now);
        destination.by = by;
        destination.refuse(now, actions);
        destination
    }

    /// After a restart: what the attempt had here is removed.
    pub(super) fn recover_incoming(
        me: HostKey,
        offered: Offered,
        now: Moment,
        actions: &mut Vec<Action>,
    ) -> Destination {
        let mut destination = Destination::new(me, offered, Some(Note::Incoming(offered)), now);
        destination.clear(End::GivenUp, actions);
        destination.advance(now, actions);
        destination
    }

    /// After a restart: the VM is this host's, unless the arbiter was to be asked and QEMU does not run it yet.
    pub(super) fn recover_accepted(
        me: HostKey,
        offered: Offered,
        by: DecidedBy,
        qemu: Qemu,
        now: Moment,
        actions: &mut Vec<Action>,
    ) -> Destination {
        let note = Note::Accepted(offered, by);
        let mut destination = Destination::new(me, offered, Some(note), now);
        (destination.by, destination.state, destination.end) = (by, State::Accepting, End::Moved);
        match qemu {
            Qemu::Running => destination.state = State::Running,
            Qemu::Stopped => destination.advance(now, actions),
            Qemu::Dead => {
                destination.state = State::Running;
                destination.lose_qemu(now, actions);
            }
        }
        destination
    }

    pub(super) fn recover_refused(
        me: HostKey,
        offered: Offered,
        now: Moment,
        actions: &mut Vec<Action>,
    ) -> Destination {
        let mut destination = Destination::new(me, offered, Some(Note::Refused(offered)), now);
        // What decided is not noted any more. An arbiter is told in any case.
        destination.by = if offered.register.is_some() { DecidedBy::Arbiter } else { DecidedBy::Grant };
        destination.refuse(now, actions);
        destination.advance(now, actions);
        destination
    }

    fn new(me: HostKey, offered: Offered, note: Option<Note>, now: Moment) -> Destination {
        Destination {
            me,
            offered,
            state: State::Preparing,
            link: Link::new(false, now),
            notes: Notes::new(note),
            by: DecidedBy::Grant,
            prepares: Prepares::NotYet,
            is_whole: false,
            is_dead: false,
            is_discarded: false,
            since: now,
            is_asking: false,
            ask_at: None,
            end: End::GivenUp,
        }
    }

    pub const fn offered(&self) -> Offered {
        self.offered
    }

    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// The VM is this host's, and the source may not know it yet.
    pub fn is_running(&self) -> bool {
        matches!(self.state, State::Running | State::Closing)
    }

    /// Nothing was granted, as far as is known here: the attempt can be given up by anybody.
    pub fn is_before_grant(&self) -> bool {
        matches!(self.state, State::Preparing | State::Filling | State::Ready)
    }

    /// Pages and state of the attempt are taken in.
    pub fn takes_pages(&self) -> bool {
        matches!(self.state, State::Filling | State::Ready | State::Running) && !self.is_dead
    }

    /// The arbiter decides, or has.
    pub fn is_arbitrated(&self) -> bool {
        self.by == DecidedBy::Arbiter
    }

    /// The VM has the grant, and waits for the arbiter's word.
    pub fn is_claiming(&self) -> bool {
        self.state == State::Claiming
    }

    pub fn note(&self) -> Option<Note> {
        self.notes.wanted()
    }

    /// When `Tick` is due, if nothing happens before.
    pub fn next_at(&self, now: Moment) -> Moment {
        let times = [self.notes.retry_at(), self.ask_at];
        times.into_iter().flatten().fold(now + RETRY_EVERY, Moment::min)
    }

    pub fn apply(&mut self, now: Moment, event: DestinationEvent<'_>, actions: &mut Vec<Action>) {
        let attempt = self.offered.attempt;
        match event {
            DestinationEvent::LinkUp => self.link.set(true, now),
            DestinationEvent::LinkDown => self.link.set(false, now),
            DestinationEvent::Message(message) if message.attempt() == attempt => self.receive(now, message, actions),
            DestinationEvent::Message(_) => {}
            DestinationEvent::Prepared => {
                self.prepares = Prepares::Done;
                if self.state == State::Preparing {
                    self.state = State::Filling;
                    actions.push(Action::Send(Control::Reserved { attempt }));
                } else {
                    // The attempt has ended meanwhile.
                    actions.push(Action::Discard);
                }
            }
            DestinationEvent::CannotPrepare => {
                self.prepares = Prepares::Done;
                if self.state == State::Preparing {
                    self.clear(End::GivenUp, actions);
                } else {
                    // The attempt has ended meanwhile, and a part of it may have been made since.
                    actions.push(Action::Discard);
                }
            }
            DestinationEvent::Loaded if self.state == State::Filling => {
                self.state = State::Ready;
                self.link.hurry(now);
            }
            DestinationEvent::Loaded => {}
            DestinationEvent::Whole => {
                self.is_whole = true;
                self.link.hurry(now);
            }
            DestinationEvent::Written(is_written) => self.notes.complete(is_written, now, actions),
            DestinationEvent::Arbiter(answer) => self.receive_answer(now, answer, actions),
            DestinationEvent::QemuDied => self.lose_qemu(now, actions),
            DestinationEvent::NeverRan if self.state == State::Running => {
                self.is_dead = true;
                self.refuse(now, actions);
            }
            DestinationEvent::NeverRan => {}
            DestinationEvent::Resolve => self.resolve(now, actions),
            DestinationEvent::Tick => {}
        }
        self.advance(now, actions);
        self.repeat(now, actions);
    }

    fn receive(&mut self, now: Moment, message: &Control, actions: &mut Vec<Action>) {
        match message {
            Control::Grant { generation, by, .. } if *generation == self.offered.generation => {
                self.receive_grant(now, *by, actions);
            }
            Control::Withdraw { generation, .. } if *generation == self.offered.generation => match self.state {
                State::Running | State::Refusing => self.link.hurry(now),
                State::Closing | State::Over => {}
                _ => self.refuse(now, actions),
            },
            // The answer was lost with a connection.
            Control::Reserve { attempt, .. } if matches!(self.state, State::Filling | State::Ready) => {
                actions.push(Action::Send(Control::Reserved { attempt: *attempt }));
            }
            Control::Settled { generation, verdict, .. } => self.receive_settled(*generation, *verdict, actions),
            _ => {}
        }
    }

    fn receive_grant(&mut self, now: Moment, by: DecidedBy, actions: &mut Vec<Action>) {
        match self.state {
            // There is none that both hosts ask, and no grant without one may follow.
            State::Ready if by == DecidedBy::Arbiter && self.offered.register.is_none() => self.refuse(now, actions),
            State::Ready => self.accept(now, by, actions),
            // A grant that needs no arbiter, after one that did. It is as good as the arbiter's word.
            State::Accepting if by == DecidedBy::Grant => self.by = by,
            State::Claiming if by == DecidedBy::Grant => {
                self.by = by;
                self.run(now, actions);
            }
            State::Accepting | State::Claiming => {}
            State::Running | State::Refusing => self.link.hurry(now),
            State::Preparing | State::Filling | State::Clearing => {
                self.by = by;
                self.refuse(now, actions);
            }
            State::Closing | State::Over => {}
        }
    }

    fn receive_settled(&mut self, generation: Generation, verdict: Verdict, actions: &mut Vec<Action>) {
        // A VM that runs ends only if the source says that the grant came back, and that has one generation.
        let is_back = generation == self.offered.generation.next();
        match (self.state, verdict) {
            (State::Running, Verdict::Yours) => {
                self.state = State::Closing;
                self.notes.want(Some(Note::Owned(Owned::Came(self.offered))), actions);
            }
            (State::Running, Verdict::Mine) if is_back => {
                let end = if self.is_dead { End::Crashed } else { End::Superseded };
                self.clear(end, actions);
            }
            (State::Running | State::Closing | State::Clearing | State::Over, _) => {}
            // The refusal may not have been written yet.
            (State::Refusing, _) => self.clear(End::GivenUp, actions),
            (State::Preparing | State::Filling | State::Ready | State::Accepting | State::Claiming, _) => {
                self.clear(End::GivenUp, actions);
            }
        }
    }

    fn receive_answer(&mut self, now: Moment, answer: Option<Registered>, actions: &mut Vec<Action>) {
        self.is_asking = false;
        self.ask_at = Some(now + RETRY_EVERY);
        let Some(registered) = answer else { return };
        let is_mine = registered == Registered { generation: self.offered.generation, owner: self.me };
        match self.state {
            State::Claiming if is_mine => self.run(now, actions),
            // The source was first.
            State::Claiming if registered.generation > self.offered.generation => self.clear(End::GivenUp, actions),
            State::Refusing if !is_mine => self.ask_at = None,
            _ => {}
        }
    }

    /// What follows from the state as it is now.
    fn advance(&mut self, now: Moment, actions: &mut Vec<Action>) {
        self.notes.tick(now, actions);
        match self.state {
            State::Preparing if self.notes.is_durable() && self.prepares == Prepares::NotYet => {
                self.prepares = Prepares::Now;
                actions.push(Action::Prepare);
            }
            State::Preparing if self.notes.has_failed() => {
                actions.push(Action::Send(Control::Forgotten { attempt: self.offered.attempt }));
                self.clear(End::GivenUp, actions);
            }
            State::Preparing | State::Filling | State::Ready if self.link.was_down_for(GIVE_UP_AFTER, now) => {
                self.clear(End::GivenUp, actions);
            }
            State::Accepting if self.notes.is_durable() => match self.by {
                DecidedBy::Grant => self.run(now, actions),
                DecidedBy::Arbiter => {
                    (self.state, self.since) = (State::Claiming, now);
                    self.ask(actions);
                }
            },
            // A VM cannot run where its note cannot be written. It has not run.
            State::Accepting if self.notes.has_failed() => self.refuse(now, actions),
            State::Claiming if self.ask_at.is_some_and(|at| at <= now) => self.ask(actions),
            State::Refusing if self.notes.is_durable() && !self.is_discarded => {
                self.is_discarded = true;
                actions.push(Action::Discard);
            }
            State::Refusing if self.ask_at.is_some_and(|at| at <= now) => self.ask(actions),
            // The note stays as long as there may be something to find by it.
            State::Clearing if self.prepares != Prepares::Now && self.notes.wanted().is_some() => {
                self.notes.want(None, actions);
            }
            State::Closing | State::Clearing if self.notes.is_durable() && self.prepares != Prepares::Now => {
                self.state = State::Over;
                actions.push(Action::End(self.end));
            }
            _ => {}
        }
    }

    fn accept(&mut self, now: Moment, by: DecidedBy, actions: &mut Vec<Action>) {
        (self.state, self.by, self.since) = (State::Accepting, by, now);
        self.notes.want(Some(Note::Accepted(self.offered, by)), actions);
    }

    fn run(&mut self, now: Moment, actions: &mut Vec<Action>) {
        assert!(self.notes.is_durable(), "a VM runs before its note is durable");
        (self.state, self.end, self.ask_at) = (State::Running, End::Moved, None);
        self.link.hurry(now);
        actions.push(Action::Run);
    }

    /// The note comes first: with an older one a daemon that starts would take a QEMU that is gone for one that has run. Only then
    /// QEMU is ended and the source hears of it.
    fn refuse(&mut self, now: Moment, actions: &mut Vec<Action>) {
        self.state = State::Refusing;
        self.notes.want(Some(Note::Refused(self.offered)), actions);
        self.link.hurry(now);
        // If the link is cut, the source learns it from the arbiter.
        if self.by == DecidedBy::Arbiter {
            self.ask_at = Some(now);
        }
    }

    /// The attempt has no grant, or none any more that counts.
    fn clear(&mut self, end: End, actions: &mut Vec<Action>) {
        (self.state, self.end, self.ask_at) = (State::Clearing, end, None);
        actions.push(Action::Discard);
    }

    fn lose_qemu(&mut self, now: Moment, actions: &mut Vec<Action>) {
        self.is_dead = true;
        match self.state {
            State::Preparing | State::Filling | State::Ready => {
                actions.push(Action::Send(Control::Forgotten { attempt: self.offered.attempt }));
                self.clear(End::GivenUp, actions);
            }
            State::Accepting | State::Claiming => self.refuse(now, actions),
            State::Running | State::Closing => {
                // It needs no page any more.
                if self.end != End::Lost {
                    (self.end, self.is_whole) = (End::Crashed, true);
                }
                self.link.hurry(now);
            }
            State::Refusing | State::Clearing | State::Over => {}
        }
    }

    fn resolve(&mut self, now: Moment, actions: &mut Vec<Action>) {
        match self.state {
            State::Ready => self.accept(now, DecidedBy::Grant, actions),
            State::Claiming => self.run(now, actions),
            // Its note stays: a source that comes back has to hear that the VM has run here, or it lets an older state of it run. Nor is it
            // told that all is here: it may never have granted the VM, and have the only one.
            State::Running if !self.is_whole && self.end != End::Lost => {
                (self.is_dead, self.end) = (true, End::Lost);
                actions.push(Action::Discard);
            }
            // Nobody will answer any more.
            State::Running => self.receive_settled(self.offered.generation, Verdict::Yours, actions),
            State::Refusing => self.clear(End::GivenUp, actions),
            _ => {}
        }
    }

    /// Accepting: takes the VM, unless the source was first. Refusing: gives it to the source.
    fn ask(&mut self, actions: &mut Vec<Action>) {
        if self.is_asking {
            return;
        }
        let step = if self.state == State::Refusing { Step::Refuse } else { Step::Run };
        let Some(claim) = Claim::of_destination(self.me, self.offered, step) else { return };
        (self.is_asking, self.ask_at) = (true, None);
        actions.push(Action::Ask(claim));
    }

    /// What is sent until it is answered.
    fn repeat(&mut self, now: Moment, actions: &mut Vec<Action>) {
        let Offered { attempt, generation, .. } = self.offered;
        let message = match self.state {
            State::Filling => Control::Holds { attempt, holding: Holding::Filling },
            State::Ready => Control::Holds { attempt, holding: Holding::Ready },
            State::Claiming if now.since(self.since) >= NO_ARBITER_AFTER => Control::NoArbiter { attempt, generation },
            State::Running => Control::Started { attempt, generation },
            State::Refusing if self.is_discarded => Control::Refusal { attempt, generation },
            _ => return,
        };
        if !self.link.take_turn(now) {
            return;
        }
        actions.push(Action::Send(message));
        if self.state == State::Running && self.is_whole {
            actions.push(Action::Send(Control::Whole { attempt }));
        }
    }
}
