//! `pagoda disk share`: seals a disk, and makes parity of it if that is wanted.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use pagoda_pool::config::PoolConfig;
use pagoda_pool::connect::{self, UNHURRIED};
use pagoda_pool::plane::{Plane, Seen};
use pagoda_pool::record::{self, Disk};
use rmap::client::{Client, ParityView, Reach, SpaceRef, Tenure};
use rmap_io::net::Wait;

use super::show::Info;
use crate::output::{Format, print_json, print_text};

/// For the copies to become alike: versions of all pages are read, and what an owner left unfinished is copied.
const EVEN_PATIENCE: Duration = Duration::from_secs(120);

/// Servers that a group of four parts and its parity need.
const PARITY_SERVERS: usize = 5;
/// Without anything happening for so long, no more of it will.
const PARITY_PATIENCE: Duration = Duration::from_secs(20);

/// How often it is looked whether something has.
const PARITY_LOOK: Duration = Duration::from_secs(1);

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub take_over: bool,
    pub parity: bool,
}

pub fn run(pool: &PoolConfig, name: &str, how: How, format: Format) -> Result<()> {
    let How { take_over, parity } = how;
    let disk = record::read(&pool.dir, name)?;
    let mut plane = Plane::of(pool, name, disk.cluster.as_deref())?;
    let seen = plane.look(disk.space()?)?;
    if parity {
        check_servers(pool)?;
    }
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
    if parity {
        make_parity(pool, name, &disk, &mut plane)?;
    }
    match format {
        Format::Json => Ok(print_json(&Info::read(pool, name)?)?),
        Format::Text if parity => {
            Ok(print_text(&format!("{name} is read-only, with parity; `pagoda disk export` offers it to many\n"))?)
        }
        Format::Text => Ok(print_text(&format!("{name} is read-only; `pagoda disk export` offers it to many\n"))?),
    }
}

/// The order: nobody else writes any more -> every copy has the same -> the control plane says that it is sealed. Whatever
/// ends this in between leaves a disk that can be exported or sealed again.
fn seal(pool: &PoolConfig, name: &str, disk: &Disk, plane: &mut Plane, seen: &Seen) -> Result<()> {
    ensure!(seen.today.map.iter().all(|(_, entry)| !entry.lost), lost(name));
    let servers = pool.servers()?;
    let mut client = connect::client(pool, &servers, plane.control()?, Wait::BLOCK, UNHURRIED)?;
    // Servers keep room for it although it has nothing yet.
    if disk.reserve_bytes > 0 || seen.today.map.iter().any(|(_, entry)| !entry.replicas.is_empty()) {
        connect::greet(&mut client, pool, &servers)?;
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

/// Refuses before anything is changed.
fn check_servers(pool: &PoolConfig) -> Result<()> {
    let servers = pool.servers()?;
    let mut client = connect::client(pool, &servers, connect::no_control(), Wait::BLOCK, UNHURRIED)?;
    connect::greet(&mut client, pool, &servers)?;
    let lend = client.client.servers().filter(|view| view.reach == Reach::Up && !view.overflow_disk).count();
    ensure!(
        lend >= PARITY_SERVERS,
        "parity needs {PARITY_SERVERS} servers that lend memory, and {lend} answer: add some (`pagoda pool serve`), or share \
         it without --parity, with the copies that it has"
    );
    Ok(())
}

/// The disk is sealed. This command keeps it until each group has its parity, and drops what is too much then. Whatever ends
/// it in between leaves a disk that is read as before, and can be given the rest by the same command.
fn make_parity(pool: &PoolConfig, name: &str, disk: &Disk, plane: &mut Plane) -> Result<()> {
    let servers = pool.servers()?;
    let mut client = connect::client(pool, &servers, plane.control()?, Wait::BLOCK, UNHURRIED)?;
    connect::greet(&mut client, pool, &servers)?;
    let today = plane.look(disk.space()?)?.today;
    let up = connect::up(&client);
    connect::stand_in(&mut client, pool, name, &servers, &up, &today.map)?;
    let space = client.client.attach_reader(&disk.spec()?, &today)?;
    let progress = |client: &Client| {
        let stats = client.stats();
        (stats.pages_copied, stats.slabs_transferred, stats.copies_joined + stats.copies_left, client.parity(space))
    };
    let (mut last, mut moved_at) = (progress(&client.client), Instant::now());
    while moved_at.elapsed() < PARITY_PATIENCE {
        // Somebody who exports the disk may have taken to keeping it.
        if client.client.tenure(space) == Tenure::Reader {
            let now = client.now();
            client.client.make_parity(now, space);
        }
        let over = |client: &Client| client.is_taken(space) || is_whole(client, space);
        if connect::converse(&mut client, PARITY_LOOK, |client| over(&client.client))? {
            ensure!(!client.client.is_taken(space), "{name} was removed meanwhile");
            return Ok(());
        }
        let now = progress(&client.client);
        let (before, ParityView { groups, with_parity, whole, .. }) = (last.3, now.3);
        if (with_parity, whole) != (before.with_parity, before.whole) {
            eprintln!(
                "pagoda: {with_parity} of {groups} groups of four parts have parity, {whole} of them one copy of each part"
            );
        }
        if now != last {
            (last, moved_at) = (now, Instant::now());
        }
    }
    let ParityView { groups, whole, stuck, .. } = client.client.parity(space);
    bail!(
        "{name} is read-only, and {whole} of its {groups} groups of four parts have parity and one copy of each part. The others \
         keep what they had, or some of it: five servers need room (see `pagoda pool ls`), and in {stuck} of the groups a page is \
         damaged, or its list of versions found no room. Say this again when there is more room"
    )
}

fn is_whole(client: &Client, space: SpaceRef) -> bool {
    let ParityView { groups, whole, .. } = client.parity(space);
    whole == groups
}

fn lost(name: &str) -> String {
    format!("parts of {name} are lost, and would be for every reader: it is not sealed; make a new disk")
}
