//! What the operator is told of requests that fail.

use rmap::client::{Client, ClientStats, Reach};
use rmap::units::Time;

/// Requests that fail because nobody answers, as the operator is told of them: once, until there are answers again.
#[derive(Debug)]
pub struct Outage<'a> {
    name: &'a str,
    only_reads: bool,
    servers: Spell,
    map: Spell,
}

/// A time in which requests fail for one reason.
#[derive(Debug, Default)]
struct Spell {
    failed: u64,
    lasts: bool,
}

impl Spell {
    /// `true` when one begins: more have failed than ever.
    fn begins(&mut self, failed: u64) -> bool {
        let more = failed > self.failed;
        self.failed = self.failed.max(failed);
        more && !std::mem::replace(&mut self.lasts, true)
    }

    fn ends(&mut self, is_over: bool) -> bool {
        is_over && std::mem::take(&mut self.lasts)
    }
}

impl<'a> Outage<'a> {
    /// No request has failed yet.
    pub fn none(name: &'a str, only_reads: bool) -> Outage<'a> {
        Outage { name, only_reads, servers: Spell::default(), map: Spell::default() }
    }

    /// Says what has begun to fail, or has ceased to, since the last time.
    pub fn look(&mut self, client: &Client, now: Time) {
        let name = self.name;
        let ClientStats { unanswered, unmapped, .. } = *client.stats();
        // What is unmapped counts as unanswered when its caller has heard of it, which is a little later.
        if self.servers.begins(unanswered.saturating_sub(unmapped)) {
            eprintln!(
                "pagoda: {name}: requests fail, as every server of what they ask for is silent (`pagoda disk show {name}`); \
                 nothing is lost by that, and they do not fail any more once one of them answers"
            );
        }
        if self.map.begins(unmapped) {
            let (what, then) = if self.only_reads {
                ("reads fail, as nobody says where the parts of the disk are", "they go on when there is an answer")
            } else {
                (
                    "writes fail, as nobody says where they are to go",
                    "all else goes on, and so do they once there is an answer",
                )
            };
            eprintln!("pagoda: {name}: {what}: neither etcd nor the pool's directory, whichever has the map; {then}");
        }
        if self.servers.ends(client.reach().all(|(_, reach)| reach == Reach::Up)) {
            eprintln!("pagoda: {name}: all servers answer again");
        }
        if self.map.ends(client.control_silent_for(now).is_none()) {
            let what = if self.only_reads {
                "the map is there again, and reads"
            } else {
                "the map can be changed again, and all writes"
            };
            eprintln!("pagoda: {name}: {what} go on");
        }
    }
}
