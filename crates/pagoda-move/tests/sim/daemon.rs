//! Daemons: what they do for the machines, their notes, their questions to the arbiter, and how they die and start.

use std::time::Duration;

use pagoda_move::note::{Note, Offered, Owned};
use pagoda_move::owner::{
    Action, Claim, DestinationEvent, End, Qemu as QemuState, Recovered, Registered, Source, SourceEvent, Step, recover,
};
use pagoda_move::tail::TailDestination;
use pagoda_move::units::{AttemptId, RegisterId};
use pagoda_move::wire::Control;

use crate::destination::Incoming;
use crate::host::{Daemon, Qemu};
use crate::mistake::Mistake;
use crate::plan::{MS, Phase};
use crate::source::{Outgoing, Stage};
use crate::world::{Event, World};

impl World {
    pub fn source_event(&mut self, host: usize, event: SourceEvent<'_>) {
        let now = self.now;
        let Some(session) = self.outgoing(host) else { return };
        let mut actions = Vec::new();
        session.owner.apply(now, event, &mut actions);
        if session.owner.is_over() {
            self.hosts[host].daemon.as_mut().expect("it has a session").source = None;
        }
        self.execute(host, actions);
    }

    pub fn destination_event(&mut self, host: usize, event: DestinationEvent<'_>) {
        let now = self.now;
        let Some(session) = self.incoming(host) else { return };
        let mut actions = Vec::new();
        session.owner.apply(now, event, &mut actions);
        if session.owner.is_over() {
            self.hosts[host].daemon.as_mut().expect("it has a session").destination = None;
        }
        self.execute(host, actions);
    }

    /// Does what a machine wants, in order. The daemon may die in between.
    pub fn execute(&mut self, host: usize, actions: Vec<Action>) {
        let life = self.hosts[host].life;
        for action in actions {
            if !self.is_healed && self.chance.per_mille(self.plan.crash) {
                self.kill_daemon(host);
            }
            if !self.is_alive(host, life) {
                return;
            }
            if !matches!(action, Action::Send(_)) {
                self.tell(|| format!("{host} does {action:?}"));
            }
            self.execute_one(host, action);
        }
    }

    pub fn execute_one(&mut self, host: usize, action: Action) {
        match action {
            Action::Send(message) => self.send(host, &message),
            Action::Write(note) => self.submit_note(host, note),
            Action::Prepare => {
                let is_possible = !self.chance.per_mille(self.plan.no_room);
                let delay = self.any(MS * 30);
                self.schedule_host(host, delay, |host, life| Event::Prepared { host, life, is_possible });
            }
            Action::Stop => {
                let delay = self.any(MS * 15);
                self.schedule_in(delay, Event::Stopped { host });
            }
            Action::Run => {
                self.send_missing(host);
                self.run(host);
            }
            Action::Discard => self.hosts[host].discard(),
            Action::Ask(claim) => self.ask(host, claim),
            Action::Unregister(register, attempt) => self.unregister(register, attempt),
            Action::End(end) => match end {
                End::Moved => self.stats.moved += 1,
                End::GivenUp => self.stats.given_up += 1,
                End::CameBack => self.stats.came_back += 1,
                End::Crashed => self.stats.crashed += 1,
                End::Superseded | End::Lost => self.note_violation(format!("{end:?} without an operator")),
            },
        }
    }

    pub fn tick(&mut self, host: usize) {
        self.source_event(host, SourceEvent::Tick);
        self.destination_event(host, DestinationEvent::Tick);
        if self.plan.mistake == Some(Mistake::TakesBackByItself) {
            let now = self.now;
            let Some(session) = self.outgoing(host).filter(|session| session.owner.is_granted()) else { return };
            let since = *session.granted_at.get_or_insert(now);
            if now.since(since) > MS * 1000 {
                self.source_event(host, SourceEvent::Resolve);
            }
        }
    }

    /// The VM's owner begins to move it, if nothing is under way.
    pub fn begin_move(&mut self) {
        let again = MS * self.chance.within(20, 2000) as u32;
        self.schedule_in(again, Event::Move);
        let owner = (0..2).find(|host| matches!(self.hosts[*host].note, Some(Note::Owned(_))));
        let Some(host) = owner.filter(|host| self.hosts[*host].is_running() && !self.is_healed) else { return };
        let Some(Note::Owned(owned)) = self.hosts[host].note else { return };
        let own = owned.generation();
        let (me, peer) = (self.hosts[host].key, self.hosts[1 - host].key);
        let attempt = AttemptId(self.chance.draw() | 1);
        let is_idle = |daemon: &Daemon| daemon.source.is_none() && daemon.destination.is_none();
        if self.hosts[host].paused_until > self.now || !self.hosts[host].daemon.as_ref().is_some_and(is_idle) {
            return;
        }
        let offered = Offered { attempt, peer, generation: own.next(), register: None };
        // Written before anything is sent.
        self.hosts[host].note = Some(Note::Owned(Owned::Offered(offered)));
        let mut actions = Vec::new();
        let mut owner = Source::begin(me, own, offered, self.now);
        let is_linked = self.link.seen[host] != 0;
        if !is_linked {
            owner.apply(self.now, SourceEvent::LinkDown, &mut actions);
        }
        let daemon = self.hosts[host].daemon.as_mut().expect("looked at");
        daemon.source = Some(Outgoing::new(owner, Stage::Greeting));
        self.tell(|| format!("{host} begins {attempt}"));
        self.execute(host, actions);
        if is_linked {
            self.source_greets(host);
        }
    }

    pub fn submit_note(&mut self, host: usize, note: Option<Note>) {
        if self.hosts[host].writing.is_some() && self.plan.mistake.is_none() {
            self.note_violation("two writes of one note".to_owned());
        }
        self.writes += 1;
        let id = self.writes;
        self.hosts[host].writing = Some((id, note));
        let delay = self.any(self.plan.write_max);
        self.schedule_in(delay, Event::Written { host, id });
        match note {
            Some(Note::Given(..)) => self.reach(Phase::Note),
            Some(Note::Accepted(..)) => self.reach(Phase::GrantHere),
            _ => {}
        }
        let trusts = match self.plan.mistake {
            Some(Mistake::RunsBeforeNote) => matches!(note, Some(Note::Accepted(..))),
            Some(Mistake::GrantsBeforeNote) => matches!(note, Some(Note::Given(..))),
            _ => false,
        };
        if trusts {
            self.schedule_host(host, Duration::ZERO, |host, life| Event::Completed { host, life, is_written: true });
        }
    }

    /// A write ends. One that fails may have had its effect.
    pub fn write_note(&mut self, host: usize, id: u64) {
        let Some((_, note)) = self.hosts[host].writing.take_if(|(writing, _)| *writing == id) else { return };
        let is_written = !self.hosts[host].disk_fails;
        if is_written || self.chance.per_mille(500) {
            self.hosts[host].note = note;
        }
        self.schedule_host(host, Duration::ZERO, |host, life| Event::Completed { host, life, is_written });
    }

    pub fn note_written(&mut self, host: usize, is_written: bool) {
        self.source_event(host, SourceEvent::Written(is_written));
        self.destination_event(host, DestinationEvent::Written(is_written));
    }

    pub fn ask(&mut self, host: usize, claim: Claim) {
        let (life, attempt) = (self.hosts[host].life, claim.attempt);
        if self.plan.registers[host] != Some(claim.register) {
            self.note_violation(format!("{host} asks an arbiter that the other does not ask: {claim:?}"));
        }
        let is_lost = self.arbiter_gone[host] || (!self.is_healed && self.chance.per_mille(20));
        let delay = self.any(MS * 20);
        if !is_lost {
            return self.schedule_in(delay, Event::Claim { host, life, claim, is_answered: true });
        }
        // It may have an effect all the same, much later.
        if self.chance.per_mille(300) {
            let late = self.any(MS * 8000);
            self.schedule_in(late, Event::Claim { host, life, claim, is_answered: false });
        }
        let is_mistaken = self.plan.mistake == Some(Mistake::RunsUnanswered) && claim.step == Step::Run;
        let named = Registered { generation: claim.offered, owner: claim.destination };
        let answer = is_mistaken.then_some(named);
        self.schedule_in(MS * 500, Event::Answer { host, life, attempt, answer });
    }

    pub fn claim(&mut self, host: usize, life: u64, claim: Claim, is_answered: bool) {
        let attempt = claim.attempt;
        let answer = claim.apply(self.registers.get(&(claim.register, attempt)).copied());
        self.tell(|| format!("the arbiter has {answer:?} for {attempt}"));
        if let Some(registered) = answer {
            self.registers.insert((claim.register, attempt), registered);
            if !claim.is_possible(registered) {
                self.note_violation(format!("the arbiter has {registered:?}"));
            }
        }
        if is_answered {
            let delay = self.any(MS * 20);
            self.schedule_in(delay, Event::Answer { host, life, attempt, answer });
        }
    }

    /// For the machine that has asked.
    pub fn answered(&mut self, host: usize, attempt: AttemptId, answer: Option<Registered>) {
        if self.outgoing(host).is_some_and(|session| session.owner.offered().attempt == attempt) {
            self.source_event(host, SourceEvent::Arbiter(answer));
        } else if self.incoming(host).is_some_and(|session| session.owner.offered().attempt == attempt) {
            self.destination_event(host, DestinationEvent::Arbiter(answer));
        }
    }

    /// At once, late, or never.
    fn unregister(&mut self, register: RegisterId, attempt: AttemptId) {
        let late = [MS * 20, MS * 20, MS * 8000][self.chance.below(3) as usize];
        let delay = self.any(late);
        if self.chance.per_mille(800) {
            self.schedule_in(delay, Event::Unregister(register, attempt));
        }
    }

    pub fn kill_daemon(&mut self, host: usize) {
        if self.hosts[host].daemon.take().is_none() {
            return;
        }
        self.stats.crashes += 1;
        self.tell(|| format!("{host}: the daemon dies"));
        let connection = self.link.seen[host];
        self.lose_connection(host, connection);
        // What was not synced is lost, or there.
        if let Some((_, note)) = self.hosts[host].writing.take()
            && self.chance.per_mille(500)
        {
            self.hosts[host].note = note;
        }
        self.hosts[host].life += 1;
        let delay = MS * self.chance.within(1, if self.is_healed { 1 } else { 3000 }) as u32;
        self.schedule_in(delay, Event::Restart(host));
    }

    pub fn restart(&mut self, host: usize) {
        if self.hosts[host].daemon.is_some() {
            return;
        }
        self.hosts[host].daemon = Some(Daemon::default());
        let (me, note) = (self.hosts[host].key, self.hosts[host].note);
        let qemu = match self.hosts[host].qemu {
            Some(Qemu { running: true, .. }) => QemuState::Running,
            Some(_) => QemuState::Stopped,
            None => QemuState::Dead,
        };
        self.tell(|| format!("{host}: a daemon starts, {note:?}, QEMU {qemu:?}"));
        if self.plan.mistake == Some(Mistake::RunsAfterRestart)
            && matches!((note, qemu), (Some(Note::Incoming(_)), QemuState::Stopped))
        {
            self.run(host);
        }
        let mut actions = Vec::new();
        let recovered = recover(me, note, qemu, self.now, &mut actions);
        let missing = self.hosts[host].missing.clone();
        let daemon = self.hosts[host].daemon.as_mut().expect("made");
        match recovered {
            Recovered::Settled => {}
            Recovered::Source(owner) => daemon.source = Some(Outgoing::new(*owner, Stage::Granted)),
            Recovered::Destination(owner) => {
                let is_running = matches!(note, Some(Note::Accepted(..)));
                let tail = is_running.then(|| TailDestination::new(missing.clone()));
                daemon.destination = Some(Incoming::new(*owner, tail));
            }
        }
        self.execute(host, actions);
        if missing.is_empty() {
            self.destination_event(host, DestinationEvent::Whole);
        }
        self.schedule_host(host, MS, |host, life| Event::Tick { host, life });
        self.schedule_in(MS, Event::Pump(host));
        self.try_connect();
    }

    pub fn prepared(&mut self, host: usize, is_possible: bool) {
        let Some(session) = self.incoming(host) else { return };
        let attempt = session.owner.offered().attempt;
        if is_possible {
            if matches!(self.hosts[host].note, Some(Note::Incoming(_))) {
                self.hosts[host].reserved = true;
                self.hosts[host].qemu = Some(Qemu { running: false, count: 0 });
                self.hosts[host].was_killed = false;
            }
            self.destination_event(host, DestinationEvent::Prepared);
        } else {
            let room = crate::source::ROOM;
            self.send(host, &Control::NoRoom { attempt, needed: room, free: Default::default() });
            self.destination_event(host, DestinationEvent::CannotPrepare);
        }
    }
}
