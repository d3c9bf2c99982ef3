//! A machine: its clock, what runs on it, and whether it runs at all.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};

use rmap::client::{Client, SpaceRef};
use rmap::control::{ControlReply, ControlRequest, QuestionId};
use rmap::crypto::Entropy;
use rmap::medium::Medium;
use rmap::server::Server;
use rmap::units::{Page, Time};

use crate::oracle::{Begun, Nth};
use crate::rng::Rng;

/// The seed's randomness, where programs ask for it.
#[derive(Debug)]
pub struct Seeded(pub Rng);

impl Entropy for Seeded {
    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.iter_mut().for_each(|byte| *byte = self.0.next() as u8);
    }
}

/// The overflow disk of a server, as a map in memory.
#[derive(Debug, Default)]
pub struct Shelf(BTreeMap<u64, Box<Page>>);

impl Medium for Shelf {
    fn read(&mut self, index: u64, page: &mut Page) -> std::io::Result<()> {
        *page = **self.0.get(&index).ok_or(std::io::ErrorKind::UnexpectedEof)?;
        Ok(())
    }

    fn write(&mut self, index: u64, page: &Page) -> std::io::Result<()> {
        self.0.insert(index, Box::new(*page));
        Ok(())
    }
}

/// What an operation was, for the oracle.
#[derive(Clone, Copy, Debug)]
pub enum Asked {
    Read(Begun),
    Write(Nth),
    /// A read of what another host writes.
    Follow(Begun),
}

#[derive(Clone, Copy, Debug)]
pub struct Ask {
    pub space: u64,
    pub page: u64,
    pub generation: u32,
    pub asked: Asked,
    /// By a reader of a sealed space.
    pub reads_sealed: bool,
    pub since_ns: u64,
}

/// A client, and the spaces that it believes to own, or reads.
#[derive(Debug)]
pub struct Host {
    pub client: Client,
    /// Space -> its place in the client, generation. All readers of a sealed space stand for its last owner.
    pub owns: BTreeMap<u64, (SpaceRef, u32)>,
    pub asks: BTreeMap<u64, Ask>,
    pub tokens: u64,
    /// Spaces that it reads as others write them, and what it has read there last.
    pub follows: BTreeMap<u64, SpaceRef>,
    pub followed: BTreeMap<(u64, u64), Nth>,
}

#[derive(Debug)]
pub enum Program {
    Nothing,
    /// A server, by all of its workers.
    Server(Vec<Server>),
    Host(Box<Host>),
}

#[derive(Debug)]
pub struct Node {
    pub program: Program,
    /// The clock runs at this many thousandths.
    rate: u64,
    pub paused_until_ns: u64,
    /// Counts programs, so that what was meant for an earlier one is recognized.
    pub life: u64,
    pub timer_ns: u64,
    /// Timers in a row after which the next was due at once.
    pub hurried: usize,
}

impl Node {
    pub fn new(program: Program, rng: &mut Rng) -> Node {
        let rate = *rng.pick(&[1000, 1000, 1000, 900, 1100, 500]);
        Node { program, rate, paused_until_ns: 0, life: 0, timer_ns: u64::MAX, hurried: 0 }
    }

    pub fn local(&self, now_ns: u64) -> Time {
        Time((u128::from(now_ns) * u128::from(self.rate) / 1000) as u64)
    }

    pub fn global(&self, local: Time) -> u64 {
        (u128::from(local.0) * 1000).div_ceil(u128::from(self.rate)) as u64
    }
}

pub fn address(node: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 1000 + node as u16))
}

pub fn node_at(addr: SocketAddr) -> usize {
    usize::from(addr.port()) - 1000
}

/// What happens when. A timer counts only if it is still the one that its node waits for.
#[derive(Debug)]
pub enum Happening {
    Arrival { to: usize, from: usize, bytes: Vec<u8> },
    Timer { node: usize, due_ns: u64 },
    Question { node: usize, life: u64, id: QuestionId, request: ControlRequest },
    Answer { node: usize, life: u64, id: QuestionId, reply: ControlReply },
    Act,
    Chaos,
    Boot { node: usize },
}
