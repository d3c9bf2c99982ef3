//! Other hosts: whom this one trusts, what they may ask, and what is asked of them.
//!
//! Every request is a stream of its own (`pagoda_link`), whose caller has shown its key. What it wants is in its first record. A host
//! that listens nowhere can still ask others. VMs do not wait for any of this: if it fails, `health` says so.

mod look;
mod serve;

use std::sync::Arc;

use pagoda_api::in_full;
use pagoda_api::types::{ApiError, ErrorCode, HostList, HostPing, OwnHost, TrustedHost};
use pagoda_link::hosts::{self, Host, Hosts};
use pagoda_link::{Link, LinkError, NoHandshake, PublicKey};

pub use self::serve::serve;
use crate::moves;
use crate::moves::arbiter::shown;
use crate::registry::Registry;

fn of(registry: &Registry) -> Hosts {
    Hosts::in_dir(&registry.config.hosts.dir)
}

/// This host, and those that it trusts.
///
/// # Errors
/// Their files cannot be read.
pub fn list(registry: &Arc<Registry>) -> Result<HostList, ApiError> {
    let files = of(registry);
    let own = files.own().map_err(internal)?.public();
    let hosts = files.all().map_err(internal)?;
    let own = OwnHost {
        name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        key: text(&own),
        listen: registry.config.hosts.listen.map(|listen| listen.to_string()),
        arbiter: shown::of_host(&registry.moves.arbiter.standing()),
    };
    let shown = |host: Host| TrustedHost { name: host.name, key: text(&host.key), address: host.address };
    Ok(HostList { own, hosts: hosts.into_iter().map(shown).collect() })
}

/// Trusts a host from now on.
///
/// # Errors
/// What is wrong with it.
pub fn trust(registry: &Arc<Registry>, host: &TrustedHost) -> Result<HostList, ApiError> {
    let host = hosts::public_key(&host.key)
        .and_then(|key| Ok(Host { name: host.name.clone(), key, address: hosts::full_address(&host.address)? }));
    let host = host.map_err(bad_request)?;
    let before = of(registry).find(&host.name).map_err(internal)?;
    of(registry).trust(host.clone()).map_err(bad_request)?;
    // Who had the name before is trusted no more.
    if let Some(before) = before.filter(|before| before.key != host.key) {
        moves::untrust(registry, &before.key, &before.name);
    }
    list(registry)
}

/// Trusts a host no more: its streams end, and so do moves that are not granted ([`moves::untrust`]).
///
/// # Errors
/// There is none of this name.
pub fn untrust(registry: &Arc<Registry>, name: &str) -> Result<HostList, ApiError> {
    let files = of(registry);
    let host = files.find(name).map_err(internal)?.ok_or_else(|| not_trusted(name))?;
    match files.untrust(name).map_err(internal)? {
        true => {
            moves::untrust(registry, &host.key, name);
            list(registry)
        }
        false => Err(not_trusted(name)),
    }
}

/// Asks a host what it has free, and how fast the way to it is.
///
/// # Errors
/// It is not trusted, does not answer, or refuses.
pub fn ping(registry: &Arc<Registry>, name: &str) -> Result<HostPing, ApiError> {
    let files = of(registry);
    let host = files.find(name).map_err(internal)?.ok_or_else(|| not_trusted(name))?;
    let own = files.own().map_err(internal)?;
    let looked = Link::connect(&own, &host.key, &host.address).and_then(|mut link| look::ask(&mut link));
    let found = looked.map_err(|error| unreachable(&host, &error, &own.public()))?;
    Ok(HostPing {
        name: host.name,
        address: host.address,
        look: found.look,
        round_trip_us: found.round_trip_us,
        bytes_per_second: found.bytes_per_second,
    })
}

fn not_trusted(name: &str) -> ApiError {
    let what = format!("no host named {name} is trusted");
    ApiError::new(
        ErrorCode::NoSuchHost,
        what,
        Some("`pagoda host ls` shows those that are, `pagoda host trust` adds one"),
    )
}

/// That a host is not reached, and what to do.
pub fn unreachable(host: &Host, error: &LinkError, own: &PublicKey) -> ApiError {
    let what = format!("{} at {}: {}", host.name, host.address, in_full(error));
    let hint = match error {
        error if is_distrust(error) => {
            Some(format!("run there: pagoda host trust NAME --key {} --address ADDRESS", text(own)))
        }
        LinkError::Closed | LinkError::Handshake(NoHandshake::NotAuthentic) => Some(format!(
            "`pagoda host ls` there shows its key, and this host knows it by {}; if that is right, see the log there",
            text(&host.key)
        )),
        LinkError::NotUnderstood => Some("the two have different versions of pagodad: update the older one".to_owned()),
        LinkError::Io(_) | LinkError::Silent | LinkError::NoAddress(_) => Some(
            "is the address right, and is pagodad running there, with `listen` in the section [hosts] of its configuration?"
                .to_owned(),
        ),
        LinkError::Refused(_) | LinkError::Handshake(_) | LinkError::NotAuthentic => None,
    };
    ApiError { code: ErrorCode::Unreachable, message: what, hint }
}

/// The other host does not trust this one.
pub fn is_distrust(error: &LinkError) -> bool {
    matches!(error, LinkError::Refused(why) if why.contains("does not trust"))
}

fn text(key: &PublicKey) -> String {
    format!("{key:?}")
}

fn bad_request(error: anyhow::Error) -> ApiError {
    ApiError::new(ErrorCode::BadRequest, in_full(error.as_ref()), None)
}

fn internal(error: anyhow::Error) -> ApiError {
    ApiError::new(ErrorCode::Internal, in_full(error.as_ref()), None)
}
