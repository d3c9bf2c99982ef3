//! Far tiers: memory of a pool's servers, borrowed for a VM, as the tier before its swap file.
//!
//! A far tier is a space of the pool, whose number and key are in the VM's record. Where its pages are is kept in the file
//! `registry` of the pool's directory, so that the next daemon finds them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use pagoda_abi::record::{Far, Record};
use pagoda_api::types::{ApiError, ErrorCode, FarRequest};
use pagoda_core::units::ChunkCount;
use pagoda_pager::far::{Far as Tier, FarMap};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect::Patience;
use pagoda_pool::give_back::{GivenBack, Silent, give_back};
use pagoda_pool::plane::{Control, Plane};
use pagoda_pool::record::SIZE_MAX;
use pagoda_pool::{connect, role, store};
use rmap::client::{SpaceRef, SpaceSpec};
use rmap::crypto::{Entropy, SystemEntropy};
use rmap::udp::{UdpClient, Wait};
use rmap::units::{PAGE_SIZE, ServerId, SpaceId};

use crate::registry::{Registry, error};

/// A server that is silent for so long is given up where another has a copy. A host that is busy is not dead, and the VM's
/// faults on what is there wait meanwhile.
const FAIL_AFTER: Duration = Duration::from_millis(100);
/// One that has the only copy is waited for until it is back, or the VM's owner has ended the VM: a server that stands still
/// and a network that is down have lost nothing. For new pages there is the swap file: they are declined at once.
const PATIENCE: Patience =
    Patience { fail_after: FAIL_AFTER, lost_after: None, grant_patience: Duration::ZERO, uses_last_resort: false };

/// A far tier for a new VM; nothing is stored for it yet.
///
/// # Errors
/// There is no pool that this machine can borrow from: what is missing, and what to do.
pub fn new_tier(dir: &Path, request: FarRequest, memory: u64) -> Result<Far, ApiError> {
    let unusable = |cause: anyhow::Error| {
        let hint = "`pagoda pool ls` shows what pagodad has to find; leave --far out to do without";
        error(ErrorCode::Unsupported, format!("there is no remote memory to be had: {cause:#}"), Some(hint))
    };
    let pool = PoolConfig::read(dir, None, tell).map_err(unusable)?;
    if pool.etcd.is_some() {
        let hint = "remove `cluster` from pool.toml, or give pagodad another --pool-dir";
        let message = format!("far tiers are kept in this machine's registry file, and {} is in etcd", dir.display());
        return Err(error(ErrorCode::Unsupported, message, Some(hint)));
    }
    store::identity(dir).map_err(unusable)?;
    role::borrow(dir).map_err(unusable)?;
    let servers = pool.servers().map_err(unusable)?.len();
    if servers < usize::from(request.copies) {
        let message = format!("{} copies need as many servers, and there are {servers}", request.copies);
        return Err(error(ErrorCode::BadRequest, message, Some("add a server, or ask for one copy (--far pool:)")));
    }
    if memory > SIZE_MAX {
        let message = format!("a far tier holds {} TiB at most, less than this VM's memory", SIZE_MAX >> 40);
        return Err(error(ErrorCode::BadRequest, message, Some("leave --far out")));
    }
    let space = SystemEntropy::default().next_u64();
    Ok(Far { space, copies: request.copies, key: store::random_key() })
}

/// A VM's space, opened as its owner.
pub struct OpenedPool {
    pub client: UdpClient<Control>,
    pub space: SpaceRef,
}

impl std::fmt::Debug for OpenedPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let servers = self.client.client.reach().count();
        f.debug_struct("OpenedPool").field("servers", &servers).field("space", &self.space).finish_non_exhaustive()
    }
}

/// A VM's far tier, if it has one, for its engine. A VM that was served before has a map of what it has there.
///
/// # Errors
/// As [`open`]; the map cannot be made or is not the VM's.
pub fn for_engine(registry: &Registry, record: &Record, chunks: ChunkCount, taken_over: bool) -> Result<Option<Tier>> {
    let Some(OpenedPool { client, space }) = open(registry, record)? else { return Ok(None) };
    let path = registry.far_path(&record.name);
    let map = if taken_over { FarMap::open(&path, chunks) } else { FarMap::create(&path, chunks) };
    Ok(Some(Tier::new(client, space, map.with_context(|| format!("the far map {}", path.display()))?)))
}

/// Opens a VM's far tier, if it has one. Whoever had it open before is refused by the servers from now on. Servers are not
/// waited for: what is asked of them waits.
///
/// # Errors
/// The pool's directory cannot be used, or pages are only at servers that are not in its list any more.
fn open(registry: &Registry, record: &Record) -> Result<Option<OpenedPool>> {
    open_in(&registry.config.pool_dir, record)
}

fn open_in(dir: &Path, record: &Record) -> Result<Option<OpenedPool>> {
    let Some(far) = record.far else { return Ok(None) };
    let opened = by_file(dir).and_then(|pool| take_over(&pool, record, &far));
    opened.map(Some).with_context(|| format!("open the far tier of {}", record.name))
}

fn take_over(pool: &PoolConfig, record: &Record, far: &Far) -> Result<OpenedPool> {
    let mut plane = Plane::of(pool, &record.name, None)?;
    let servers = pool.servers()?;
    role::borrow(&pool.dir)?;
    let mut client = connect::client(pool, &servers, plane.control()?, Wait::BLOCK, PATIENCE)?;
    let spec = spec(record, far);
    let seen = plane.look(spec.id)?;
    // Nobody has answered yet: those of the list count as there.
    let listed: Vec<ServerId> = servers.iter().map(|server| server.id).collect();
    connect::stand_in(&mut client, pool, &record.name, &servers, &listed, &seen.today.map)?;
    let (generation, map) = plane.take_over(spec.id)?;
    let space = client.client.attach(&spec, generation, &map)?;
    Ok(OpenedPool { client, space })
}

/// Gives what a VM that is gone had in remote memory back to the servers, behind the caller's back.
pub fn give_back_later(registry: &Registry, record: &Record) {
    let Some(far) = record.far else { return };
    let (dir, name) = (registry.config.pool_dir.clone(), record.name.clone());
    let spec = spec(record, &far);
    let work = move || match give_all_back(&dir, &name, &spec) {
        Ok(GivenBack::All(_)) => tracing::debug!(vm = %name, "its far tier was given back"),
        Ok(GivenBack::Silent(_) | GivenBack::Left) => {
            tracing::warn!(vm = %name, "servers did not take its far tier back, and keep its memory until they end");
        }
        Err(error) => {
            tracing::warn!(vm = %name, "its far tier is not given back, and its servers keep it until they end: {error:#}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("far-return".into()).spawn(work) {
        tracing::warn!(vm = %record.name, "its far tier is not given back: {error}");
    }
}

fn give_all_back(dir: &Path, name: &str, spec: &SpaceSpec) -> Result<GivenBack> {
    let pool = by_file(dir)?;
    let mut plane = Plane::of(&pool, name, None)?;
    let seen = plane.look(spec.id)?;
    if seen.today.map.iter().all(|(_, entry)| entry.replicas.is_empty()) {
        plane.forget(spec.id, seen.today.generation)?;
        return Ok(GivenBack::All(seen.today.generation));
    }
    let given = give_back(&pool, &mut plane, spec, &seen.today.map, Silent::PassOver)?;
    // What is left at servers now stays there until they end: nobody else will ask for it.
    let generation =
        if let GivenBack::All(generation) = given { generation } else { plane.look(spec.id)?.today.generation };
    plane.forget(spec.id, generation)?;
    Ok(given)
}

/// The pool as far tiers use it, whatever `pool.toml` says of etcd now: a tier stays where it was made.
fn by_file(dir: &Path) -> Result<PoolConfig> {
    PoolConfig::by_file(dir, tell)
}

fn tell(text: &str) {
    tracing::warn!("pool: {text}");
}

fn spec(record: &Record, far: &Far) -> SpaceSpec {
    let pages = record.regions.iter().sum::<u64>().div_ceil(PAGE_SIZE as u64);
    SpaceSpec { id: SpaceId(far.space), pages, copies: far.copies.into(), reserve: 0, key: far.key }
}

#[cfg(test)]
mod tests;
