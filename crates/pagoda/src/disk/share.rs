//! `pagoda disk share`.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect::{self, UNHURRIED};
use pagoda_pool::plane::{Plane, Seen};
use pagoda_pool::record::{self, Disk};
use rmap::udp::Wait;

use super::{Info, export};
use crate::output::{print_json, print_text};
use crate::show::Format;

/// For the copies to become alike: versions of all pages are read, and what an owner left unfinished is copied.
const EVEN_PATIENCE: Duration = Duration::from_secs(120);

pub fn run(pool: &PoolConfig, name: &str, take_over: bool, format: Format) -> Result<()> {
    let disk = record::read(&pool.dir, name)?;
    let mut plane = Plane::of(pool, name, disk.cluster.as_deref())?;
    let seen = plane.look(disk.space()?)?;
    if !seen.today.sealed {
        let lock = record::lock_file(&pool.dir, name)?;
        if !record::try_lock(&lock)? && !take_over {
            bail!("{name} is exported by another process: stop that one, or say --take-over");
        }
        if let Some(host) = plane.other_host(&seen).filter(|_| !take_over) {
            bail!("{host} was the last to export {name}, and may still do: stop it there, and say --take-over");
        }
        seal(pool, name, &disk, &mut plane, &seen)?;
    }
    match format {
        Format::Json => Ok(print_json(&Info::read(pool, name)?)?),
        Format::Text => Ok(print_text(&format!("{name} is read-only; `pagoda disk export` offers it to many\n"))?),
    }
}

/// The order: nobody else writes any more -> every copy has the same -> the control plane says that it is sealed. Whatever
/// ends this in between leaves a disk that can be exported or sealed again.
fn seal(pool: &PoolConfig, name: &str, disk: &Disk, plane: &mut Plane, seen: &Seen) -> Result<()> {
    ensure!(seen.today.map.iter().all(|(_, entry)| !entry.lost), lost(name));
    let servers = pool.servers()?;
    let mut client = connect::client(pool, &servers, plane.control()?, Wait::BLOCK, UNHURRIED)?;
    if seen.today.map.iter().any(|(_, entry)| !entry.replicas.is_empty()) {
        export::greet(&mut client, &servers)?;
    }
    let up = connect::up(&client);
    connect::stand_in(&mut client, pool, name, &servers, &up, &seen.today.map)?;
    let (generation, map) = plane.take_over(disk.space()?)?;
    let space = client.client.attach(&disk.spec()?, generation, &map)?;
    let even = connect::converse(&mut client, EVEN_PATIENCE, |client| client.client.is_even(space))?;
    ensure!(even, "not every copy of {name} answers, and it is not sealed: see `pagoda pool ls`, and try again");
    ensure!(client.client.stats().slabs_lost == 0, lost(name));
    // Nothing is added to it any more. A server that does not answer keeps the room until it ends.
    client.client.unreserve(space);
    connect::converse(&mut client, EVEN_PATIENCE, |client| client.client.reserved(space).is_settled)?;
    plane.seal(disk.space()?, generation)
}

fn lost(name: &str) -> String {
    format!("parts of {name} are lost, and would be for every reader: it is not sealed; make a new disk")
}
