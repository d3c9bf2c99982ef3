//! Questions of a driver, asked on a thread of their own.
//!
//! The driver hands a request in and gets [`ControlReply::Later`] until there is an answer; the client's core asks again
//! soon, and then not so soon. Nothing here blocks the driver. While etcd is away, requests wait here and reads and writes
//! of pages go on; nothing is acknowledged that needs another map first.

use std::collections::VecDeque;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rmap::control::{Change, ControlPlane, ControlReply, ControlRequest};
use rmap::units::{Generation, SpaceId};
use rmap_io::aside::{self, Asker};

use crate::config::EtcdConfig;
use crate::error::EtcdError;
use crate::store::{BATCH_MAX, Etcd};

/// How often etcd and the owners are looked at while nothing is asked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// After a failure that may pass.
const PAUSE: Duration = Duration::from_millis(50);
/// After one that will not pass by itself, such as a value that cannot be right.
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// What an owner may believe of its space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// As of the last look.
    Owner,
    /// etcd was not reached since: it may belong to another owner by now. Servers know.
    Unsure,
    Taken {
        generation: Generation,
    },
}

/// How it is with etcd, for operators.
#[derive(Clone, Debug)]
pub struct Health {
    /// Whether the last request was answered; if not, there is no new placement and no take-over.
    pub reachable: bool,
    /// When `reachable` last changed; before the first request, when the connection was made.
    pub since: Instant,
    /// The last error, as long as something waits because of it.
    pub trouble: Option<EtcdError>,
    /// Changes of maps that wait.
    pub waiting: usize,
    pub owned: Vec<(SpaceId, Generation, Ownership)>,
}

/// The control plane, as the driver of a client has it: `move |request| control.ask(request)`.
#[derive(Debug)]
pub struct Control {
    asker: Asker,
    health: Arc<Mutex<Health>>,
}

/// Reads the [`Health`] of a [`Control`] from anywhere.
#[derive(Clone, Debug)]
pub struct HealthView(Arc<Mutex<Health>>);

impl HealthView {
    pub fn get(&self) -> Health {
        lock(&self.0).clone()
    }
}

impl Control {
    /// Starts the thread. It ends when this is dropped.
    ///
    /// # Errors
    /// The configuration. Whether etcd is there shows in [`Health`].
    pub fn start(mut config: EtcdConfig) -> Result<Control, EtcdError> {
        // A try at a time: in between the thread looks whether it is still wanted.
        config.patience = Duration::ZERO;
        let etcd = Etcd::open(config)?;
        let (since, owned) = (Instant::now(), Vec::new());
        let health = Health { reachable: false, since, trouble: None, waiting: 0, owned };
        let health = Arc::new(Mutex::new(health));
        let (asker, (inbox, outbox)) = aside::pair();
        let worker = Worker { etcd, inbox, outbox, queue: VecDeque::new(), health: Arc::clone(&health) };
        thread::Builder::new()
            .name("etcd-control".to_owned())
            .spawn(move || worker.run())
            .map_err(|error| EtcdError::Invalid { what: format!("no thread: {error}") })?;
        Ok(Control { asker, health })
    }

    /// Watches whether the space still belongs to this generation, and says so in [`Health`].
    pub fn guard(&self, space: SpaceId, generation: Generation) {
        let owned = &mut lock(&self.health).owned;
        owned.retain(|(other, ..)| *other != space);
        owned.push((space, generation, Ownership::Unsure));
    }

    /// The answer to a request, if there is one. Never waits.
    pub fn ask(&mut self, request: &ControlRequest) -> ControlReply {
        self.asker.ask(request)
    }

    pub fn health(&self) -> HealthView {
        HealthView(Arc::clone(&self.health))
    }
}

struct Waiting {
    request: ControlRequest,
    due: Instant,
    /// It shares no transaction: it, or one of those it was with, cannot succeed as things are.
    alone: bool,
}

struct Worker {
    etcd: Etcd,
    inbox: mpsc::Receiver<ControlRequest>,
    outbox: mpsc::Sender<(ControlRequest, ControlReply)>,
    queue: VecDeque<Waiting>,
    health: Arc<Mutex<Health>>,
}

impl Worker {
    fn run(mut self) {
        let mut look_at = Instant::now();
        loop {
            let due = self.queue.iter().map(|waiting| waiting.due).min();
            let wake = due.map_or(look_at, |due| due.min(look_at));
            match self.inbox.recv_timeout(wake.saturating_duration_since(Instant::now())) {
                Ok(request) => {
                    let waiting = |request| Waiting { request, due: Instant::now(), alone: false };
                    self.queue.push_back(waiting(request));
                    self.queue.extend(self.inbox.try_iter().map(waiting));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let now = Instant::now();
            if self.queue.iter().any(|waiting| waiting.due <= now) {
                self.swap(now);
            }
            if look_at <= Instant::now() {
                self.look();
                look_at = Instant::now() + LOOK_EVERY;
            }
            lock(&self.health).waiting = self.queue.len();
        }
    }

    /// The changes that are due and can go together.
    fn next_batch(&mut self, now: Instant) -> Vec<Waiting> {
        let mut batch: Vec<Waiting> = Vec::new();
        let mut rest = VecDeque::with_capacity(self.queue.len());
        for waiting in self.queue.drain(..) {
            let fits = waiting.due <= now
                && batch.len() < BATCH_MAX
                && batch.first().is_none_or(|first| {
                    let together = !first.alone && !waiting.alone;
                    together && owner_of(first).is_some_and(|owner| owner_of(&waiting) == Some(owner))
                })
                && batch.iter().all(|other| other.request.subject() != waiting.request.subject());
            if fits {
                batch.push(waiting);
            } else {
                rest.push_back(waiting);
            }
        }
        self.queue = rest;
        batch
    }

    fn swap(&mut self, now: Instant) {
        let batch = self.next_batch(now);
        let requests: Vec<ControlRequest> = batch.iter().map(|waiting| waiting.request.clone()).collect();
        match self.answer(&requests) {
            Ok(replies) => {
                // What cannot succeed is still the trouble while others go on.
                if !self.queue.iter().any(|waiting| waiting.alone) {
                    self.heard(None);
                }
                for answer in requests.into_iter().zip(replies) {
                    // Nobody listens: the next look at the inbox ends the thread.
                    let _ = self.outbox.send(answer);
                }
            }
            Err(error) => {
                let several = batch.len() > 1;
                let transient = error.is_transient();
                self.heard(Some(error));
                for waiting in batch {
                    let pause = if transient || several { PAUSE } else { LONG_PAUSE };
                    let alone = waiting.alone || !transient;
                    self.queue.push_back(Waiting { due: Instant::now() + pause, alone, ..waiting });
                }
            }
        }
    }

    /// Changes go together; whatever else is asked is alone.
    fn answer(&mut self, requests: &[ControlRequest]) -> Result<Vec<ControlReply>, EtcdError> {
        let change = |request: &ControlRequest| match request {
            ControlRequest::Change(change) => Some(change.clone()),
            ControlRequest::Look { .. } | ControlRequest::Confirm { .. } | ControlRequest::Keep { .. } => None,
        };
        match requests.iter().map(change).collect::<Option<Vec<Change>>>() {
            Some(changes) => self.etcd.answer_batch(&changes),
            None => requests.iter().map(|request| self.etcd.answer(request)).collect(),
        }
    }

    /// Is etcd there, and are the spaces still ours?
    fn look(&mut self) {
        let owned = lock(&self.health).owned.clone();
        if owned.is_empty() {
            let nodes = self.etcd.keys.nodes();
            let there = self.etcd.range(nodes.as_bytes(), None, 1);
            self.seen(there.err());
        }
        for (space, generation, _) in owned {
            let today = self.etcd.generation(space);
            let ownership = match &today {
                Ok(today) if *today == generation => Ownership::Owner,
                Ok(today) => Ownership::Taken { generation: *today },
                Err(_) => Ownership::Unsure,
            };
            let mut health = lock(&self.health);
            let ours = health.owned.iter_mut().filter(|(s, g, _)| (*s, *g) == (space, generation));
            ours.for_each(|owned| owned.2 = ownership);
            let away = today.as_ref().is_err_and(EtcdError::is_transient);
            if away {
                // One wait is enough: what comes next is asked in a second.
                health.owned.iter_mut().for_each(|owned| owned.2 = Ownership::Unsure);
            }
            drop(health);
            self.seen(today.err());
            if away {
                return;
            }
        }
    }

    /// What a look found. Trouble of a change that still waits is not over because etcd is there.
    fn seen(&self, trouble: Option<EtcdError>) {
        if trouble.is_some() || self.queue.is_empty() || !lock(&self.health).reachable {
            self.heard(trouble);
        }
    }

    fn heard(&self, trouble: Option<EtcdError>) {
        let mut health = lock(&self.health);
        let reachable = trouble.as_ref().is_none_or(|error| !error.is_transient());
        if reachable != health.reachable {
            (health.reachable, health.since) = (reachable, Instant::now());
        }
        health.trouble = trouble;
    }
}

/// Whose change it is, if it is one.
fn owner_of(waiting: &Waiting) -> Option<(SpaceId, Generation)> {
    match &waiting.request {
        ControlRequest::Change(change) => Some((change.space, change.generation)),
        ControlRequest::Look { .. } | ControlRequest::Confirm { .. } | ControlRequest::Keep { .. } => None,
    }
}

fn lock(health: &Mutex<Health>) -> std::sync::MutexGuard<'_, Health> {
    health.lock().unwrap_or_else(PoisonError::into_inner)
}
