//! `pagoda disk rm`.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use rmap::client::SpaceSpec;
use rmap::udp::Wait;
use rmap::units::PAGE_SIZE;

use super::record;
use crate::pool::{connect, store};

/// Servers are asked so long: each slab is asked for and given back, which takes a millisecond or so.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn run(dir: &Path, name: &str, force: bool) -> Result<()> {
    let disk = record::read(dir, name)?;
    let lock = record::lock_file(dir, name)?;
    if !record::try_lock(&lock)? {
        bail!("{name} is exported by another process: stop that one first");
    }
    let mut registry = store::registry(dir)?;
    let (_, map) = registry.look(disk.space()?)?;
    let held = map.iter().any(|(_, entry)| !entry.replicas.is_empty());
    if held && !force {
        let servers = store::servers(dir)?;
        let mut client = connect::client(dir, &servers, store::registry(dir)?, Wait::BLOCK, connect::UNHURRIED)?;
        if !connect::converse(&mut client, PATIENCE, |client| connect::all_up(client))? {
            bail!("not all servers answer, see `pagoda pool ls`; --force forgets {name}, and they keep its memory");
        }
        let (generation, map) = registry.take_over(disk.space()?)?;
        let pages = disk.size_bytes / PAGE_SIZE as u64;
        let spec = SpaceSpec { id: disk.space()?, pages, copies: disk.copies, key: disk.key()? };
        let space = client.client.attach(&spec, generation, &map)?;
        let given = connect::converse(&mut client, PATIENCE, |client| {
            let now = client.now();
            let left = client.client.give_back(now, space);
            client.flush();
            left == 0 && client.client.is_settled()
        })?;
        if !given {
            bail!("the servers did not take all of {name} back: try again, or --force, and they keep its memory");
        }
    }
    // The memory first: a record without memory can be removed again, memory without a record cannot be named.
    record::remove(dir, name)
}
