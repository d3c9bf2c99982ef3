//! Which crate of the workspace may depend on which. A new dependency is put on this list on purpose, with its reason.

use anyhow::Result;

use super::Source;
use super::manifests::{Manifest, Needed, members};

/// What one crate depends on, and why.
type Edges = &'static [(&'static str, Needed, &'static str)];

/// From the bottom up: a crate stands below those that it depends on.
const ALLOWED: [(&str, Edges); 29] = [
    ("pagoda-abi", &[]),
    ("pagoda-core", &[]),
    ("pagoda-guest", &[]),
    ("pagoda-api", &[("pagoda-abi", Needed::Always, "packet that fetches the monitor")]),
    (
        "pagoda-shim",
        &[
            ("pagoda-abi", Needed::Always, "packets, shared memory"),
            ("pagoda-core", Needed::ByTests, "chance from a seed"),
        ],
    ),
    ("pagoda-sys", &[("pagoda-abi", Needed::Always, "packets, shared memory")]),
    (
        "rmap",
        &[
            ("pagoda-core", Needed::ByTests, "chance from a seed"),
            ("pagoda-sys", Needed::ByTests, "allocator that counts"),
        ],
    ),
    ("pagoda-move", &[("pagoda-core", Needed::Always, "units, page sets, chance from a seed")]),
    ("pagoda-outbox", &[]),
    (
        "pagoda-outbox-push",
        &[
            ("pagoda-outbox", Needed::Always, "rates, limits of files"),
            ("pagoda-sys", Needed::Always, "what TCP has acknowledged"),
            ("pagoda-sys", Needed::ByTests, "tests that cannot run"),
        ],
    ),
    // Stands in for a crate of the registry.
    ("capng", &[]),
    (
        "pagoda-outbox-server",
        &[
            ("pagoda-abi", Needed::Always, "packets between it and the daemon"),
            ("pagoda-outbox", Needed::Always, "space of the outbox"),
            ("pagoda-sys", Needed::Always, "what TCP has acknowledged, sockets of packets"),
        ],
    ),
    ("pagoda-recording", &[("pagoda-core", Needed::Always, "rounds of the policy")]),
    ("rmap-io", &[("rmap", Needed::Always, "client and server that it drives")]),
    ("rmap-file", &[("rmap", Needed::Always, "trait of a control plane")]),
    (
        "rmap-etcd",
        &[
            ("rmap", Needed::Always, "trait of a control plane"),
            ("rmap-io", Needed::Always, "requests of a driver"),
            ("rmap-file", Needed::ByTests, "a file, held to the same suite"),
        ],
    ),
    (
        "rmap-nbd",
        &[
            ("rmap", Needed::Always, "pages"),
            ("rmap-io", Needed::Always, "driver of the client"),
            ("pagoda-sys", Needed::ByTests, "allocator that counts"),
        ],
    ),
    (
        "pagoda-pool",
        &[
            ("rmap", Needed::Always, "client"),
            ("rmap-etcd", Needed::Always, "etcd as control plane"),
            ("rmap-file", Needed::Always, "a file as control plane"),
            ("rmap-io", Needed::Always, "driver of the client, a machine's role"),
        ],
    ),
    (
        "pagoda-image",
        &[
            ("pagoda-abi", Needed::Always, "limits of regions"),
            ("pagoda-api", Needed::Always, "settings of a VM, in the manifest"),
            ("pagoda-core", Needed::Always, "units, page sets"),
        ],
    ),
    (
        "pagoda-pager",
        &[
            ("pagoda-abi", Needed::Always, "packets, shared memory"),
            ("pagoda-core", Needed::Always, "fault state machine"),
            ("pagoda-image", Needed::Always, "files of the VM's image"),
            ("pagoda-api", Needed::ByTests, "manifests of images"),
            ("pagoda-sys", Needed::Always, "system interfaces"),
            ("pagoda-sys", Needed::ByTests, "a guest's mapping of RAM"),
            ("rmap", Needed::Always, "remote tier"),
            ("rmap-io", Needed::Always, "driver of the remote tier's client"),
        ],
    ),
    (
        "pagoda-link",
        &[
            ("pagoda-api", Needed::Always, "names of hosts"),
            ("pagoda-pool", Needed::Always, "files with secrets"),
            ("rmap", Needed::Always, "keys"),
            ("rmap-io", Needed::Always, "random numbers"),
        ],
    ),
    (
        "pagodad",
        &[
            ("pagoda-abi", Needed::Always, "attach packets, VM records"),
            ("pagoda-api", Needed::Always, "requests and replies"),
            ("pagoda-core", Needed::Always, "memory policy, balloon"),
            ("pagoda-image", Needed::Always, "images of snapshots, form of VM records"),
            ("pagoda-link", Needed::Always, "streams of other hosts"),
            ("pagoda-move", Needed::Always, "protocol of moving a VM, who owns it"),
            ("pagoda-pager", Needed::Always, "engines"),
            ("pagoda-pool", Needed::Always, "pools of remote tiers"),
            ("pagoda-recording", Needed::Always, "recorded rounds"),
            ("pagoda-sys", Needed::Always, "system interfaces"),
            ("rmap", Needed::Always, "remote tiers"),
            ("rmap-io", Needed::Always, "drivers of their clients"),
            ("rmap-etcd", Needed::Always, "arbiter of moves"),
        ],
    ),
    (
        "pagoda-cli",
        &[
            ("pagoda-api", Needed::Always, "sizes, the daemon's socket, texts of errors"),
            ("pagoda-pool", Needed::Always, "where a pool is"),
            ("rmap", Needed::Always, "limits of options"),
            ("rmap-etcd", Needed::Always, "exit statuses"),
            ("rmap-io", Needed::ByTests, "defaults of options"),
        ],
    ),
    (
        "pagoda",
        &[
            ("pagoda-abi", Needed::ByTests, "small daemon of the tests"),
            ("pagoda-api", Needed::Always, "client of the daemon"),
            ("pagoda-cli", Needed::Always, "options of the servers, output, exit statuses"),
            ("pagoda-core", Needed::Always, "simulate, trace"),
            ("pagoda-recording", Needed::Always, "replay of recorded rounds"),
            ("pagoda-pool", Needed::Always, "pool, disk"),
            ("rmap", Needed::Always, "pool, disk"),
            ("rmap-etcd", Needed::Always, "pool, disk"),
            ("rmap-io", Needed::Always, "pool, disk"),
        ],
    ),
    (
        "pagoda-server",
        &[
            ("pagoda-api", Needed::Always, "texts of errors"),
            ("pagoda-cli", Needed::Always, "options, output, exit statuses"),
            ("pagoda-pool", Needed::Always, "the pool's directory, client of an exporter"),
            ("rmap", Needed::Always, "server and client"),
            ("rmap-etcd", Needed::Always, "a server in etcd"),
            ("rmap-file", Needed::ByTests, "what became of a disk"),
            ("rmap-io", Needed::Always, "drivers, locked memory, a disk that is lent"),
            ("rmap-nbd", Needed::Always, "disk export"),
        ],
    ),
    (
        "testkit",
        &[
            ("pagoda-abi", Needed::Always, "attach packets of the toy VMM"),
            ("pagoda-api", Needed::Always, "client of the daemon"),
            ("pagoda-guest", Needed::Always, "lines that guests print"),
            ("pagoda-sys", Needed::Always, "memory, processes and KVM of the toy VMM"),
        ],
    ),
    (
        "pagoda-bench",
        &[
            ("pagoda-api", Needed::Always, "client of the daemon"),
            ("pagoda-core", Needed::Always, "chunk queues, metrics, policy"),
            ("pagoda-guest", Needed::Always, "lines that guests print"),
            ("pagoda-image", Needed::Always, "images of a chain, and what reading them costs"),
            ("pagoda-link", Needed::Always, "bare stream between hosts"),
            ("pagoda-sys", Needed::Always, "processes, userfaultfd"),
            ("rmap", Needed::Always, "clients of disks and of pages"),
            ("rmap-io", Needed::Always, "their drivers"),
            ("rmap-nbd", Needed::Always, "requests of a disk's client"),
            ("testkit", Needed::Always, "daemons, guests, peers, results"),
        ],
    ),
    (
        "xtask",
        &[
            ("pagoda-api", Needed::Always, "client of the daemon, in the demo"),
            ("pagoda-guest", Needed::Always, "lines that guests print"),
            ("pagoda-sys", Needed::Always, "processes of the demo, skipped tests"),
            ("testkit", Needed::Always, "daemon, images, results"),
        ],
    ),
    (
        "vm-tests",
        &[
            ("pagoda-abi", Needed::Always, "packets of a daemon that dies"),
            ("pagoda-api", Needed::Always, "client of the daemon"),
            ("pagoda-guest", Needed::Always, "lines that guests print"),
            ("pagoda-image", Needed::Always, "form of VM records"),
            ("pagoda-sys", Needed::Always, "processes of tests"),
            ("rmap-etcd", Needed::Always, "etcd of pools"),
            ("testkit", Needed::Always, "settings of the host"),
        ],
    ),
];

/// The dependencies among the workspace's crates, against the list.
///
/// # Errors
/// A `Cargo.toml` is no TOML.
pub fn check(sources: &[Source]) -> Result<Vec<String>> {
    Ok(check_members(&members(sources)?))
}

fn check_members(members: &[Manifest]) -> Vec<String> {
    let mut complaints = Vec::new();
    let edges_of = |name: &str| ALLOWED.iter().find(|(crate_name, _)| *crate_name == name).map(|(_, edges)| *edges);
    for member in members {
        let name = &member.name;
        let Some(allowed) = edges_of(name) else {
            complaints.push(format!("{name}: say in xtask/src/tidy/crates.rs what this crate may depend on"));
            continue;
        };
        let is_allowed = |to: &str, needed: Needed| allowed.iter().any(|edge| (edge.0, edge.1) == (to, needed));
        for (to, needed) in &member.dependencies {
            let is_member = members.iter().any(|member| member.name == *to);
            if is_member && !is_allowed(to, *needed) {
                complaints.push(format!("{name} may not depend on {to}: xtask/src/tidy/crates.rs lists what it may"));
            }
        }
        for (to, needed, _) in allowed {
            if !member.dependencies.contains(&((*to).to_owned(), *needed)) {
                complaints
                    .push(format!("{name} does not depend on {to}: take it off the list in xtask/src/tidy/crates.rs"));
            }
        }
    }
    for (name, _) in ALLOWED {
        if !members.iter().any(|member| member.name == name) {
            complaints.push(format!("{name}: no such crate, take it off the list in xtask/src/tidy/crates.rs"));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the list allows, as the crates' files would say it.
    fn listed() -> Vec<Manifest> {
        let member = |(name, edges): &(&str, Edges)| Manifest {
            name: (*name).to_owned(),
            directory: format!("crates/{name}/"),
            dependencies: edges.iter().map(|(to, needed, _)| ((*to).to_owned(), *needed)).collect(),
        };
        ALLOWED.iter().map(member).collect()
    }

    fn complaints(change: fn(&mut Vec<Manifest>)) -> Vec<String> {
        let mut members = listed();
        change(&mut members);
        check_members(&members)
    }

    #[test]
    fn each_dependency_is_on_the_list() {
        assert_eq!(complaints(|_| ()), [""; 0]);
        let core = |members: &mut Vec<Manifest>, to: &str, needed| {
            members[1].dependencies.push((to.to_owned(), needed));
        };
        let found = complaints(|members| members[1].dependencies.push(("thiserror".to_owned(), Needed::Always)));
        assert_eq!(found, [""; 0]);
        for needed in [Needed::Always, Needed::ByTests] {
            let mut members = listed();
            core(&mut members, "pagoda-sys", needed);
            let found = check_members(&members);
            assert!(found.len() == 1 && found[0].starts_with("pagoda-core may not depend on pagoda-sys"), "{found:?}");
        }
        // For its tests is not for itself.
        let found = complaints(|members| members[6].dependencies[1].1 = Needed::Always);
        assert_eq!(found.len(), 2, "{found:?}");
    }

    #[test]
    fn the_list_has_nothing_that_is_not_there() {
        let found = complaints(|members| members[3].dependencies.clear());
        assert!(found.len() == 1 && found[0].starts_with("pagoda-api does not depend on pagoda-abi"), "{found:?}");
        let found = complaints(|members| drop(members.remove(2)));
        assert!(found.iter().any(|text| text.starts_with("pagoda-guest: no such crate")), "{found:?}");
        let found = complaints(|members| members[0].name = "new".to_owned());
        assert!(found.iter().any(|text| text.starts_with("new: say in")), "{found:?}");
    }
}
