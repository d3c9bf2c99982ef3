//! What is trimmed goes back to the servers.

use crate::pool::Pool;
use crate::rig::until;
use crate::{qemu_io, scrape};

const SLAB: usize = 64 << 20;

fn is_written(uri: &str, slab: usize) -> bool {
    let write = format!("write -P 5 {} 4k", slab * SLAB);
    std::process::Command::new("qemu-io").args(["-f", "raw", uri, "-c", &write]).output().unwrap().status.success()
}

fn used(pool: &Pool, disk: &str) -> u64 {
    pool.json(&["disk", "show", disk])["used_bytes"].as_u64().unwrap()
}

/// Servers have three slabs each. What one disk trims another one gets; the first reads zeros, and so does its next export.
#[test]
fn what_one_disk_trims_another_one_gets() {
    let pool = Pool::start("discard", 2);
    for disk in ["one", "other"] {
        pool.run(&["disk", "create", disk, "--size", "192M"]);
    }
    let one = pool.export("one", &["--metrics", "127.0.0.1:0"]);
    let other = pool.export("other", &[]);
    qemu_io(&one.uri(), &["write -P 1 0 64M", "write -P 2 64M 1M", "write -P 3 128M 64M"]);
    assert_eq!(used(&pool, "one"), 3 * SLAB as u64);
    assert!(!is_written(&other.uri(), 0));
    // Of the last slab one page stays.
    qemu_io(&one.uri(), &["discard 0 128M", "discard 134221824 67104768", "read -P 0 0 128M"]);
    until("two slabs are given back", || used(&pool, "one") == SLAB as u64);
    until("they are counted", || scrape(&one.ready).contains("pagoda_disk_given_back_slabs_total{disk=\"one\"} 2.0"));
    let map = crate::pool::tool("nbdinfo", &["--map", "--totals", &one.uri()]);
    assert!(map.contains("4096 ") && map.contains("hole,zero"), "{map}");
    // One server may have its slab back before the other: the second copy is made then.
    until("there is room", || is_written(&other.uri(), 0));
    assert_eq!([is_written(&other.uri(), 1), is_written(&other.uri(), 2)], [true, false]);
    qemu_io(&other.uri(), &["read -P 5 0 4k", "read -P 0 4k 32M", "read -P 0 68M 32M"]);
    qemu_io(&one.uri(), &["read -P 0 0 128M", "read -P 3 128M 4k"]);
    until("both copies are made", || {
        let disks = pool.json(&["disk", "ls"]);
        disks.as_array().unwrap().iter().all(|disk| disk["short_bytes"] == 0)
    });
    assert!(!is_written(&one.uri(), 0), "another disk has the room now");
    assert_eq!(one.stop(), Some(0));
    let one = pool.export("one", &[]);
    qemu_io(&one.uri(), &["read -P 0 0 128M", "read -P 3 128M 4k", "read -P 0 134221824 67104768"]);
    // The other one gives it back, and ends in the middle of that or after it.
    qemu_io(&other.uri(), &["discard 0 128M"]);
    assert_eq!(other.stop(), Some(0));
    let other = pool.export("other", &[]);
    until("nothing is left", || used(&pool, "other") == 0);
    until("there is room again", || is_written(&one.uri(), 0) && is_written(&one.uri(), 1));
    qemu_io(&one.uri(), &["read -P 5 0 4k", "read -P 0 4k 32M", "read -P 5 64M 4k", "read -P 3 128M 4k"]);
    qemu_io(&other.uri(), &["read -P 0 0 192M"]);
    assert_eq!([one.stop(), other.stop()], [Some(0); 2]);
    for disk in ["one", "other"] {
        pool.run(&["disk", "rm", disk]);
    }
    let free: Vec<u64> =
        pool.json(&["pool", "ls"]).as_array().unwrap().iter().map(|s| s["free_bytes"].as_u64().unwrap()).collect();
    assert_eq!(free, [3 * (64 << 20); 2], "no server keeps what nobody has, copies that were being made included");
}
