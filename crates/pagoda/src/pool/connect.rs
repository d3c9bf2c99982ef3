//! A client of the pool, as `pagoda disk` and `pagoda pool ls` need it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rmap::client::{Client, ClientConfig, Reach, ServerInfo};
use rmap::control::{ControlReply, ControlRequest};
use rmap::crypto::SystemEntropy;
use rmap::registry::Registry;
use rmap::udp::{Port, UdpClient, Wait};
use rmap::units::Time;

use super::store;

/// The control plane: the registry's file.
pub type Control = Box<dyn FnMut(&ControlRequest) -> ControlReply>;

/// Answers from the registry. Where its disk fails, the question is asked again, and nothing goes on that needs it.
pub fn control(mut registry: Registry) -> Control {
    let mut failing = false;
    Box::new(move |request| match registry.answer(request) {
        Ok(reply) => {
            failing = false;
            reply
        }
        Err(error) => {
            if !std::mem::replace(&mut failing, true) {
                eprintln!("pagoda: {error}; trying again");
            }
            ControlReply::Later
        }
    })
}

/// For commands that are in no hurry: a server that is only busy is waited for, and keeps what it has.
pub const UNHURRIED: Duration = Duration::from_secs(5);

/// A client that knows the servers of the list, on a socket. `fail_after`: how long a server may be silent.
///
/// # Errors
/// Keys are missing, the list is wrong, a socket cannot be made.
pub fn client(
    dir: &Path,
    servers: &[ServerInfo],
    registry: Registry,
    wait: Wait,
    fail_after: Duration,
) -> Result<UdpClient<Control>> {
    let (keys, pool) = store::identity(dir)?;
    let config = ClientConfig { fail_after, ..ClientConfig::new(keys, pool) };
    let mut client = Client::new(config, Box::new(SystemEntropy::default()));
    for server in servers {
        client.add_server(Time(0), server.clone())?;
    }
    // One socket for all servers: IPv6 where one of them needs it, which reaches IPv4 too.
    let any: IpAddr = if servers.iter().any(|server| server.addr.is_ipv6()) {
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    let port = Port::bind(SocketAddr::new(any, 0)).context("make a socket")?;
    Ok(UdpClient::new(client, port, wait, Instant::now(), control(registry)))
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

/// Whether all servers answer.
pub fn all_up(client: &UdpClient<Control>) -> bool {
    client.client.reach().all(|(_, reach)| reach == Reach::Up)
}
