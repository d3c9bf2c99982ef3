//! Disks that are written, with parity where they are cold.

use crate::parity::{SLAB, has_left, holder, lent};
use crate::pool::{Pool, Running};
use crate::rig::until;
use crate::{qemu_io, scrape};

/// A part of it is in each slab.
const WRITTEN: [&str; 4] = ["write -P 1 0 40M", "write -P 2 64M 40M", "write -P 3 128M 40M", "write -P 6 192M 1M"];
const READ: [&str; 4] = ["read -P 1 0 40M", "read -P 2 64M 40M", "read -P 3 128M 40M", "read -P 6 192M 1M"];

fn shows(export: &Running, line: &str) -> bool {
    scrape(&export.ready).lines().any(|found| found.starts_with(line))
}

fn copies(pool: &Pool) -> String {
    let listed = String::from_utf8(pool.output(&["disk", "ls"]).stdout).unwrap();
    listed.lines().nth(1).unwrap().split_whitespace().nth(2).unwrap().to_owned()
}

#[test]
fn what_is_cold_takes_less_until_it_is_written() {
    let mut pool = Pool::start("cold", 6);
    pool.run(&["disk", "create", "d", "--size", "256M"]);
    pool.run(&["disk", "create", "one", "--size", "64M", "--copies", "1"]);
    let refused = ["disk", "export", "one", "--nbd", &pool.socket("one"), "--parity-after", "10m"];
    pool.fails(&refused, 2, "has one copy");
    let refused = ["disk", "export", "d", "--nbd", &pool.socket("d"), "--parity-after", "0s"];
    pool.fails(&refused, 2, "being written");
    pool.run(&["disk", "rm", "one"]);
    let export = pool.export("d", &["--parity-after", "1s", "--metrics", "127.0.0.1:0"]);
    qemu_io(&export.uri(), &WRITTEN);
    // Four slabs, their parity, and the ledger at two servers.
    until("what is cold has parity", || lent(&pool) == (4 + 1 + 2) * SLAB);
    assert_eq!(copies(&pool), "parity");
    until("the exporter tells", || shows(&export, "pagoda_disk_parity_groups{disk=\"d\"} 1.0"));
    qemu_io(&export.uri(), &READ);
    let server = holder(&pool);
    pool.kill_server(server);
    qemu_io(&export.uri(), &READ);
    until("what was there is made anew", || has_left(&pool, server));
    qemu_io(&export.uri(), &READ);
    // Somebody writes: it has two copies again, and then parity again.
    qemu_io(&export.uri(), &["write -P 4 70M 4M", "read -P 4 70M 4M"]);
    until("it was dissolved", || shows(&export, "pagoda_disk_parity_dissolved_total{disk=\"d\"} 1.0"));
    let changed =
        ["read -P 1 0 40M", "read -P 2 64M 6M", "read -P 4 70M 4M", "read -P 2 74M 30M", "read -P 3 128M 40M"];
    qemu_io(&export.uri(), &changed);
    until("it is cold again", || shows(&export, "pagoda_disk_parity_made_total{disk=\"d\"} 2.0"));
    qemu_io(&export.uri(), &changed);
    assert_eq!(export.stop(), Some(0));
    // Who did not ask for parity finds it, reads what a server that dies had, and writes.
    let export = pool.export("d", &[]);
    let server = (0..6).find(|index| *index != server).unwrap();
    qemu_io(&export.uri(), &changed);
    pool.kill_server(server);
    qemu_io(&export.uri(), &changed);
    qemu_io(&export.uri(), &["write -P 5 0 4k", "read -P 5 0 4k", "read -P 1 4k 32M"]);
    until("all has two copies", || copies(&pool) == "2" && pool.is_whole_without("d", server));
    qemu_io(&export.uri(), &["read -P 5 0 4k", "read -P 1 4k 32M", "read -P 4 70M 4M", "read -P 3 128M 40M"]);
    assert_eq!(export.stop(), Some(0));
    // Sealed while it has parity: a reader finds it.
    (0..2).for_each(|_| pool.add_server());
    pool.list_servers();
    let export = pool.export("d", &["--parity-after", "1s"]);
    until("it is cold", || copies(&pool) == "parity");
    assert_eq!(export.stop(), Some(0));
    pool.run(&["disk", "share", "d", "--read-only"]);
    let export = pool.export("d", &["--keep-after", "1"]);
    crate::tool("qemu-io", &["-r", "-f", "raw", &export.uri(), "-c", "read -P 5 0 4k", "-c", "read -P 4 70M 4M"]);
    assert_eq!(export.stop(), Some(0));
    pool.run(&["disk", "rm", "d"]);
}
