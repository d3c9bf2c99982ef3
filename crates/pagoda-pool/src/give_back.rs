//! Memory that is not needed any more goes back to the servers that lent it.

use std::time::Duration;

use anyhow::{Result, ensure};
use rmap::client::SpaceSpec;
use rmap::control::Today;
use rmap::units::{Generation, ServerId};
use rmap_io::net::Wait;

use crate::config::PoolConfig;
use crate::connect;
use crate::error::UsageError;
use crate::plane::Plane;

/// Servers have so long to answer at first: one whose host is alive does within seconds.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Servers are asked so long: each slab is asked for and given back, which takes a millisecond or so.
const PATIENCE: Duration = Duration::from_secs(120);

const TAKEN_OVER: &str = "another owner took it over in this moment: see who that is, and try again";

/// What to do where servers do not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silent {
    /// Give nothing back, so that it can be tried again.
    Refuse,
    /// Go on with those that answer: it will not be tried again.
    PassOver,
}

/// How far it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GivenBack {
    /// The servers that answer have everything back; the owner of this generation did it.
    All(Generation),
    /// These servers do not answer or are not known: nothing was given back.
    Silent(Vec<ServerId>),
    /// The servers did not take all of it in time from the owner of this generation.
    Left(Generation),
}

/// Gives back what owners of a space may have left at servers when they ended, where the map names nothing any more: as far as the
/// servers are there. The generation that did.
///
/// # Errors
/// The control plane or the socket failed; somebody else took the space over meanwhile.
pub fn give_leftovers_back(
    pool: &PoolConfig,
    plane: &mut Plane,
    spec: &SpaceSpec,
    today: &Today,
) -> Result<Generation> {
    // Nobody has ever owned it.
    if today.generation == Generation(0) {
        return Ok(today.generation);
    }
    if pool.servers().is_err_and(|error| error.is::<UsageError>()) {
        // No server is there, and one that comes begins with nothing.
        return Ok(today.generation);
    }
    match give_back(pool, plane, spec, today, Silent::PassOver)? {
        GivenBack::All(generation) => Ok(generation),
        GivenBack::Silent(_) => Ok(today.generation),
        GivenBack::Left(generation) => {
            (pool.report)("not all servers answered in time: what they have of it they keep until they end");
            Ok(generation)
        }
    }
}

/// Gives all memory of a space back to its servers, what earlier owners left there included. `today`: as it was seen to be.
///
/// # Errors
/// The control plane or the socket failed; somebody else took the space over meanwhile, or has as some servers say, unless these
/// are to be passed over.
pub fn give_back(
    pool: &PoolConfig,
    plane: &mut Plane,
    spec: &SpaceSpec,
    today: &Today,
    silent: Silent,
) -> Result<GivenBack> {
    let servers = pool.servers()?;
    let mut client = connect::client(pool, &servers, plane.control()?, Wait::BLOCK, connect::UNHURRIED)?;
    connect::converse(&mut client, ANSWER_PATIENCE, |client| connect::all_up(client))?;
    let (up, absent) = (connect::up(&client), connect::absent(&servers, &today.map));
    let away = servers.iter().map(|server| server.id).filter(|id| !up.contains(id)).chain(absent.iter().copied());
    let away: Vec<ServerId> = away.collect();
    match silent {
        Silent::Refuse if !away.is_empty() => return Ok(GivenBack::Silent(away)),
        Silent::PassOver if !away.is_empty() => {
            let list = connect::list(&away);
            (pool.report)(&format!(
                "these servers do not answer, and keep what they lent, if anything, until they end: {list}"
            ));
            connect::add_silent(&mut client, &absent)?;
        }
        Silent::Refuse | Silent::PassOver => {}
    }
    let (generation, map) = plane.take_over(spec.id)?;
    // It may have content that it had not, and what gave it that is not to be removed.
    let is_next = generation.0 == today.generation.0 + 1;
    ensure!(is_next, TAKEN_OVER);
    // Nobody makes copies of what is to go.
    let SpaceSpec { id, pages, reserve, key, .. } = *spec;
    let space = client.client.attach(&SpaceSpec { id, pages, copies: 1, reserve, key }, generation, &map)?;
    let given = connect::converse(&mut client, PATIENCE, |client| {
        let now = client.now();
        let left = client.client.give_back(now, space);
        client.flush();
        // One that falls silent now has not answered for what it has.
        let answering = connect::up(client);
        let (client, all_up) = (&client.client, up.iter().all(|server| answering.contains(server)));
        let is_done = left == 0 && all_up && client.has_found_leftovers(space) && client.is_settled();
        client.is_taken(space) || is_done && client.reserved(space).is_settled
    })?;
    ensure!(!client.client.is_taken(space), TAKEN_OVER);
    let disbelieved = client.client.disbelieved(space);
    if !disbelieved.is_empty() {
        let list = connect::list(&disbelieved);
        let says =
            format!("these servers say that it has a newer owner, which the registry or etcd does not know: {list}");
        ensure!(
            silent == Silent::PassOver,
            "{says}. If the registry or etcd was put back from an old copy, put back the newest one; if not, --force forgets it, and \
             they keep what they have of it until they end"
        );
        (pool.report)(&format!("{says}. What they have of it they keep until they end"));
    }
    Ok(if given { GivenBack::All(generation) } else { GivenBack::Left(generation) })
}
