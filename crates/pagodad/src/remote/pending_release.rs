//! Pending releases of a pool: spaces of VMs that are gone, or that never came to be.
//!
//! Each is a VM's record under its space's number, in a directory of its own, until servers and control plane have everything
//! back. One of a VM that moves waits until it is known whose the VM is ([`super::ownership`]). The number is 64 random bits of
//! this daemon or one before it with the same state directory, so nobody else can have it. What cannot be given back in
//! [`TRY_FOR`] is tried again by the next daemon. The VMs do not wait for any of it, nor does anybody who starts or ends one.

use pagoda_api::in_full;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use pagoda_pool::give_back::{GivenBack, Silent, give_back, give_leftovers_back};
use pagoda_pool::plane::{self, Plane};
use pagoda_pool::record::tier_name;
use rmap::units::{Generation, SpaceId};

use super::ownership::{Owner, owner_of};
use super::space::{Dirs, pool_of, spec, whose};
use crate::record::{Record, Remote, store};

/// An etcd that is being replaced is back within minutes; after that somebody has to look.
const TRY_FOR: Duration = Duration::from_secs(10 * 60);
/// Each try waits for etcd, too.
const TRY_EVERY: Duration = Duration::from_secs(5);

/// Between two looks whether it is decided who owns a VM: far less than another VM of its name needs to move.
const DECIDED_LOOK: Duration = Duration::from_millis(100);

/// Spaces that are being given back: one at a time may be their owner.
static RETURNING: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn path(dirs: &Dirs, remote: &Remote) -> PathBuf {
    dirs.pending.join(format!("{:016x}.vm", remote.space))
}

/// Notes that the release of this VM's tier is pending, before it is made.
pub(super) fn note(dirs: &Dirs, debtor: &Record) -> Result<()> {
    let Some(remote) = &debtor.remote else { return Ok(()) };
    pagoda_pool::store::make_dir(&dirs.pending)?;
    store::write(&path(dirs, remote), debtor)?;
    // What follows relies on the note, so its name has to be there as well after a crash of the host.
    Ok(std::fs::File::open(&dirs.pending)?.sync_all()?)
}

/// The record of a VM that has ended becomes the note.
pub(super) fn inherit(dirs: &Dirs, remote: &Remote, record: &Path) {
    let renamed = pagoda_pool::store::make_dir(&dirs.pending)
        .and_then(|()| std::fs::rename(record, path(dirs, remote)).map_err(anyhow::Error::from));
    match renamed {
        Err(error) if is_not_there(&error) => {}
        Err(error) => tracing::warn!(
            "{} is not kept for the next daemon: {error}",
            record.display(),
            error = in_full(error.as_ref())
        ),
        Ok(()) => {}
    }
}

fn is_not_there(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(|error: &std::io::Error| error.kind() == ErrorKind::NotFound)
}

/// The release of this tier is not pending any more, or a VM has it.
pub(super) fn settle(dirs: &Dirs, remote: &Remote) {
    let path = path(dirs, remote);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => tracing::warn!("remove {}: {error}", path.display()),
        _ => {}
    }
}

/// Whether the release of this tier is pending.
pub(super) fn is_noted(dirs: &Dirs, remote: &Remote) -> bool {
    path(dirs, remote).exists() || returning(|spaces| spaces.contains(&remote.space))
}

/// The records of all pending releases that can be read.
pub(super) fn all(dirs: &Dirs) -> Vec<Record> {
    let Ok(entries) = std::fs::read_dir(&dirs.pending) else { return Vec::new() };
    let paths = entries.flatten().map(|entry| entry.path());
    let notes = paths.filter(|path| path.extension().is_some_and(|extension| extension == "vm"));
    let read = |path: PathBuf| {
        let record = store::read(&path);
        record
            .inspect_err(|error| {
                tracing::error!("{}: {error}; it is left alone", path.display(), error = in_full(error.as_ref()))
            })
            .ok()
    };
    notes.filter_map(read).collect()
}

/// Gives what a VM had in remote memory back to the servers, on a thread of its own.
pub(super) fn give_back_later(dirs: &Dirs, debtor: &Record) {
    let Some(remote) = debtor.remote.clone() else { return };
    if !returning(|spaces| spaces.insert(remote.space)) {
        return;
    }
    let (dirs, debtor) = (dirs.clone(), debtor.clone());
    let name = debtor.name.clone();
    let work = move || {
        give_back_patiently(&dirs, &debtor, &remote, &mut std::thread::sleep);
        returning(|spaces| spaces.remove(&remote.space));
    };
    if let Err(error) = std::thread::Builder::new().name("remote-return".into()).spawn(work) {
        tracing::warn!(vm = %name, "its remote tier is not given back before pagodad is started again: {error}");
    }
}

fn returning<T>(act: impl FnOnce(&mut BTreeSet<u64>) -> T) -> T {
    act(&mut RETURNING.lock().unwrap_or_else(PoisonError::into_inner))
}

/// `wait` is called between two tries.
pub(super) fn give_back_patiently(dirs: &Dirs, debtor: &Record, remote: &Remote, wait: &mut dyn FnMut(Duration)) {
    let vm = &debtor.name;
    if !is_ours(dirs, debtor, wait) {
        tracing::debug!(%vm, "its remote tier is another host's");
        return settle(dirs, remote);
    }
    let began = Instant::now();
    let mut reported = false;
    loop {
        let error = match give_all_back(&dirs.pool, debtor, remote) {
            Ok(given) => {
                settle(dirs, remote);
                return report(vm, &given);
            }
            Err(error) => error,
        };
        if began.elapsed() >= TRY_FOR {
            let note = path(dirs, remote);
            return tracing::warn!(
                %vm,
                "its remote tier, space {:016x}, is not given back: {error}; servers keep its memory until pagodad is started \
                 again, which tries again by {}",
                remote.space,
                note.display(), error = in_full(error.as_ref()));
        }
        if !std::mem::replace(&mut reported, true) {
            tracing::warn!(%vm, "its remote tier is not given back yet: {error}; trying again", error = in_full(error.as_ref()));
        }
        wait(TRY_EVERY);
    }
}

/// Whether it is this host's to be given back. Waits until that is decided.
fn is_ours(dirs: &Dirs, debtor: &Record, wait: &mut dyn FnMut(Duration)) -> bool {
    let mut told = false;
    loop {
        match owner_of(dirs, debtor) {
            Ok(Owner::Here) => return true,
            Ok(Owner::Elsewhere) => return false,
            Ok(Owner::Undecided) => {}
            Err(error) if !std::mem::replace(&mut told, true) => {
                let error = in_full(error.as_ref());
                tracing::warn!(vm = %debtor.name, "its remote tier is not given back: {error}");
            }
            Err(_) => {}
        }
        wait(DECIDED_LOOK);
    }
}

fn report(vm: &str, given: &GivenBack) {
    match given {
        GivenBack::All(_) => tracing::debug!(%vm, "its remote tier was given back"),
        GivenBack::Silent(_) | GivenBack::Left(_) => {
            tracing::warn!(%vm, "servers did not take its remote tier back, and keep its memory until they end");
        }
    }
}

/// The order: servers get their memory back -> the control plane forgets the space. A space that it does not know was never
/// made, or is forgotten already.
pub(super) fn give_all_back(pool_dir: &Path, debtor: &Record, remote: &Remote) -> Result<GivenBack> {
    let (pool, id) = (pool_of(pool_dir, remote)?, SpaceId(remote.space));
    let mut plane = Plane::of(&pool, &whose(&debtor.name), remote.cluster.as_deref())?;
    let seen = match plane.look(id) {
        Err(error) if plane::is_gone(&error) => return Ok(GivenBack::All(Generation(0))),
        seen => seen?,
    };
    if let Some(host) = plane.other_host(&seen) {
        // Of a state directory that was copied there.
        bail!(
            "{host} was the last to have it, and may have it still: if this machine was called so, say host = {host:?} in pool.toml"
        );
    }
    let held = seen.today.map.iter().any(|(_, entry)| !entry.replicas.is_empty());
    let given = if held {
        give_back(&pool, &mut plane, &spec(debtor, remote), &seen.today, Silent::PassOver)?
    } else {
        GivenBack::All(give_leftovers_back(&pool, &mut plane, &spec(debtor, remote), &seen.today)?)
    };
    // What is left at servers now stays there until they end: nobody else will ask for it.
    let generation = match given {
        GivenBack::All(generation) | GivenBack::Left(generation) => generation,
        GivenBack::Silent(_) => seen.today.generation,
    };
    plane.remove(&tier_name(id), id, generation)?;
    plane.forget(id, generation)?;
    Ok(given)
}
