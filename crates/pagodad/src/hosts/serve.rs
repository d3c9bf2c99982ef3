//! Listens for other hosts.
//!
//! Each connection has a thread until its stream ends. Whoever has not shown a trusted key within seconds is gone, and there are at
//! most [`STREAMS_MAX`] at a time.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pagoda_api::in_full;
use pagoda_api::types::{AdmitRequest, HostLook, MEMORY_GRANULE_BYTES};
use pagoda_link::hosts::Hosts;
use pagoda_link::{Link, LinkError, PublicKey};

use super::{look, of, text};
use crate::parts;
use crate::registry::Registry;

const PART: &str = "other hosts";
/// Streams at a time.
const STREAMS_MAX: usize = 64;
/// A connection that cannot be accepted, as for want of descriptors, is tried again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Listens for as long as the daemon runs, if it is configured.
pub fn serve(registry: &Arc<Registry>) {
    let Some(address) = registry.config.hosts.listen else { return };
    let listener = bind(registry, address);
    let streams = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, from) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!("{PART}: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        let Some(place) = Place::take(&streams) else {
            tracing::warn!(%from, "{PART}: {STREAMS_MAX} streams are open, and this one is closed");
            continue;
        };
        let registry = Arc::clone(registry);
        let handle = move || {
            let _place = place;
            if let Err(error) = answer(&registry, stream) {
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

/// One of the streams that there can be.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(streams: &Arc<AtomicUsize>) -> Option<Place> {
        let place = Place(Arc::clone(streams));
        (streams.fetch_add(1, Ordering::Relaxed) < STREAMS_MAX).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(registry: &Registry, stream: TcpStream) -> Result<(), LinkError> {
    let files = of(registry);
    let own = files.own().map_err(|error| LinkError::Io(std::io::Error::other(in_full(error.as_ref()))))?;
    let mut link = Link::answer(&own, stream, |key| trusts(&files, key))?;
    let first = link.receiver.receive()?.to_vec();
    look::answer(&mut link, first, || here(registry))
}

/// Why a caller with this key is not let in.
fn trusts(files: &Hosts, key: &PublicKey) -> Result<(), String> {
    let known = files.all().inspect_err(|error| tracing::warn!("{PART}: {}", in_full(error.as_ref())));
    match known.is_ok_and(|hosts| hosts.iter().any(|host| host.key == *key)) {
        true => Ok(()),
        false => Err(format!("it does not trust the key {}", text(key))),
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
        let mut taken: Vec<Place> = (0..STREAMS_MAX).map(|_| Place::take(&streams).unwrap()).collect();
        assert!(Place::take(&streams).is_none());
        assert!(Place::take(&streams).is_none(), "who was refused has none");
        taken.pop();
        assert!(Place::take(&streams).is_some());
    }
}
