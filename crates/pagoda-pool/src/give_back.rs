//! Memory that is not needed any more goes back to the servers that lent it.

use std::time::Duration;

use anyhow::Result;
use rmap::client::SpaceSpec;
use rmap::control::Map;
use rmap::udp::Wait;
use rmap::units::Generation;

use crate::config::PoolConfig;
use crate::connect;
use crate::plane::Plane;

/// Servers are asked so long: each slab is asked for and given back, which takes a millisecond or so.
const PATIENCE: Duration = Duration::from_secs(120);

/// How far it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// The servers have everything back; the owner of this generation did it.
    All(Generation),
    /// Some server does not answer or is not known: nothing was given back.
    Silent,
    /// The servers did not take all of it in time.
    Left,
}

/// Gives all memory of a space back to its servers. `map` is where the space is now.
///
/// # Errors
/// The control plane or the socket failed.
pub fn give_back(pool: &PoolConfig, plane: &mut Plane, spec: &SpaceSpec, map: &Map) -> Result<GivenBack> {
    let servers = pool.servers()?;
    let mut client = connect::client(&pool.dir, &servers, plane.control()?, Wait::BLOCK, connect::UNHURRIED)?;
    let up = connect::converse(&mut client, PATIENCE, |client| connect::all_up(client))?;
    if !up || !connect::absent(&servers, map).is_empty() {
        return Ok(GivenBack::Silent);
    }
    let (generation, map) = plane.take_over(spec.id)?;
    let space = client.client.attach(spec, generation, &map)?;
    let given = connect::converse(&mut client, PATIENCE, |client| {
        let now = client.now();
        let left = client.client.give_back(now, space);
        client.flush();
        left == 0 && client.client.is_settled()
    })?;
    Ok(if given { GivenBack::All(generation) } else { GivenBack::Left })
}
