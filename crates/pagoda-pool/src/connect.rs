//! A client of the pool's servers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rmap::client::{Client, ClientConfig, GIVE_BACK_AFTER, Reach, ServerInfo};
use rmap::control::{ControlReply, MapEntry};
use rmap::crypto::Keypair;
use rmap::units::{ServerId, SlabNo, Time};
use rmap_io::SystemEntropy;
use rmap_io::net::{Port, UdpClient, Wait};

use crate::aside::Control;
use crate::config::{PoolConfig, Transport};
use crate::store;

/// How long servers may be silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Then one is given up where another has a copy.
    pub fail_after: Duration,
    /// Then what only silent ones have fails, until one of them is heard again; `None`: it waits.
    pub error_after: Option<Duration>,
    /// Then one counts as having no slab to give, where none that answers has.
    pub grant_patience: Duration,
    /// Then a page for a slab that nobody has is declined, where the control plane does not say who is to have it; `None`: it
    /// waits.
    pub map_patience: Option<Duration>,
    /// Then a slab in which no page has content goes back to its servers; `None`: not by itself.
    pub give_back_after: Option<Duration>,
    /// Whether slabs that no other server takes go to one that keeps them on a disk.
    pub uses_overflow_disk: bool,
}

impl Patience {
    /// For disks: who waits for a block device expects an error rather than no answer at all.
    pub const fn of_disks(fail_after: Duration) -> Patience {
        let patience = Duration::from_secs(30);
        let (error_after, grant_patience) = (Some(patience), patience);
        let (map_patience, give_back_after) = (None, Some(GIVE_BACK_AFTER));
        Patience { fail_after, error_after, grant_patience, map_patience, give_back_after, uses_overflow_disk: true }
    }
}

/// For commands that are in no hurry: a server that is only busy is waited for, and keeps what it has. What is empty as well: a
/// command may end before the servers have heard of it.
pub const UNHURRIED: Patience = Patience { give_back_after: None, ..Patience::of_disks(Duration::from_secs(5)) };

/// Servers that have not answered by then are gone on without, if any has.
const GREETING_PATIENCE: Duration = Duration::from_secs(10);

/// Where no server is: the discard service of this machine.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9);

/// Far more than a round trip.
const ASK_EVERY: Duration = Duration::from_millis(200);

/// A client that knows the servers of the list, on a socket.
///
/// # Errors
/// Keys are missing, the list is wrong, a socket cannot be made.
pub fn client(
    pool: &PoolConfig,
    servers: &[ServerInfo],
    control: Control,
    wait: Wait,
    patience: Patience,
) -> Result<UdpClient<Control>> {
    let (keys, pool_key) = store::identity(&pool.dir)?;
    let Patience { fail_after, error_after, grant_patience, map_patience, give_back_after, uses_overflow_disk } =
        patience;
    let config = ClientConfig {
        fail_after,
        error_after,
        grant_patience,
        map_patience,
        give_back_after,
        uses_overflow_disk,
        link_bytes_per_second: pool.link.bytes_per_second(),
        ..ClientConfig::new(keys, pool_key)
    };
    let mut client = Client::new(config, Box::new(SystemEntropy::default()));
    for server in servers {
        client.add_server(Time(0), server.clone())?;
    }
    let port = port(pool.transport, servers).context("make a socket")?;
    Ok(UdpClient::new(client, port, wait, Instant::now(), control))
}

/// One socket for all servers: IPv6 where one of them needs it, which reaches IPv4 too.
fn port(transport: Transport, servers: &[ServerInfo]) -> std::io::Result<Port> {
    let any: IpAddr = if servers.iter().any(|server| server.addr.is_ipv6()) {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    match transport {
        Transport::Udp => Port::bind(SocketAddr::new(any, 0)),
        Transport::Tcp => Port::dial(),
    }
}

/// Talks to the servers until `enough`, or until `patience` is over. `true` if it was enough.
///
/// # Errors
/// The socket is broken.
pub fn converse(
    client: &mut UdpClient<Control>,
    patience: Duration,
    mut enough: impl FnMut(&mut UdpClient<Control>) -> bool,
) -> Result<bool> {
    let until = Instant::now() + patience;
    client.flush();
    loop {
        client.turn().context("the pool's socket")?;
        let due = client.expire();
        if enough(client) {
            return Ok(true);
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        client.port().wait(Some(due.map_or(until, |due| due.min(until)))).context("wait for the pool")?;
    }
}

/// Asks again and again, for requests and answers may get lost, until it is `enough` or `patience` is over. `true` if
/// it was enough.
///
/// # Errors
/// The socket is broken.
pub fn insist(
    client: &mut UdpClient<Control>,
    patience: Duration,
    mut ask: impl FnMut(&mut Client),
    mut enough: impl FnMut(&Client) -> bool,
) -> Result<bool> {
    let until = Instant::now() + patience;
    while Instant::now() < until {
        ask(&mut client.client);
        if converse(client, ASK_EVERY, |client| enough(&client.client))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// For clients that have no disk: there is nothing to ask.
pub fn no_control() -> Control {
    Box::new(|_| ControlReply::Later)
}

/// Servers of a map that are not in the list.
pub fn absent(servers: &[ServerInfo], map: &[(SlabNo, MapEntry)]) -> Vec<ServerId> {
    let mut named: Vec<ServerId> =
        map.iter().flat_map(|(_, entry)| &entry.replicas).map(|replica| replica.server).collect();
    named.sort_unstable();
    named.dedup();
    named.retain(|id| servers.iter().all(|server| server.id != *id));
    named
}

/// Numbers of servers, for people.
pub fn list(servers: &[ServerId]) -> String {
    servers.iter().map(|id| id.0.to_string()).collect::<Vec<_>>().join(", ")
}

/// The servers that answer the client now.
pub fn up(client: &UdpClient<Control>) -> Vec<ServerId> {
    client.client.reach().filter(|(_, reach)| *reach == Reach::Up).map(|(id, _)| id).collect()
}

/// Whether all servers answer.
pub fn all_up(client: &UdpClient<Control>) -> bool {
    client.client.reach().all(|(_, reach)| reach == Reach::Up)
}

/// Waits until the servers answer. Those that do not are named to the operator, if others do.
///
/// # Errors
/// None answers, or the socket is broken.
pub fn greet(client: &mut UdpClient<Control>, pool: &PoolConfig, servers: &[ServerInfo]) -> Result<()> {
    if converse(client, GREETING_PATIENCE, |client| all_up(client))? {
        return Ok(());
    }
    let up = up(client);
    if up.is_empty() {
        bail!(
            "no server answers: are they up (`pagoda pool ls`), do they have the same pool.key, and do they admit this \
             machine (`pagoda pool key add` there, with the key of `pagoda pool key ls` here)?"
        );
    }
    let silent: Vec<ServerId> = servers.iter().map(|server| server.id).filter(|id| !up.contains(id)).collect();
    (pool.report)(&format!("these servers do not answer: {}", list(&silent)));
    Ok(())
}

/// Makes servers of the map known that are not in the list, as silent ones: their copies are given up where there are
/// others, at servers that are `up`. Nobody can say where they are, so what only they have would be an error for as long as that
/// is so, even if they were alive.
///
/// # Errors
/// Parts of `name` are only at such servers.
pub fn stand_in(
    client: &mut UdpClient<Control>,
    pool: &PoolConfig,
    name: &str,
    servers: &[ServerInfo],
    up: &[ServerId],
    map: &[(SlabNo, MapEntry)],
) -> Result<()> {
    let absent = absent(servers, map);
    let at = |entry: &MapEntry, ids: &[ServerId]| entry.replicas.iter().any(|replica| ids.contains(&replica.server));
    if map.iter().any(|(_, entry)| at(entry, &absent) && !at(entry, up)) {
        bail!(
            "parts of {name} are only at servers that are not there: {}. Start them again, or, if they are gone for \
             good, give up what they had by a line for each in {}",
            list(&absent),
            store::servers_path(&pool.dir).display()
        );
    }
    for id in &absent {
        (pool.report)(&format!("server {} is not there: copies are made elsewhere where there is room", id.0));
    }
    add_silent(client, &absent)
}

/// Makes servers known that do not answer, until somebody says where they are ([`Client::add_server`]).
pub(crate) fn add_silent(client: &mut UdpClient<Control>, servers: &[ServerId]) -> Result<()> {
    for id in servers {
        // No server has this key.
        let key = Keypair::from_private(store::random_key()).public();
        client.client.add_server(client.now(), ServerInfo { id: *id, addr: NOWHERE, key, zone: 0, announcer: None })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_may_be_given_to_another_thread() {
        fn check<T: Send>() {}
        check::<UdpClient<Control>>();
    }
}
