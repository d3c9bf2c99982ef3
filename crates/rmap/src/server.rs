//! The server: lends slabs, holds sealed pages, checks the owner's generation in every request.
//!
//! Sans-I/O: a driver hands in datagrams and time and takes out what is to be sent. A [`Server`] is owned by one thread;
//! where several cores are to work, it is one of several workers ([`Server::with_workers`]). Whatever comes from
//! somebody who does not know the pool's key costs a counter; nothing is allocated for it and nothing answered.
//!
//! # When something fails
//!
//! A server that dies takes its pages with it. Its next life has another boot epoch, which clients learn in the handshake
//! before anything else, and it answers [`crate::wire::message::Status::UnknownSlab`], never zeros. A server that is paused answers late: versions and
//! generations make late writes harmless. A server never drops a slab by itself; under pressure it asks the owners to.

mod copy;
mod reassembly;
mod replies;
mod requests;
mod sessions;
mod stats;
mod store;
mod tickets;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;

use thiserror::Error;

use crate::crypto::entropy::SharedEntropy;
use crate::crypto::{Entropy, Keypair, PoolKey, PublicKey, Rejected};
use crate::medium::Medium;
use crate::units::{BootEpoch, ServerId, SlabSize, Time};
use crate::wire::PROTOCOL_VERSION;
use crate::wire::datagram::Head;
use crate::wire::message::Pressure;

pub use crate::transmit::Transmit;
pub use crate::units::SLABS_MAX;
pub use crate::wire::copy::Progress;
pub use copy::TRANSFERS_MAX;
pub use stats::ServerStats;
pub use store::{Fault, SpaceUse};
pub use tickets::{TICKET_LIFE, TICKETS_MAX};
pub use workers::{WORKER_BITS, WORKER_SHIFT, WORKERS_MAX, worker_of};

use copy::Transfers;
use reassembly::Reassembly;
use replies::Replies;
use sessions::{Admission, Hello, Sessions};
use store::Store;
use tickets::Tickets;
use workers::{Identity, Shared, State, WorkerNumbers};

/// Clients whose keys a server admits.
pub const ADMITTED_MAX: usize = 1024;

/// What a server is told.
#[derive(Debug)]
pub struct ServerConfig {
    pub id: ServerId,
    pub keys: Keypair,
    pub pool: PoolKey,
    /// The clients that may connect.
    pub admitted: Vec<PublicKey>,
    pub slabs: usize,
    pub slab_size: SlabSize,
    /// Slabs that one space may have here.
    pub quota: u32,
    /// Must differ from that of every earlier life: random, or a start time.
    pub epoch: BootEpoch,
    /// Where pages are kept, if that is not memory. Clients then take the server for an overflow disk: they ask it for
    /// a slab when every other server declines, and move the slab away as soon as another one has room.
    pub medium: Option<Box<dyn Medium>>,
}

/// Why a server cannot be.
#[derive(Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    #[error("{slabs} slabs: give 1 to {SLABS_MAX}")]
    Slabs { slabs: usize },
    #[error("there is no memory for {slabs} slabs: lend fewer")]
    Memory { slabs: usize },
    #[error("{clients} admitted clients: at most {ADMITTED_MAX}")]
    Admitted { clients: usize },
    #[error("{workers} workers: give 1 to {WORKERS_MAX}")]
    Workers { workers: usize },
}

/// A page server, or one worker of it. Unless said otherwise, its methods are about the whole server.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    worker: usize,
    entropy: SharedEntropy,
    sessions: Sessions,
    reassembly: Reassembly,
    transfers: Transfers,
    replies: Replies,
    /// Of [`Shared::admissions`], when it was last looked who may stay.
    admissions: u64,
    /// What this worker has counted, without the others.
    stats: ServerStats,
    /// When something last came.
    now: Time,
}

impl Server {
    /// Allocates and touches all slabs, so that what is announced is there.
    ///
    /// # Errors
    /// Limits of [`ServerConfig`].
    pub fn new(config: ServerConfig, entropy: Box<dyn Entropy>) -> Result<Server, ConfigError> {
        let mut workers = Server::with_workers(config, entropy, 1)?;
        workers.pop().ok_or(ConfigError::Workers { workers: 0 })
    }

    /// The same as several workers, each for a thread. Every datagram goes to the worker that [`worker_of`] says.
    ///
    /// # Errors
    /// Limits of [`ServerConfig`], and [`WORKERS_MAX`].
    pub fn with_workers(
        mut config: ServerConfig,
        entropy: Box<dyn Entropy>,
        workers: usize,
    ) -> Result<Vec<Server>, ConfigError> {
        if config.slabs == 0 || config.slabs > SLABS_MAX {
            return Err(ConfigError::Slabs { slabs: config.slabs });
        }
        if config.admitted.len() > ADMITTED_MAX {
            return Err(ConfigError::Admitted { clients: config.admitted.len() });
        }
        if workers == 0 || workers > WORKERS_MAX {
            return Err(ConfigError::Workers { workers });
        }
        let is_overflow_disk = config.medium.is_some();
        let store = Store::new(config.slabs, config.slab_size, config.quota, config.medium.take())
            .ok_or(ConfigError::Memory { slabs: config.slabs })?;
        let state = State {
            store,
            tickets: Tickets::new(),
            pressure: Pressure::None,
            admitted: config.admitted,
            admins: Vec::new(),
            drain_asked_by: None,
        };
        let ServerConfig { id, keys, pool, slab_size, epoch, .. } = config;
        let shared = Shared::new(Identity { id, keys, pool, slab_size, epoch, is_overflow_disk }, state, workers);
        let entropy = SharedEntropy::new(entropy);
        let worker = |worker| Server {
            shared: Arc::clone(&shared),
            worker,
            entropy: entropy.clone(),
            sessions: Sessions::new(worker),
            reassembly: Reassembly::new(),
            transfers: Transfers::new(worker),
            replies: Replies::new(),
            admissions: shared.admissions(),
            stats: ServerStats::default(),
            now: Time::default(),
        };
        Ok((0..workers).map(worker).collect())
    }

    /// The number of this worker.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// Takes a datagram in; decrypts it in place.
    pub fn on_datagram(&mut self, now: Time, from: SocketAddr, datagram: &mut [u8]) {
        self.now = now;
        match Head::decode(datagram) {
            Ok(Head::Hello { versions, sender }) => {
                let about = self.about();
                let hello = Hello { from, versions, sender, datagram };
                let admits = |node| {
                    let state = self.shared.state();
                    let admitted = state.admitted.contains(&node);
                    (admitted || state.tickets.has_any(now, node)).then_some(!admitted)
                };
                let sources = || self.shared.state().tickets.sources(now);
                let (identity, admission) = (&self.shared.identity, Admission { admits, sources });
                self.sessions.greet(now, &hello, identity, admission, about, &self.entropy, &mut self.stats);
            }
            Ok(Head::Data { epoch, receiver, counter, .. }) => {
                self.end_refused();
                let Some(slot) = self.sessions.find(receiver) else {
                    let used = self.transfers.data(now, receiver, (epoch, counter), datagram);
                    self.stats.unknown_session += u64::from(used.is_none());
                    return;
                };
                match self.sessions.open(slot, now, from, (epoch, counter), datagram) {
                    Ok(body) => self.take_in(now, slot, body),
                    Err(Rejected::NotAuthentic) => self.stats.not_authentic += 1,
                    Err(Rejected::Replayed) => self.stats.replayed += 1,
                }
            }
            Ok(Head::Accept { version: PROTOCOL_VERSION, receiver, sender }) => {
                let pages = self.shared.identity.slab_size.pages();
                let used = self.transfers.accepted(now, receiver, sender, pages, datagram);
                self.stats.malformed += u64::from(used.is_none());
            }
            // Clients do not greet back.
            Ok(Head::Accept { .. } | Head::Refuse { .. }) | Err(_) => self.stats.malformed += 1,
        }
    }

    /// Ends the sessions of those that were admitted once and are not any more.
    fn end_refused(&mut self) {
        let admissions = self.shared.admissions();
        if std::mem::replace(&mut self.admissions, admissions) != admissions {
            let state = self.shared.state();
            self.sessions.end_unless(|node| state.admitted.contains(&node));
        }
    }

    /// When [`Server::on_timeout`] is to be called, at the latest.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.transfers.poll_timeout()
    }

    /// Does what is due by `now` for the transfers to other servers.
    pub fn on_timeout(&mut self, now: Time) {
        self.now = now;
        self.transfers.on_timeout(now);
    }

    /// The next thing to send, appended to `out`; demand before everything else, copies to other servers last.
    pub fn poll_transmit(&mut self, out: &mut Vec<u8>) -> Option<Transmit> {
        if let Some(transmit) = self.sessions.poll_handshake(out) {
            return Some(transmit);
        }
        let transmit = self.poll_reply(out).or_else(|| self.transfers.poll_transmit(self.now, &self.shared, out));
        if transmit.is_none() {
            self.shared.publish(self.worker, self.own_numbers());
        }
        transmit
    }

    fn own_numbers(&self) -> WorkerNumbers {
        WorkerNumbers { stats: self.stats, sessions: self.sessions.count() }
    }

    /// How short of memory the host is; in every reply from now on. A server that is about to end stays at orange.
    pub fn set_pressure(&mut self, pressure: Pressure) {
        let mut state = self.shared.state();
        state.pressure = if state.store.shut { pressure.max(Pressure::Orange) } else { pressure };
    }

    pub fn pressure(&self) -> Pressure {
        self.shared.state().pressure
    }

    /// No slab is given away any more, not even a promised one: the server is about to end. Those that it has it wants
    /// moved elsewhere.
    pub fn begin_drain(&mut self) {
        self.shared.state().begin_drain();
    }

    /// One step towards the memory that the pressure allows: from orange on, a free slab's memory goes back to the host;
    /// without pressure, one is taken again. To be called every now and then, by one worker. `false` if there was
    /// nothing to do.
    pub fn adjust_memory(&mut self) -> bool {
        let mut state = self.shared.state();
        match state.pressure {
            Pressure::None if !state.store.shut => state.store.regrow(),
            Pressure::None | Pressure::Yellow => false,
            Pressure::Orange | Pressure::Red => state.store.shed(),
        }
    }

    /// Slabs that are gone because their medium failed.
    pub fn broken_slabs(&self) -> usize {
        self.shared.state().store.broken_slabs()
    }

    /// Slabs that somebody has.
    pub fn held_slabs(&self) -> usize {
        self.shared.state().store.held_slabs()
    }

    /// The clients that may connect from now on. Sessions of others end with the next that comes by one: nothing is done for it,
    /// and what its client has here stays where it is. A copy to another server that it had asked for goes on.
    ///
    /// # Errors
    /// Too many: nothing is changed.
    pub fn admit(&mut self, clients: Vec<PublicKey>) -> Result<(), ConfigError> {
        if clients.len() > ADMITTED_MAX {
            return Err(ConfigError::Admitted { clients: clients.len() });
        }
        self.shared.admit(clients);
        Ok(())
    }

    /// The clients that may ask this server, from now on, to be drained and to end; nobody may unless this says so.
    /// They have to be admitted, too. A drain that another had asked for is called off.
    pub fn set_admins(&mut self, admins: Vec<PublicKey>) {
        self.shared.state().set_admins(admins);
    }

    /// Whether it gives no slab away any more, since [`Server::begin_drain`] or at a client's request.
    pub fn is_draining(&self) -> bool {
        self.shared.state().store.shut
    }

    /// The client at whose request the server is being drained. [`Server::begin_drain`] is not at anybody's request.
    pub fn drain_asked_by(&self) -> Option<PublicKey> {
        self.shared.state().drain_asked_by
    }

    /// Of all workers; of others as it was when they last had nothing to send.
    pub fn stats(&self) -> ServerStats {
        self.shared.sum(self.worker, self.own_numbers()).stats
    }

    pub fn id(&self) -> ServerId {
        self.shared.identity.id
    }

    pub fn epoch(&self) -> BootEpoch {
        self.shared.identity.epoch
    }

    /// Slabs that nobody has.
    pub fn free_slabs(&self) -> usize {
        self.shared.state().store.free_slabs()
    }

    /// Who has how much.
    pub fn spaces(&self) -> Vec<SpaceUse> {
        self.shared.state().store.spaces().collect()
    }

    /// Whether everything was given back, so that the process may end without loss.
    pub fn is_drained(&self) -> bool {
        self.held_slabs() == 0
    }

    /// Misbehaves on purpose: for tests of what clients do then.
    #[doc(hidden)]
    pub fn inject(&mut self, fault: Option<Fault>) {
        self.shared.state().store.inject(fault);
    }
}

#[cfg(test)]
mod tests;
