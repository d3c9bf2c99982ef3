//! Servers that are watched, and emptied while their disks are used.

use std::process::{Command, Stdio};

use crate::pool::{Pool, text, tool};
use crate::rig::until;
use crate::{noise, qemu_io};

/// What each server has, and how it is.
pub fn servers(pool: &Pool) -> Vec<(u64, String)> {
    let sample = pool.json(&["pool", "top", "--interval", "0.1"]);
    let row =
        |row: &serde_json::Value| (row["used_bytes"].as_u64().unwrap(), row["state"].as_str().unwrap().to_owned());
    sample.as_array().unwrap().iter().map(row).collect()
}

/// Makes this machine's key one that may drain, and waits until the server knows.
pub fn become_admin(pool: &Pool, server: &str) {
    let key = pool.json(&["pool", "key", "ls"])[0]["public_key"].as_str().unwrap().to_owned();
    pool.run(&["pool", "key", "add", &key, "--admin"]);
    pool.fails(&["pool", "key", "add", &key, "--admin"], 1, "already, as self");
    until("the server knows", || pool.output(&["pool", "drain", server, "--cancel"]).status.success());
}

/// The only copies of pages move while they are read and written, and the server ends then.
#[test]
fn a_server_is_drained_and_ends() {
    let mut pool = Pool::start("drain", 2);
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 4M", "write -P 2 32M 4M"]);
    let full = servers(&pool).iter().position(|(bytes, _)| *bytes > 0).expect("a server has it");
    assert_eq!(servers(&pool)[1 - full], (0, "up".to_owned()));
    let number = (full + 1).to_string();
    pool.fails(&["pool", "drain", "9"], 4, "no server 9");
    // Whoever may use it may not end it.
    pool.fails(&["pool", "drain", &number], 1, "--admin");
    pool.fails(&["pool", "drain", &number, "--cancel"], 1, "--admin");
    assert_eq!(servers(&pool)[full].1, "up");
    become_admin(&pool, &number);
    let fio = Command::new("fio")
        .args(["--name=v", "--ioengine=nbd", &format!("--uri={}", export.uri()), "--rw=randwrite", "--bs=4k"])
        .args(["--offset=8M", "--size=16M", "--verify=crc32c", "--verify_fatal=1", "--loops=4", "--iodepth=8"])
        .current_dir(&pool.dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fio; scripts/install-deps.sh test installs it");
    let drained = pool.run(&["pool", "drain", &number]);
    assert!(drained.contains("64M to move") && drained.ends_with("has nothing left, and ends\n"), "{drained}");
    let fio = fio.wait_with_output().unwrap();
    assert!(fio.status.success(), "{}{}", text(&fio.stdout), text(&fio.stderr));
    assert_eq!(pool.wait_server(full), Some(0));
    qemu_io(&export.uri(), &["read -P 1 0 4M", "read -P 2 32M 4M", "write -P 3 0 1M", "read -P 3 0 1M"]);
    assert_eq!(export.stop(), Some(0));
}

/// One that is stopped by its service manager leaves nothing behind: what only it has moves first.
#[test]
fn a_server_that_is_terminated_ends_when_its_pages_have_moved() {
    let mut pool = Pool::start("terminate", 2);
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 4M", "write -P 2 60M 4M"]);
    let full = servers(&pool).iter().position(|(bytes, _)| *bytes > 0).expect("a server has it");
    pool.terminate_server(full);
    assert_eq!(pool.wait_server(full), Some(0));
    qemu_io(&export.uri(), &["read -P 1 0 4M", "read -P 2 60M 4M", "write -P 3 0 1M", "read -P 3 0 1M"]);
    let shown = pool.json(&["disk", "show", "d"]);
    assert_eq!((shown["lost_bytes"].clone(), shown["servers"][0]["id"].clone()), (0.into(), (2 - full).into()));
    assert_eq!(export.stop(), Some(0));
}

/// Pages that have nowhere to go stay, and so does their server.
#[test]
fn a_drain_loses_nothing_and_is_called_off() {
    let mut pool = Pool::start("stuck", 1);
    pool.run(&["disk", "create", "d", "--size", "128M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    qemu_io(&export.uri(), &["write -P 1 0 4M"]);
    become_admin(&pool, "1");
    pool.fails(&["pool", "drain", "1", "--timeout", "1"], 1, "64M is still at server 1");
    assert_eq!(servers(&pool), [(64 << 20, "draining".to_owned())]);
    assert!(pool.has_said("self asks this server to move everything away"));
    qemu_io(&export.uri(), &["read -P 1 0 4M", "write -P 2 0 1M"]);
    assert_eq!(pool.run(&["pool", "drain", "1", "--cancel"]), "server 1 goes on lending\n");
    assert_eq!(servers(&pool), [(64 << 20, "up".to_owned())]);
    qemu_io(&export.uri(), &["read -P 2 0 1M", "write -P 3 100M 1M", "read -P 3 100M 1M"]);
    pool.kill_server(0);
    pool.fails(&["pool", "drain", "1"], 1, "does not answer");
    let rows = pool.json(&["pool", "top", "--interval", "0.1"]);
    assert_eq!((rows[0]["state"].clone(), rows[0]["used_bytes"].clone()), ("silent".into(), serde_json::Value::Null));
    let table = pool.run(&["pool", "top", "--batch", "2", "--interval", "0.1"]);
    assert_eq!(table.matches("SERVER").count(), 2, "{table}");
    pool.fails(&["pool", "top"], 2, "not a terminal");
}

/// A server whose host gets short of memory lends nothing more, then has what it lent moved elsewhere; when its host has
/// memory again, it lends again.
#[test]
fn a_host_that_is_short_of_memory_gets_it_back() {
    let pool = Pool::start("short", 2);
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    let (image, back) = (pool.file("image"), pool.file("back"));
    std::fs::write(&image, noise(64 << 20)).unwrap();
    tool("nbdcopy", &[&image, &export.uri()]);
    let lender = servers(&pool).iter().position(|(bytes, _)| *bytes > 0).expect("a server has it");
    let pressure = || pool.json(&["pool", "ls"])[lender]["pressure"].as_str().unwrap().to_owned();
    assert_eq!(pressure(), "none");
    pool.set_available(lender, 7);
    until("it says so", || pool.has_said("no new slabs are lent"));
    assert_eq!(pressure(), "yellow");
    pool.set_available(lender, 4);
    until("all has moved", || servers(&pool)[lender].0 == 0);
    assert!(pool.has_said("clients are asked"));
    tool("nbdcopy", &[&export.uri(), &back]);
    tool("cmp", &[&image, &back]);
    pool.set_available(lender, 50);
    until("it is over", || pool.has_said("memory is not short any more"));
    assert_eq!(pressure(), "none");
    pool.set_available(1 - lender, 4);
    until("all has come back", || servers(&pool)[1 - lender].0 == 0);
    assert_eq!(servers(&pool)[lender].0, 64 << 20);
    tool("nbdcopy", &[&export.uri(), &back]);
    tool("cmp", &[&image, &back]);
    assert_eq!(export.stop(), Some(0));
}

/// A machine that borrows does not lend, nor the other way round, unless it is told to.
#[test]
fn who_borrows_does_not_lend() {
    let pool = Pool::start("circle", 1);
    pool.run(&["disk", "create", "d", "--size", "64M", "--copies", "1"]);
    let export = pool.export("d", &[]);
    let serve = ["pool", "serve", "--size", "70M", "--listen", "127.0.0.1:0", "--id", "9"];
    pool.fails(&serve, 1, "--also-borrow");
    assert_eq!(export.stop(), Some(0));
    let lender = pool.start_in_front(&serve);
    pool.fails(&["disk", "export", "d", "--nbd", &pool.socket("d")], 1, "lends memory already");
    assert_eq!(lender.stop(), Some(0));
}
