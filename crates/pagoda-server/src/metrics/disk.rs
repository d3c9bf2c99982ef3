//! The metrics of an exported disk.

use std::fmt;

use pagoda_pool::slab::SLAB_CONTENT_BYTES;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use rmap::client::{Client, ClientStats, Reach, Reserved, ServerView, SpaceRef};
use rmap::latency::Latency;
use rmap::units::Class;

use super::{Def, Kind, Row, counter, gauge, metric, rows};

/// One look at an exporter.
#[derive(Debug, Clone)]
pub struct DiskNumbers {
    name: String,
    stats: ClientStats,
    window: usize,
    /// Slabs with all their copies in sync, and those with any.
    whole: usize,
    held: usize,
    reserved: Reserved,
    /// Groups of slabs with parity.
    groups: usize,
    servers: Vec<ServerView>,
}

impl DiskNumbers {
    pub fn new(name: &str) -> DiskNumbers {
        let (stats, servers) = (ClientStats::default(), Vec::new());
        DiskNumbers {
            name: name.to_owned(),
            stats,
            window: 0,
            whole: 0,
            held: 0,
            reserved: Reserved::default(),
            groups: 0,
            servers,
        }
    }

    #[cfg(test)]
    pub fn set_stats(&mut self, stats: ClientStats) {
        self.stats = stats;
    }

    pub fn look(&mut self, client: &Client, space: SpaceRef) {
        (self.stats, self.window) = (*client.stats(), client.window());
        (self.whole, self.held) = client.in_sync(space);
        self.reserved = client.reserved(space);
        self.groups = client.groups_with_parity(space);
        self.servers.clear();
        self.servers.extend(client.servers());
    }
}

const ROWS: &[Row<DiskNumbers>] = rows! { "pagoda_disk_",
    counter "reads", "pages", "Pages read.", |n| n.stats.reads;
    counter "reads_local", "pages", "Pages read that no server was asked for: zeros, and what was just being written.",
        |n| n.stats.reads_local;
    counter "reads_degraded", "pages", "Pages read that were put together from the other parts of a group with parity.",
        |n| n.stats.degraded;
    counter "writes", "pages", "Pages written or trimmed.", |n| n.stats.writes;
    counter "requests", "requests", "Requests sent to servers.", |n| n.stats.sent;
    counter "resent_timeout", "requests", "Requests sent again because no answer came in time.", |n| n.stats.resent_timeout;
    counter "resent_overtaken", "requests", "Requests sent again because later ones were answered before.",
        |n| n.stats.resent_overtaken;
    counter "hedged_reads", "pages", "Reads that took long and were asked of a second copy as well.", |n| n.stats.hedged;
    counter "dropped_datagrams", "datagrams", "Datagrams that were malformed, not authentic, replayed, or late.",
        |n| n.stats.dropped;
    counter "bad_pages", "pages", "Pages that came back damaged or old when they were read.", |n| n.stats.bad_pages;
    counter "scrubbed_pages", "pages", "Copies of pages that were looked at without anybody asking.", |n| n.stats.scrubbed;
    counter "scrub_bad_pages", "pages", "Of these, the ones that were damaged or old.", |n| n.stats.scrub_bad;
    counter "sessions", "sessions", "Sessions with servers that were begun.", |n| n.stats.sessions;
    counter "servers_given_up", "servers", "Servers that fell silent.", |n| n.stats.servers_failed;
    counter "unanswered", "pages", "Reads and writes that failed because every server of the page, or the map, had been silent for too long (`--error-after`).",
        |n| n.stats.unanswered;
    counter "unmapped", "pages", "Of these, the ones that needed a change of the map, or a look at it: etcd did not answer, or the pool's directory cannot be used.",
        |n| n.stats.unmapped;
    counter "incompatible", "servers", "Answers of servers with another version of the protocol or slabs of another size.",
        |n| n.stats.incompatible;
    counter "copies_left", "slabs", "Copies of slabs that are no more in sync.", |n| n.stats.copies_left;
    counter "copies_joined", "slabs", "Copies of slabs that were made anew.", |n| n.stats.copies_joined;
    counter "copied_pages", "pages", "Pages that the exporter copied from server to server.", |n| n.stats.pages_copied;
    counter "transferred_slabs", "slabs", "Slabs that servers copied to each other.", |n| n.stats.slabs_transferred;
    counter "refused_transfers", "slabs", "Slabs that a server copied in versions that were never written.",
        |n| n.stats.transfers_refused;
    counter "kept", "times", "Times that this exporter of a read-only disk began to see to its copies.",
        |n| n.stats.spaces_kept;
    counter "lost_slabs", "slabs", "Slabs whose last copy is gone.", |n| n.stats.slabs_lost;
    counter "given_back_slabs", "slabs", "Slabs that went back to their servers because every page in them was trimmed.",
        |n| n.stats.slabs_given_back;
    counter "leftover_slabs", "slabs", "Slabs that an exporter before this one had left at servers when it ended, and that went back.",
        |n| n.stats.leftovers;
    counter "parity_made", "groups", "Groups of four parts that were cold and got parity (`--parity-after`).",
        |n| n.stats.groups_made;
    counter "parity_dissolved", "groups", "Groups of four parts whose parity went before they were written to.",
        |n| n.stats.groups_dissolved;
    gauge "window_pages", "pages", "Pages of answers that may be under way: fewer after losses.", |n| n.window as u64;
    gauge "held_bytes", "bytes", "Parts of the disk that servers have, each counted once.",
        |n| n.held as u64 * SLAB_CONTENT_BYTES;
    gauge "short_bytes", "bytes", "Of these, parts with fewer copies in sync than the disk has.",
        |n| (n.held - n.whole) as u64 * SLAB_CONTENT_BYTES;
    gauge "parity_groups", "groups", "Groups of four parts that have parity instead of second copies.", |n| n.groups as u64;
    gauge "reserved_bytes", "bytes", "What servers that answer keep room for, each copy counted.",
        |n| n.reserved.kept * SLAB_CONTENT_BYTES;
};

struct ServerRow {
    def: Def,
    value: fn(&ServerView) -> f64,
}

/// A server that is silent has no more than the first of these.
const SERVERS: &[ServerRow] = &[
    ServerRow {
        def: gauge("pagoda_disk_server_up", "0 or 1", "Whether the server answers."),
        value: |view| f64::from(u8::from(view.reach == Reach::Up)),
    },
    ServerRow {
        def: gauge("pagoda_disk_server_round_trip_seconds", "seconds", "Smoothed."),
        value: |view| view.round_trip.as_secs_f64(),
    },
    ServerRow {
        def: gauge("pagoda_disk_server_free_bytes", "bytes", "What it may still lend, as its last answer said."),
        value: |view| (u64::from(view.free_slabs) * SLAB_CONTENT_BYTES) as f64,
    },
    ServerRow {
        def: gauge("pagoda_disk_server_pressure", "level", "0 none, 1 yellow, 2 orange, 3 red."),
        value: |view| f64::from(view.pressure as u8),
    },
    ServerRow {
        def: gauge("pagoda_disk_server_datagram_bytes", "bytes", "The largest datagram that gets through."),
        value: |view| view.datagram as f64,
    },
];

type Latencies = [Latency; Class::ALL.len()];

type OfStats = fn(&ClientStats) -> &Latencies;

const LATENCIES: [(Def, OfStats); 2] = [
    (latency("pagoda_disk_read_seconds", "How long reads took, those of zeros included."), |stats| &stats.reads_took),
    (latency("pagoda_disk_write_seconds", "How long writes and trims took."), |stats| &stats.writes_took),
];

const fn latency(name: &'static str, help: &'static str) -> Def {
    Def { name, kind: Kind::Histogram, unit: "seconds", help }
}

impl Collector for DiskNumbers {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for Row { def, value } in ROWS {
            metric(&mut encoder, *def, |out| out.value(&[("disk", &self.name)], value(self) as f64))?;
        }
        for (def, of) in LATENCIES {
            metric(&mut encoder, def, |out| {
                let used = of(&self.stats).iter().zip(Class::ALL).filter(|(latency, _)| latency.count() > 0);
                used.into_iter().try_for_each(|(latency, class)| {
                    out.latency(&[("disk", &self.name), ("class", class.word())], latency)
                })
            })?;
        }
        for (index, ServerRow { def, value }) in SERVERS.iter().enumerate() {
            metric(&mut encoder, *def, |out| {
                let shown = self.servers.iter().filter(|view| index == 0 || view.reach == Reach::Up);
                shown.into_iter().try_for_each(|view| {
                    out.value(&[("disk", &self.name), ("server", &view.id.0.to_string())], value(view))
                })
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) fn defs() -> impl Iterator<Item = (Def, &'static str)> {
    let plain = ROWS.iter().map(|row| (row.def, "disk"));
    let latencies = LATENCIES.into_iter().map(|(def, _)| (def, "disk, class"));
    plain.chain(latencies).chain(SERVERS.iter().map(|row| (row.def, "disk, server")))
}
