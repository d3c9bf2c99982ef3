//! Sealed disks with parity instead of second copies.

use std::path::Path;

use rmap::units::SpaceId;
use rmap_file::Registry;

use crate::cluster::settings;
use crate::noise;
use crate::pool::{Pool, Running, tool};
use crate::rig::{EtcdProcess, until};

pub const SLAB: u64 = 64 << 20;
/// Written slabs: a group of four, and one more.
const SLABS: u64 = 5;
/// Bytes that one server lends.
const SERVER: u64 = 3 * SLAB;

/// A disk that is written all over, and what is in it.
fn filled(pool: &Pool) -> String {
    let size = format!("{}M", SLABS * 64);
    pool.run(&["disk", "create", "d", "--size", &size]);
    let export = pool.export("d", &[]);
    let image = pool.file("image");
    std::fs::write(&image, noise((SLABS * SLAB) as usize - (40 << 20))).unwrap();
    tool("truncate", &["--size", &size, &image]);
    tool("nbdcopy", &[&image, &export.uri()]);
    assert_eq!(export.stop(), Some(0));
    image
}

/// Bytes that servers have lent.
pub fn lent(pool: &Pool) -> u64 {
    let listed = pool.json(&["pool", "ls"]);
    listed.as_array().unwrap().iter().map(|server| SERVER - server["free_bytes"].as_u64().unwrap()).sum()
}

/// A server that has a part of the disk.
pub fn holder(pool: &Pool) -> usize {
    let listed = pool.json(&["pool", "ls"]);
    let holds = |server: &serde_json::Value| server["free_bytes"].as_u64().is_some_and(|free| free < SERVER);
    listed.as_array().unwrap().iter().position(holds).unwrap()
}

fn reader(pool: &Pool, socket: &str) -> Running {
    pool.export_at("d", &pool.socket(socket), &["--keep-after", "1"])
}

fn reads(export: &Running, image: &str) {
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", image, &export.uri()]);
}

/// Nothing of the disk is at a server any more, as far as the map says.
pub fn has_left(pool: &Pool, server: usize) -> bool {
    let space = pool.json(&["disk", "show", "d"])["space"].as_str().unwrap().to_owned();
    let space = SpaceId(u64::from_str_radix(&space, 16).unwrap());
    let map = Registry::open(Path::new(&pool.file("registry"))).unwrap().look(space).unwrap().map;
    let mut copies = map.iter().flat_map(|(_, entry)| &entry.replicas);
    assert!(map.iter().filter(|(_, entry)| entry.lost).count() <= 1, "{map:?}");
    copies.all(|replica| replica.server.0 as usize != server + 1) && map.iter().all(|(_, entry)| !entry.lost)
}

#[test]
fn a_quarter_more_instead_of_twice_as_much() {
    let mut pool = Pool::start("parity", 4);
    let image = filled(&pool);
    assert_eq!(lent(&pool), 2 * SLABS * SLAB);
    pool.fails(&["disk", "share", "d", "--read-only", "--parity"], 1, "parity needs 5 servers");
    assert_eq!(pool.json(&["disk", "show", "d"])["read_only"], false, "nothing was changed");
    (0..3).for_each(|_| pool.add_server());
    pool.list_servers();
    let shared = pool.json(&["disk", "share", "d", "--read-only", "--parity"]);
    assert_eq!([&shared["read_only"], &shared["parity"]], [true, true]);
    // Five slabs, two of parity, and one of the ledger at two servers.
    assert_eq!(lent(&pool), (SLABS + 2 + 2) * SLAB);
    assert_eq!(pool.json(&["disk", "show", "d"])["used_bytes"], (SLABS + 2 + 1) * SLAB);
    // Saying it again changes nothing.
    pool.run(&["disk", "share", "d", "--read-only", "--parity"]);
    assert_eq!(lent(&pool), (SLABS + 2 + 2) * SLAB);
    let running = reader(&pool, "running");
    reads(&running, &image);
    for _ in 0..2 {
        let server = holder(&pool);
        pool.kill_server(server);
        // At once, by one that was there and by one that never saw the server.
        reads(&running, &image);
        let new = reader(&pool, "new");
        reads(&new, &image);
        until("a reader makes anew what was there", || has_left(&pool, server));
        reads(&running, &image);
        reads(&new, &image);
        assert_eq!(new.stop(), Some(0));
    }
    assert_eq!(running.stop(), Some(0));
    let text = String::from_utf8(pool.output(&["disk", "ls"]).stdout).unwrap();
    assert!(text.contains("parity"), "{text}");
}

/// In a cluster, of a disk that was sealed with two copies; and all of it is given back in the end.
#[test]
fn what_is_sealed_already_gets_parity_and_is_removed() {
    let etcd = EtcdProcess::start();
    let pool = Pool::start_with("parity-etcd", 5, &settings(&etcd));
    until("all servers are there", || pool.json(&["pool", "ls"]).as_array().unwrap().len() == 5);
    pool.run(&["disk", "create", "d", "--size", "64M"]);
    let export = pool.export("d", &[]);
    crate::qemu_io(&export.uri(), &["write -P 1 0 1M", "write -P 2 40M 1M"]);
    assert_eq!(export.stop(), Some(0));
    pool.run(&["disk", "share", "d", "--read-only"]);
    let export = reader(&pool, "d");
    pool.run(&["disk", "share", "d", "--read-only", "--parity"]);
    assert_eq!(lent(&pool), (1 + 1 + 2) * SLAB);
    tool("qemu-io", &["-r", "-f", "raw", &export.uri(), "-c", "read -P 1 0 1M", "-c", "read -P 2 40M 1M"]);
    assert_eq!(export.stop(), Some(0));
    pool.run(&["disk", "rm", "d"]);
    assert_eq!(lent(&pool), 0);
}
