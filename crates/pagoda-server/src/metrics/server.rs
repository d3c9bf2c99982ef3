//! The metrics of a server of the pool.

use std::fmt;

use pagoda_pool::slab::SLAB_CONTENT_BYTES;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use rmap::server::{Server, ServerStats};
use rmap::wire::message::{Pressure, Status};

use super::{Def, Row, counter, gauge, metric, rows};

/// One look at a server.
#[derive(Debug, Clone)]
pub struct ServerNumbers {
    id: String,
    stats: ServerStats,
    held: usize,
    free: usize,
    broken: usize,
    spaces: usize,
    pressure: Pressure,
    draining: bool,
}

impl ServerNumbers {
    pub fn new(server: &Server) -> ServerNumbers {
        let mut numbers = ServerNumbers {
            id: server.id().0.to_string(),
            stats: ServerStats::default(),
            held: 0,
            free: 0,
            broken: 0,
            spaces: 0,
            pressure: Pressure::None,
            draining: false,
        };
        numbers.look(server);
        numbers
    }

    pub fn look(&mut self, server: &Server) {
        self.stats = server.stats();
        (self.held, self.free, self.broken) = (server.held_slabs(), server.free_slabs(), server.broken_slabs());
        self.spaces = server.spaces().iter().filter(|space| space.slabs > 0).count();
        (self.pressure, self.draining) = (server.pressure(), server.is_draining());
    }
}

const ROWS: &[Row<ServerNumbers>] = rows! { "pagoda_pool_server_",
    gauge "used_bytes", "bytes", "What disks have here.", |n| n.held as u64 * SLAB_CONTENT_BYTES;
    gauge "free_bytes", "bytes", "What they may still get.", |n| n.free as u64 * SLAB_CONTENT_BYTES;
    gauge "broken_bytes", "bytes", "What a failing disk has lost (`--on-disk`).", |n| n.broken as u64 * SLAB_CONTENT_BYTES;
    gauge "disks", "disks", "Disks and remote tiers that have something here.", |n| n.spaces as u64;
    gauge "pressure", "level", "0 none, 1 yellow, 2 orange (also while it is drained), 3 red.", |n| n.pressure as u64;
    gauge "draining", "0 or 1", "Whether it gives nothing away any more and waits for its pages to be moved, so as to end.",
        |n| u64::from(n.draining);
    counter "fragments", "datagrams", "Authentic datagrams of clients and other servers.", |n| n.stats.fragments;
    counter "sessions", "sessions", "Sessions begun.", |n| n.stats.accepted;
    counter "repeated_hellos", "datagrams", "Beginnings of sessions that were asked for again before the answer was there.",
        |n| n.stats.repeated;
    counter "read_pages", "pages", "Pages that were read.", |n| n.stats.pages_read;
    counter "written_pages", "pages", "Pages that were written or trimmed.", |n| n.stats.pages_written;
};

const DROPPED: Def = counter(
    "pagoda_pool_server_dropped_datagrams",
    "datagrams",
    "Datagrams that were not answered: malformed, of no session, not authentic, replayed, hellos without the pool's key, of \
     nodes that are not admitted, too many, or in versions not spoken here.",
);

type OfStats = fn(&ServerStats) -> u64;

const REASONS: [(&str, OfStats); 8] = [
    ("malformed", |stats| stats.malformed),
    ("session", |stats| stats.unknown_session),
    ("authenticity", |stats| stats.not_authentic),
    ("replay", |stats| stats.replayed),
    ("pool_key", |stats| stats.strangers),
    ("not_admitted", |stats| stats.not_admitted),
    ("throttled", |stats| stats.throttled),
    ("version", |stats| stats.refused),
];

const ANSWERS: Def = counter("pagoda_pool_server_answers", "requests", "Requests, by what was answered.");

impl Collector for ServerNumbers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Row { def, value } in ROWS {
            metric(&mut encoder, *def, |out| out.value(&[("server", &self.id)], value(self) as f64))?;
        }
        metric(&mut encoder, DROPPED, |out| {
            REASONS.iter().try_for_each(|(reason, value)| {
                out.value(&[("server", &self.id), ("reason", reason)], value(&self.stats) as f64)
            })
        })?;
        metric(&mut encoder, ANSWERS, |out| {
            Status::ALL.iter().zip(self.stats.answered).try_for_each(|(status, count)| {
                out.value(&[("server", &self.id), ("status", word(*status))], count as f64)
            })
        })
    }
}

fn word(status: Status) -> &'static str {
    match status {
        Status::Ok => "ok",
        Status::Busy => "busy",
        Status::UnknownSlab => "unknown_slab",
        Status::StaleGeneration => "stale_generation",
        Status::NotFenced => "not_fenced",
        Status::Full => "full",
        Status::OverQuota => "over_quota",
        Status::BadRequest => "bad_request",
        Status::Denied => "denied",
    }
}

#[cfg(test)]
pub(super) fn defs() -> impl Iterator<Item = (Def, &'static str)> {
    let plain = ROWS.iter().map(|row| (row.def, "server"));
    plain.chain([(DROPPED, "server, reason"), (ANSWERS, "server, status")])
}
