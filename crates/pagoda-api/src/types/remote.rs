//! Remote memory as a VM's tier before its swap file.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::latency::Latency;

/// Most servers that may have each page of a remote tier.
pub const REMOTE_COPIES_MAX: u8 = 2;

/// Asks for a remote tier in the pool that the daemon borrows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteRequest {
    /// Servers that have each page: with one, its death stops the VM; with two, one of them may die.
    #[serde(default = "one")]
    pub copies: u8,
}

fn one() -> u8 {
    1
}

impl Default for RemoteRequest {
    fn default() -> Self {
        RemoteRequest { copies: one() }
    }
}

impl RemoteRequest {
    /// # Errors
    /// A sentence that says what would be right.
    pub fn check(self) -> Result<(), String> {
        if !(1..=REMOTE_COPIES_MAX).contains(&self.copies) {
            return Err(format!("{} copies of each page in remote memory: give 1 or {REMOTE_COPIES_MAX}", self.copies));
        }
        Ok(())
    }
}

impl FromStr for RemoteRequest {
    type Err = String;

    /// Reads the option's value: `pool:`, `pool:copies=2`.
    fn from_str(text: &str) -> Result<RemoteRequest, String> {
        let advice = || format!("{text:?} is no remote tier; write pool: or pool:copies=2");
        let options = text.strip_prefix("pool:").ok_or_else(advice)?;
        let mut remote = RemoteRequest::default();
        if !options.is_empty() {
            let copies = options.strip_prefix("copies=").ok_or_else(advice)?;
            remote.copies = copies.parse().map_err(|_| format!("{copies:?} is no number of copies; give 1 or 2"))?;
        }
        remote.check().map(|()| remote)
    }
}

/// What a VM has in remote memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RemoteInfo {
    pub copies: u8,
    /// Content that is in the pool, each page counted once.
    #[serde(default)]
    pub pool_bytes: u64,
    /// What its client of the pool knows; nothing before a program has attached.
    #[serde(default)]
    pub pool: Option<RemotePool>,
}

/// A VM's client of the pool: what it has counted since the daemon attached the VM, and how its servers are.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RemotePool {
    /// Parts of the VM's memory that servers have, 64 MiB each, counted once however many copies there are.
    pub held_bytes: u64,
    /// Of these, parts with fewer copies in sync than the VM is to have.
    pub short_bytes: u64,
    /// Pages of answers that may be under way: fewer after losses.
    pub window_pages: u64,
    pub requests: u64,
    /// Requests sent again, after a timeout or because later ones were answered before.
    pub resent: u64,
    /// Reads that took long and were asked of a second copy as well.
    pub hedged_reads: u64,
    pub dropped_datagrams: u64,
    /// Pages that came back damaged or old, and were read elsewhere.
    pub bad_pages: u64,
    pub servers_given_up: u64,
    pub copies_left: u64,
    pub copies_joined: u64,
    pub lost_slabs: u64,
    pub given_back_slabs: u64,
    /// Writes declined because nothing said in time which servers are to have them.
    pub unmapped_pages: u64,
    /// How long reads and writes took, by class, to the next power of two.
    pub latency: Vec<RemoteLatency>,
    pub servers: Vec<RemoteServer>,
}

/// Requests of one kind and one class took so long.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RemoteLatency {
    /// The requests were of this kind: `read` or `write`.
    pub op: String,
    /// `demand`, `prefetch` or `eviction`.
    pub class: String,
    #[serde(flatten)]
    pub took: Latency,
}

/// A server of the pool, as the VM's client sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteServer {
    pub id: u32,
    pub up: bool,
    /// The round-trip time is a smoothed one.
    pub round_trip_us: u64,
    /// What it may still lend, as its last answer said.
    pub free_bytes: u64,
    /// 0 none, 1 yellow, 2 orange (also while it is drained), 3 red.
    pub pressure: u8,
    /// The largest datagram that gets through.
    pub datagram_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_copy_unless_two_are_asked_for() {
        let read = |text: &str| serde_json::from_str::<RemoteRequest>(text).ok();
        assert_eq!(read("{}"), Some(RemoteRequest::default()));
        assert_eq!(read(r#"{"copies":2}"#), Some(RemoteRequest { copies: 2 }));
        assert_eq!(read(r#"{"copies":-1}"#), None);
        assert_eq!(read(r#"{"copys":2}"#), None);
        let check = |copies: u8, good: bool| assert_eq!(RemoteRequest { copies }.check().is_ok(), good, "{copies}");
        check(0, false);
        check(1, true);
        check(2, true);
        check(3, false);
    }

    #[test]
    fn remote_tiers() {
        let check =
            |text: &str, copies: u8| assert_eq!(text.parse::<RemoteRequest>(), Ok(RemoteRequest { copies }), "{text}");
        check("pool:", 1);
        check("pool:copies=1", 1);
        check("pool:copies=2", 2);
        let refused = |text: &str, expected: &str| {
            let said = text.parse::<RemoteRequest>().unwrap_err();
            assert!(said.contains(expected), "{text}: {said}");
        };
        for text in ["", "pool", "disk:", "pool:2", "pool:copy=2", "pool:copies=1,copies=2", "POOL:"] {
            refused(text, if text.contains(',') { "give 1 or 2" } else { "write pool: or pool:copies=2" });
        }
        for text in ["pool:copies=", "pool:copies=0", "pool:copies=3", "pool:copies=-1", "pool:copies=256"] {
            refused(text, "give 1 or 2");
        }
    }
}
