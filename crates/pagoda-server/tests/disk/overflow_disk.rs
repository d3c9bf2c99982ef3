//! A pool that is full goes on writing, to a disk.

use crate::drain::{become_admin, servers};
use crate::pool::{Pool, tool};
use crate::rig::until;
use crate::{noise, qemu_io};

/// What each server has.
fn used(pool: &Pool) -> Vec<u64> {
    servers(pool).into_iter().map(|(bytes, _)| bytes).collect()
}

const SLAB: u64 = 64 << 20;
const PART: usize = 2 << 20;

#[test]
fn what_no_memory_takes_lies_on_a_disk() {
    let mut pool = Pool::start_with("overfull", 1, "");
    pool.add_disk_server();
    pool.list_servers();
    let media: Vec<_> =
        pool.json(&["pool", "ls"]).as_array().unwrap().iter().map(|row| row["medium"].clone()).collect();
    assert_eq!(media, ["memory", "disk"]);
    pool.run(&["disk", "create", "d", "--size", "256M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    let (image, back) = (pool.file("image"), pool.file("back"));
    // A part of each slab.
    let mut content = vec![0; 4 * SLAB as usize];
    for (slab, part) in content.chunks_mut(SLAB as usize).zip(noise(4 * PART).chunks(PART)) {
        slab[..PART].copy_from_slice(part);
    }
    std::fs::write(&image, content).unwrap();
    tool("nbdcopy", &[&image, &export.uri()]);
    assert_eq!(used(&pool), [3 * SLAB, SLAB]);
    tool("nbdcopy", &[&export.uri(), &back]);
    tool("cmp", &[&image, &back]);
    // Another owner finds it there.
    assert_eq!(export.stop(), Some(0));
    let export = pool.export("d", &[]);
    tool("nbdcopy", &[&export.uri(), &back]);
    tool("cmp", &[&image, &back]);
}

/// There and back, while it is used.
#[test]
fn slabs_go_to_memory_and_flee_from_it() {
    let mut pool = Pool::start_with("flee", 1, "");
    pool.add_disk_server();
    pool.list_servers();
    pool.set_available(0, 8);
    let pressed = |pool: &Pool, level: &str| pool.json(&["pool", "ls"])[0]["pressure"] == level;
    until("its memory is short", || pressed(&pool, "yellow"));
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 2M", "write -P 2 32M 2M"]);
    assert_eq!(used(&pool), [0, SLAB]);
    pool.set_available(0, 100);
    until("the slab is in memory", || used(&pool) == [SLAB, 0]);
    qemu_io(&export.uri(), &["read -P 1 0 2M", "read -P 2 32M 2M", "write -P 3 0 1M"]);
    become_admin(&pool, "1");
    let drained = pool.run(&["pool", "drain", "1"]);
    assert!(drained.ends_with("has nothing left, and ends\n"), "{drained}");
    assert_eq!(pool.wait_server(0), Some(0));
    qemu_io(&export.uri(), &["read -P 3 0 1M", "read -P 1 1M 1M", "read -P 2 32M 2M", "write -P 4 32M 1M"]);
    assert_eq!(export.stop(), Some(0));
}

#[test]
fn a_directory_that_is_no_disk_is_refused() {
    let pool = Pool::start_with("nodisk", 0, "");
    let serve = |dir: &str, size: &str, status, what: &str| {
        let words = ["pool", "serve", "--size", size, "--listen", "127.0.0.1:0", "--on-disk", dir];
        pool.fails(&words, status, what);
    };
    serve("/dev/shm", "200M", 1, "in memory: give a directory on a disk");
    serve(env!("CARGO_TARGET_TMPDIR"), "1000T", 1, "available; give less");
    serve(env!("CARGO_TARGET_TMPDIR"), "1M", 2, "at least 64M");
    serve(&pool.file("none"), "200M", 1, "No such file");
    let workers = ["pool", "serve", "--size", "200M", "--listen", "127.0.0.1:0", "--on-disk", ".", "--workers", "2"];
    pool.fails(&workers, 2, "a disk is read by one thread");
}
