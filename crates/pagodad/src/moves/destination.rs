//! VMs that come from other hosts.
//!
//! Each control stream has a thread that reads it, and so has each data stream. Messages go to the thread of their attempt
//! ([`session`]), which has the machine that says who owns the VM; pages go to their places at once ([`super::store`]). A message about an
//! attempt that nobody here knows is answered by what the VM's note says.

pub mod exports;
mod session;
mod tail;
pub mod vm;

use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use pagoda_api::in_full;
use pagoda_api::types::check_vm_name;
use pagoda_core::policy::VmId;
use pagoda_core::units::{Bytes, PageCount};
use pagoda_link::hosts::Hosts;
use pagoda_link::{Link as Stream, LinkError, PublicKey};
use pagoda_move::arrival::Arrival;
use pagoda_move::compare::{HostFacts, Namesake, compare};
use pagoda_move::note::{Note, Offered};
use pagoda_move::owner::{Action, Answer, Destination, answer, settled_by};
use pagoda_move::units::{AttemptId, HostKey, Moment, RegisterId};
use pagoda_move::wire::control::DecidedBy;
use pagoda_move::wire::limits::VM_PAGES_MAX;
use pagoda_move::wire::offer::{Capabilities, Hello, Reason, ReasonKind};
use pagoda_move::wire::{Control, Data};
use pagoda_pager::tier::source::Arrivals;

use self::vm::Wanted;
use super::capabilities::ours;
use super::channel::{self, ControlReceiver, ControlSender, DataReceiver, DiskOf, STREAMS, disk};
use super::claims::Claim;
use super::notes::FIRST;
use super::sessions::{INPUTS_MAX, Input, LinkNo, Progress, Session};
use super::specification::Specification;
use super::store::{Opened, Store, Taken};
use super::{copies, source, start};
use crate::registry::Registry;

/// How long a data stream waits for the VM whose pages it brings to be made. Its source sends none before.
const STORE_MAX: Duration = Duration::from_secs(10);
/// Before a connection is given up by which pages cannot be taken in.
const PAUSE: Duration = Duration::from_millis(500);
/// The pause between two looks whether the VM of an attempt is made.
const LOOK: Duration = Duration::from_millis(5);

/// Reads a control stream of another host until it ends. `vm`: whose it is, as the stream says.
pub fn take_control(
    registry: &Arc<Registry>,
    peer: PublicKey,
    vm: &str,
    sender: ControlSender,
    mut receiver: ControlReceiver,
) {
    if let Err(why) = check_vm_name(vm) {
        return tracing::warn!("a move from another host: {why}");
    }
    let number = registry.moves.sessions.next_link();
    let link = Link { registry, peer, vm, number, sender: Arc::new(sender) };
    link.read(&mut receiver, Talk::default());
}

/// Calls the source of a VM that runs here, or was refused, and that has not heard of it. Its stream is the session's until it ends.
///
/// # Errors
/// It does not answer, or is not trusted any more.
pub fn call(registry: &Arc<Registry>, session: &Session) -> Result<()> {
    let hosts = Hosts::in_dir(&registry.config.hosts.dir);
    let host = hosts.all()?.into_iter().find(|host| host.key == session.peer).context("its source is not trusted")?;
    let connection = channel::connect(&hosts.own()?, &host, &session.vm, 0)?;
    let (sender, mut receiver) = connection.control;
    let (number, sender) = (registry.moves.sessions.next_link(), Arc::new(sender));
    let _ = session.inputs.send(Input::Called(number, Arc::clone(&sender)));
    let link = Link { registry, peer: session.peer, vm: &session.vm, number, sender };
    link.read(&mut receiver, Talk { greeted: None, session: Some(session.clone()) });
    Ok(())
}

fn host_key(key: &PublicKey) -> HostKey {
    HostKey(key.0)
}

/// A control stream of another host, and the VM that it is about.
struct Link<'a> {
    registry: &'a Arc<Registry>,
    peer: PublicKey,
    vm: &'a str,
    number: LinkNo,
    sender: Arc<ControlSender>,
}

/// What was said on a control stream.
#[derive(Default)]
struct Talk {
    /// A source that has been welcomed and has reserved nothing yet, and the arbiter's registers that it asks as this host does.
    greeted: Option<(Hello, Option<RegisterId>)>,
    /// The session that has this stream.
    session: Option<Session>,
}

impl Link<'_> {
    fn read(&self, receiver: &mut ControlReceiver, mut talk: Talk) {
        loop {
            match receiver.receive() {
                Ok(message) => self.receive(&mut talk, &message),
                Err(error) => {
                    tracing::debug!(vm = self.vm, "the stream of a move has ended: {error}");
                    break;
                }
            }
        }
        if let Some(session) = talk.session {
            let _ = session.inputs.send(Input::LinkDown(self.number));
        }
    }

    fn receive(&self, talk: &mut Talk, message: &Control) {
        let sessions = &self.registry.moves.sessions;
        if let Control::Hello(hello) = message {
            return self.greet(talk, hello);
        }
        if let Some(session) = sessions.of(message.attempt(), &self.peer).filter(|session| session.vm == self.vm) {
            if talk.session.is_none() {
                let _ = session.inputs.send(Input::LinkUp(self.number, Arc::clone(&self.sender)));
                talk.session = Some(session.clone());
            }
            let _ = session.inputs.send(Input::Message(self.number, message.clone()));
            return;
        }
        // Its source has the machine, and calls by itself.
        if self.registry.moves.has_outgoing(message.attempt()) {
            return;
        }
        let done = match message {
            Control::Check { attempt, specification } => match &talk.greeted {
                Some((hello, register)) if hello.attempt == *attempt => {
                    self.look_at(hello, *register, specification).map(|wanted| {
                        if wanted.is_some() {
                            self.send(&Control::Possible { attempt: *attempt });
                        }
                    })
                }
                _ => self.answer(talk, message),
            },
            Control::Reserve { attempt, specification, .. } => match talk.greeted.take() {
                Some((hello, register)) if hello.attempt == *attempt => {
                    self.reserve(talk, &hello, register, specification)
                }
                _ => self.answer(talk, message),
            },
            _ => self.answer(talk, message),
        };
        if let Err(error) = done {
            let why = in_full(error.as_ref());
            tracing::warn!(vm = self.vm, "a move from another host: {why}");
            self.refuse(message.attempt(), vec![why]);
        }
    }

    fn send(&self, message: &Control) {
        // A stream that has ended is heard of by whoever reads it.
        let _ = self.sender.send(message);
    }

    fn refuse(&self, attempt: AttemptId, whys: Vec<String>) {
        let reason = |why: String| Reason {
            kind: ReasonKind::Forbidden,
            what: why.chars().filter(|c| !c.is_control()).take(400).collect(),
            remedy: "see the log and the configuration of that host".to_owned(),
        };
        let reasons = whys.into_iter().take(16).map(reason).collect();
        self.send(&Control::Refuse { attempt, reasons });
    }

    fn note(&self) -> Result<Option<Note>> {
        self.registry.moves.notes().read(self.vm)
    }

    /// Compares. Nothing is changed by it, but for an earlier attempt of the same source, which is over.
    fn greet(&self, talk: &mut Talk, hello: &Hello) {
        let registry = self.registry;
        let sessions = &registry.moves.sessions;
        let earlier = sessions.of_vm(self.vm).filter(|(_, session)| session.peer == self.peer);
        if let Some((attempt, session)) = &earlier {
            let (attempt, peer) = (*attempt, host_key(&self.peer));
            let offered = Offered { attempt, peer, generation: hello.generation.next(), register: None };
            if let Some(settled) = settled_by(hello, offered) {
                let _ = session.inputs.send(Input::Message(self.number, settled));
            }
        }
        talk.greeted = None;
        let namesake = match (registry.moves.claims.has(self.vm), self.note()) {
            (true, _) => Namesake::Unsettled,
            (false, Ok(Some(Note::Owned(owned)))) if registry.lock().contains_key(self.vm) => {
                Namesake::Owned(owned.generation())
            }
            (false, Ok(Some(Note::Owned(_)) | None)) if registry.lock().contains_key(self.vm) => Namesake::Owned(FIRST),
            (false, Ok(Some(Note::Owned(_)) | None)) => Namesake::None,
            // Of another attempt, whose session a daemon that has just started is about to begin.
            (false, Ok(Some(_)) | Err(_)) => Namesake::Unsettled,
        };
        let mut forbidden = Vec::new();
        if !registry.config.moves.accept {
            forbidden.push(
                "this host takes no VMs of others: `accept` in the section [moves] of its configuration".to_owned(),
            );
        }
        if registry.draining.is_on() {
            forbidden.push("this host is drained itself, and takes no VMs".to_owned());
        }
        if hello.vm != self.vm {
            forbidden.push(format!("the stream is of {}, and the VM is {}", self.vm, hello.vm));
        }
        let register = registry.moves.arbiter.register();
        let machine = [hello.machine.as_str()];
        let features: Vec<&str> = hello.cpu_features.split(',').collect();
        let facts = HostFacts {
            software: env!("CARGO_PKG_VERSION"),
            unix_s: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            capabilities: ours(register),
            required: Capabilities::default(),
            register,
            // Whether there is a QEMU that knows this machine and these features, the QEMU that is started says.
            qemu: Some(&hello.qemu),
            machines: &machine,
            cpu_features: &features,
            regions: &hello.regions,
            namesake,
            forbidden: &forbidden,
        };
        match compare(hello, &facts) {
            Ok(welcome) => {
                let register = register.filter(|_| welcome.capabilities.has(Capabilities::ARBITER));
                talk.greeted = Some((hello.clone(), register));
                self.send(&Control::Welcome(welcome));
            }
            Err(reasons) => self.send(&Control::Refuse { attempt: hello.attempt, reasons }),
        }
    }

    /// What would be made, or None: its source hears why not. Nothing is changed.
    fn look_at(
        &self,
        hello: &Hello,
        register: Option<RegisterId>,
        specification: &str,
    ) -> Result<Option<Specification>> {
        let specification = Specification::parse(specification)?;
        let forbidden = start::check(&self.registry.config.moves, &specification.launch);
        if let Err(whys) = forbidden {
            self.refuse(hello.attempt, whys);
            return Ok(None);
        }
        check_memory(&specification, hello)?;
        let Specification { launch, disks, .. } = &specification;
        if let Err(whys) = copies::check(&self.registry.config.moves, launch, disks) {
            self.refuse(hello.attempt, whys);
            return Ok(None);
        }
        let may_arbitrate = register.is_none() || specification.remote.is_none();
        ensure!(may_arbitrate, "its remote tier is handed over, and no arbiter decides about such a VM");
        Ok(Some(specification))
    }

    /// The first message that leaves a trace here.
    fn reserve(&self, talk: &mut Talk, hello: &Hello, register: Option<RegisterId>, specification: &str) -> Result<()> {
        let Some(specification) = self.look_at(hello, register, specification)? else { return Ok(()) };
        let claim = self.claim()?;
        // Looked at once more: the name may be taken by now.
        let note = self.note()?;
        let is_free = matches!(note, None | Some(Note::Owned(_))) && !self.registry.lock().contains_key(self.vm);
        ensure!(is_free, "this host has got a VM {} of its own meanwhile", self.vm);
        let (attempt, generation) = (hello.attempt, hello.generation.next());
        let offered = Offered { attempt, peer: host_key(&self.peer), generation, register };
        let wanted = Wanted { name: self.vm.to_owned(), attempt: hello.attempt, specification };
        let begin = |actions: &mut Vec<Action>| {
            // A note that is there is of a VM that has ended.
            Destination::begin(self.me(), offered, None, Moment::default(), actions)
        };
        self.begin(talk, claim, begin, Some(wanted))
    }

    /// Claims the VM's note, unless another move has it.
    fn claim(&self) -> Result<Claim> {
        self.registry.moves.claims.claim(self.vm).with_context(|| format!("another move of {} is under way", self.vm))
    }

    fn me(&self) -> HostKey {
        self.registry.moves.me()
    }

    /// Starts the thread of an attempt, which has this stream.
    fn begin(
        &self,
        talk: &mut Talk,
        claim: Claim,
        owner: impl FnOnce(&mut Vec<Action>) -> Destination,
        wanted: Option<Wanted>,
    ) -> Result<()> {
        let mut actions = Vec::new();
        let owner = owner(&mut actions);
        let link = Some((self.number, Arc::clone(&self.sender)));
        let begun = Begun { owner, actions, wanted, made: None, lacks: None, link, claim };
        talk.session = Some(begin(self.registry, self.vm, self.peer, begun)?);
        Ok(())
    }

    /// A message about an attempt that this host has no machine for.
    fn answer(&self, talk: &mut Talk, message: &Control) -> Result<()> {
        let note = self.note()?;
        match answer(note, host_key(&self.peer), message) {
            Answer::Nothing => {}
            Answer::Send(message) => {
                let attempt = message.attempt();
                let owns = matches!(message, Control::Started { .. });
                self.send(&message);
                // Its VM is this host's with all its pages.
                if owns {
                    self.send(&Control::Whole { attempt });
                }
            }
            // A VM of the name that has never moved is another one. What nobody here knows of, nobody here can run: there is nothing to be
            // noted, and its own note is not to be touched.
            Answer::Refuse(offered, _) if self.registry.lock().contains_key(self.vm) => {
                let Offered { attempt, generation, .. } = offered;
                self.send(&Control::Refusal { attempt, generation });
            }
            // The note is busy with another attempt. A grant that counts is repeated.
            Answer::Refuse(..) if self.registry.moves.claims.has(self.vm) => {}
            Answer::Refuse(offered, by) => {
                let claim = self.claim()?;
                let register = self.registry.moves.arbiter.register().filter(|_| by == DecidedBy::Arbiter);
                let offered = Offered { register, ..offered };
                let begin = |actions: &mut Vec<Action>| {
                    Destination::refuse_unknown(self.me(), offered, by, Moment::default(), actions)
                };
                self.begin(talk, claim, begin, None)?;
            }
            Answer::Unknown => self.registry.moves.unclear.note(self.vm, &self.peer),
            Answer::Superseded(offered) => source::supersede(self.registry, self.vm, offered)?,
        }
        Ok(())
    }
}

/// What the thread of an attempt begins with.
pub struct Begun {
    pub owner: Destination,
    /// What the machine wants to be done first.
    pub actions: Vec<Action>,
    /// What is to be made; nothing if a daemon before this one made it, or if there is nothing to be made.
    pub wanted: Option<Wanted>,
    /// The VM, if a daemon before this one made it.
    pub made: Option<VmId>,
    /// What has come of the pages that this one lacks, of so many.
    pub lacks: Option<(Arc<Arrivals>, PageCount)>,
    pub link: Option<(LinkNo, Arc<ControlSender>)>,
    pub claim: Claim,
}

/// That a specification is of the VM that was compared, and asks for nothing that does not move.
fn check_memory(specification: &Specification, hello: &Hello) -> Result<()> {
    let Specification { spec, memory, remote, .. } = specification;
    let compared: Vec<u64> = hello.regions.iter().map(|region| region.size.0).collect();
    ensure!(*memory == compared, "its specification has other memory than its hello");
    let pages = Bytes(memory.iter().sum()).pages_floor();
    ensure!(pages <= VM_PAGES_MAX, "it has more memory than a VM that moves can have");
    let is_plain = spec.share_group.is_none() && spec.pinned.is_none();
    ensure!(is_plain, "it has a share group, or memory that others write unseen");
    let is_right = remote.as_ref().is_none_or(|remote| remote.cluster.is_some() && remote.is_right());
    let is_whole = spec.remote.map(|remote| remote.copies) == remote.as_ref().map(|remote| remote.copies);
    ensure!(is_right && is_whole, "its remote tier is not one that can be handed over");
    let can = hello.capabilities.has(Capabilities::REMOTE_TIER);
    ensure!(remote.is_none() || can, "it has a remote tier, which its hello does not say");
    let can = hello.capabilities.has(Capabilities::DISKS);
    ensure!(specification.disks.is_empty() || can, "its disks are copied, which its hello does not say");
    Ok(())
}

/// Starts the thread of an attempt.
///
/// # Errors
/// There is one of this VM already; no thread can be had.
pub fn begin(registry: &Arc<Registry>, vm: &str, peer: PublicKey, begun: Begun) -> Result<Session> {
    let Begun { owner, actions, wanted, made, lacks, link, claim } = begun;
    let (own, inputs) = sync_channel(INPUTS_MAX);
    let phase = if owner.is_running() { "running" } else { "" };
    let progress = Arc::new(Mutex::new(Progress { phase, ..Progress::default() }));
    let attempt = owner.offered().attempt;
    let tail = lacks.as_ref().map(|(arrivals, pages)| tail::Tail::new(attempt, *pages, arrivals)).transpose()?;
    let store = lacks.map(|(arrivals, pages)| {
        let own = own.clone();
        arrivals.set_listener(Some(Box::new(move || drop(own.try_send(Input::Tail)))));
        Arc::new(Store::of_tail(arrivals, Arrival::new(attempt, pages, STREAMS)))
    });
    let entry = Session {
        vm: vm.to_owned(),
        peer,
        inputs: own.clone(),
        store,
        exports: None,
        progress: Arc::clone(&progress),
        began: Instant::now(),
    };
    ensure!(registry.moves.sessions.enter(attempt, entry.clone()), "too many VMs move to this host");
    let (caller, called) = (Arc::clone(registry), entry.clone());
    let begun = session::Begun {
        owner,
        wanted,
        made,
        tail,
        link,
        progress,
        claim,
        call: Arc::new(move || call(&caller, &called)),
    };
    let session = session::Session::new(registry, vm, begun, (own, inputs));
    let thread = std::thread::Builder::new().name("arrival".into()).spawn(move || session.run(actions));
    if let Err(error) = thread {
        registry.moves.sessions.leave(attempt);
        return Err(error).context("start the thread of a move");
    }
    Ok(entry)
}

/// Reads a data stream of another host until it ends.
pub fn take_data(registry: &Arc<Registry>, peer: PublicKey, mut receiver: DataReceiver) {
    if let Err(error) = take_pages(registry, &peer, &mut receiver) {
        tracing::warn!("pages of a move: {}", in_full(error.as_ref()));
    }
}

fn take_pages(registry: &Registry, peer: &PublicKey, receiver: &mut DataReceiver) -> Result<()> {
    let Some(Data::Open { attempt, connection, stream, round }) = receiver.receive()? else { return Ok(()) };
    let opened = Opened { attempt, connection, stream, round };
    let taken = take_all(registry, peer, receiver, opened);
    if taken.is_err() {
        // Not in a loop without a pause, if what comes cannot be stored.
        std::thread::sleep(PAUSE);
    }
    // What was given to this stream does not come any more, which the source may not notice.
    if let Some(session) = registry.moves.sessions.of(attempt, peer)
        && session.store.as_ref().is_some_and(|store| store.is_newest(connection))
    {
        let _ = session.inputs.send(Input::StreamEnded);
    }
    taken
}

/// Takes in what a stream brings, until it ends.
fn take_all(registry: &Registry, peer: &PublicKey, receiver: &mut DataReceiver, opened: Opened) -> Result<()> {
    let attempt = opened.attempt;
    let mut place: Option<(Arc<Store>, Session)> = None;
    while let Some(data) = receiver.receive()? {
        if place.is_none() {
            let found = store_of(registry, attempt, peer)?;
            found.0.open(opened)?;
            place = Some(found);
        }
        let Some((store, session)) = &place else { continue };
        match store.take(opened, data) {
            Ok(Taken::In) => {}
            Ok(Taken::Round(round)) => drop(session.inputs.send(Input::RoundKept(round))),
            Ok(Taken::Stored(chunk, pages)) => drop(session.inputs.send(Input::Stored(chunk, pages))),
            Ok(Taken::Outdated) => return Ok(()),
            Err(error) => {
                let _ = session.inputs.send(Input::Failed(in_full(error.as_ref())));
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Carries the stream of a disk until it ends. There is a VM already: its source begins with the disks when there is.
///
/// # Errors
/// The stream's.
pub fn take_disk(registry: &Arc<Registry>, of: DiskOf, link: Stream) -> Result<(), LinkError> {
    let session = registry.moves.sessions.of(of.attempt, &link.peer);
    let exports = session.and_then(|session| session.exports);
    let stream = exports.context("no disks are expected of this attempt").and_then(|exports| exports.connect(of.disk));
    match stream {
        Ok(stream) => disk::carry(link, &stream),
        Err(error) => {
            tracing::warn!("a disk of a move: {}", in_full(error.as_ref()));
            Ok(())
        }
    }
}

/// Where the pages of an attempt go. Its VM may still be being made.
fn store_of(registry: &Registry, attempt: AttemptId, peer: &PublicKey) -> Result<(Arc<Store>, Session)> {
    let deadline = Instant::now() + STORE_MAX;
    loop {
        let session = registry.moves.sessions.of(attempt, peer);
        if let Some(session) = &session
            && let Some(store) = session.store.clone()
        {
            return Ok((store, session.clone()));
        }
        ensure!(Instant::now() < deadline, "pages of an attempt that nobody here knows ({attempt})");
        std::thread::sleep(LOOK);
    }
}
