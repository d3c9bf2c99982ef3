//! The control plane of a disk or a remote tier: who owns it, and where its slabs are. It stays where it was made: in
//! the file `registry` of the pool's directory, or in etcd.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rmap::control::{ControlPlane, ControlReply, Map, Today};
use rmap::units::{Generation, SpaceId};
use rmap_etcd::{Etcd, EtcdConfig, EtcdError, HealthView, NewSpace};
use rmap_file::Registry;

use crate::aside::{Control, Slow, aside};
use crate::config::PoolConfig;
use crate::{Report, record, store};

/// How often it is looked whether etcd is there.
const HEALTH_EVERY: Duration = Duration::from_secs(1);

/// What keeps a disk.
#[derive(Debug)]
pub enum Plane {
    File { pool: std::path::PathBuf, registry: Registry, report: Report },
    Etcd { config: EtcdConfig, etcd: Box<Etcd>, report: Report },
}

/// A disk as its control plane sees it.
#[derive(Debug, Default)]
pub struct Seen {
    /// Its generation and its map.
    pub today: Today,
    /// Who took it over last; not known of a disk of the registry, which stays on its machine.
    pub host: Option<String>,
}

impl Plane {
    /// What keeps the disk `name`, whose record says `cluster`: the pool in etcd, or nothing.
    pub fn of(pool: &PoolConfig, name: &str, cluster: Option<&str>) -> Result<Plane> {
        let report = pool.report;
        let Some(cluster) = cluster else {
            return Ok(Plane::File { pool: pool.dir.clone(), registry: store::registry(&pool.dir)?, report });
        };
        match &pool.etcd {
            Some(config) if config.pool == cluster => {
                Ok(Plane::Etcd { config: config.clone(), etcd: Box::new(Etcd::connect(config.clone())?), report })
            }
            // Without its map a disk would read as zeros.
            Some(config) => bail!(
                "{name} belongs to the pool {cluster} in etcd, not to {}: name that one in {}",
                config.pool,
                pool.dir.join("pool.toml").display()
            ),
            None => bail!(
                "{name} is kept in etcd (pool {cluster}): write `cluster = \"etcd://.../{cluster}\"` into {}, or say --cluster to a command",
                pool.dir.join("pool.toml").display()
            ),
        }
    }

    /// Makes a space for a VM's remote tier in the pool's etcd, under a number of 64 random bits that the caller has
    /// noted before. Where the pool is none of a cluster there is nothing to make.
    pub fn make_tier(pool: &PoolConfig, space: SpaceId, pages: u64, copies: usize) -> Result<()> {
        let Some(mut etcd) = pool.connect()? else { return Ok(()) };
        let new = NewSpace { name: record::tier_name(space), pages, copies, reserve: 0 };
        etcd.create_space_numbered(&new, space).map(drop).context("make the remote tier's space")
    }

    pub fn look(&mut self, space: SpaceId) -> Result<Seen> {
        match self {
            Plane::File { registry, .. } => {
                let today = registry.look(space)?;
                Ok(Seen { today, host: None })
            }
            Plane::Etcd { etcd, .. } => {
                let (owner, map) = etcd.look(space)?;
                let host = (owner.generation > Generation(0)).then_some(owner.host);
                let today = Today { generation: owner.generation, sealed: owner.sealed, map };
                Ok(Seen { today, host })
            }
        }
    }

    /// Before the disk is read as others write it, of whom there may have been none yet.
    pub fn expect(&mut self, space: SpaceId) -> Result<()> {
        match self {
            Plane::File { registry, .. } => Ok(registry.expect(space)?),
            // It has a record of its own from the beginning.
            Plane::Etcd { .. } => Ok(()),
        }
    }

    /// The other machine that took the disk over last, if one did: it may still export it. Any may, and many at a time, once
    /// the disk is sealed.
    pub fn other_host<'a>(&self, seen: &'a Seen) -> Option<&'a str> {
        let Plane::Etcd { config, .. } = self else { return None };
        if seen.today.sealed {
            return None;
        }
        seen.host.as_deref().filter(|host| *host != config.host)
    }

    pub fn take_over(&mut self, space: SpaceId) -> Result<(Generation, Map)> {
        match self {
            Plane::File { registry, .. } => Ok(registry.take_over(space)?),
            Plane::Etcd { etcd, .. } => etcd.take_over(space).context("take the disk over"),
        }
    }

    /// The same, if nobody has owned it since this generation.
    ///
    /// # Errors
    /// Somebody has; or as there. One of the registry file is never another machine's.
    pub fn take_over_from(&mut self, space: SpaceId, expected: Generation) -> Result<(Generation, Map)> {
        match self {
            Plane::File { .. } => bail!("what is in a registry file is not taken over from anybody"),
            Plane::Etcd { etcd, .. } => etcd.take_over_from(space, expected).context("take it over"),
        }
    }

    /// Seals the disk, whose owner is of this generation.
    pub fn seal(&mut self, space: SpaceId, generation: Generation) -> Result<()> {
        match self {
            Plane::File { registry, .. } => registry.seal(space, generation).map(drop)?,
            Plane::Etcd { etcd, .. } => etcd.seal(space, generation).map(drop).context("seal the disk")?,
        }
        Ok(())
    }

    /// Forgets the disk `name`, whose owner is of this generation. In the registry it stays until [`Plane::forget`]:
    /// a record that is left would show an empty disk.
    pub fn remove(&mut self, name: &str, space: SpaceId, generation: Generation) -> Result<()> {
        let Plane::Etcd { etcd, .. } = self else { return Ok(()) };
        match etcd.space(name) {
            Ok(known) if known.id == space => Ok(etcd.remove_space(&known, generation)?),
            Ok(_) => bail!("etcd knows another disk as {name}: is the record of this one old?"),
            // Removed before, by a command that did not get to its end.
            Err(EtcdError::NoSuchSpace { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Forgets where the parts of a space were that nobody will ask for again, whose last owner is of this generation. etcd
    /// forgets with [`Plane::remove`].
    pub fn forget(&mut self, space: SpaceId, generation: Generation) -> Result<()> {
        match self {
            Plane::File { registry, .. } => Ok(registry.forget(space, generation)?),
            Plane::Etcd { .. } => Ok(()),
        }
    }

    /// For a driver, which never waits for it.
    pub fn control(&self) -> Result<Control> {
        match self {
            Plane::File { pool, report, .. } => aside(by_registry(store::registry(pool)?, *report)),
            Plane::Etcd { config, report, .. } => {
                let report = *report;
                let mut control = rmap_etcd::Control::start(config.clone())?;
                let health = control.health();
                let (wanted, unwanted) = mpsc::channel();
                std::thread::Builder::new()
                    .name("etcd-health".into())
                    .spawn(move || watch(&health, report, &unwanted))?;
                Ok(Box::new(move |request| {
                    // Nothing is sent: it is the thread's sign that somebody still asks.
                    let _ = &wanted;
                    control.ask(request)
                }))
            }
        }
    }
}

/// Whether etcd knows no such disk.
pub fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(EtcdError::NoSuchSpace { .. }))
}

/// Answers from the registry. Where its disk fails, the questions are asked again, and nothing goes on that needs it.
fn by_registry(mut registry: Registry, report: Report) -> Slow {
    let mut failing = false;
    Box::new(move |requests| match registry.answer_all(requests) {
        Ok(replies) => {
            failing = false;
            replies
        }
        Err(error) => {
            if !std::mem::replace(&mut failing, true) {
                report(&format!("{error}; trying again"));
            }
            vec![ControlReply::Later; requests.len()]
        }
    })
}

/// Says when etcd goes away and when it is back, as long as somebody asks.
fn watch(health: &HealthView, report: Report, unwanted: &Receiver<()>) {
    let mut trouble: Option<EtcdError> = None;
    while unwanted.recv_timeout(HEALTH_EVERY) == Err(RecvTimeoutError::Timeout) {
        let now = health.get().trouble;
        match (&trouble, &now) {
            (None, Some(error)) => report(&format!(
                "{error}; what is in the pool is read and written as before, but nothing can be placed anew or taken over, nor \
                 read beside another export that writes it"
            )),
            (Some(_), None) => report("etcd answers again"),
            _ => {}
        }
        trouble = now;
    }
}
