//! Listens for other hosts.
//!
//! Each connection has a thread until its stream ends. Whoever has not shown a trusted key within seconds is gone. There are at most
//! [`STRANGERS_MAX`] of these and [`STREAMS_MAX`] of trusted hosts at a time, so strangers take no place of a host that is in. Streams
//! of moves, which last, have places of their own: [`MOVE_STREAMS_MAX`].

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pagoda_api::in_full;
use pagoda_api::types::{AdmitRequest, HostLook, MEMORY_GRANULE_BYTES};
use pagoda_link::hosts::Hosts;
use pagoda_link::{Link, LinkError, PublicKey};

use super::{look, of, text};
use crate::moves::channel::{self, Accepted};
use crate::moves::destination;
use crate::parts;
use crate::registry::Registry;

const PART: &str = "other hosts";
/// Streams of trusted hosts at a time.
const STREAMS_MAX: usize = 64;
/// Streams of moves at a time: of some 20 VMs that come, with three disks each that are copied.
const MOVE_STREAMS_MAX: usize = 128;
/// Connections at a time that have not shown a trusted key.
const STRANGERS_MAX: usize = 64;
/// A connection that cannot be accepted, as for want of descriptors, is tried again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Listens for as long as the daemon runs, if it is configured.
pub fn serve(registry: &Arc<Registry>) {
    let Some(address) = registry.config.hosts.listen else { return };
    let listener = bind(registry, address);
    let (strangers, places) = (Arc::default(), Places::default());
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("{PART}: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let Some(place) = Place::take(&strangers, STRANGERS_MAX) else {
            tracing::debug!(%from, "{PART}: {STRANGERS_MAX} connections have not shown a key yet, and this one is closed");
            continue;
        };
        let (registry, places) = (Arc::clone(registry), places.clone());
        let handle = move || {
            if let Err(error) = answer(&registry, stream, place, &places) {
                tracing::warn!(%from, "{PART}: {}", in_full(&error));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("host".into()).spawn(handle) {
            tracing::warn!("{PART}: {error}");
        }
    }
}

/// The address may be taken, or not be of this host yet.
fn bind(registry: &Registry, address: SocketAddr) -> TcpListener {
    let mut pauses = parts::pauses();
    loop {
        match TcpListener::bind(address) {
            Ok(listener) => {
                registry.parts.works(PART);
                return listener;
            }
            Err(error) => {
                registry.parts.failed(PART, &format!("nobody can listen on {address} ({error}); tried again"));
            }
        }
        std::thread::sleep(pauses.next().unwrap_or_default());
    }
}

/// A place for one stream, of those that there can be.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(taken: &Arc<AtomicUsize>, max: usize) -> Option<Place> {
        let place = Place(Arc::clone(taken));
        (taken.fetch_add(1, Ordering::Relaxed) < max).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Streams of trusted hosts, and those of them that are of moves.
#[derive(Clone, Default)]
struct Places {
    streams: Arc<AtomicUsize>,
    moves: Arc<AtomicUsize>,
}

fn answer(registry: &Arc<Registry>, stream: TcpStream, stranger: Place, places: &Places) -> Result<(), LinkError> {
    let files = of(registry);
    let own = files.own().map_err(|error| LinkError::Io(std::io::Error::other(in_full(error.as_ref()))))?;
    let mut place = None;
    let mut link = Link::answer(&own, stream, |key| {
        trusts(&files, key)?;
        place = Place::take(&places.streams, STREAMS_MAX);
        place
            .as_ref()
            .map(drop)
            .ok_or_else(|| format!("it has {STREAMS_MAX} streams of other hosts: try again in a moment"))
    })?;
    drop(stranger);
    let first = link.receiver.receive()?.to_vec();
    if channel::is_of_move(&first) {
        let full = || LinkError::Io(std::io::Error::other(format!("it has {MOVE_STREAMS_MAX} streams of moves")));
        let _of_move = Place::take(&places.moves, MOVE_STREAMS_MAX).ok_or_else(full)?;
        drop(place);
        return take_stream(registry, link, &first);
    }
    look::answer(&mut link, first, || here(registry))
}

/// Serves a stream of a move until it ends.
fn take_stream(registry: &Arc<Registry>, link: Link, first: &[u8]) -> Result<(), LinkError> {
    let peer = link.peer;
    let _entered = registry.moves.streams.enter(peer, link.cutter()?);
    // It may have been taken from the list since it was let in.
    trusts(&of(registry), &peer).map_err(|why| LinkError::Io(std::io::Error::other(why)))?;
    match Accepted::new(link, first)? {
        Accepted::Control(vm, sender, receiver) => destination::take_control(registry, peer, &vm, sender, receiver),
        Accepted::Disk(of, link) => destination::take_disk(registry, of, link)?,
        Accepted::Data(receiver) => destination::take_data(registry, peer, receiver),
    }
    Ok(())
}

/// Why a caller with this key is not let in.
fn trusts(files: &Hosts, key: &PublicKey) -> Result<(), String> {
    match files.all() {
        Ok(hosts) if hosts.iter().any(|host| host.key == *key) => Ok(()),
        Ok(_) => Err(format!("it does not trust the key {}", text(key))),
        Err(error) => {
            tracing::warn!("{PART}: {}", in_full(error.as_ref()));
            Err("it cannot read the list of hosts that it trusts: see its log".to_owned())
        }
    }
}

/// What this host has.
fn here(registry: &Registry) -> HostLook {
    let host = registry.host();
    let smallest = AdmitRequest { memory_bytes: MEMORY_GRANULE_BYTES, dram: None, min: 0 };
    // Only shown: without an answer there is nothing to be had.
    let (memory_free_bytes, swap_free_bytes) = match registry.would_admit(&smallest) {
        Ok(room) => (room.memory_free_bytes, room.swap_free_bytes),
        Err(_) => (0, 0),
    };
    HostLook {
        version: host.version,
        hostname: host.hostname,
        kernel: host.kernel,
        vms: host.vms,
        memory_free_bytes,
        memory_total_bytes: host.memory_total_bytes,
        swap_free_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted() {
        let streams = Arc::new(AtomicUsize::new(0));
        let take = || Place::take(&streams, 3);
        let mut taken: Vec<Place> = (0..3).map(|_| take().unwrap()).collect();
        assert!(take().is_none());
        assert!(take().is_none(), "who was refused has none");
        taken.pop();
        assert!(take().is_some());
    }
}
