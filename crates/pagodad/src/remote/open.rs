//! How a VM's space in the pool is opened: by its owner, which takes it over, or by one that only reads it.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pagoda_pager::tier::remote::Opened;
use pagoda_pool::aside::Control;
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect::Patience;
use pagoda_pool::news::Watch;
use pagoda_pool::plane::Plane;
use pagoda_pool::{connect, role};
use rmap::client::{Client, SpaceRef};
use rmap::units::{Generation, ServerId};
use rmap_io::net::{UdpClient, Wait};

use super::space::{pool_of, spec, whose};
use crate::record::{Record, Remote};

/// A server that is silent for so long is given up where another has a copy. A host that is busy is not dead, and the VM's
/// faults on what is there wait meanwhile.
const FAIL_AFTER: Duration = Duration::from_millis(100);
/// A page that the map has no place for yet goes to the swap file after so long: before page-out loses its patience
/// ([`pagoda_pager::tier::remote::WRITE_PATIENCE`]) with the pool as a whole.
pub(super) const MAP_PATIENCE: Duration = Duration::from_millis(400);
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
pub(super) const MISS_FOR: Duration = Duration::from_secs(15);
/// Spaces whose servers are missed, and since when.
static MISSED: Mutex<BTreeMap<u64, Instant>> = Mutex::new(BTreeMap::new());

/// A client of the pool with a VM's space open.
pub struct OpenedPool {
    pub client: UdpClient<Control>,
    pub space: SpaceRef,
    pub watch: Watch,
}

impl OpenedPool {
    /// What the tier of an engine needs of it.
    pub fn for_tier(self) -> Opened {
        let OpenedPool { client, space, watch } = self;
        Opened { udp: client, space, maintain: Box::new(move |client: &mut Client, now| watch.inform(client, now)) }
    }
}

impl std::fmt::Debug for OpenedPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let servers = self.client.client.reach().count();
        f.debug_struct("OpenedPool").field("servers", &servers).field("space", &self.space).finish_non_exhaustive()
    }
}

/// Whether somebody has served the VM before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// Its program waits to be attached, and ends if it is not.
    No,
    /// Its agent asks again and again.
    Before,
}

/// Who may have owned a space before this host takes it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// Any host may have owned it: it is taken over all the same.
    Anybody,
    /// Nobody since this generation, or this host alone.
    Since(Generation),
    /// This host was the last one.
    ThisHost,
}

/// Opens a VM's remote tier, if it has one. Whoever had it open before is refused by the servers from now on. Servers
/// are not waited for: what is asked of them waits.
///
/// # Errors
/// The pool's directory cannot be used, etcd does not answer, or pages are only at servers that are not there any more.
/// Another host has owned it that may not have.
pub fn open_owner(dir: &Path, record: &Record, served: Served, before: Before) -> Result<Option<OpenedPool>> {
    let Some(remote) = &record.remote else { return Ok(None) };
    let opened = pool_of(dir, remote).and_then(|mut pool| {
        if let Some(etcd) = pool.etcd.as_mut().filter(|_| served == Served::Before) {
            // Who asks again in a second by itself holds nobody up until then.
            etcd.patience = Duration::ZERO;
        }
        take_over(&pool, record, remote, before)
    });
    opened.map(Some).with_context(|| format!("open the remote tier of {}", record.name))
}

fn take_over(pool: &PoolConfig, record: &Record, remote: &Remote, before: Before) -> Result<OpenedPool> {
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
    let (today, other) = (seen.today.generation, plane.other_host(&seen));
    let (generation, map) = match (before, other) {
        (Before::Anybody, _) => plane.take_over(spec.id)?,
        (Before::Since(from), Some(_)) if today != from => {
            bail!("another host has changed it since it was handed over")
        }
        (Before::ThisHost, Some(host)) => bail!(
            "{host} has taken it over, to which the VM was moving, and may have changed it: if this machine was called so, say \
             host = {host:?} in pool.toml"
        ),
        // Of this host's own take-over the answer may have been lost.
        (Before::Since(_) | Before::ThisHost, _) => plane.take_over_from(spec.id, today)?,
    };
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

pub(super) fn missed<T>(act: impl FnOnce(&mut BTreeMap<u64, Instant>) -> T) -> T {
    act(&mut MISSED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Opens a tier that another host owns, as one that only reads it. The generation of that owner.
///
/// # Errors
/// As [`open_owner`].
pub fn open_reader(dir: &Path, record: &Record, remote: &Remote) -> Result<(OpenedPool, Generation)> {
    let pool = pool_of(dir, remote)?;
    let mut plane = Plane::of(&pool, &whose(&record.name), remote.cluster.as_deref())?;
    let servers = pool.servers()?;
    role::borrow(&pool.dir)?;
    let mut client = connect::client(&pool, &servers, plane.control()?, Wait::BLOCK, PATIENCE)?;
    let spec = spec(record, remote);
    let seen = plane.look(spec.id)?;
    let listed: Vec<ServerId> = servers.iter().map(|server| server.id).collect();
    connect::stand_in(&mut client, &pool, &record.name, &servers, &listed, &seen.today.map)?;
    let watch = Watch::start(&pool, &servers)?;
    let space = client.client.attach_reader(&spec, &seen.today)?;
    Ok((OpenedPool { client, space, watch }, seen.today.generation))
}
