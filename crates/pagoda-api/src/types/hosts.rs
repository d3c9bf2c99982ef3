//! Other hosts: which ones this one trusts, and what one of them says of itself.

use serde::{Deserialize, Serialize};

/// Bytes of a host's name.
pub const HOST_NAME_MAX: usize = 64;

/// Checks what a host is to be called.
///
/// # Errors
/// A sentence that says what is wrong and what would be right.
pub fn check_host_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    // Dots alone would be another path.
    let has_letter = name.chars().any(|c| c.is_ascii_alphanumeric());
    if has_letter && name.len() <= HOST_NAME_MAX && name.chars().all(is_plain) {
        return Ok(());
    }
    Err(format!("{name:?} is no name of a host: at most {HOST_NAME_MAX} letters, digits and - _ ."))
}

/// `GET /v1/hosts` lists the hosts that this one trusts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostList {
    pub own: OwnHost,
    /// Those that are trusted, by their names.
    pub hosts: Vec<TrustedHost>,
}

/// How others know this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnHost {
    pub name: String,
    /// Its public key: 64 hexadecimal digits.
    pub key: String,
    /// Where the daemon listens for other hosts, as `ADDR:PORT`; absent if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<String>,
    /// The arbiter of moves; absent if none is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arbiter: Option<HostArbiter>,
}

/// What decides about a VM whose link is cut in the moment of its grant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostArbiter {
    /// This host has reached it a few seconds ago.
    pub reachable: bool,
    /// Which one it is, or why it is not reached, in words.
    pub says: String,
}

/// `POST /v1/hosts`: from now on this host is trusted, or is by another key or at another address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustedHost {
    pub name: String,
    /// Its public key: 64 hexadecimal digits.
    pub key: String,
    /// The host is reached here, as `HOST:PORT`.
    pub address: String,
}

/// What a host says of itself to one that it trusts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostLook {
    /// The daemon's package version.
    pub version: String,
    pub hostname: String,
    /// The kernel has this release, as `uname -r` prints it.
    pub kernel: String,
    pub vms: u32,
    /// DRAM that VMs can still be promised, and what the host has of it.
    pub memory_free_bytes: u64,
    pub memory_total_bytes: u64,
    /// Swap that VMs can still be promised.
    pub swap_free_bytes: u64,
}

/// `POST /v1/hosts/NAME/ping` tries how fast the way to a host is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPing {
    pub name: String,
    pub address: String,
    pub look: HostLook,
    /// The median of some exchanges, encryption included.
    pub round_trip_us: u64,
    /// By one encrypted stream, as long as it was tried.
    pub bytes_per_second: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_hosts() {
        let long = "a".repeat(HOST_NAME_MAX + 1);
        for (name, is_right) in [
            ("host2", true),
            ("rack-1.example_x", true),
            ("", false),
            ("..", false),
            ("a b", false),
            ("a/b", false),
            (&long, false),
        ] {
            assert_eq!(check_host_name(name).is_ok(), is_right, "{name:?}");
        }
    }
}
