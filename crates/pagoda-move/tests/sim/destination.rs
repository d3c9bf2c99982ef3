//! The daemon of the host that a VM comes to.

use std::collections::BTreeMap;

use pagoda_core::units::{Bytes, PageIdx};
use pagoda_move::compare::{HostFacts, Namesake, compare};
use pagoda_move::map::{PageMap, PageRun};
use pagoda_move::note::{Note, Offered};
use pagoda_move::owner::{Destination, DestinationEvent, settled_by};
use pagoda_move::tail::{Fault as TailFault, TailDestination};
use pagoda_move::units::{AttemptId, ConnectionNo, RoundNo};
use pagoda_move::wire::control::MapPart;
use pagoda_move::wire::offer::{Capabilities, Hello};
use pagoda_move::wire::{Control, Data, RunKind};

use crate::host::{PAGES, STREAMS};
use crate::mistake::Mistake;
use crate::source::regions;
use crate::world::{Event, World};

#[derive(Debug)]
pub struct Incoming {
    pub owner: Destination,
    /// By stream: the attempt that it was opened for, and the round that comes by it.
    streams: [Option<(AttemptId, RoundNo)>; STREAMS],
    /// Rounds that have ended by every stream, counted from the first.
    rounds: u32,
    map: Option<PageMap>,
    state: Vec<u8>,
    state_end: Option<(Bytes, RoundNo)>,
    is_loaded: bool,
    pub tail: Option<TailDestination>,
    storing: BTreeMap<PageIdx, u64>,
}

impl Incoming {
    pub fn new(owner: Destination, tail: Option<TailDestination>) -> Incoming {
        Incoming {
            owner,
            streams: [None; STREAMS],
            rounds: 0,
            map: None,
            state: Vec::new(),
            state_end: None,
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
        let note = self.hosts[host].note;
        let Some(daemon) = &mut self.hosts[host].daemon else { return };
        let namesake = match note {
            _ if daemon.source.is_some() || daemon.destination.is_some() => Namesake::Unsettled,
            Some(Note::Owned(generation)) => Namesake::Owned(generation),
            _ => Namesake::None,
        };
        let (regions, attempt) = (regions(), hello.attempt);
        let facts = HostFacts {
            software: "sim",
            unix_s: 0,
            capabilities: Capabilities::POSTCOPY,
            required: Capabilities::default(),
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
        let Some(daemon) = &mut self.hosts[host].daemon else { return };
        let is_busy = daemon.source.is_some() || daemon.destination.is_some() || matches!(note, Some(Note::Owned(_)));
        let Some(hello) = daemon.greeted.take_if(|hello| hello.attempt == attempt && !is_busy) else { return };
        let offered = Offered { attempt, peer, generation: hello.generation.next() };
        let mut actions = Vec::new();
        let owner = Destination::begin(me, offered, note, self.plan.arbiter, self.now, &mut actions);
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
            Control::Missing { part, .. } if takes && !session.is_loaded => {
                let mut map = PageMap::empty(PAGES);
                part.chunks.iter().for_each(|(chunk, pages)| map.insert_in(*chunk, *pages));
                (session.map, session.state_end) = (Some(map), None);
                session.state.clear();
            }
            Control::State { bytes, offset, .. } if takes && offset.0 == session.state.len() as u64 => {
                session.state.extend_from_slice(bytes);
            }
            Control::StateEnd { total, round, .. } if takes => {
                session.state_end = Some((*total, *round));
                self.load(host);
            }
            _ => {}
        }
        self.destination_event(host, DestinationEvent::Message(message));
    }

    /// With all rounds, the map and the state the VM can run.
    fn load(&mut self, host: usize) {
        let Some(session) = self.incoming(host) else { return };
        let Some((total, round)) = session.state_end else { return };
        let is_here = total.0 == session.state.len() as u64 && session.rounds > round.0;
        if !is_here || session.is_loaded {
            return;
        }
        let Some(map) = session.map.clone() else { return };
        let count = u64::from_le_bytes(session.state[..].try_into().expect("eight bytes"));
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

    pub fn destination_data(&mut self, host: usize, stream: usize, data: Data<'_>) {
        let mistake = self.plan.mistake;
        let Some(session) = self.incoming(host) else { return };
        let own = session.owner.offered().attempt;
        match data {
            Data::Open { attempt, round, .. } => session.streams[stream] = Some((attempt, round)),
            Data::RoundEnd { round } => {
                let Some((attempt, coming)) = &mut session.streams[stream] else { return };
                if *attempt != own || round != *coming {
                    return;
                }
                *coming = round.next();
                let ended = session.streams.iter().map(|stream| stream.map_or(0, |(_, coming)| coming.0));
                let ended = if mistake == Some(Mistake::AcknowledgesEarly) { ended.max() } else { ended.min() };
                let ended = ended.unwrap_or(0);
                if ended > session.rounds && session.owner.takes_pages() {
                    session.rounds = ended;
                    self.send(host, &Control::RoundKept { attempt: own, round: RoundNo(ended - 1) });
                    self.load(host);
                }
            }
            Data::Run { pages, kind } => {
                let forgets = mistake == Some(Mistake::ForgetsAttempt);
                let is_own = session.streams[stream].is_some_and(|(attempt, _)| attempt == own) || forgets;
                if is_own && session.owner.takes_pages() {
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
        session.streams = [None; STREAMS];
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
