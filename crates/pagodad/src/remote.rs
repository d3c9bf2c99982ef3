//! Remote tiers: memory of a pool's servers, borrowed for a VM, as the tier before its swap file.
//!
//! A remote tier is a space of the pool, whose number and key are in the VM's record. Where its pages are is kept by
//! etcd, if the pool is a cluster's when the VM is made, else in the file `registry` of the pool's directory; it stays
//! where it was made. The next daemon finds the pages there. What a VM leaves behind is a [`pending_release`] until it
//! has been given back.

mod describe;
mod pending_release;
mod space;

use pagoda_api::in_full;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_abi::Token;
use pagoda_api::types::{ApiError, ErrorCode, RemoteRequest, VmKind, VmSpec};
use pagoda_core::units::ChunkCount;
use pagoda_pager::tier::remote::{RemoteMap, RemoteTier};
use pagoda_pool::aside::Control;
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect::Patience;
use pagoda_pool::news::Watch;
use pagoda_pool::plane::Plane;
use pagoda_pool::record::SIZE_MAX;
use pagoda_pool::{connect, role, store};
use rmap::client::{Client, SpaceRef, SpaceSpec};
use rmap::crypto::Entropy;
use rmap::units::ServerId;
use rmap_io::SystemEntropy;
use rmap_io::net::{UdpClient, Wait};

pub use self::describe::describe;
pub use self::space::Dirs;
use self::space::{pool_of, report, spec, whose};
use crate::record::{Record, Remote};

/// A server that is silent for so long is given up where another has a copy. A host that is busy is not dead, and the VM's
/// faults on what is there wait meanwhile.
const FAIL_AFTER: Duration = Duration::from_millis(100);
/// A page that the map has no place for yet goes to the swap file after so long: before page-out loses its patience
/// ([`pagoda_pager::tier::remote::WRITE_PATIENCE`]) with the pool as a whole.
const MAP_PATIENCE: Duration = Duration::from_millis(400);
/// A server that has the only copy is waited for until it is back, or the VM's owner has ended the VM: a server that stands still
/// and a network that is down have lost nothing. For new pages there is the swap file: they are declined at once.
const PATIENCE: Patience = Patience {
    fail_after: FAIL_AFTER,
    error_after: None,
    grant_patience: Duration::ZERO,
    map_patience: Some(MAP_PATIENCE),
    give_back_after: None,
    uses_overflow_disk: false,
};

/// Servers that etcd does not know when a VM's tier is taken up have so long to tell it of themselves again: the leases of all of
/// them are over when etcd itself was away, and to go on without a copy that is there would be to go on with one. A lease is 5 s.
const MISS_FOR: Duration = Duration::from_secs(15);
/// Spaces whose servers are missed, and since when.
static MISSED: Mutex<BTreeMap<u64, Instant>> = Mutex::new(BTreeMap::new());

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

    /// There will be no VM.
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

/// A VM's space, opened as its owner.
pub struct OpenedPool {
    pub client: UdpClient<Control>,
    pub space: SpaceRef,
    pub watch: Watch,
}

impl std::fmt::Debug for OpenedPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let servers = self.client.client.reach().count();
        f.debug_struct("OpenedPool").field("servers", &servers).field("space", &self.space).finish_non_exhaustive()
    }
}

/// Whether somebody has served the VM before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Served {
    /// Its program waits to be attached, and ends if it is not.
    No,
    /// Its agent asks again and again.
    Before,
}

/// A VM's remote tier, if it has one, for its engine. The file `path` has the map of what is there; that of a VM that was
/// served before is there already.
///
/// # Errors
/// As [`open_in`]; the map cannot be made or is not the VM's.
pub fn for_engine(
    dirs: &Dirs,
    path: &Path,
    record: &Record,
    chunks: ChunkCount,
    taken_over: bool,
) -> Result<Option<RemoteTier>> {
    let served = if taken_over { Served::Before } else { Served::No };
    let Some(opened) = open_in(&dirs.pool, record, served)? else { return Ok(None) };
    let OpenedPool { client, space, watch } = opened;
    let map = if taken_over { RemoteMap::open(path, chunks) } else { RemoteMap::create(path, chunks) };
    let map = map.with_context(|| format!("the remote map {}", path.display()))?;
    let maintain = Box::new(move |client: &mut Client, now| watch.inform(client, now));
    Ok(Some(RemoteTier::new(&record.name, client, space, map, maintain)))
}

/// Opens a VM's remote tier, if it has one. Whoever had it open before is refused by the servers from now on. Servers
/// are not waited for: what is asked of them waits.
///
/// # Errors
/// The pool's directory cannot be used, etcd does not answer, or pages are only at servers that are not there any more.
fn open_in(dir: &Path, record: &Record, served: Served) -> Result<Option<OpenedPool>> {
    let Some(remote) = &record.remote else { return Ok(None) };
    let opened = pool_of(dir, remote).and_then(|mut pool| {
        if let Some(etcd) = pool.etcd.as_mut().filter(|_| served == Served::Before) {
            // Who asks again in a second by itself holds nobody up until then.
            etcd.patience = Duration::ZERO;
        }
        take_over(&pool, record, remote)
    });
    opened.map(Some).with_context(|| format!("open the remote tier of {}", record.name))
}

fn take_over(pool: &PoolConfig, record: &Record, remote: &Remote) -> Result<OpenedPool> {
    // Anew, if etcd goes away meanwhile.
    let missed_since = missed(|spaces| spaces.remove(&remote.space));
    let mut plane = Plane::of(pool, &whose(&record.name), remote.cluster.as_deref())?;
    let servers = pool.servers()?;
    role::borrow(&pool.dir)?;
    let mut client = connect::client(pool, &servers, plane.control()?, Wait::BLOCK, PATIENCE)?;
    let spec = spec(record, remote);
    let seen = plane.look(spec.id)?;
    // Nobody has answered yet: those of the list count as there.
    let listed: Vec<ServerId> = servers.iter().map(|server| server.id).collect();
    connect::stand_in(&mut client, pool, &record.name, &servers, &listed, &seen.today.map)?;
    if remote.cluster.is_some() {
        miss(remote.space, missed_since, &connect::absent(&servers, &seen.today.map))?;
    }
    let watch = Watch::start(pool, &servers)?;
    let (generation, map) = plane.take_over(spec.id)?;
    let space = client.client.attach(&spec, generation, &map)?;
    Ok(OpenedPool { client, space, watch })
}

/// Gives servers that have copies and are not in etcd time to come back.
fn miss(space: u64, since: Option<Instant>, absent: &[ServerId]) -> Result<()> {
    let since = since.unwrap_or_else(Instant::now);
    if absent.is_empty() || since.elapsed() >= MISS_FOR {
        return Ok(());
    }
    missed(|spaces| spaces.insert(space, since));
    let (list, seconds) = (connect::list(absent), MISS_FOR.as_secs());
    bail!("servers that have copies of it are not in etcd: {list}; after {seconds} s it goes on without them")
}

fn missed<T>(act: impl FnOnce(&mut BTreeMap<u64, Instant>) -> T) -> T {
    act(&mut MISSED.lock().unwrap_or_else(PoisonError::into_inner))
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

/// See [`note_end`].
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
mod tests;
