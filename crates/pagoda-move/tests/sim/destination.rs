//! The daemon of the host that a VM comes to.

use std::collections::BTreeMap;

use pagoda_core::units::PageIdx;
use pagoda_move::arrival::Arrival;
use pagoda_move::compare::{HostFacts, Namesake, compare};
use pagoda_move::map::PageRun;
use pagoda_move::note::{Note, Offered};
use pagoda_move::owner::{Destination, DestinationEvent, settled_by};
use pagoda_move::tail::{Fault as TailFault, TailDestination};
use pagoda_move::units::{AttemptId, ConnectionNo};
use pagoda_move::wire::control::MapPart;
use pagoda_move::wire::offer::{Capabilities, Hello};
use pagoda_move::wire::{Control, Data, RunKind};

use crate::host::{PAGES, STREAMS};
use crate::mistake::Mistake;
use crate::source::{CAPABILITIES, regions};
use crate::world::{Event, World};

#[derive(Debug)]
pub struct Incoming {
    pub owner: Destination,
    arrival: Arrival,
    is_loaded: bool,
    pub tail: Option<TailDestination>,
    storing: BTreeMap<PageIdx, u64>,
}

impl Incoming {
    pub fn new(owner: Destination, tail: Option<TailDestination>) -> Incoming {
        Incoming {
            arrival: Arrival::new(owner.offered().attempt, PAGES, STREAMS as u16),
            owner,
            is_loaded: tail.is_some(),
            tail,
            storing: BTreeMap::new(),
        }
    }
}

impl World {
    pub fn destination_greeted(&mut self, host: usize, hello: &Hello) {
        if let Some(incoming) = self.incoming(host) {
            let Some(earlier) = settled_by(hello, incoming.owner.offered()) else { return };
            self.destination_event(host, DestinationEvent::Message(&earlier));
        }
        let (note, register) = (self.hosts[host].note, self.plan.registers[host]);
        let Some(daemon) = &mut self.hosts[host].daemon else { return };
        let namesake = match note {
            _ if daemon.source.is_some() || daemon.destination.is_some() => Namesake::Unsettled,
            Some(Note::Owned(owned)) => Namesake::Owned(owned.generation()),
            _ => Namesake::None,
        };
        let (regions, attempt) = (regions(), hello.attempt);
        let facts = HostFacts {
            software: "sim",
            unix_s: 0,
            capabilities: CAPABILITIES,
            required: Capabilities::default(),
            register,
            qemu: Some("10"),
            machines: &["pc"],
            cpu_features: &[],
            regions: &regions,
            namesake,
            forbidden: &[],
        };
        let message = match compare(hello, &facts) {
            Ok(welcome) => {
                daemon.greeted = Some(hello.clone());
                Control::Welcome(welcome)
            }
            Err(reasons) => Control::Refuse { attempt, reasons },
        };
        self.send(host, &message);
    }

    /// The first message that leaves a trace here.
    pub fn destination_reserves(&mut self, host: usize, attempt: AttemptId) {
        let (me, peer, note) = (self.hosts[host].key, self.hosts[1 - host].key, self.hosts[host].note);
        let own = self.plan.registers[host];
        let Some(daemon) = &mut self.hosts[host].daemon else { return };
        let is_busy = daemon.source.is_some() || daemon.destination.is_some() || matches!(note, Some(Note::Owned(_)));
        let Some(hello) = daemon.greeted.take_if(|hello| hello.attempt == attempt && !is_busy) else { return };
        let register = own.filter(|_| own == hello.register);
        let offered = Offered { attempt, peer, generation: hello.generation.next(), register };
        let mut actions = Vec::new();
        let owner = Destination::begin(me, offered, note, self.now, &mut actions);
        daemon.destination = Some(Incoming::new(owner, None));
        self.execute(host, actions);
    }

    pub fn destination_receives(&mut self, host: usize, message: &Control) {
        let Some(session) = self.incoming(host) else { return };
        let takes = session.owner.takes_pages();
        match message {
            Control::Resume { attempt, connection } => {
                let attempt = *attempt;
                assert!(*connection >= ConnectionNo(1));
                if !takes {
                    self.send(host, &Control::Forgotten { attempt });
                }
            }
            Control::Missing { part, .. } if takes => session.arrival.missing(part).expect("a map of ours"),
            Control::State { bytes, offset, .. } if takes => {
                session.arrival.state(*offset, bytes).expect("a state of ours");
            }
            Control::StateEnd { total, round, .. } if takes => {
                session.arrival.end_state(*total, *round);
                self.load(host);
            }
            _ => {}
        }
        self.destination_event(host, DestinationEvent::Message(message));
    }

    /// With all rounds, the map and the state the VM can run.
    fn load(&mut self, host: usize) {
        let Some(session) = self.incoming(host) else { return };
        let Some((state, map)) = session.arrival.all().filter(|_| !session.is_loaded) else { return };
        let (count, map) = (u64::from_le_bytes(state.try_into().expect("eight bytes")), map.clone());
        session.is_loaded = true;
        session.tail = Some(TailDestination::new(map.clone()));
        if let Some(qemu) = &mut self.hosts[host].qemu {
            qemu.count = count;
        }
        let is_whole = map.is_empty();
        self.hosts[host].missing = map;
        self.destination_event(host, DestinationEvent::Loaded);
        if is_whole {
            self.destination_event(host, DestinationEvent::Whole);
        }
    }

    pub fn destination_data(&mut self, host: usize, stream: u16, data: Data<'_>) {
        let mistake = self.plan.mistake;
        let Some(session) = self.incoming(host) else { return };
        let attempt = session.owner.offered().attempt;
        match data {
            Data::Open { attempt, round, .. } => {
                session.arrival.open(attempt, stream, round).expect("a stream of ours")
            }
            Data::RoundEnd { round } => {
                let mut whole = session.arrival.end_round(stream, round).unwrap_or_default();
                if mistake == Some(Mistake::AcknowledgesEarly) {
                    whole = whole.or(session.arrival.end_round(1 - stream, round).unwrap_or_default());
                }
                if let Some(round) = whole.filter(|_| session.owner.takes_pages()) {
                    self.send(host, &Control::RoundKept { attempt, round });
                    self.load(host);
                }
            }
            Data::Run { pages, kind } => {
                let counts = session.arrival.counts(stream, pages).expect("pages of ours");
                let forgets = mistake == Some(Mistake::ForgetsAttempt);
                if (counts || forgets) && session.owner.takes_pages() {
                    self.take_run(host, pages, kind);
                }
            }
        }
    }

    fn take_run(&mut self, host: usize, pages: PageRun, kind: RunKind<'_>) {
        let content = |index: usize| match kind {
            RunKind::Content(_, bytes) => u64::from_le_bytes(bytes[8 * index..8 * index + 8].try_into().unwrap()),
            _ => 0,
        };
        let values: Vec<(PageIdx, u64)> =
            pages.iter().enumerate().map(|(index, page)| (page, content(index))).collect();
        let stores_twice = self.plan.mistake == Some(Mistake::StoresTwice);
        let Some(session) = self.incoming(host) else { return };
        if !session.owner.is_running() {
            // The VM has not run: what comes again is newer.
            values.iter().for_each(|(page, value)| self.hosts[host].ram[page.0 as usize] = *value);
            return;
        }
        let Some(tail) = &mut session.tail else { return };
        let new = tail.arrived(pages).expect("pages of the VM");
        let chunk = pages.chunk;
        for (page, value) in values {
            if new.contains(page.index_in_chunk()) && page.chunk() == chunk || stores_twice {
                session.storing.insert(page, value);
            }
        }
        let delay = self.any(self.plan.write_max);
        self.schedule_host(host, delay, |host, life| Event::Stored { host, life, run: pages });
    }

    /// Pages of the tail are in their places.
    pub fn stored(&mut self, host: usize, run: PageRun) {
        let Some(session) = self.incoming(host) else { return };
        let Some(tail) = &mut session.tail else { return };
        let values: Vec<(PageIdx, u64)> =
            run.iter().filter_map(|page| Some((page, session.storing.remove(&page)?))).collect();
        tail.stored(run);
        let is_whole = tail.is_whole();
        for (page, value) in values {
            self.hosts[host].ram[page.0 as usize] = value;
            self.hosts[host].missing.remove(page);
        }
        self.acknowledge(host);
        if is_whole {
            self.destination_event(host, DestinationEvent::Whole);
        }
    }

    fn acknowledge(&mut self, host: usize) {
        let is_linked = self.link.seen[host] != 0;
        let Some(session) = self.incoming(host).filter(|_| is_linked) else { return };
        let attempt = session.owner.offered().attempt;
        let Some(tail) = &mut session.tail else { return };
        let runs = tail.take_kept();
        if !runs.is_empty() {
            self.send(host, &Control::Kept { attempt, runs });
        }
    }

    /// A thread touches a page. Whether it can go on.
    pub fn touch(&mut self, host: usize, page: PageIdx) -> bool {
        if !self.hosts[host].missing.contains(page) {
            return true;
        }
        let is_linked = self.link.seen[host] != 0;
        let Some(session) = self.incoming(host) else { return false };
        let attempt = session.owner.offered().attempt;
        let Some(tail) = &mut session.tail else { return false };
        assert_eq!(tail.fault(page), TailFault::Wait, "page {} is missing", page.0);
        let runs = if is_linked { tail.take_demand() } else { Vec::new() };
        if !runs.is_empty() {
            self.send(host, &Control::Demand { attempt, runs });
        }
        false
    }

    /// First on a connection.
    pub fn destination_greets(&mut self, host: usize) {
        let Some(session) = self.incoming(host) else { return };
        session.arrival.connect();
        if session.owner.is_running() {
            self.send_missing(host);
        }
    }

    /// Once on each connection, before the source hears that the VM runs: what it sent before is forgotten.
    pub fn send_missing(&mut self, host: usize) {
        let Some(session) = self.incoming(host) else { return };
        let attempt = session.owner.offered().attempt;
        let Some(tail) = session.tail.as_mut().filter(|tail| !tail.is_whole()) else { return };
        let chunks = tail.resume().filled().collect();
        self.send(host, &Control::Missing { attempt, part: MapPart { chunks, last: true } });
    }

    pub fn incoming(&mut self, host: usize) -> Option<&mut Incoming> {
        self.hosts[host].daemon.as_mut()?.destination.as_mut()
    }
}
