//! A server on several cores: each worker has sessions of its own, all of them the same slabs.
//!
//! A session's number says which worker has it, so whoever hands datagrams out need not open them: [`worker_of`]. What
//! workers have in common is behind one lock, which is held while a page is copied and never while something is
//! encrypted. Datagrams that are not authentic never come that far.
//!
//! An operation on the slabs happens at one moment, under the lock, whichever worker does it; so several workers do
//! nothing that one, whose requests come in another order, could not do.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::stats::ServerStats;
use super::store::{Fault, Store};
use super::tickets::Tickets;
use crate::crypto::{Keypair, PoolKey, PublicKey};
use crate::units::{BootEpoch, Generation, ServerId, SlabNo, SlabSize, Time, Version};
use crate::wire::datagram::Head;
use crate::wire::message::{DRAIN, DRAIN_OFF, Message, Pressure, Status};

/// Workers of one server.
pub const WORKERS_MAX: usize = 1 << WORKER_BITS;
/// In a session's number, above its slot.
pub const WORKER_BITS: u32 = 4;
pub const WORKER_SHIFT: u32 = SLOT_BITS;
/// The low bits of a session's number are its slot.
const SLOT_BITS: u32 = SESSIONS_MAX.trailing_zeros();
/// Sessions of a worker at a time: several hosts with hundreds of VMs each. One takes at most 4 KiB, keys included, so
/// all of them 8 MiB; the room for pages in pieces is the worker's (`reassembly.rs`).
pub(super) const SESSIONS_MAX: usize = 2048;

/// The number of a session: its slot, its worker, and the rest random.
pub fn session_number(random: u32, worker: usize, slot: usize) -> u32 {
    random << (WORKER_SHIFT + WORKER_BITS) | (worker as u32) << WORKER_SHIFT | slot as u32
}

/// The worker that a datagram is for; `None` if any will do, as long as it is always the same one for an address.
pub fn worker_of(datagram: &[u8]) -> Option<usize> {
    match Head::decode(datagram) {
        Ok(Head::Data { receiver, .. } | Head::Accept { receiver, .. }) => {
            Some((receiver >> WORKER_SHIFT) as usize & (WORKERS_MAX - 1))
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
    pub is_overflow_disk: bool,
}

/// What may be touched by one worker at a time.
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

/// What a worker has done so far, as the others see it.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkerNumbers {
    pub stats: ServerStats,
    pub sessions: usize,
}

/// A server, but for its sessions.
#[derive(Debug)]
pub struct Shared {
    pub identity: Identity,
    state: Mutex<State>,
    /// Counts the lists of admitted clients, so that a worker sees without the lock that there is another one.
    admissions: AtomicU64,
    workers: Vec<Mutex<WorkerNumbers>>,
}

impl Shared {
    pub fn new(identity: Identity, state: State, workers: usize) -> Arc<Shared> {
        let workers = (0..workers).map(|_| Mutex::default()).collect();
        Arc::new(Shared { identity, state: Mutex::new(state), admissions: AtomicU64::new(0), workers })
    }

    /// # Panics
    /// If a worker panicked: nobody knows what it left behind.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no worker panics")
    }

    /// Puts another list of admitted clients in the place of the last one.
    pub fn admit(&self, clients: Vec<PublicKey>) {
        self.state().admitted = clients;
        self.admissions.fetch_add(1, Ordering::Release);
    }

    /// Which list of admitted clients there is. A worker that sees the number of one sees that list, or a later one.
    pub fn admissions(&self) -> u64 {
        self.admissions.load(Ordering::Acquire)
    }

    pub fn publish(&self, worker: usize, numbers: WorkerNumbers) {
        *self.workers[worker].lock().expect("no worker panics") = numbers;
    }

    /// Of all workers; `own` is today's of one of them.
    pub fn sum(&self, worker: usize, own: WorkerNumbers) -> WorkerNumbers {
        let others = self.workers.iter().enumerate().filter(|(other, _)| *other != worker);
        others.fold(own, |mut sum, (_, numbers)| {
            let numbers = numbers.lock().expect("no worker panics");
            sum.stats.add(&numbers.stats);
            sum.sessions += numbers.sessions;
            sum
        })
    }
}

impl State {
    /// Takes a page, or a trim. Whether another server may is asked in the same moment: its ticket may be taken back by what
    /// another worker does, and nothing lands after that.
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
