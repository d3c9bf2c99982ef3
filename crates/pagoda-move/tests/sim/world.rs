//! Two hosts, a link, an arbiter and one VM, under virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use pagoda_core::chance::Chance;
use pagoda_move::map::PageRun;
use pagoda_move::note::{Note, Owned};
use pagoda_move::owner::{Claim, DestinationEvent, Registered, SourceEvent};
use pagoda_move::units::{AttemptId, Generation, Moment, RegisterId};

use crate::host::{Host, PAGES, Qemu};
use crate::link::{Frame, Link};
use crate::plan::{Fault, MS, Plan};

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
        attempt: AttemptId,
        answer: Option<Registered>,
    },
    /// A register is removed.
    Unregister(RegisterId, AttemptId),
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
    /// First writes that waited, for writers were slowed.
    pub slowed: u64,
    /// The longest that no host ran the VM after all had healed, in milliseconds.
    pub idle_ms_max: u64,
}

#[derive(Debug)]
pub struct World {
    pub now: Moment,
    pub plan: Plan,
    pub hosts: [Host; 2],
    pub link: Link,
    /// What the arbiter has.
    pub registers: BTreeMap<(RegisterId, AttemptId), Registered>,
    pub arbiter_gone: [bool; 2],
    /// What the VM's memory holds, and how many disk writes it has done, by its own word.
    pub truth: Vec<u64>,
    pub count: u64,
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
    /// Notes that were begun to be written.
    pub writes: u64,
}

impl World {
    pub fn new(plan: Plan, mut chance: Chance, trace: bool) -> World {
        let mut hosts = [Host::new(1), Host::new(2)];
        hosts[0].note = Some(Note::Owned(Owned::Alone(Generation(1))));
        hosts[0].qemu = Some(Qemu { running: true, count: 0 });
        hosts[0].reserved = true;
        let truth: Vec<u64> = (0..PAGES.0).map(|page| if chance.per_mille(300) { 0 } else { page + 1 }).collect();
        hosts[0].ram.clone_from(&truth);
        let mut world = World {
            now: Moment::default(),
            plan,
            hosts,
            link: Link::default(),
            registers: BTreeMap::new(),
            arbiter_gone: [false; 2],
            truth,
            count: 0,
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
            Event::Answer { host, life, attempt, answer } => {
                if self.is_alive(host, life) {
                    self.answered(host, attempt, answer);
                }
            }
            Event::Unregister(register, attempt) => drop(self.registers.remove(&(register, attempt))),
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
