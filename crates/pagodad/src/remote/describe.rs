//! What a VM's client of the pool knows, in the API's words.

use pagoda_api::types::{Latency, RemoteLatency, RemotePool, RemoteServer};
use pagoda_pager::tier::remote::RemoteNumbers;
use rmap::client::{ClientStats, Reach, ServerView};
use rmap::units::{Class, PAGE_SIZE, SLAB_PAGES};

const SLAB_BYTES: u64 = SLAB_PAGES as u64 * PAGE_SIZE as u64;

pub fn describe(remote: &RemoteNumbers) -> RemotePool {
    let stats = &remote.stats;
    RemotePool {
        held_bytes: remote.held as u64 * SLAB_BYTES,
        short_bytes: remote.held.saturating_sub(remote.whole) as u64 * SLAB_BYTES,
        window_pages: remote.window as u64,
        requests: stats.sent,
        resent: stats.resent_timeout + stats.resent_overtaken,
        hedged_reads: stats.hedged,
        dropped_datagrams: stats.dropped,
        bad_pages: stats.bad_pages,
        servers_given_up: stats.servers_failed,
        copies_left: stats.copies_left,
        copies_joined: stats.copies_joined,
        lost_slabs: stats.slabs_lost,
        given_back_slabs: stats.slabs_given_back,
        unmapped_pages: stats.unmapped,
        latency: latencies(stats),
        servers: remote.servers.iter().map(server).collect(),
    }
}

fn latencies(stats: &ClientStats) -> Vec<RemoteLatency> {
    let of = |op: &'static str, all: &[rmap::latency::Latency; Class::ALL.len()]| {
        let used = all.iter().zip(Class::ALL).filter(|(latency, _)| latency.count() > 0);
        let row = |(latency, class): (&rmap::latency::Latency, Class)| {
            let us = |part| latency.quantile(part).as_secs_f64() * 1e6;
            let took = Latency { count: latency.count(), p50_us: us(0.5), p99_us: us(0.99) };
            RemoteLatency { op: op.to_owned(), class: class.word().to_owned(), took }
        };
        used.map(row).collect::<Vec<_>>()
    };
    [of("read", &stats.reads_took), of("write", &stats.writes_took)].concat()
}

fn server(view: &ServerView) -> RemoteServer {
    RemoteServer {
        id: view.id.0,
        up: view.reach == Reach::Up,
        round_trip_us: view.round_trip.as_micros() as u64,
        free_bytes: u64::from(view.free_slabs) * SLAB_BYTES,
        pressure: view.pressure as u8,
        datagram_bytes: view.datagram as u64,
    }
}
