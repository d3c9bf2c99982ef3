//! VMs that leave for another host.
//!
//! | step | what is done | a daemon that starts finds | the VM |
//! |---|---|---|---|
//! | 1 | all checks; the destination is called | nothing | runs |
//! | 2 | the record says that the VM moves; it gets a note, if it has none | owned: the move is given up | runs |
//! | 3 | the destination compares, and makes room; the note tells of the offer | the same | runs |
//! | 3a | its disks are copied, if they are to be ([`mirror`]) | the same | runs |
//! | 4 | rounds of pages | the same | runs |
//! | 5 | QEMU saves its state, and stops the VM for that; the last pages and the state are sent | owned: it runs again | stands |
//! | 6 | the note says that the VM is given away, and then the grant is sent | given: the grant again | stands |
//! | 7 | the destination runs it, and asks for what it lacks until it has all of it | given: the same | runs there |
//! | 8 | QEMU is ended here, and then the note goes | given, no VM: the note goes | runs there |
//!
//! From step 6 on nothing lets the VM run here but the machine ([`pagoda_move::owner`]), by the destination's refusal or an operator's
//! word. What the guest sees of a failure before that: it runs on.

mod asking;
mod check;
mod copies;
mod copying;
mod driver;
mod guest;
mod input;
mod line;
pub mod mirror;
mod pages;
pub mod progress;
mod request;
mod shown;
mod split;
mod standing;
mod superseded;
mod tail;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode};
use pagoda_core::units::Bytes;
use pagoda_image::ImageId;
use pagoda_link::PublicKey;
use pagoda_link::hosts::Hosts;
use pagoda_move::note::{Note, Offered, Owned};
use pagoda_move::owner::{Action, Source};
use pagoda_move::units::{AttemptId, HostKey, Moment};

pub use self::asking::{Asked, ask};
pub use self::request::{Request, STOP_COST};
pub use self::split::to_pool;
pub use self::superseded::supersede;

use self::check::{Checked, check};
use self::driver::{Begun, Driver};
use self::guest::Guest;
use self::input::Input;
use self::line::Called;
use self::progress::Progress;
use self::request::new_attempt;
use self::shown::Stage;
use super::channel::{self, STREAMS};
use super::claims::Claim;
use super::notes::{FIRST, Notes};
use super::outgoing::Order;
use crate::record::{Operation, OperationKind};
use crate::registry::Registry;
use crate::registry::operation::ImageThen;

/// How long a move waits for the end of the one before.
const CLAIM_MAX: Duration = Duration::from_secs(2);
const CLAIM_LOOK: Duration = Duration::from_millis(10);

/// Begins to move a VM to another host. When this returns, the destination has made room for it, and a thread goes on.
///
/// # Errors
/// What keeps it from moving. Nothing is changed.
pub fn begin(registry: &Arc<Registry>, request: &Request) -> Result<(), ApiError> {
    let checked = check(registry, request)?;
    let connection = channel::connect(&checked.own, &checked.host, &request.vm, STREAMS);
    let connection = connection.map_err(|error| asking::unreachable(&checked, &error))?;
    let refuse = |error: anyhow::Error| {
        let what = format!("{} does not move: {}", request.vm, in_full(error.as_ref()));
        ApiError::new(ErrorCode::Refused, what, None)
    };
    let attempt = new_attempt().map_err(refuse)?;
    // Nobody else writes its note from here on.
    let claim = claim(registry, &request.vm).map_err(refuse)?;
    let id = checked.ready.id;
    // From here on no other move of it begins, and the VM is not ended by a user of this daemon.
    let operation = Operation { kind: OperationKind::Move, image: ImageId(attempt.0.into()), resume: checked.runs };
    registry.begin_operation(id, operation)?;
    let (asker, answer) = channel();
    let started = owned(registry, &request.vm)
        .and_then(|own| start(registry, request, checked, (attempt, own, claim), connection, asker));
    if let Err(error) = started {
        registry.end_operation(id, ImageThen::Kept);
        return Err(refuse(error));
    }
    let silent = || ApiError::new(ErrorCode::Internal, "nobody says whether it moves", None);
    answer.recv().unwrap_or_else(|_| Err(silent()))
}

/// A move that has brought the VM here is over when its source has said its last word, which comes soon.
fn claim(registry: &Registry, vm: &str) -> Result<Claim> {
    let deadline = Instant::now() + CLAIM_MAX;
    loop {
        match registry.moves.claims.claim(vm) {
            Some(claim) => return Ok(claim),
            None if Instant::now() > deadline => anyhow::bail!("another move of it is under way"),
            None => std::thread::sleep(CLAIM_LOOK),
        }
    }
}

/// How this host owns the VM, durably. It gets a note if it has none.
fn owned(registry: &Registry, vm: &str) -> Result<Owned> {
    let notes: Notes = registry.moves.notes().clone();
    match notes.read(vm)? {
        Some(Note::Owned(owned)) => Ok(owned),
        None => {
            let first = Owned::Alone(FIRST);
            notes.write(vm, Some(Note::Owned(first)))?;
            Ok(first)
        }
        Some(Note::Given(offered, _)) => anyhow::bail!(
            "it was given to the host with the key {:?}, and that has not ended: see `pagoda moves`",
            PublicKey(offered.peer.0)
        ),
        Some(Note::Incoming(offered) | Note::Accepted(offered, _) | Note::Refused(offered)) => anyhow::bail!(
            "its move from the host with the key {:?} has not ended: it ends when the two hosts reach each other",
            PublicKey(offered.peer.0)
        ),
    }
}

/// Starts the thread of an attempt.
fn start(
    registry: &Arc<Registry>,
    request: &Request,
    checked: Checked,
    (attempt, owned, claim): (AttemptId, Owned, Claim),
    connection: channel::Connection,
    asker: Sender<Result<(), ApiError>>,
) -> Result<()> {
    let Checked { ready, host, own, offer, runs } = checked;
    let vm = &request.vm;
    let offered = Offered { attempt, peer: HostKey(host.key.0), generation: owned.generation().next(), register: None };
    let me = HostKey(own.public().0);
    let owner = Source::begin(me, owned.generation(), offered, Moment::default());
    let progress = Progress::new(vm, &host.name, attempt, offer.pages().bytes());
    let hosts = Hosts::in_dir(&registry.config.hosts.dir);
    let (inputs, progress) = enter(registry, progress)?;
    let begun = Begun {
        owner,
        stage: Stage::Greeting,
        called: Called { own, hosts, key: offered.peer, vm: vm.clone() },
        guest: Guest::new(registry, vm, ready.id, runs),
        notes: registry.moves.notes().clone(),
        owned: Some(owned),
        offer: Some((offer, request.settings())),
        progress,
        answer: Some(asker),
        own: inputs.0,
        inputs: inputs.1,
    };
    spawn(registry, begun, claim, Some(connection), Vec::new())
}

/// Goes on with a VM that an earlier daemon has given to the host with this key. Nothing lets it run meanwhile.
///
/// # Errors
/// It cannot be gone on with now. The VM stays as it is.
pub fn go_on(
    registry: &Arc<Registry>,
    vm: &str,
    peer: PublicKey,
    (owner, actions): (Source, Vec<Action>),
) -> Result<()> {
    let claim = claim(registry, vm)?;
    let hosts = Hosts::in_dir(&registry.config.hosts.dir);
    let own = hosts.own()?;
    let called = Called { own, hosts, key: HostKey(peer.0), vm: vm.to_owned() };
    // Whoever is not trusted any more is not called, but the VM stays given.
    let to = called.host().ok().flatten().map_or_else(|| format!("{peer:?}"), |host| host.name);
    let memory = registry.lock().get(vm).map_or(0, |vm| vm.record.memory());
    let attempt = owner.offered().attempt;
    let (inputs, progress) = enter(registry, Progress::new(vm, &to, attempt, Bytes(memory)))?;
    let begun = Begun {
        owner,
        stage: Stage::Granted,
        called,
        guest: Guest::left(registry, vm),
        notes: registry.moves.notes().clone(),
        owned: None,
        offer: None,
        progress,
        answer: None,
        own: inputs.0,
        inputs: inputs.1,
    };
    spawn(registry, begun, claim, None, actions)
}

type Inputs = (Sender<Input>, Receiver<Input>);

fn enter(registry: &Registry, progress: Progress) -> Result<(Inputs, Arc<Mutex<Progress>>)> {
    let inputs = channel();
    let progress = Arc::new(Mutex::new(progress));
    let orders = inputs.0.clone();
    let order = move |order: Order| drop(orders.send(Input::Order(order)));
    ensure!(registry.moves.outgoing.enter(&progress, order), "a move of it is under way");
    Ok((inputs, progress))
}

fn spawn(
    registry: &Arc<Registry>,
    begun: Begun,
    claim: Claim,
    first: Option<channel::Connection>,
    actions: Vec<Action>,
) -> Result<()> {
    let (vm, driver) = (begun.called.vm.clone(), Driver::new(registry, begun, claim));
    let thread = std::thread::Builder::new().name("move".into()).spawn(move || driver.run(first, actions));
    if let Err(error) = thread {
        registry.moves.outgoing.leave(&vm);
        return Err(error).context("start a thread");
    }
    Ok(())
}

/// Ends a move if that is still possible. After the grant the destination is asked whether it gives the VM back.
///
/// # Errors
/// There is no move of it.
pub fn cancel(registry: &Registry, vm: &str) -> Result<(), ApiError> {
    order(registry, vm, Order::Cancel)
}

/// An operator says that the destination is gone for good: the VM runs here. If it is not gone, there are two.
///
/// # Errors
/// There is no move of it.
pub fn resolve(registry: &Registry, vm: &str) -> Result<(), ApiError> {
    order(registry, vm, Order::Resolve)
}

fn order(registry: &Registry, vm: &str, order: Order) -> Result<(), ApiError> {
    if registry.moves.outgoing.order(vm, order) {
        return Ok(());
    }
    let what = format!("no move of {vm} from this host is under way");
    Err(ApiError::new(ErrorCode::WrongState, what, None))
}
