//! The connection to the shim's agent.
//!
//! An agent that goes away takes no promise with it: zaps that were not answered are sent again to the next one, for
//! zapping twice is harmless.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use pagoda_abi::attach::{Packet, Range, Ranges};
use pagoda_core::fault::OpId;
use pagoda_core::units::PageIdx;
use pagoda_sys::ring::{Ring, RingError};
use pagoda_sys::socket::{Connection, Received};

use super::gate::GateQuestions;
use crate::handle::GateAnswer;
use crate::source::Source;
use crate::space::Space;

/// Collapsing is asked for in pieces, so that a zap never waits long behind one: 8 ms a GiB (throughput.md C).
const COLLAPSE_PIECE: u64 = 64 << 20;

/// A zap under way.
#[derive(Clone, Debug)]
pub enum Asked {
    /// A zap of chunks, for an operation of the machine.
    Chunks(OpId),
    /// A zap of pages that the machine watches.
    Watch {
        /// The machine's number of the zap.
        ticket: u32,
        /// When it was asked for.
        at: Instant,
    },
    /// A zap of pages that are sampled in an unarmed VM.
    Peek {
        /// The round of samples that the zap belongs to.
        round: u32,
        /// Which of the period's pages.
        pages: std::ops::Range<usize>,
        /// When it was asked for.
        at: Instant,
    },
    /// A zap of pages whose ages are looked at in an unarmed VM.
    Age {
        /// The pages that are unmapped.
        pages: Vec<PageIdx>,
        /// When it was asked for.
        at: Instant,
    },
}

/// The agent's connection and the answers that are expected on it.
#[derive(Debug)]
pub struct Agent {
    /// The VM's name, for messages.
    vm: Arc<str>,
    connection: Option<Connection>,
    /// Counts connections: what an earlier one still brings is not read.
    generation: u32,
    seq: u64,
    /// Zaps under way, by their number.
    zaps: HashMap<u64, Asked>,
    clock_asked: bool,
    gate: GateQuestions,
    /// What was last said of large folios.
    large_folios: Option<bool>,
}

impl Agent {
    /// An agent that has no connection yet.
    pub fn new(vm: Arc<str>) -> Agent {
        Agent {
            vm,
            connection: None,
            generation: 0,
            seq: 0,
            zaps: HashMap::new(),
            clock_asked: false,
            gate: GateQuestions::default(),
            large_folios: None,
        }
    }

    /// Takes a new connection instead of the one before. Returns the zaps that the agent has not answered: the caller
    /// sends those again that still matter, and then calls [`Agent::repeat_folios`].
    ///
    /// # Errors
    /// Of the ring. There is no connection then.
    pub fn connect(&mut self, ring: &mut Ring, connection: Connection) -> Result<Vec<Asked>, RingError> {
        self.disconnect(ring);
        ring.poll_multishot(connection.as_fd(), Source::Agent(self.generation).key())?;
        self.connection = Some(connection);
        Ok(self.zaps.drain().map(|(_, asked)| asked).collect())
    }

    /// Tells a new connection what the one before was told of large folios.
    pub fn repeat_folios(&mut self, ring: &mut Ring) {
        if let Some(large) = self.large_folios {
            self.send(ring, &Packet::Folios { large });
        }
    }

    pub fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Whether the guest's faults may fill holes with large folios.
    pub fn allow_large_folios(&mut self, ring: &mut Ring, large: bool) {
        self.large_folios = Some(large);
        self.send(ring, &Packet::Folios { large });
    }

    /// Whether faults may fill holes with small folios only, as while a balloon is inflated.
    pub fn wants_small_folios(&self) -> bool {
        self.large_folios == Some(false)
    }

    fn disconnect(&mut self, ring: &mut Ring) {
        if self.connection.take().is_some() {
            let _ = ring.cancel_poll(Source::Agent(self.generation).key());
        }
        self.generation += 1;
        self.clock_asked = false;
        self.gate.lose();
    }

    /// Asks for a zap of these ranges. Page-ins are submitted by then: the agent's work keeps the processor for a while.
    pub fn zap(&mut self, ring: &mut Ring, ranges: Ranges, asked: Asked) {
        self.seq += 1;
        let seq = self.seq;
        self.zaps.insert(seq, asked);
        self.send(ring, &Packet::Zap { seq, ranges });
    }

    /// A zap has been answered. `None`: nobody waits for it.
    pub fn complete_zap(&mut self, seq: u64) -> Option<Asked> {
        self.zaps.remove(&seq)
    }

    /// Whether pages of the sample are on their way to the agent.
    pub fn is_unmapping_sample(&self) -> bool {
        self.zaps.values().any(|asked| matches!(asked, Asked::Peek { .. }))
    }

    /// Asks the agent to look which direct I/O has completed.
    pub fn ask_clock(&mut self, ring: &mut Ring) {
        if !std::mem::replace(&mut self.clock_asked, true) {
            self.send_numbered(ring, |seq| Packet::Clock { seq });
        }
    }

    /// The agent has looked.
    pub fn complete_clock(&mut self) {
        self.clock_asked = false;
    }

    /// Asks the agent to open the shim's gate, or to shut it.
    pub fn ask_gate(&mut self, ring: &mut Ring, open: bool, asker: Sender<GateAnswer>) {
        if !self.is_connected() {
            let answer = if open { GateAnswer::NoAgent } else { GateAnswer::Done };
            let _ = asker.send(answer);
            return;
        }
        self.seq += 1;
        let seq = self.seq;
        self.gate.begin(seq, open, asker);
        self.send(ring, &Packet::Gate { seq, open });
    }

    /// The agent has opened the gate, or shut it.
    pub fn complete_gate(&mut self, seq: u64, open: bool) {
        self.gate.complete(seq, open);
    }

    /// Asks for huge mappings. A hint: what cannot be collapsed stays as it is.
    pub fn collapse(&mut self, ring: &mut Ring, space: &Space) {
        if self.wants_small_folios() {
            return;
        }
        for (_, region) in space.regions() {
            let (addr, len) = (region.addr, region.ram.len());
            for piece in 0..len.div_ceil(COLLAPSE_PIECE) {
                let at = piece * COLLAPSE_PIECE;
                let mut ranges = Ranges::default();
                ranges.push(Range { addr: addr + at, len: COLLAPSE_PIECE.min(len - at) });
                self.send_numbered(ring, |seq| Packet::Collapse { seq, ranges });
            }
        }
    }

    /// Sends a packet that has a number.
    pub fn send_numbered(&mut self, ring: &mut Ring, packet: impl FnOnce(u64) -> Packet) {
        self.seq += 1;
        let packet = packet(self.seq);
        self.send(ring, &packet);
    }

    /// Sends a packet, if the agent is there. A connection that does not take it is given up.
    pub fn send(&mut self, ring: &mut Ring, packet: &Packet) {
        let Some(connection) = &self.connection else { return };
        if let Err(error) = connection.send(packet, &[]) {
            tracing::debug!(vm = %self.vm, "agent: {error}");
            self.disconnect(ring);
        }
    }

    /// The next packet of this connection. `None`: there is none now, or the connection is not there any more.
    /// `is_ending`: the VMM has ended, so nobody is told that the agent went away.
    pub fn receive(&mut self, ring: &mut Ring, generation: u32, is_ending: bool) -> Option<Packet> {
        if generation != self.generation {
            return None;
        }
        match self.connection.as_ref()?.try_recv() {
            Ok(Received::Message { packet, .. }) => return Some(packet),
            Ok(Received::Nothing) => return None,
            Ok(Received::Closed) => {
                if !is_ending {
                    tracing::info!(vm = %self.vm, "the agent went away; its faults wait until it is back");
                }
            }
            Err(error) => tracing::warn!(vm = %self.vm, "agent: {error}"),
        }
        self.disconnect(ring);
        None
    }

    /// Waits for more packets of this connection, if it is still the agent's.
    pub fn poll_again(&mut self, ring: &mut Ring, generation: u32) {
        if generation == self.generation
            && let Some(connection) = &self.connection
            && let Err(error) = ring.poll_multishot(connection.as_fd(), Source::Agent(generation).key())
        {
            tracing::warn!(vm = %self.vm, "agent: {error}");
            self.disconnect(ring);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(op: u16) -> Asked {
        Asked::Chunks(OpId(op))
    }

    fn packet_of(agent: &Connection) -> Packet {
        match agent.recv().unwrap() {
            Received::Message { packet, .. } => packet,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_new_connection_is_asked_again_for_what_the_last_has_not_answered() {
        let mut ring = Ring::new(8).unwrap();
        let mut agent = Agent::new("a".into());
        agent.zap(&mut ring, Ranges::default(), chunks(1));
        agent.zap(&mut ring, Ranges::default(), chunks(2));
        assert!(matches!(agent.complete_zap(1), Some(Asked::Chunks(OpId(1)))));
        agent.allow_large_folios(&mut ring, false);

        let (ours, theirs) = Connection::pair().unwrap();
        let unanswered = agent.connect(&mut ring, ours).unwrap();
        assert!(matches!(unanswered[..], [Asked::Chunks(OpId(2))]));
        agent.zap(&mut ring, Ranges::default(), chunks(2));
        agent.repeat_folios(&mut ring);
        assert!(matches!(packet_of(&theirs), Packet::Zap { seq: 3, .. }));
        assert!(matches!(packet_of(&theirs), Packet::Folios { large: false }));
        // The answer to the first question, should it come after all, is nobody's.
        assert!(agent.complete_zap(2).is_none());
        assert!(matches!(agent.complete_zap(3), Some(Asked::Chunks(OpId(2)))));
    }

    #[test]
    fn the_clock_is_asked_for_once_until_it_is_answered() {
        let mut ring = Ring::new(8).unwrap();
        let mut agent = Agent::new("a".into());
        let (ours, theirs) = Connection::pair().unwrap();
        assert!(agent.connect(&mut ring, ours).unwrap().is_empty());
        agent.ask_clock(&mut ring);
        agent.ask_clock(&mut ring);
        assert!(matches!(packet_of(&theirs), Packet::Clock { seq: 1 }));
        assert!(!theirs.is_readable());
        agent.complete_clock();
        agent.ask_clock(&mut ring);
        assert!(matches!(packet_of(&theirs), Packet::Clock { seq: 2 }));
    }

    #[test]
    fn an_agent_that_went_away_is_not_read_and_the_next_one_is() {
        let mut ring = Ring::new(8).unwrap();
        let mut agent = Agent::new("a".into());
        let (ours, theirs) = Connection::pair().unwrap();
        agent.connect(&mut ring, ours).unwrap();
        let generation = agent.generation;
        theirs.send(&Packet::Clocked { seq: 1 }, &[]).unwrap();
        drop(theirs);
        assert!(matches!(agent.receive(&mut ring, generation, false), Some(Packet::Clocked { .. })));
        assert!(agent.receive(&mut ring, generation, false).is_none());
        assert!(!agent.is_connected());

        let (ours, theirs) = Connection::pair().unwrap();
        agent.connect(&mut ring, ours).unwrap();
        theirs.send(&Packet::Clocked { seq: 2 }, &[]).unwrap();
        assert!(agent.receive(&mut ring, generation, false).is_none());
        assert!(matches!(agent.receive(&mut ring, agent.generation, false), Some(Packet::Clocked { seq: 2 })));
    }

    #[test]
    fn the_gate_is_asked_for_and_a_shim_that_does_not_know_it_refuses() {
        let mut ring = Ring::new(8).unwrap();
        let mut agent = Agent::new("a".into());
        let (asker, answers) = std::sync::mpsc::channel();
        agent.ask_gate(&mut ring, true, asker.clone());
        assert_eq!(answers.recv(), Ok(GateAnswer::NoAgent));

        let (ours, theirs) = Connection::pair().unwrap();
        agent.connect(&mut ring, ours).unwrap();
        agent.ask_gate(&mut ring, true, asker.clone());
        assert!(matches!(packet_of(&theirs), Packet::Gate { seq: 1, open: true }));
        agent.complete_gate(1, true);
        assert_eq!(answers.recv(), Ok(GateAnswer::Done));
        // An older shim hangs up.
        agent.ask_gate(&mut ring, true, asker);
        drop(theirs);
        assert!(agent.receive(&mut ring, agent.generation, false).is_none());
        assert_eq!(answers.recv(), Ok(GateAnswer::Lost));
    }
}
