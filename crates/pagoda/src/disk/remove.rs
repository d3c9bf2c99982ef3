//! `pagoda disk rm`: gives a disk's memory back to its servers, and forgets the disk.

use anyhow::{Result, bail};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::give_back::{GivenBack, Silent, give_back, give_leftovers_back};
use pagoda_pool::plane::{self, Plane, Seen};
use pagoda_pool::record::{self, Disk};
use rmap::units::Generation;

pub fn run(pool: &PoolConfig, name: &str, force: bool) -> Result<()> {
    let disk = record::read(&pool.dir, name)?;
    let lock = record::lock_file(&pool.dir, name)?;
    if !record::try_lock(&lock)? {
        bail!("{name} is exported by another process: stop that one first");
    }
    let mut plane = Plane::of(pool, name, disk.cluster.as_deref())?;
    let seen = match plane.look(disk.space()?) {
        // Removed there already, by a command that did not get to its end; or it is another etcd.
        Err(error) if plane::is_gone(&error) && force => Seen::default(),
        Err(error) if plane::is_gone(&error) => {
            return Err(error.context(format!("etcd does not know {name}; --force forgets its record and key, too")));
        }
        seen => seen?,
    };
    if let Some(host) = plane.other_host(&seen) {
        bail!("{host} was the last to export {name}: remove it there, or take it over first (disk export --take-over)");
    }
    let lent = disk.reserve_bytes > 0 || seen.today.map.iter().any(|(_, entry)| !entry.replicas.is_empty());
    let generation = if force {
        seen.today.generation
    } else if lent {
        return_all(pool, name, &disk, &mut plane, &seen)?
    } else {
        give_leftovers_back(pool, &mut plane, &disk.spec()?, &seen.today)?
    };
    // The memory first: a record without memory can be removed again, memory without a record cannot be named.
    plane.remove(name, disk.space()?, generation)?;
    record::remove(&pool.dir, name)?;
    plane.forget(disk.space()?, generation)
}

/// Gives all memory of the disk back to its servers. The generation that did.
fn return_all(pool: &PoolConfig, name: &str, disk: &Disk, plane: &mut Plane, seen: &Seen) -> Result<Generation> {
    match give_back(pool, plane, &disk.spec()?, &seen.today, Silent::Refuse)? {
        GivenBack::All(generation) => Ok(generation),
        GivenBack::Silent(_) => {
            bail!("not all servers answer, see `pagoda pool ls`; --force forgets {name}, and they keep its memory")
        }
        GivenBack::Left(_) => {
            bail!("the servers did not take all of {name} back: try again, or --force, and they keep its memory")
        }
    }
}
