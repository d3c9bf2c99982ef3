//! Room that servers keep for a new disk.

use pagoda_api::in_full;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use pagoda_pool::aside::Control;
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect::{self, UNHURRIED};
use pagoda_pool::plane::Plane;
use pagoda_pool::record::{self, Disk};
use rmap::client::{Reserved, SpaceRef};
use rmap_io::net::{UdpClient, Wait};

use crate::units::format_size;
use pagoda_pool::slab::SLAB_CONTENT_BYTES;

/// Servers are asked so long: each takes a few questions.
const PATIENCE: Duration = Duration::from_secs(30);

/// Has servers keep what the disk is to have. Where they cannot, there is no such disk any more.
pub fn run(pool: &PoolConfig, name: &str, disk: &Disk) -> Result<()> {
    let lock = record::lock_file(&pool.dir, name)?;
    ensure!(record::try_lock(&lock)?, "{name} is exported by another process already: `pagoda disk rm {name}`");
    let mut plane = Plane::of(pool, name, disk.cluster.as_deref())?;
    let Err(error) = reserve(pool, &mut plane, disk) else { return Ok(()) };
    let undone = unmake(pool, &mut plane, name, disk);
    undone.with_context(|| {
        format!("{error}; and {name} is still there: `pagoda disk rm {name}`", error = in_full(error.as_ref()))
    })?;
    Err(error)
}

fn unmake(pool: &PoolConfig, plane: &mut Plane, name: &str, disk: &Disk) -> Result<()> {
    let generation = plane.look(disk.space()?)?.today.generation;
    plane.remove(name, disk.space()?, generation)?;
    record::remove(&pool.dir, name)?;
    plane.forget(disk.space()?, generation)
}

fn reserve(pool: &PoolConfig, plane: &mut Plane, disk: &Disk) -> Result<()> {
    let servers = pool.servers()?;
    let mut client = connect::client(pool, &servers, plane.control()?, Wait::BLOCK, UNHURRIED)?;
    connect::greet(&mut client, pool, &servers)?;
    let (generation, map) = plane.take_over(disk.space()?)?;
    let space = client.client.attach(&disk.spec()?, generation, &map)?;
    let Reserved { wanted, kept, .. } = ask(&mut client, space)?;
    if kept == wanted {
        return Ok(());
    }
    client.client.unreserve(space);
    ask(&mut client, space)?;
    let most = kept / disk.copies as u64 * SLAB_CONTENT_BYTES;
    bail!(
        "the servers can keep {} for it, not {}, in {} copies each: reserve less, or lend more (`pagoda pool top` shows what there is)",
        format_size(most),
        format_size(disk.reserve_bytes),
        disk.copies
    )
}

/// Until the servers have said what they keep.
fn ask(client: &mut UdpClient<Control>, space: SpaceRef) -> Result<Reserved> {
    connect::converse(client, PATIENCE, |client| client.client.reserved(space).is_settled)?;
    Ok(client.client.reserved(space))
}
