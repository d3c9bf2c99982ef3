//! Two hosts, a link, an arbiter and one VM, under virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use pagoda_core::chance::Chance;
use pagoda_core::units::PageIdx;
use pagoda_move::map::PageRun;
use pagoda_move::note::{Note, Offered};
use pagoda_move::owner::{
    Action, Answer, Claim, Destination, DestinationEvent, End, Qemu as QemuState, Recovered, Registered, Source,
    SourceEvent, answer, recover,
};
use pagoda_move::rounds::Slowing;
use pagoda_move::tail::TailDestination;
use pagoda_move::units::{AttemptId, Generation, Moment};
use pagoda_move::wire::limits::HEADER_SIZE;
use pagoda_move::wire::{Control, ControlHeader, Data, DataHeader};

use crate::destination::Incoming;
use crate::host::{Daemon, Host, PAGES, Qemu};
use crate::link::{CONTROL, Frame, Link};
use crate::mistake::Mistake;
use crate::plan::{Fault, MS, Phase, Plan};
use crate::source::{Outgoing, Stage};

#[derive(Debug)]
pub enum Event {
    Frame(Frame),
    /// A control message of some earlier moment comes again.
    Stray {
        to: usize,
        bytes: Vec<u8>,
    },
    /// A host finds that its connection is dead.
    Notice {
        host: usize,
        connection: u32,
    },
    Connect,
    Tick {
        host: usize,
        life: u64,
    },
    Pump(usize),
    Guest,
    Move,
    Written {
        host: usize,
        id: u64,
    },
    /// The write has ended, for the daemon.
    Completed {
        host: usize,
        life: u64,
        is_written: bool,
    },
    Claim {
        host: usize,
        life: u64,
        claim: Claim,
        is_answered: bool,
    },
    Answer {
        host: usize,
        life: u64,
        answer: Option<Registered>,
    },
    Stopped {
        host: usize,
    },
    Prepared {
        host: usize,
        life: u64,
        is_possible: bool,
    },
    QemuDied {
        host: usize,
        life: u64,
    },
    Stored {
        host: usize,
        life: u64,
        run: PageRun,
    },
    Fault(Fault, Duration),
    Heals(Fault),
    Restart(usize),
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub moved: u64,
    pub given_up: u64,
    pub came_back: u64,
    pub crashed: u64,
    pub freed: u64,
    pub faults: u64,
    pub crashes: u64,
    pub checked: u64,
    pub strays: u64,
    /// The longest that no host ran the VM after all had healed, in milliseconds.
    pub idle_ms_max: u64,
}

#[derive(Debug)]
pub struct World {
    pub now: Moment,
    pub plan: Plan,
    pub hosts: [Host; 2],
    pub link: Link,
    pub register: Option<Registered>,
    pub arbiter_gone: [bool; 2],
    /// What the VM's memory holds, and how many disk writes it has done, by its own word.
    pub truth: Vec<u64>,
    pub count: u64,
    pub slowing: Slowing,
    pub chance: Chance,
    pub stats: Stats,
    pub violation: Option<String>,
    /// Nothing goes wrong any more.
    pub is_healed: bool,
    /// What has gone wrong stays so.
    pub never_heals: bool,
    pub trace: bool,
    queue: BTreeMap<(Moment, u64), Event>,
    /// What a stopped daemon has not taken in.
    deferred: [Vec<Event>; 2],
    events: u64,
    writes: u64,
}

impl World {
    pub fn new(plan: Plan, mut chance: Chance, trace: bool) -> World {
        let mut hosts = [Host::new(1), Host::new(2)];
        hosts[0].note = Some(Note::Owned(Generation(1)));
        hosts[0].qemu = Some(Qemu { running: true, count: 0 });
        hosts[0].reserved = true;
        let truth: Vec<u64> = (0..PAGES.0).map(|page| if chance.per_mille(300) { 0 } else { page + 1 }).collect();
        hosts[0].ram.clone_from(&truth);
        let mut world = World {
            now: Moment::default(),
            plan,
            hosts,
            link: Link::default(),
            register: None,
            arbiter_gone: [false; 2],
            truth,
            count: 0,
            slowing: Slowing::NONE,
            chance,
            stats: Stats::default(),
            violation: None,
            is_healed: false,
            never_heals: false,
            trace,
            queue: BTreeMap::new(),
            deferred: Default::default(),
            events: 0,
            writes: 1_000_000,
        };
        world.schedule_in(MS, Event::Connect);
        world.schedule_in(MS * 5, Event::Guest);
        world.schedule_in(MS * 40, Event::Move);
        for host in 0..2 {
            world.schedule_in(MS, Event::Tick { host, life: 0 });
        }
        for _ in 0..world.plan.random_faults {
            let fault = Fault::ALL[world.chance.below(Fault::ALL.len() as u64) as usize];
            let (at, span) = (world.any(world.plan.chaos), fault.any_span(&mut world.chance));
            world.schedule_in(at, Event::Fault(fault, span));
        }
        world
    }

    pub fn schedule_in(&mut self, delay: Duration, event: Event) {
        self.schedule(self.now + delay, event);
    }

    pub fn schedule(&mut self, at: Moment, event: Event) {
        self.events += 1;
        self.queue.insert((at, self.events), event);
    }

    /// An event for the daemon that lives now.
    pub fn schedule_host(&mut self, host: usize, delay: Duration, event: impl FnOnce(usize, u64) -> Event) {
        let life = self.hosts[host].life;
        self.schedule_in(delay, event(host, life));
    }

    /// Up to so long, in steps of a microsecond.
    pub fn any(&mut self, most: Duration) -> Duration {
        Duration::from_micros(self.chance.below(most.as_micros() as u64 + 1))
    }

    pub fn note_violation(&mut self, what: String) {
        let now = self.now.0;
        self.violation.get_or_insert_with(|| format!("{now:?}: {what}"));
    }

    pub fn tell(&self, what: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>12?} {}", self.now.0, what());
        }
    }

    /// Takes the next event in. False if that is beyond `until`.
    pub fn step(&mut self, until: Moment) -> bool {
        let Some(((at, _), _)) = self.queue.first_key_value() else { return false };
        if *at > until {
            self.now = until;
            return false;
        }
        let ((at, _), event) = self.queue.pop_first().expect("looked at");
        self.now = at;
        if let Some(host) = paused_host(&event)
            && self.hosts[host].paused_until > self.now
        {
            self.deferred[host].push(event);
            return true;
        }
        self.take(event);
        self.check_running();
        true
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Frame(frame) => self.receive_frame(frame),
            Event::Stray { to, bytes } => {
                if self.link.seen[to] != 0 && self.hosts[to].daemon.is_some() {
                    self.stats.strays += 1;
                    self.receive_control(to, &bytes);
                }
            }
            Event::Notice { host, connection } => self.lose_connection(host, connection),
            Event::Connect => self.connect(),
            Event::Tick { host, life } => {
                if self.is_alive(host, life) {
                    self.tick(host);
                    self.schedule_host(host, MS * 50, |host, life| Event::Tick { host, life });
                }
            }
            Event::Pump(host) => {
                if self.outgoing(host).is_some() {
                    self.pump(host);
                }
            }
            Event::Guest => self.guest(),
            Event::Move => self.begin_move(),
            Event::Written { host, id } => self.write_note(host, id),
            Event::Completed { host, life, is_written } => {
                if self.is_alive(host, life) {
                    self.note_written(host, is_written);
                }
            }
            Event::Claim { host, life, claim, is_answered } => self.claim(host, life, claim, is_answered),
            Event::Answer { host, life, answer } => {
                if self.is_alive(host, life) {
                    self.source_event(host, SourceEvent::Arbiter(answer));
                    self.destination_event(host, DestinationEvent::Arbiter(answer));
                }
            }
            Event::Stopped { host } => self.stop_qemu(host),
            Event::Prepared { host, life, is_possible } => {
                if self.is_alive(host, life) {
                    self.prepared(host, is_possible);
                }
            }
            Event::QemuDied { host, life } => {
                if self.is_alive(host, life) {
                    self.source_event(host, SourceEvent::QemuDied);
                    self.destination_event(host, DestinationEvent::QemuDied);
                }
            }
            Event::Stored { host, life, run } => {
                if self.is_alive(host, life) {
                    self.stored(host, run);
                }
            }
            Event::Fault(fault, span) => self.begin_fault(fault, span),
            Event::Heals(fault) => {
                if !self.never_heals {
                    self.end_fault(fault);
                }
            }
            Event::Restart(host) => self.restart(host),
        }
    }

    /// A stopped daemon goes on.
    pub fn resume(&mut self, host: usize) {
        if self.hosts[host].paused_until <= self.now {
            for event in std::mem::take(&mut self.deferred[host]) {
                self.schedule_in(Duration::ZERO, event);
            }
        }
    }

    pub fn is_alive(&self, host: usize, life: u64) -> bool {
        self.hosts[host].daemon.is_some() && self.hosts[host].life == life
    }

    // Messages.

    pub fn send(&mut self, host: usize, message: &Control) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        self.tell(|| format!("{host} sends {message:?}"));
        match message {
            Control::Grant { .. } => self.reach(Phase::GrantSent),
            Control::Whole { .. } => self.reach(Phase::CleanUp),
            _ => {}
        }
        if self.chance.per_mille(self.plan.stray) {
            let (late, bytes) = (self.any(MS * 20_000), bytes.clone());
            self.schedule_in(late, Event::Stray { to: 1 - host, bytes });
        }
        self.send_bytes(host, CONTROL, bytes);
    }

    pub fn send_data(&mut self, host: usize, stream: usize, data: &Data<'_>) {
        let mut bytes = Vec::new();
        data.encode(&mut bytes);
        self.send_bytes(host, stream, bytes);
    }

    fn send_bytes(&mut self, host: usize, channel: usize, bytes: Vec<u8>) {
        let connection = self.link.seen[host];
        if connection == 0 {
            return;
        }
        let slow = if channel == 0 { self.plan.slow_stream } else { 1 };
        let (to, delay) = (1 - host, self.any(self.plan.delay_max) * slow);
        let at = self.link.arrival(to, channel, self.now, delay);
        self.schedule(at, Event::Frame(Frame { to, connection, channel, bytes }));
    }

    fn receive_frame(&mut self, frame: Frame) {
        let Frame { to, connection, channel, .. } = frame;
        let is_current = self.link.seen[to] == connection;
        let is_late = self.plan.mistake == Some(Mistake::ForgetsAttempt) && self.link.seen[to] != 0;
        if self.link.cut[1 - to] && (is_current || self.plan.mistake.is_some()) {
            self.link.held.push(frame);
        } else if self.hosts[to].daemon.is_some() && (is_current || is_late) {
            match channel {
                CONTROL => self.receive_control(to, &frame.bytes),
                stream => {
                    let (header, payload) = frame.bytes.split_first_chunk::<HEADER_SIZE>().expect("a header");
                    let header = DataHeader::decode(*header).expect("a frame of ours");
                    self.destination_data(to, stream, Data::decode(header, payload).expect("a frame of ours"));
                }
            }
        }
    }

    fn receive_control(&mut self, host: usize, bytes: &[u8]) {
        let (header, payload) = bytes.split_first_chunk::<HEADER_SIZE>().expect("a header");
        let header = ControlHeader::decode(*header).expect("a frame of ours");
        let message = Control::decode(header, payload).expect("a frame of ours");
        let attempt = message.attempt();
        let forgets = self.plan.mistake == Some(Mistake::ForgetsAttempt);
        let is_of = |offered: Offered| offered.attempt == attempt || forgets;
        if let Control::Hello(hello) = &message {
            self.destination_greeted(host, hello);
        } else if self.outgoing(host).is_some_and(|session| is_of(session.owner.offered())) {
            self.source_receives(host, &message);
        } else if self.incoming(host).is_some_and(|session| is_of(session.owner.offered())) {
            self.destination_receives(host, &message);
        } else {
            if let Control::Reserve { .. } = &message {
                self.destination_reserves(host, attempt);
            }
            let is_alive = self.hosts[host].daemon.is_some();
            if is_alive && self.incoming(host).is_none_or(|session| session.owner.offered().attempt != attempt) {
                self.answer(host, &message);
            }
        }
    }

    /// A message about an attempt that this host has no machine for.
    fn answer(&mut self, host: usize, message: &Control) {
        let (me, peer) = (self.hosts[host].key, self.hosts[1 - host].key);
        match answer(self.hosts[host].current_note(), peer, message) {
            Answer::Nothing => {}
            Answer::Send(message) => self.send(host, &message),
            // The note is busy with another attempt. A grant that counts is repeated.
            Answer::Refuse(..) if self.outgoing(host).is_some() || self.incoming(host).is_some() => {}
            Answer::Refuse(offered, by) => {
                let (arbiter, now, mut actions) = (self.plan.arbiter, self.now, Vec::new());
                let owner = Destination::refuse_unknown(me, offered, by, arbiter, now, &mut actions);
                let daemon = self.hosts[host].daemon.as_mut().expect("a daemon");
                daemon.destination = Some(Incoming::new(owner, None));
                self.execute(host, actions);
            }
            Answer::Superseded(generation) => self.note_violation(format!("superseded by {generation:?}")),
        }
    }

    // Connections.

    fn connect(&mut self) {
        self.link.is_connecting = false;
        let now = self.now;
        let is_up = |host: &Host| host.daemon.is_some() && host.paused_until <= now;
        if self.link.is_cut() || !self.hosts.iter().all(is_up) {
            return;
        }
        let seen = self.link.seen;
        if seen[0] == seen[1] && seen[0] != 0 {
            return;
        }
        (0..2).for_each(|host| self.lose_connection(host, seen[host]));
        if !self.hosts.iter().all(is_up) {
            return self.try_connect();
        }
        self.link.last += 1;
        let connection = self.link.last;
        self.link.seen = [connection; 2];
        self.tell(|| format!("connection {connection}"));
        for host in 0..2 {
            self.source_greets(host);
            self.destination_greets(host);
            self.source_event(host, SourceEvent::LinkUp);
            self.destination_event(host, DestinationEvent::LinkUp);
        }
    }

    pub fn try_connect(&mut self) {
        if !std::mem::replace(&mut self.link.is_connecting, true) {
            let delay = self.any(MS * 100);
            self.schedule_in(delay, Event::Connect);
        }
    }

    pub fn lose_connection(&mut self, host: usize, connection: u32) {
        if connection == 0 || self.link.seen[host] != connection {
            return;
        }
        self.link.seen[host] = 0;
        self.tell(|| format!("{host} has lost connection {connection}"));
        let other = 1 - host;
        if !self.link.cut[host] {
            let delay = self.any(MS * 5);
            self.schedule_in(delay, Event::Notice { host: other, connection });
        }
        if self.hosts[host].daemon.is_some() {
            self.source_loses_link(host);
            self.destination_event(host, DestinationEvent::LinkDown);
        }
        self.try_connect();
    }

    // The machines.

    pub fn source_event(&mut self, host: usize, event: SourceEvent<'_>) {
        let now = self.now;
        let Some(session) = self.outgoing(host) else { return };
        let mut actions = Vec::new();
        session.owner.apply(now, event, &mut actions);
        if session.owner.is_over() {
            self.hosts[host].daemon.as_mut().expect("it has a session").source = None;
            self.slowing = Slowing::NONE;
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

    fn execute_one(&mut self, host: usize, action: Action) {
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
            Action::End(end) => match end {
                End::Moved => self.stats.moved += 1,
                End::GivenUp => self.stats.given_up += 1,
                End::CameBack => self.stats.came_back += 1,
                End::Crashed => self.stats.crashed += 1,
                End::Superseded | End::Lost => self.note_violation(format!("{end:?} without an operator")),
            },
        }
    }

    fn tick(&mut self, host: usize) {
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
    fn begin_move(&mut self) {
        let again = MS * self.chance.within(20, 2000) as u32;
        self.schedule_in(again, Event::Move);
        let owner = (0..2).find(|host| matches!(self.hosts[*host].note, Some(Note::Owned(_))));
        let Some(host) = owner.filter(|host| self.hosts[*host].is_running() && !self.is_healed) else { return };
        let Some(Note::Owned(own)) = self.hosts[host].note else { return };
        let (me, peer) = (self.hosts[host].key, self.hosts[1 - host].key);
        let attempt = AttemptId(self.chance.draw() | 1);
        let is_idle = |daemon: &Daemon| daemon.source.is_none() && daemon.destination.is_none();
        if self.hosts[host].paused_until > self.now || !self.hosts[host].daemon.as_ref().is_some_and(is_idle) {
            return;
        }
        let offered = Offered { attempt, peer, generation: own.next() };
        let mut actions = Vec::new();
        let mut owner = Source::begin(me, own, offered, self.plan.arbiter, self.now, &mut actions);
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

    // Notes.

    fn submit_note(&mut self, host: usize, note: Option<Note>) {
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
    fn write_note(&mut self, host: usize, id: u64) {
        let Some((_, note)) = self.hosts[host].writing.take_if(|(writing, _)| *writing == id) else { return };
        let is_written = !self.hosts[host].disk_fails;
        if is_written || self.chance.per_mille(500) {
            self.hosts[host].note = note;
        }
        self.schedule_host(host, Duration::ZERO, |host, life| Event::Completed { host, life, is_written });
    }

    fn note_written(&mut self, host: usize, is_written: bool) {
        self.source_event(host, SourceEvent::Written(is_written));
        self.destination_event(host, DestinationEvent::Written(is_written));
    }

    // The arbiter.

    fn ask(&mut self, host: usize, claim: Claim) {
        let life = self.hosts[host].life;
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
        self.schedule_in(MS * 500, Event::Answer { host, life, answer: None });
    }

    fn claim(&mut self, host: usize, life: u64, claim: Claim, is_answered: bool) {
        if self.register.is_none_or(|registered| registered.generation < claim.below) {
            self.register = Some(claim.value);
        }
        let (register, register_now) = (self.register, self.register.expect("claimed"));
        self.tell(|| format!("the arbiter has {register_now:?}"));
        if is_answered {
            let delay = self.any(MS * 20);
            self.schedule_in(delay, Event::Answer { host, life, answer: register });
        }
    }

    // Daemons.

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
        let recovered = recover(me, note, qemu, self.plan.arbiter, self.now, &mut actions);
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

    fn prepared(&mut self, host: usize, is_possible: bool) {
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

    pub fn page_of(&mut self) -> PageIdx {
        PageIdx(self.chance.below(PAGES.0))
    }
}

/// The host whose daemon an event is for. A daemon that is stopped takes it in later.
fn paused_host(event: &Event) -> Option<usize> {
    match event {
        Event::Frame(frame) => Some(frame.to),
        Event::Stray { to, .. } => Some(*to),
        Event::Notice { host, .. }
        | Event::Tick { host, .. }
        | Event::Completed { host, .. }
        | Event::Answer { host, .. }
        | Event::Prepared { host, .. }
        | Event::QemuDied { host, .. }
        | Event::Stored { host, .. }
        | Event::Pump(host) => Some(*host),
        _ => None,
    }
}
