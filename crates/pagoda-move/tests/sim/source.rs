//! The daemon of the host that a VM leaves: what the next step of the product connects to sockets and QEMU.

use pagoda_core::units::{Bytes, ChunkIdx, PageCount, PageIdx};
use pagoda_move::arrival::add_part;
use pagoda_move::map::{PageMap, PageRun};
use pagoda_move::owner::{Source, SourceEvent};
use pagoda_move::rounds::{Handover, IoEpoch, Next, Phase as RoundsPhase, Rounds, Step};
use pagoda_move::tail::TailSource;
use pagoda_move::units::{AttemptId, ConnectionNo, Moment};
use pagoda_move::wire::control::MapPart;
use pagoda_move::wire::data::stream_of;
use pagoda_move::wire::offer::{Capabilities, Hello, RegionFacts, Room};
use pagoda_move::wire::{Codec, Control, Data, RunKind};

use crate::host::{GARBAGE, PAGES, STREAMS};
use crate::mistake::Mistake;
use crate::plan::Phase;
use crate::world::{Event, World};

/// How far the source is, before pages are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Greeting,
    Reserving,
    Copying,
    /// A restart has forgotten what was before: only the grant is left.
    Granted,
}

#[derive(Debug)]
pub struct Outgoing {
    pub owner: Source,
    pub stage: Stage,
    pub rounds: Option<Rounds>,
    pub tail: Option<TailSource>,
    wait_until: Moment,
    /// A round's end has been sent, and what follows it is not decided.
    undecided: bool,
    /// All that belongs to the last round has been sent by this connection.
    is_last_sent: bool,
    pub granted_at: Option<Moment>,
}

impl Outgoing {
    pub fn new(owner: Source, stage: Stage) -> Outgoing {
        Outgoing {
            owner,
            stage,
            rounds: None,
            tail: None,
            wait_until: Moment::default(),
            undecided: false,
            is_last_sent: false,
            granted_at: None,
        }
    }
}

pub fn hot_first() -> Vec<ChunkIdx> {
    vec![ChunkIdx(1), ChunkIdx(0)]
}

pub fn regions() -> Vec<RegionFacts> {
    vec![RegionFacts { id: "pc.ram".to_owned(), size: PAGES.bytes() }]
}

fn reserve(attempt: AttemptId) -> Control {
    Control::Reserve { attempt, room: ROOM, specification: "{}".to_owned() }
}

/// Of both hosts. Whether they have an arbiter is agreed on by its registers.
pub const CAPABILITIES: Capabilities = Capabilities::POSTCOPY.with(Capabilities::ARBITER);
pub const ROOM: Room = Room { dram: Bytes::from_mib(1), swap: Bytes::from_mib(1), pool: Bytes::ZERO };

impl World {
    /// What the source says first on a connection.
    pub fn source_greets(&mut self, host: usize) {
        let connection = ConnectionNo(self.link.seen[host]);
        let register = self.plan.registers[host];
        let Some(session) = self.outgoing(host) else { return };
        let offered = session.owner.offered();
        let message = match session.stage {
            Stage::Greeting => Control::Hello(Hello {
                attempt: offered.attempt,
                connection,
                generation: pagoda_move::units::Generation(offered.generation.0 - 1),
                protocol_min: 1,
                protocol_max: 1,
                capabilities: CAPABILITIES,
                required: Capabilities::default(),
                unix_s: 0,
                register,
                software: "sim".to_owned(),
                vm: "vm".to_owned(),
                qemu: "10".to_owned(),
                machine: "pc".to_owned(),
                cpu_features: String::new(),
                regions: regions(),
            }),
            Stage::Reserving => reserve(offered.attempt),
            Stage::Copying => Control::Resume { attempt: offered.attempt, connection },
            Stage::Granted => return self.open_streams(host),
        };
        self.send(host, &message);
        if matches!(message, Control::Hello(_)) {
            self.reach(Phase::Hello);
        }
        self.open_streams(host);
    }

    fn open_streams(&mut self, host: usize) {
        let connection = ConnectionNo(self.link.seen[host]);
        let Some(session) = self.outgoing(host) else { return };
        let attempt = session.owner.offered().attempt;
        let round = session.rounds.as_ref().map(Rounds::round).unwrap_or_default();
        for stream in 0..STREAMS as u16 {
            self.send_data(host, stream.into(), &Data::Open { attempt, connection, stream, round });
        }
    }

    pub fn source_receives(&mut self, host: usize, message: &Control) {
        let now = self.now;
        let Some(session) = self.outgoing(host) else { return };
        let attempt = session.owner.offered().attempt;
        match message {
            Control::Welcome(welcome) if session.stage == Stage::Greeting => {
                session.stage = Stage::Reserving;
                if welcome.capabilities.has(Capabilities::ARBITER) {
                    let register = self.plan.registers[host].expect("the destination has the same");
                    self.source_event(host, SourceEvent::Agreed(register));
                }
                self.send(host, &reserve(attempt));
                self.reach(Phase::Reserve);
            }
            Control::Reserved { .. } if session.stage == Stage::Reserving => self.begin_rounds(host),
            Control::RoundKept { round, .. } => {
                if let Some(rounds) = &mut session.rounds {
                    rounds.kept(*round, now);
                    if rounds.is_complete() {
                        self.source_event(host, SourceEvent::Complete);
                    }
                }
            }
            Control::Missing { part, .. } => {
                let mut missing = PageMap::empty(PAGES);
                add_part(&mut missing, part).expect("a map of ours");
                let tail = session.tail.get_or_insert_with(|| TailSource::recover(PAGES, hot_first()));
                let freed = tail.receive_missing(&missing);
                self.free(host, &freed);
            }
            Control::Demand { runs, .. } => {
                if let Some(tail) = &mut session.tail {
                    runs.iter().for_each(|run| tail.demand(*run));
                }
            }
            Control::Kept { runs, .. } => {
                if let Some(tail) = &mut session.tail {
                    let freed = tail.kept(runs);
                    self.free(host, &freed);
                }
            }
            _ => {}
        }
        self.source_event(host, SourceEvent::Message(message));
    }

    fn begin_rounds(&mut self, host: usize) {
        self.hosts[host].protect_all();
        let (epoch, now, settings) = (IoEpoch(self.hosts[host].epoch), self.now, self.plan.settings);
        let Some(session) = self.outgoing(host) else { return };
        session.stage = Stage::Copying;
        session.rounds = Some(Rounds::new(settings, PAGES, hot_first(), epoch, None, now));
        self.open_streams(host);
        self.reach(Phase::FirstRound);
        self.schedule_in(crate::plan::MS, Event::Pump(host));
    }

    pub fn source_loses_link(&mut self, host: usize) {
        let Some(session) = self.outgoing(host) else { return };
        session.is_last_sent = false;
        session.rounds.iter_mut().for_each(Rounds::lost_link);
        session.tail.iter_mut().for_each(TailSource::lost_link);
        self.source_event(host, SourceEvent::LinkDown);
    }

    /// Sends a run, if there is one to send. Each millisecond.
    pub fn pump(&mut self, host: usize) {
        self.schedule_in(crate::plan::MS, Event::Pump(host));
        if self.link.seen[host] == 0 {
            return;
        }
        let Some(session) = self.outgoing(host) else { return };
        if session.owner.serves() && session.tail.is_none() {
            let missing = session.rounds.as_ref().map(|rounds| rounds.missing().clone());
            session.tail = missing.map(|missing| TailSource::new(missing, hot_first()));
        }
        if session.owner.serves() {
            self.pump_tail(host);
        } else {
            self.pump_rounds(host);
        }
    }

    fn pump_tail(&mut self, host: usize) {
        let mistake = self.plan.mistake;
        let Some(tail) = self.outgoing(host).and_then(|session| session.tail.as_mut()) else { return };
        let Some(run) = tail.take_demanded().or_else(|| tail.take_pushed()) else { return };
        self.send_run(host, run);
        self.reach(Phase::Tail);
        if mistake == Some(Mistake::FreesBeforeAcknowledged) {
            run.iter().for_each(|page| self.hosts[host].ram[page.0 as usize] = GARBAGE);
        }
    }

    fn pump_rounds(&mut self, host: usize) {
        let now = self.now;
        let oldest = self.hosts[host].ios.iter().map(|(_, began)| IoEpoch(*began)).min();
        let oldest = match self.plan.mistake {
            Some(Mistake::TrustsCopyUnderDma) => None,
            _ => oldest,
        };
        let Some(session) = self.outgoing(host).filter(|session| session.wait_until <= now) else { return };
        let Some(rounds) = &mut session.rounds else { return };
        rounds.set_oldest_io(oldest.unwrap_or(IoEpoch::IDLE));
        match rounds.progress(now).phase {
            RoundsPhase::Rounds if session.undecided => self.decide(host),
            RoundsPhase::Rounds => match rounds.next(now) {
                Next::Send(run) => self.send_run(host, run),
                Next::Wait(until) => session.wait_until = until,
                Next::RoundEnd => {
                    session.undecided = true;
                    self.end_round(host);
                }
            },
            RoundsPhase::Last(_) => match rounds.next(now) {
                Next::Send(run) => self.send_run(host, run),
                _ if session.is_last_sent => {}
                _ => {
                    session.is_last_sent = true;
                    self.end_round(host);
                    self.send_state(host);
                }
            },
            RoundsPhase::Stopping(_) | RoundsPhase::Done => {}
        }
    }

    fn end_round(&mut self, host: usize) {
        let Some(rounds) = self.outgoing(host).and_then(|session| session.rounds.as_mut()) else { return };
        let round = rounds.end_round();
        for stream in 0..STREAMS {
            self.send_data(host, stream, &Data::RoundEnd { round });
        }
        if round.0 > 0 {
            self.reach(Phase::LaterRound);
        }
    }

    fn decide(&mut self, host: usize) {
        let (now, written) = (self.now, self.hosts[host].scan());
        let epoch = IoEpoch(self.hosts[host].epoch);
        let Some(session) = self.outgoing(host) else { return };
        let Some(rounds) = &mut session.rounds else { return };
        rounds.written(&written, epoch);
        match rounds.decide(now) {
            Step::Round(_) => session.undecided = false,
            Step::Wait(until) => session.wait_until = until,
            Step::Stop(_) => {
                self.source_event(host, SourceEvent::Switch);
                self.reach(Phase::Stop);
            }
            Step::GiveUp(_) => self.source_event(host, SourceEvent::Cancel),
        }
    }

    /// QEMU is stopped, and its direct I/O has ended.
    pub fn source_stopped(&mut self, host: usize) {
        let (now, mut written) = (self.now, self.hosts[host].scan());
        if self.plan.mistake == Some(Mistake::LosesLastWrites) {
            written = PageMap::empty(PAGES);
        }
        let Some(session) = self.outgoing(host) else { return };
        if let Some(rounds) = &mut session.rounds
            && let RoundsPhase::Stopping(_) = rounds.progress(now).phase
        {
            rounds.stopped(&written, now);
        }
        self.source_event(host, SourceEvent::Stopped);
    }

    /// The map of what is missing, and the state, which is the number of disk writes.
    fn send_state(&mut self, host: usize) {
        let Some(qemu) = self.hosts[host].qemu else { return };
        let Some(session) = self.outgoing(host) else { return };
        let Some(rounds) = &session.rounds else { return };
        let attempt = session.owner.offered().attempt;
        let last = pagoda_move::units::RoundNo(rounds.round().0 - 1);
        let chunks = match rounds.progress(Moment::default()).phase {
            RoundsPhase::Last(Handover::Missing) => rounds.missing().filled().collect(),
            _ => Vec::new(),
        };
        self.send(host, &Control::Missing { attempt, part: MapPart { chunks, last: true } });
        let bytes = qemu.count.to_le_bytes().to_vec();
        self.send(host, &Control::State { attempt, offset: Bytes::ZERO, bytes });
        self.send(host, &Control::StateEnd { attempt, total: Bytes(8), round: last });
        self.reach(Phase::State);
    }

    /// Eight bytes stand for the content of a page.
    fn send_run(&mut self, host: usize, run: PageRun) {
        let content: Vec<u8> =
            run.iter().flat_map(|page| self.hosts[host].ram[page.0 as usize].to_le_bytes()).collect();
        let is_zero = content.iter().all(|byte| *byte == 0);
        let kind = if is_zero { RunKind::Zero } else { RunKind::Content(Codec::Lz4, &content) };
        let stream = stream_of(run.chunk, STREAMS as u16);
        self.send_data(host, stream.into(), &Data::Run { pages: run, kind });
    }

    fn free(&mut self, host: usize, pages: &PageMap) {
        let freed: Vec<PageIdx> = pages.iter().collect();
        freed.iter().for_each(|page| self.hosts[host].ram[page.0 as usize] = GARBAGE);
        self.stats.freed += PageCount(freed.len() as u64).0;
    }

    pub fn outgoing(&mut self, host: usize) -> Option<&mut Outgoing> {
        self.hosts[host].daemon.as_mut()?.source.as_mut()
    }
}
