//! Disks that many read, and nobody writes.

use std::process::Command;

use crate::cluster::{copy_record, settings};
use crate::pool::{Pool, Running, tool};
use crate::rig::{EtcdProcess, until};
use crate::{noise, qemu_io};

/// Of a disk of 128 MiB, the first 80 are written: a slab and a part of one.
fn filled(pool: &Pool) -> String {
    pool.run(&["disk", "create", "d", "--size", "128M"]);
    let export = pool.export("d", &[]);
    let image = pool.file("image");
    std::fs::write(&image, noise(80 << 20)).unwrap();
    tool("truncate", &["--size", "128M", &image]);
    tool("nbdcopy", &[&image, &export.uri()]);
    pool.fails(&["disk", "share", "d", "--read-only"], 1, "exported by another process");
    assert_eq!(export.stop(), Some(0));
    image
}

fn reader(pool: &Pool, socket: &str) -> Running {
    pool.export_at("d", &pool.socket(socket), &["--keep-after", "1"])
}

fn reads(export: &Running, image: &str) {
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", image, &export.uri()]);
}

#[test]
fn many_read_what_was_sealed() {
    let mut pool = Pool::start("share", 3);
    let image = filled(&pool);
    pool.fails(&["disk", "share", "d"], 2, "--read-only");
    assert_eq!(pool.json(&["disk", "show", "d"])["read_only"], false);
    for _ in 0..2 {
        assert_eq!(pool.json(&["disk", "share", "d", "--read-only"])["read_only"], true);
    }
    let (one, other) = (reader(&pool, "one"), reader(&pool, "other"));
    assert_eq!(one.ready["read_only"], true);
    for export in [&one, &other] {
        assert!(tool("nbdinfo", &[&export.uri()]).contains("is_read_only: true"));
        reads(export, &image);
        let write = Command::new("qemu-io").args(["-f", "raw", &export.uri(), "-c", "write 0 4096"]).output().unwrap();
        assert!(!write.status.success());
    }
    // A server goes: both read on, and one of them makes the copies anew.
    pool.kill_server(0);
    reads(&one, &image);
    reads(&other, &image);
    until("a reader makes new copies", || pool.is_whole_without("d", 0));
    reads(&one, &image);
    reads(&other, &image);
    // The keeper may have been the one that goes now, without a word.
    drop(one);
    pool.kill_server(1);
    reads(&other, &image);
    pool.fails(&["disk", "rm", "d"], 1, "exported by another process");
    assert_eq!(other.stop(), Some(0));
    pool.run(&["disk", "rm", "d", "--force"]);
    assert_eq!(pool.json(&["disk", "ls"]), serde_json::json!([]));
}

#[test]
fn other_machines_read_what_was_sealed() {
    let etcd = EtcdProcess::start();
    let mut pool = Pool::start_with("shared", 3, &settings(&etcd));
    let image = filled(&pool);
    let beside = pool.beside("b");
    copy_record(&pool, &beside, "d");
    beside.fails(&["disk", "share", "d", "--read-only"], 1, "a was the last to export d");
    pool.run(&["disk", "share", "d", "--read-only"]);
    // No --take-over: nobody is taken anything.
    let (one, other) = (reader(&pool, "one"), reader(&beside, "other"));
    reads(&one, &image);
    reads(&other, &image);
    pool.kill_server(2);
    reads(&one, &image);
    reads(&other, &image);
    until("a reader makes new copies", || pool.is_whole_without("d", 2));
    reads(&one, &image);
    reads(&other, &image);
    assert_eq!(one.stop(), Some(0));
    // Removed by its first machine, it is gone for all: not zeros, errors.
    until("etcd forgets the server", || pool.json(&["pool", "ls"]).as_array().unwrap().len() == 2);
    pool.run(&["disk", "rm", "d"]);
    let mut other = other;
    let read = Command::new("qemu-io").args(["-f", "raw", &other.uri(), "-c", "read 70M 4096"]).output().unwrap();
    assert!(!read.status.success());
    assert_eq!(other.wait(), Some(1));
    assert!(beside.has_said("d was removed while it was exported"));
}

/// An owner that is stopped in its tracks while others seal the disk writes nothing any more.
#[test]
fn what_is_sealed_is_taken_from_its_owner() {
    let pool = Pool::start("seal-over", 2);
    pool.run(&["disk", "create", "d", "--size", "64M"]);
    let mut export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 1M"]);
    pool.run(&["disk", "share", "d", "--read-only", "--take-over"]);
    let write = Command::new("qemu-io").args(["-f", "raw", &export.uri(), "-c", "write -P 2 0 1M"]).output().unwrap();
    assert!(!write.status.success());
    assert_eq!(export.wait(), Some(1));
    let export = reader(&pool, "d");
    tool("qemu-io", &["-r", "-f", "raw", &export.uri(), "-c", "read -P 1 0 1M"]);
    assert_eq!(export.stop(), Some(0));
}
