//! Remote tiers of VMs that move between hosts of one pool: they are handed over, and none of their pages is sent.
//!
//! | host | when | what |
//! |---|---|---|
//! | source | before anything is changed; the move begins | [`check_owned`]; [`hold`] |
//! | destination | before the VM is made | [`check`]; its engine opens the tier as a reader |
//! | destination | before its engine serves it | [`set_pages`] |
//! | source | the map of what is there is sent | [`name_pages`] |
//! | source | before the note that gives it away | [`let_go`] |
//! | destination | the VM is its own by a durable note | [`own`] |
//! | source | it was not given away, or the grant came back | [`own`] |
//!
//! What the guest sees when etcd is away at the last step: threads that need a page of the tier wait for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pagoda_api::in_full;
use pagoda_api::types::RemoteFate;
use pagoda_core::bits::PageSet;
use pagoda_core::units::ChunkIdx;
use pagoda_pager::tier::remote::{Handover, Standing, WeakHandover};
use pagoda_pool::plane::Plane;
use pagoda_pool::{connect, role, store};
use rmap::units::{Generation, SpaceId};

use super::open::{Before, Served, open_owner};
use super::ownership::{self, may_own};
use super::pending_release;
use super::space::{Dirs, pool_of, whose};
use crate::record::{OperationKind, Record, Remote};

/// How long a move waits for a take-over under way, and between two looks.
const OWNED_MAX: Duration = Duration::from_secs(2);
const OWNED_LOOK: Duration = Duration::from_millis(10);
/// The pause between two tries to take a tier over.
const AGAIN: Duration = Duration::from_millis(200);

/// The tiers of this daemon's engines, by the numbers of their spaces.
static TIERS: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());
/// Spaces that are being taken over.
static TAKING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// A tier that an engine has.
#[derive(Clone, Debug)]
struct Entry {
    handover: WeakHandover,
    /// Of one that was opened as a reader: the generation of its owner then.
    from: Option<Generation>,
}

fn tiers<T>(act: impl FnOnce(&mut BTreeMap<u64, Entry>) -> T) -> T {
    act(&mut TIERS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn taking<T>(act: impl FnOnce(&mut BTreeSet<u64>) -> T) -> T {
    act(&mut TAKING.lock().unwrap_or_else(PoisonError::into_inner))
}

/// An engine has this tier from now on. `from`: the generation of the owner beside whom it reads.
pub(super) fn enter(remote: &Remote, handover: &Handover, from: Option<Generation>) {
    tiers(|tiers| {
        // The tiers of engines that have ended are forgotten.
        tiers.retain(|_, entry| entry.handover.upgrade().is_some());
        tiers.insert(remote.space, Entry { handover: handover.downgrade(), from });
    });
}

fn of(record: &Record) -> Option<Handover> {
    let remote = record.remote.as_ref().filter(|remote| remote.cluster.is_some())?;
    engines(remote)
}

/// The handover of the engine that has this tier.
fn engines(remote: &Remote) -> Option<Handover> {
    tiers(|tiers| tiers.get(&remote.space).and_then(|entry| entry.handover.upgrade()))
}

/// From which generation on a tier has to be taken over that comes from another host. If its source went on with it after all, which an
/// operator thought gone for good, then what is there is not what the VM had when it was stopped.
fn from(record: &Record, remote: &Remote) -> Option<Generation> {
    let arrives = record.operation.is_some_and(|operation| operation.kind == OperationKind::Arrival);
    tiers(|tiers| tiers.get(&remote.space).and_then(|entry| entry.from)).filter(|_| arrives)
}

fn found(record: &Record) -> Result<Handover> {
    of(record).with_context(|| format!("nobody serves {}", whose(&record.name)))
}

/// What the destination of a move is told of a VM's tier. Nothing: there is none, or it is copied.
pub fn handed_over(record: &Record) -> Option<&Remote> {
    record.remote.as_ref().filter(|remote| remote.cluster.is_some())
}

/// What becomes of a VM's tier when the VM moves.
pub fn fate(record: &Record) -> Option<RemoteFate> {
    let is_handed_over = handed_over(record).is_some();
    record.remote.as_ref().map(|_| if is_handed_over { RemoteFate::HandedOver } else { RemoteFate::Copied })
}

/// That the tier can be handed over, if there is one: this host has it, and nobody takes it over any more. Nothing is changed.
///
/// # Errors
/// It has not, or another move of the VM is still ending.
pub fn check_owned(record: &Record) -> Result<()> {
    let Some(remote) = handed_over(record) else { return Ok(()) };
    let handover = found(record)?;
    let is_owned = || handover.standing() == Standing::Owner && !taking(|spaces| spaces.contains(&remote.space));
    // A VM that has just come has it soon.
    let deadline = Instant::now() + OWNED_MAX;
    while !is_owned() && Instant::now() < deadline {
        std::thread::sleep(OWNED_LOOK);
    }
    ensure!(is_owned(), "{} is not this host's yet: try again when etcd has answered", whose(&record.name));
    Ok(())
}

/// From now on nothing in the tier changes, if it can be handed over. Pages that leave DRAM go to swap.
///
/// # Errors
/// No engine owns it.
pub fn hold(record: &Record) -> Result<()> {
    let Some(remote) = handed_over(record) else { return Ok(()) };
    let is_taken_over = taking(|spaces| spaces.contains(&remote.space));
    ensure!(!is_taken_over && found(record)?.hold(), "{} is not this host's", whose(&record.name));
    Ok(())
}

/// Whether a held tier is still: no write of it can land any more. True where there is nothing to be handed over.
pub fn is_still(record: &Record) -> bool {
    handed_over(record).is_none() || of(record).is_some_and(|handover| handover.is_still())
}

/// The destination is told now what is in the tier.
pub fn name_pages(record: &Record) {
    if let Some(handover) = of(record) {
        handover.name_pages();
    }
}

/// Lets go of the tier, before the note that gives the VM away.
///
/// # Errors
/// Something in it may still change: the VM must not be given away.
pub fn let_go(record: &Record) -> Result<()> {
    if handed_over(record).is_some() {
        found(record)?.let_go()?;
    }
    Ok(())
}

/// Another host has the tier, whatever this one was doing with it.
pub fn lose(record: &Record) {
    if let Some(handover) = of(record) {
        handover.lose();
    }
}

/// These pages, by chunk, are in the tier of a VM that comes: all of them, and for its engine alone, before that serves the VM.
///
/// # Errors
/// There is no such tier.
pub fn set_pages(record: &Record, pages: Vec<(ChunkIdx, PageSet)>) -> Result<()> {
    if handed_over(record).is_some() {
        found(record)?.set_pages(pages);
    }
    Ok(())
}

/// That this host can open a tier that is offered to it, and that it is nobody's here. Nothing is changed.
///
/// # Errors
/// What is missing, and what to do.
pub fn check(dirs: &Dirs, vm: &str, remote: &Remote) -> Result<()> {
    let cluster = remote.cluster.as_deref().context("its remote tier is in the registry file of its host")?;
    let is_here = engines(remote).is_some();
    let is_pending = pending_release::is_noted(dirs, remote);
    ensure!(!is_here && !is_pending, "this host has a VM with that remote tier, or is giving it back");
    let look = || -> Result<()> {
        let pool = pool_of(&dirs.pool, remote)?;
        store::identity(&pool.dir)?;
        role::borrow(&pool.dir)?;
        let mut plane = Plane::of(&pool, &whose(vm), Some(cluster))?;
        let seen = plane.look(SpaceId(remote.space))?;
        ensure!(!seen.today.sealed, "it is sealed");
        // A pending release tells by the name whose it is.
        let hint = "give them different names (`host` in pool.toml)";
        ensure!(plane.other_host(&seen).is_some(), "etcd knows this host and the VM's by one name: {hint}");
        let absent = connect::absent(&pool.servers()?, &seen.today.map);
        ensure!(absent.is_empty(), "servers that have copies of it are not known here: {}", connect::list(&absent));
        Ok(())
    };
    look().with_context(|| format!("{} cannot be used by this host", whose(vm)))
}

/// The VM is this host's from now on, which its note says: takes its tier over on a thread of its own, until it is done. `wake` has the
/// engine look. Nothing if the engine has it as its owner already.
pub fn own(dirs: &Dirs, record: &Record, wake: impl Fn() + Send + 'static) {
    let Some(remote) = handed_over(record).cloned() else { return };
    let Some(handover) = of(record) else { return };
    match handover.standing() {
        Standing::Owner => return,
        Standing::Held if handover.end_hold() => return,
        Standing::Held | Standing::Away | Standing::Reader => handover.read_no_more(),
    }
    let space = remote.space;
    if !taking(|spaces| spaces.insert(space)) {
        return;
    }
    let (dirs, record, vm, handover) = (dirs.clone(), record.clone(), record.name.clone(), handover.downgrade());
    let work = move || {
        take_over_patiently(&dirs, &record, &remote, &handover);
        taking(|spaces| spaces.remove(&space));
        wake();
    };
    if let Err(error) = std::thread::Builder::new().name("remote-take-over".into()).spawn(work) {
        taking(|spaces| spaces.remove(&space));
        tracing::error!(%vm, "its remote tier is not taken over before pagodad is started again: {error}");
    }
}

fn take_over_patiently(dirs: &Dirs, record: &Record, remote: &Remote, handover: &WeakHandover) {
    let vm = &record.name;
    let mut told = false;
    // This goes on until its engine has ended: then nobody needs the tier.
    while let Some(losses) = handover.upgrade().map(|handover| handover.losses()) {
        // Looked at each time: whoever resolves a move may decide otherwise.
        let opened = may_own(dirs, record).and_then(|may| {
            ensure!(may, "the VM is not this host's");
            let before =
                from(record, remote).map_or_else(|| ownership::before(dirs, record), |from| Ok(Before::Since(from)))?;
            open_owner(&dirs.pool, record, Served::Before, before)
        });
        match opened {
            Ok(Some(opened)) => {
                match handover.upgrade().map(|handover| handover.take_over(opened.for_tier(), losses)) {
                    Some(true) => tracing::info!(%vm, "its remote tier is this host's"),
                    Some(false) => tracing::warn!(%vm, "its remote tier was given away while it was taken over"),
                    None => {}
                }
                return;
            }
            Ok(None) => return,
            Err(error) if !std::mem::replace(&mut told, true) => {
                tracing::warn!(%vm, "its remote tier is not taken over yet, tried again: {}", in_full(error.as_ref()));
            }
            Err(_) => {}
        }
        std::thread::sleep(AGAIN);
    }
}
