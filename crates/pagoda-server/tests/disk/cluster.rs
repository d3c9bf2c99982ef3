//! Disks of a cluster, with Debian's etcd.

use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::pool::{Pool, tool};
use crate::qemu_io;
use crate::rig::{EtcdProcess, Scheme, until};
use crate::silence::asked;

pub fn settings(etcd: &EtcdProcess) -> String {
    format!("cluster = \"etcd://{}/test\"\nhost = \"a\"\n", etcd.endpoint())
}

/// Gives another machine what it needs to export a disk.
pub fn copy_record(from: &Pool, to: &Pool, disk: &str) {
    std::fs::create_dir_all(to.dir.join("disks")).unwrap();
    tool("cp", &["-p", &from.file(&format!("disks/{disk}.toml")), &to.file("disks")]);
}

fn servers(pool: &Pool) -> usize {
    pool.json(&["pool", "ls"]).as_array().unwrap().len()
}

#[test]
fn a_disk_is_taken_over_on_another_machine() {
    let etcd = EtcdProcess::start();
    let pool = Pool::start_with("over", 2, &settings(&etcd));
    let states: Vec<_> = pool.json(&["pool", "ls"]).as_array().unwrap().iter().map(|s| s["state"].clone()).collect();
    assert_eq!(states, ["up", "up"]);
    pool.run(&["disk", "create", "d", "--size", "128M"]);
    let other = pool.beside("b");
    other.fails(&["disk", "create", "d", "--size", "4M"], 1, "already");
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 1M", "write -P 2 70M 1M"]);
    copy_record(&pool, &other, "d");
    let socket = other.socket("d");
    other.fails(&["disk", "export", "d", "--nbd", &socket], 1, "a was the last to export d");
    // The export is killed, so it has no time to give the disk back.
    drop(export);
    let export = other.export("d", &["--take-over"]);
    qemu_io(&export.uri(), &["read -P 1 0 1M", "read -P 2 70M 1M", "read -P 0 1M 1M", "write -P 3 0 1M"]);
    let shown = other.json(&["disk", "show", "d"]);
    assert_eq!((shown["generation"].clone(), shown["host"].clone()), (2.into(), "b".into()));
    assert_eq!((shown["cluster"].clone(), shown["used_bytes"].clone()), ("test".into(), (128 << 20).into()));
    pool.fails(&["disk", "rm", "d"], 1, "b was the last to export d");
    assert_eq!(export.stop(), Some(0));
    // Without its etcd it would read as zeros.
    std::fs::rename(other.file("pool.toml"), other.file("away")).unwrap();
    other.fails(&["disk", "export", "d", "--nbd", &socket], 1, "kept in etcd");
    std::fs::rename(other.file("away"), other.file("pool.toml")).unwrap();
    other.run(&["disk", "rm", "d"]);
    assert_eq!(other.json(&["disk", "ls"]), serde_json::json!([]));
    let rows = pool.json(&["pool", "ls"]);
    assert!(rows.as_array().unwrap().iter().all(|row| row["free_bytes"] == 3 * (64 << 20)), "{rows}");
    // What the first machine still knows is of no use.
    pool.fails(&["disk", "show", "d"], 4, "no space");
    pool.fails(&["disk", "ls"], 1, "d is left out");
    pool.fails(&["disk", "rm", "d"], 4, "--force forgets");
    pool.run(&["disk", "rm", "d", "--force"]);
    pool.run(&["disk", "create", "d", "--size", "4M"]);
}

/// What is in the pool is read and written, what needs another map waits, and nobody takes anything over.
#[test]
fn a_disk_goes_on_without_etcd() {
    let mut etcd = EtcdProcess::start();
    let pool = Pool::start_with("without", 2, &settings(&etcd));
    pool.run(&["disk", "create", "d", "--size", "128M"]);
    // What waits is to wait for as long as this takes.
    let export = pool.export("d", &["--error-after", "0"]);
    qemu_io(&export.uri(), &["write -P 1 0 1M"]);
    let other = pool.beside("b");
    copy_record(&pool, &other, "d");
    etcd.signal(Signal::STOP);
    until("it is said", || pool.has_said("nothing can be placed anew"));
    qemu_io(&export.uri(), &["read -P 1 0 1M", "write -P 2 0 1M", "read -P 2 0 1M"]);
    let uri = export.uri();
    let words = ["-f", "raw", &uri, "-c", "write -P 3 70M 1M"];
    let mut waits = Command::new("qemu-io").args(words).stdout(Stdio::null()).spawn().unwrap();
    pool.fails(&["pool", "ls"], 3, "nothing can be placed anew");
    other.fails(&["disk", "export", "d", "--nbd", &other.socket("d"), "--take-over"], 3, "does not answer");
    assert!(waits.try_wait().unwrap().is_none(), "acknowledged although no map says where it is");
    etcd.signal(Signal::CONT);
    assert!(waits.wait().unwrap().success());
    until("it is said", || pool.has_said("etcd answers again"));
    qemu_io(&export.uri(), &["read -P 2 0 1M", "read -P 3 70M 1M"]);
    etcd.kill();
    drop(export);
    pool.fails(&["disk", "export", "d", "--nbd", &pool.socket("d")], 3, "does not answer");
    pool.fails(&["disk", "create", "e", "--size", "4M"], 3, "does not answer");
    pool.fails(&["pool", "serve", "--size", "70M", "--listen", "127.0.0.1:0", "--id", "9"], 3, "does not answer");
    etcd.restart();
    assert_eq!(pool.json(&["disk", "show", "d"])["generation"], 1);
    until("the servers are found", || servers(&pool) == 2);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["read -P 2 0 1M", "read -P 3 70M 1M"]);
    assert_eq!(export.stop(), Some(0));
}

/// What needs another map does not wait for ever, whether a part of the disk is new or a copy is to leave it.
#[test]
fn writes_that_need_etcd_end_without_it() {
    let etcd = EtcdProcess::start();
    let mut pool = Pool::start_with("ends", 2, &settings(&etcd));
    pool.run(&["disk", "create", "d", "--size", "128M"]);
    let export = pool.export("d", &["--error-after", "1"]);
    qemu_io(&export.uri(), &["write -P 1 0 1M"]);
    etcd.signal(Signal::STOP);
    let fails = |command| {
        let said = asked(&export.uri(), command);
        assert!(said.contains("Input/output error"), "{command}: {said}");
    };
    fails("write -P 2 70M 1M");
    qemu_io(&export.uri(), &["write -P 3 0 1M", "read -P 3 0 1M", "read -P 0 70M 1M"]);
    pool.kill_server(0);
    fails("write -P 4 0 64k");
    qemu_io(&export.uri(), &["read -P 3 64k 960k"]);
    until("it is said", || pool.has_said("nobody says where they are to go"));
    etcd.signal(Signal::CONT);
    until("it is said", || pool.has_said("the map can be changed again"));
    qemu_io(&export.uri(), &["read -P 3 64k 960k", "read -P 0 70M 1M", "write -P 5 0 64k", "write -P 6 70M 1M"]);
    qemu_io(&export.uri(), &["read -P 5 0 64k", "read -P 3 64k 960k", "read -P 6 70M 1M"]);
    assert_eq!(export.stop(), Some(0));
}

/// A server whose lease is over is nowhere. Another copy is enough; without one the disk is left as it is.
#[test]
fn a_disk_outlives_servers_that_etcd_has_forgotten() {
    let etcd = EtcdProcess::start();
    let mut pool = Pool::start_with("forgotten", 2, &settings(&etcd));
    pool.run(&["disk", "create", "d", "--size", "64M"]);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 1M"]);
    assert_eq!(export.stop(), Some(0));
    pool.kill_server(0);
    until("its lease is over", || servers(&pool) == 1);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["read -P 1 0 1M", "write -P 2 0 1M"]);
    assert!(pool.has_said("server 1 is not there"));
    let shown = pool.json(&["disk", "show", "d"]);
    assert_eq!((shown["lost_bytes"].clone(), shown["short_bytes"].clone()), (0.into(), (64 << 20).into()));
    assert_eq!(export.stop(), Some(0));
    pool.add_server();
    pool.kill_server(1);
    until("its lease is over", || servers(&pool) == 1);
    pool.fails(&["disk", "export", "d", "--nbd", &pool.socket("d")], 1, "not there: 2.");
    pool.fails(&["disk", "rm", "d"], 1, "--force");
    let shown = pool.json(&["disk", "show", "d"]);
    assert_eq!((shown["lost_bytes"].clone(), shown["generation"].clone()), (0.into(), 2.into()));
}

/// Copies that a dead server had are made again at one that came later, while the disk is exported.
#[test]
fn a_server_that_comes_is_used() {
    let etcd = EtcdProcess::start();
    let mut pool = Pool::start_with("comes", 2, &settings(&etcd));
    pool.run(&["disk", "create", "d", "--size", "64M"]);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 1M"]);
    pool.kill_server(0);
    until("the dead one is given up", || {
        qemu_io(&export.uri(), &["write -P 2 0 1M"]);
        pool.json(&["disk", "show", "d"])["short_bytes"] != 0
    });
    pool.add_server();
    until("there are two copies", || pool.is_whole_without("d", 0));
    pool.kill_server(1);
    qemu_io(&export.uri(), &["read -P 2 0 1M", "write -P 3 0 1M", "read -P 3 0 1M"]);
    assert_eq!(export.stop(), Some(0));
}

#[test]
fn settings_are_checked_and_options_beat_them() {
    let etcd = EtcdProcess::start_with(Scheme::Tls);
    let tls = format!("cluster = \"etcds://{}/test\"\nca = {:?}\n", etcd.endpoint(), etcd.certificate());
    let pool = Pool::start_with("settings", 1, &tls);
    assert_eq!(servers(&pool), 1);
    pool.run(&["disk", "create", "d", "--size", "4M", "--copies", "1"]);
    let cluster = |address: &'static str| ["pool", "ls", "--cluster", address];
    pool.fails(&cluster("etcd://127.0.0.1:1"), 2, "etcds://");
    pool.fails(&cluster("http://127.0.0.1:1"), 2, "etcd://HOST:PORT");
    pool.fails(&cluster("etcds://127.0.0.1:1"), 3, "does not answer");
    let elsewhere = format!("etcds://{}/elsewhere", etcd.endpoint());
    pool.fails(&["pool", "ls", "--cluster", &elsewhere], 2, "no server is in etcd");
    pool.fails(&["disk", "show", "d", "--cluster", &elsewhere], 1, "belongs to the pool test");
    let serve = ["pool", "serve", "--size", "70M", "--listen", "127.0.0.1:0"];
    pool.fails(&[&serve[..4], &["--listen", "0.0.0.0:0"]].concat(), 2, "the address that clients reach");
    let thief = pool.beside("thief");
    thief.fails(&serve, 1, "another key");
    std::fs::write(pool.file("pool.toml"), "clutser = \"etcd://a:1\"\n").unwrap();
    pool.fails(&["disk", "ls"], 1, "clutser");
}
