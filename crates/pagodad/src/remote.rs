//! Remote tiers: memory of a pool's servers, borrowed for a VM, as the tier before its swap file.
//!
//! A remote tier is a space of the pool, whose number and key are in the VM's record. Where its pages are is kept by
//! etcd, if the pool is a cluster's when the VM is made, else in the file `registry` of the pool's directory; it stays
//! where it was made. The next daemon finds the pages there. What a VM leaves behind is a [`pending_release`] until it
//! has been given back.

mod describe;
pub mod handover;
mod open;
mod ownership;
mod pending_release;
mod space;

use pagoda_api::in_full;
use std::path::Path;

use anyhow::{Context, Result};
use pagoda_abi::Token;
use pagoda_api::types::{ApiError, ErrorCode, RemoteRequest, VmKind, VmSpec};
use pagoda_core::units::ChunkCount;
use pagoda_pager::tier::remote::{Handover, RemoteMap, RemoteTier, Standing};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::plane::Plane;
use pagoda_pool::record::SIZE_MAX;
use pagoda_pool::{role, store};
use rmap::client::SpaceSpec;
use rmap::crypto::Entropy;
use rmap_io::SystemEntropy;

pub use self::describe::describe;
use self::open::{Served, open_owner, open_reader};
pub use self::space::Dirs;
use self::space::{report, spec, whose};
use crate::record::{Record, Remote};

/// What has been made for a VM that is about to be.
#[derive(Clone, Debug)]
pub struct NewTier {
    pub remote: Remote,
    /// By whose name it is given back if there will be no VM.
    debtor: Record,
}

impl NewTier {
    /// The VM has it, and its record is written.
    pub fn keep(&self, dirs: &Dirs) {
        pending_release::settle(dirs, &self.remote);
    }

    /// Gives the space back, because there will be no VM.
    pub fn give_up(&self, dirs: &Dirs) {
        // Of one in the registry file nothing is stored yet.
        if self.remote.cluster.is_some() {
            pending_release::give_back_later(dirs, &self.debtor);
        }
    }
}

/// A remote tier for a new VM with regions of these sizes. Where etcd keeps it, its space is made there.
///
/// # Errors
/// There is no pool that this machine can borrow from: what is missing, and what to do.
pub fn new_tier(dirs: &Dirs, name: &str, regions: &[u64], request: RemoteRequest) -> Result<NewTier, ApiError> {
    let unusable = |cause: anyhow::Error| {
        let hint = "`pagoda pool ls` shows what pagodad has to find; leave --remote out to do without";
        ApiError::new(
            ErrorCode::Unsupported,
            format!("there is no remote memory to be had: {cause}", cause = in_full(cause.as_ref())),
            Some(hint),
        )
    };
    let pool = PoolConfig::read(&dirs.pool, None, report).map_err(unusable)?;
    store::identity(&pool.dir).map_err(unusable)?;
    role::borrow(&pool.dir).map_err(unusable)?;
    let servers = pool.servers().map_err(unusable)?.len();
    if servers < usize::from(request.copies) {
        let message = format!("{} copies need as many servers, and there are {servers}", request.copies);
        return Err(ApiError::new(
            ErrorCode::BadRequest,
            message,
            Some("add a server, or ask for one copy (--remote pool:)"),
        ));
    }
    if regions.iter().sum::<u64>() > SIZE_MAX {
        let message = format!("a remote tier holds {} TiB at most, less than this VM's memory", SIZE_MAX >> 40);
        return Err(ApiError::new(ErrorCode::BadRequest, message, Some("leave --remote out")));
    }
    let space = SystemEntropy::default().next_u64();
    let cluster = pool.etcd.as_ref().map(|etcd| etcd.pool.clone());
    let remote = Remote { space, copies: request.copies, key: store::random_key(), cluster };
    let tier = NewTier { debtor: debtor(name, regions, &remote), remote };
    make_space(dirs, &pool, &tier).map_err(unusable)?;
    Ok(tier)
}

/// Makes a tier's space in etcd. The order: its release is noted as pending -> it is made -> the VM's record says whose
/// it is -> the note goes. So a space that this daemon made is known by one of both, whenever the daemon ends.
fn make_space(dirs: &Dirs, pool: &PoolConfig, tier: &NewTier) -> Result<()> {
    if tier.remote.cluster.is_none() {
        return Ok(());
    }
    pending_release::note(dirs, &tier.debtor).context("note the pending release")?;
    let SpaceSpec { id, pages, copies, .. } = spec(&tier.debtor, &tier.remote);
    // It may have been made, and the answer been lost.
    Plane::make_tier(pool, id, pages, copies).inspect_err(|_| tier.give_up(dirs))
}

/// A VM as far as its pool is concerned.
fn debtor(name: &str, regions: &[u64], remote: &Remote) -> Record {
    let spec = VmSpec { remote: Some(RemoteRequest { copies: remote.copies }), ..VmSpec::default() };
    Record { remote: Some(remote.clone()), ..Record::new(name, Token([0; 16]), VmKind::Plain, regions, spec) }
}

/// A VM's remote tier, if it has one, for its engine. The file `path` has the map of what is there; that of a VM that was
/// served before is there already. One of a VM that another host may own is only read ([`handover`]).
///
/// # Errors
/// As [`open_owner`]; nobody can tell who owns the VM; the map cannot be made or is not the VM's.
pub fn for_engine(
    dirs: &Dirs,
    path: &Path,
    record: &Record,
    chunks: ChunkCount,
    taken_over: bool,
) -> Result<Option<RemoteTier>> {
    let Some(remote) = &record.remote else { return Ok(None) };
    let (opened, standing, from) = if ownership::may_own(dirs, record)? {
        let served = if taken_over { Served::Before } else { Served::No };
        (open_owner(&dirs.pool, record, served, ownership::before(dirs, record)?)?, Standing::Owner, None)
    } else {
        let opened = open_reader(&dirs.pool, record, remote);
        let (opened, generation) = opened.with_context(|| format!("read {}", whose(&record.name)))?;
        (Some(opened), Standing::Reader, Some(generation))
    };
    let Some(opened) = opened else { return Ok(None) };
    let map = if taken_over { RemoteMap::open(path, chunks) } else { RemoteMap::create(path, chunks) };
    let map = map.with_context(|| format!("the remote map {}", path.display()))?;
    let handover = Handover::new(standing);
    handover::enter(remote, &handover, from);
    Ok(Some(RemoteTier::new(&record.name, opened.for_tier(), map, handover)))
}

/// A VM has ended, and its record, the file `path`, with it: by one rename it becomes a pending release, and is given back
/// behind the caller's back.
pub fn end_of(dirs: &Dirs, record: &Record, path: &Path) {
    let Some(remote) = &record.remote else { return };
    pending_release::inherit(dirs, remote, path);
    pending_release::give_back_later(dirs, record);
}

/// The same for a VM whose record stays for something else: what it has borrowed gets a record of its own, and is given back when the VM's
/// says no more of it ([`give_back_noted`]). Whichever of the two a later daemon finds, it goes on by that.
///
/// # Errors
/// The disk's.
pub fn note_end(dirs: &Dirs, record: &Record) -> Result<()> {
    pending_release::note(dirs, record)
}

/// Gives back what [`note_end`] has noted, on a thread of its own.
pub fn give_back_noted(dirs: &Dirs, record: &Record) {
    if record.remote.is_some() {
        pending_release::give_back_later(dirs, record);
    }
}

/// The releases that were pending when the last daemon ended.
pub fn pending_of_before(dirs: &Dirs) -> Vec<Record> {
    pending_release::all(dirs)
}

/// Gives back what was pending when the last daemon ended, unless one of these VMs turned out to have it.
pub fn give_back_of_before(dirs: &Dirs, pending: &[Record], vms: &[Record]) {
    for debtor in pending {
        let space = |record: &Record| record.remote.as_ref().map(|remote| remote.space);
        match &debtor.remote {
            Some(remote) if vms.iter().any(|vm| space(vm) == Some(remote.space)) => {
                pending_release::settle(dirs, remote)
            }
            _ => pending_release::give_back_later(dirs, debtor),
        }
    }
}

#[cfg(test)]
pub mod tests;
