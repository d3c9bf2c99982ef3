//! A server's record, alive as long as its lease.
//!
//! The record says who seems to be there; it grants nothing. A server whose lease ran out goes on serving: whether its
//! copies count is written in the maps, and who may write is checked by generation.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::config::EtcdConfig;
use crate::error::EtcdError;
use crate::gateway::{LeaseReply, RenewReply, base64};
use crate::store::{Etcd, look, only, put, slot, version_is};
use crate::values::{Node, NodeState, Value};

/// Two renewals may get lost.
const RENEWALS_PER_TTL: u32 = 3;
/// A change of load is told no more often.
const LOAD_EVERY: Duration = Duration::from_secs(1);
/// Others that write the same record at the same time.
const REGISTER_TRIES: u32 = 3;

/// What changes of a server while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    pub free: u32,
    pub state: NodeState,
}

/// Whether others see this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Membership {
    Member,
    /// The lease may have run out: the node may be gone for others, and what they decided since is not known here.
    Unsure {
        why: EtcdError,
    },
    /// It cannot come back by itself.
    Refused {
        why: EtcdError,
    },
}

/// What the thread says.
#[derive(Debug)]
struct State {
    membership: Membership,
    lease: u64,
    /// The lease lasts until then, at least.
    alive_until: Instant,
}

/// A node that is kept in the list.
#[derive(Debug)]
pub struct Member {
    loads: Option<mpsc::Sender<Load>>,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

impl Member {
    /// Puts a node into the list, under a lease of `ttl` (etcd makes it two seconds at least), and keeps it there.
    ///
    /// # Errors
    /// etcd is not there, or the number belongs to another server.
    pub fn join(config: EtcdConfig, node: Node, ttl: Duration) -> Result<Member, EtcdError> {
        Node::decode(&node.encode()).or_else(crate::store::invalid)?;
        let mut etcd = Etcd::connect(config)?;
        let mut keeper = Keeper { node, ttl, lease: 0, renewed: Instant::now() };
        keeper.register(&mut etcd)?;
        // From here on every call is one try, so that a slow etcd does not hide that time goes by.
        etcd.config.patience = Duration::ZERO;
        let (lease, alive_until) = (keeper.lease, keeper.renewed + keeper.ttl);
        let state = Arc::new(Mutex::new(State { membership: Membership::Member, lease, alive_until }));
        let (loads, changes) = mpsc::channel();
        let reported = Arc::clone(&state);
        let run = move || keeper.run(&mut etcd, &changes, &reported);
        let thread = thread::Builder::new().name("etcd-member".to_owned()).spawn(run);
        let thread = thread.map_err(|error| EtcdError::Invalid { what: format!("no thread: {error}") })?;
        Ok(Member { loads: Some(loads), state, thread: Some(thread) })
    }

    /// Told within a second.
    pub fn set_load(&self, load: Load) {
        if let Some(loads) = &self.loads {
            // A thread that has ended has said why in the membership.
            let _ = loads.send(load);
        }
    }

    /// As of now, also while the thread waits for an etcd that does not answer.
    pub fn membership(&self) -> Membership {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &state.membership {
            Membership::Member if Instant::now() >= state.alive_until => {
                Membership::Unsure { why: EtcdError::LeaseLost { lease: state.lease } }
            }
            membership => membership.clone(),
        }
    }

    /// Takes the node from the list now, where etcd can be reached; else its lease runs out. Waits for a request at most.
    pub fn leave(mut self) {
        self.loads = None;
        if let Some(thread) = self.thread.take() {
            // Its panic is no reason for another.
            let _ = thread.join();
        }
    }
}

struct Keeper {
    node: Node,
    ttl: Duration,
    lease: u64,
    /// When the last renewal that succeeded was asked for: the lease is alive for its time from then on, at least.
    renewed: Instant,
}

impl Keeper {
    fn run(mut self, etcd: &mut Etcd, changes: &mpsc::Receiver<Load>, state: &Mutex<State>) {
        let renew_every = self.ttl / RENEWALS_PER_TTL;
        let mut next = Instant::now() + renew_every;
        let mut reported = Instant::now();
        let mut changed = false;
        loop {
            let wake = if changed { next.min(reported + LOAD_EVERY) } else { next };
            match changes.recv_timeout(wake.saturating_duration_since(Instant::now())) {
                Ok(Load { free, state }) => {
                    changed |= (free, state) != (self.node.free, self.node.state);
                    (self.node.free, self.node.state) = (free.min(self.node.slabs), state);
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    // If it is lost, the lease runs out.
                    let _ = etcd.call::<RevokeReply>("lease/revoke", &json!({ "ID": self.lease.to_string() }));
                    return;
                }
            }
            let mut result = self.renew(etcd);
            if result.is_ok() && changed && reported + LOAD_EVERY <= Instant::now() {
                result = self.report(etcd);
                (reported, changed) = (Instant::now(), result.is_err());
            }
            if matches!(result, Err(EtcdError::LeaseLost { .. })) {
                // Others may have decided without this node. It comes back as what it is now.
                self.say(state, Membership::Unsure { why: EtcdError::LeaseLost { lease: self.lease } });
                result = self.register(etcd);
                changed &= result.is_err();
            }
            match result {
                Ok(()) => self.say(state, Membership::Member),
                Err(
                    why @ (EtcdError::NodeTaken { .. } | EtcdError::Garbage { .. } | EtcdError::OtherCluster { .. }),
                ) => {
                    self.say(state, Membership::Refused { why });
                }
                Err(why) if self.renewed.elapsed() >= self.ttl => self.say(state, Membership::Unsure { why }),
                Err(_) => {}
            }
            next = Instant::now() + renew_every;
        }
    }

    fn say(&self, state: &Mutex<State>, membership: Membership) {
        let (lease, alive_until) = (self.lease, self.renewed + self.ttl);
        *state.lock().unwrap_or_else(PoisonError::into_inner) = State { membership, lease, alive_until };
    }

    fn renew(&mut self, etcd: &mut Etcd) -> Result<(), EtcdError> {
        let asked = Instant::now();
        let reply: RenewReply = etcd.call("lease/keepalive", &json!({ "ID": self.lease.to_string() }))?;
        if reply.result.ttl.0 == 0 || reply.result.id.0 != self.lease {
            return Err(EtcdError::LeaseLost { lease: self.lease });
        }
        self.renewed = asked;
        Ok(())
    }

    /// The record anew, if it is still under this lease.
    fn report(&mut self, etcd: &mut Etcd) -> Result<(), EtcdError> {
        let key = etcd.keys.node(self.node.id);
        let ours =
            json!({ "key": base64(&key), "target": "LEASE", "result": "EQUAL", "lease": self.lease.to_string() });
        let reply = etcd.txn(&[ours], &[put(&key, &self.node.encode(), Some(self.lease))], &[])?;
        if reply.succeeded { Ok(()) } else { Err(EtcdError::LeaseLost { lease: self.lease }) }
    }

    /// A new lease and the record under it. A record with this node's own key is an earlier life's and is replaced.
    fn register(&mut self, etcd: &mut Etcd) -> Result<(), EtcdError> {
        let asked = Instant::now();
        let seconds = self.ttl.as_secs().max(1).to_string();
        let granted: LeaseReply = etcd.patiently(|etcd| etcd.call("lease/grant", &json!({ "TTL": seconds })))?;
        if granted.id.0 == 0 || granted.ttl.0 == 0 {
            return Err(EtcdError::LeaseLost { lease: granted.id.0 });
        }
        (self.lease, self.renewed, self.ttl) = (granted.id.0, asked, Duration::from_secs(granted.ttl.0));
        let key = etcd.keys.node(self.node.id);
        let mut there = etcd.get::<Node>(&key)?;
        for _ in 0..REGISTER_TRIES {
            if let Some(other) = there.value.as_ref().filter(|other| other.key != self.node.key) {
                return Err(EtcdError::NodeTaken { id: other.id.0, addr: other.addr.to_string() });
            }
            let revision = there.mod_revision.to_string();
            let same = json!({ "key": base64(&key), "target": "MOD", "result": "EQUAL", "mod_revision": revision });
            let compare = if there.version == 0 { version_is(&key, 0) } else { same };
            let puts = [put(&key, &self.node.encode(), Some(self.lease))];
            let reply = etcd.patiently(|etcd| etcd.txn(std::slice::from_ref(&compare), &puts, &[look(&key)]))?;
            if reply.succeeded {
                return Ok(());
            }
            there = slot(&key, &only(reply))?;
            if there.value.as_ref() == Some(&self.node) {
                // Its own, if an answer was lost; or an earlier life's with the same words, under another lease.
                return self.report(etcd);
            }
        }
        Err(EtcdError::NodeTaken { id: self.node.id.0, addr: self.node.addr.to_string() })
    }
}

type RevokeReply = crate::gateway::TxnReply;
