//! A server on several cores: each lane has sessions of its own, all of them the same slabs.
//!
//! A session's number says which lane has it, so whoever hands datagrams out need not open them: [`lane_of`]. What lanes have
//! in common is behind one lock, which is held while a page is copied and never while something is encrypted. Datagrams that
//! are not authentic never come that far.
//!
//! An operation on the slabs happens at one moment, under the lock, whichever lane does it; so several lanes do nothing that
//! one, whose requests come in another order, could not do.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::stats::ServerStats;
use super::store::{Fault, Store};
use super::tickets::Tickets;
use crate::crypto::{Keypair, PoolKey, PublicKey};
use crate::units::{BootEpoch, Generation, ServerId, SlabNo, SlabSize, Time, Version};
use crate::wire::datagram::Head;
use crate::wire::message::{DRAIN, DRAIN_OFF, Message, Pressure, Status};

/// Lanes of one server.
pub const LANES_MAX: usize = 1 << LANE_BITS;
/// In a session's number, above its place.
pub const LANE_BITS: u32 = 4;
pub const LANE_SHIFT: u32 = PLACE_BITS;
/// The low bits of a session's number are its place.
const PLACE_BITS: u32 = SESSIONS_MAX.trailing_zeros();
/// Sessions of a lane at a time: several hosts with hundreds of VMs each. One takes at most 4 KiB, keys included, so all of them 8 MiB;
/// the room for pages in pieces is the lane's (`reassembly.rs`).
pub(super) const SESSIONS_MAX: usize = 2048;

/// The number of a session: its place, its lane, and the rest random.
pub fn session_number(random: u32, lane: usize, place: usize) -> u32 {
    random << (LANE_SHIFT + LANE_BITS) | (lane as u32) << LANE_SHIFT | place as u32
}

/// The lane that a datagram is for; `None` if any will do, as long as it is always the same one for an address.
pub fn lane_of(datagram: &[u8]) -> Option<usize> {
    match Head::decode(datagram) {
        Ok(Head::Data { receiver, .. } | Head::Accept { receiver, .. }) => {
            Some((receiver >> LANE_SHIFT) as usize & (LANES_MAX - 1))
        }
        _ => None,
    }
}

/// What does not change.
#[derive(Debug)]
pub struct Identity {
    pub id: ServerId,
    pub keys: Keypair,
    pub pool: PoolKey,
    pub slab_size: SlabSize,
    pub epoch: BootEpoch,
    pub is_last_resort: bool,
}

/// What may be touched by one lane at a time.
#[derive(Debug)]
pub struct State {
    pub store: Store,
    pub tickets: Tickets,
    pub pressure: Pressure,
    /// The clients that may connect.
    pub admitted: Vec<PublicKey>,
    /// Clients that may have the server drained, and the one that did.
    pub admins: Vec<PublicKey>,
    pub drain_asked_by: Option<PublicKey>,
}

/// What a lane has done so far, as the others see it.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneNumbers {
    pub stats: ServerStats,
    pub sessions: usize,
}

/// A server, but for its sessions.
#[derive(Debug)]
pub struct Shared {
    pub identity: Identity,
    state: Mutex<State>,
    /// Counts the lists of admitted clients, so that a lane sees without the lock that there is another one.
    admissions: AtomicU64,
    lanes: Vec<Mutex<LaneNumbers>>,
}

impl Shared {
    pub fn new(identity: Identity, state: State, lanes: usize) -> Arc<Shared> {
        let lanes = (0..lanes).map(|_| Mutex::default()).collect();
        Arc::new(Shared { identity, state: Mutex::new(state), admissions: AtomicU64::new(0), lanes })
    }

    /// # Panics
    /// If a lane panicked: nobody knows what it left behind.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no lane panics")
    }

    /// Puts another list of admitted clients in the place of the last one.
    pub fn admit(&self, clients: Vec<PublicKey>) {
        self.state().admitted = clients;
        self.admissions.fetch_add(1, Ordering::Release);
    }

    /// Which list of admitted clients there is. A lane that sees the number of one sees that list, or a later one.
    pub fn admissions(&self) -> u64 {
        self.admissions.load(Ordering::Acquire)
    }

    pub fn publish(&self, lane: usize, numbers: LaneNumbers) {
        *self.lanes[lane].lock().expect("no lane panics") = numbers;
    }

    /// Of all lanes; `own` is today's of one of them.
    pub fn sum(&self, lane: usize, own: LaneNumbers) -> LaneNumbers {
        let others = self.lanes.iter().enumerate().filter(|(other, _)| *other != lane);
        others.fold(own, |mut sum, (_, numbers)| {
            let numbers = numbers.lock().expect("no lane panics");
            sum.stats.add(&numbers.stats);
            sum.sessions += numbers.sessions;
            sum
        })
    }
}

impl State {
    /// Takes a page, or a trim. Whether another server may is asked in the same moment: its ticket may be taken back by what
    /// another lane does, and nothing lands after that.
    pub fn write(
        &mut self,
        now: Time,
        guest: Option<PublicKey>,
        slab: SlabNo,
        generation: Generation,
        request: &Message,
        sealed: Option<&[u8]>,
    ) -> Status {
        if self.store.has(Fault::PutsWritesOff) {
            return Status::Busy;
        }
        let refusal = |node| self.tickets.refusal(now, &self.store, node, slab, generation, request);
        match guest.and_then(refusal) {
            Some(refusal) => refusal,
            None => self.store.write(request.space, request.page, generation, request.version, sealed),
        }
    }

    /// No slab is given away any more.
    pub fn begin_drain(&mut self) {
        self.store.shut = true;
        self.drain_asked_by = None;
        self.pressure = self.pressure.max(Pressure::Orange);
    }

    /// Only those that the operator named may ask for it, and only what was asked for so can be called off so.
    pub fn drain_asked(&mut self, node: Option<PublicKey>, version: Version) -> Status {
        match node.filter(|node| self.admins.contains(node)) {
            None => return Status::Denied,
            Some(node) if version.bits() == DRAIN => {
                if !self.store.shut {
                    self.begin_drain();
                    self.drain_asked_by = Some(node);
                }
            }
            Some(_) if version.bits() == DRAIN_OFF => self.call_drain_off(),
            Some(_) => return Status::BadRequest,
        }
        Status::Ok
    }

    /// Of a drain that a client asked for.
    fn call_drain_off(&mut self) {
        if self.drain_asked_by.take().is_some() {
            self.store.shut = false;
            self.pressure = Pressure::None;
        }
    }

    /// Who may ask for a drain from now on. What others have asked for is called off.
    pub fn set_admins(&mut self, admins: Vec<PublicKey>) {
        self.admins = admins;
        if self.drain_asked_by.is_some_and(|node| !self.admins.contains(&node)) {
            self.call_drain_off();
        }
    }
}
